"""Prompts into the KV cache, and the state before the first step."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import PLAIN, RECYCLING, LookaheadConfig
from jlade.decoding import sampling, sharding
from jlade.decoding import vocabulary as vocabulary_lib
from jlade.decoding.state import Chunks, Constants, DecodeState, Info, Inputs, LogProbs, Prefix, Program
from jlade.decoding.vocabulary import Vocabulary
from jlade.drafts import recycled as recycling
from jlade.drafts import sources
from jlade.drafts.recycled import RecycledLogits
from jlade.drafts.sources import Drafts
from jlade.drafts.tree import NONE
from jlade.lookahead import adaptive, ngram_pool, window
from jlade.lookahead.ngram_pool import NGramPool
from jlade.mesh import DATA
from jlade.models.base import Decoder, KVCache, Params

NGRAMS = 32  # n-grams of a prompt that are inserted at once; the work for each grows with their number
ROWS = 64  # tokens of a prompt whose logits are computed at once, for each sequence
DRAWN = 64  # tokens drawn for the first window, or a multiple for larger windows


def prefill(params: Params, inputs: Inputs, program: Program) -> Prefix:
    """Returns the cache of the prompts, all but their last tokens, which the first step reads.

    It is compiled for the decoder, the chunks, the batch size and the capacity alone, and with recycled logits or
    without.

    Raises:
      ValueError: when the capacity is too small; see `jlade.decode`.
    """
    check_capacity(inputs)
    params, inputs = sharding.put_params(params, program), sharding.put(inputs, program)
    recycles = "recycled" in program.lookahead.reach
    program = dataclasses.replace(program, lookahead=RECYCLING if recycles else PLAIN, logprobs=False)
    return _read(params, inputs.prompts, inputs.lengths, inputs.cache, inputs.recycled if recycles else None, program)


def check_capacity(inputs: Inputs) -> None:
    """Raises a ValueError when a prompt and the new tokens exceed the capacity, unless they are being traced."""
    try:
        lengths, limits = np.asarray(inputs.lengths), np.asarray(inputs.stopping.max_new_tokens)
    except jax.errors.TracerArrayConversionError:
        return
    capacity, needed = inputs.prompts.shape[1], int(np.max(lengths + limits))
    if needed > capacity:
        raise ValueError(
            f"inputs.prompts has a capacity of {capacity} tokens, but a prompt and its max_new_tokens make {needed}: "
            f"pad it to [B, C] with C of at least {needed}"
        )


@functools.partial(jax.jit, static_argnames="program")
def _read(
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    cache: KVCache | None,
    table: RecycledLogits | None,
    program: Program,
) -> Prefix:
    read = functools.partial(_read_part, program=program)
    cache_specs = sharding.BATCH if cache is None else sharding.CACHE
    specs = sharding.param_specs(params, program), sharding.BATCH, sharding.BATCH, cache_specs, sharding.BATCH
    return mesh_lib.shard(read, program.mesh, specs, sharding.PREFIX)(params, prompts, lengths, cache, table)


def _read_part(
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    cache: KVCache | None,
    table: RecycledLogits | None,
    *,
    program: Program,
) -> Prefix:
    """`_read` for the sequences of a device."""
    decoder, mesh, recycles = program.decoder, program.mesh, "recycled" in program.lookahead.reach
    vocabulary = Vocabulary.of(decoder.vocab_size, mesh)
    batch_size, capacity = prompts.shape
    if cache is None:
        cache = decoder.init_cache(params, batch_size, capacity)
    if recycles and table is None:
        table = sources.empty_table(batch_size, decoder.vocab_size)
    to_read = lengths - 1

    # The loops run until the longest sequence is read, be it on another device: all leave them together.
    left = jnp.max(to_read - cache.length)
    left = left if mesh is None else jax.lax.pmax(left, DATA)

    def read(positions: jax.Array) -> jax.Array:
        return jax.vmap(lambda prompt, position: prompt.at[position].get(mode="clip"))(prompts, positions)

    def has_more_than(least: int, carry: tuple[Prefix, jax.Array]) -> jax.Array:
        return carry[1] > least

    def read_chunk(chunk: int, carry: tuple[Prefix, jax.Array]) -> tuple[Prefix, jax.Array]:
        (cache, table), left = (carry[0].cache, carry[0].recycled), carry[1]
        index = jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32), (batch_size, chunk))
        positions = cache.length[:, None] + index
        tokens = read(positions)
        hidden, block_kv = decoder.forward(params, tokens, positions, cache, np.tri(chunk, dtype=bool))
        # An upper bound of `chunk` or more changes nothing. As it depends on the result of the pass, the cache is
        # written after the last layer has read it, and so in place; otherwise compilers copy the cache.
        after_pass = chunk + jnp.isnan(hidden[:, 0, 0]).astype(jnp.int32)
        num_read = jnp.clip(to_read - cache.length, 0, after_pass)
        if table is not None:
            best = _best(params, hidden, decoder, vocabulary)
            before = jnp.where(positions == 0, NONE, read(positions - 1))
            order = jnp.where(index < num_read[:, None], index, -1)
            table = jax.vmap(recycling.update)(table, jnp.stack([before, tokens], axis=-1), best, order)
        return Prefix(decoder.commit(cache, block_kv, index, num_read), table), left - chunk

    prefix = Prefix(cache, table)
    for chunk, least in fitting(program.chunks, capacity):
        condition, body = functools.partial(has_more_than, least), functools.partial(read_chunk, chunk)
        prefix, left = jax.lax.while_loop(condition, body, (prefix, left))
    return prefix


def _best(params: Params, hidden: jax.Array, decoder: Decoder, vocabulary: Vocabulary) -> jax.Array:
    """Returns the tokens of the highest logits [B, T, k] of hidden states [B, T, E], a few at a time to save memory."""
    batch_size, size, width = hidden.shape
    together = math.gcd(size, ROWS)
    groups = jnp.swapaxes(hidden.reshape(batch_size, size // together, together, width), 0, 1)
    best = jax.lax.map(lambda group: vocabulary.top(decoder.logits(params, group), recycling.RANKS), groups)
    return jnp.swapaxes(best, 0, 1).reshape(batch_size, size, recycling.RANKS)


def fitting(chunks: Chunks, capacity: int) -> Chunks:
    """Returns the chunks for a cache of `capacity` entries, fewer for a small one: each compiles a forward pass."""
    *larger, (smallest, least) = chunks
    return (*(pair for pair in larger if 4 * pair[0] <= capacity), (min(smallest, capacity), least))


def start(prefix: Prefix, inputs: Inputs, program: Program) -> DecodeState:
    """Returns the state before the first step, for the result of `prefill`.

    Raises:
      ValueError: when the capacity is too small; see `jlade.decode`.
    """
    check_capacity(inputs)
    inputs = sharding.put(inputs, program)
    window_tokens = program.lookahead.window_size * (program.lookahead.ngram_size - 1)
    number = DRAWN * max(1, -(-window_tokens // DRAWN))
    keys, drawn = _draw(inputs.key, inputs.prompts, inputs.lengths, number)
    noise = sampling.noise_ahead(
        keys, inputs.lengths, inputs.sampling, lookahead=program.lookahead, vocab_size=program.decoder.vocab_size
    )
    return _start(prefix, inputs, keys, drawn, noise, program)


@functools.partial(jax.jit, static_argnames="number")
def _draw(key: jax.Array, prompts: jax.Array, lengths: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Returns the key of each sequence [B], and `number` tokens for its first window [B, number].

    It is a program of its own, for usual windows of any size, because random numbers take long to compile.
    """
    # A sequence with a key of its own is the first of a batch of its own. With one key for all sequences, equal prompts
    # get equal windows, wherever they stand in the batch.
    each = 0 if key.ndim else None
    index = jnp.zeros_like(lengths) if key.ndim else jnp.arange(len(lengths), dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(each, 0))(key, index)
    draw = functools.partial(window.draw, number=number)
    return keys, jax.vmap(draw, in_axes=(each, 0, 0))(key, prompts, lengths)


