"""Models of tunix as decoders: any that is called with tokens, positions, a cache and a mask, as it is."""

import dataclasses
import inspect
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlade.errors import check_int

State = Any  # an `nnx.State`, the arrays of a model
Layers = dict[str, dict[str, jax.Array]]  # "k" and "v" of "layer_0", "layer_1", ...
MAX_POSITIONS = 32768  # by default; the models have no limit, as rotations have none
ROOM = 64  # slots for a block by default
ARGUMENTS = ("positions", "cache", "attention_mask")  # after the tokens


@flax.struct.dataclass
class Slots:
    """The model's own cache: R slots for a block, then those of the text."""

    layers: Layers  # [B, R + C, KV heads, head_dim]
    length: jax.Array  # [B] int32, tokens before the next block

    @property
    def divisible(self) -> int:
        return self.layers["layer_0"]["k"].shape[1]


@dataclasses.dataclass(frozen=True)
class ModelDecoder:
    """The `jlade.models.base.Decoder` that runs a model of tunix; made by `decoder`.

    The model writes a block's keys and values into the first slots of its cache, whatever the lengths of the texts, and
    the mask alone decides which tokens see each other. Then `commit` moves the accepted ones after those of the text.
    """

    graphdef: nnx.GraphDef[Any] = dataclasses.field(hash=False)  # compared by value; some have no hash
    layers: tuple[tuple[int, int, str], ...]  # KV heads, head_dim and dtype of the cache, of each layer
    vocab_size: int
    max_positions: int = MAX_POSITIONS
    eos_ids: tuple[int, ...] = ()
    room: int = ROOM  # R

    def init_cache(self, params: State, batch_size: int, capacity: int) -> Slots:
        def zeros(heads: int, head_dim: int, dtype: str) -> jax.Array:
            return jnp.zeros((batch_size, self.room + capacity, heads, head_dim), dtype)

        layers = {f"layer_{i}": {"k": zeros(*layer), "v": zeros(*layer)} for i, layer in enumerate(self.layers)}
        return Slots(layers, jnp.zeros(batch_size, jnp.int32))

    def forward(
        self,
        params: State,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Slots,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, Layers]:
        """Runs a block; the hidden states are the logits [B, T, V]. It returns the slots with the block in the first.

        Larger blocks than the room, as of prompts, get a copy of the cache with more slots.
        """
        batch_size, size = tokens.shape
        room = max(self.room, size)
        layers = cache.layers
        if room > self.room:
            layers = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (room - self.room, 0), (0, 0), (0, 0))), layers)
        slot = jnp.arange(layers["layer_0"]["k"].shape[1], dtype=jnp.int32)
        is_text = (slot >= room)[None, :] & (slot[None, :] - room < cache.length[:, None])
        mask = jnp.broadcast_to(is_text[:, None], (batch_size, size, len(slot)))
        mask = mask.at[:, :, :size].set(block_mask)
        begin = jnp.zeros(batch_size, jnp.int32)
        slots = {name: layer | {"end_index": begin} for name, layer in layers.items()}
        logits, written = nnx.merge(self.graphdef, params)(tokens, positions, slots, mask)
        return logits, {name: {"k": written[name]["k"], "v": written[name]["v"]} for name in layers}

    def logits(self, params: State, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)

    def commit(self, cache: Slots, block_kv: Layers, indices: jax.Array, num_accepted: jax.Array) -> Slots:
        sequence = jnp.arange(len(indices), dtype=jnp.int32)[:, None]
        offset = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]

        def move(written: jax.Array, before: jax.Array) -> jax.Array:
            size = before.shape[1]
            place = jnp.where(offset < num_accepted[:, None], self.room + cache.length[:, None] + offset, size + offset)
            chosen, slots = written[sequence, indices], written[:, written.shape[1] - size :]
            return slots.at[sequence, place].set(chosen, mode="drop", unique_indices=True)

        return Slots(jax.tree.map(move, block_kv, cache.layers), cache.length + num_accepted)


