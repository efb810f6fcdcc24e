"""Checkpoints in the formats of other quantizers, against values that their formulas give in NumPy."""

import dataclasses
import json
import operator

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jlade
from jlade.cli import main
from jlade.conversion import load_hf, save_hf
from jlade.conversion.memory import load_held
from jlade.conversion.weight_files import read_header
from jlade.models.architecture import DELTA, Latent, Recurrence
from jlade.models.grouped import GroupedMatrix, is_grouped
from jlade.models.llama import LlamaConfig, init_params
from jlade.models.quantization import is_quantized
from tests.conversion.hf_files import assert_same_arrays, change_config
from tests.conversion.packed_files import awq, compressed, gptq
from tests.stress.checkpoints import FP4, GROUP, of_compressed
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow

SHAPE = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4}
SHAPE |= {"num_kv_heads": 2, "head_dim": 16, "max_positions": 64, "norm_eps": 1e-5}
FIELDS = ("attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate", "mlp.up", "mlp.down")
NAMES = [f"self_attn.{kind}_proj" for kind in "qkvo"] + [f"mlp.{kind}_proj" for kind in ("gate", "up", "down")]


def compressed_int8(rng, name, outputs, inputs, bits=8):
    codes = rng.integers(-1 << (bits - 1), 1 << (bits - 1), (outputs, inputs), np.int8)
    scales = rng.uniform(0.001, 0.002, (outputs, 1)).astype(ml_dtypes.bfloat16)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes * scales.astype(np.float32)


def compressed_fp8(rng, name, outputs, inputs, of_outputs=True):
    codes = rng.uniform(-400, 400, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.0005, 0.001, (outputs, 1) if of_outputs else (1,)).astype(ml_dtypes.bfloat16)
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scales, f"{name}.input_scale": np.ones(1, np.float32)}
    return tensors, codes.astype(np.float32) * scales.astype(np.float32)


