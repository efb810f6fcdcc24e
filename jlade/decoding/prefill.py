"""Prompts into the KV cache, and the state before the first step."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.constraints import constraint as constraints
from jlade.constraints.constraint import Constraint
from jlade.decoding import ahead, sampling, sharding
from jlade.decoding.sampling import LogProbs, Sampling
from jlade.decoding.state import Chunks, DecodeConfig, DecodeState, Info, Inputs, Memory, Prefix
from jlade.drafts import graded
from jlade.drafts.source import RANKS, Passage, Prompt, State, Text
from jlade.drafts.sources import TABLE, Drafts, Sources
from jlade.drafts.tree import NONE
from jlade.lookahead import adaptive, window
from jlade.mesh import DATA
from jlade.models.base import Decoder, Params
from jlade.vocabulary import VocabularyShard

ROWS = 64  # tokens of a prompt whose logits are computed at once, for each sequence
DRAWN = 64  # tokens drawn for the first window, or a multiple for larger windows


@mesh_lib.mesh_agnostic
def prefill(params: Params, inputs: Inputs, config: DecodeConfig) -> Prefix:
    """Returns the cache of the prompts, all but their last tokens, which the first step reads.

    Each size of chunks has a program, which is compiled when a prompt needs it: for the decoder, the batch size, the
    capacity and the sources that read prompts.

    Raises:
      ValueError: when the capacity is too small; see `jlade.decode`.
    """
    check_capacity(inputs)
    left = _num_left(inputs)
    params, inputs = sharding.put_params(params, config.mesh), sharding.put(inputs, config)
    readers = config.sources.readers
    # The programs know of the setting only the sources that read prompts.
    states = {name: state for name, state in inputs.sources.items() if name in readers.specs}
    reading = _Reading(config.decoder, readers, config.mesh)
    prefix = _begin_prefix(params, inputs.prompts, Prefix(inputs.cache, states), reading=reading)
    chunks = fitting(config.chunks, inputs.prompts.shape[1])
    if left is not None:
        passes = num_passes(chunks, inputs.prompts.shape[1], left)
        chunks = tuple(chunk for chunk, number in zip(chunks, passes, strict=True) if number)
    for chunk in chunks:
        prefix = _read(params, inputs.prompts, inputs.lengths, prefix, reading=reading, chunk=chunk)
    return prefix


def _num_left(inputs: Inputs) -> int | None:
    """Returns the number of tokens that are to be read of the longest prompt, None where the host does not know."""
    try:
        num_read = 0 if inputs.cache is None else np.asarray(inputs.cache.length)
        return int(np.max(np.asarray(inputs.lengths) - 1 - num_read))
    except (TypeError, RuntimeError, jax.errors.TracerArrayConversionError):  # shapes, other processes' arrays, tracers
        return None


def check_capacity(inputs: Inputs) -> None:
    """Raises a ValueError when a prompt and the new tokens exceed the capacity, unless these are tracers or shapes."""
    if isinstance(inputs.lengths, jax.ShapeDtypeStruct):
        return
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


@dataclasses.dataclass(frozen=True)
class _Reading:
    """The static part of the programs that read prompts."""

    decoder: Decoder
    readers: Sources
    mesh: Mesh | None

    def begin(self, params: Params, prompts: jax.Array, prefix: Prefix) -> Prefix:
        """Returns arrays for the prefix of the sequences of a device, with what it has read already."""
        cache = prefix.cache
        if cache is None:
            cache = self.decoder.init_cache(params, *prompts.shape)
        return Prefix(cache, for_each(self.readers.empty(), len(prompts)) | prefix.sources)

    def read(
        self, params: Params, prompts: jax.Array, lengths: jax.Array, prefix: Prefix, chunk: tuple[int, int]
    ) -> Prefix:
        """Reads chunks of the prompts on a device. `chunk` has their tokens, and how many may be left in the end."""
        size, threshold = chunk
        to_read, vocabulary = lengths - 1, VocabularyShard.of(self.decoder.vocab_size, self.mesh)
        index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (len(lengths), size))

        def take(positions: jax.Array) -> jax.Array:
            return jax.vmap(lambda prompt, position: prompt.at[position].get(mode="clip"))(prompts, positions)

        def read_chunk(carry: tuple[Prefix, jax.Array]) -> tuple[Prefix, jax.Array]:
            (cache, states), left = (carry[0].cache, carry[0].sources), carry[1]
            positions = cache.length[:, None] + index
            tokens = take(positions)
            hidden, block_kv = self.decoder.forward(params, tokens, positions, cache, np.tri(size, dtype=bool))
            # A second upper bound of `size` or more changes nothing. As it depends on the result of the pass, the
            # cache is written after the last layer has read it, and so in place; otherwise compilers copy the cache.
            after_pass = size + jnp.isnan(hidden[:, 0, 0]).astype(jnp.int32)
            num_read = jnp.minimum(jnp.clip(to_read - cache.length, 0, size), after_pass)
            if states:
                previous = jnp.where(positions == 0, NONE, take(positions - 1))
                tokens_after = best(params, hidden, self.decoder, vocabulary)
                states = jax.vmap(self.readers.read)(states, Passage(tokens, previous, tokens_after, num_read))
            return Prefix(self.decoder.commit(cache, block_kv, index, num_read), states), left - size

        # The loop runs until the longest sequence is read, be it on another device: all leave it together.
        left = jnp.max(to_read - prefix.cache.length)
        left = left if self.mesh is None else jax.lax.pmax(left, DATA)
        return jax.lax.while_loop(lambda carry: carry[1] > threshold, read_chunk, (prefix, left))[0]

    def specs(self, prefix: Prefix | None = None) -> Prefix:
        """Returns those of `sharding.prefix_specs`."""
        return sharding.prefix_specs(self.decoder, self.readers, prefix)


@ahead.jit(static_argnames="reading")
def _begin_prefix(params: Params, prompts: jax.Array, prefix: Prefix, *, reading: _Reading) -> Prefix:
    specs = sharding.param_specs(params, reading.mesh), sharding.BATCH, reading.specs(prefix)
    return mesh_lib.shard(reading.begin, reading.mesh, specs, reading.specs())(params, prompts, prefix)


@ahead.jit(static_argnames=("reading", "chunk"), donate_argnames="prefix")
def _read(
    params: Params, prompts: jax.Array, lengths: jax.Array, prefix: Prefix, *, reading: _Reading, chunk: tuple[int, int]
) -> Prefix:
    specs = sharding.param_specs(params, reading.mesh), sharding.BATCH, sharding.BATCH, reading.specs()
    read = functools.partial(reading.read, chunk=chunk)
    return mesh_lib.shard(read, reading.mesh, specs, reading.specs())(params, prompts, lengths, prefix)


def best(params: Params, hidden: jax.Array, decoder: Decoder, vocabulary: VocabularyShard) -> jax.Array:
    """Returns the most probable tokens after hidden states [B, T, E], graded [B, T, k].

    To save memory, it takes a few rows at a time.
    """
    batch_size, size, width = hidden.shape
    num_rows = math.gcd(size, ROWS)
    groups = jnp.swapaxes(hidden.reshape(batch_size, size // num_rows, num_rows, width), 0, 1)
    best_of_groups = jax.lax.map(lambda group: graded.best(decoder.logits(params, group), vocabulary), groups)
    return jnp.swapaxes(best_of_groups, 0, 1).reshape(batch_size, size, RANKS)


def fitting(chunks: Chunks, capacity: int) -> Chunks:
    """Returns the chunks for a cache of `capacity` entries, fewer for a small one: each compiles a forward pass."""
    *larger, (smallest, threshold) = chunks
    return (*(pair for pair in larger if 4 * pair[0] <= capacity), (min(smallest, capacity), threshold))


def num_passes(chunks: Chunks, capacity: int, num_tokens: int) -> list[int]:
    """Returns the number of forward passes over each chunk in which `num_tokens` tokens of a prompt are read."""
    passes = []
    for chunk, threshold in fitting(chunks, capacity):
        passes.append(max(0, -((threshold - num_tokens) // chunk)))
        num_tokens -= chunk * passes[-1]
    return [0] * (len(chunks) - len(passes)) + passes


@mesh_lib.mesh_agnostic
def start(prefix: Prefix, inputs: Inputs, config: DecodeConfig, places: jax.Array | None = None) -> DecodeState:
    """Returns the state before the first step, for the result of `prefill`.

    Args:
      prefix, inputs, config: of `prefill`.
      places: int32[B], the places of the sequences in the batch whose key they share; by default 0 to B-1.

    Raises:
      ValueError: when the capacity is too small (see `jlade.decode`), or `Inputs.costs` does not fit the lookahead.
    """
    check_capacity(inputs)
    if inputs.costs is not None and not config.lookahead.has_forecast:
        raise ValueError(
            "Inputs.costs must be None for a lookahead without a tree or with a window: it has no forecast"
        )
    inputs = sharding.put(inputs, config)
    # Another setting may have read the prompts, with sources that this one lacks.
    states = {name: state for name, state in prefix.sources.items() if name in config.sources.readers.specs}
    prefix = dataclasses.replace(prefix, sources=states)
    window_tokens = config.lookahead.window_size * (config.lookahead.ngram_size - 1)
    num_drawn = DRAWN * -(-window_tokens // DRAWN)
    keys, drawn = _draw(inputs.key, inputs.prompts, inputs.lengths, places, num_drawn)
    noise = _noise(keys, inputs.lengths, inputs.sampling, config.lookahead, config.decoder.vocab_size)
    return _start(prefix, inputs, keys, drawn, noise, config)


def unread(state: DecodeState) -> DecodeState:
    """Returns a result of `start` with as many tokens as its cache has read, and the one after these."""
    return dataclasses.replace(state, num_tokens=state.cache.length + 1)


# Random numbers take long to compile: the two programs below serve windows of any usual size, or none, and any drafts.


@ahead.jit(static_argnames="num_drawn")
def _draw(
    key: jax.Array, prompts: jax.Array, lengths: jax.Array, places: jax.Array | None, num_drawn: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the key of each sequence [B], and tokens for its first window [B, num_drawn]."""
    # A sequence with a key of its own is the first of a batch of its own. With one key for all sequences, equal prompts
    # get equal windows, wherever they stand in the batch.
    key, key_axis = sampling.threefry(key), 0 if key.ndim else None
    if places is None:
        places = jnp.zeros_like(lengths) if key.ndim else jnp.arange(len(lengths), dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(key_axis, 0))(key, places)
    draw = functools.partial(window.draw, number=num_drawn)
    return keys, jax.vmap(draw, in_axes=(key_axis, 0, 0))(key, prompts, lengths)


