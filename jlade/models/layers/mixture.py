"""A mixture of experts, beside an MLP that all tokens pass or in its place."""

from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jlade.mesh import MODEL
from jlade.models.architecture import LlamaConfig
from jlade.models.experts import Experts, mix, route
from jlade.models.layers.arrays import Array, Arrays, by_outputs, whole
from jlade.models.layers.mlp import MLP
from jlade.models.layers.norm import neutral
from jlade.models.nn import linear, normalize, scale
from jlade.models.quantization import Matrix

if TYPE_CHECKING:
    from jlade.models.llama import Llama

EXPERTS = frozenset(f"mixture.{name}" for name in Experts._fields)  # paths of their arrays in a layer


@flax.struct.dataclass(kw_only=True)
class Mixture:
    """A router and N experts of F' inner elements, whose inputs have W elements, E unless `input` makes them."""

    router: jax.Array  # [N, E]
    router_bias: jax.Array | None = None  # [N]
    selection_bias: jax.Array | None = None  # [N] float32
    shared_router: jax.Array | None = None  # [1, E], of the MLP beside the experts
    gate: Matrix | None = None  # [N, W, F']: experts are [in, out], as grouped products read them
    up: Matrix  # [N, W, F']
    down: Matrix  # [N, F', W]
    gate_bias: jax.Array | None = None  # [N, F']
    up_bias: jax.Array | None = None  # [N, F']
    down_bias: jax.Array | None = None  # [N, W]
    input: Matrix | None = None  # [W, E]
    output: Matrix | None = None  # [E, W]
    # Of `LlamaConfig.separate_experts`
    shared_post_norm: jax.Array | None = None  # [E], of the MLP beside the experts
    norm: jax.Array | None = None  # [E], of the experts' input
    post_norm: jax.Array | None = None  # [E], of their output
    router_scale: Any = None  # [E], of the router's input
    scales: Any = None  # [N], of the experts' weights

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        c, hidden, number, width, inner = config, (config.hidden_size,), *_sizes(config)
        own_norm = Array(hidden, fill=neutral(c)) if c.separate_experts else None
        bias = Array((number, inner), P(MODEL)) if c.mlp_bias else None
        return {
            "router": Array((number, c.hidden_size), is_exact=c.float32_router),
            "router_bias": Array((number,)) if c.router_bias else None,
            "selection_bias": Array((number,), is_exact=True) if c.selection_bias else None,
            "shared_router": Array((1, c.hidden_size)) if c.shared_router else None,
            "gate": by_outputs(number, width, inner) if c.gated_mlp else None,
            "up": by_outputs(number, width, inner),
            "down": by_outputs(number, inner, width),
            "shared_post_norm": own_norm,
            "norm": own_norm,
            "post_norm": own_norm,
            "router_scale": Array(hidden, fill=1) if c.separate_experts else None,
            "scales": Array((number,), fill=1) if c.separate_experts else None,
            "gate_bias": bias if c.gated_mlp else None,
            "up_bias": bias,
            "down_bias": Array((number, width), P(MODEL)) if c.mlp_bias else None,
            "input": whole(width, c.hidden_size) if c.expert_latent else None,
            "output": whole(c.hidden_size, width) if c.expert_latent else None,
        }

    @property
    def experts(self) -> Experts:
        """The experts' matrices and biases."""
        return Experts(*(getattr(self, name) for name in Experts._fields))

    def feed(self, hidden: jax.Array, normed: jax.Array, mlp: MLP | None, decoder: "Llama") -> jax.Array:
        """Returns the experts of each token of [B, T, E], plus the MLP if there is one."""
        c = decoder.config
        if c.separate_experts:
            assert mlp is not None
            shared = normalize(mlp.feed(normed, decoder), self.shared_post_norm, c.norm, c.norm_eps)
            return shared + self._feed_apart(hidden, decoder)
        chosen, weights = route(normed, self.router, self.router_bias, self.selection_bias, c)
        inputs = normed
        if c.routing == "sigmoid":  # the weight of the token's one expert is that of its input
            inputs, weights = normed * weights.astype(normed.dtype), jnp.ones_like(weights)
        if self.input is not None:
            inputs = linear(inputs, self.input)
        mixed = mix(inputs, chosen, weights, self.experts, c.activation, decoder.axes, decoder.experts)
        if self.output is not None:
            mixed = linear(mixed, self.output)
        if mlp is None:
            return mixed
        shared = mlp.feed(normed, decoder)
        if self.shared_router is not None:
            shared *= jax.nn.sigmoid(linear(normed, self.shared_router))
        return scale(mixed + shared, 0.5) if c.averages_mixture else mixed + shared

    def _feed_apart(self, hidden: jax.Array, decoder: "Llama") -> jax.Array:
        """Returns the experts of each token of [B, T, E], with the norms and scales of `separate_experts`."""
        c = decoder.config
        normed = normalize(hidden, jnp.ones_like(self.router_scale), c.norm, c.norm_eps)
        scaled = normed * jnp.broadcast_to(self.router_scale, hidden.shape)
        chosen, weights = route(scale(scaled, c.hidden_size**-0.5), self.router, None, None, c)
        weights *= self.scales[chosen].astype(weights.dtype)
        inputs = normalize(hidden, self.norm, c.norm, c.norm_eps)
        mixed = mix(inputs, chosen, weights, self.experts, c.activation, decoder.axes, decoder.experts)
        return normalize(mixed, self.post_norm, c.norm, c.norm_eps)


def _sizes(config: LlamaConfig) -> tuple[int, int, int]:
    return config.num_experts, config.expert_width, config.expert_size
