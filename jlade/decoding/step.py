"""One step of lookahead decoding, Algorithm 2 of arXiv 2402.02057, for a batch: forward, verify, commit, learn."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding import sampling as sampling_lib
from jlade.decoding import stopping as stopping_lib
from jlade.decoding import vocabulary as vocabulary_lib
from jlade.decoding.sampling import Sampling, TokenCounts
from jlade.decoding.state import DecodeState, LogProbs, Program
from jlade.decoding.stopping import Stopping
from jlade.decoding.vocabulary import Vocabulary
from jlade.drafts import recycled as recycling
from jlade.drafts import sources, suffix
from jlade.drafts.record import Record
from jlade.drafts.recycled import RecycledLogits
from jlade.drafts.sources import Drafts
from jlade.drafts.tree import NONE, Tree
from jlade.lookahead import block as blocks
from jlade.lookahead import division, ngram_pool, window
from jlade.lookahead.division import Share
from jlade.lookahead.ngram_pool import NGramPool
from jlade.lookahead.verification import (
    Verdict,
    verify_by_matching,
    verify_by_rejection,
    verify_tree_by_matching,
    verify_tree_by_rejection,
)
from jlade.mesh import LOOKAHEAD
from jlade.models.base import Params

NO_POSITION = np.uint32(2**31)  # folded into a key for noise that belongs to no position


def step(params: Params, state: DecodeState, program: Program, level: LookaheadConfig) -> DecodeState:
    """Returns the state after one step. A sequence that is done stays as it is.

    On a mesh this is part of a `jax.shard_map`: each device has the sequences of its `data` group, computes its
    share of their blocks, and learns the predictions of the others after the forward pass.

    Args:
      params: the decoder's parameters.
      state: before the step.
      program: the static settings; `program.lookahead` is the full width.
      level: the setting of this step, one of `lookahead.adaptive.levels`: its window has all columns of the state's or
        none, and its drafts are the first of the state's.
    """
    decoder, constants = program.decoder, state.constants
    vocabulary = Vocabulary.of(decoder.vocab_size, program.mesh)
    sequence = jnp.arange(len(state.done), dtype=jnp.int32)
    level_window = state.window[:, :, : level.window_size]
    candidates = state.candidates[:, : level.guess_set_size]
    tree = None if state.drafts is None else state.drafts.tree.first(level.num_drafted)

    # Run the block. Its drafts were made by the previous step: a step that both read the pool and wrote to it would
    # make compilers copy the pool.
    block = blocks.build(level.window_size, level.ngram_size, level.guess_set_size if tree is None else 0)
    share = _share(level, program.mesh)
    current = state.tokens[sequence, state.num_tokens - 1]
    tokens = jax.vmap(blocks.tokens)(current, level_window, candidates if tree is None else tree.tokens)
    tokens = jnp.maximum(tokens, 0)  # an empty slot is fed as an arbitrary token; verification sees that it is empty
    if share is not None:
        tokens = tokens[:, share.members]
    computed = block if share is None else share
    offsets, mask, outputs = jnp.asarray(computed.positions), computed.mask, computed.outputs
    if tree is not None:
        offsets, mask = jax.vmap(functools.partial(blocks.with_tree, block))(tree.depths, tree.mask)
        outputs = np.append(outputs, np.arange(len(block.positions), tokens.shape[1], dtype=np.int32))
    offsets = jnp.broadcast_to(offsets, tokens.shape)
    positions = (state.num_tokens - 1)[:, None] + offsets
    hidden, block_kv = decoder.forward(params, tokens, positions, state.cache, mask)
    # Of the current token, the newest window row and the drafts [B, R, V], of a share [B, R', V'].
    logits = decoder.logits(params, hidden[:, outputs])
    predict = functools.partial(
        _predict, share=share, level=level, with_logprobs=program.logprobs, vocabulary=vocabulary
    )
    drafted = candidates if tree is None else tree
    new, verdict, logprobs = jax.vmap(predict)(logits, offsets[:, outputs], drafted, _Sequence.of(state))

    # Cut where the text ends, before anything is kept.
    num_accepted = jnp.where(state.done, 0, verdict.num_accepted)
    num_accepted, ended, stop_state = stopping_lib.cut(
        constants.stopping,
        state.stop_state,
        verdict.tokens,
        num_accepted,
        state.num_tokens - constants.prompt_lengths,
    )
    num_tokens = state.num_tokens + num_accepted

    # Commit the current token and the accepted drafted tokens.
    accepted = jnp.pad(block.drafted + verdict.drafted, ((0, 0), (1, 0)))  # the current token has index 0
    if share is not None:
        place = jnp.asarray(share.delivered_tokens)[accepted]
        block_kv = jax.tree.map(lambda kv: jax.vmap(_from_shares)(kv, place), block_kv)
        accepted = jnp.broadcast_to(jnp.arange(accepted.shape[1], dtype=jnp.int32), accepted.shape)
    cache = decoder.commit(state.cache, block_kv, accepted, num_accepted)
    offset = jnp.arange(level.max_accepted, dtype=jnp.int32)[None, :]
    place = jnp.where(offset < num_accepted[:, None], state.num_tokens[:, None] + offset, state.tokens.shape[1])

    def keep(kept: jax.Array, chosen: jax.Array) -> jax.Array:
        return kept.at[sequence[:, None], place].set(chosen, mode="drop")

    text = keep(state.tokens, verdict.tokens)
    counts = state.counts
    if counts is not None:
        counts = jax.vmap(sampling_lib.count_accepted)(counts, verdict.tokens, num_accepted)

    # Learn: collect n-grams, advance the window, make the next drafts.
    pool = _collect(state, level_window, current, new, text, num_tokens, level, vocabulary)
    after = state.window  # a level without a window leaves it to the wide ones
    if level.window_size:
        after = jnp.where(state.done[:, None, None], level_window, jax.vmap(window.advance)(level_window, new))

    next_candidates = vocabulary_lib.lookup(pool, text[sequence, num_tokens - 1], vocabulary)
    drafts, contributed = state.drafts, state.info.contributed
    if drafts is not None and tree is not None:
        best = None if drafts.table is None else vocabulary.top(logits, recycling.RANKS)
        learn = functools.partial(_learn, window_size=level.window_size)
        pairs = jax.vmap(_pairs)(state.tokens, state.num_tokens, level_window, tree)
        record, table = jax.vmap(learn)(drafts, tree, pairs, best, verdict, num_accepted)
        noise = sampling_lib.noise_ahead(
            constants.keys, num_tokens, constants.sampling, lookahead=program.lookahead, vocab_size=vocabulary.size
        )
        draft = functools.partial(sources.draft, corpus=constants.corpus, lookahead=program.lookahead)
        drafts = jax.vmap(draft)(text, num_tokens, next_candidates, record, table, noise)
        contributed += jax.vmap(_contributed)(tree, verdict, num_accepted)

    # Record the step.
    num_candidates = jnp.sum(candidates[:, :, 0] != NGramPool.EMPTY, axis=1, dtype=jnp.int32)
    num_drafts = num_candidates if tree is None else tree.size

    def recorded(before: jax.Array, new: jax.Array) -> jax.Array:
        return before.at[sequence, state.num_steps].set(jnp.where(state.done, 0, new), mode="drop")

    return dataclasses.replace(
        state,
        tokens=text,
        num_tokens=num_tokens,
        num_steps=state.num_steps + (~state.done).astype(jnp.int32),
        done=state.done | ended,
        cache=cache,
        window=after,
        pool=pool,
        candidates=next_candidates,
        drafts=drafts,
        counts=counts,
        stop_state=stop_state,
        info=dataclasses.replace(
            state.info,
            accepted=recorded(state.info.accepted, num_accepted),
            num_candidates=recorded(state.info.num_candidates, num_drafts),
            contributed=contributed,
            logprobs=jax.tree.map(keep, state.info.logprobs, logprobs),
        ),
    )


@flax.struct.dataclass
class _Sequence:
    """The part of the state on which a sequence's predictions depend besides the logits; fields [B] for a batch."""

    position: jax.Array  # of the current token
    num_generated: jax.Array
    key: jax.Array
    sampling: Sampling
    counts: TokenCounts | None
    stopping: Stopping  # without stop strings

    @classmethod
    def of(cls, state: DecodeState) -> "_Sequence":
        constants = state.constants
        return cls(
            position=state.num_tokens - 1,
            num_generated=state.num_tokens - constants.prompt_lengths,
            key=constants.keys,
            sampling=constants.sampling,
            counts=state.counts,
            stopping=dataclasses.replace(constants.stopping, strings=None),
        )