@ahead.jit(static_argnames=("lookahead", "vocab_size"))
def _noise(
    keys: jax.Array, lengths: jax.Array, sampling_arrays: Sampling, lookahead: LookaheadConfig, vocab_size: int
) -> jax.Array | None:
    noise = functools.partial(sampling.noise_ahead, lookahead=lookahead, vocab_size=vocab_size)
    return jax.vmap(noise)(keys, lengths, sampling_arrays)


@ahead.jit(static_argnames="config")
def _start(
    prefix: Prefix, inputs: Inputs, keys: jax.Array, drawn: jax.Array, noise: jax.Array | None, config: DecodeConfig
) -> DecodeState:
    specs = (
        sharding.prefix_specs(config.decoder, config.sources.readers, prefix),
        sharding.input_specs(inputs, config),
        *[sharding.BATCH] * 3,
    )
    out_specs = sharding.state_specs(_kept(inputs, keys), config)
    start = functools.partial(_start_of_device, config=config)
    return mesh_lib.shard(start, config.mesh, specs, out_specs)(prefix, inputs, keys, drawn, noise)


def _start_of_device(
    prefix: Prefix, inputs: Inputs, keys: jax.Array, drawn: jax.Array, noise: jax.Array | None, config: DecodeConfig
) -> DecodeState:
    lookahead, sources = config.lookahead, config.sources
    prompts, lengths = inputs.prompts, inputs.lengths
    batch_size = len(lengths)

    # Decoding writes to the states in place; the caller keeps its own.
    states = for_each(sources.empty(), batch_size) | jax.tree.map(jnp.copy, inputs.sources) | prefix.sources
    num_cached = jnp.zeros_like(lengths) if inputs.cache is None else inputs.cache.length
    longest = jnp.max(lengths - num_cached)

    def draft(
        states: dict[str, State],
        tokens: jax.Array,
        length: jax.Array,
        num_cached: jax.Array,
        noise: Any,
        constraint: Constraint | None,
        constraint_state: Any,
        has_drafts: jax.Array | None,
    ) -> Drafts:
        states = sources.start(states, Prompt(tokens, length, num_cached, longest))
        guide = constraints.guide(constraint, constraint_state)
        return sources.draft(None, Text(tokens, length, noise, guide, inputs.shared, states), has_drafts)

    constraint_axes = sharding.batch_axes(sharding.constraint_specs(inputs.constraint))
    draft_all = jax.vmap(draft, in_axes=(0, 0, 0, 0, 0, constraint_axes, 0, 0))
    constraint_state = _constraint_state(inputs, constraint_axes)
    of_constraint = inputs.constraint, constraint_state
    drafts = draft_all(states, prompts, lengths, num_cached, noise, *of_constraint, inputs.has_drafts)

    first_window = functools.partial(window.start, window_size=lookahead.window_size, ngram_size=lookahead.ngram_size)
    count = functools.partial(sampling.count_prompt, vocab_size=config.decoder.vocab_size)
    return DecodeState(
        tokens=prompts,
        num_tokens=lengths,
        num_steps=jnp.zeros(batch_size, jnp.int32),
        done=jnp.zeros(batch_size, bool),
        inputs=_kept(inputs, keys),
        memory=Memory(cache=prefix.cache, drafts=drafts),
        window=jax.vmap(first_window)(drawn),
        counts=jax.vmap(count)(prompts, lengths) if inputs.sampling.counts_tokens else None,
        stop_state=None if inputs.stopping.strings is None else inputs.stopping.strings.start,
        constraint_state=constraint_state,
        pace=None if inputs.costs is None else adaptive.start(inputs.costs),
        info=Info(
            accepted=jnp.zeros_like(prompts),
            num_drafted=jnp.zeros_like(prompts),
            contributed=jnp.zeros((batch_size, len(TABLE)), jnp.int32) if config.lookahead.has_tree else None,
            logprobs=_no_logprobs(prompts.shape, config.top_logprobs) if config.logprobs else None,
        ),
    )


def _constraint_state(inputs: Inputs, axes: Any) -> Any:
    if inputs.constraint is None:
        return None

    def start(constraint: Constraint, tokens: jax.Array, length: jax.Array) -> Any:
        return constraint.start(tokens, length)

    return jax.vmap(start, in_axes=(axes, 0, 0))(inputs.constraint, inputs.prompts, inputs.lengths)


def _kept(inputs: Inputs, keys: jax.Array) -> Inputs:
    """Returns the inputs without the arrays that a state takes over, and with the keys of the sequences."""
    return dataclasses.replace(inputs, prompts=None, cache=None, sources={}, key=keys)  # type: ignore[arg-type]


def _no_logprobs(shape: tuple[int, ...], num_top: int) -> LogProbs:
    chosen, top = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, num_top), jnp.float32)
    return LogProbs(chosen, chosen, top, top.astype(jnp.int32))


def for_each(states: dict[str, State], batch_size: int) -> dict[str, State]:
    """Returns the state of one sequence for each of a batch [B, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *x.shape)), states)