def decoder(
    model: nnx.Module, *, max_positions: int = MAX_POSITIONS, eos_ids: tuple[int, ...] = (), room: int = ROOM
) -> tuple[ModelDecoder, State]:
    """Returns the decoder of a model and its parameters, the arguments of `jlade.generate`.

    Nothing is converted: models with LoRA, or of a family that jlade does not know, are decoded as they are.

    Args:
      model: called as `model(tokens, positions, cache, attention_mask)`, with tokens and positions [B, T], a mask
        [B, T, S] and a cache of S slots, a dictionary of "layer_0", "layer_1", ... with "k" and "v" [B, S, KV heads,
        head_dim] and "end_index" [B]; it returns logits [B, T, V] and the cache.
      max_positions: length of the longest text, in tokens.
      eos_ids: tokens that end a text by default.
      room: slots of the cache that a block is written into, before those of the text. A larger block, as of a prompt,
        runs on a copy of the cache with more of them.

    Raises:
      TypeError: the model is called otherwise.
      ValueError: its attention does not follow the mask, or its cache has another layout.
    """
    _check_attention(model)
    graphdef, params = nnx.split(model)
    cache = jax.eval_shape(lambda: _init_cache(model))
    names = [f"layer_{i}" for i in range(len(cache))]
    if list(cache) != names or any(set(cache[name]) != {"k", "v", "end_index"} for name in names):
        raise ValueError(
            f"model must have a cache of layer_0, layer_1, ..., each with k, v and end_index, got {list(cache)} with "
            f"{sorted({field for layer in cache.values() for field in layer})}"
        )

    def run(params: State) -> jax.Array:
        one = jnp.zeros((1, 1), jnp.int32)
        return nnx.merge(graphdef, params)(one, one, None, jnp.ones((1, 1, 1), bool))[0]

    made = ModelDecoder(
        graphdef=graphdef,
        layers=tuple((*cache[name]["k"].shape[2:], cache[name]["k"].dtype.name) for name in names),
        vocab_size=jax.eval_shape(run, params).shape[-1],
        max_positions=check_int("max_positions", max_positions, 1),
        eos_ids=eos_ids,
        room=check_int("room", room, 1),
    )
    return made, params


def _check_attention(model: Any) -> None:
    """Raises an error unless the model takes any mask."""
    given = tuple(inspect.signature(model.__call__).parameters)[1:4]
    if given != ARGUMENTS:
        raise TypeError(
            f"model must be called with tokens, {', '.join(ARGUMENTS)}, but {type(model).__name__} takes "
            f"{', '.join(given) or 'nothing'} after the first argument"
        )
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_flash_attention", False):
        raise ValueError(
            "model has use_flash_attention=True, which drops the mask of a block: its guesses would see each other. "
            "Make its config with use_flash_attention=False"
        )
    if getattr(config, "sliding_window_size", None) is not None:
        raise ValueError(
            f"model has sliding_window_size={config.sliding_window_size}, and its windows are cut by the slots of its "
            "cache, not by positions, which are others for guesses: only models without windows are decoded as they are"
        )


def _init_cache(model: Any) -> dict[str, dict[str, jax.Array]]:
    """Returns the model's own cache, of one slot; as tunix's sampler does for models without `init_cache`."""
    dtype = cache_dtype(model)
    if hasattr(model, "init_cache"):
        return model.init_cache(1, 1, dtype)
    c = model.config
    layer = jnp.zeros((1, 1, c.num_kv_heads, c.head_dim), dtype)
    end = jnp.zeros(1, jnp.int32)
    return {f"layer_{i}": {"k": layer, "v": layer, "end_index": end} for i in range(c.num_layers)}


def cache_dtype(model: Any) -> Any:
    """Returns the dtype of keys and values, by the rule of tunix's sampler."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return jax.tree.leaves(nnx.state(model))[0].dtype if dtype is None else dtype
