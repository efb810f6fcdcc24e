"""GGUF files of each architecture by llama.cpp's converter, against the checkpoints that they were made from."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jlade.conversion import load_gguf, load_hf
from jlade.conversion.gguf import read
from jlade.conversion.gguf_architectures import ARCHITECTURES, ROPE_FACTORS, Metadata
from jlade.conversion.gguf_config import read_config
from jlade.conversion.gguf_header import read_header
from jlade.conversion.gguf_tensors import model_tensors
from jlade.conversion.json_files import Values
from jlade.conversion.packed import values_of
from jlade.conversion.tensors import named_arrays
from jlade.models.grouped import GroupedMatrix
from jlade.models.quantization import is_quantized
from tests.conversion.gguf_files import quantize_file
from tests.conversion.gguf_rows import MODELS, extract, save_checkpoint
from tests.forward import run_blocks

FOLDED = ("falcon-h1", "falcon-h1, norms")  # the converter multiplies the weights by factors of config.json


def assert_alike(value, expected, place):
    """Compares fields of configurations; those of files are in float32."""
    if isinstance(value, float) and isinstance(expected, float):
        assert math.isclose(value, expected, rel_tol=1e-6), place
    elif dataclasses.is_dataclass(value) and type(value) is type(expected):
        assert_alike(tuple(vars(value).values()), tuple(vars(expected).values()), place)
    elif isinstance(value, tuple) and len(value) == len(expected or ()):
        for i, pair in enumerate(zip(value, expected, strict=True)):
            assert_alike(*pair, f"{place}[{i}]")
    else:
        assert value == expected, place


@pytest.fixture
def both(request, tmp_path):
    """Returns the parameters of a GGUF file and those of its checkpoint."""
    pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    save_checkpoint(request.param, tmp_path / "checkpoint")
    file = extract(request.param, tmp_path)
    return load_gguf(file, "float32"), load_hf(tmp_path / "checkpoint", "float32")


@pytest.mark.parametrize("both", [name for name in MODELS if name not in FOLDED], indirect=True)
def test_arrays_and_settings_are_those_of_the_checkpoint(both):
    params, expected = both
    arrays, others = named_arrays(params), named_arrays(expected)
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(array, others[name], rtol=1e-6, atol=1e-6, err_msg=name)
    # Files of Mistral and Solar do not say that they are no LLaMA or GLM, these have no tokens, and the vocabulary of
    # Gemma 4's layers has a size where there is none.
    aside = {"model_type", "eos_ids"} | (set() if expected.config.per_layer_size else {"per_layer_vocab_size"})
    for field, value in vars(params.config).items():
        if field not in aside:
            assert_alike(value, getattr(expected.config, field), field)


@pytest.mark.parametrize("both", FOLDED, indirect=True)
def test_logits_are_those_of_the_checkpoint_where_weights_have_its_factors(both):
    params, expected = both
    tokens = np.random.default_rng(0).integers(0, 50, (1, 24), np.int32)
    np.testing.assert_allclose(run_blocks(params, tokens, [24]), run_blocks(expected, tokens, [24]), atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma4, experts", "qwen35", "deepseek2, V3"])
def test_blocks_are_kept_in_the_order_of_the_model(name, tmp_path):
    file = quantize_file(extract(name, tmp_path), tmp_path / "quantized.gguf")
    loaded = [load_gguf(file, "float32", bits=bits) for bits in (None, 8)]
    leaves = zip(*(jax.tree.leaves(params, is_leaf=is_quantized) for params in loaded), strict=True)
    pairs = [(array, matrix) for array, matrix in leaves if isinstance(matrix, GroupedMatrix)]
    assert len(pairs) >= 4
    for array, matrix in pairs:
        values = values_of(jax.tree.map(np.asarray, matrix))
        np.testing.assert_allclose(values if array.ndim == 3 else values.T, array, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3next", "gemma4, experts", "deepseek2, V3", "gptneox"])
def test_bytes_are_those_of_the_file(name, tmp_path):
    file = extract(name, tmp_path)
    stored = sum(tensor.num_bytes for tensor in read_header(file).tensors.values() if tensor.name != ROPE_FACTORS)
    assert sum(tensor.num_bytes for tensor in read(file).tensors.values()) == stored


def refusal(tensors, metadata):
    """Returns the message with which a file is refused, None if it is read."""
    try:
        model_tensors(tensors, read_config(metadata), metadata)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MODELS)
def test_changed_keys_are_read_or_refused(name, tmp_path):
    header = read_header(extract(name, tmp_path))
    file, keys = header.metadata.file, dict(header.metadata.values)
    tensors = {key: tensor for key, tensor in header.tensors.items() if key not in header.factors}
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    own = [key for key in keys if key.startswith(f"{keys['general.architecture']}.")]
    changes = [{key: value} for key in own for value in ("x", 2**31 - 1, [1, 2])]
    files = (Metadata(Values(file, keys | change), shapes, header.factors) for change in changes)
    messages = [message for message in (refusal(tensors, changed) for changed in files) if message is not None]
    assert len(messages) > len(own)
    assert all(str(file) in message for message in messages)


def test_each_architecture_has_a_file():
    assert {name.partition(",")[0] for name in MODELS} | {"nemotron_h_moe"} == set(ARCHITECTURES)
