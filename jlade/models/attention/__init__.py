"""Attention of a block to its prefix in the cache and to itself, and its kernels."""

import jax
import jax.numpy as jnp

from jlade.models.attention import plain
from jlade.models.attention.contest import HeadShape as HeadShape
from jlade.models.attention.contest import prepare
from jlade.models.attention.operands import Operands as Operands
from jlade.models.attention.operands import Variation as Variation
from jlade.models.kernels import Kernels, hopper_obstacle

MAX_TPU_HEAD = 256  # on-chip memory holds the queries of a KV head's whole group, and those of latents are many


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
      implementation: "plain" is JAX without kernels and runs everywhere; "gpu" is a kernel for NVIDIA's Hopper GPUs
        and "tpu" one for TPUs. "auto" is "plain" here: `KERNELS` chooses for a device.
      scale: of the products of queries and keys, None for the inverse root of D.
      cap: bounds the scores, by `cap * tanh(score / cap)`.
      split: of keys in 8 bits with two scales, [B, T, 2] and [B, 2, S]: the elements that the first one is of. These
        alone are values. None for one scale.

    Returns:
      [B, T, H, D] in the dtype of the queries; scores and softmax are float32.

    Raises:
      ValueError: `implementation` is unknown, or `operands` lack the positions that `window` needs.
    """
    KERNELS.check(implementation)
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


def _obstacle(name: str, device: jax.Device, shape: HeadShape) -> str | None:
    if name == "gpu":
        if reason := hopper_obstacle(device):
            return reason
        if shape.dtype not in ("bfloat16", "float16") or shape.head_dim not in range(16, 129, 16):
            return (
                "needs 16-bit floats and heads of a multiple of 16 up to 128, and these are "
                f"{shape.dtype} and {shape.head_dim}"
            )
    elif device.platform != "tpu":
        return f"needs a TPU, and the device is {device.device_kind}"
    elif shape.head_dim > MAX_TPU_HEAD:
        return f"needs heads of up to {MAX_TPU_HEAD}, and these are of {shape.head_dim}"
    return None


KERNELS = Kernels("attention", ("gpu", "tpu"), attend, prepare, _obstacle)
