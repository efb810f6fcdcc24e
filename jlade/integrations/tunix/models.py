"""Models of tunix as decoders: any that is called with tokens, positions, a cache and a mask, as it is."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlade.config import check_int
from jlade.models import base
from jlade.models.base import BlockKV, KVCache

State = Any  # an `nnx.State`, the arrays of a model
MAX_POSITIONS = 32768  # by default; the models have no limit, as rotations have none
ARGUMENTS = ("positions", "cache", "attention_mask")  # after the tokens


@dataclasses.dataclass(frozen=True)
class ModelDecoder:
    """The `jlade.models.base.Decoder` that runs a model of tunix; made by `decoder`.

    The model writes a block's keys and values into slots of its cache. They are given slots after those of the text, so
    that the mask alone decides which tokens see each other; then `commit` moves the accepted ones to jlade's cache.
    The cache is copied to the model's layout, and the logits of all tokens of the block are computed, in each step.
    """

    graphdef: nnx.GraphDef[Any] = dataclasses.field(hash=False)  # compared by value; some have no hash
    layers: tuple[tuple[int, int, str], ...]  # KV heads, head_dim and dtype of the cache, of each layer
    vocab_size: int
    max_positions: int = MAX_POSITIONS
    eos_ids: tuple[int, ...] = ()

    def init_cache(self, params: State, batch_size: int, capacity: int) -> KVCache:
        keys, values = (
            tuple(jnp.zeros((batch_size, heads, capacity, dim), dtype) for heads, dim, dtype in self.layers)
            for _ in range(2)
        )
        return KVCache(keys=keys, values=values, length=jnp.zeros(batch_size, jnp.int32))

    def forward(
        self,
        params: State,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, BlockKV]:
        """Runs a block; the hidden states are the logits [B, T, V]."""
        batch_size, size = tokens.shape
        capacity = cache.keys[0].shape[2]

        def with_room(layer: jax.Array) -> jax.Array:  # [B, C + T, KV heads, head_dim]
            return jnp.pad(jnp.swapaxes(layer, 1, 2), ((0, 0), (0, size), (0, 0), (0, 0)))

        end = jnp.full(batch_size, capacity, jnp.int32)
        slots = {
            f"layer_{i}": {"k": with_room(keys), "v": with_room(values), "end_index": end}
            for i, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True))
        }
        is_text = jnp.arange(capacity, dtype=jnp.int32)[None, :] < cache.length[:, None]
        mask = jnp.concatenate(
            [
                jnp.broadcast_to(is_text[:, None], (batch_size, size, capacity)),
                jnp.broadcast_to(block_mask, (batch_size, size, size)),
            ],
            axis=-1,
        )
        logits, written = nnx.merge(self.graphdef, params)(tokens, positions, slots, mask)
        layers = (written[name] for name in slots)
        return logits, [(layer["k"][:, capacity:], layer["v"][:, capacity:]) for layer in layers]

    def logits(self, params: State, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)

    def commit(self, cache: KVCache, block_kv: BlockKV, indices: jax.Array, num_accepted: jax.Array) -> KVCache:
        return base.commit(cache, block_kv, indices, num_accepted)


def decoder(
    model: nnx.Module, *, max_positions: int = MAX_POSITIONS, eos_ids: tuple[int, ...] = ()
) -> tuple[ModelDecoder, State]:
    """Returns the decoder of a model and its parameters, the arguments of `jlade.generate`.

    Nothing is converted: models with LoRA, or of a family that jlade does not know, are decoded as they are.

    Args:
      model: called as `model(tokens, positions, cache, attention_mask)`, with tokens and positions [B, T], a mask
        [B, T, S] and a cache of S slots, a dictionary of "layer_0", "layer_1", ... with "k" and "v" [B, S, KV heads,
        head_dim] and "end_index" [B]; it returns logits [B, T, V] and the cache.
      max_positions: length of the longest text, in tokens.
      eos_ids: tokens that end a text by default.

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
