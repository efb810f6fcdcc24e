"""Attention of a block to its prefix in the cache and to itself, and the choice of its implementation."""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp

from jlade.models.attention import plain
from jlade.models.attention.operands import Operands as Operands
from jlade.models.attention.operands import Variation as Variation
from jlade.models.kernels import hopper_obstacle

IMPLEMENTATIONS = ("auto", "plain", "gpu", "tpu")
LARGEST_TPU_HEAD = 256  # on-chip memory holds the queries of a KV head's whole group, and those of latents are many
AUTOMATIC = ("gpu", "tpu")  # platforms with a kernel of that name, which "auto" tries


def attend(
    operands: Operands,
    window: int | None = None,
    implementation: str = "auto",
    scale: float | None = None,
    cap: float | None = None,
    split: int | None = None,
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
      scale: of the products of queries and keys, None for the inverse root of D.
      cap: bounds the scores, by `cap * tanh(score / cap)`.
      split: of keys in 8 bits with two scales, [B, T, 2] and [B, 2, S]: the elements that the first one is of. These
        alone are values. None for one scale.

    Returns:
      [B, T, H, D] in the dtype of the queries; scores and softmax are float32.

    Raises:
      ValueError: `implementation` is unknown, or `operands` lack the positions that `window` needs.
    """
    check_implementation(implementation)
    if window is not None and operands.positions is None:
        raise ValueError(f"attention with a window ({window}) needs Operands.positions [B, T]; got None")
    mask = jnp.asarray(operands.block_mask)
    mask = mask if mask.ndim == 3 else mask[None]  # [1 or B, T, T]
    operands = _without_nan(operands)._replace(block_mask=mask)
    if implementation in ("auto", "plain") or (split is not None and operands.key_scales is not None):
        return plain.attend(operands, window, scale, cap, split)
    # Imported on demand, as some builds of JAX lack parts of Pallas.
    if implementation == "gpu":
        from jlade.models.attention import hopper

        return hopper.attend(operands, window, scale, cap)
    from jlade.models.attention import tpu

    return tpu.attend(operands, window, scale, cap)


def _without_nan(operands: Operands) -> Operands:
    """Returns the operands with finite values.

    A mask hides scores, not values: 0 * NaN is NaN. A value that is not finite makes its key NaN instead, so that it
    reaches the tokens that see it and no others; x - x is 0 or NaN. In 8 bits it is its scale that is not finite.
    """
    names = ("keys", "values") if operands.key_scales is None else ("key_scales", "value_scales")
    keys, values = (getattr(operands, name) for name in names)
    finite = keys + (values - values), jnp.where(jnp.isfinite(values), values, 0)
    return operands._replace(**dict(zip(names, finite, strict=True)))


def resolve(
    implementation: str,
    device: jax.Device,
    dtype: jax.typing.DTypeLike,
    heads: int,
    kv_heads: int,
    head_dim: int,
    may_run: bool = True,
    variations: Collection[Variation] = (Variation(),),
    kv_dtype: str | None = None,
) -> str:
    """Returns the implementation that runs on `device`: "plain", "gpu" or "tpu".

    "auto" gives the kernel of the device if it can run there and passes its trials, otherwise "plain"; see
    `jlade.models.trial`. Other implementations are not tried.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      device: the device that holds the parameters.
      dtype: of queries, keys and values.
      heads: H.
      kv_heads: KH.
      head_dim: D, size of a head.
      may_run: whether "auto" may run a kernel on `device` to try it; otherwise only a remembered verdict counts.
      variations: those of the layers; "auto" tries a kernel with each.
      kv_dtype: of keys and values in 8 bits, None for those of `dtype`.

    Raises:
      ValueError: `implementation` is unknown, or names a kernel that cannot run on `device`.
    """
    check_implementation(implementation)
    if implementation == "auto":
        kernel = device.platform
        if kernel not in AUTOMATIC or _obstacle(kernel, device, dtype, head_dim) is not None:
            return "plain"
        # On demand, as most programs need no trial.
        from jlade.models import trial
        from jlade.models.attention.contest import HeadShape, prepare

        run, run_plain = (functools.partial(attend, implementation=name) for name in (kernel, "plain"))

        def passes(variation: Variation) -> bool:
            shape = HeadShape(heads, kv_heads, head_dim, jnp.dtype(dtype).name, variation, kv_dtype)
            contest = functools.partial(prepare, run, run_plain, device, shape)
            return trial.passes("attention", kernel, device, shape, contest, may_run)

        return kernel if all(map(passes, variations)) else "plain"
    if obstacle := _obstacle(implementation, device, dtype, head_dim):
        raise ValueError(f"attention {implementation!r} {obstacle}; choose 'auto' or 'plain'")
    return implementation


def resolve_unattached(
    implementation: str,
    device: jax.Device,
    dtype: jax.typing.DTypeLike,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> str:
    """Returns `resolve` for a device that is not there: "auto" is its kernel if that can run, as if it had passed."""
    kernel = device.platform
    obstacle = _obstacle(kernel, device, dtype, head_dim)
    if implementation == "auto" and kernel in AUTOMATIC and obstacle is None:
        return kernel
    return resolve(implementation, device, dtype, heads, kv_heads, head_dim)


def check_implementation(implementation: str) -> None:
    """Raises a ValueError if `implementation` is unknown."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {implementation!r}")


def _obstacle(implementation: str, device: jax.Device, dtype: jax.typing.DTypeLike, head_dim: int) -> str | None:
    """Returns the reason why the implementation cannot run, None if it can."""
    if implementation == "gpu":
        if reason := hopper_obstacle(device):
            return reason
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16) or head_dim not in range(16, 129, 16):
            shape = f"{jnp.dtype(dtype).name} and {head_dim}"
            return f"needs 16-bit floats and heads of a multiple of 16 up to 128, and these are {shape}"
    if implementation == "tpu" and device.platform != "tpu":
        return f"needs a TPU, and the device is {device.device_kind}"
    if implementation == "tpu" and head_dim > LARGEST_TPU_HEAD:
        return f"needs heads of up to {LARGEST_TPU_HEAD}, and these are of {head_dim}"
    return None
