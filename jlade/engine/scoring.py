"""Log-probabilities of the tokens of a prompt, of a chunk at a time."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade import mesh as mesh_lib
from jlade.decoding import ahead, prefill, sampling, sharding
from jlade.decoding.sampling import LogProbs
from jlade.decoding.state import DecodeConfig
from jlade.models.base import Cache, Params


class PromptLogProbs(NamedTuple):
    """The log-probabilities of a prompt under the model, in NumPy: of all tokens but the first.

    Attributes:
      logprobs: float32[L - 1].
      top_tokens: int32[L - 1, K], the most probable ones in their places, -1 for none.
      top_logprobs: float32[L - 1, K], of these.
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def join(cls, parts: list[LogProbs], number: int) -> "PromptLogProbs":
        """Returns those of a prompt from its parts, at least one, with `number` of the most probable tokens."""
        whole: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        return cls(whole.model, whole.top_tokens[:, :number], whole.top[:, :number])


def score(params: Params, cache: Cache, prompts: Any, until: int, config: DecodeConfig) -> LogProbs:
    """Returns the log-probabilities of the tokens that follow those of the next chunk, in NumPy with fields [T, ...].

    It takes a pass of its own, as that which reads the chunk computes no logits.

    Args:
      params, config: of the engine.
      cache: of the tokens before.
      prompts: [1, C] int32.
      until: the chunk ends before this token, if it does not earlier.
    """
    num_read, scores = mesh_lib.fetch((cache.length, of_chunk(params, cache, prompts, config=config)))
    read: LogProbs = jax.tree.map(lambda array: array[: until - num_read[0]], scores)
    return read


@ahead.jit(static_argnames="config")
def of_chunk(params: Params, cache: Cache, prompts: jax.Array, *, config: DecodeConfig) -> LogProbs:
    """Returns the log-probabilities [T, ...] of the tokens that follow those of a whole chunk; see `score`."""
    decoder, vocabulary = config.decoder, config.vocabulary
    chunk = prefill.fitting(config.chunks, prompts.shape[1])[0][0]
    together = math.gcd(chunk, prefill.ROWS)  # tokens whose logits are held at once

    def of_device(params: Params, cache: Cache, prompts: jax.Array) -> LogProbs:
        positions = cache.length + jnp.arange(chunk, dtype=jnp.int32)
        tokens, following = (prompts[0].at[places].get(mode="clip") for places in (positions, positions + 1))
        hidden, _ = decoder.forward(params, tokens[None], positions[None], cache, np.tri(chunk, dtype=bool))

        def of_rows(rows: tuple[jax.Array, jax.Array]) -> LogProbs:
            logits = vocabulary.whole(decoder.logits(params, rows[0][None])[0])
            return sampling.logprobs(logits, logits, rows[1], config.top_logprobs)

        rows = hidden.reshape(chunk // together, together, -1), following.reshape(-1, together)
        scores: LogProbs = jax.tree.map(lambda x: x.reshape(chunk, *x.shape[2:]), jax.lax.map(of_rows, rows))
        return scores

    specs = sharding.param_specs(params, config.mesh), sharding.cache_specs(config.decoder), PartitionSpec()
    scores: LogProbs = mesh_lib.shard(of_device, config.mesh, specs, PartitionSpec())(params, cache, prompts)
    return scores
