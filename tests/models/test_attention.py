import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.models import attention
from jlade.models.attention import attend


def plain_attention(queries, keys, values, cached_keys, cached_values, length, mask, positions, window=99):
    """One query, one head and one softmax at a time."""
    batch_size, block_size, heads, head_dim = queries.shape
    group = heads // keys.shape[2]
    out = np.zeros(queries.shape)
    for b, t, h in np.ndindex(batch_size, block_size, heads):
        prefix = [row for row in range(length[b]) if positions[b, t] - row < window]
        block = [i for i in range(block_size) if mask[t, i] and positions[b, t] - positions[b, i] < window]
        seen_keys = np.concatenate([cached_keys[b, h // group, prefix], keys[b, block, h // group]])
        seen_values = np.concatenate([cached_values[b, h // group, prefix], values[b, block, h // group]])
        scores = seen_keys @ queries[b, t, h] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ seen_values
    return out


def random_case(seed: int, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = [(3, 5, 4, 6), (3, 5, 2, 6), (3, 5, 2, 6), (3, 2, 9, 6), (3, 2, 9, 6)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    mask = rng.random((5, 5)) < 0.5
    return [jnp.asarray(a, dtype) for a in arrays], np.array([0, 4, 9], np.int32), mask | np.eye(5, dtype=bool)


@pytest.mark.parametrize("chunk", [1, 4, 9, 256])
@pytest.mark.parametrize("window", [None, 3])
def test_equals_plain_attention(window, chunk, monkeypatch):
    """Whether or not the chunks divide the cache of 9 rows, of which the sequences use 0, 4 and 9."""
    monkeypatch.setattr(attention, "CHUNK", chunk)
    arrays, length, mask = random_case(chunk)
    positions = length[:, None] + np.array([0, 1, 2, 1, 2], np.int32)
    got = jax.jit(functools.partial(attend, window=window))(*arrays, length, mask, positions)
    expected = plain_attention(*map(np.asarray, arrays), length, mask, positions, window or 99)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_bfloat16_keeps_its_type_and_is_close():
    arrays, length, mask = random_case(0, jnp.bfloat16)
    got = attend(*arrays, length, mask)
    assert got.dtype == jnp.bfloat16
    expected = plain_attention(*(np.asarray(a, np.float32) for a in arrays), length, mask, np.zeros((3, 5)))
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.03)


def test_rows_of_the_cache_beyond_its_length_are_not_read():
    arrays, length, mask = random_case(0)
    unused = np.arange(9)[None, None, :, None] >= length[:, None, None, None]
    poisoned = [*arrays[:3], *(jnp.where(unused, 1e30, a) for a in arrays[3:])]
    np.testing.assert_array_equal(attend(*poisoned, length, mask), attend(*arrays, length, mask))
