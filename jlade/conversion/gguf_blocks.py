"""Blocks of GGUF's types as arrays of a `GroupedMatrix`: their elements are those of the package gguf, bit for bit."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jlade.models.grouped import pack

SIGNS = np.uint8(0x88)  # of two codes in a byte: numbers from 0 to 15 become those less 8
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4 and NVFP4, twice the numbers of four bits


class BlockType(NamedTuple):
    """A type whose elements are integers, or indices of levels, with scales of groups.

    Attributes:
      bits: the fewest `bits` of a model that keep the codes, 4 for five bits too: four would change many predictions.
      unpack: from the bytes of blocks [..., size] to the arrays [..., n] of each block, by the field of
        `GroupedMatrix`; with two codes in a byte for up to four bits, and one for more.
      levels: that the codes stand for, if not for themselves.
    """

    bits: int
    unpack: Callable[[np.ndarray], dict[str, np.ndarray]]
    levels: tuple[int, ...] | None = None


def _half(stored: np.ndarray) -> np.ndarray:
    """Returns the number in float16 of each two bytes [..., 2]: [..., 1]."""
    return np.ascontiguousarray(stored).view(np.float16)


def _numbers(stored: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Returns the numbers of `bits` bits in bytes [..., n]: the lowest of `width` bytes, the next ones, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    numbers = stored.reshape(*stored.shape[:-1], -1, 1, width) >> shifts & np.uint8(2**bits - 1)
    return numbers.reshape(*stored.shape[:-1], -1)


def _packed(codes: np.ndarray, group: int) -> np.ndarray:
    """Returns bytes [..., n / 2] with two of the codes [..., n]."""
    packed: np.ndarray = pack(codes[..., None], group)[..., 0]
    return packed


def _product(half: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Returns the float16 number of two bytes [..., 2] times the factors [..., n], float32."""
    with np.errstate(all="ignore"):  # the broken rows tell of it
        return _half(half).astype(np.float32) * factors


