"""A contest of an attention kernel with plain attention on random numbers, for its trial."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.models import kv_rounding, trial
from jlade.models.attention.operands import Operands, Variation
from jlade.models.base import KVCache, commit
from jlade.models.trial import Case, Contest

Attend = Callable[..., jax.Array]  # of `Operands`, with the arguments `window` and `cap` of `attention.attend`

LENGTHS = (700, 650)  # cache entries in use of two sequences
CAPACITY = 1024
RING = 680  # the capacity with a window, below one of the lengths
WINDOW = 512
CAP = 2.0


class HeadShape(NamedTuple):
    """The heads of a model, the dtype of its queries, keys and values, and the attention of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    variation: Variation = Variation()
    kv_dtype: str | None = None  # of keys and values in 8 bits

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention.attend`."""
        named = {"window": (WINDOW, self.variation.window), "cap": (CAP, self.variation.cap)}
        return {name: value for name, (value, present) in named.items() if present}

    def __str__(self) -> str:
        parts = f"{self.heads} heads", f"{self.kv_heads} KV heads", f"head size {self.head_dim}", self.dtype
        of_cache = [] if self.kv_dtype is None else [f"cache in {self.kv_dtype}"]
        return ", ".join([*parts, *of_cache, *(name for name, here in self.variation._asdict().items() if here)])


def prepare(run: Attend, plain: Attend, device: jax.Device, shape: HeadShape) -> Contest:
    """Returns the contest of a kernel with plain attention. The exact result is that of attention in float32.

    If all tokens see a key too many or too few, the largest error is 0.1 to 0.6.
    """
    variation = shape.arguments
    cases = (_random_case(device, shape, block_size) for block_size in (trial.BLOCK, trial.PREFILL))
    step, prefill = (Case(case, _exact(case, **variation)) for case in cases)
    return Contest(_layers(run, **variation), _layers(plain, **variation), step, prefill)


class _Case(NamedTuple):
    """The arguments of attention, and the tokens to commit."""

    queries: jax.Array  # [B, T, H, D]
    block: tuple[jax.Array, ...]  # keys and values [B, T, KH, D], and their scales if they are in 8 bits
    cache: KVCache  # of one layer
    mask: jax.Array  # [T, T] bool
    positions: jax.Array  # [B, T] int32
    sinks: jax.Array | None  # [H]
    indices: jax.Array  # [B, 4] int32
    num_accepted: jax.Array  # [B] int32


def _random_case(device: jax.Device, shape: HeadShape, block_size: int) -> _Case:
    rng = np.random.default_rng(block_size)
    heads, kv_heads, _, dtype, variation, kv_dtype = shape
    batch_size, capacity = len(LENGTHS), RING if variation.window else CAPACITY
    put = functools.partial(jax.device_put, device=device)

    def draw(*sizes: int) -> jax.Array:
        return put(rng.standard_normal(sizes, np.float32).astype(jnp.dtype(dtype)))

    def draw_heads(*sizes: int) -> jax.Array:
        return draw(batch_size, *sizes, shape.head_dim)

    def draw_vectors(size: int) -> tuple[jax.Array, ...]:
        """Returns keys and values [B, size, KH, D], and their scales [B, size, KH] if they are in 8 bits."""
        vectors = draw_heads(size, kv_heads), draw_heads(size, kv_heads)
        return vectors if kv_dtype is None else kv_rounding.round_all(vectors, kv_dtype, None)

    length, names = np.array(LENGTHS, np.int32), ("keys", "values", "key_scales", "value_scales")
    cached: dict[str, Any] = {
        name: (jnp.swapaxes(x, 1, 2),) for name, x in zip(names, draw_vectors(capacity), strict=False)
    }
    return _Case(
        queries=draw_heads(block_size, heads),
        block=draw_vectors(block_size),
        cache=KVCache(**cached, length=put(length)),
        mask=put((rng.random((block_size, block_size)) < 0.5) | np.eye(block_size, dtype=bool)),
        positions=put(length[:, None] + np.arange(block_size, dtype=np.int32)),
        sinks=draw(heads) if variation.sinks else None,
        indices=put(np.tile(np.arange(4, dtype=np.int32), (batch_size, 1))),
        num_accepted=put(np.full(batch_size, 2, np.int32)),
    )


def _layers(attend: Attend, **arguments: Any) -> Callable[[_Case, jax.Array], jax.Array]:
    """Returns a program for consecutive layers, in which the queries of each are the result of the one before.

    The tokens are committed after each, as in a decode: a kernel may want the cache in a layout that `commit` does not,
    and the copies between the two take time.
    """

    def run(case: _Case, count: jax.Array) -> jax.Array:
        def layer(_: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
            queries, cache = carry
            rest = cache.length, case.mask, case.positions, case.sinks
            mixed = attend(Operands.of(queries, case.block, cache.layers[0], *rest), **arguments)
            committed = commit(cache, [case.block], case.indices, case.num_accepted)
            return mixed, dataclasses.replace(committed, length=cache.length)

        queries, _ = jax.lax.fori_loop(0, count, layer, (case.queries, case.cache))
        return queries

    return jax.jit(run)


def _exact(case: _Case, window: int | None = None, cap: float | None = None) -> np.ndarray:
    """Returns attention [B, T, H, D] in float32, by NumPy: such programs for TPUs take ten seconds to compile."""
    queries = np.asarray(jax.device_get(case.queries)).astype(np.float32)
    (keys, values), (cached_keys, cached_values) = _float32(case.block), _float32(case.cache.layers[0])
    newest, mask, positions, sinks = jax.device_get((case.cache.length - 1, case.mask, case.positions, case.sinks))
    batch_size, _, heads, head_dim = queries.shape
    sinks = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float32)
    exact = np.empty_like(queries)
    for b, h in np.ndindex(batch_size, heads):
        entries = np.arange(cached_keys.shape[2])
        key_positions = newest[b] - (newest[b] - entries) % entries.size  # negative where an entry is not in use
        seen = np.concatenate([np.tile(key_positions >= 0, (len(mask), 1)), mask], axis=1)
        if window is not None:
            seen &= positions[b, :, None] - np.append(key_positions, positions[b]) < window
        kv_head = h // (heads // keys.shape[2])
        scores = queries[b, :, h] @ np.concatenate([cached_keys[b, kv_head], keys[b, :, kv_head]]).T * head_dim**-0.5
        scores = np.where(seen, scores if cap is None else cap * np.tanh(scores / cap), -np.inf)
        highest = np.maximum(np.max(scores, axis=1, keepdims=True), sinks[h])
        weights = np.exp(scores - highest)
        mixed = weights @ np.concatenate([cached_values[b, kv_head], values[b, :, kv_head]])
        exact[b, :, h] = mixed / (np.sum(weights, axis=1, keepdims=True) + np.exp(sinks[h] - highest))
    return exact


def _float32(arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Returns keys and values in float32, given with or without their scales."""
    keys, values, *scales = (np.asarray(kv_rounding.numbers(jax.device_get(x), np.float32)) for x in arrays)
    return [x * scale[..., None] for x, scale in zip((keys, values), scales, strict=True)] if scales else [keys, values]
