"""One step of lookahead decoding, Algorithm 2 of arXiv 2402.02057: forward, verify, commit, learn, draft."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import LookaheadConfig
from jlade.decoding import sampling, sharding, shares, stopping, verification
from jlade.decoding.sampling import LogProbs
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts import suffix
from jlade.drafts.record import Record
from jlade.drafts.source import RANKS, Rows, State, Step, Text
from jlade.drafts.sources import TABLE
from jlade.drafts.tree import NONE, Tree
from jlade.lookahead import block as blocks
from jlade.lookahead import window
from jlade.lookahead.division import BATCH_AXES, Share
from jlade.lookahead.verification import Verdict
from jlade.models.base import Params

WINDOW = np.uint32(2**31 + 1)  # folded into a key for rows of the window


def step(
    params: Params, state: DecodeState, config: DecodeConfig, level: LookaheadConfig, rests: bool = False
) -> DecodeState:
    """Returns the state after one step. A sequence that is done stays as it is.

    On a mesh this is part of a `jax.shard_map`: each device has the sequences of its `data` group, computes its
    share of their blocks, and learns the predictions of the others after the forward pass.

    Args:
      params: the decoder's parameters.
      state: before the step. Its drafts were made at the end of the previous step: XLA would copy a pool or a table
        that one step reads before it writes.
      config: the static settings; `config.lookahead` is the full width.
      level: the setting of this step, one of `lookahead.adaptive.levels`: its window has all columns of the state's or
        none, and its drafts are the first of the state's.
      rests: whether the step makes no drafts, nor learns for later ones.
    """
    decoder, cache = config.decoder, state.memory.cache

    # Forward: one pass over the window and the drafts, on several devices over a share of them.
    tree = state.memory.drafts.tree.first(level.num_drafted)
    share = shares.own(tree.form, state.num_tokens, level, config.mesh)
    block = blocks.build(level.window_size, level.ngram_size, tree.form)
    offsets, mask, outputs = (block if share is None else share)[:3]
    axes = sharding.batch_axes(sharding.state_specs(state.constants, config))
    tokens = jax.vmap(functools.partial(_block_tokens, level=level), in_axes=(axes,))(state)
    if share is not None:
        tokens = jnp.take_along_axis(tokens, share.members, axis=1)
    positions = (state.num_tokens - 1)[:, None] + jnp.broadcast_to(offsets, tokens.shape)
    hidden, block_kv = decoder.forward(params, tokens, positions, cache, mask)
    logits = decoder.logits(params, hidden[:, outputs])  # [B, R, V], of a share [B, R', V']
    best = config.vocabulary.top(logits, RANKS) if config.sources().readers.sources and not rests else None

    # Verify, learn and draft, sequence by sequence.
    finish = jax.vmap(
        functools.partial(_finish, config=config, level=level, rests=rests),
        in_axes=(axes, 0, 0, None if share is None else BATCH_AXES),
        out_axes=(axes, 0, 0),
    )
    after, accepted, num_accepted = finish(state, logits, best, share)

    # Commit: only accepted tokens reach the cache.
    cache = decoder.commit(cache, *shares.of_accepted(block_kv, accepted, share), num_accepted)
    return dataclasses.replace(after, memory=dataclasses.replace(after.memory, cache=cache))


def _block_tokens(state: DecodeState, level: LookaheadConfig) -> jax.Array:
    """Returns the tokens [T] of the block of one sequence."""
    current = state.tokens[state.num_tokens - 1]
    drafts = state.memory.drafts.tree.first(level.num_drafted)
    return blocks.tokens(current, state.window[:, : level.window_size], drafts.tokens)


def _finish(
    state: DecodeState,
    logits: jax.Array,
    best: jax.Array | None,
    share: Share | None,
    *,
    config: DecodeConfig,
    level: LookaheadConfig,
    rests: bool,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Returns the state of one sequence after a step, but for its cache, and the indices of the tokens to commit.

    Args:
      state: before the step, without a batch axis.
      logits: [R, V] of the current token, the newest window row and the drafts; of a share [R', V'].
      best: [R, k] int32, the tokens of their highest logits; None if no source has use for them.
      share: the part of the block that this device computed; None for all of it.
      config, level, rests: those of `step`.

    Returns:
      The state, indices [A] int32 in the block, of which the first are accepted, and their number [] int32.
    """
    constants, tree = state.constants, state.memory.drafts.tree.first(level.num_drafted)
    new, predictions, verdict, failed, scores = verification.verify(state, tree, logits, share, config, level)
    after, num_accepted = _accept(state, tree, verdict, failed, scores)
    if best is not None:
        best = shares.of_block(best, share)
    if rests:
        drafts = state.memory.drafts.none()
    else:
        states, record = _learn(state, after, tree, verdict, new, predictions, best, config, level)
        noise = sampling.noise_ahead(
            constants.keys, after.num_tokens, constants.sampling, config.lookahead, config.decoder.vocab_size
        )
        text = Text(after.tokens, after.num_tokens, constants.corpus, noise)
        drafts = config.sources(constants.corpus is not None).draft(states, record, text)
    after = dataclasses.replace(
        after,
        memory=dataclasses.replace(state.memory, drafts=drafts),
        window=_advance(state, after, new, level),
    )
    first_draft = blocks.window(level.window_size, level.ngram_size).first_draft
    return after, jnp.append(0, first_draft + verdict.path), num_accepted


