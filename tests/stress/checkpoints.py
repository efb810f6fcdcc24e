"""Quantized matrices of random sizes, read with their own settings and with others in config.json.

    python -m tests.stress.checkpoints --number 20000

A matrix has to have the values that the definition of its format gives with the settings, or be refused. With its own
settings it is refused only where groups do not divide its inputs; with others wherever the shapes do not fit them.
"""

import argparse
import collections
import pathlib
import random
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jlade.conversion import hf_quantization
from jlade.conversion.families import FAMILIES
from jlade.conversion.hf_packed import FileMatrix
from jlade.conversion.packed import values_of
from jlade.conversion.parts import TensorPart
from jlade.conversion.weight_files import read_header

SIZES = (16, 24, 32, 48, 64, 80, 96, 100, 128, 160, 192, 256, 320)
BLOCKS = (1, 8, 16, 24, 32, 48, 64, 96, 100, 128, 192)
INTEGERS, FLOATS, ANY_BITS = ("tensor", "channel", "group"), ("tensor", "channel", "group", "block"), (2, 3, 4, 7, 8)
NAME, GROUP = "model.layers.0.mlp.down_proj", 32
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
Settings = dict[str, Any]


class Case(NamedTuple):
    """A matrix in a format."""

    tensors: dict[str, np.ndarray]  # by the ends of their names
    numbers: Settings  # those that vary, with their values
    config: Callable[[Settings], Settings]  # returns the settings of the quantization in config.json
    # The matrix [out, in] by the definition, None if the tensors do not have the shapes for it.
    values: Callable[[Settings], np.ndarray | None]


def in_integers(codes: np.ndarray, bits: int, axis: int, places: list[int] | None = None) -> np.ndarray:
    """Returns numbers of `bits` bits in integers of 32, the lowest bits first, along an axis."""
    count = 32 // bits
    codes = np.moveaxis(codes.astype(np.int64), axis, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, count)
    packed = np.sum([codes[..., place] << bits * i for i, place in enumerate(places or range(count))], axis=0)
    return np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis)


