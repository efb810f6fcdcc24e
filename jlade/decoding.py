"""Decoding as one compiled program: a state, a step from state to state, and the loop over it.

`decode` is prefill, then `step` until every row is done. Its shapes depend on the setting, the batch size and the
capacity alone, so another prompt, length, seed, limit or set of end tokens compiles nothing. It can be called under
the caller's own `jit`.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade import sampling as sampling_lib
from jlade import stopping as stopping_lib
from jlade.config import LookaheadConfig
from jlade.lookahead import block as blocks
from jlade.lookahead import fallback, ngram_pool, window
from jlade.lookahead.block import Block
from jlade.lookahead.fallback import Pace
from jlade.lookahead.ngram_pool import NGramPool
from jlade.lookahead.verification import Verdict, verify_by_rejection, verify_greedy
from jlade.models.base import Decoder, KVCache, Params
from jlade.sampling import Sampling, TokenCounts
from jlade.stopping import Stopping

GREEDY = Sampling()
NO_POSITION = np.uint32(2**31)
# Tokens of the prompt per forward pass, as pairs (chunk, least): a chunk is read while more than `least` are left. On
# CPUs a pass takes the time of its tokens, padding included; elsewhere a small one takes that of reading the weights.
PREFILL_CHUNKS_ON_CPU = ((256, 224), (64, 48), (16, 0))
PREFILL_CHUNKS = ((512, 64), (64, 0))


@flax.struct.dataclass
class LogProbs:
    """Log-probabilities of the chosen tokens, where `DecodeState.tokens` has them; 0 elsewhere."""

    model: jax.Array  # [B, C] float32, in the model's own distribution
    processed: jax.Array  # [B, C] float32, in the one that is drawn from, at temperature 1 where drawing is greedy


@flax.struct.dataclass
class DecodeState:
    """Everything that decoding carries from step to step, for B sequences in C token places each.

    The last of the `num_tokens` tokens is the current one: the model has yet to read it, so the cache holds one row
    less.
    """

    tokens: jax.Array  # [B, C] int32, prompt and accepted tokens
    num_tokens: jax.Array  # [B] int32
    prompt_lengths: jax.Array  # [B] int32
    done: jax.Array  # [B] bool
    steps: jax.Array  # [B] int32, forward passes made, prefill not counted
    steps_with_candidate: jax.Array  # [B] int32, those for which the pool had an n-gram
    accepted: jax.Array  # [B, C] int32, tokens accepted in each step
    cache: KVCache  # C rows
    window: jax.Array  # [B, N-1, W] int32
    pool: NGramPool  # ngrams [B, V, G, N-1]
    candidates: jax.Array  # [B, G, N-1] int32, the pool's for the current token
    key: jax.Array  # [B] keys of jax.random, from which a row's noise comes
    sampling: Sampling  # fields [B]
    counts: TokenCounts | None  # [B, V], None when no control counts tokens
    stopping: Stopping
    stop_state: jax.Array | None  # [B] int32, None without stop strings
    logprobs: LogProbs | None  # None when not asked for
    pace: Pace | None  # None when every step has the full width


@functools.partial(jax.jit, static_argnames=("decoder", "lookahead", "logprobs"))
def decode(
    params: Params,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    stopping: Stopping,
    key: jax.Array,
    sampling: Sampling = GREEDY,
    cache: KVCache | None = None,
    pool: NGramPool | None = None,
    *,
    decoder: Decoder,
    lookahead: LookaheadConfig,
    logprobs: bool = False,
) -> DecodeState:
    """Decodes until every row has ended. For the arguments see `prefill`."""
    arrays = (params, prompts, prompt_lengths, stopping, key, sampling, cache, pool)
    state = prefill(*arrays, decoder=decoder, lookahead=lookahead, logprobs=logprobs)
    return _run(lambda s: ~jnp.all(s.done), params, state, decoder, lookahead)


def prefill(
    params: Params,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    stopping: Stopping,
    key: jax.Array,
    sampling: Sampling = GREEDY,
    cache: KVCache | None = None,
    pool: NGramPool | None = None,
    *,
    decoder: Decoder,
    lookahead: LookaheadConfig,
    logprobs: bool = False,
) -> DecodeState:
    """Reads the prompts in chunks and returns the state before the first step.

    Args:
      params: the decoder's parameters.
      prompts: [B, C] int32; C is the capacity, so it must hold the longest prompt and what is generated after it.
      prompt_lengths: [B] int32, at least 1.
      stopping: when the texts end.
      key: made by `jax.random.key`, one for all rows or one for each [B]. It gives the noise of sampled tokens, other
        noise in every row, and the draw of the first window, which decides how many steps are taken but not the text.
      sampling: how tokens are drawn; greedily by default.
      cache: of C rows, of which the first `cache.length` [B] hold the beginning of the prompts and are not computed
        again; at most all but the last token of each.
      pool: n-grams to begin with [B, V, G, N-1]; none by default. With `cache`, the one that was made with it.
      decoder: the model.
      lookahead: the setting of W, N and G.
      logprobs: whether to keep the log-probabilities of the chosen tokens.
    """
    prompts, prompt_lengths = jnp.asarray(prompts), jnp.asarray(prompt_lengths)
    stopping = jax.tree.map(jnp.asarray, stopping)
    batch_size, capacity = prompts.shape
    if cache is None:
        cache = decoder.init_cache(params, batch_size, capacity)
    if pool is None:
        empty = ngram_pool.empty(decoder.vocab_size, lookahead.ngram_size, lookahead.guess_set_size)
        pool = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *x.shape)), empty)
    to_read = prompt_lengths - 1  # the last token is left to the first step

    def read_chunk(chunk, carry):
        cache, pool = carry
        rows = jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32), (batch_size, chunk))
        places = cache.length[:, None] + rows
        tokens = jax.vmap(lambda row, place: row.at[place].get(mode="clip"))(prompts, places)
        hidden, block_kv = decoder.forward(params, tokens, places, cache, np.tri(chunk, dtype=bool))
        # An upper bound of `chunk` or more changes nothing, but as it depends on what the pass returns, the cache is
        # written after the last layer has read it, and so in place; otherwise compilers copy it to be safe.
        after_pass = chunk + jnp.isnan(hidden[:, 0, 0]).astype(jnp.int32)
        if lookahead.pool_from_prompt:
            read = functools.partial(ngram_pool.ngrams_at, ngram_size=lookahead.ngram_size)
            ends = cache.length[:, None] + jnp.arange(chunk + 1, dtype=jnp.int32)  # with the last token of the prompt
            ngrams = jax.vmap(read)(prompts, prompt_lengths, ends - (lookahead.ngram_size - 1))
            pool = jax.vmap(ngram_pool.insert)(pool, *ngrams)
        return decoder.commit(cache, block_kv, rows, jnp.clip(to_read - cache.length, 0, after_pass)), pool

    def has_more_than(least, carry):
        return jnp.any(to_read - carry[0].length > least)

    for chunk, least in prefill_chunks(capacity):
        condition, body = functools.partial(has_more_than, least), functools.partial(read_chunk, chunk)
        cache, pool = jax.lax.while_loop(condition, body, (cache, pool))

    # One key for all rows draws the same first window for equal prompts, wherever they stand in the batch.
    start = functools.partial(window.start, window_size=lookahead.window_size, ngram_size=lookahead.ngram_size)
    first_window = jax.vmap(start, in_axes=(0 if key.ndim else None, 0, 0))(key, prompts, prompt_lengths)
    row = jnp.arange(batch_size, dtype=jnp.int32)
    count = functools.partial(sampling_lib.count_prompt, vocab_size=decoder.vocab_size)
    return DecodeState(
        tokens=prompts,
        num_tokens=prompt_lengths,
        prompt_lengths=prompt_lengths,
        done=jnp.zeros(batch_size, bool),
        steps=jnp.zeros(batch_size, jnp.int32),
        steps_with_candidate=jnp.zeros(batch_size, jnp.int32),
        accepted=jnp.zeros_like(prompts),
        cache=cache,
        window=first_window,
        pool=pool,
        candidates=_look_up(pool, prompts, prompt_lengths),
        key=key if key.ndim else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row),
        sampling=sampling,
        counts=jax.vmap(count)(prompts, prompt_lengths) if sampling.counts_tokens else None,
        stopping=stopping,
        stop_state=None if stopping.strings is None else stopping.strings.start,
        logprobs=LogProbs(*jnp.zeros((2, *prompts.shape), jnp.float32)) if logprobs else None,
        pace=fallback.start() if len(lookahead.levels) > 1 else None,
    )


def prefill_chunks(capacity: int) -> list[tuple[int, int]]:
    """Returns the pairs (chunk, least) to use in a cache of `capacity` rows, fewer in a small one: each is compiled."""
    *larger, (smallest, least) = PREFILL_CHUNKS_ON_CPU if jax.default_backend() == "cpu" else PREFILL_CHUNKS
    return [*(pair for pair in larger if 4 * pair[0] <= capacity), (min(smallest, capacity), least)]


def step(params: Params, state: DecodeState, *, decoder: Decoder, lookahead: LookaheadConfig) -> DecodeState:
    """One step: forward, verify, commit, harvest, advance, look up. A row that is done stays as it is."""
    if state.pace is None:
        return _step(params, state, decoder, lookahead)
    made = jnp.max(state.steps)
    return _run(lambda s: ~jnp.all(s.done) & (jnp.max(s.steps) == made), params, state, decoder, lookahead)


def _run(
    goes_on: Callable[[DecodeState], jax.Array],
    params: Params,
    state: DecodeState,
    decoder: Decoder,
    lookahead: LookaheadConfig,
) -> DecodeState:
    """Makes steps while `goes_on`, each at the level that the state's pace says.

    There is a loop for each level, and one around them: a conditional in one loop would make compilers copy the cache.
    """
    if state.pace is None:
        return jax.lax.while_loop(goes_on, lambda s: _step(params, s, decoder, lookahead), state)

    def step_at(level: LookaheadConfig, state: DecodeState) -> DecodeState:
        assert state.pace is not None
        after = _step(params, state, decoder, level)
        tokens, rows = jnp.sum(after.num_tokens - state.num_tokens), jnp.sum(~state.done, dtype=jnp.int32)
        accepted = tokens.astype(jnp.float32) / rows.astype(jnp.float32)
        return dataclasses.replace(after, pace=fallback.update(state.pace, accepted, lookahead.level_costs))

    def at_level(i: int, state: DecodeState) -> jax.Array:
        assert state.pace is not None
        return goes_on(state) & (state.pace.level == i)

    def all_levels(state: DecodeState) -> DecodeState:
        for i, level in enumerate(lookahead.levels):
            state = jax.lax.while_loop(functools.partial(at_level, i), functools.partial(step_at, level), state)
        return state

    return jax.lax.while_loop(goes_on, all_levels, state)


def _step(params: Params, state: DecodeState, decoder: Decoder, lookahead: LookaheadConfig) -> DecodeState:
    """One step at the level `lookahead`: all columns of the state's window or none, and the first of its candidates."""
    full_window = state.window
    state = dataclasses.replace(
        state,
        window=full_window[:, :, : lookahead.window_size],
        candidates=state.candidates[:, : lookahead.guess_set_size],
    )
    block = blocks.build(lookahead.window_size, lookahead.ngram_size, lookahead.guess_set_size)
    row = jnp.arange(len(state.done), dtype=jnp.int32)

    # Run the block. Its candidates were looked up before: a step that both reads the pool and writes to it would make
    # compilers copy it.
    current = state.tokens[row, state.num_tokens - 1]
    tokens = jax.vmap(blocks.tokens)(current, state.window, state.candidates)
    tokens = jnp.maximum(tokens, 0)  # an empty slot is fed as some token; verification sees that it is empty
    positions = (state.num_tokens - 1)[:, None] + block.positions[None, :]
    hidden, block_kv = decoder.forward(params, tokens, positions, state.cache, block.mask)
    logits = decoder.logits(params, hidden[:, block.output_rows])  # [B, 1 + W + G(N-1), V]
    predict = functools.partial(_predict, block=block, lookahead=lookahead, with_logprobs=state.logprobs is not None)
    new, verdict, logprobs = jax.vmap(predict)(logits, state.candidates, _Row.of(state))

    # Cut where the text ends, before anything is kept.
    num_generated = state.num_tokens - state.prompt_lengths
    num_accepted = jnp.where(state.done, 0, verdict.num_accepted)
    num_accepted, ended, stop_state = stopping_lib.cut(
        state.stopping, state.stop_state, verdict.tokens, num_accepted, num_generated
    )
    num_tokens = state.num_tokens + num_accepted

    # Commit the current token and the accepted candidate tokens.
    accepted_rows = jnp.asarray(block.accepted_rows)[verdict.candidate]
    cache = decoder.commit(state.cache, block_kv, accepted_rows, num_accepted)
    offset = jnp.arange(lookahead.max_accepted, dtype=jnp.int32)[None, :]
    place = jnp.where(offset < num_accepted[:, None], state.num_tokens[:, None] + offset, state.tokens.shape[1])

    def keep(kept: jax.Array, chosen: jax.Array) -> jax.Array:
        return kept.at[row[:, None], place].set(chosen, mode="drop")

    text = keep(state.tokens, verdict.tokens)
    counts = state.counts
    if counts is not None:
        counts = jax.vmap(sampling_lib.count_accepted)(counts, verdict.tokens, num_accepted)
    has_candidate = jnp.any(state.candidates[:, :, 0] != NGramPool.EMPTY, axis=1)
    pool = _harvest(state, current, new, text, num_tokens, lookahead)
    advanced = jnp.where(state.done[:, None, None], state.window, jax.vmap(window.advance)(state.window, new))

    return dataclasses.replace(
        state,
        tokens=text,
        num_tokens=num_tokens,
        done=state.done | ended,
        steps=state.steps + (~state.done).astype(jnp.int32),
        steps_with_candidate=state.steps_with_candidate + (has_candidate & ~state.done).astype(jnp.int32),
        accepted=state.accepted.at[row, state.steps].set(num_accepted, mode="drop"),
        cache=cache,
        window=advanced if advanced.shape == full_window.shape else full_window,
        pool=pool,
        candidates=_look_up(pool, text, num_tokens),
        counts=counts,
        stop_state=stop_state,
        logprobs=jax.tree.map(keep, state.logprobs, logprobs),
    )


