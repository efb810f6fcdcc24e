"""From the logits of a block to the tokens that the model predicts, for one sequence."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.constraints import constraint as constraints
from jlade.decoding import sampling
from jlade.decoding.block import Block
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts.tree import Tree
from jlade.lookahead.adaptive import Level
from jlade.vocabulary import VocabularyShard


class Predictions(NamedTuple):
    """The tokens that follow those of a block, and the logits that they come from.

    The logits are of the R outputs of the block, on several devices along `lookahead` of the device's R'. On several
    devices along `model` a row has the device's V' tokens, or all V where `predict` needs them: for rejection sampling,
    log-probabilities and filters.
    """

    window: jax.Array  # [W] int32, after the newest window row
    tokens: jax.Array  # [1 + M] int32, after the current token and the drafts
    logits: jax.Array  # [R, V or V'] float32, the model's
    processed: jax.Array  # [R, V or V'] float32, after penalties, temperature and filters
    states: Any  # of the constraint, after the current token and the drafts [1 + M, ...]; None without a constraint
    sharpened: jax.Array  # [R, V or V'] float32, of the distribution to draw from: one token at temperature 0
    are_finite: jax.Array  # [R] bool, whether `processed` have no NaN, no infinity and a token above -inf


def rejects(state: DecodeState, level: Level) -> bool:
    """Returns whether drafts are accepted by rejection sampling, Algorithm 4, not where they equal a prediction."""
    is_sampled = state.inputs.sampling.temperature is not None
    return is_sampled and level.setting.verification == "rejection" and level.setting.num_drafted > 0


def predict(state: DecodeState, block: Block, logits: jax.Array, config: DecodeConfig, level: Level) -> Predictions:
    """Returns the predictions after the outputs of a block: the controls make them of the model's logits, then a draw.

    All is of one sequence before the step, with the logits [R', V'] of the device's outputs.
    """
    vocabulary = config.vocabulary
    if rejects(state, level) or config.logprobs or state.inputs.sampling.filters:
        logits, vocabulary = vocabulary.whole(logits), VocabularyShard(vocabulary.size)
    positions = jnp.asarray(block.positions)[block.outputs]
    processed, states = _control(state, block, logits, positions, vocabulary, level)
    highest, greedy = vocabulary.highest(processed)
    drawn, sharpened = greedy, processed
    if state.inputs.sampling.temperature is not None:
        drawn, sharpened = _draw(state, processed, positions, vocabulary, level)

    drawn, greedy = block.gather(drawn), block.gather(greedy)
    first_draft = 1 + level.setting.window_size
    return Predictions(
        window=(greedy if level.setting.ngrams.window_draw == "greedy" else drawn)[1:first_draft],
        tokens=jnp.append(drawn[:1], drawn[first_draft:]),
        logits=logits,
        processed=processed,
        states=states,
        sharpened=sharpened,
        are_finite=jnp.isfinite(highest),
    )


def _control(
    state: DecodeState,
    block: Block,
    logits: jax.Array,
    positions: jax.Array,
    vocabulary: VocabularyShard,
    level: Level,
) -> tuple[jax.Array, Any]:
    """Applies the controls of the request to logits.

    Args:
      state, block, level: of the step.
      logits: [R, V'] of the tokens of `vocabulary`, which are all or the slice of the device.
      positions: [R] int32, of the outputs, relative to the position of the current token.

    Returns:
      The processed logits [R, V'], and the states of the constraint, as `Predictions` has them.
    """
    stopping, constraint, controls = state.inputs.stopping, state.inputs.constraint, state.inputs.sampling
    states = prompt = generated = None
    if stopping.min_new_tokens is not None:
        num_generated = state.num_tokens - state.inputs.lengths + positions
        logits = sampling.ban(logits, stopping.eos_ids, num_generated < stopping.min_new_tokens, vocabulary)
    if constraint is not None:
        states = constraints.along(constraint, state.constraint_state, block.tree, level.setting.max_accepted - 1)
        is_allowed = jax.vmap(constraint.allowed)(states)
        # Guesses of the window may be any tokens.
        guesses = jnp.ones((level.setting.window_size, vocabulary.size), bool)
        is_allowed = block.of_device(jnp.concatenate([is_allowed[:1], guesses, is_allowed[1:]]))
        # A sum, in which NaN and infinity are still seen.
        logits = logits + jnp.where(vocabulary.take(is_allowed), 0.0, sampling.NEVER)
    if state.counts is not None:
        drafted = block.of_device(_tokens_before(block.tree, level.setting.window_size, vocabulary.size))
        prompt = vocabulary.take(state.counts.prompt)
        generated = vocabulary.take(state.counts.generated[None, :] + drafted)
    if controls.logit_bias is not None:
        controls = dataclasses.replace(controls, logit_bias=vocabulary.take(controls.logit_bias))
    return sampling.process(logits, controls, prompt, generated), states


def _draw(
    state: DecodeState, processed: jax.Array, positions: jax.Array, vocabulary: VocabularyShard, level: Level
) -> tuple[jax.Array, jax.Array]:
    """Draws tokens with the noise of their positions, so that each is the token of plain sampling there.

    At temperature 0 they are the most probable tokens. Arguments are those of `_control`.

    Returns:
      The tokens [R] int32, and the logits of the distribution that they come from, `Predictions.sharpened`.
    """
    controls, setting = state.inputs.sampling, level.setting
    assert controls.temperature is not None
    sharpened = sampling.sharpen(processed, controls.temperature, vocabulary)
    # The farthest position is after the window's last token, or after the end of the longest draft.
    after_window = setting.window_size + setting.ngram_size - 3 if setting.window_size else 0
    farthest = max(after_window, setting.max_accepted - 1)
    predicted = state.num_tokens + jnp.arange(farthest + 1, dtype=jnp.int32)
    noise = vocabulary.take(sampling.noise_at(state.inputs.key, predicted, vocabulary.size))
    return vocabulary.argmax(sharpened + noise[positions]), sharpened


def _tokens_before(tree: Tree, window_size: int, vocab_size: int) -> jax.Array:
    """Returns the counts of tokens on the path to each output, which is on it itself [1 + W + M, V] int32.

    The current token itself does not count, nor do the window's tokens, which are guesses.
    """
    one_hot = jax.nn.one_hot(tree.tokens, vocab_size, dtype=jnp.int32)
    before = jnp.asarray(tree.form.mask).astype(jnp.int32) @ one_hot
    return jnp.pad(before, ((1 + window_size, 0), (0, 0)))