def _share(level: LookaheadConfig, mesh: Mesh | None) -> Share | None:
    """Returns the part of the block that this device computes, None for all of it."""
    number = mesh_lib.size(mesh, LOOKAHEAD)
    if number == 1:
        return None
    shares = division.divide(level.window_size, level.ngram_size, level.guess_set_size, number)
    return jax.tree.map(lambda of_devices: jnp.asarray(of_devices)[jax.lax.axis_index(LOOKAHEAD)], shares)


def _from_shares(own: jax.Array, place: np.ndarray | jax.Array) -> jax.Array:
    """Returns [K, ...] on every device, each entry from the one device where `place` [K] is within `own` [M, ...]."""
    return jax.lax.psum(own.at[place].get(mode="fill", fill_value=0), LOOKAHEAD)


def _outputs(own: jax.Array, share: Share | None, rows: slice | jax.Array = slice(None)) -> jax.Array:
    """Returns some of the block's outputs [R, ...], given those of this device's share [R', ...]."""
    return own[rows] if share is None else _from_shares(own, share.delivered_outputs[rows])


def _predict(
    logits: jax.Array,
    offsets: jax.Array,
    drafted: jax.Array | Tree,
    sequence: _Sequence,
    *,
    share: Share | None,
    level: LookaheadConfig,
    with_logprobs: bool,
    vocabulary: Vocabulary,
) -> tuple[jax.Array, Verdict, LogProbs | None]:
    """Returns a sequence's predictions at the newest window row [W], the verdict, and the scores of its tokens.

    Args:
      logits: [R, V] of the current token, the newest window row and the drafted tokens; of a share [R', V'].
      offsets: [R] of these tokens, relative to the position of the current token.
      drafted: candidates [G, N-1], or a tree.
      sequence: fields without a batch axis.
    """
    vocab_size, window_end = vocabulary.size, 1 + level.window_size
    sampling = sequence.sampling
    rejects = sampling.temperature is not None and level.verification == "rejection" and level.num_drafted > 0
    if sampling.filters or rejects or with_logprobs:
        logits, vocabulary = vocabulary.whole(logits), Vocabulary(vocab_size)
    if sampling.logit_bias is not None:
        sampling = dataclasses.replace(sampling, logit_bias=vocabulary.take(sampling.logit_bias))
    processed = logits
    if sequence.stopping.min_new_tokens is not None:
        too_early = sequence.num_generated + offsets < sequence.stopping.min_new_tokens
        processed = sampling_lib.ban(processed, sequence.stopping.eos_ids, too_early, vocabulary)
    if sequence.counts is None:
        processed = sampling_lib.process(processed, sampling, None, None)
    else:
        # A drafted token counts the draft's earlier tokens. The window's tokens, which are guesses, do not.
        if isinstance(drafted, Tree):
            one_hot = jax.nn.one_hot(drafted.tokens, vocab_size, dtype=jnp.int32)
            before = drafted.mask.astype(jnp.int32) @ one_hot
        else:
            before = jnp.cumsum(jax.nn.one_hot(drafted, vocab_size, dtype=jnp.int32), axis=1)
        before = jnp.pad(before.reshape(-1, vocab_size), ((window_end, 0), (0, 0)))
        generated = sequence.counts.generated[None, :] + (before if share is None else before[share.rows])
        prompt, generated = vocabulary.take(sequence.counts.prompt), vocabulary.take(generated)
        processed = sampling_lib.process(processed, sampling, prompt, generated)

    drawn = greedy = vocabulary.argmax(processed)
    if sampling.temperature is not None:
        sharpened = sampling_lib.sharpen(processed, sampling.temperature, vocabulary)
        # The last offset is that of the window's last token, or of the end of the longest draft.
        of_window = level.window_size + level.ngram_size - 3 if level.window_size else 0
        reach = max(of_window, level.max_accepted - 1)
        positions = sequence.position + 1 + jnp.arange(reach + 1, dtype=jnp.int32)  # of the predicted tokens
        noise = vocabulary.take(sampling_lib.noise_at(sequence.key, positions, vocab_size))
        drawn = vocabulary.argmax(sharpened + noise[offsets])

    drawn, greedy = _outputs(drawn, share), _outputs(greedy, share)
    new = (greedy if level.window_draw == "greedy" else drawn)[1:window_end]
    if not rejects:
        next_token, after = drawn[0], drawn[window_end:]
        if isinstance(drafted, Tree):
            verdict = verify_tree_by_matching(drafted, next_token, after, level.max_accepted)
        else:
            verdict = verify_by_matching(drafted, next_token, after.reshape(drafted.shape))
    else:
        # Acceptance must be independent of the noise with which the window was drawn.
        key = jax.random.fold_in(jax.random.fold_in(sequence.key, NO_POSITION), sequence.position)
        sharpened = _outputs(sharpened, share)
        if isinstance(drafted, Tree):
            verdict = verify_tree_by_rejection(key, drafted, sharpened[0], sharpened[window_end:], level.max_accepted)
        else:
            after = sharpened[window_end:].reshape(*drafted.shape, vocab_size)
            verdict = verify_by_rejection(key, drafted, sharpened[0], after)
    if not with_logprobs:
        return new, verdict, None
    chosen = jnp.append(0, window_end + verdict.drafted)
    model, after_processing = (
        sampling_lib.logprobs(_outputs(x, share, chosen), verdict.tokens) for x in (logits, processed)
    )
    return new, verdict, LogProbs(model, after_processing)