@functools.partial(jax.jit, static_argnames="program")
def _start(
    prefix: Prefix, inputs: Inputs, keys: jax.Array, drawn: jax.Array, noise: jax.Array | None, program: Program
) -> DecodeState:
    start = functools.partial(_start_part, program=program)
    specs = sharding.PREFIX, sharding.input_specs(inputs, program), *[sharding.BATCH] * 3
    out_specs = sharding.state_specs(inputs.stopping, program)
    return mesh_lib.shard(start, program.mesh, specs, out_specs)(prefix, inputs, keys, drawn, noise)


def _start_part(
    prefix: Prefix, inputs: Inputs, keys: jax.Array, drawn: jax.Array, noise: jax.Array | None, program: Program
) -> DecodeState:
    """`_start` for the sequences of a device."""
    lookahead, vocab_size = program.lookahead, program.decoder.vocab_size
    prompts, lengths = inputs.prompts, inputs.lengths
    batch_size = len(lengths)
    vocabulary = Vocabulary.of(vocab_size, program.mesh)
    pool = _pool(inputs, lookahead, vocabulary)
    first_window = functools.partial(window.start, window_size=lookahead.window_size, ngram_size=lookahead.ngram_size)
    sequence = jnp.arange(batch_size, dtype=jnp.int32)
    count = functools.partial(sampling.count_prompt, vocab_size=vocab_size)
    candidates = vocabulary_lib.lookup(pool, prompts[sequence, lengths - 1], vocabulary)
    return DecodeState(
        tokens=prompts,
        num_tokens=lengths,
        num_steps=jnp.zeros(batch_size, jnp.int32),
        done=jnp.zeros(batch_size, bool),
        cache=prefix.cache,
        window=jax.vmap(first_window)(drawn),
        pool=pool,
        candidates=candidates,
        drafts=None if lookahead.tree_size is None else _drafts(prefix, inputs, candidates, noise, program),
        counts=jax.vmap(count)(prompts, lengths) if inputs.sampling.counts_tokens else None,
        stop_state=None if inputs.stopping.strings is None else inputs.stopping.strings.start,
        pace=None if inputs.step_cost is None else adaptive.start(),
        constants=Constants(
            prompt_lengths=lengths,
            keys=keys,
            sampling=inputs.sampling,
            stopping=inputs.stopping,
            step_cost=inputs.step_cost,
            corpus=inputs.corpus,
        ),
        info=Info(
            accepted=jnp.zeros_like(prompts),
            num_candidates=jnp.zeros_like(prompts),
            contributed=jnp.zeros((batch_size, len(sources.KINDS)), jnp.int32),
            logprobs=LogProbs(*jnp.zeros((2, *prompts.shape), jnp.float32)) if program.logprobs else None,
        ),
    )


