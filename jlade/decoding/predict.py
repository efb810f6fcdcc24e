"""From the logits of a block to the tokens that the model predicts, for one sequence."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.config import LookaheadConfig
from jlade.constraints import constraint as constraints
from jlade.decoding import sampling as sampling_lib
from jlade.decoding.block import Block
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts.tree import Tree
from jlade.vocabulary import VocabularyShard


class Predictions(NamedTuple):
    """The tokens that follow those of a block, and the logits that they come from.

    The logits are of the R outputs of the block, on several devices along `lookahead` of the device's R'. They have all
    tokens of the vocabulary where it says V.
    """

    window: jax.Array  # [W] int32, after the newest window row
    tokens: jax.Array  # [1 + M] int32, after the current token and the drafts
    logits: jax.Array  # [R, V or V'] float32, the model's
    processed: jax.Array  # [R, V or V'] float32, after penalties, temperature and filters
    states: Any  # of the constraint, after the current token and the drafts [1 + M, ...]; None without a constraint
    sharpened: jax.Array  # [R, V or V'] float32, of the distribution to draw from; -inf for all others when greedy
    are_finite: jax.Array  # [R] bool, whether `processed` have no NaN, no infinity and a token above -inf


def rejects(state: DecodeState, level: LookaheadConfig) -> bool:
    """Returns whether drafts are accepted by rejection sampling, Algorithm 4, not where they equal a prediction."""
    is_sampled = state.inputs.sampling.temperature is not None
    return is_sampled and level.verification == "rejection" and level.num_drafted > 0


def predict(
    state: DecodeState, block: Block, logits: jax.Array, config: DecodeConfig, level: LookaheadConfig
) -> Predictions:
    """Returns the predictions after the outputs of a block.

    They are drawn with the noise of their positions, so that each is the token of plain sampling there. At temperature
    0, and in a greedy window, they are the most probable tokens.

    Args:
      state: of one sequence, before the step.
      block: of the step.
      logits: [R', V'] of the device's outputs.
      config, level: those of `step`.
    """
    inputs, sampling, vocabulary = state.inputs, state.inputs.sampling, config.vocabulary
    positions = jnp.asarray(block.positions)[block.outputs]
    if rejects(state, level) or config.logprobs or sampling.filters:
        logits, vocabulary = vocabulary.whole(logits), VocabularyShard(vocabulary.size)
    if sampling.logit_bias is not None:
        sampling = dataclasses.replace(sampling, logit_bias=vocabulary.take(sampling.logit_bias))
    processed = logits
    stopping, num_generated = inputs.stopping, state.num_tokens - inputs.lengths
    if stopping.min_new_tokens is not None:
        too_early = num_generated + positions < stopping.min_new_tokens
        processed = sampling_lib.ban(processed, stopping.eos_ids, too_early, vocabulary)
    states, constraint = None, inputs.constraint
    if constraint is not None:
        states = constraints.along(constraint, state.constraint_state, block.tree, level.max_accepted - 1)
        is_allowed = jax.vmap(constraint.allowed)(states)
        # Guesses of the window may be any tokens.
        guesses = jnp.ones((level.window_size, vocabulary.size), bool)
        is_allowed = jnp.concatenate([is_allowed[:1], guesses, is_allowed[1:]])
        is_allowed = is_allowed if block.share is None else is_allowed[block.share.rows]
        # A sum, in which NaN and infinity are still seen.
        processed = processed + jnp.where(vocabulary.take(is_allowed), 0.0, sampling_lib.NEVER)
    if state.counts is None:
        processed = sampling_lib.process(processed, sampling, None, None)
    else:
        before = _tokens_before(block.tree, level.window_size, vocabulary.size)
        generated = state.counts.generated[None, :] + (before if block.share is None else before[block.share.rows])
        prompt, generated = vocabulary.take(state.counts.prompt), vocabulary.take(generated)
        processed = sampling_lib.process(processed, sampling, prompt, generated)

    highest, greedy = vocabulary.highest(processed)
    drawn, sharpened = greedy, processed
    if sampling.temperature is not None:
        sharpened = sampling_lib.sharpen(processed, sampling.temperature, vocabulary)
        # The farthest position is after the window's last token, or after the end of the longest draft.
        after_window = level.window_size + level.ngram_size - 3 if level.window_size else 0
        farthest = max(after_window, level.max_accepted - 1)
        predicted = state.num_tokens + jnp.arange(farthest + 1, dtype=jnp.int32)
        noise = vocabulary.take(sampling_lib.noise_at(inputs.key, predicted, vocabulary.size))
        drawn = vocabulary.argmax(sharpened + noise[positions])

    end = 1 + level.window_size
    drawn, greedy = block.gather(drawn), block.gather(greedy)
    return Predictions(
        window=(greedy if level.window_draw == "greedy" else drawn)[1:end],
        tokens=jnp.append(drawn[:1], drawn[end:]),
        logits=logits,
        processed=processed,
        states=states,
        sharpened=sharpened,
        are_finite=jnp.isfinite(highest),
    )


def _tokens_before(tree: Tree, window_size: int, vocab_size: int) -> jax.Array:
    """Returns how often each token is among the earlier tokens of a draft, and it itself [1 + W + M, V] int32.

    The current token has none, and the window's tokens, which are guesses, do not count.
    """
    one_hot = jax.nn.one_hot(tree.tokens, vocab_size, dtype=jnp.int32)
    before = jnp.asarray(tree.form.mask).astype(jnp.int32) @ one_hot
    return jnp.pad(before, ((1 + window_size, 0), (0, 0)))