def of_compressed(form: str, strategy: str = "group", group_size: int | None = GROUP, **weights: Any) -> Settings:
    """Returns settings of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "strategy": strategy, "symmetric": True} | weights
    weights["group_size"] = group_size if "group" in strategy else None
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def of_blocks(codes: np.ndarray, scales: np.ndarray, rows: int, columns: int) -> np.ndarray | None:
    """Returns codes times the scales of their blocks of so many rows and columns, -1 for all."""
    places = [
        np.arange(size) // (size if block == -1 else block)
        for size, block in zip(codes.shape, (rows, columns), strict=True)
    ]
    if scales.shape != (places[0][-1] + 1, places[1][-1] + 1):
        return None
    return codes.astype(np.float32) * scales[np.ix_(*places)].astype(np.float32)


def blocks_of(numbers: Settings) -> tuple[int, int]:
    group, own = numbers["group"], (numbers["rows"], numbers["columns"])
    return {"tensor": (-1, -1), "channel": (1, -1), "group": (1, group), "block": own}[numbers["strategy"]]


def scales_for(rng: np.random.Generator, shape: tuple[int, int], blocks: tuple[int, int], dtype: Any) -> np.ndarray:
    number = [1 if block == -1 else -(-size // block) for size, block in zip(shape, blocks, strict=True)]
    return rng.uniform(0.5, 1, number).astype(dtype)


def fp8(rng: np.random.Generator, draw: random.Random, shape: tuple[int, int]) -> Case:
    numbers = {"rows": draw.choice(BLOCKS), "columns": draw.choice(BLOCKS)}
    codes = rng.uniform(-400, 400, shape).astype(ml_dtypes.float8_e4m3fn)
    dtype = draw.choice([np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
    scales = scales_for(rng, shape, (numbers["rows"], numbers["columns"]), dtype)

    def config(numbers: Settings) -> Settings:
        size = [numbers["rows"], numbers["columns"]]
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}

    tensors = {"weight": codes, "weight_scale_inv": scales}
    return Case(tensors, numbers, config, lambda given: of_blocks(codes, scales, given["rows"], given["columns"]))


def compressed(rng: np.random.Generator, draw: random.Random, shape: tuple[int, int]) -> Case:
    """Returns a matrix of compressed-tensors: packed integers, integers of 8 bits or FP8."""
    form, kind, bits = draw.choice(
        [("pack", "int", 4), ("pack", "int", 8), ("int", "int", 4), ("int", "int", 8), ("float", "float", 8)]
    )
    numbers: Settings = {"type": kind, "bits": bits, "strategy": draw.choice(FLOATS if kind == "float" else INTEGERS)}
    numbers |= {name: draw.choice(BLOCKS) for name in ("group", "rows", "columns")}
    numbers |= {"symmetric": kind == "float" or draw.random() < 0.5}
    inputs = shape[1]
    if form == "float":
        codes = rng.uniform(-400, 400, shape).astype(ml_dtypes.float8_e4m3fn)
    else:
        codes = rng.integers(-1 << (bits - 1), 1 << (bits - 1), shape, np.int8)
        codes[0, :2] = -1 << (bits - 1), (1 << (bits - 1)) - 1
    scales = scales_for(rng, shape, blocks_of(numbers), ml_dtypes.bfloat16)
    zeros = rng.integers(-1 << (bits - 1), 1 << (bits - 1), scales.shape, np.int8)
    half = 1 << (bits - 1)
    if form == "pack":
        padded = np.pad(codes + np.int16(half), ((0, 0), (0, -inputs % (32 // bits))))
        tensors = {"weight_packed": in_integers(padded, bits, 1), "weight_shape": np.array(shape)}
    else:
        tensors = {"weight": codes}
    tensors["weight_scale"] = scales
    if not numbers["symmetric"]:
        padded = np.pad(zeros + np.int16(half), ((0, -len(zeros) % (32 // bits)), (0, 0)))
        is_packed = form == "pack" and numbers["strategy"] != "tensor"
        tensors["weight_zero_point"] = in_integers(padded, bits, 0) if is_packed else zeros

    def config(given: Settings) -> Settings:
        sizes: Settings = {"group_size": given["group"] if given["strategy"] == "group" else None}
        if given["strategy"] == "block":
            sizes["block_structure"] = [given["rows"], given["columns"]]
        own = {"num_bits": given["bits"], **{key: given[key] for key in ("type", "strategy", "symmetric")}}
        return of_compressed(f"{form}-quantized", **own, **sizes)

    def values(given: Settings) -> np.ndarray | None:
        has_same = form == "int" and bits == 4 and given["bits"] == 8
        if given["type"] != kind or (given["bits"] != bits and not has_same):
            return None
        has_zeros = "weight_zero_point" in tensors
        are_0 = has_zeros and zeros.dtype == tensors["weight_zero_point"].dtype and not zeros.any()
        if given["symmetric"] == has_zeros and not are_0:
            return None
        if given["strategy"] == "block" and kind == "int":
            return None
        own = scales.astype(np.float32)
        if given["symmetric"]:
            return of_blocks(codes, own, *blocks_of(given))
        spread = of_blocks(np.ones(shape), zeros, *blocks_of(given))
        return None if spread is None else of_blocks(codes.astype(np.float32) - spread, own, *blocks_of(given))

    return Case(tensors, numbers, config, values)


def grouped_integers(rng: np.random.Generator, draw: random.Random, shape: tuple[int, int]) -> Case:
    """Returns a matrix of GPTQ or AWQ."""
    method = draw.choice(["gptq", "awq"])
    bits = 4 if method == "awq" else draw.choice([4, 8])
    numbers, inputs = {"bits": bits, "group": draw.choice([*BLOCKS, -1])}, shape[1]
    is_ordered = method == "gptq" and draw.random() < 0.4
    codes = rng.integers(0, 1 << bits, shape)
    scales = scales_for(rng, shape, (1, numbers["group"]), np.float16)
    zeros = rng.integers(1, 1 << bits, scales.shape)
    order = rng.integers(0, scales.shape[1], inputs).astype(np.int32)
    if method == "awq":
        places = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": in_integers(codes.T, 4, 1, places), "qzeros": in_integers(zeros.T, 4, 1, places)}
    else:
        tensors = {"qweight": in_integers(codes.T, bits, 0), "qzeros": in_integers(zeros.T - 1, bits, 1)}
    tensors |= {"scales": np.ascontiguousarray(scales.T)} | ({"g_idx": order} if is_ordered else {})

    def values(given: Settings) -> np.ndarray | None:
        size = inputs if given["group"] == -1 else given["group"]
        if given["bits"] != bits or -(-inputs // size) != scales.shape[1]:
            return None
        groups = order if is_ordered else np.arange(inputs) // size
        return (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)

    def config(given: Settings) -> Settings:
        return {"quant_method": method, "bits": given["bits"], "group_size": given["group"], "desc_act": is_ordered}

    return Case(tensors, numbers, config, values)


def nvfp4(rng: np.random.Generator, draw: random.Random, shape: tuple[int, int]) -> Case:
    """Returns a matrix of compressed-tensors or ModelOpt."""
    is_modelopt = draw.random() < 0.5
    codes, whole = rng.integers(0, 16, shape), rng.uniform(2000, 3000, 1).astype(np.float32)
    scales = scales_for(rng, shape, (1, 16), ml_dtypes.float8_e4m3fn)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    tensors = {"weight" if is_modelopt else "weight_packed": packed, "weight_scale": scales}
    tensors["weight_scale_2" if is_modelopt else "weight_global_scale"] = whole
    numbers: Settings = {"group": 16} if is_modelopt else {"bits": 4, "group": 16, "type": "float"}

    def values(given: Settings) -> np.ndarray | None:
        if given != numbers:
            return None
        scale = scales.astype(np.float32) * whole if is_modelopt else scales.astype(np.float32) / whole
        return of_blocks(np.array(FP4 + [-x for x in FP4])[codes], scale, 1, 16)

    def config(given: Settings) -> Settings:
        if is_modelopt:
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": given["group"]}
        own = {"num_bits": given["bits"], "group_size": given["group"], "type": given["type"]}
        return of_compressed("nvfp4-pack-quantized", strategy="tensor_group", **own)

    return Case(tensors, numbers, config, values)


KINDS = {"fp8": fp8, "compressed": compressed, "gptq or awq": grouped_integers, "nvfp4": nvfp4}
CHOICES: dict[str, tuple[Any, ...]] = {
    "rows": BLOCKS,
    "columns": BLOCKS,
    "group": BLOCKS,
    "bits": ANY_BITS,
    "type": ("int", "float"),
    "strategy": FLOATS,
    "symmetric": (True, False),
}


def read(directory: pathlib.Path, tensors: dict[str, np.ndarray], config: Settings) -> list[np.ndarray]:
    """Returns the values [out, in] of a matrix in floating point, and those that it keeps in few bits if it does."""
    file = directory / "model.safetensors"
    save_file({f"{NAME}.{end}": np.ascontiguousarray(array) for end, array in tensors.items()}, file)
    hf_quantization.check(directory / "config.json", {"quantization_config": config}, FAMILIES["llama"])
    matrix = hf_quantization.assembled(read_header(file), config)[f"{NAME}.weight"]
    whole = TensorPart(*(range(size) for size in matrix.shape))
    values = [matrix.read(NAME, np.dtype(np.float32), [whole])[0][0]]
    if isinstance(matrix, FileMatrix) and matrix.can_stay:
        values.append(values_of(matrix.matrix(NAME)).T)
    return values


def run(number: int, seed: int, directory: pathlib.Path) -> collections.Counter[str]:
    """Reads random matrices, with their own settings first, and returns how many were read and refused.

    Raises:
      AssertionError: names the matrix, the settings and what is wrong.
    """
    draw, rng, counts = random.Random(seed), np.random.default_rng(seed), collections.Counter[str]()
    for i in range(number):
        name, make = draw.choice(list(KINDS.items()))
        shape = draw.choice(SIZES), draw.choice(SIZES)
        if name in ("gptq or awq", "nvfp4"):
            shape = (shape[0] // 16 * 16, shape[1] // 16 * 16)
        case = make(rng, draw, shape)
        changed = draw.choice(list(case.numbers))
        for given in (case.numbers, case.numbers | {changed: draw.choice(CHOICES[changed])}):
            config, wanted = case.config(given), case.values(given)
            where = f"seed {seed}, matrix {i}, {name}, {shape}, made with {case.numbers}: {config}"
            group = given.get("group", 1) if given.get("strategy", "group") == "group" else 1
            divides = group == -1 or shape[1] % min(group, shape[1]) == 0
            fills = "weight_packed" not in case.tensors or shape[1] * given["bits"] % 32 == 0
            try:
                found = read(directory, case.tensors, config)
            except ValueError as error:
                if wanted is not None and divides and fills:
                    raise AssertionError(f"{where}: refused") from error
                counts[f"{name}: refused"] += 1
                continue
            assert wanted is not None, f"{where}: read, though the shapes do not fit"
            for values in found:
                assert np.array_equal(values, wanted), f"{where}: other values"
            counts[f"{name}: read"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20000, help="matrices, each read twice (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for kind, count in sorted(run(args.number, args.seed, pathlib.Path(directory)).items()):
            print(f"{kind}: {count}")


if __name__ == "__main__":
    main()
