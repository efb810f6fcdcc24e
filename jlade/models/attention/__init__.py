"""Attention of a block to its prefix in the cache and to itself, and the choice of its implementation."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jlade.models.attention import plain
from jlade.models.attention.operands import Operands as Operands

IMPLEMENTATIONS = ("auto", "plain", "gpu", "tpu")
AUTOMATIC = ("gpu", "tpu")  # platforms with a kernel of that name, which "auto" tries


def attend(
    operands: Operands,
    window: int | None = None,
    implementation: str = "auto",
    scale: float | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Returns grouped-query attention, with one softmax over prefix and block.

    The prefix is masked by its length, the block by its mask. Every implementation reads the prefix in chunks up
    to its length, so the work grows with the text and not with the cache's capacity; only "plain" on GPUs reads the
    whole cache. All give the same result up to rounding.

    Args:
      operands: the arrays.
      window: number of positions that a token sees, its own included; None for all.
      implementation: one of `IMPLEMENTATIONS`. "plain" is JAX without kernels and runs everywhere; "gpu" is a kernel
        for NVIDIA's Hopper GPUs and "tpu" one for TPUs. "auto" is "plain" here: `resolve` chooses for a device.
        Neither kernel has windows; with `window`, "plain" runs instead.
      scale: of the products of queries and keys, None for the inverse root of D. "plain" alone has it.
      cap: bounds the scores, by `cap * tanh(score / cap)`. "plain" alone has it.

    Returns:
      [B, T, H, D] in the dtype of the queries; scores and softmax are float32.

    Raises:
      ValueError: `implementation` is unknown, or a kernel that lacks `scale` or `cap`.
    """
    check_implementation(implementation)
    if implementation in AUTOMATIC and (lacking := beyond_kernels(scale, cap)):
        raise ValueError(f"attention {implementation!r} {_lacks(lacking)}; choose 'auto' or 'plain'")
    mask = jnp.asarray(operands.block_mask)
    operands = operands._replace(block_mask=mask if mask.ndim == 3 else mask[None])  # [1 or B, T, T]
    if window is not None or implementation in ("auto", "plain"):
        return plain.attend(operands, window, scale, cap)
    # Imported on demand, as some builds of JAX lack parts of Pallas.
    if implementation == "gpu":
        from jlade.models.attention import hopper

        return hopper.attend(operands)
    from jlade.models.attention import tpu

    return tpu.attend(operands)


def resolve(
    implementation: str,
    device: jax.Device,
    dtype: jax.typing.DTypeLike,
    heads: int,
    kv_heads: int,
    head_dim: int,
    may_run: bool = True,
    variations: Sequence[str] = (),
) -> str:
    """Returns the implementation that runs on `device`: "plain", "gpu" or "tpu".

    "auto" gives the kernel of the device if it can run there and passes its trial, otherwise "plain"; see
    `jlade.models.attention.trial`. Other implementations are not tried.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      device: the device that holds the parameters.
      dtype: of queries, keys and values.
      heads: H.
      kv_heads: KH.
      head_dim: D, size of a head.
      may_run: whether "auto" may run a kernel on `device` to try it; otherwise only a remembered verdict counts.
      variations: names of what attention needs and the kernels lack, a result of `beyond_kernels`.

    Raises:
      ValueError: `implementation` is unknown, or names a kernel that cannot run on `device`.
    """
    check_implementation(implementation)
    if implementation == "auto":
        kernel = device.platform
        if kernel not in AUTOMATIC or _obstacle(kernel, device, dtype, head_dim, variations) is not None:
            return "plain"
        from jlade.models.attention import trial  # on demand, as most programs need none

        shape = trial.Shape(heads, kv_heads, head_dim, jnp.dtype(dtype).name)
        run, run_plain = (functools.partial(attend, implementation=name) for name in (kernel, "plain"))
        return kernel if trial.passes(kernel, run, run_plain, device, shape, may_run) else "plain"
    if obstacle := _obstacle(implementation, device, dtype, head_dim, variations):
        raise ValueError(f"attention {implementation!r} {obstacle}; choose 'auto' or 'plain'")
    return implementation


def resolve_unattached(
    implementation: str,
    device: jax.Device,
    dtype: jax.typing.DTypeLike,
    heads: int,
    kv_heads: int,
    head_dim: int,
    variations: Sequence[str] = (),
) -> str:
    """Returns `resolve` for a device that is not there: "auto" is its kernel if that can run, as if it had passed."""
    kernel = device.platform
    obstacle = _obstacle(kernel, device, dtype, head_dim, variations)
    if implementation == "auto" and kernel in AUTOMATIC and obstacle is None:
        return kernel
    return resolve(implementation, device, dtype, heads, kv_heads, head_dim, variations=variations)


def beyond_kernels(scale: float | None, cap: float | None) -> tuple[str, ...]:
    """Returns the names of the variations of attention that the kernels lack, for arguments of `attend`."""
    named = {"a scale of the scores": scale, "a soft cap of the scores": cap}
    return tuple(name for name, value in named.items() if value is not None)


def check_implementation(implementation: str) -> None:
    """Raises a ValueError if `implementation` is unknown."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {implementation!r}")


def _lacks(variations: Sequence[str]) -> str:
    return f"lacks {' and '.join(variations)}, which the model has"


def _obstacle(
    implementation: str, device: jax.Device, dtype: jax.typing.DTypeLike, head_dim: int, variations: Sequence[str]
) -> str | None:
    """Returns the reason why the implementation cannot run, None if it can."""
    if implementation in AUTOMATIC and variations:
        return _lacks(variations)
    if implementation == "gpu":
        if getattr(device, "compute_capability", None) != "9.0":
            return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), and the device is {device.device_kind}"
        if jax.__version_info__ < (0, 11, 2):
            return f"needs JAX 0.11.2 or newer, and this is {jax.__version__}"
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16) or head_dim not in range(16, 129, 16):
            shape = f"{jnp.dtype(dtype).name} and {head_dim}"
            return f"needs 16-bit floats and heads of a multiple of 16 up to 128, and these are {shape}"
    if implementation == "tpu" and device.platform != "tpu":
        return f"needs a TPU, and the device is {device.device_kind}"
    return None
