"""One step of lookahead decoding, Algorithm 2 of arXiv 2402.02057.

| lines of the algorithm                                   | here                                                    |
|----------------------------------------------------------|---------------------------------------------------------|
| 2-5, the first window and an empty pool                  | `prefill.start`                                         |
| 11-19, lookahead branch: a new row of the window         | `forward`, `predict`, `update_window`                   |
| 7-9, rows of random tokens where several were accepted   | `update_window`, not by default: `window_advance`       |
| 21-24, n-grams from the pool                             | `draft`, at the end of the step before                  |
| 25-26, verification                                      | `verify`, `accept`                                      |
| 27-30, update of the n-gram pool                         | `observe`; the pool is one of the sources that learn    |

The paper has no line for the cache. A step ends with its commit: the keys and values of accepted tokens enter it.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.constraints import constraint as constraints
from jlade.decoding import prefill, sampling, sharding
from jlade.decoding.block import Block, lay_out, passage
from jlade.decoding.predict import Predictions, predict
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.decoding.verdict import Verdict, accept, verify
from jlade.drafts import graded
from jlade.drafts.source import Passage, Step, Text
from jlade.drafts.sources import Drafts
from jlade.lookahead import window
from jlade.lookahead.adaptive import Level
from jlade.models.base import Params


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
      until: for sequences that read their prompts in this step, see `lay_out`; None where none does.
    """
    block = lay_out(state, config, level, until)
    seen, block_kv = forward(params, state, block, config, level)
    finish = functools.partial(_finish, config=config, level=level)
    # The cache stays outside of `jax.vmap`: sequences may share its pages.
    axes = sharding.batch_axes(sharding.state_specs(state.inputs, config)).with_cache(None)
    finish_all = jax.vmap(finish, in_axes=(axes, block.axes, 0), out_axes=(axes, 0))
    after, verdict = finish_all(state.with_cache(None), block, seen)
    committed = block.committed(block_kv, verdict.path, verdict.num_accepted)
    return after.with_cache(config.decoder.commit(state.cache, *committed))


class Seen(NamedTuple):
    """What the forward pass over a block tells, on several devices about the device's share."""

    logits: jax.Array  # [B, R, V], after the block's outputs
    # [B, R, k] int32, graded: the most probable tokens after the outputs; None without drafts, or if no source
    # reads prompts
    best: jax.Array | None
    passage: Passage | None  # the prompt tokens that sequences read; None if none reads, or as above


def forward(params: Params, state: DecodeState, block: Block, config: DecodeConfig, level: Level) -> tuple[Seen, Any]:
    """Runs the model over the block, whose tokens see the cache and what the block's mask allows.

    Returns:
      The result, and the keys and values of the block's tokens for `Decoder.commit`.
    """
    positions = (state.num_tokens - 1)[:, None] + jnp.broadcast_to(block.positions, block.tokens.shape)
    hidden, block_kv = config.decoder.forward(params, block.tokens, positions, state.cache, block.mask)
    logits = config.decoder.logits(params, hidden[:, block.outputs])
    if not (level.makes_drafts and config.sources.readers.sources):
        return Seen(logits, None, None), block_kv
    if block.num_read is None:
        return Seen(logits, graded.best(logits, config.vocabulary), None), block_kv
    best = prefill.best(params, hidden, config.decoder, config.vocabulary)
    return Seen(logits, best[:, block.outputs], passage(state, block, best)), block_kv


def _finish(
    state: DecodeState, block: Block, seen: Seen, *, config: DecodeConfig, level: Level
) -> tuple[DecodeState, Verdict]:
    """Returns the state of one sequence after the step, and the verdict on its drafts. Neither state has the cache."""
    predictions = predict(state, block, seen.logits, config, level)
    verdict = verify(state, block, predictions, config, level)
    after = accept(state, block, verdict)
    after = dataclasses.replace(after, window=update_window(state, after, block, predictions, verdict, level))
    if not level.makes_drafts:
        return after.with_drafts(state.drafts.none()), verdict
    observations = observe(state, after, block, seen, predictions, verdict, level)
    drafts = config.sources.learn(state.drafts, verdict.tokens, verdict.num_accepted, observations)
    return after.with_drafts(draft(after, drafts, config)), verdict


def update_window(
    state: DecodeState, after: DecodeState, block: Block, predictions: Predictions, verdict: Verdict, level: Level
) -> jax.Array:
    """Returns the next window, given the text after the step; a level without a window leaves it as it is.

    The predictions become the newest row and the oldest row leaves. If a row leaves for each accepted token, the
    rows beyond the first are drawn from the text.
    """
    setting = level.setting
    if setting.window_size == 0:
        return state.window
    if setting.ngrams.window_advance == "token":
        key = sampling.key_at(state.inputs.key, sampling.WINDOW, state.num_tokens)
        shape = setting.max_accepted - 1, setting.window_size
        drawn = window.draw(key, after.tokens, after.num_tokens, math.prod(shape)).reshape(shape)
        num_rows = jnp.maximum(verdict.num_accepted, 1)
        updated = window.advance_by_token(state.window, predictions.window, drawn, num_rows)
    else:
        updated = window.advance(state.window, predictions.window)
    return jnp.where(block.makes_step, updated, state.window)


def observe(
    state: DecodeState,
    after: DecodeState,
    block: Block,
    seen: Seen,
    predictions: Predictions,
    verdict: Verdict,
    level: Level,
) -> Step:
    """Returns what the sources of drafts learn from: the window's n-grams, the accepted text, and the predictions."""
    setting = level.setting
    columns = state.window[:, : setting.window_size]
    ngrams = window.ngrams(columns, state.tokens[state.num_tokens - 1], predictions.window)
    # Before N-2 steps the columns still hold tokens of the random initial window.
    are_from_model = block.makes_step & (state.num_steps >= setting.ngram_size - 2)
    return Step(
        text=after.tokens,
        before=state.num_tokens,
        length=state.num_tokens + verdict.num_accepted,  # without prompt tokens that the sequence reads: see `passage`
        max_accepted=setting.max_accepted,
        window=columns,
        ngrams=(ngrams, jnp.broadcast_to(are_from_model, predictions.window.shape)),
        tree=block.tree,
        path=verdict.path,
        predictions=predictions.tokens,
        best=None if seen.best is None else block.gather(seen.best),
        passage=seen.passage,
    )


def draft(after: DecodeState, drafts: Drafts, config: DecodeConfig) -> Drafts:
    """Returns the drafts for the next step."""
    inputs = after.inputs
    noise = sampling.noise_ahead(
        inputs.key, after.num_tokens, inputs.sampling, config.lookahead, config.decoder.vocab_size
    )
    guide = constraints.guide(inputs.constraint, after.constraint_state)
    text = Text(after.tokens, after.num_tokens, noise, guide, inputs.shared, drafts.states)
    return config.sources.draft(drafts.record, text, inputs.has_drafts)
