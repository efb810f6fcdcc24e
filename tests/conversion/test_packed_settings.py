"""The settings of a quantization beside tensors that they fit or not: a short form of tests/stress/checkpoints.py."""

import re

import ml_dtypes
import numpy as np
import pytest

from tests.conversion.packed_files import compressed, gptq, in_blocks
from tests.stress import checkpoints
from tests.stress.checkpoints import of_compressed


def test_matrices_are_those_of_the_definition_or_refused(tmp_path):
    counts = checkpoints.run(300, 0, tmp_path)
    assert len(counts) == 2 * len(checkpoints.KINDS)


@pytest.mark.parametrize(
    ("blocks", "size"),
    [
        ((32, 32), 48),
        ((64, 64), 96),
        ((1, 32), 48),
        ((192, 192), 200),
        ((256, 256), 384),
        ((32, 32), 80),
        ((128, 128), 200),
        ((16, 16), 48),
    ],
)
def test_the_last_block_is_smaller(blocks, size, tmp_path):
    codes, scales = in_blocks(np.random.default_rng(0).normal(size=(size, size)).astype(np.float32), *blocks)
    rows, columns = (np.arange(size) // block for block in blocks)
    expected = codes.astype(np.float32) * scales[np.ix_(rows, columns)]
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(blocks)}
    found = checkpoints.read(tmp_path, {"weight": codes, "weight_scale_inv": scales}, fp8)
    np.testing.assert_array_equal(found, [expected])
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(blocks)}
    compressed = of_compressed("float-quantized", **weights)
    found = checkpoints.read(tmp_path, {"weight": codes, "weight_scale": scales}, compressed)
    np.testing.assert_array_equal(found, [expected])