@flax.struct.dataclass
class _Row:
    """What the prediction of a row's tokens depends on beside the logits; [B] for a batch."""

    position: jax.Array  # of the current token
    num_generated: jax.Array
    key: jax.Array
    sampling: Sampling
    counts: TokenCounts | None
    stopping: Stopping  # without its strings

    @classmethod
    def of(cls, state: DecodeState) -> "_Row":
        return cls(
            position=state.num_tokens - 1,
            num_generated=state.num_tokens - state.prompt_lengths,
            key=state.key,
            sampling=state.sampling,
            counts=state.counts,
            stopping=dataclasses.replace(state.stopping, strings=None),
        )


def _predict(
    logits: jax.Array,
    candidates: jax.Array,
    row: _Row,
    *,
    block: Block,
    lookahead: LookaheadConfig,
    with_logprobs: bool,
) -> tuple[jax.Array, Verdict, LogProbs | None]:
    """Draws the window's new tokens [W] of one row, verifies its candidates and scores the verdict's tokens.

    Args:
      logits: [1 + W + G(N-1), V] of the current token, the newest window row and the candidates.
      candidates: [G, N-1].
      row: of the state.
    """
    vocab_size, window_end = logits.shape[1], 1 + lookahead.window_size
    offsets = block.positions[block.output_rows]
    processed = logits
    if row.stopping.min_new_tokens is not None:
        processed = sampling_lib.ban(
            processed, row.stopping.eos_ids, row.num_generated + offsets < row.stopping.min_new_tokens
        )
    if row.counts is None:
        processed = sampling_lib.process(processed, row.sampling, None, None)
    else:
        # The window's tokens are guesses, for which the text's own counts do; a candidate's token counts those before.
        drafted = jnp.cumsum(jax.nn.one_hot(candidates, vocab_size, dtype=jnp.int32), axis=1)
        drafted = jnp.pad(drafted.reshape(-1, vocab_size), ((window_end, 0), (0, 0)))
        generated = row.counts.generated[None, :] + drafted
        processed = sampling_lib.process(processed, row.sampling, row.counts.prompt, generated)

    drawn = greedy = sampling_lib.argmax(processed)
    if row.sampling.temperature is not None:
        sharpened = sampling_lib.sharpen(processed, row.sampling.temperature)
        places = row.position + 1 + jnp.arange(offsets.max() + 1, dtype=jnp.int32)  # of the tokens that are predicted
        drawn = sampling_lib.argmax(sharpened + sampling_lib.noise_at(row.key, places, vocab_size)[offsets])

    new = (greedy if lookahead.window_draw == "greedy" else drawn)[1:window_end]
    if row.sampling.temperature is None or lookahead.verification == "coupled" or lookahead.guess_set_size == 0:
        verdict = verify_greedy(candidates, drawn[0], drawn[window_end:].reshape(candidates.shape))
    else:
        apart = jax.random.fold_in(row.key, NO_POSITION)  # how the window was drawn must not decide what is accepted
        after = sharpened[window_end:].reshape(*candidates.shape, vocab_size)
        verdict = verify_by_rejection(jax.random.fold_in(apart, row.position), candidates, sharpened[0], after)
    if not with_logprobs:
        return new, verdict, None
    first = window_end + verdict.candidate * (lookahead.ngram_size - 1)
    chosen = jnp.append(0, first + jnp.arange(lookahead.max_accepted - 1, dtype=jnp.int32))
    scores = (sampling_lib.logprobs(x[chosen], verdict.tokens) for x in (logits, processed))
    return new, verdict, LogProbs(*scores)