def nvfp4(rng, name, outputs, inputs):
    codes = rng.integers(0, 16, (outputs, inputs))
    scales = rng.uniform(50, 400, (outputs, inputs // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = rng.uniform(2000, 3000, 1).astype(np.float32)
    bytes_ = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    tensors = {"weight_packed": bytes_, "weight_scale": scales, "weight_global_scale": whole}
    levels = np.array(FP4 + [-x for x in FP4], np.float32)
    values = levels[codes] * np.repeat(scales.astype(np.float32) / whole, 16, axis=1)
    return {f"{name}.{key}": array for key, array in tensors.items()}, values


def modelopt_nvfp4(rng, name, outputs, inputs):
    tensors, _ = nvfp4(rng, name, outputs, inputs)
    codes, scales, whole = tensors.values()
    whole = (1 / whole).reshape(())
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole, "input_scale": np.ones((), np.float32)}
    numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(outputs, inputs)
    values = np.array(FP4 + [-x for x in FP4], np.float32)[numbers]
    return {f"{name}.{key}": array for key, array in tensors.items()}, values * np.repeat(scales * whole, 16, axis=1)


def mxfp4(rng, name, outputs, inputs, is_packed=True):
    codes = rng.integers(0, 256, (outputs, inputs // 2), np.uint8)
    exponents = rng.integers(110, 124, (outputs, inputs // 32), np.uint8)
    numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(outputs, inputs)
    values = np.array(FP4 + [-x for x in FP4], np.float32)[numbers]
    tensors = {f"{name}.weight{'_packed' * is_packed}": codes, f"{name}.weight_scale": exponents}
    return tensors, values * np.exp2(np.repeat(exponents.astype(np.float32), 32, axis=1) - 127)


def mxfp8(rng, name, outputs, inputs):
    codes = rng.uniform(-400, 400, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    exponents = rng.integers(110, 120, (outputs, inputs // 32), np.uint8)
    values = codes.astype(np.float32) * np.exp2(np.repeat(exponents.astype(np.float32), 32, axis=1) - 127)
    return {f"{name}.weight": codes, f"{name}.weight_scale": exponents}, values


def modelopt_fp8(rng, name, outputs, inputs, of_outputs=False):
    tensors, values = compressed_fp8(rng, name, outputs, inputs, of_outputs)
    scales = tensors[f"{name}.weight_scale"].astype(np.float32)
    return tensors | {f"{name}.weight_scale": scales.reshape(-1) if of_outputs else scales.reshape(())}, values


def torchao(rng, name, outputs, inputs, group=GROUP, has_zeros=False):
    codes = rng.integers(-128, 128, (outputs, inputs), np.int8)
    scales = rng.uniform(0.001, 0.002, (outputs, inputs // group)).astype(np.float32)
    zeros = rng.integers(-9, 9, scales.shape, np.int8) * np.int8(has_zeros)
    spread_scales, spread_zeros = (np.repeat(array.astype(np.float32), group, axis=1) for array in (scales, zeros))
    tensors = {"qdata": codes, "scale": scales, "zero_point": zeros}
    tensors = {f"{name}._weight_{key}": array for key, array in tensors.items()}
    return tensors, (codes - spread_zeros) * spread_scales


def torchao_fp8(rng, name, outputs, inputs):
    tensors, values = compressed_fp8(rng, name, outputs, inputs)
    codes, scales, _ = tensors.values()
    return {f"{name}._weight_qdata": codes, f"{name}._weight_scale": scales.astype(np.float32)}, values


def bitsandbytes(rng, name, outputs, inputs, block=64, nested=0):
    codes, levels = rng.integers(0, 16, outputs * inputs), np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
    scales = rng.uniform(0.05, 0.1, -(-len(codes) // block)).astype(np.float32)
    tensors = {"": (16 * codes[::2] + codes[1::2]).astype(np.uint8)[:, None], ".quant_map": levels, ".absmax": scales}
    if nested:
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.075}
        tensors[".absmax"] = rng.integers(0, 256, len(scales), np.uint8)
        tensors[".nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
        tensors[".nested_absmax"] = rng.uniform(0.01, 0.02, -(-len(scales) // nested)).astype(np.float32)
        of_scales = np.repeat(tensors[".nested_absmax"], nested)[: len(scales)]
        scales = tensors[".nested_quant_map"][tensors[".absmax"]] * of_scales + np.float32(0.075)
    tensors[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    values = levels[codes] * np.repeat(scales, block)[: len(codes)]
    return {f"{name}.weight{key}": array for key, array in tensors.items()}, values.reshape(outputs, inputs)


def changed(write, **options):
    return lambda *given: write(*given, **options)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}


PACKED = of_compressed("pack-quantized")
INT8 = of_compressed("int-quantized", num_bits=8, strategy="channel")
FP8 = of_compressed("float-quantized", num_bits=8, type="float", strategy="channel")
NVFP4 = of_compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)
ZEROS = of_compressed("pack-quantized", symmetric=False)
MXFP4, MXFP8 = (
    of_compressed(form, num_bits=bits, type="float", group_size=32)
    for form, bits in [("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8)]
)
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}


def of_modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "kv_cache_scheme": None}


def of_torchao(kind):
    config = {"_type": kind, "_version": 2, "_data": {}}
    return {"quant_method": "torchao", "quant_type": {"default": config}, "modules_to_not_convert": None}


CASES = {  # what writes a matrix, its bits, and the settings in config.json
    "awq": (awq, 4, AWQ),
    "gptq": (gptq, 4, GPTQ),
    "gptq v2": (changed(gptq, version=2), 4, GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq in 8 bits": (changed(gptq, bits=8, group=1024), 8, GPTQ | {"bits": 8, "group_size": -1}),
    "compressed-tensors": (compressed, 4, PACKED),
    "compressed-tensors with zeros": (changed(compressed, has_zeros=True), 4, ZEROS),
    "compressed-tensors of outputs": (
        changed(compressed, group=1024),
        4,
        of_compressed("pack-quantized", strategy="channel"),
    ),
    "compressed-tensors in 8 bits": (
        changed(compressed, bits=8, has_zeros=True),
        8,
        of_compressed("pack-quantized", num_bits=8, symmetric=False),
    ),
    "compressed-tensors in int8": (compressed_int8, 8, INT8),
    "compressed-tensors in 4 bits of int8": (
        changed(compressed_int8, bits=4),
        4,
        of_compressed("int-quantized", strategy="channel"),
    ),
    "compressed-tensors in FP8": (compressed_fp8, None, FP8),
    "compressed-tensors in FP8 with a scale": (
        changed(compressed_fp8, of_outputs=False),
        None,
        of_compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "NVFP4": (nvfp4, 4, NVFP4),
    "MXFP4": (mxfp4, 4, MXFP4),
    "MXFP8": (mxfp8, None, MXFP8),
    "ModelOpt's FP8": (modelopt_fp8, None, of_modelopt("FP8")),
    "ModelOpt's FP8 of outputs": (
        changed(modelopt_fp8, of_outputs=True),
        None,
        of_modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "ModelOpt's MXFP8": (mxfp8, None, of_modelopt("MXFP8")),
    "ModelOpt's NVFP4": (modelopt_nvfp4, 4, of_modelopt("NVFP4")),
    "ModelOpt's MXFP4": (changed(mxfp4, is_packed=False), 4, of_modelopt("mxfp4")),
    "torchao in int8": (torchao, 8, of_torchao("Int8WeightOnlyConfig")),
    "torchao in int8 with zeros": (changed(torchao, has_zeros=True), 8, of_torchao("Int8WeightOnlyConfig")),
    "torchao in FP8": (torchao_fp8, None, of_torchao("Float8WeightOnlyConfig")),
    "bitsandbytes": (bitsandbytes, 4, BITSANDBYTES),
    "bitsandbytes with nested scales": (changed(bitsandbytes, nested=16), 4, BITSANDBYTES),
}


def write(directory, name, seed=0, **changes):
    """Writes a random model whose matrices a case quantizes, and returns their values by name."""
    write_matrix, _, settings = CASES[name]
    params = init_params(jax.random.key(seed), LlamaConfig(**SHAPE | changes))
    save_hf(params, directory)
    file, rng, values = directory / "model.safetensors", np.random.default_rng(seed), {}
    tensors = load_file(file)
    for full in [each for each in tensors if ".layers." in each and tensors[each].ndim == 2 and "gate.w" not in each]:
        module = full.removesuffix(".weight")
        own, values[full] = write_matrix(rng, module, *tensors.pop(full).shape)
        tensors |= {key: np.ascontiguousarray(array) for key, array in own.items()}
    save_file(tensors, file, {"format": "pt"})
    change_config(directory, quantization_config=settings)
    return values


def matrices(params):
    """Returns the matrices of the layers by their names in files."""
    return {
        f"model.layers.{i}.{name}.weight": operator.attrgetter(field)(layer)
        for i, layer in enumerate(params.layers)
        for name, field in zip(NAMES, FIELDS, strict=True)
    }


def assert_values(params, expected):
    """Asserts that the matrices of the layers have these values; those in few bits have [in, out]."""
    for name, matrix in matrices(params).items():
        found = matrix.values().T if isinstance(matrix, GroupedMatrix) else matrix
        np.testing.assert_array_equal(found, expected[name], err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_formula(name, tmp_path):
    expected = write(tmp_path / "model", name)
    assert_values(load_hf(tmp_path / "model", "float32", strict=True), expected)
    if (bits := CASES[name][1]) is None:
        return
    for asked in (bits, "file"):
        params = load_hf(tmp_path / "model", "float32", strict=True, bits=asked)
        assert {matrix.weight.dtype.name for matrix in matrices(params).values()} == {"uint8" if bits == 4 else "int8"}
        assert_values(params, expected)
        assert is_quantized(params.output) == (asked == bits)


@pytest.mark.parametrize("name", ["awq", *[slow(name) for name in CASES if CASES[name][1] and name != "awq"]])
def test_a_kept_model_has_one_text(name, tmp_path):
    write(tmp_path / "model", name)
    params, _ = jlade.load(tmp_path / "model", "float32", bits=CASES[name][1])
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    plain, ahead = (
        jlade.generate(params, prompts, max_new_tokens=20, lookahead=lookahead, eos_ids=())
        for lookahead in (None, PAPER)
    )
    assert_same_texts(ahead, plain)
    # Whose output matrix is rounded by `bits` where it is not in few bits in the file.
    dense = dataclasses.replace(load_hf(tmp_path / "model", "float32"), output=params.output)
    assert_same_texts(plain, jlade.generate(dense, prompts, max_new_tokens=20, lookahead=None, eos_ids=()))


@pytest.mark.parametrize(
    ("matrix_of", "settings", "number"),
    [
        (changed(gptq, shuffled=True), GPTQ | {"desc_act": True}, 14),
        (changed(compressed, shuffled=True), PACKED, 14),
        (changed(bitsandbytes, block=128), BITSANDBYTES, 12),  # all but those of 128 inputs
    ],
    ids=["gptq", "compressed-tensors", "bitsandbytes"],
)
def test_act_order_is_read_and_rounded_again(matrix_of, settings, number, tmp_path, monkeypatch):
    """And blocks that end within rows."""
    monkeypatch.setitem(CASES, "act-order", (matrix_of, 4, settings))
    expected = write(tmp_path / "model", "act-order")
    for bits in (None, "file"):
        assert_values(load_hf(tmp_path / "model", "float32", strict=True, bits=bits), expected)
    with pytest.warns(
        UserWarning, match=f"rounded again are {number} matrices whose groups are not of as many adjacent inputs"
    ):
        rounded = load_hf(tmp_path / "model", "float32", bits=4)
    for full, matrix in matrices(rounded).items():
        np.testing.assert_allclose(matrix.values().T, expected[full], atol=0.1)
    with pytest.raises(ValueError, match=f"strict=True refuses to round again {number} matrices"):
        load_hf(tmp_path / "model", "float32", bits=4, strict=True)


MIXTURE = {"num_experts": 4, "expert_size": 32, "experts_per_token": 2, "intermediate_size": 0, "qk_norm": True}
NEOX = {"norm": "layer", "norm_bias": True, "parallel": True, "parallel_norm": True, "gated_mlp": False}
NEOX |= {"activation": "gelu", "rotary_dim": 4, "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
LATENT = MIXTURE | {"routing": "sigmoids", "selection_bias": True, "intermediate_size": 32, "qk_norm": False}
LATENT |= {"latent": Latent(64, rank=32, rotated=16, unrotated=16, value_size=16), "num_kv_heads": 1, "head_dim": 48}
RECURRENT = MIXTURE | {"recurrent_layers": (0,), "recurrence": Recurrence(DELTA, 4, 8, 8, 8, 4), "output_gate": True}
RECURRENT |= {"intermediate_size": 32, "shared_router": True, "rotary_dim": 4, "norm": "rms_plus_one"}
FAMILIES = {  # whose files have several arrays in a matrix, or an array in several
    "phi3": {},
    "gpt_neox": NEOX | {"num_kv_heads": 4},
    "qwen3_moe": MIXTURE,
    "deepseek_v3": LATENT | {"rotary_dim": 16, "interleaved_rotary": True, "norm_eps": 1e-6},
    "qwen3_next": RECURRENT | {"norm_eps": 1e-6},
}


OTHERS = [(name, "qwen3_moe") for name in ("MXFP4", "MXFP8", "ModelOpt's NVFP4", "torchao in int8")]
OTHERS += [(name, "phi3") for name in ("ModelOpt's FP8", "ModelOpt's MXFP4", "torchao in FP8")]


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        *(("awq", family) for family in ("gpt_neox", "qwen3_moe")),
        *(slow("awq", family) for family in FAMILIES if family not in ("gpt_neox", "qwen3_moe")),
        *(slow(*each) for each in OTHERS),
    ],
)
def test_arrays_are_those_of_a_model_in_floating_point(name, model_type, tmp_path):
    """On several devices too."""
    values = write(tmp_path / "model", name, model_type=model_type, **FAMILIES[model_type])
    save_hf(
        init_params(jax.random.key(0), LlamaConfig(**SHAPE | FAMILIES[model_type] | {"model_type": model_type})),
        tmp_path / "dense",
    )
    file = tmp_path / "dense" / "model.safetensors"
    save_file(load_file(file) | {full: np.ascontiguousarray(array) for full, array in values.items()}, file)
    expected = load_hf(tmp_path / "dense", "float32", strict=True)
    for mesh in (None, jlade.make_mesh(model=2)):
        assert_same_arrays(load_hf(tmp_path / "model", "float32", mesh=mesh), expected)
        kept = load_hf(tmp_path / "model", "float32", bits=CASES[name][1] or "file", mesh=mesh)
        number = 0
        for layer, of_dense in zip(kept.layers, expected.layers, strict=True):
            for path, matrix in jax.tree.leaves_with_path(layer, is_leaf=is_grouped):
                field = jax.tree_util.keystr(path, simple=True, separator=".")
                if isinstance(matrix, GroupedMatrix) and matrix.offset is None:  # others are rounded
                    number += 1
                    found = matrix.values() if matrix.weight.ndim > 2 else matrix.values().T
                    np.testing.assert_array_equal(found, operator.attrgetter(field)(of_dense), err_msg=field)
        assert number >= 12 if CASES[name][1] else number == 0


def test_modelopt_has_a_file_of_its_own(tmp_path):
    """And algorithms by modules."""
    expected = write(tmp_path / "model", "ModelOpt's NVFP4")
    change_config(tmp_path / "model", quantization_config=None)
    layers = {full.removesuffix(".weight"): {"quant_algo": "NVFP4", "group_size": 16} for full in expected}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "kv_cache_quant_algo": "FP8"}
    own = tmp_path / "model" / "hf_quant_config.json"
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    assert_values(load_hf(tmp_path / "model", "float32", strict=True, bits="file"), expected)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "dense"), "--dtype", "float32", "--to", "hf"]) == 0
    assert not (tmp_path / "dense" / own.name).exists()
    own.write_text(json.dumps({"quantization": [1]}))
    with pytest.raises(ValueError, match=r"quantized with modelopt .*: quant_algo is None, supported is 'FP8' or"):
        load_hf(tmp_path / "model")


@pytest.mark.parametrize("name", ["compressed-tensors of outputs", "compressed-tensors in int8"])
def test_devices_divide_groups(name, tmp_path):
    expected = write(tmp_path / "model", name)
    params = load_hf(tmp_path / "model", "float32", bits=CASES[name][1], mesh=jlade.make_mesh(model=2))
    for full, matrix in matrices(params).items():
        divided = full.endswith(("o_proj.weight", "down_proj.weight"))
        assert matrix.scale.shape[0] == (2 if divided else 1)
    assert_values(params, expected)


STATE = "weight.quant_state.bitsandbytes__nf4"


def of_other_state(array):
    return np.frombuffer(array.tobytes().replace(b"[64, 128]", b"[64, 126]"), np.uint8)


@pytest.mark.parametrize(
    ("name", "end", "change", "message"),
    [
        ("awq", "qzeros", None, "qzeros is missing, though .*qweight is there"),
        ("awq", "scales", lambda array: array[:3], r"scales has shape \(3, 64\); config.json implies \(4, 64\)"),
        ("awq", "qweight", lambda array: array.astype(np.int64), "qweight is of type I64; accepted are I32"),
        ("awq", "qweight", lambda array: array[:-32], r"qzeros has shape \(4, 8\); config.json implies \(3, 8\)"),
        ("act-order", "g_idx", None, "g_idx is missing"),
        ("act-order", "g_idx", lambda array: array + 1, "g_idx names groups beyond the 4 that have scales"),
        ("gptq", "g_idx", lambda array: array[:5], r"g_idx has shape \(5,\)"),
        ("gptq", "qzeros", lambda array: array[:, :4], r"qzeros has shape \(4, 4\); config.json implies \(4, 8\)"),
        ("gptq", "bias", lambda array: array + 1, "1 tensors are not of this model: .*down_proj.bias"),
        ("compressed-tensors", "weight_shape", lambda array: array + 1, "has 16 columns for 129 inputs"),
        ("compressed-tensors", "weight_scale", lambda array: array[:5], r"weight_scale has shape \(5, 4\)"),
        ("compressed-tensors with zeros", "weight_zero_point", None, "weight_zero_point is missing"),
        ("compressed-tensors in int8", "weight_scale", None, "weight_scale is missing"),
        ("NVFP4", "weight_scale", lambda array: array.astype(np.float32), "weight_scale is of type F32"),
        ("NVFP4", "weight_global_scale", None, "weight_global_scale is missing"),
        ("MXFP4", "weight_scale", lambda array: array[:, :2], r"weight_scale has shape \(64, 2\)"),
        ("MXFP4", "weight_packed", lambda array: array[:, :-8], r"weight_packed has shape \(64, 56\); it must be"),
        ("MXFP8", "weight_scale", lambda array: array[:, :2], r"weight_scale has shape \(64, 2\)"),
        ("ModelOpt's NVFP4", "weight_scale", lambda array: array[:, :4], r"weight_scale has shape \(64, 4\)"),
        ("ModelOpt's NVFP4", "weight_scale", None, "weight_scale is missing, though .*weight is there"),
        ("ModelOpt's NVFP4", "weight_scale_2", None, "weight_scale_2 is missing"),
        ("ModelOpt's FP8", "weight_scale", lambda array: array.astype(np.int32), "weight_scale is of type I32"),
        ("torchao in int8", "_weight_scale", None, "weight_scale is missing"),
        ("torchao in int8", "_weight_scale", lambda array: array[:9], r"weight_scale has shape \(9, 4\)"),
        ("bitsandbytes", "weight.absmax", None, "weight.absmax is missing"),
        (
            "bitsandbytes",
            "weight.quant_state.bitsandbytes__nf4",
            lambda array: array[:9],
            "must be JSON with the shape",
        ),
        ("bitsandbytes", "weight.quant_state.bitsandbytes__nf4", of_other_state, "has 4096 bytes for a matrix of"),
        ("bitsandbytes", "weight.quant_map", lambda array: array[:8], r"quant_map has shape \(8,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name, end, change, message, tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "act-order", (changed(gptq, shuffled=True), 4, GPTQ | {"desc_act": True}))
    write(tmp_path / "model", name)
    file, full = tmp_path / "model" / "model.safetensors", f"model.layers.1.mlp.down_proj.{end}"
    tensors = {key: stored.read_bytes(key) for key, stored in read_header(file).items()}
    array = tensors.pop(full)
    if change is not None:
        tensors[full] = np.ascontiguousarray(change(array))
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"safetensors: .*{message}|model: .*{message}"):
        load_hf(tmp_path / "model", "float32")


def test_quantized_models_in_memory_are_refused(tmp_path):
    write(tmp_path / "model", "awq")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    with pytest.raises(ValueError, match="model is quantized with awq; only its files are read"):
        load_held(config, {}, np.asarray)
