"""The table of kernels, and the choice between them and plain JAX.

An operation has its kernels in the order of preference. "auto" is the first that supports the device and the shapes,
and that this JAX compiles. Correctness is tested in tests/models and tests/accelerators, speed by benchmarks/.
"""

import concurrent.futures
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jlade.models import kv_rounding, products
from jlade.models.attention import Operands, Variation, attend
from jlade.models.experts import Experts, mix
from jlade.models.grouped import GroupedMatrix, MatrixShape

MAX_TPU_HEAD = 256  # on-chip memory holds the queries of a KV head's whole group, and those of latents are many

# Of the program that `_compiles` compiles
TOKENS = 512  # the largest block, which reads a prompt: a kernel's memory may not suffice for it
CAPACITY = 1024  # cache entries
WINDOW, CAP = 512, 50.0

Program = tuple[Callable[..., jax.Array], tuple[Any, ...]]  # and the shapes of its arguments


class HeadShape(NamedTuple):
    """The heads of a model on a device, the dtype of its queries, keys and values, and the attention of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    variation: Variation = Variation()
    kv_dtype: str | None = None  # of keys and values in 8 bits


class ExpertShape(NamedTuple):
    """The experts on a device, and the dtype of their weights."""

    number: int
    per_token: int
    size: int
    width: int
    dtype: str
    has_gates: bool = True


class Kernel(NamedTuple):
    """A kernel of an operation.

    Attributes:
      platform: of its devices, which is also its name.
      supports: given a shape and a device, returns why the kernel is not for them, a clause about it; None if it is.
        The shape is a `HeadShape`, an `ExpertShape` or a `jlade.models.grouped.MatrixShape`.
      program: given the kernel's name and a shape, returns the operation by the kernel.
      may_skip: whether "plain" computes the shapes that the kernel does not support, and the kernel the others.
    """

    platform: str
    supports: Callable[[Any, jax.Device], str | None]
    program: Callable[[str, Any], Program]
    may_skip: bool = False


def check(operation: str, implementation: str) -> None:
    """Raises a ValueError if `implementation` is no name of an implementation of the operation."""
    accepted = names(operation)
    if implementation not in accepted:
        raise ValueError(f"{operation} must be one of {', '.join(map(repr, accepted))}; got {implementation!r}")


def names(operation: str) -> tuple[str, ...]:
    """Returns the names of the implementations of an operation: those that users may choose."""
    return "auto", "plain", *(kernel.platform for kernel in KERNELS[operation])


def choose(operation: str, implementation: str, shapes: Sequence[Any], device: jax.Device) -> str:
    """Returns the implementation that runs on a device: "plain" or the name of a kernel.

    A kernel is compiled once for an attached device before "auto" takes it. If that fails, a warning says so, and
    "auto" is "plain". With several processes (`jax.process_count`), it is "plain" on attached devices: compilation
    might fail in one process alone, and their programs would differ.

    Args:
      operation: a key of `KERNELS`.
      implementation: one of `names`. A kernel that is named here is not compiled.
      shapes: of the arrays on the device.
      device: attached, or described for compilers.

    Raises:
      ValueError: `implementation` is unknown, or names a kernel that does not support the device and the shapes.
    """
    check(operation, implementation)
    for kernel in KERNELS[operation]:
        if implementation not in ("auto", kernel.platform):
            continue
        reasons = {shape: kernel.supports(shape, device) for shape in shapes}
        supported = [shape for shape, reason in reasons.items() if reason is None]
        can_run = bool(supported) if kernel.may_skip else len(supported) == len(reasons)
        if can_run and (implementation != "auto" or _is_usable(operation, kernel, supported, device)):
            return kernel.platform
        if implementation != "auto":
            reason = next(filter(None, reasons.values()))
            raise ValueError(f"{operation} {implementation!r} {reason}; choose 'auto' or 'plain'")
    return "plain"


def _is_usable(operation: str, kernel: Kernel, shapes: Sequence[Any], device: jax.Device) -> bool:
    try:
        is_attached = device in jax.devices(device.platform)
    except RuntimeError:  # no such platform here
        is_attached = False
    if not is_attached:
        return True
    return jax.process_count() == 1 and all(_compiles(operation, kernel, shape, device) for shape in shapes)


@functools.cache
def _compiles(operation: str, kernel: Kernel, shape: Any, device: jax.Device) -> bool:
    """Returns whether this JAX compiles a kernel; warns if it does not."""

    def compile_kernel() -> None:
        there, (run, arguments) = SingleDeviceSharding(device), kernel.program(kernel.platform, shape)
        jax.jit(run, in_shardings=there, out_shardings=there).lower(*arguments).compile()

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # which has neither a mesh nor a trace of the caller
            thread.submit(compile_kernel).result()
    except Exception as error:  # of any type: JAX's, Pallas's or the compiler's
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        warnings.warn(
            f"{operation}='auto' is 'plain', as JAX {jax.__version__} does not compile the kernel {kernel.platform!r} "
            f"for {shape} on {device.device_kind}: {cause}",
            stacklevel=2,
        )
        return False
    return True


def _hopper_reason(device: jax.Device) -> str | None:
    """Returns the reason why a device runs no kernel for Hopper GPUs, None if it does."""
    if getattr(device, "compute_capability", None) != "9.0":
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), and the device is {device.device_kind}"
    if jax.__version_info__ < (0, 11, 2):
        return f"needs JAX 0.11.2 or newer, and this is {jax.__version__}"
    return None


def _choice_reason(shape: HeadShape) -> str | None:
    return "sees all tokens, and an index chooses those of this model" if shape.variation.choice else None


def _hopper_attention(shape: HeadShape, device: jax.Device) -> str | None:
    # On an H200, with 2048 entries and heads of 128, it takes 0.70 to 0.84 of the time of "plain" for one token and
    # 0.44 to 0.47 for 120 (benchmarks/results/attention_nvidia_h200.json).
    if reason := _hopper_reason(device) or _choice_reason(shape):
        return reason
    if shape.dtype not in ("bfloat16", "float16") or shape.head_dim not in range(16, 129, 16):
        return (
            "needs 16-bit floats and heads of a multiple of 16 up to 128, and these are "
            f"{shape.dtype} and {shape.head_dim}"
        )
    return None


def _tpu_attention(shape: HeadShape, device: jax.Device) -> str | None:
    if device.platform != "tpu":
        return f"needs a TPU, and the device is {device.device_kind}"
    if shape.head_dim > MAX_TPU_HEAD:
        return f"needs heads of up to {MAX_TPU_HEAD}, and these are of {shape.head_dim}"
    return _choice_reason(shape)


def _hopper_experts(shape: ExpertShape, device: jax.Device) -> str | None:
    if reason := _hopper_reason(device):
        return reason
    from jlade.models.experts import hopper  # on demand, as some builds of JAX lack parts of Pallas

    return hopper.obstacle(shape.dtype, hopper.ROWS[0], shape.size, shape.width)


def _gpu_products(shape: MatrixShape, device: jax.Device) -> str | None:
    if device.platform != "gpu" or getattr(device, "compute_capability", "").startswith("gfx"):  # AMD's
        return f"needs an NVIDIA GPU, and the device is {device.device_kind}"
    return products.obstacle("gpu", shape)


def _tpu_products(shape: MatrixShape, device: jax.Device) -> str | None:
    if device.platform != "tpu":
        return f"needs a TPU, and the device is {device.device_kind}"
    return products.obstacle("tpu", shape)


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _attention_program(platform: str, shape: HeadShape) -> Program:
    vectors = [(1, TOKENS, shape.kv_heads)] * 2 + [(1, shape.kv_heads, CAPACITY)] * 2
    stored = shape.dtype if shape.kv_dtype is None else kv_rounding.STORED[shape.kv_dtype]
    fields = (
        _array((1, TOKENS, shape.heads, shape.head_dim), shape.dtype),
        *(_array((*sizes, shape.head_dim), stored) for sizes in vectors),
        _array((1,), jnp.int32),
        _array((TOKENS, TOKENS), bool),
        _array((1, TOKENS), jnp.int32),
        _array((shape.heads,), shape.dtype) if shape.variation.sinks else None,
        *([] if shape.kv_dtype is None else (_array(sizes, jnp.float32) for sizes in vectors)),
    )
    window, cap = WINDOW if shape.variation.window else None, CAP if shape.variation.cap else None
    return functools.partial(attend, window=window, implementation=platform, cap=cap), (Operands(*fields),)


def _experts_program(platform: str, shape: ExpertShape) -> Program:
    inner, outer = ((shape.number, *sizes) for sizes in ((shape.size, shape.width), (shape.width, shape.size)))
    gate, up, down = (_array(sizes, shape.dtype) for sizes in (inner, inner, outer))
    chosen, weights = (_array((TOKENS, shape.per_token), dtype) for dtype in (jnp.int32, jnp.float32))
    experts = Experts(gate if shape.has_gates else None, up, down)
    run = functools.partial(mix, activation="silu", implementation=platform)
    return run, (_array((TOKENS, shape.size), shape.dtype), chosen, weights, experts)


def _products_program(platform: str, shape: MatrixShape) -> Program:
    of_groups = _array((shape.inputs // shape.group, shape.outputs), jnp.bfloat16)
    matrix = GroupedMatrix(
        _array((shape.inputs // shape.parts, shape.outputs), jnp.uint8 if shape.bits == 4 else jnp.int8),
        of_groups,
        of_groups if shape.has_zero else None,
        of_groups if shape.has_offset else None,
        _array((16,), jnp.float32) if shape.has_levels else None,
    )
    run = functools.partial(products.multiply, implementation=platform)
    return run, (_array((TOKENS, shape.inputs), shape.dtype), matrix)


KERNELS = {
    "attention": (
        Kernel("gpu", _hopper_attention, _attention_program),
        Kernel("tpu", _tpu_attention, _attention_program),
    ),
    "experts": (Kernel("gpu", _hopper_experts, _experts_program),),
    "products": (
        Kernel("gpu", _gpu_products, _products_program, may_skip=True),
        Kernel("tpu", _tpu_products, _products_program, may_skip=True),
    ),
}
PLATFORMS = {kernel.platform for row in KERNELS.values() for kernel in row}
