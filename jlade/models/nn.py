"""What the parts of layers compute with: products with matrices, norms and activations."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.models import products
from jlade.models.grouped import GroupedMatrix
from jlade.models.quantization import Int8Matrix, Matrix, multiply

SMALL_BLOCK = 128  # tokens, of all sequences together
JOINED = 64  # outputs of a matrix, or a multiple, with which XLA for GPUs reads it in its place in a joined product


@flax.struct.dataclass
class Observed:
    """A matrix [out, in] that reports its inputs: what an error of a weight costs depends on how large its input is.

    Attributes:
      number: of the matrix, an int32; no static value, so that layers of one shape share a program.
      record: called with `number` and the sum of the squares of each input [in], for every product.
    """

    matrix: jax.Array
    number: jax.Array
    record: Callable[[jax.Array, jax.Array], None] = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.matrix.shape

    def tell(self, x: jax.Array) -> jax.Array:
        """Records inputs [..., in] and returns the matrix."""
        squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(x.ndim - 1)))
        jax.debug.callback(self.record, self.number, squares)
        return self.matrix


def linear(x: jax.Array, weight: Matrix, bias: jax.Array | None = None) -> jax.Array:
    """Returns [..., out], the product of `x` [..., in] and transposed `weight` [out, in], plus `bias` [out]."""
    ways: dict[str, Callable[..., jax.Array]] = {"tpu": multiply_row_twice} if x.size == x.shape[-1] else {}
    if isinstance(weight, jax.Array):
        ways |= dict.fromkeys(("cuda", "rocm"), multiply_on_gpu)
        if x.dtype == weight.dtype == jnp.bfloat16:
            ways["cpu"] = multiply_bfloat16
    product = jax.lax.platform_dependent(x, weight, **ways, default=_multiply) if ways else _multiply(x, weight)
    return product if bias is None else product + jnp.broadcast_to(bias, product.shape)


def sum_linear(x: jax.Array, weight: Matrix, bias: jax.Array | None, axes: tuple[str, ...]) -> jax.Array:
    """Returns `linear` for `x` and `weight` that are divided along `in` among the devices of `axes`."""
    if not axes:
        return linear(x, weight, bias)
    product = jax.lax.psum(linear(x, weight), axes)
    return product if bias is None else product + jnp.broadcast_to(bias, product.shape)


def multiply_row_twice(x: jax.Array, weight: Matrix) -> jax.Array:
    """Returns `linear` of a single row of `x`, as a product with two.

    XLA for TPUs computes a product with one row on the vector unit: by its own estimate that takes 20 times as long as
    a product with two rows on the matrix unit.
    """
    twice = jnp.broadcast_to(x.reshape(1, -1), (2, x.size))
    return _multiply(twice, weight)[0].reshape(*x.shape[:-1], -1)


def multiply_bfloat16(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `linear` in bfloat16 as XLA for CPUs computes it fast: by a sum in float32, of two rows or more.

    Otherwise it converts the whole matrix to float32 first: 4 to 8 times as long (JAX 0.10.2).
    """
    rows = x.reshape(-1, x.shape[-1])
    many = jnp.broadcast_to(rows, (max(2, len(rows)), x.shape[-1]))
    product = jax.lax.dot_general(many, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product[: len(rows)].astype(x.dtype).reshape(*x.shape[:-1], -1)


def multiply_on_gpu(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `linear` without a bias as XLA for GPUs computes it fast: it transposes the result of the other order.

    It joins products with the same `x`. Where their outputs are multiples of `JOINED`, its kernel reads each weight in
    its place; otherwise it would write them all to one array in each step.
    """
    if len(weight) % JOINED:
        x, weight = jax.lax.optimization_barrier((x, weight))
    return multiply_in_order(x, weight)


def multiply_in_order(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `linear` without a bias as a product of `x` and transposed weight."""
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def _multiply(x: jax.Array, weight: Matrix) -> jax.Array:
    """Returns `linear` without a bias.

    Up to `SMALL_BLOCK` tokens are multiplied as weight times transposed x: on CPUs that reads the weights up to four
    times faster, and for TPUs some blocks take 3% less time, others more.
    """
    if isinstance(weight, Observed):
        weight = weight.tell(x)
    if isinstance(weight, GroupedMatrix):
        return products.multiply(x, weight)
    if isinstance(weight, Int8Matrix):
        return jnp.moveaxis(multiply(weight, x), 0, -1)
    if x.size <= SMALL_BLOCK * x.shape[-1]:
        product = jax.lax.dot_general(weight, x, (((1,), (x.ndim - 1,)), ((), ())))
        return jnp.moveaxis(product, 0, -1)
    return multiply_in_order(x, weight)


def normalize(
    x: jax.Array,
    weight: jax.Array | None,
    kind: str,
    eps: float,
    bias: jax.Array | None = None,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    """Returns `x` [..., E] after a norm with `weight` [E], computed in float32; `x` itself without a weight.

    Args:
      kind: "rms" divides by the root mean square; "rms_plus_one" too, and adds 1 to the weight; "rms_late" too, and
        rounds after the weight alone; "layer" subtracts the mean and divides by the standard deviation, and
        "layer_plus_one" adds 1 to the weight besides.
      bias: [E], added at the end.
      axes: of a mesh, that divide E.
    """
    if weight is None:
        return x
    x32 = x.astype(jnp.float32)
    if kind.startswith("layer"):
        x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    if axes:
        mean_square = jax.lax.pmean(mean_square, axes)
    normed = x32 * jax.lax.rsqrt(mean_square + eps)
    if kind == "rms":
        return normed.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)
    # Gemma and layer norms round after the weight, not before.
    weight = weight.astype(jnp.float32) + 1 if kind.endswith("plus_one") else weight.astype(jnp.float32)
    weighted = normed * jnp.broadcast_to(weight, x.shape)
    if bias is not None:
        weighted += jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    return weighted.astype(x.dtype)


def activate(x: jax.Array, activation: str) -> jax.Array:
    """Returns the elements of `x` after an activation, one of `jlade.models.architecture.ACTIVATIONS` for one input."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "silu": jax.nn.silu,
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    }
    return functions[activation](x)


def xielu(
    x: jax.Array, positive_rate: jax.Array, negative_rate: jax.Array, slope: jax.Array, bound: jax.Array
) -> jax.Array:
    """Returns the elements of `x` after xIELU (arXiv 2411.13010).

    Its parameters are arrays [1]: the rates before their softplus, the slope at 0, and a bound just below 0, from which
    on the exponential is that of the bound.
    """
    rise, fall, slope, bound = (
        jnp.broadcast_to(number.astype(jnp.float32), x.shape)
        for number in (jax.nn.softplus(positive_rate), slope + jax.nn.softplus(negative_rate), slope, bound)
    )
    x32 = x.astype(jnp.float32)
    bent = jnp.where(x32 > 0, rise * jnp.square(x32), fall * (jnp.expm1(jnp.minimum(x32, bound)) - x32))
    return (bent + slope * x32).astype(x.dtype)


def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """Returns `up` times the activation of `gate`, for one of `jlade.models.architecture.ACTIVATIONS`."""
    if activation == "clipped_silu":
        gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return activate(gate, activation) * up


def scale(x: jax.Array, factor: float) -> jax.Array:
    """Returns `factor * x`, rounded once."""
    return x if factor == 1 else (x.astype(jnp.float32) * np.float32(factor)).astype(x.dtype)


def cap(x: jax.Array, bound: float | None) -> jax.Array:
    """Returns `x` bent to below `bound` by a tanh, `x` itself for None."""
    return x if bound is None else jnp.tanh(x / np.float32(bound)) * np.float32(bound)


def for_each_kind(kinds: Sequence[Any], compute: Callable[[Any], Any]) -> list[Any]:
    """Returns `compute(kind)` for each of `kinds`, computed once for those that are equal, and None for None."""
    results = {kind: compute(kind) for kind in dict.fromkeys(kinds) if kind is not None}
    return [None if kind is None else results[kind] for kind in kinds]


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Returns [B, T, heads, D] from [B, T, heads * D]."""
    return x.reshape(*x.shape[:2], -1, head_dim)
