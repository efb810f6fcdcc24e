"""Commit, in its form for TPUs and its form for other devices, against a loop over single entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.models import base

FORMS = {"tpu": base.write_slices, "default": base.scatter}
KV_HEADS, HEAD_DIM, BLOCK = 2, 3, 6
CASES = {  # capacity, lengths, indices, num_accepted
    "one sequence": (9, [4], [[0, 3, 5]], [2]),
    "nothing accepted": (9, [4], [[0, 3, 5]], [0]),
    "different lengths": (9, [0, 7, 3], [[0, 4, 5], [0, 1, 2], [5, 5, 0]], [3, 2, 0]),
    "the last entries": (9, [6], [[0, 3, 5]], [3]),
    "fewer entries left than chosen": (9, [8, 9, 7], [[0, 3, 5, 1], [0, 2, 4, 1], [0, 1, 2, 3]], [1, 0, 2]),
    "fewer entries than chosen": (3, [0, 2], [[0, 3, 5, 1], [4, 3, 5, 1]], [3, 1]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_commit_writes_the_accepted_tokens_and_nothing_else(case, form):
    arguments = make(*CASES[case])
    for got, expected in zip(jax.tree.leaves(FORMS[form](*arguments)), plain_commit(*arguments), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("form", FORMS)
def test_commit_under_vmap(form):
    arguments = make(*CASES["fewer entries left than chosen"])
    in_ones = jax.vmap(FORMS[form])(*jax.tree.map(lambda x: x[:, None], arguments))
    for got, expected in zip(jax.tree.leaves(in_ones), plain_commit(*arguments), strict=True):
        np.testing.assert_array_equal(got[:, 0], expected)


def make(capacity, lengths, indices, num_accepted):
    """Returns the arguments of a form, for two layers of keys and values that hold different numbers everywhere."""
    rng, batch_size = np.random.default_rng(0), len(lengths)

    def arrays(*shape):
        return tuple(tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)) for _ in range(2))

    layers, blocks = (
        arrays(batch_size, KV_HEADS, capacity, HEAD_DIM),
        arrays(batch_size, BLOCK, KV_HEADS, HEAD_DIM),
    )
    return layers, blocks, *(jnp.asarray(x, jnp.int32) for x in (lengths, indices, num_accepted))


def plain_commit(layers, blocks, lengths, indices, num_accepted):
    """Returns the new layers as a list of NumPy arrays, written entry by entry."""
    result = []
    for layer, block in zip(jax.tree.leaves(layers), jax.tree.leaves(blocks), strict=True):
        written = np.array(layer)
        for i, length in enumerate(lengths):
            for j in range(num_accepted[i]):
                written[i, :, length + j] = block[i, indices[i, j]]
        result.append(written)
    return result
