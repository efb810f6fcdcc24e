"""A layer of the decoder and its parts, a file for each.

A part is a pytree of its own arrays. Its `arrays` describes them for a layer of a configuration, and its methods
compute with them. `parts_of` says which parts a layer has: mixers (`attention`, `latent_attention`, `recurrent`), an
`index` of the tokens that attention sees, what comes after mixers (`mlp`, `mixture`, `own_input`), and norms.
"""

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from jlade.models.architecture import LlamaConfig
from jlade.models.attention import Choice
from jlade.models.experts import Experts
from jlade.models.layers import attention, recurrent
from jlade.models.layers.arrays import Array, Arrays
from jlade.models.layers.attention import Attention, Context
from jlade.models.layers.index import Index
from jlade.models.layers.latent_attention import LatentAttention
from jlade.models.layers.mixture import Mixture
from jlade.models.layers.mlp import MLP
from jlade.models.layers.norm import Norm, normalize
from jlade.models.layers.own_input import OwnInput
from jlade.models.layers.own_input import PerLayer as PerLayer
from jlade.models.layers.recurrent import Recurrent
from jlade.models.nn import scale

if TYPE_CHECKING:
    from jlade.models.llama import Llama


@flax.struct.dataclass
class Scale:
    """A number that scales the hidden states after a layer (Gemma 4)."""

    factor: jax.Array  # [1]

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        return {"factor": Array((1,), fill=1)}


@flax.struct.dataclass(kw_only=True)
class Layer:
    """The parts of a layer, None for those that it does not have: a mixer, or two, then an MLP, experts or both.

    Matrices are [out, in], as in checkpoints: see `jlade.models.nn.linear`. `quantize` makes each one of few bits. An
    array is named by its path, such as "attention.query".
    """

    mixer_norm: Norm | None = None
    attention: Attention | LatentAttention | None = None
    index: Index | None = None
    recurrent: Recurrent | None = None
    mixer_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp: MLP | None = None
    mixture: Mixture | None = None
    mlp_post_norm: Norm | None = None
    own_input: OwnInput | None = None
    scale: Scale | None = None

    @property
    def experts(self) -> Experts | None:
        """The matrices and biases of the experts, None for layers without."""
        return None if self.mixture is None else self.mixture.experts


def parts_of(config: LlamaConfig, layer: int) -> dict[str, Any]:
    """Returns the class of each part that a layer has, by the field of `Layer`."""
    c, feeds = config, config.has_mlp(layer)
    mixes = c.mlp_layers is None or not feeds
    is_before = c.recurrent_pre_norms and layer in c.recurrent_layers
    pre_norms, post_norms = c.pre_norms or is_before, c.post_norms and not is_before
    parts = {
        "mixer_norm": (mixes and pre_norms, Norm),
        "attention": (layer in c.attention_layers, Attention if c.latent is None else LatentAttention),
        "index": (c.has_index(layer), Index),
        "mixer_post_norm": (mixes and post_norms, Norm),
        "mlp_norm": (feeds and pre_norms and (c.parallel_norm or not c.parallel), Norm),
        "mlp": (c.mlp_size(layer) > 0, MLP),
        "mixture": (c.has_experts(layer), Mixture),
        "mlp_post_norm": (feeds and (post_norms or (c.expert_post_norm and c.has_experts(layer))), Norm),
        "own_input": (c.per_layer_size > 0, OwnInput),
        "scale": (c.layer_scale, Scale),
        "recurrent": (layer in c.recurrent_layers, Recurrent),
    }
    return {name: part for name, (is_there, part) in parts.items() if is_there}


def arrays_of(config: LlamaConfig, layer: int) -> dict[str, Array]:
    """Returns the description of each array of a layer, by its path."""
    return {
        f"{name}.{field}": array
        for name, part in parts_of(config, layer).items()
        for field, array in part.arrays(config, layer).items()
        if array is not None
    }


def build(config: LlamaConfig, layer: int, make: Callable[[str, Array], Any]) -> Layer:
    """Returns a layer with `make(path, array)` in the place of each array."""

    def made(name: str, part: Any) -> Any:
        arrays = part.arrays(config, layer).items()
        return part(**{field: make(f"{name}.{field}", array) for field, array in arrays if array is not None})

    return Layer(**{name: made(name, part) for name, part in parts_of(config, layer).items()})


def changed(config: LlamaConfig, number: int, layer: Layer, change: Callable[[str, Array, Any], Any]) -> Layer:
    """Returns layer `number` of a model with `change(path, array, value)` in the place of each array's value."""
    return build(config, number, lambda path, array: change(path, array, operator.attrgetter(path)(layer)))


@functools.partial(jax.jit, static_argnames=("decoder", "window"))
def run(
    layer: Layer,
    hidden: jax.Array,
    context: Context | None,
    state: tuple[recurrent.RecurrentState, recurrent.Ancestry] | None,
    own_input: jax.Array | None,
    *,
    decoder: "Llama",
    window: int | None,
) -> tuple[jax.Array, tuple[jax.Array, ...], recurrent.RecurrentBlock | None, Choice | None]:
    """Returns the hidden states [B, T, E] after a layer, keys and values that it has read, and what its state keeps.

    The last result is the tokens that attention sees where an index chooses them, None for all.

    Under `jax.jit`, layers of one shape are traced and lowered once.

    Args:
      layer: its parameters.
      hidden: [B, T, E].
      context: what attention reads; None for a layer without.
      state: that of a recurrent mixer, and the block's tree; None for a layer without.
      own_input: [B, T, P], of a layer with `OwnInput`.
      decoder: that of the model.
      window: the layer's sliding window, None for none.
    """
    c, entered = decoder.config, hidden
    normed = normalize(hidden, layer.mixer_norm, c)
    mixed, kept, kept_of_state, choice = None, tuple[jax.Array, ...](), None, None
    if layer.attention is not None:
        assert context is not None
        mixed, kept, choice = attention.mix(layer.attention, normed, context, window, decoder, layer.index)
    if layer.recurrent is not None:
        assert state is not None
        beside, kept_of_state = layer.recurrent.mix(normed, *state, decoder)
        mixed = beside if mixed is None else mixed + beside
    if mixed is not None:
        hidden += _added(mixed, layer.mixer_post_norm, c)
    if not c.parallel or layer.mlp_norm is not None:  # otherwise an MLP reads what the mixer reads
        normed = normalize(entered if c.parallel else hidden, layer.mlp_norm, c)
    if layer.mixture is not None:
        hidden += _added(layer.mixture.feed(hidden, normed, layer.mlp, decoder), layer.mlp_post_norm, c)
    elif layer.mlp is not None:
        hidden += _added(layer.mlp.feed(normed, decoder), layer.mlp_post_norm, c)
    if layer.own_input is not None:
        assert own_input is not None
        hidden += layer.own_input.feed(hidden, own_input, c)
    if layer.scale is not None:
        hidden *= jnp.broadcast_to(layer.scale.factor, hidden.shape)
    return hidden, kept, kept_of_state, choice


def _added(x: jax.Array, norm: Norm | None, config: LlamaConfig) -> jax.Array:
    """Returns what a mixer or an MLP, whose result is `x` [B, T, E], adds to the hidden states."""
    return scale(normalize(x, norm, config), config.residual_scale)