def _accept(
    state: DecodeState, tree: Tree, verdict: Verdict, failed: jax.Array, scores: LogProbs | None
) -> tuple[DecodeState, jax.Array]:
    """Returns the state with the accepted tokens, cut where the text ends, and their number.

    It ends with them if it `failed`: the model gave no finite logits for a next token.
    """
    num_accepted, ended, stop_state = stopping.cut(
        state.constants.stopping,
        state.stop_state,
        verdict.tokens,
        jnp.where(state.done, 0, verdict.num_accepted),
        state.num_tokens - state.constants.prompt_lengths,
    )
    offset = jnp.arange(len(verdict.tokens), dtype=jnp.int32)
    place = jnp.where(offset < num_accepted, state.num_tokens + offset, len(state.tokens))

    def keep(kept: jax.Array, chosen: jax.Array) -> jax.Array:
        return kept.at[place].set(chosen, mode="drop")

    def recorded(before: jax.Array, new: jax.Array) -> jax.Array:
        return before.at[state.num_steps].set(jnp.where(state.done, 0, new), mode="drop")

    info, counts, contributed = state.info, state.counts, state.info.contributed
    if counts is not None:
        counts = sampling.count_accepted(counts, verdict.tokens, num_accepted)
    if contributed is not None:
        is_from = jnp.arange(len(TABLE), dtype=jnp.int32)[:, None] == tree.sources[verdict.path][None]
        contributed += jnp.sum(is_from & (offset[None, 1:] < num_accepted), axis=1, dtype=jnp.int32)
    after = dataclasses.replace(
        state,
        tokens=keep(state.tokens, verdict.tokens),
        num_tokens=state.num_tokens + num_accepted,
        num_steps=state.num_steps + (~state.done).astype(jnp.int32),
        done=state.done | ended | failed,
        stop_state=stop_state,
        counts=counts,
        info=dataclasses.replace(
            info,
            accepted=recorded(info.accepted, num_accepted),
            num_drafted=recorded(info.num_drafted, tree.size),
            contributed=contributed,
            logprobs=jax.tree.map(keep, info.logprobs, scores),
        ),
    )
    return after, num_accepted


