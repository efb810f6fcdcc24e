"""Rotary position embeddings (arXiv 2104.09864) and their scalings for longer texts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Slows every rotation by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of LLaMA 3.1: slows slow rotations, keeps fast ones and interpolates between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolates by the rotation's index, and sharpens attention.

    Attributes:
      beta_fast: turns over the original context from which a rotation is kept.
      beta_slow: turns over the original context up to which a rotation is slowed.
      attention_factor: multiplies queries and keys.
      truncate: whether the bounds of the interpolation are rounded outwards to whole indices.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    original_max_positions: int
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753) up to the original context, beyond which cached keys would have to be rotated again.

    Attributes:
      factors: of each rotation, by which it is slowed.
      attention_factor: multiplies queries and keys.
    """

    factors: tuple[float, ...]
    attention_factor: float


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Rotates the fastest of a head's pairs alone, with the frequencies that they have among all (Gemma 4).

    Attributes:
      fraction: of the pairs.
      factor: slows them.
    """

    fraction: float
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Base and scaling of the rotations of a layer.

    `dim` is the number of leading elements of a head that are rotated, None for that of the model.
    """

    theta: float
    scaling: Scaling | None = None
    dim: int | None = None

    def rotation(self, positions: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine [B, T, 1, D/2] of each pair's angle at `positions` [B, T], for D = `dim` elements."""
        frequencies = inverse_frequencies(dim, self.theta, self.scaling)[None, None, None]
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        scale = self.scaling.attention_factor if isinstance(self.scaling, YarnScaling | LongRopeScaling) else 1.0
        return jnp.cos(angles) * scale, jnp.sin(angles) * scale


@dataclasses.dataclass(frozen=True)
class QueryScaling:
    """Scales the queries of late positions, in steps (Llama 4, after arXiv 2501.19399).

    Attributes:
      rate: by which the scale grows with the logarithm of the step.
      length: positions of a step; the scale of the first step is one.
      offset: added to positions.
    """

    rate: float
    length: int
    offset: int = 0

    def scales(self, positions: jax.Array) -> jax.Array:
        """Returns the scales [B, T, 1, 1] of the queries at `positions` [B, T]."""
        steps = (positions[..., None, None] + self.offset) // self.length
        return 1 + self.rate * jnp.log1p(steps.astype(jnp.float32))


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array], interleaved: bool = False) -> jax.Array:
    """Returns `x` [B, T, heads, D] with its first R elements rotated, in float32, for a rotation [B, T, 1, R/2].

    The pairs are (i, i + R/2), or (2i, 2i + 1) if they are `interleaved`.
    """
    cosine, sine = rotation
    dim = 2 * cosine.shape[-1]
    if dim < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :dim], rotation, interleaved), x[..., dim:]], axis=-1)
    if interleaved:
        pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        rotated = jnp.stack([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return rotated.reshape(x.shape).astype(x.dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """Returns the rotary frequencies [D/2] in radians per position, float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = 1.0 / np.float32(theta) ** exponents
    match scaling:
        case None:
            kept: np.ndarray | float = 1.0
        case LinearScaling():
            kept = 0.0
        case Llama3Scaling():
            turns = scaling.original_max_positions * frequencies / np.float32(2 * math.pi)  # over the original context
            between = scaling.high_freq_factor - scaling.low_freq_factor
            kept = (turns - scaling.low_freq_factor) / (between or 1e-9)  # Llama 4 interpolates nothing
        case YarnScaling():
            index = np.arange(head_dim // 2, dtype=np.float32)
            low, high = (
                _index_with_turns(beta, head_dim, theta, scaling) for beta in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            kept = 1 - (index - low) / (high - low if high != low else 0.001)
        case LongRopeScaling():
            return frequencies / np.asarray(scaling.factors, np.float32)
        case ProportionalScaling():
            is_turned = np.arange(head_dim // 2) < int(scaling.fraction * head_dim // 2)
            return np.where(is_turned, frequencies / np.float32(scaling.factor), np.float32(0))
    kept = np.clip(kept, 0.0, 1.0)
    factor = 1.0 if scaling is None else scaling.factor
    scaled: np.ndarray = (1 - kept) * frequencies / factor + kept * frequencies
    return scaled.astype(np.float32)


def _index_with_turns(turns: float, head_dim: int, theta: float, scaling: YarnScaling) -> float:
    """Returns the index, a fraction, of the rotation that makes `turns` turns over the original context."""
    return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
