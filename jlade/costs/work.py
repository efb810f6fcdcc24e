"""The work of a decoding step on each device of a mesh, from shapes: arithmetic, bytes, collectives and memory."""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding

from jlade.config import LookaheadConfig
from jlade.costs.estimate import Operation
from jlade.drafts.source import RANKS
from jlade.drafts.sources import Sources
from jlade.lookahead.division import share_size
from jlade.mesh import AXES, COPIES, num_bytes
from jlade.models import sharding
from jlade.models.architecture import Heads
from jlade.models.llama import LlamaConfig, LlamaParams
from jlade.models.quantization import dense_shape, is_quantized
from jlade.vocabulary import VocabularyShard

FLOAT32 = 8  # times the arithmetic of bfloat16: six passes on TPUs, and up to 16 times the time on GPUs
CHUNK = 512  # tokens of a prompt that are read at once
PROGRAM = 500_000_000  # bytes of temporary memory of any program, an allowance: tests/accelerators compares it
LOGITS_PASSES = 3  # the product writes them; the highest, and its index, are found in two reductions


class MeshShape(NamedTuple):
    """The sizes of a mesh."""

    data: int
    lookahead: int
    model: int

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(self)


class Shard(NamedTuple):
    """The part of a model on a device.

    Attributes:
      arrays: shapes of the parameters there.
      kv_dtype: of keys and values in 8 bits, None for those of the model's dtype.
      kv_heads: on this device; one, of which other devices have copies, where there are fewer than devices. See
        `heads_by_layer` where layers differ.
      vocab_size: V', all tokens where they do not divide among the devices.
      elements: of the layers' matrices, in total.
      expert_elements, expert_bytes: those of experts among them.
      layer_bytes, output_bytes, num_bytes: of the layers, of the output matrix, and of everything.
    """

    config: LlamaConfig
    arrays: LlamaParams
    kv_dtype: str | None
    heads: int
    kv_heads: int
    vocab_size: int
    elements: int
    expert_elements: int
    expert_bytes: int
    layer_bytes: int
    output_bytes: int
    num_bytes: int

    @property
    def item(self) -> int:
        """Bytes of a number of the model's dtype."""
        return self.arrays.norm.dtype.itemsize

    @property
    def recurrent_share(self) -> float:
        """The share of the heads of recurrent layers that is on this device, as of all heads."""
        return self.heads / self.config.num_heads

    @property
    def heads_by_layer(self) -> tuple[Heads, ...]:
        """The heads for keys and values of each layer on this device."""
        c = self.config
        return tuple(
            heads._replace(number=heads.number * self.kv_heads // c.num_kv_heads) for heads in c.heads_by_layer
        )

    @property
    def kv_bytes(self) -> tuple[int, ...]:
        """The bytes of a token's keys and values in each layer on this device, with their scales."""
        c = self.config
        if self.kv_dtype is None:
            of_heads = [self.item * math.prod(heads) for heads in self.heads_by_layer]
        else:  # with a float32 scale for each part of a vector
            of_heads = [
                heads.number * (heads.size + 4 * c.scales_of(layer)) for layer, heads in enumerate(self.heads_by_layer)
            ]
        return tuple(c.arrays_per_layer * each for each in of_heads)

    @property
    def divides_vocabulary(self) -> bool:
        return self.vocab_size < self.config.vocab_size


class Collective(NamedTuple):
    """Sums, or maxima, over the devices of an axis.

    Attributes:
      devices: that each collective joins.
      span: the smallest number of consecutive devices that has all of them.
      times: in a step.
      num_bytes: of the arrays of a device, for all times together.
    """

    devices: int
    span: int
    times: int
    num_bytes: int


class Work(NamedTuple):
    """The work of a step on a device."""

    products: Operation  # with the matrices of the layers
    attention: Operation  # and recurrent mixers
    output: Operation  # the logits
    logits_bytes: int  # of the output's, those that are not weights
    collectives: tuple[Collective, ...]

    @property
    def parts(self) -> tuple[Operation, ...]:
        return self.products, self.attention, self.output

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)


class MemoryEstimate(NamedTuple):
    """Bytes of a device's memory. `temporary` is an allowance: compilers decide it."""

    weights: int
    cache: int
    pool: int  # and the states of other sources of drafts
    temporary: int

    @property
    def total(self) -> int:
        return sum(self)