def _learn(
    state: DecodeState,
    after: DecodeState,
    tree: Tree,
    verdict: Verdict,
    new: jax.Array,
    predictions: jax.Array,
    best: jax.Array | None,
    config: DecodeConfig,
    level: LookaheadConfig,
) -> tuple[dict[str, State], Record | None]:
    """Returns the states of the sources, and the record of their proposals, after a step.

    Args:
      state, after: before the step, and with its accepted tokens.
      tree, verdict: the drafts, and which of them were accepted.
      new: [W] int32, the predictions at the newest window row.
      predictions: [1 + M] int32, those after the current token and the drafts.
      best: [R, k] int32, the most probable tokens after the current token, the newest window row and the drafts.
      config, level: those of `step`.
    """
    num_accepted, columns = after.num_tokens - state.num_tokens, state.window[:, : level.window_size]
    ngrams = window.ngrams(columns, state.tokens[state.num_tokens - 1], new)
    from_model = ~state.done & (state.num_steps >= level.ngram_size - 2)  # before, columns hold tokens of the draw
    rows = None
    if best is not None:
        order = _order(tree, _is_accepted(tree, verdict, num_accepted), num_accepted, level.window_size)
        rows = Rows(_pairs(state, columns, tree), best, order)
    shown = Step(
        text=after.tokens,
        before=state.num_tokens,
        length=after.num_tokens,
        max_accepted=level.max_accepted,
        ngrams=(ngrams, jnp.broadcast_to(from_model, new.shape)),
        tree=tree,
        predictions=predictions,
        rows=rows,
    )
    sources = config.sources(state.constants.corpus is not None)
    return sources.learn(state.memory.drafts, verdict.tokens, num_accepted, shown)


def _advance(state: DecodeState, after: DecodeState, new: jax.Array, level: LookaheadConfig) -> jax.Array:
    """Returns the next window, given the state with its accepted tokens; a level without one leaves it as it is."""
    if level.window_size == 0:
        return state.window
    if level.window_advance == "token":
        key = jax.random.fold_in(jax.random.fold_in(state.constants.keys, WINDOW), state.num_tokens)
        shape = level.max_accepted - 1, level.window_size
        drawn = window.draw(key, after.tokens, after.num_tokens, math.prod(shape)).reshape(shape)
        num_accepted = jnp.maximum(after.num_tokens - state.num_tokens, 1)
        advanced = window.advance_by_token(state.window, new, drawn, num_accepted)
    else:
        advanced = window.advance(state.window, new)
    return jnp.where(state.done, state.window, advanced)


def _is_accepted(tree: Tree, verdict: Verdict, num_accepted: jax.Array) -> jax.Array:
    """Returns which tokens of a tree were accepted [M]."""
    place = jnp.arange(len(tree.tokens), dtype=jnp.int32)
    within = jnp.arange(1, len(verdict.tokens), dtype=jnp.int32) < num_accepted
    return jnp.any((verdict.path[:, None] == place[None, :]) & within[:, None], axis=0)


def _pairs(state: DecodeState, columns: jax.Array, tree: Tree) -> jax.Array:
    """Returns the tokens with logits, each after the token before it: [R, 2] int32.

    These are the current token, the newest window row, and the tree.
    """
    last = suffix.last(state.tokens, state.num_tokens)[1::-1]
    parents = jnp.asarray(tree.form.parents)
    before = jnp.where(parents == Tree.CURRENT, last[1], tree.tokens[jnp.maximum(parents, 0)])
    of_tree = jnp.stack([before, tree.tokens], axis=1)
    return jnp.concatenate([last[None], window.newest_pairs(columns, last), of_tree])


def _order(tree: Tree, is_accepted: jax.Array, num_accepted: jax.Array, window_size: int) -> jax.Array:
    """Returns `Rows.order` [R]: the text counts most, then the most promising draft, then the window."""
    size = len(tree.tokens)
    of_window = jnp.arange(window_size, dtype=jnp.int32)
    of_drafts = window_size + size - jnp.arange(size, dtype=jnp.int32)
    of_text = jnp.int32(window_size + 2 * size)
    of_drafts = jnp.where(is_accepted, of_text + tree.form.depths, of_drafts)
    of_drafts = jnp.where(tree.tokens == NONE, -1, of_drafts)
    order = jnp.concatenate([of_text[None], of_window, of_drafts])
    return jnp.where(num_accepted == 0, -1, order)
