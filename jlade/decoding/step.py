"""One step of lookahead decoding, Algorithm 2 of arXiv 2402.02057: forward, verify, learn, draft, commit."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.constraints import constraint as constraints
from jlade.decoding import prefill, reading, sampling, sharding
from jlade.decoding.block import Block, lay_out
from jlade.decoding.predict import Predictions, predict
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.decoding.verification import Verdict, accept, verify
from jlade.drafts import graded
from jlade.drafts.source import Step, Text
from jlade.drafts.sources import Drafts
from jlade.lookahead import window
from jlade.lookahead.adaptive import Level
from jlade.models.base import Params


class Seen(NamedTuple):
    """The result of the forward pass over a block, on several devices that of the device's share."""

    logits: jax.Array  # [B, R, V]
    # [B, R, k] int32, tokens of the highest logits, where rows read [B, T, k]; None if no source has use for them
    best: jax.Array | None
    block_kv: Any  # keys and values of the block's tokens, for `Decoder.commit`


def step(
    params: Params, state: DecodeState, config: DecodeConfig, level: Level, until: jax.Array | None = None
) -> DecodeState:
    """Returns the state after one step. A sequence that is done stays as it is.

    On a mesh this is part of a `jax.shard_map`: each device has the sequences of its `data` group, computes its
    share of their blocks, and learns the predictions of the others after the forward pass.

    Args:
      params: the decoder's parameters.
      state: before the step. Its drafts were made at the end of the previous step: XLA would copy a pool or a table
        that one step reads before it writes.
      config: the static settings; `config.lookahead` is the full width.
      level: the width of this step. Its window has all columns of the state's or none, and its drafts are the first of
        the state's.
      until: for rows that read, see `reading.add`; None where none does.
    """
    block = lay_out(state, config, level.setting)
    if until is not None:
        block = reading.add(block, state, until, config)
    seen = forward(params, state, block, config, level)

    def finish(state: DecodeState, block: Block, logits: jax.Array, best: jax.Array | None) -> Any:
        """Returns the state of one sequence after the step, but for its cache, and the verdict."""
        before = state if until is None else reading.waiting(state)
        predictions = predict(before, block, logits, config, level.setting)
        verdict = verify(before, block, predictions, config, level.setting)
        accepted = after = accept(before, block, verdict)
        if until is not None:
            after = reading.advance(state, accepted, block)
        if level.drafts:
            of_outputs = best if best is None or until is None else best[block.outputs]
            drafts = learn(before, accepted, block, of_outputs, predictions, verdict, config, level)
            if until is not None:
                drafts = reading.learn(drafts, state, block, best, config)
            drafts = draft(after, drafts, config)
        else:
            drafts = state.memory.drafts.none()
        memory, moved = dataclasses.replace(state.memory, drafts=drafts), advance(before, accepted, predictions, level)
        return dataclasses.replace(after, memory=memory, window=moved), verdict

    axes = sharding.batch_axes(sharding.state_specs(state.inputs, config))
    # Sequences may share the pages of a cache: it is no array of theirs.
    axes, rest = (dataclasses.replace(x, memory=dataclasses.replace(x.memory, cache=None)) for x in (axes, state))
    finish_all = jax.vmap(finish, in_axes=(axes, block.axes, 0, 0), out_axes=(axes, 0))
    after, verdict = finish_all(rest, block, seen.logits, seen.best)
    (block_kv, indices), num_accepted = block.accepted(seen.block_kv, verdict.path), verdict.num_accepted
    if until is not None:
        indices, num_accepted = reading.committed(block, indices, num_accepted)
    cache = config.decoder.commit(state.memory.cache, block_kv, indices, num_accepted)
    return dataclasses.replace(after, memory=dataclasses.replace(after.memory, cache=cache))


def forward(params: Params, state: DecodeState, block: Block, config: DecodeConfig, level: Level) -> Seen:
    """Runs the model over the block, whose tokens see the cache and what the block's mask allows."""
    positions = (state.num_tokens - 1)[:, None] + jnp.broadcast_to(block.positions, block.tokens.shape)
    hidden, block_kv = config.decoder.forward(params, block.tokens, positions, state.memory.cache, block.mask)
    logits = config.decoder.logits(params, hidden[:, block.outputs])
    if not (level.drafts and config.sources.readers.sources):
        best = None
    elif block.num_read is None:
        best = graded.best(logits, config.vocabulary)
    else:
        best = prefill.best(params, hidden, config.decoder, config.vocabulary)
    return Seen(logits, best, block_kv)


def learn(
    state: DecodeState,
    after: DecodeState,
    block: Block,
    best: jax.Array | None,
    predictions: Predictions,
    verdict: Verdict,
    config: DecodeConfig,
    level: Level,
) -> Drafts:
    """Returns the drafts of the step with the states and the record of their sources after it."""
    columns = state.window[:, : level.setting.window_size]
    ngrams = window.ngrams(columns, state.tokens[state.num_tokens - 1], predictions.window)
    # Before, the columns hold tokens of the draw.
    are_from_model = ~state.done & (state.num_steps >= level.setting.ngram_size - 2)
    shown = Step(
        text=after.tokens,
        before=state.num_tokens,
        length=after.num_tokens,
        max_accepted=level.setting.max_accepted,
        window=columns,
        ngrams=(ngrams, jnp.broadcast_to(are_from_model, predictions.window.shape)),
        tree=block.tree,
        path=verdict.path,
        predictions=predictions.tokens,
        best=None if best is None else block.gather(best),
    )
    return config.sources.learn(state.memory.drafts, verdict.tokens, verdict.num_accepted, shown)


def draft(after: DecodeState, drafts: Drafts, config: DecodeConfig) -> Drafts:
    """Returns the drafts for the next step."""
    inputs = after.inputs
    noise = sampling.noise_ahead(
        inputs.key, after.num_tokens, inputs.sampling, config.lookahead, config.decoder.vocab_size
    )
    guide = constraints.guide(inputs.constraint, after.constraint_state)
    text = Text(after.tokens, after.num_tokens, noise, guide, inputs.shared, drafts.states)
    return config.sources.draft(drafts.record, text, inputs.has_drafts)


def advance(state: DecodeState, after: DecodeState, predictions: Predictions, level: Level) -> jax.Array:
    """Returns the next window, given the state with its accepted tokens; a level without one leaves it as it is."""
    setting = level.setting
    if setting.window_size == 0:
        return state.window
    if setting.window_advance == "token":
        key = sampling.key_at(state.inputs.key, sampling.WINDOW, state.num_tokens)
        shape = setting.max_accepted - 1, setting.window_size
        drawn = window.draw(key, after.tokens, after.num_tokens, math.prod(shape)).reshape(shape)
        num_accepted = jnp.maximum(after.num_tokens - state.num_tokens, 1)
        advanced = window.advance_by_token(state.window, predictions.window, drawn, num_accepted)
    else:
        advanced = window.advance(state.window, predictions.window)
    return jnp.where(state.done, state.window, advanced)
