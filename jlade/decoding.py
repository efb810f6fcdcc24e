"""Decoding as one compiled program: a state, a step from state to state, and the loop over it.

`decode` is prefill, then `step` until every row is done. Its shapes depend on the setting, the batch size and the
capacity alone, so another prompt, length, seed, limit or set of end tokens compiles nothing. It can be called under
the caller's own `jit`.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade import sampling as sampling_lib
from jlade.config import LookaheadConfig
from jlade.lookahead import block as blocks
from jlade.lookahead import ngram_pool, window
from jlade.lookahead.block import Block
from jlade.lookahead.ngram_pool import NGramPool
from jlade.lookahead.verification import Verdict, verify_by_rejection, verify_greedy
from jlade.models.base import Decoder, KVCache, Params
from jlade.sampling import Sampling, TokenCounts

GREEDY = Sampling()
NO_POSITION = np.uint32(2**31)
PREFILL_CHUNK = 128  # tokens of the prompt per forward pass


@flax.struct.dataclass
class DecodeState:
    """Everything that decoding carries from step to step, for B sequences in C token places each.

    The last of the `num_tokens` tokens is the current one: the model has yet to read it, so the cache holds one row
    less.
    """

    tokens: jax.Array  # [B, C] int32, prompt and accepted tokens
    num_tokens: jax.Array  # [B] int32
    max_tokens: jax.Array  # [B] int32, a row ends when it has so many
    eos_ids: jax.Array  # [B, K] int32, a row ends with any of these; padded with -1
    done: jax.Array  # [B] bool
    steps: jax.Array  # [B] int32, forward passes made, prefill not counted
    accepted: jax.Array  # [B, C] int32, tokens accepted in each step
    cache: KVCache  # C rows
    window: jax.Array  # [B, N-1, W] int32
    pool: NGramPool  # ngrams [B, V, G, N-1]
    key: jax.Array  # [B] keys of jax.random, from which a row's noise comes
    sampling: Sampling  # fields [B]
    counts: TokenCounts | None  # [B, V], None when no control counts tokens


@functools.partial(jax.jit, static_argnames=("decoder", "lookahead"))
def decode(
    params: Params,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    max_new_tokens: jax.Array,
    eos_ids: jax.Array,
    key: jax.Array,
    sampling: Sampling = GREEDY,
    *,
    decoder: Decoder,
    lookahead: LookaheadConfig,
) -> DecodeState:
    """Decodes until every row has ended. For the arguments see `prefill`."""
    arrays = (params, prompts, prompt_lengths, max_new_tokens, eos_ids, key, sampling)
    state = prefill(*arrays, decoder=decoder, lookahead=lookahead)
    one_step = functools.partial(step, params, decoder=decoder, lookahead=lookahead)
    return jax.lax.while_loop(lambda s: ~jnp.all(s.done), one_step, state)


def prefill(
    params: Params,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    max_new_tokens: jax.Array,
    eos_ids: jax.Array,
    key: jax.Array,
    sampling: Sampling = GREEDY,
    *,
    decoder: Decoder,
    lookahead: LookaheadConfig,
) -> DecodeState:
    """Reads the prompts in chunks of `PREFILL_CHUNK` tokens and returns the state before the first step.

    Args:
      params: the decoder's parameters.
      prompts: [B, C] int32; C is the capacity, so it must hold the longest prompt and what is generated after it.
      prompt_lengths: [B] int32, at least 1.
      max_new_tokens: [B] int32, at least 1.
      eos_ids: [B, K] int32, padded with -1.
      key: made by `jax.random.key`, one for all rows or one for each [B]. It gives the noise of sampled tokens, other
        noise in every row, and the draw of the first window, which decides how many steps are taken but not the text.
      sampling: how tokens are drawn; greedily by default.
      decoder: the model.
      lookahead: the setting of W, N and G.
    """
    prompts, prompt_lengths, max_new_tokens, eos_ids = map(
        jnp.asarray, (prompts, prompt_lengths, max_new_tokens, eos_ids)
    )
    batch_size, capacity = prompts.shape
    chunk = min(PREFILL_CHUNK, capacity)
    mask = np.tri(chunk, dtype=bool)
    num_chunks = jnp.max(prompt_lengths - 1 + chunk - 1) // chunk  # the last token is left to the first step
    rows = jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32), (batch_size, chunk))

    def read_chunk(carry):
        index, cache, pool = carry
        places = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        tokens = prompts.at[:, places].get(mode="clip")
        positions = jnp.broadcast_to(places, tokens.shape)
        hidden, block_kv = decoder.forward(params, tokens, positions, cache, mask)
        # An upper bound of `chunk` or more changes nothing, but as it depends on what the pass returns, the cache is
        # written after the last layer has read it, and so in place; otherwise compilers copy it to be safe.
        after_pass = chunk + jnp.isnan(hidden[:, 0, 0]).astype(jnp.int32)
        num_rows = jnp.clip(prompt_lengths - 1 - index * chunk, 0, after_pass)
        cache = decoder.commit(cache, block_kv, rows, num_rows)
        if lookahead.pool_from_prompt:
            read = functools.partial(ngram_pool.ngrams_at, starts=places, ngram_size=lookahead.ngram_size)
            pool = jax.vmap(ngram_pool.insert)(pool, *jax.vmap(read)(prompts, prompt_lengths))
        return index + 1, cache, pool

    cache = decoder.init_cache(params, batch_size, capacity)
    empty_pool = ngram_pool.empty(decoder.vocab_size, lookahead.ngram_size, lookahead.guess_set_size)
    pool = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *x.shape)), empty_pool)
    _, cache, pool = jax.lax.while_loop(lambda carry: carry[0] < num_chunks, read_chunk, (jnp.int32(0), cache, pool))

    # One key for all rows draws the same first window for equal prompts, wherever they stand in the batch.
    start = functools.partial(window.start, window_size=lookahead.window_size, ngram_size=lookahead.ngram_size)
    first_window = jax.vmap(start, in_axes=(0 if key.ndim else None, 0, 0))(key, prompts, prompt_lengths)
    row = jnp.arange(batch_size, dtype=jnp.int32)
    count = functools.partial(sampling_lib.count_prompt, vocab_size=decoder.vocab_size)
    return DecodeState(
        tokens=prompts,
        num_tokens=prompt_lengths,
        max_tokens=prompt_lengths + max_new_tokens,
        eos_ids=eos_ids,
        done=jnp.zeros(batch_size, bool),
        steps=jnp.zeros(batch_size, jnp.int32),
        accepted=jnp.zeros_like(prompts),
        cache=cache,
        window=first_window,
        pool=pool,
        key=key if key.ndim else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row),
        sampling=sampling,
        counts=jax.vmap(count)(prompts, prompt_lengths) if sampling.counts_tokens else None,
    )


def step(params: Params, state: DecodeState, *, decoder: Decoder, lookahead: LookaheadConfig) -> DecodeState:
    """One step: look up, forward, verify, commit, harvest, advance. A row that is done stays as it is."""
    block = blocks.build(lookahead.window_size, lookahead.ngram_size, lookahead.guess_set_size)
    row = jnp.arange(len(state.done), dtype=jnp.int32)

    # Look up the candidates of the current token and run the block.
    current = state.tokens[row, state.num_tokens - 1]
    candidates = jax.vmap(ngram_pool.lookup)(state.pool, current)  # [B, G, N-1]
    tokens = jax.vmap(blocks.tokens)(current, state.window, candidates)
    tokens = jnp.maximum(tokens, 0)  # an empty slot is fed as some token; verification sees that it is empty
    positions = (state.num_tokens - 1)[:, None] + block.positions[None, :]
    hidden, block_kv = decoder.forward(params, tokens, positions, state.cache, block.mask)
    logits = decoder.logits(params, hidden[:, block.output_rows])  # [B, 1 + W + G(N-1), V]
    predict = functools.partial(_predict, block=block, lookahead=lookahead)
    new, verdict = jax.vmap(predict)(logits, candidates, state.num_tokens - 1, state.key, state.sampling, state.counts)

    # Cut at the limit and behind an end token, before anything is kept.
    offset = jnp.arange(lookahead.max_accepted, dtype=jnp.int32)[None, :]
    is_eos = jnp.any(verdict.tokens[:, :, None] == state.eos_ids[:, None, :], axis=-1)
    first_eos = jnp.min(jnp.where(is_eos, offset, lookahead.max_accepted), axis=1)
    num_accepted = jnp.minimum(verdict.num_accepted, state.max_tokens - state.num_tokens)
    num_accepted = jnp.where(state.done, 0, jnp.minimum(num_accepted, first_eos + 1))
    num_tokens = state.num_tokens + num_accepted

    # Commit the current token and the accepted candidate tokens.
    accepted_rows = jnp.asarray(block.accepted_rows)[verdict.candidate]
    cache = decoder.commit(state.cache, block_kv, accepted_rows, num_accepted)
    place = jnp.where(offset < num_accepted[:, None], state.num_tokens[:, None] + offset, state.tokens.shape[1])
    text = state.tokens.at[row[:, None], place].set(verdict.tokens, mode="drop")
    counts = state.counts
    if counts is not None:
        counts = jax.vmap(sampling_lib.count_accepted)(counts, verdict.tokens, num_accepted)

    return dataclasses.replace(
        state,
        tokens=text,
        num_tokens=num_tokens,
        done=state.done | (first_eos < num_accepted) | (num_tokens == state.max_tokens),
        steps=state.steps + (~state.done).astype(jnp.int32),
        accepted=state.accepted.at[row, state.steps].set(num_accepted, mode="drop"),
        cache=cache,
        window=jnp.where(state.done[:, None, None], state.window, jax.vmap(window.advance)(state.window, new)),
        pool=_harvest(state, current, new, text, num_tokens, lookahead),
        counts=counts,
    )


def _predict(
    logits: jax.Array,
    candidates: jax.Array,
    position: jax.Array,
    key: jax.Array,
    sampling: Sampling,
    counts: TokenCounts | None,
    *,
    block: Block,
    lookahead: LookaheadConfig,
) -> tuple[jax.Array, Verdict]:
    """Draws the window's new tokens [W] of one row and verifies its candidates.

    Args:
      logits: [1 + W + G(N-1), V] of the current token, the newest window row and the candidates.
      candidates: [G, N-1].
      position: the current token's.
      key, sampling, counts: the row's.
    """
    vocab_size, window_end = logits.shape[1], 1 + lookahead.window_size
    if counts is None:
        logits = sampling_lib.process(logits, sampling, None, None)
    else:
        # The window's tokens are guesses, for which the text's own counts do; a candidate's token counts those before.
        drafted = jnp.cumsum(jax.nn.one_hot(candidates, vocab_size, dtype=jnp.int32), axis=1)
        drafted = jnp.pad(drafted.reshape(-1, vocab_size), ((window_end, 0), (0, 0)))
        logits = sampling_lib.process(logits, sampling, counts.prompt, counts.generated[None, :] + drafted)

    drawn = greedy = sampling_lib.argmax(logits)
    if sampling.temperature is not None:
        offsets = block.positions[block.output_rows]
        places = position + 1 + jnp.arange(offsets.max() + 1, dtype=jnp.int32)  # of the tokens that are predicted
        drawn = sampling_lib.argmax(logits + sampling_lib.noise_at(key, places, vocab_size)[offsets])

    new = (greedy if lookahead.window_draw == "greedy" else drawn)[1:window_end]
    if sampling.temperature is None or lookahead.verification == "coupled" or lookahead.guess_set_size == 0:
        return new, verify_greedy(candidates, drawn[0], drawn[window_end:].reshape(candidates.shape))
    apart = jax.random.fold_in(key, NO_POSITION)  # how the window was drawn must not decide what is accepted
    after = logits[window_end:].reshape(*candidates.shape, vocab_size)
    return new, verify_by_rejection(jax.random.fold_in(apart, position), candidates, logits[0], after)


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
