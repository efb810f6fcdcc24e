"""From the logits of a block to the tokens that the model predicts, for one sequence.

Controls that no sequence of a batch needs are left out, at compilation if they are None, else by `if_any`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.config import FILTERS, PENALTIES
from jlade.constraints import constraint as constraints
from jlade.decoding import sampling
from jlade.decoding.block import Block
from jlade.decoding.sampling import Sampling
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts.branch import if_any
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
    processed: jax.Array | None  # [R, V or V'] float32, after penalties, temperature and filters; None if no use
    states: Any  # of the constraint, after the current token and the drafts [1 + M, ...]; None without a constraint
    sharpened: jax.Array | None  # [R, V or V'] float32, to draw from, one token at temperature 0; None if no use
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
    choose = functools.partial(_choose, vocabulary=vocabulary, config=config, level=level)
    arguments = _controls_of(state), _outputs_of(block), logits, positions
    is_controlled = _is_controlled(state, vocabulary)
    if is_controlled is None or rejects(state, level):
        chosen = choose(*arguments)
    else:
        chosen = if_any(is_controlled, choose, functools.partial(_choose_plainly, choose=choose), *arguments)

    drawn, greedy = block.gather(chosen.drawn), block.gather(chosen.greedy)
    first_draft = 1 + level.setting.window_size
    return Predictions(
        window=(greedy if level.setting.ngrams.window_draw == "greedy" else drawn)[1:first_draft],
        tokens=jnp.append(drawn[:1], drawn[first_draft:]),
        logits=logits,
        processed=chosen.processed,
        states=chosen.states,
        sharpened=chosen.sharpened,
        are_finite=jnp.isfinite(chosen.highest),
    )


class _Chosen(NamedTuple):
    """The tokens after the outputs of a block, and more of what `Predictions` have."""

    drawn: jax.Array  # [R] int32
    greedy: jax.Array  # [R] int32, the most probable ones
    highest: jax.Array  # [R] float32, the processed logits of these
    processed: jax.Array | None
    states: Any
    sharpened: jax.Array | None


def _controls_of(state: DecodeState) -> DecodeState:
    """Returns the part of a state that the controls of tokens depend on."""
    inputs = dataclasses.replace(state.inputs, has_drafts=None, has_logprobs=None, costs=None, shared={})
    nothing: Any = dict.fromkeys(("tokens", "memory", "window", "info", "pace", "done", "num_steps", "stop_state"))
    return dataclasses.replace(state, inputs=inputs, **nothing)


def _outputs_of(block: Block) -> Block:
    """Returns the part of a block that its outputs depend on, but for their places."""
    nothing: Any = dict.fromkeys(("tokens", "positions", "mask", "outputs", "makes_step", "num_read"))
    return dataclasses.replace(block, **nothing)


def _is_controlled(state: DecodeState, vocabulary: VocabularyShard) -> jax.Array | None:
    """Returns whether a token may be another than the model's most probable one, [] bool; None if no control may be."""
    stopping, constraint, controls = state.inputs.stopping, state.inputs.constraint, state.inputs.sampling
    reasons = []
    if any(value is not None for value in vars(controls).values()):
        reasons = [controls.draws, controls.uses(*FILTERS, *PENALTIES, "logit_bias", vocab_size=vocabulary.size)]
    if stopping.min_new_tokens is not None:
        reasons.append(state.num_tokens - state.inputs.lengths < stopping.min_new_tokens)
    if constraint is not None:
        reasons.append(constraints.restricts(constraint, state.constraint_state))
    return functools.reduce(jnp.logical_or, reasons) if reasons else None


def _choose(
    state: DecodeState,
    block: Block,
    logits: jax.Array,
    positions: jax.Array,
    vocabulary: VocabularyShard,
    config: DecodeConfig,
    level: Level,
) -> _Chosen:
    """Applies the controls of the request to logits, and draws tokens.

    Args:
      state, block, config, level: of the step.
      logits: [R, V'] of the tokens of `vocabulary`, which are all or the slice of the device.
      positions: [R] int32, of the outputs, relative to the position of the current token.
    """
    processed, states = _control(state, block, logits, positions, vocabulary, level)
    highest, greedy = vocabulary.highest(processed)
    drawn, sharpened = greedy, processed
    if state.inputs.sampling.temperature is not None:
        drawn, sharpened = _draw(state, processed, positions, vocabulary, level)
    kept = processed if config.logprobs else None
    return _Chosen(drawn, greedy, highest, kept, states, sharpened if rejects(state, level) else None)


