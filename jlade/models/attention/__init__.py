"""Attention of a block to its prefix in the cache and to itself, by plain JAX or a kernel."""

import importlib

import jax
import jax.numpy as jnp

from jlade.models.attention import plain
from jlade.models.attention.choice import Choice as Choice
from jlade.models.attention.operands import Operands as Operands
from jlade.models.attention.operands import Variation as Variation

MODULES = {"gpu": "hopper", "tpu": "tpu"}  # of the kernels


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
        and "tpu" one for TPUs. "auto" is "plain" here: `jlade.models.kernels` chooses for a device.
      scale: of the products of queries and keys, None for the inverse root of D.
      cap: bounds the scores, by `cap * tanh(score / cap)`.
      split: of keys in 8 bits with two scales, [B, T, 2] and [B, 2, S], or more, which are not read: the elements that
        the first one is of. These alone are values. None for one scale.

    Returns:
      [B, T, H, D] in the dtype of the queries; scores and softmax are float32.

    Raises:
      ValueError: `implementation` is unknown, or `operands` lack the positions that `window` needs.
    """
    if implementation not in ("auto", "plain", *MODULES):
        raise ValueError(f"attention must be one of 'auto', 'plain', 'gpu', 'tpu'; got {implementation!r}")
    if window is not None and operands.positions is None:
        raise ValueError(f"attention with a window ({window}) needs Operands.positions [B, T]; got None")
    mask = jnp.asarray(operands.block_mask)
    mask = mask if mask.ndim == 3 else mask[None]  # [1 or B, T, T]
    operands = _without_nan(operands)._replace(block_mask=mask)
    if implementation in ("auto", "plain") or (split is not None and operands.key_scales is not None):
        return plain.attend(operands, window, scale, cap, split)
    # Imported on demand, as some builds of JAX lack parts of Pallas.
    kernel = importlib.import_module(f"jlade.models.attention.{MODULES[implementation]}")
    mixed: jax.Array = kernel.attend(operands, window, scale, cap)
    return mixed


def _without_nan(operands: Operands) -> Operands:
    """Returns the operands with finite values.

    A mask hides scores, not values: 0 * NaN is NaN. A value that is not finite makes its key NaN instead, so that it
    reaches the tokens that see it and no others; x - x is 0 or NaN. In 8 bits it is its scale that is not finite.
    """
    names = ("keys", "values") if operands.key_scales is None else ("key_scales", "value_scales")
    keys, values = (getattr(operands, name) for name in names)
    finite = keys + (values - values), jnp.where(jnp.isfinite(values), values, 0)
    return operands._replace(**dict(zip(names, finite, strict=True)))
