"""A decoder under test, and the inputs that its checks share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.tree import TreeShape
from jlade.lookahead import block as blocks
from jlade.models.base import Cache, Decoder, Params

BLOCK = blocks.build(3, 4, TreeShape.chains(2, 3))  # a lookahead block
SIZE = len(BLOCK.positions)  # T = 15, its tokens
LENGTHS = np.array([6, 3, 0], np.int32)  # tokens before it, for a batch of three
CAPACITY = 16  # tokens; longer than every text here
IN_ORDER = np.tile(np.arange(SIZE, dtype=np.int32), (3, 1))  # the indices of a block; also the positions of a text
CAUSAL = np.tri(SIZE, dtype=bool)
CHOSEN = np.array([[0, 2, 9], [3, 4, 14], [1, 5, 8]], np.int32)  # tokens of a block, of which the first are accepted
NUM_ACCEPTED = np.array([1, 3, 0], np.int32)


class TestedDecoder:
    """A decoder with its parameters, compiled, and the inputs that several checks share."""

    def __init__(self, decoder: Decoder, params: Params, tolerance: float | None) -> None:
        self.decoder, self.params = decoder, params
        self.jitted_run = jax.jit(self.run_without_jit)
        self.commit: Callable[..., Cache] = jax.jit(decoder.commit)
        if tolerance is None:
            dtypes = {x.dtype for x in jax.tree.leaves((params, self.empty_cache()))}
            coarsest = max(jnp.finfo(x).eps for x in dtypes | {np.dtype(np.float32)} if jnp.issubdtype(x, np.floating))
            tolerance = float(coarsest) ** 0.5
        self.tolerance = tolerance
        self.texts, self.tokens = np.random.default_rng(0).integers(0, decoder.vocab_size, (2, 3, SIZE), dtype=np.int32)
        self.positions = LENGTHS[:, None] + BLOCK.positions

    def empty_cache(self) -> Cache:
        return self.decoder.init_cache(self.params, len(LENGTHS), CAPACITY)

    def run_without_jit(
        self, params: Params, tokens: Any, positions: Any, cache: Cache, mask: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the logits [B, T, V] of a block, and its keys and values."""
        hidden, block_kv = self.decoder.forward(params, tokens, positions, cache, mask)
        return self.decoder.logits(params, hidden), block_kv

    def run(self, tokens: Any, positions: Any, cache: Cache, mask: Any = BLOCK.mask) -> tuple[np.ndarray, Any]:
        """Returns `run_without_jit`, compiled, with the logits in NumPy."""
        logits, block_kv = self.jitted_run(self.params, tokens, positions, cache, mask)
        return np.asarray(logits), block_kv

    def read(self, texts: np.ndarray) -> tuple[np.ndarray, Any]:
        """Returns `run` of `texts` [3, SIZE] from the beginning, as one causal block."""
        return self.run(texts, IN_ORDER, self.empty_cache(), CAUSAL)

    @functools.cached_property
    def prefix(self) -> Cache:
        """The cache of the first `LENGTHS` tokens of `texts`."""
        return self.commit(self.empty_cache(), self.read(self.texts)[1], IN_ORDER, LENGTHS)

    def is_equal(self, got: Any, expected: Any) -> bool:
        """Whether two arrays differ by no more than the tolerance, without NaN."""
        difference, accepted = self._difference(got, expected)
        return difference <= accepted

    def require_equal(self, got: Any, expected: Any, message: str) -> None:
        """Raises an AssertionError with `message` unless `is_equal`."""
        difference, accepted = self._difference(got, expected)
        if not difference <= accepted:
            raise AssertionError(f"{message} (The difference is {difference:.3g}, accepted is {accepted:.3g}.)")

    def _difference(self, got: Any, expected: Any) -> tuple[float, float]:
        """Returns the largest difference of two arrays, and the largest that is accepted."""
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        return float(np.max(np.abs(got - expected))), self.tolerance * float(np.std(expected))