def _choose_plainly(
    state: DecodeState, block: Block, logits: jax.Array, positions: jax.Array, choose: Callable[..., _Chosen]
) -> _Chosen:
    """Chooses the most probable tokens, those of a sequence without controls."""
    stopping = dataclasses.replace(state.inputs.stopping, min_new_tokens=None)
    inputs = dataclasses.replace(state.inputs, stopping=stopping, sampling=Sampling(), constraint=None)
    chosen = choose(dataclasses.replace(state, inputs=inputs, counts=None), block, logits, positions)
    return chosen._replace(states=_same_states(state, block))


def _control(
    state: DecodeState,
    block: Block,
    logits: jax.Array,
    positions: jax.Array,
    vocabulary: VocabularyShard,
    level: Level,
) -> tuple[jax.Array, Any]:
    """Returns the processed logits [R, V'], and the states of the constraint, as `Predictions` has them."""
    stopping, constraint, controls = state.inputs.stopping, state.inputs.constraint, state.inputs.sampling
    states = prompt = generated = None
    if stopping.min_new_tokens is not None:
        num_generated = state.num_tokens - state.inputs.lengths + positions
        logits = sampling.ban(logits, stopping.eos_ids, num_generated < stopping.min_new_tokens, vocabulary)
    if constraint is not None:
        is_needed = constraints.restricts(constraint, state.constraint_state)
        constrain = functools.partial(_constrain, vocabulary=vocabulary, level=level)
        logits, states = if_any(is_needed, constrain, _allow_all, state, block, logits)
    if state.counts is not None:
        is_needed = controls.uses(*PENALTIES, vocab_size=vocabulary.size)
        count, shape = functools.partial(_count, vocabulary=vocabulary, level=level), logits.shape
        prompt = vocabulary.take(state.counts.prompt)
        generated = if_any(is_needed, count, lambda *_: jnp.zeros(shape, jnp.int32), state, block)
    if controls.logit_bias is not None:
        controls = dataclasses.replace(controls, logit_bias=vocabulary.take(controls.logit_bias))
    return sampling.process(logits, controls, prompt, generated), states


def _constrain(
    state: DecodeState, block: Block, logits: jax.Array, vocabulary: VocabularyShard, level: Level
) -> tuple[jax.Array, Any]:
    """Returns logits without the tokens that the constraint does not allow, and its states."""
    constraint = state.inputs.constraint
    assert constraint is not None
    states = constraints.along(constraint, state.constraint_state, block.tree, level.setting.max_accepted - 1)
    is_allowed = jax.vmap(constraint.allowed)(states)
    # Guesses of the window may be any tokens.
    guesses = jnp.ones((level.setting.window_size, vocabulary.size), bool)
    is_allowed = block.of_device(jnp.concatenate([is_allowed[:1], guesses, is_allowed[1:]]))
    # A sum, in which NaN and infinity are still seen.
    return logits + jnp.where(vocabulary.take(is_allowed), 0.0, sampling.NEVER), states


def _allow_all(state: DecodeState, block: Block, logits: jax.Array) -> tuple[jax.Array, Any]:
    return logits, _same_states(state, block)


def _same_states(state: DecodeState, block: Block) -> Any:
    """Returns the states of a constraint that allows all tokens, after the current token and after each draft."""
    number = 1 + len(block.tree.tokens)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), state.constraint_state)


def _count(state: DecodeState, block: Block, vocabulary: VocabularyShard, level: Level) -> jax.Array:
    """Returns how often each token was generated before each output [R, V'] int32."""
    assert state.counts is not None
    drafted = block.of_device(_tokens_before(block.tree, level.setting.window_size, vocabulary.size))
    return vocabulary.take(state.counts.generated[None, :] + drafted)


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