def _q4_0(blocks: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": blocks[..., 2:] ^ SIGNS, "scale": _half(blocks[..., :2])}


def _q4_1(blocks: np.ndarray) -> dict[str, np.ndarray]:
    scale, offset = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return {"weight": blocks[..., 4:] ^ SIGNS, "scale": scale, "zero": _eight(scale), "offset": offset}


def _five_bits(stored: np.ndarray) -> np.ndarray:
    """Returns 32 codes [..., 32] int8 from 0: their highest bits are in the first four bytes."""
    high = np.unpackbits(stored[..., :4], axis=-1, bitorder="little")
    return (_numbers(stored[..., 4:], 4, 16) | high << 4).view(np.int8)


def _q5_0(blocks: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": _five_bits(blocks[..., 2:]) - np.int8(16), "scale": _half(blocks[..., :2])}


def _q5_1(blocks: np.ndarray) -> dict[str, np.ndarray]:
    scale, offset = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return {"weight": _five_bits(blocks[..., 4:]), "scale": scale, "offset": offset}


def _q8_0(blocks: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": blocks[..., 2:].view(np.int8), "scale": _half(blocks[..., :2])}


def _q2_k(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Sixteen groups of 16, with integers of four bits for their scales and offsets."""
    return {
        "weight": _packed(_numbers(blocks[..., 16:80], 2, 32), 16),
        "scale": _product(blocks[..., 80:82], blocks[..., :16] & 15),
        "offset": -_product(blocks[..., 82:], blocks[..., :16] >> 4),
    }


def _q3_k(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Sixteen groups of 16, with integers of six bits for their scales. Without its third bit a code is negative."""
    codes = _numbers(blocks[..., 32:96], 2, 32) | _numbers(blocks[..., :32], 1, 32) << 2
    scales = _numbers(blocks[..., 96:104], 4, 8) | _numbers(blocks[..., 104:108], 2, 4) << 4
    scale = _product(blocks[..., 108:], scales.view(np.int8) - np.int8(32))
    return {"weight": _packed(codes.view(np.int8) - np.int8(4), 16), "scale": scale}


def _six_bits(stored: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the scales and offsets of eight groups of 32, whose integers have six bits."""
    low, middle, high = np.split(stored[..., 4:16], 3, axis=-1)
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return {"scale": _product(stored[..., :2], scales), "offset": -_product(stored[..., 2:4], offsets)}


def _q4_k(blocks: np.ndarray) -> dict[str, np.ndarray]:
    arrays = _six_bits(blocks)
    return arrays | {
        "weight": _packed(_numbers(blocks[..., 16:], 4, 32), 32) ^ SIGNS,
        "zero": _eight(arrays["scale"]),
    }


def _q5_k(blocks: np.ndarray) -> dict[str, np.ndarray]:
    codes = _numbers(blocks[..., 48:], 4, 32) | _numbers(blocks[..., 16:48], 1, 32) << 4
    return _six_bits(blocks) | {"weight": codes.view(np.int8)}


def _q6_k(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Sixteen groups of 16. The first 128 bytes have the lower four bits of the codes, the next 64 the other two."""
    codes = _numbers(blocks[..., :128], 4, 64) | _numbers(blocks[..., 128:192], 2, 32) << 4
    scale = _product(blocks[..., 208:], blocks[..., 192:208].view(np.int8))
    return {"weight": codes.view(np.int8) - np.int8(32), "scale": scale}


def _iq4_nl(blocks: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": blocks[..., 2:], "scale": _half(blocks[..., :2])}


def _iq4_xs(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Eight groups of 32, with integers of six bits for their scales."""
    scales = _numbers(blocks[..., 4:8], 4, 1) | _numbers(blocks[..., 2:4], 2, 1) << 4
    return {"weight": blocks[..., 8:], "scale": _product(blocks[..., :2], scales.view(np.int8) - np.int8(32))}


def _mxfp4(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """The scales are powers of two, of which bfloat16 has those below its normal numbers too."""
    exponent = blocks[..., :1].astype(np.uint16)
    bits = np.where(exponent < 2, 32 << exponent, (exponent - 1) << 7)
    return {"weight": blocks[..., 1:], "scale": bits.astype(np.uint16).view(ml_dtypes.bfloat16)}


def _nvfp4(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Four groups of 16, whose scales have four bits of exponent and three more, and no sign."""
    exponent, rest = blocks[..., :4] >> 3 & 15, blocks[..., :4] & 7
    scale = np.ldexp(rest + 8.0 * (exponent > 0), np.maximum(exponent, 1).astype(int) - 11)
    scale = np.where(blocks[..., :4] == 127, 0, scale)  # NaN elsewhere
    return {"weight": blocks[..., 4:], "scale": scale.astype(ml_dtypes.bfloat16)}


def _tq1_0(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """A byte is a fraction in base 3, of five digits in the first 48 bytes and of four in the next 4."""
    powers = 3 ** np.arange(5, dtype=np.uint8)[:, None]
    parts = blocks[..., None, :32] * powers, blocks[..., None, 32:48] * powers, blocks[..., None, 48:52] * powers[:4]
    digits = np.concatenate([part.reshape(*blocks.shape[:-1], -1) for part in parts], axis=-1).astype(np.int16) * 3 >> 8
    return {"weight": _packed(digits - 1, 256), "scale": _half(blocks[..., 52:])}


def _tq2_0(blocks: np.ndarray) -> dict[str, np.ndarray]:
    codes = _numbers(blocks[..., :64], 2, 32).view(np.int8) - np.int8(1)
    return {"weight": _packed(codes, 256), "scale": _half(blocks[..., 64:])}


def _eight(scale: np.ndarray) -> np.ndarray:
    """Returns the zero of codes from -8, which stand for numbers from 0."""
    return np.full(scale.shape, -8, np.int8)


KINDS = {
    "Q4_0": BlockType(4, _q4_0),
    "Q4_1": BlockType(4, _q4_1),
    "Q5_0": BlockType(4, _q5_0),
    "Q5_1": BlockType(4, _q5_1),
    "Q8_0": BlockType(8, _q8_0),
    "Q2_K": BlockType(4, _q2_k),
    "Q3_K": BlockType(4, _q3_k),
    "Q4_K": BlockType(4, _q4_k),
    "Q5_K": BlockType(4, _q5_k),
    "Q6_K": BlockType(8, _q6_k),
    "IQ4_NL": BlockType(4, _iq4_nl, LEVELS),
    "IQ4_XS": BlockType(4, _iq4_xs, LEVELS),
    "MXFP4": BlockType(4, _mxfp4, FP4),
    "NVFP4": BlockType(4, _nvfp4, FP4),
    "TQ1_0": BlockType(4, _tq1_0),
    "TQ2_0": BlockType(4, _tq2_0),
}