def _is_accepted(tree: Tree, verdict: Verdict, num_accepted: jax.Array) -> jax.Array:
    """Returns which tokens of a tree were accepted [M]."""
    place = jnp.arange(len(tree.tokens), dtype=jnp.int32)
    within = jnp.arange(1, len(verdict.tokens), dtype=jnp.int32) < num_accepted
    return jnp.any((verdict.drafted[:, None] == place[None, :]) & within[:, None], axis=0)


def _contributed(tree: Tree, verdict: Verdict, num_accepted: jax.Array) -> jax.Array:
    """Returns the number of accepted tokens of each source [S]."""
    of_source = jnp.asarray(sources.SOURCE_OF_KIND)[tree.kinds][:, None] == jnp.arange(len(sources.KINDS))[None, :]
    return jnp.sum(of_source & _is_accepted(tree, verdict, num_accepted)[:, None], axis=0, dtype=jnp.int32)


def _pairs(text: jax.Array, length: jax.Array, level_window: jax.Array, tree: Tree) -> jax.Array:
    """Returns the tokens with logits, each after the token before it: [R, 2] int32.

    These are the current token, the newest window row, and the tree.
    """
    last = suffix.last(text, length)[1::-1]
    before = jnp.where(tree.parents < 0, last[1], tree.tokens[jnp.maximum(tree.parents, 0)])
    of_tree = jnp.stack([before, tree.tokens], axis=1)
    return jnp.concatenate([last[None], window.newest_pairs(level_window, last), of_tree])