def shard(params: LlamaParams, model: int, kv_dtype: str | None = None) -> Shard:
    """Returns the part of a model on each of `model` devices, which `jlade.models.sharding.can_divide` accepts.

    Args:
      params: shapes suffice.
      model: the number of devices.
      kv_dtype: of the cache; see `Shard`.
    """
    heads = min(model, params.config.num_kv_heads)
    mesh: Any = AbstractMesh((1, 1, heads, model // heads), (*AXES, COPIES))
    specs = jax.tree.broadcast(sharding.specs(params, mesh), params)

    def local(array: Any, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)

    arrays = jax.tree.map(local, params, specs)
    output = arrays.embedding if arrays.output is None else arrays.output
    read = arrays.layers if arrays.per_layer is None else (arrays.layers, arrays.per_layer.projection)
    shapes = [dense_shape(x) for x in jax.tree.leaves(read, is_leaf=is_quantized)]
    experts = [layer.experts for layer in arrays.layers]
    return Shard(
        config=params.config,
        arrays=arrays,
        kv_dtype=kv_dtype,
        heads=params.config.num_heads // model,
        kv_heads=params.config.num_kv_heads // heads,
        vocab_size=dense_shape(output)[0],
        elements=sum(math.prod(shape) for shape in shapes if len(shape) > 1),
        expert_elements=sum(math.prod(dense_shape(x)) for x in jax.tree.leaves(experts, is_leaf=is_quantized)),
        expert_bytes=num_bytes(experts),
        layer_bytes=num_bytes(read),
        output_bytes=num_bytes(output),
        num_bytes=num_bytes(arrays),
    )


def work(shard: Shard, layout: MeshShape, setting: LookaheadConfig, batch_size: int, capacity: int) -> Work:
    """Returns the work of a step of greedy decoding with a full cache.

    Args:
      shard: the result of `shard` for `layout.model`.
      layout: the mesh. Its `data` divides `batch_size`.
      setting: the setting.
      batch_size: B.
      capacity: tokens of each sequence in the cache; layers with a sliding window keep fewer.
    """
    c, sequences = shard.config, batch_size // layout.data
    tokens, outputs = share_size(setting, layout.lookahead)
    sizes = [heads.size if c.latent is None else c.latent.key_size for heads in c.heads_by_layer]
    entries = c.entries_by_layer(capacity)
    numbers = [shard.heads * c.num_heads_of(i) // c.num_heads for i in range(c.num_layers)]  # on this device
    scores = 2 * tokens * sum(numbers[i] * sizes[i] * (entries[i] + tokens) for i in c.attention_layers)
    logits = sequences * outputs * shard.vocab_size
    logits_bytes = LOGITS_PASSES * 4 * logits
    unused, unread = 1 - c.share_of_experts(1), 1 - c.share_of_experts(sequences * tokens)
    elements = shard.elements - round(unused * shard.expert_elements)
    return Work(
        products=Operation(2 * sequences * tokens * elements, shard.layer_bytes - round(unread * shard.expert_bytes)),
        attention=Operation(
            sequences * (2 * scores + _index_flops(c, tokens, capacity) + _recurrent_flops(shard, tokens)),
            # States are read twice and written.
            sequences * (_entry_bytes(shard, capacity, c.attention_layers) + 3 * _state_bytes(shard)),
        ),
        output=Operation(2 * logits * c.hidden_size, shard.output_bytes + logits_bytes),
        logits_bytes=logits_bytes,
        collectives=_collectives(shard, layout, setting, sequences),
    )


def memory(shard: Shard, layout: MeshShape, setting: LookaheadConfig, batch_size: int, capacity: int) -> MemoryEstimate:
    """Returns the memory of a device. Arguments are those of `work`."""
    c, sequences = shard.config, batch_size // layout.data
    _, outputs = share_size(setting, layout.lookahead)
    inner = max(c.intermediate_size, c.dense_size) // layout.model
    if c.num_experts:  # the tokens of each expert, in and out
        inner += 2 * c.experts_per_token * (c.expert_width + c.expert_size)
    chunk = CHUNK * (6 * c.hidden_size + 3 * inner) * shard.item
    if c.recurrence is not None and c.recurrence.has_memory:  # products of each two tokens of a chunk
        chunk += round(4 * 4 * CHUNK**2 * c.recurrence.value_heads * shard.recurrent_share)
    if _index_flops(c, CHUNK, capacity):  # scores, those that are visible, and what is chosen
        chunk += 4 * 4 * CHUNK * capacity
    return MemoryEstimate(
        weights=shard.num_bytes,
        cache=sequences * cache_bytes(shard, capacity),
        pool=sequences * _source_bytes(setting, c.vocab_size),
        temporary=PROGRAM + sequences * (chunk + 4 * outputs * shard.vocab_size),
    )


@functools.cache
def _source_bytes(setting: LookaheadConfig, vocab_size: int) -> int:
    """Returns the bytes of the states of the sources of drafts of a sequence. They are whole on each device."""
    states = jax.eval_shape(Sources.of(setting, VocabularyShard(vocab_size)).empty)
    return sum(state.size * state.dtype.itemsize for state in jax.tree.leaves(states))


def cache_bytes(shard: Shard, capacity: int) -> int:
    """Returns the bytes of the cache of a sequence."""
    return _entry_bytes(shard, capacity, shard.config.kv_layers) + _state_bytes(shard)


def _entry_bytes(shard: Shard, capacity: int, layers: Iterable[int]) -> int:
    """Returns the bytes that some layers read of the cache of a sequence."""
    by_layer, entries = shard.kv_bytes, shard.config.entries_by_layer(capacity)
    return sum(by_layer[i] * entries[i] for i in layers)


def _state_bytes(shard: Shard) -> int:
    """Returns the bytes of the states of a sequence's recurrent layers."""
    sizes, share = shard.config.recurrence, shard.recurrent_share
    if sizes is None:
        return 0
    memory = 4 * sizes.values * sizes.key_size if sizes.has_memory else 0
    inputs = (sizes.taps - 1) * sizes.channels
    return round(share * len(shard.config.recurrent_layers) * (memory + inputs * shard.item))


def _index_flops(config: LlamaConfig, tokens: int, capacity: int) -> int:
    """Returns the arithmetic of a sequence's choices of the tokens that are seen. It is whole on each device."""
    index = None if config.latent is None else config.latent.index
    if index is None or capacity <= index.chosen:
        return 0
    layers = sum(map(config.has_index, range(config.num_layers)))
    return 2 * layers * tokens * index.heads * index.size * (capacity + tokens)


def _recurrent_flops(shard: Shard, tokens: int) -> int:
    """Returns the arithmetic of a sequence's recurrent layers, beside products with matrices, in that of bfloat16."""
    sizes, share = shard.config.recurrence, shard.recurrent_share
    if sizes is None or not sizes.has_memory:
        return 0
    with_state = tokens * sizes.key_size * sizes.value_size
    among = tokens**2 * (sizes.key_size * sizes.key_heads // sizes.value_heads + sizes.value_size)
    layers, products = len(shard.config.recurrent_layers), 2 if sizes.corrects else 1  # of queries, and of keys
    return round(2 * products * FLOAT32 * share * layers * sizes.value_heads * (with_state + among))


def _collectives(shard: Shard, layout: MeshShape, setting: LookaheadConfig, sequences: int) -> tuple[Collective, ...]:
    """Returns the collectives of a step: see `jlade.decoding.step` and `jlade.models.llama`."""
    c, collectives = shard.config, []
    tokens, outputs = share_size(setting, layout.lookahead)
    whole = share_size(setting, 1)[1]
    reads = bool(Sources.of(setting, VocabularyShard(c.vocab_size)).readers.sources)
    if layout.model > 1:
        hidden = sequences * tokens * c.hidden_size * shard.item
        # Layers with two sums beside each other: of MLP and experts, or of attention and a recurrent mixer.
        both = sum(c.has_experts(i) and c.mlp_size(i) > 0 for i in range(c.num_layers))
        both += len(set(c.attention_layers) & set(c.recurrent_layers))
        of_experts = sequences * tokens * c.expert_width * shard.item
        experts = sum(map(c.has_experts, range(c.num_layers)))
        arrays = (c.num_parts + both - experts) * [hidden] + experts * [of_experts]
        of_layers = shard.arrays.per_layer
        if of_layers is not None and of_layers.embedding.shape[0] < c.per_layer_vocab_size:
            arrays += [sequences * tokens * c.num_layers * c.per_layer_size * shard.item]
        if shard.divides_vocabulary:  # the embedding, the highest logits and their indices
            arrays += [hidden, 4 * sequences * outputs, 4 * sequences * outputs]
            if reads:  # the highest logits of each slice and their tokens
                arrays += 2 * [4 * sequences * outputs * min(RANKS, shard.vocab_size)]
        collectives.append(Collective(layout.model, layout.model, len(arrays), sum(arrays)))
    if layout.lookahead > 1:
        # Predictions; keys, values and updates.
        arrays = [4 * sequences * whole, sequences * setting.max_accepted * _kept_bytes(shard)]
        arrays += [4 * sequences * setting.max_accepted]  # whether the logits of accepted tokens are finite
        arrays += [4 * sequences * whole * RANKS] if reads else []
        collectives.append(Collective(layout.lookahead, layout.lookahead * layout.model, len(arrays), sum(arrays)))
    if layout.data > 1:
        collectives.append(
            Collective(layout.data, layout.num_devices, 1, 4)
        )  # the number of sequences that have not ended
    return tuple(collectives)


def _kept_bytes(shard: Shard) -> int:
    """Returns the bytes of a token of the keys, values and updates that `Decoder.commit` needs."""
    c, sizes = shard.config, shard.config.recurrence
    kept = sum(shard.kv_bytes[i] for i in c.kv_layers)
    if sizes is None:
        return kept
    vectors = sizes.keys + sizes.values + sizes.decays if sizes.has_memory else 0
    of_layer = shard.recurrent_share * (sizes.channels * shard.item + 4 * vectors)
    return kept + round(len(c.recurrent_layers) * of_layer)