@pytest.mark.parametrize(
    ("end", "shape", "settings"),
    [
        ("scale", (), {"activation_scheme": "static"}),  # AutoFP8
        ("scale", (1,), {"activation_scheme": "dynamic"}),
        ("scale_inv", (), {"activation_scheme": "static", "weight_block_size": None}),  # Mistral
        ("scale_inv", (2, 1), {"activation_scheme": "dynamic"}),  # blocks of 128, as in transformers
    ],
)
def test_fp8_without_sizes_of_blocks(end, shape, settings, tmp_path):
    codes = np.random.default_rng(0).uniform(-400, 400, (160, 48)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.linspace(0.5, 2, 2, dtype=np.float32)[: np.prod(shape, dtype=int)].reshape(shape)
    tensors = {"weight": codes, f"weight_{end}": scales, "input_scale": np.ones(1, np.float32)}
    expected = codes.astype(np.float32) * np.repeat(scales.reshape(-1), 128 if len(shape) > 1 else 160)[:160, None]
    config = {"quant_method": "fp8"} | settings
    np.testing.assert_array_equal(checkpoints.read(tmp_path, tensors, config), [expected])
    with pytest.raises(ValueError, match=r"shape \(.*\); config.json implies \(5, 2\)"):
        checkpoints.read(tmp_path, tensors, config | {"weight_block_size": [32, 24]})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
OVERRIDDEN = {"bits": 8, "group_size": 32, "dynamic": {"-:lm_head": {}, r"+:.*\.mlp\.": {"bits": 4, "group_size": 64}}}
SEVERAL = {"targets": [r"re:.*down_proj$", "model.embed_tokens"], "weights": {"num_bits": 4, "group_size": 64}}


def of_128_inputs(write, **options):
    tensors, values = write(np.random.default_rng(0), checkpoints.NAME, 64, 128, **options)
    return {name.removeprefix(f"{checkpoints.NAME}."): array for name, array in tensors.items()}, values


def with_several_groups():
    config = of_compressed("pack-quantized", num_bits=8, strategy="channel")
    config["config_groups"]["group_1"] = SEVERAL
    return config


@pytest.mark.parametrize(
    ("write", "group", "config"),
    [
        (gptq, 64, GPTQ | OVERRIDDEN),
        (gptq, 128, {"quant_method": "gptq"}),
        (gptq, 128, GPTQ | {"group_size": -1}),
        (compressed, 64, with_several_groups()),
    ],
)
def test_a_module_has_its_own_settings(write, group, config, tmp_path):
    tensors, values = of_128_inputs(write, group=group)
    for found in checkpoints.read(tmp_path, tensors, config):
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"group_size": 96}, "down_proj has 128 inputs, which group_size, 96, does not divide"),
        (GPTQ | {"group_size": 32}, r"down_proj.qzeros has shape (2, 8); config.json implies (4, 8)"),
        (GPTQ | {"group_size": 64, "bits": 8}, r"down_proj.qzeros has shape (2, 8); config.json implies (1, 16)"),
        (GPTQ | {"dynamic": {"(": {}}}, "dynamic has a broken regular expression, (: "),
        (GPTQ | {"dynamic": {"a": {"bits": 3}}}, "bits in dynamic, a, is 3, supported is 4 or 8"),
        (GPTQ | {"dynamic": ["a"]}, "dynamic is ['a'], supported is an object"),
        (GPTQ | {"group_size": 0}, "group_size is 0, supported is a positive integer or -1"),
        (GPTQ | {"group_size": None}, "group_size is None, supported is a positive integer or -1"),
        (GPTQ | {"bits": None}, "bits is None, supported is 4 or 8"),
        (
            {"quant_method": "fp8", "weight_block_size": [32]},
            "weight_block_size is [32], supported is a list of two positive sizes",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, message, tmp_path):
    tensors, _ = of_128_inputs(gptq, group=64)
    tensors.pop("g_idx")
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoints.read(tmp_path, tensors, config)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 7}, "num_bits is 7 of the type 'int', supported is 4 or 8 of 'int' or 'float'"),
        ({"num_bits": 8}, "weight_packed has 16 columns for 128 inputs; config.json says 8 bits"),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "is of type I32; config.json implies 8 bits of the"),
        (
            {"strategy": "block"},
            "strategy is 'block' with 4 bits of the type 'int', supported is 'tensor' or",
        ),
        ({"strategy": "channel"}, "weight_scale has shape (64, 2); config.json implies (64, 1)"),
        ({"strategy": "tensor"}, "weight_scale has shape (64, 2); config.json implies (1, 1)"),
        ({"group_size": 32}, "weight_scale has shape (64, 2); config.json implies (64, 4)"),
        ({"group_size": 96}, "down_proj.weight has 128 inputs, which group_size, 96, does not divide"),
        ({"group_size": None}, "group_size is None with the strategy 'group'"),
        ({"block_structure": [64, 64]}, "block_structure is [64, 64] with the strategy 'group'"),
        ({"symmetric": False}, "weight_zero_point is missing"),
        ({"actorder": "group"}, "weight_g_idx is missing"),
    ],
)
def test_settings_of_compressed_tensors_that_do_not_fit_are_refused(weights, message, tmp_path):
    tensors, _ = of_128_inputs(compressed, group=64)
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoints.read(tmp_path, tensors, of_compressed("pack-quantized", **{"group_size": 64} | weights))


def test_a_matrix_without_a_target_is_refused(tmp_path):
    tensors, _ = of_128_inputs(compressed, group=64)
    config = of_compressed("pack-quantized", group_size=64)
    config["config_groups"]["group_0"]["targets"] = ["re:.*q_proj"]
    with pytest.raises(ValueError, match="down_proj is quantized, and config_groups in config"):
        checkpoints.read(tmp_path, tensors, config)


def test_integers_of_more_bits_than_config_json_says_are_refused(tmp_path):
    tensors = {"weight": np.full((8, 32), 8, np.int8), "weight_scale": np.ones((8, 1), np.float32)}
    with pytest.raises(ValueError, match="has integers of more than 4 bits"):
        checkpoints.read(tmp_path, tensors, of_compressed("int-quantized", strategy="channel"))