def _learn(
    drafts: Drafts,
    tree: Tree,
    pairs: jax.Array,
    best: jax.Array | None,
    verdict: Verdict,
    num_accepted: jax.Array,
    *,
    window_size: int,
) -> tuple[Record, RecycledLogits | None]:
    """Returns what the sources learn of a step of one sequence: the record and the table.

    Args:
      drafts: for the step.
      tree: those that were verified.
      pairs: [R, 2] int32, see `_pairs`.
      best: [R, k] int32, the tokens of their highest logits; None when no source needs them.
      verdict, num_accepted: on the tree; `num_accepted` is 0 for a sequence that is done.
      window_size: W.
    """
    # Of rows that read the same token the text counts most, then the most promising draft, then the window.
    size = len(tree.tokens)
    of_window = jnp.arange(window_size, dtype=jnp.int32)
    of_drafts = window_size + size - jnp.arange(size, dtype=jnp.int32)
    of_text = jnp.int32(window_size + 2 * size)
    of_drafts = jnp.where(_is_accepted(tree, verdict, num_accepted), of_text + tree.depths, of_drafts)
    of_drafts = jnp.where(tree.tokens == NONE, -1, of_drafts)
    order = jnp.concatenate([of_text[None], of_window, of_drafts])
    order = jnp.where(num_accepted == 0, -1, order)
    return sources.learn(drafts, pairs, best, order, verdict.tokens, num_accepted)


def _collect(
    state: DecodeState,
    level_window: jax.Array,
    current: jax.Array,
    new: jax.Array,
    text: jax.Array,
    num_tokens: jax.Array,
    level: LookaheadConfig,
    vocabulary: Vocabulary,
) -> NGramPool:
    """Returns the pool with the n-grams that the window completed and, if asked for, those of the accepted tokens."""
    keys, ngrams = jax.vmap(window.ngrams)(level_window, current, new)
    from_model = ~state.done & (state.num_steps >= level.ngram_size - 2)  # before, columns hold tokens of the draw
    valid = jnp.broadcast_to(from_model[:, None], keys.shape)
    if level.pool_from_prompt:
        ends = state.num_tokens[:, None] + jnp.arange(level.max_accepted, dtype=jnp.int32)[None, :]
        read = functools.partial(ngram_pool.ngrams_at, ngram_size=level.ngram_size)
        accepted = jax.vmap(read)(text, num_tokens, ends - (level.ngram_size - 1))
        keys, ngrams, valid = (
            jnp.concatenate(pair, axis=1) for pair in zip((keys, ngrams, valid), accepted, strict=True)
        )
    return vocabulary_lib.insert(state.pool, keys, ngrams, valid, vocabulary)
