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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.config import LookaheadConfig
from jlade.constraints import constraint as constraints
from jlade.decoding import prefill, sampling, sharding
from jlade.decoding.block import Block, lay_out, passage
from jlade.decoding.predict import predict
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.decoding.verdict import Verdict, verify
from jlade.drafts import graded
from jlade.drafts.source import Passage, Step, Text
from jlade.drafts.sources import TABLE, Drafts
from jlade.drafts.tree import Tree
from jlade.lookahead import window
from jlade.lookahead.adaptive import Level
from jlade.models.base import Cache, Params


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
    outcome, accepted = find_outcome(params, state, config, level, until)
    tree = state.drafts.tree.first(level.setting.num_drafted)
    after = accept(state, tree, outcome, config, level).with_cache(config.decoder.commit(state.cache, *accepted))
    drafts = learn(state, after, tree, outcome, config, level) if level.makes_drafts else state.drafts.none()
    return after.with_drafts(drafts)


def step_at(
    params: Params, state: DecodeState, config: DecodeConfig, widths: Sequence[LookaheadConfig], level: jax.Array
) -> DecodeState:
    """Returns the state after one step at a level [] int32, that of a `Pace`: see `step`.

    The `widths` are the `adaptive.settings`: the widest first, and the plain one last, with which steps rest too. None
    has a window. Each has a forward pass of its own. All else, the larger part of a program, is compiled once.
    """
    widest, rests = Level(widths[0]), level >= len(widths)

    def at(setting: LookaheadConfig, state: DecodeState) -> tuple[Outcome, Accepted | Cache]:
        outcome, accepted = find_outcome(params, state, config, Level(setting))
        outcome, size = outcome.padded(widest.setting), setting.block_size
        if any(kv.shape[1] > size for kv in jax.tree.leaves(accepted.block_kv)):
            return outcome, config.decoder.commit(state.cache, *accepted)  # it is a cache with the block in it
        return outcome, accepted.alone(widest.setting.max_accepted)

    index = jnp.minimum(level, len(widths) - 1)
    outcome, result = jax.lax.switch(index, [functools.partial(at, setting) for setting in widths], state)
    tree = state.drafts.tree.up_to(jnp.array([setting.num_drafted for setting in widths], jnp.int32)[index])
    cache = config.decoder.commit(state.cache, *result) if isinstance(result, Accepted) else result
    after = accept(state, tree, outcome, config, widest).with_cache(cache)

    def learn_once(pending: tuple[jax.Array, Drafts]) -> tuple[jax.Array, Drafts]:
        before = state.with_drafts(pending[1])
        return jnp.zeros((), bool), learn(before, after, tree, outcome, config, widest)

    # A loop writes to pools and tables in place. Compilers copy those that a conditional returns.
    _, drafts = jax.lax.while_loop(lambda pending: pending[0], learn_once, (~rests, state.drafts))
    return after.with_drafts(drafts.none(where=rests))


class Outcome(NamedTuple):
    """What a step finds out about each sequence, fields [B, ...], before its state changes."""

    makes_step: jax.Array  # [] bool, of the `Block`
    num_read: jax.Array | None  # [] int32, of the `Block`
    verdict: Verdict
    window: jax.Array  # [W] int32, the model's tokens after the newest window row
    predictions: jax.Array  # [1 + M] int32, those after the current token and each draft
    best: jax.Array | None  # [1 + W + M, k] int32, of `Seen`, on each device those of the whole block
    passage: Passage | None  # of `Seen`

    def padded(self, setting: LookaheadConfig) -> "Outcome":
        """Returns the outcome of a batch in the shapes of a wider step without a window; zeros stand for no draft."""
        num_outputs, max_accepted = 1 + setting.num_drafted, setting.max_accepted
        verdict = self.verdict
        return self._replace(
            verdict=verdict._replace(
                tokens=_pad(verdict.tokens, max_accepted),
                path=_pad(verdict.path, max_accepted - 1),
                scores=jax.tree.map(functools.partial(_pad, size=max_accepted), verdict.scores),
            ),
            predictions=_pad(self.predictions, num_outputs),
            best=None if self.best is None else _pad(self.best, num_outputs),
        )


class Accepted(NamedTuple):
    """The arguments of `Decoder.commit` after the cache."""

    block_kv: Any
    indices: jax.Array  # [B, A] int32
    num_accepted: jax.Array  # [B] int32

    def alone(self, size: int) -> "Accepted":
        """Returns the keys and values of accepted tokens alone, in arrays [B, size, ...] with zeros at the end."""
        take: Any = jax.vmap(lambda kv, indices: kv[indices])
        block_kv = jax.tree.map(lambda kv: _pad(take(kv, self.indices), size), self.block_kv)
        indices = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (len(self.indices), size))
        return Accepted(block_kv, indices, self.num_accepted)


