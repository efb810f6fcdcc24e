"""Random matrices in the formats of other quantizers, as named tensors and as the values that they stand for."""

import pathlib

import ml_dtypes
import numpy as np

from tests.stress.checkpoints import GROUP, in_integers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "packed.safetensors"


def in_blocks(matrix, rows, columns):
    """Returns the matrix in FP8, and the scale of each block in float32."""
    height, width = matrix.shape
    scales = np.zeros((-(-height // rows), -(-width // columns)), np.float32)
    found = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(matrix[block]).max() / 448
        found[block] = (matrix[block] / scales[i, j]).astype(found.dtype)
    return found, scales


def random_groups(rng, bits, inputs, outputs, group):
    """Returns codes, scales and zeros [.., out], and the group of each input."""
    of_inputs = np.arange(inputs) // group
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    scales = (rng.uniform(0.5, 1, (inputs // group, outputs)) / (1 << bits)).astype(np.float16)
    return codes, scales, rng.integers(1, 1 << bits, scales.shape), of_inputs


def product(codes, scales, zeros, of_inputs):
    return ((codes - zeros[of_inputs]).astype(np.float32) * scales.astype(np.float32)[of_inputs]).T


def awq(rng, name, outputs, inputs):
    codes, scales, zeros, of_inputs = random_groups(rng, 4, inputs, outputs, GROUP)
    places = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = {"qweight": in_integers(codes, 4, 1, places), "qzeros": in_integers(zeros, 4, 1, places)}
    tensors = {f"{name}.{key}": array for key, array in packed.items()} | {f"{name}.scales": scales}
    return tensors, product(codes, scales, zeros, of_inputs)


def gptq(rng, name, outputs, inputs, bits=4, version=1, group=GROUP, shuffled=False):
    codes, scales, zeros, of_inputs = random_groups(rng, bits, inputs, outputs, min(group, inputs))
    if shuffled:
        of_inputs = rng.permutation(of_inputs)
    packed = {"qweight": in_integers(codes, bits, 0), "qzeros": in_integers(zeros - (version == 1), bits, 1)}
    tensors = {f"{name}.{key}": array for key, array in packed.items()}
    tensors |= {f"{name}.scales": scales, f"{name}.g_idx": of_inputs.astype(np.int32)}
    tensors[f"{name}.bias"] = np.zeros(outputs, np.float16)  # as AutoGPTQ writes for LLaMA
    return tensors, product(codes, scales, zeros, of_inputs)


def compressed(rng, name, outputs, inputs, bits=4, group=GROUP, has_zeros=False, shuffled=False):
    codes, scales, zeros, of_inputs = random_groups(rng, bits, inputs, outputs, min(group, inputs))
    if shuffled:
        of_inputs = rng.permutation(of_inputs)
    zeros = zeros if has_zeros else np.full_like(zeros, 1 << (bits - 1))
    tensors = {f"{name}.weight_packed": in_integers(codes.T, bits, 1), f"{name}.weight_scale": scales.T}
    tensors[f"{name}.weight_shape"] = np.array([outputs, inputs])
    if has_zeros:
        tensors[f"{name}.weight_zero_point"] = in_integers(zeros.T, bits, 0)
    if shuffled:
        tensors[f"{name}.weight_g_idx"] = of_inputs.astype(np.int32)
    return tensors, product(codes, scales, zeros, of_inputs)