def _drafts(prefix: Prefix, inputs: Inputs, candidates: jax.Array, noise: jax.Array | None, program: Program) -> Drafts:
    """Returns the drafts [B, ...] for the first step."""
    batch_size, table = len(inputs.lengths), prefix.recycled
    if table is None and "recycled" in program.lookahead.reach:
        table = sources.empty_table(batch_size, program.decoder.vocab_size)
    record = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *x.shape)), sources.start())
    draft = functools.partial(sources.draft, corpus=inputs.corpus, lookahead=program.lookahead)
    return jax.vmap(draft)(inputs.prompts, inputs.lengths, candidates, record, table, noise)


def _pool(inputs: Inputs, lookahead: LookaheadConfig, vocabulary: Vocabulary) -> NGramPool:
    """Returns the pool [B, V, G, N-1] with, if asked for, the n-grams of the prompts that it lacks."""
    batch_size = len(inputs.lengths)
    if inputs.pool is None:
        empty = ngram_pool.empty(vocabulary.slice_size, lookahead.ngram_size, lookahead.guess_set_size)
        pool = jax.tree.map(lambda rows: jnp.broadcast_to(rows, (batch_size, *rows.shape)), empty)
    else:
        pool = jax.tree.map(jnp.copy, inputs.pool)  # decoding writes to the pool in place; the caller keeps its own
    if not lookahead.pool_from_prompt:
        return pool
    number = min(NGRAMS, inputs.prompts.shape[1])
    # A pool that came with a cache has the n-grams that end within the cache.
    first = jnp.zeros_like(inputs.lengths) if inputs.cache is None else inputs.cache.length
    read = jax.vmap(functools.partial(ngram_pool.ngrams_at, ngram_size=lookahead.ngram_size))

    def insert(carry: tuple[jax.Array, NGramPool]) -> tuple[jax.Array, NGramPool]:
        ends, pool = carry  # [B, number] places of the n-grams' last tokens
        ngrams = read(inputs.prompts, inputs.lengths, ends - (lookahead.ngram_size - 1))
        return ends + number, vocabulary_lib.insert(pool, *ngrams, vocabulary)

    ends = first[:, None] + jnp.arange(number, dtype=jnp.int32)[None, :]
    _, pool = jax.lax.while_loop(lambda carry: jnp.any(carry[0][:, 0] < inputs.lengths), insert, (ends, pool))
    return pool
