"""One step of lookahead decoding, Algorithm 2 of arXiv 2402.02057: forward, verify, commit, learn, draft."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding import prediction, sharding, stopping
from jlade.decoding import sampling as sampling_lib
from jlade.decoding.prediction import Situation
from jlade.decoding.state import DecodeConfig, DecodeState, LogProbs
from jlade.drafts import suffix
from jlade.drafts.source import RANKS, Rows, Step, Text
from jlade.drafts.sources import TABLE
from jlade.drafts.tree import NONE, Form, Shape, Tree
from jlade.lookahead import block as blocks
from jlade.lookahead import division, window
from jlade.lookahead.division import Share
from jlade.lookahead.verification import Verdict, verify_by_matching, verify_by_rejection
from jlade.mesh import LOOKAHEAD
from jlade.models.base import Params

NO_POSITION = np.uint32(2**31)  # folded into a key for noise that belongs to no position


def step(params: Params, state: DecodeState, config: DecodeConfig, level: LookaheadConfig) -> DecodeState:
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
    """
    decoder, cache = config.decoder, state.memory.cache
    tree = state.memory.drafts.tree.first(level.num_drafted)

    # Forward: one pass over the window and the drafts, on several devices over a share of them.
    block = blocks.build(level.window_size, level.ngram_size, tree.form)
    share = _share(tree.form, state.num_tokens, level, config.mesh)
    positions, mask, outputs = (block if share is None else share)[:3]
    tokens = jax.vmap(functools.partial(_block_tokens, level=level))(state.tokens, state.num_tokens, state.window, tree)
    if share is not None:
        tokens = jnp.take_along_axis(tokens, share.members, axis=1)
    positions = (state.num_tokens - 1)[:, None] + jnp.broadcast_to(positions, tokens.shape)
    hidden, block_kv = decoder.forward(params, tokens, positions, cache, mask)
    logits = decoder.logits(params, hidden[:, outputs])  # [B, R, V], of a share [B, R', V']
    best = config.vocabulary.top(logits, RANKS) if config.sources().readers.sources else None

    # Verify, learn, and draft for the next step, sequence by sequence.
    axes = sharding.batch_axes(sharding.state_specs(state.constants, config))
    share_axes = None if share is None else division.BATCH_AXES
    finish = jax.vmap(
        functools.partial(_finish, config=config, level=level),
        in_axes=(axes, 0, 0, share_axes),
        out_axes=(axes, 0, 0),
    )
    after, accepted, num_accepted = finish(state, logits, best, share)

    # Commit: only accepted tokens reach the cache.
    if share is not None:
        place = jnp.take_along_axis(share.delivered_tokens, accepted, axis=1)
        block_kv = jax.tree.map(lambda kv: jax.vmap(_from_shares)(kv, place), block_kv)
        accepted = jnp.broadcast_to(jnp.arange(accepted.shape[1], dtype=jnp.int32), accepted.shape)
    cache = decoder.commit(cache, block_kv, accepted, num_accepted)
    return dataclasses.replace(after, memory=dataclasses.replace(after.memory, cache=cache))


def _block_tokens(
    text: jax.Array, length: jax.Array, window: jax.Array, tree: Tree, level: LookaheadConfig
) -> jax.Array:
    return blocks.tokens(text[length - 1], window[:, : level.window_size], tree.tokens)