def _look_up(pool: NGramPool, tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Returns the candidates [B, G, N-1] of each row's last token."""
    row = jnp.arange(len(num_tokens), dtype=jnp.int32)
    return jax.vmap(ngram_pool.lookup)(pool, tokens[row, num_tokens - 1])


def _harvest(
    state: DecodeState,
    current: jax.Array,
    new: jax.Array,
    text: jax.Array,
    num_tokens: jax.Array,
    lookahead: LookaheadConfig,
) -> NGramPool:
    """Inserts the n-grams that the window closes and, with `pool_from_prompt`, those that end at accepted tokens."""
    keys, ngrams = jax.vmap(window.ngrams)(state.window, current, new)
    from_model = ~state.done & (state.steps >= lookahead.ngram_size - 2)  # before, columns hold tokens of the draw
    valid = jnp.broadcast_to(from_model[:, None], keys.shape)
    if lookahead.pool_from_prompt:
        ends = state.num_tokens[:, None] + jnp.arange(lookahead.max_accepted, dtype=jnp.int32)[None, :]
        read = functools.partial(ngram_pool.ngrams_at, ngram_size=lookahead.ngram_size)
        accepted = jax.vmap(read)(text, num_tokens, ends - (lookahead.ngram_size - 1))
        keys, ngrams, valid = (
            jnp.concatenate(pair, axis=1) for pair in zip((keys, ngrams, valid), accepted, strict=True)
        )
    return jax.vmap(ngram_pool.insert)(state.pool, keys, ngrams, valid)
