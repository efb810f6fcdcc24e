"""Blocks of GGUF's types as arrays of a `GroupedMatrix`: their elements are those of the package gguf, bit for bit."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SIGNS = np.uint8(0x88)  # of two codes in a byte: numbers from 0 to 15 become those less 8
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS


class BlockType(NamedTuple):
    """A type whose elements are integers, or indices of levels, with scales of groups.

    Attributes:
      bits: of a code in a `GroupedMatrix`.
      unpack: from the bytes of blocks [..., size] to the arrays [..., n] of each block, by the field of
        `GroupedMatrix`; with two codes in a byte for four bits.
      levels: that the codes stand for, if not for themselves.
    """

    bits: int
    unpack: Callable[[np.ndarray], dict[str, np.ndarray]]
    levels: tuple[int, ...] | None = None


def _half(stored: np.ndarray) -> np.ndarray:
    """Returns the number in float16 of each two bytes [..., 2]: [..., 1]."""
    return np.ascontiguousarray(stored).view(np.float16)


def _q4_0(blocks: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": blocks[..., 2:] ^ SIGNS, "scale": _half(blocks[..., :2])}


def _q4_1(blocks: np.ndarray) -> dict[str, np.ndarray]:
    scale, offset = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return {"weight": blocks[..., 4:] ^ SIGNS, "scale": scale, "zero": _eight(scale), "offset": offset}


def _q4_k(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Eight groups of 32, with integers of six bits for their scales and offsets."""
    low, middle, high = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    with np.errstate(all="ignore"):  # the broken rows tell of it
        scale = _half(blocks[..., :2]).astype(np.float32) * scales
        offset = -(_half(blocks[..., 2:4]).astype(np.float32) * offsets)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)  # of groups, one in the lower bits of the bytes
    groups = np.stack([pairs & 15, pairs >> 4], axis=-2)
    weight = groups[..., :16] | (groups[..., 16:] << 4)
    return {"weight": weight.reshape(*blocks.shape[:-1], -1) ^ SIGNS} | {
        "scale": scale,
        "zero": _eight(scale),
        "offset": offset,
    }


def _iq4_nl(blocks: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": blocks[..., 2:], "scale": _half(blocks[..., :2])}


def _iq4_xs(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Eight groups of 32, with integers of six bits for their scales."""
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*blocks.shape[:-1], 8)
    high = (blocks[..., 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8)).reshape(*blocks.shape[:-1], 8) & 3
    with np.errstate(all="ignore"):
        scale = _half(blocks[..., :2]).astype(np.float32) * ((low | (high << 4)).astype(np.int8) - 32)
    return {"weight": blocks[..., 8:], "scale": scale}


def _q8_0(blocks: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": blocks[..., 2:].view(np.int8), "scale": _half(blocks[..., :2])}


def _q6_k(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Sixteen groups of 16. The first 128 bytes have the lower four bits of the codes, the next 64 the other two."""
    shape = (*blocks.shape[:-1], 2)  # halves of a block
    low, high = blocks[..., :128].reshape(*shape, 64), blocks[..., 128:192].reshape(*shape, 32)
    lower = np.concatenate([low & 15, low >> 4], axis=-1)
    upper = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    weight = (lower | (upper << 4)).astype(np.int8) - np.int8(32)
    with np.errstate(all="ignore"):
        scale = _half(blocks[..., 208:]).astype(np.float32) * blocks[..., 192:208].view(np.int8)
    return {"weight": weight.reshape(*blocks.shape[:-1], -1), "scale": scale}


def _eight(scale: np.ndarray) -> np.ndarray:
    """Returns the zero of codes from -8, which stand for numbers from 0."""
    return np.full(scale.shape, -8, np.int8)


KINDS = {
    "Q4_0": BlockType(4, _q4_0),
    "Q4_1": BlockType(4, _q4_1),
    "Q4_K": BlockType(4, _q4_k),
    "IQ4_NL": BlockType(4, _iq4_nl, LEVELS),
    "IQ4_XS": BlockType(4, _iq4_xs, LEVELS),
    "Q8_0": BlockType(8, _q8_0),
    "Q6_K": BlockType(8, _q6_k),
}