def _finish(
    state: DecodeState,
    logits: jax.Array,
    best: jax.Array | None,
    share: Share | None,
    *,
    config: DecodeConfig,
    level: LookaheadConfig,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Returns the state of one sequence after a step, but for its cache, and the indices of the tokens to commit.

    Args:
      state: before the step, without a batch axis.
      logits: [R, V] of the current token, the newest window row and the drafts; of a share [R', V'].
      best: [R, k] int32, the tokens of their highest logits; None if no source has use for them.
      share: the part of the block that this device computed; None for all of it.
      config, level: those of `step`.

    Returns:
      The state, indices [A] int32 in the block, of which the first are accepted, and their number [] int32.
    """
    constants, drafts = state.constants, state.memory.drafts
    tree = drafts.tree.first(level.num_drafted)
    columns = state.window[:, : level.window_size]

    # Verify, and cut where the text ends, before anything is kept.
    new, verdict, logprobs = _verify(state, tree, logits, share, config, level)
    num_accepted, ended, stop_state = stopping.cut(
        constants.stopping,
        state.stop_state,
        verdict.tokens,
        jnp.where(state.done, 0, verdict.num_accepted),
        state.num_tokens - constants.prompt_lengths,
    )
    num_tokens = state.num_tokens + num_accepted
    offset = jnp.arange(level.max_accepted, dtype=jnp.int32)
    place = jnp.where(offset < num_accepted, state.num_tokens + offset, len(state.tokens))

    def keep(kept: jax.Array, chosen: jax.Array) -> jax.Array:
        return kept.at[place].set(chosen, mode="drop")

    text = keep(state.tokens, verdict.tokens)
    counts = state.counts
    if counts is not None:
        counts = sampling_lib.count_accepted(counts, verdict.tokens, num_accepted)

    # Learn: the sources see the n-grams of the window and the predictions, and the window moves on.
    is_accepted = _is_accepted(tree, verdict, num_accepted)
    keys, ngrams = window.ngrams(columns, state.tokens[state.num_tokens - 1], new)
    from_model = ~state.done & (state.num_steps >= level.ngram_size - 2)  # before, columns hold tokens of the draw
    rows = None
    if best is not None:
        best = best if share is None else _from_shares(best, share.delivered_outputs)
        rows = Rows(_pairs(state, columns, tree), best, _order(tree, is_accepted, num_accepted, level.window_size))
    sources = config.sources(constants.corpus is not None)
    shown = Step(
        text,
        state.num_tokens,
        num_tokens,
        level.max_accepted,
        (keys, ngrams, jnp.broadcast_to(from_model, keys.shape)),
        rows,
    )
    states, records = sources.learn(drafts, verdict.tokens, num_accepted, shown)
    after = state.window  # a level without a window leaves it to the wide ones
    if level.window_size:
        after = jnp.where(state.done, columns, window.advance(columns, new))

    # Draft for the next step.
    noise = sampling_lib.noise_ahead(
        constants.keys, num_tokens, constants.sampling, config.lookahead, config.vocabulary.size
    )
    drafts = sources.draft(states, records, Text(text, num_tokens, constants.corpus, noise))

    def recorded(before: jax.Array, new: jax.Array) -> jax.Array:
        return before.at[state.num_steps].set(jnp.where(state.done, 0, new), mode="drop")

    of_source = tree.sources[:, None] == jnp.arange(len(TABLE), dtype=jnp.int32)[None, :]
    contributed = jnp.sum(of_source & is_accepted[:, None], axis=0, dtype=jnp.int32)
    info = dataclasses.replace(
        state.info,
        accepted=recorded(state.info.accepted, num_accepted),
        num_drafted=recorded(state.info.num_drafted, tree.size),
        contributed=state.info.contributed + contributed,
        logprobs=jax.tree.map(keep, state.info.logprobs, logprobs),
    )
    result = dataclasses.replace(
        state,
        tokens=text,
        num_tokens=num_tokens,
        num_steps=state.num_steps + (~state.done).astype(jnp.int32),
        done=state.done | ended,
        memory=dataclasses.replace(state.memory, drafts=drafts),
        window=after,
        counts=counts,
        stop_state=stop_state,
        info=info,
    )
    first_draft = blocks.window(level.window_size, level.ngram_size).first_draft
    return result, jnp.append(0, first_draft + verdict.path), num_accepted


def _verify(
    state: DecodeState,
    tree: Tree,
    logits: jax.Array,
    share: Share | None,
    config: DecodeConfig,
    level: LookaheadConfig,
) -> tuple[jax.Array, Verdict, LogProbs | None]:
    """Returns a sequence's predictions at the newest window row [W], the verdict, and the scores of its tokens."""
    constants = state.constants
    block = blocks.build(level.window_size, level.ngram_size, tree.form)
    positions, _, outputs = (block if share is None else share)[:3]
    window_end = 1 + level.window_size
    before = None
    if state.counts is not None:
        before = prediction.tokens_before(tree, level.window_size, config.vocabulary.size)
        before = before if share is None else before[share.rows]
    rejects = constants.sampling.temperature is not None and level.verification == "rejection" and level.num_drafted > 0
    # The last offset is that of the window's last token, or of the end of the longest draft.
    of_window = level.window_size + level.ngram_size - 3 if level.window_size else 0
    situation = Situation(
        position=state.num_tokens - 1,
        num_generated=state.num_tokens - constants.prompt_lengths,
        key=constants.keys,
        sampling=constants.sampling,
        stopping=constants.stopping,
        counts=state.counts,
    )
    found = prediction.predict(
        logits,
        jnp.asarray(positions)[outputs],
        before,
        situation,
        reach=max(of_window, level.max_accepted - 1),
        vocabulary=config.vocabulary,
        whole=rejects or config.logprobs,
    )

    def of_block(own: jax.Array, rows: slice | jax.Array = slice(None)) -> jax.Array:
        return own[rows] if share is None else _from_shares(own, share.delivered_outputs[rows])

    drawn, greedy = of_block(found.drawn), of_block(found.greedy)
    new = (greedy if level.window_draw == "greedy" else drawn)[1:window_end]
    if rejects:
        # Acceptance must be independent of the noise with which the window was drawn.
        key = jax.random.fold_in(jax.random.fold_in(constants.keys, NO_POSITION), situation.position)
        sharpened = of_block(found.sharpened)
        verdict = verify_by_rejection(key, tree, sharpened[0], sharpened[window_end:], level.max_accepted)
    else:
        verdict = verify_by_matching(tree, drawn[0], drawn[window_end:], level.max_accepted)
    if not config.logprobs:
        return new, verdict, None
    chosen = jnp.append(0, window_end + verdict.path)
    scores = (
        sampling_lib.logprobs(of_block(logits, chosen), verdict.tokens) for logits in (found.logits, found.processed)
    )
    return new, verdict, LogProbs(*scores)


def _share(form: Shape | Form, num_tokens: jax.Array, level: LookaheadConfig, mesh: Mesh | None) -> Share | None:
    """Returns the part of each sequence's block that this device computes, None for all of it."""
    number = mesh_lib.size(mesh, LOOKAHEAD)
    if number == 1:
        return None
    device = jax.lax.axis_index(LOOKAHEAD)
    # A static form has no batch axis; `num_tokens` brings it.
    return jax.vmap(lambda _, form: division.share(level, form, number, device), out_axes=division.BATCH_AXES)(
        num_tokens, form
    )


def _from_shares(own: jax.Array, place: jax.Array) -> jax.Array:
    """Returns [K, ...] on every device, each entry from the one device where `place` [K] is within `own` [M, ...]."""
    return jax.lax.psum(own.at[place].get(mode="fill", fill_value=0), LOOKAHEAD)


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