def _pad(array: jax.Array, size: int) -> jax.Array:
    """Returns [B, size, ...] with zeros after the entries of an array [B, T, ...]."""
    return jnp.pad(array, [(0, 0), (0, size - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])


def find_outcome(
    params: Params, state: DecodeState, config: DecodeConfig, level: Level, until: jax.Array | None = None
) -> tuple[Outcome, Accepted]:
    """Runs the model over the block of a step, and judges the drafts. Arguments are those of `step`."""
    block = lay_out(state, config, level, until)
    seen, block_kv = forward(params, state, block, config, level)

    def judge(state: DecodeState, block: Block, seen: Seen) -> Outcome:
        predictions = predict(state, block, seen.logits, config, level)
        best = None if seen.best is None else block.gather(seen.best)
        return Outcome(
            block.makes_step,
            block.num_read,
            verify(state, block, predictions, config, level),
            predictions.window,
            predictions.tokens,
            best,
            seen.passage,
        )

    outcome = jax.vmap(judge, in_axes=(_axes(state, config), block.axes, 0))(state.with_cache(None), block, seen)
    return outcome, Accepted(*block.committed(block_kv, outcome.verdict.path, outcome.verdict.num_accepted))


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


def accept(state: DecodeState, tree: Tree, outcome: Outcome, config: DecodeConfig, level: Level) -> DecodeState:
    """Returns the state after a step but for its drafts and without a cache, given the tree that the model read."""

    def of_sequence(state: DecodeState, tree: Tree, outcome: Outcome) -> DecodeState:
        after = add_to_text(state, tree, outcome)
        return dataclasses.replace(after, window=update_window(state, after, outcome, level))

    axes = _axes(state, config)
    return jax.vmap(of_sequence, in_axes=(axes, 0, 0), out_axes=axes)(state.with_cache(None), tree, outcome)


def learn(
    state: DecodeState, after: DecodeState, tree: Tree, outcome: Outcome, config: DecodeConfig, level: Level
) -> Drafts:
    """Returns the drafts for the next step, by sources that have learned from this one. `after` is of `accept`."""

    def of_sequence(state: DecodeState, after: DecodeState, tree: Tree, outcome: Outcome) -> Drafts:
        verdict, observations = outcome.verdict, observe(state, after, tree, outcome, level)
        drafts = config.sources.learn(state.drafts, verdict.tokens, verdict.num_accepted, observations)
        return draft(after, drafts, config)

    axes = _axes(state, config)
    states = state.with_cache(None), after.with_cache(None)
    return jax.vmap(of_sequence, in_axes=(axes, axes, 0, 0))(*states, tree, outcome)


def _axes(state: DecodeState, config: DecodeConfig) -> DecodeState:
    """Returns the axes of `jax.vmap` for a state without its cache: sequences may share the pages of that."""
    return sharding.batch_axes(sharding.state_specs(state.inputs, config)).with_cache(None)


def add_to_text(state: DecodeState, tree: Tree, outcome: Outcome) -> DecodeState:
    """Returns the state with the accepted tokens in its text, and the record of the step.

    A sequence that reads its prompt, whose tokens it has already, only counts those that it read.
    """
    verdict = outcome.verdict
    offset = jnp.arange(len(verdict.tokens), dtype=jnp.int32)
    index = jnp.where(offset < verdict.num_accepted, state.num_tokens + offset, len(state.tokens))
    num_new = verdict.num_accepted if outcome.num_read is None else verdict.num_accepted + outcome.num_read

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return array.at[index].set(values, mode="drop")

    def record(numbers: jax.Array, number: jax.Array) -> jax.Array:
        return numbers.at[state.num_steps].set(jnp.where(outcome.makes_step, number, 0), mode="drop")

    info, counts, contributed = state.info, state.counts, state.info.contributed
    if counts is not None:
        counts = sampling.count_accepted(counts, verdict.tokens, verdict.num_accepted)
    if contributed is not None:
        is_from = jnp.arange(len(TABLE), dtype=jnp.int32)[:, None] == tree.sources[verdict.path][None]
        contributed += jnp.sum(is_from & (offset[None, 1:] < verdict.num_accepted), axis=1, dtype=jnp.int32)
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, verdict.tokens),
        num_tokens=state.num_tokens + num_new,
        num_steps=state.num_steps + outcome.makes_step.astype(jnp.int32),
        done=state.done | verdict.ended,
        stop_state=verdict.stop_state,
        constraint_state=verdict.constraint_state,
        counts=counts,
        info=dataclasses.replace(
            info,
            accepted=record(info.accepted, verdict.num_accepted),
            num_drafted=record(info.num_drafted, tree.size),
            contributed=contributed,
            logprobs=jax.tree.map(put, info.logprobs, verdict.scores),
        ),
    )


def update_window(state: DecodeState, after: DecodeState, outcome: Outcome, level: Level) -> jax.Array:
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
        num_rows = jnp.maximum(outcome.verdict.num_accepted, 1)
        updated = window.advance_by_token(state.window, outcome.window, drawn, num_rows)
    else:
        updated = window.advance(state.window, outcome.window)
    return jnp.where(outcome.makes_step, updated, state.window)


def observe(state: DecodeState, after: DecodeState, tree: Tree, outcome: Outcome, level: Level) -> Step:
    """Returns what the sources of drafts learn from: the window's n-grams, the accepted text, and the predictions."""
    setting, verdict = level.setting, outcome.verdict
    columns = state.window[:, : setting.window_size]
    ngrams = window.ngrams(columns, state.tokens[state.num_tokens - 1], outcome.window)
    # Before N-2 steps the columns still hold tokens of the random initial window.
    are_from_model = outcome.makes_step & (state.num_steps >= setting.ngram_size - 2)
    return Step(
        text=after.tokens,
        before=state.num_tokens,
        length=state.num_tokens + verdict.num_accepted,  # without prompt tokens that the sequence reads: see `passage`
        max_accepted=setting.max_accepted,
        window=columns,
        ngrams=(ngrams, jnp.broadcast_to(are_from_model, outcome.window.shape)),
        tree=tree,
        path=verdict.path,
        predictions=outcome.predictions,
        best=outcome.best,
        passage=outcome.passage,
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
