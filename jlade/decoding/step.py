"""One step of lookahead decoding, Algorithm 2 of arXiv 2402.02057, for a batch: forward, verify, commit, learn."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade.config import LookaheadConfig
from jlade.decoding import sampling as sampling_lib
from jlade.decoding import stopping as stopping_lib
from jlade.decoding import vocabulary as vocabulary_lib
from jlade.decoding.sampling import Sampling, TokenCounts
from jlade.decoding.state import DecodeState, LogProbs, Program
from jlade.decoding.stopping import Stopping
from jlade.decoding.vocabulary import Vocabulary
from jlade.devices import mesh as mesh_lib
from jlade.devices.mesh import LOOKAHEAD
from jlade.lookahead import block as blocks
from jlade.lookahead import division, ngram_pool, window
from jlade.lookahead.block import Block
from jlade.lookahead.division import Share
from jlade.lookahead.ngram_pool import NGramPool
from jlade.lookahead.verification import Verdict, verify_by_matching, verify_by_rejection
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
        none, and its candidates are the first of the state's.
    """
    decoder, constants = program.decoder, state.constants
    sizes = level.window_size, level.ngram_size, level.guess_set_size
    block, share = blocks.build(*sizes), _share(sizes, program.mesh)
    vocabulary = Vocabulary.of(decoder.vocab_size, program.mesh)
    sequence = jnp.arange(len(state.done), dtype=jnp.int32)
    level_window = state.window[:, :, : level.window_size]
    candidates = state.candidates[:, : level.guess_set_size]

    # Run the block. Its candidates were looked up by the previous step: a step that both read the pool and wrote to it
    # would make compilers copy the pool.
    current = state.tokens[sequence, state.num_tokens - 1]
    tokens = jax.vmap(blocks.tokens)(current, level_window, candidates)
    tokens = jnp.maximum(tokens, 0)  # an empty slot is fed as an arbitrary token; verification sees that it is empty
    if share is not None:
        tokens = tokens[:, share.members]
    computed = block if share is None else share
    positions = (state.num_tokens - 1)[:, None] + computed.positions[None, :]
    hidden, block_kv = decoder.forward(params, tokens, positions, state.cache, computed.mask)
    logits = decoder.logits(params, hidden[:, computed.outputs])  # [B, 1 + W + G(N-1), V], of a share [B, R', V']
    predict = functools.partial(
        _predict, block=block, share=share, level=level, with_logprobs=program.logprobs, vocabulary=vocabulary
    )
    new, verdict, logprobs = jax.vmap(predict)(logits, candidates, _Sequence.of(state))

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

    # Commit the current token and the accepted candidate tokens.
    accepted = jnp.asarray(block.accepted)[verdict.candidate]
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

    # Learn: collect n-grams, advance the window, look up the next candidates.
    pool = _collect(state, level_window, current, new, text, num_tokens, level, vocabulary)
    after = state.window  # a level without a window leaves it to the wide ones
    if level.window_size:
        after = jnp.where(state.done[:, None, None], level_window, jax.vmap(window.advance)(level_window, new))

    # Record the step.
    num_candidates = jnp.sum(candidates[:, :, 0] != NGramPool.EMPTY, axis=1, dtype=jnp.int32)

    def record(recorded: jax.Array, new: jax.Array) -> jax.Array:
        return recorded.at[sequence, state.num_steps].set(jnp.where(state.done, 0, new), mode="drop")

    return dataclasses.replace(
        state,
        tokens=text,
        num_tokens=num_tokens,
        num_steps=state.num_steps + (~state.done).astype(jnp.int32),
        done=state.done | ended,
        cache=cache,
        window=after,
        pool=pool,
        candidates=vocabulary_lib.lookup(pool, text[sequence, num_tokens - 1], vocabulary),
        counts=counts,
        stop_state=stop_state,
        info=dataclasses.replace(
            state.info,
            accepted=record(state.info.accepted, num_accepted),
            num_candidates=record(state.info.num_candidates, num_candidates),
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


def _share(sizes: tuple[int, int, int], mesh: Mesh | None) -> Share | None:
    """Returns the part of the block that this device computes, None for all of it."""
    number = mesh_lib.size(mesh, LOOKAHEAD)
    if number == 1:
        return None
    shares = division.divide(*sizes, number)
    return jax.tree.map(lambda of_devices: jnp.asarray(of_devices)[jax.lax.axis_index(LOOKAHEAD)], shares)


def _from_shares(own: jax.Array, place: np.ndarray | jax.Array) -> jax.Array:
    """Returns [K, ...] on every device, each entry from the one device where `place` [K] is within `own` [M, ...]."""
    return jax.lax.psum(own.at[place].get(mode="fill", fill_value=0), LOOKAHEAD)


def _outputs(own: jax.Array, share: Share | None, rows: slice | jax.Array = slice(None)) -> jax.Array:
    """Returns some of the block's outputs [R, ...], given those of this device's share [R', ...]."""
    return own[rows] if share is None else _from_shares(own, share.delivered_outputs[rows])


def _predict(
    logits: jax.Array,
    candidates: jax.Array,
    sequence: _Sequence,
    *,
    block: Block,
    share: Share | None,
    level: LookaheadConfig,
    with_logprobs: bool,
    vocabulary: Vocabulary,
) -> tuple[jax.Array, Verdict, LogProbs | None]:
    """Returns a sequence's predictions at the newest window row [W], the verdict, and the scores of its tokens.

    Args:
      logits: [1 + W + G(N-1), V] of the current token, the newest window row and the candidates; of a share [R', V'].
      candidates: [G, N-1].
      sequence: fields without a batch axis.
    """
    vocab_size, window_end = vocabulary.size, 1 + level.window_size
    sampling = sequence.sampling
    rejects = sampling.temperature is not None and level.verification == "rejection" and level.guess_set_size > 0
    if sampling.filters or rejects or with_logprobs:
        logits, vocabulary = vocabulary.whole(logits), Vocabulary(vocab_size)
    if sampling.logit_bias is not None:
        sampling = dataclasses.replace(sampling, logit_bias=vocabulary.take(sampling.logit_bias))
    computed = block if share is None else share
    offsets = computed.positions[computed.outputs]
    processed = logits
    if sequence.stopping.min_new_tokens is not None:
        too_early = sequence.num_generated + offsets < sequence.stopping.min_new_tokens
        processed = sampling_lib.ban(processed, sequence.stopping.eos_ids, too_early, vocabulary)
    if sequence.counts is None:
        processed = sampling_lib.process(processed, sampling, None, None)
    else:
        # A candidate's token counts the candidate's earlier tokens. The window's tokens, which are guesses, do not.
        drafted = jnp.cumsum(jax.nn.one_hot(candidates, vocab_size, dtype=jnp.int32), axis=1)
        drafted = jnp.pad(drafted.reshape(-1, vocab_size), ((window_end, 0), (0, 0)))
        generated = sequence.counts.generated[None, :] + (drafted if share is None else drafted[share.rows])
        prompt, generated = vocabulary.take(sequence.counts.prompt), vocabulary.take(generated)
        processed = sampling_lib.process(processed, sampling, prompt, generated)

    drawn = greedy = vocabulary.argmax(processed)
    if sampling.temperature is not None:
        sharpened = sampling_lib.sharpen(processed, sampling.temperature, vocabulary)
        last = block.positions[block.outputs].max()
        positions = sequence.position + 1 + jnp.arange(last + 1, dtype=jnp.int32)  # of the predicted tokens
        noise = vocabulary.take(sampling_lib.noise_at(sequence.key, positions, vocab_size))
        drawn = vocabulary.argmax(sharpened + noise[offsets])

    drawn, greedy = _outputs(drawn, share), _outputs(greedy, share)
    new = (greedy if level.window_draw == "greedy" else drawn)[1:window_end]
    if not rejects:
        verdict = verify_by_matching(candidates, drawn[0], drawn[window_end:].reshape(candidates.shape))
    else:
        # Acceptance must be independent of the noise with which the window was drawn.
        apart = jax.random.fold_in(sequence.key, NO_POSITION)
        sharpened = _outputs(sharpened, share)
        after = sharpened[window_end:].reshape(*candidates.shape, vocab_size)
        key = jax.random.fold_in(apart, sequence.position)
        verdict = verify_by_rejection(key, candidates, sharpened[0], after)
    if not with_logprobs:
        return new, verdict, None
    first = window_end + verdict.candidate * (level.ngram_size - 1)
    chosen = jnp.append(0, first + jnp.arange(level.max_accepted - 1, dtype=jnp.int32))
    model, after_processing = (
        sampling_lib.logprobs(_outputs(x, share, chosen), verdict.tokens) for x in (logits, processed)
    )
    return new, verdict, LogProbs(model, after_processing)


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
