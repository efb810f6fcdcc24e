"""The MLP that all tokens pass."""

from typing import TYPE_CHECKING

import flax.struct
import jax
from jax.sharding import PartitionSpec as P

from jlade.mesh import MODEL
from jlade.models.architecture import LlamaConfig
from jlade.models.layers.arrays import Array, Arrays, by_inputs, by_outputs
from jlade.models.nn import activate, gated, linear, scale, sum_linear, xielu
from jlade.models.quantization import Matrix

if TYPE_CHECKING:
    from jlade.models.llama import Llama

XIELU = ("positive_rate", "negative_rate", "slope", "bound")  # arrays of the activation of this name


@flax.struct.dataclass(kw_only=True)
class MLP:
    """An MLP of F inner elements."""

    gate: Matrix | None = None  # [F, E], None for models without a gate
    up: Matrix  # [F, E]
    down: Matrix  # [E, F]
    gate_bias: jax.Array | None = None  # [F]
    up_bias: jax.Array | None = None  # [F]
    down_bias: jax.Array | None = None  # [E]
    # [1], of the activation "xielu": see `nn.xielu`
    positive_rate: jax.Array | None = None
    negative_rate: jax.Array | None = None
    slope: jax.Array | None = None
    bound: jax.Array | None = None

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        c, inner = config, config.mlp_size(layer)
        bias = Array((inner,), P(MODEL)) if c.mlp_bias else None
        learned = dict.fromkeys(XIELU, Array((1,)) if c.activation == "xielu" else None)
        return {
            "gate": by_outputs(inner, c.hidden_size) if c.gated_mlp else None,
            "up": by_outputs(inner, c.hidden_size),
            "down": by_inputs(c.hidden_size, inner),
            "gate_bias": bias if c.gated_mlp else None,
            "up_bias": bias,
            "down_bias": Array((c.hidden_size,)) if c.mlp_bias else None,
            **learned,
        }

    def feed(self, normed: jax.Array, decoder: "Llama") -> jax.Array:
        """Returns the MLP of [B, T, E]."""
        c, axes = decoder.config, decoder.axes
        if self.gate is None:
            inner = linear(normed, self.up, self.up_bias)
            if c.activation == "xielu":
                inner = xielu(inner, *(getattr(self, name) for name in XIELU))
            else:
                inner = activate(inner, c.activation)
            return sum_linear(inner, self.down, self.down_bias, axes)
        gate, up = linear(normed, self.gate, self.gate_bias), linear(normed, self.up, self.up_bias)
        if normed.size > normed.shape[-1]:
            # XLA for TPUs otherwise computes `up` inside the product with `down` for most blocks of 2 to 60 tokens, and
            # reads `down` in narrow tiles: by its estimate 1.3 times as long as two products for LLaMA 3 8B on a v6e.
            apart = jax.lax.optimization_barrier
            gate, up = jax.lax.platform_dependent((gate, up), tpu=apart, default=lambda products: products)
        inner = gated(scale(gate, c.multipliers.gate), up, c.activation)
        return scale(sum_linear(inner, self.down, self.down_bias, axes), c.multipliers.down)
