"""GGUF files against the gguf package and transformers, whole, in parts and broken."""

import operator
import os
import sys
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jlade
from jlade import SamplingConfig
from jlade.conversion import load_gguf
from jlade.conversion.gguf import read
from jlade.conversion.gguf_weights import TYPES
from jlade.conversion.tensors import named_arrays
from jlade.models.llama import quantize
from jlade.models.rotary import LinearScaling, Llama3Scaling, YarnScaling, inverse_frequencies
from tests.conversion.gguf_files import SHAPE, WIDE, halves_apart, reference, write
from tests.conversion.hf_files import MESHES, assert_placed
from tests.forward import run_blocks
from tests.tiny import slow


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_are_those_of_the_gguf_package_bit_for_bit(kind, tmp_path):
    file = write(tmp_path / "model.gguf", kind=kind, **WIDE)
    params, expected = load_gguf(file, "float32"), reference(file)
    np.testing.assert_array_equal(params.embedding, expected["token_embd.weight"])
    np.testing.assert_array_equal(params.output, expected["output.weight"])
    np.testing.assert_array_equal(params.norm, expected["output_norm.weight"])
    (layer,) = params.layers
    fields = {
        "mixer_norm.weight": "attn_norm",
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.output": "attn_output",
        "mlp_norm.weight": "ffn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
    }
    for field, name in fields.items():
        wanted = expected[f"blk.0.{name}.weight"]
        if field in ("attention.query", "attention.key"):
            wanted = halves_apart(wanted, 32)
        assert np.asarray(operator.attrgetter(field)(layer)).tobytes() == np.ascontiguousarray(wanted).tobytes()
    rounded = jax.tree.map(lambda array: array.astype(jnp.bfloat16), params)
    for got, wanted in zip(jax.tree.leaves(load_gguf(file, "bfloat16")), jax.tree.leaves(rounded), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("arch", "kind", "options"),
    [
        ("llama", "Q8_0", {}),
        slow("llama", "F16", {"head_dim": 24}),  # as in Mistral Nemo
        slow("qwen2", "Q4_0", {"tied": True}),
        slow("qwen3", "BF16", {"head_dim": 128}),  # all that transformers reads
    ],
)
def test_logits_are_those_of_transformers(arch, kind, options, tmp_path):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    inner = {"inner": 128} if kind[0] == "Q" else {}
    write(tmp_path / "model.gguf", arch, kind=kind, **options, **inner)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab"], (1, 40))
    with torch.no_grad():
        expected = model(torch.as_tensor(tokens)).logits.numpy()
    params, tokenizer = jlade.load(tmp_path / "model.gguf", "float32")
    assert tokenizer is None
    assert params.config.family == arch
    np.testing.assert_allclose(run_blocks(params, tokens, [40]), expected, atol=1e-4)


def config_of(tmp_path, arch="llama", changed=(), **options):
    return load_gguf(write(tmp_path / "model.gguf", arch, changed=changed, **options), "float32").config


def test_the_end_tokens_are_those_of_texts_turns_and_messages(tmp_path):
    changed = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert config_of(tmp_path, changed=changed).eos_ids == (2, 7)
    assert config_of(tmp_path, changed={"tokenizer.ggml.eos_token_id": None}).eos_ids == ()


SAMPLING = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "penalty_repeat": 1.05}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (SAMPLING, SamplingConfig(0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)),
        ({"top_p": 0.5}, SamplingConfig(1.0, top_k=50, top_p=0.5)),  # transformers' defaults
        ({"temp": 0.0, "top_k": 20, "penalty_repeat": 1.5}, SamplingConfig(repetition_penalty=1.5)),
        ({"penalty_repeat": 1.5}, SamplingConfig(repetition_penalty=1.5)),
        ({}, SamplingConfig()),
    ],
    ids=str,
)
def test_the_sampling_of_a_file_is_the_recommended_one(settings, expected, tmp_path):
    changed = {f"general.sampling.{key}": value for key, value in settings.items()}
    assert jlade.load_sampling(write(tmp_path / "model.gguf", changed=changed)) == expected


def test_other_settings_of_sampling_are_said_and_tokens_suppressed(tmp_path):
    changed = {"general.sampling.mirostat": 2, "tokenizer.ggml.suppress_tokens": [3, 5, 1000]}
    file = write(tmp_path / "model.gguf", changed=changed)
    assert jlade.load_sampling(file) == SamplingConfig(logit_bias={3: -np.inf, 5: -np.inf})
    with pytest.warns(UserWarning, match=r"ignored settings of generation.*: general\.sampling\.mirostat$"):
        load_gguf(file)
    with pytest.raises(ValueError, match=r"strict=True refuses settings of generation: general\.sampling\.mirostat$"):
        load_gguf(file, strict=True)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 2.0}, LinearScaling(2.0)),
        ({"rope.scaling.factor": 1.0}, None),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            YarnScaling(4.0, 32.0, 1.0, 1 + 0.1 * np.log(4.0), 32),
        ),
        (  # the converter writes attention_factor of config.json, of which 1 + 0.1 ln 4 is the default
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.1386294},
            YarnScaling(4.0, 32.0, 1.0, 1 + 0.1 * np.log(4.0), 128),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0},
            YarnScaling(4.0, 32.0, 1.0, 2 * (1 + 0.1 * np.log(4.0)), 128),
        ),
    ],
    ids=str,
)
def test_rotary_scaling(changed, expected, tmp_path):
    scaling = config_of(tmp_path, "qwen2", {f"qwen2.{key}": value for key, value in changed.items()}).rope_scaling
    assert scaling == expected


def test_rotary_factors_are_the_scaling_that_llama_3_files_store(tmp_path):
    expected = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    factors = inverse_frequencies(128, 500000.0) / inverse_frequencies(128, 500000.0, expected)
    assert 3 < len(set(factors)) < 64
    sizes, changed = {"head_dim": 128, "layers": 1}, {"llama.rope.freq_base": 500000.0}
    tensors = {"rope_freqs.weight": factors.astype(np.float32)}
    config = config_of(tmp_path, changed=changed, tensors=tensors, **sizes)
    assert config.rope_scaling == expected
    with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs\.weight is not supported"):
        config_of(tmp_path, changed=changed, tensors={"rope_freqs.weight": factors[::-1].astype(np.float32)}, **sizes)
    ones = {"rope_freqs.weight": np.ones(64, np.float32)}
    assert config_of(tmp_path, changed=changed, tensors=ones, **sizes).rope_scaling is None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), [*zip(("F16", "Q4_0", "Q6_K", "F16"), MESHES, strict=True)], ids=str)
def test_parameters_on_a_mesh_are_those_of_one_device(kind, sizes, tmp_path):
    file, mesh = write(tmp_path / "model.gguf", kind=kind, **WIDE), jlade.make_mesh(*sizes)
    assert_placed(load_gguf(file, mesh=mesh), load_gguf(file), mesh)
    expected = load_gguf(file, bits=8)
    if kind == "F16":
        for got, wanted in zip(jax.tree.leaves(expected), jax.tree.leaves(quantize(load_gguf(file))), strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert_placed(load_gguf(file, bits=8, mesh=mesh), expected, mesh)


def test_columns_that_divide_a_block(tmp_path):
    """8 devices have 12 of 96 columns each, and a block has 32."""
    file, mesh = write(tmp_path / "model.gguf", kind="Q8_0", heads=8, kv_heads=8), jlade.make_mesh(model=8)
    assert_placed(load_gguf(file, mesh=mesh), load_gguf(file), mesh)


@pytest.mark.slow
def test_one_tensor_is_held_at_a_time(tmp_path):
    file = write(tmp_path / "model.gguf", kind="Q4_0", vocab=4096, hidden=256, inner=4096, layers=4, head_dim=64)
    load_gguf(file, "bfloat16")  # fills the caches
    sizes = []
    tracemalloc.start()
    params = load_gguf(file, "bfloat16", progress=sizes.append)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    arrays = named_arrays(params)
    total, largest = sum(array.nbytes for array in arrays.values()), params.embedding.nbytes
    assert sizes == [tensor.n_bytes for tensor in ordered(file, arrays)]
    # A chunk of a tensor is dequantized to float32, twice the size of bfloat16, with buffers of the package.
    assert peak < total + 8 * largest < 2 * total


def ordered(file, arrays):
    """Returns the tensors of a file in the order of the parameters."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    return [tensors[names.get_name(name, (".weight",))] for name in arrays]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": {"output.weight": np.ones((48, 64), np.int8)}}, r"output\.weight is of type I8; accepted are F32"),
        ({"kinds": {"output_norm.weight": "Q8_0"}}, r"output_norm\.weight is of type Q8_0; accepted are F32, F16"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, r"1 tensors are missing: blk\.1\.ffn_up\.weight"),
        (
            {"tensors": {"blk.0.extra.weight": np.ones(2, np.float32)}},
            r"1 tensors are not of this model: blk\.0\.extra",
        ),
        ({"tensors": {"output.weight": np.ones((47, 64), np.float32)}}, r"output\.weight has shape \(47, 64\)"),
        ({"changed": {"llama.block_count": 3}}, r"9 tensors are missing: blk\.2\."),
        ({"changed": {"llama.block_count": 2**31 - 1}}, r"llama\.block_count is 2147483647, but there are 21 tensors"),
        ({"changed": {"llama.block_count": None}}, r"llama\.block_count must be a positive integer, got None"),
        (
            {"changed": {"llama.context_length": "long"}},
            r"llama\.context_length must be a positive integer, got 'long'",
        ),
        (
            {"changed": {"llama.attention.head_count": [4, 2]}},
            r"llama\.attention\.head_count must be a positive integer",
        ),
        ({"changed": {"llama.attention.head_count_kv": 3}}, r"head_count \(4\) must be a multiple of .*_kv \(3\)"),
        ({"changed": {"llama.rope.dimension_count": 8}}, r"llama\.rope\.dimension_count must be the length of a head"),
        ({"changed": {"llama.attention.key_length": 15}}, r"value_length must be the length of a head, an even number"),
        ({"changed": {"llama.expert_count": 8}}, r"8 tensors are missing: blk\.0\.ffn_down_exps\.weight"),
        ({"arch": "qwen3", "changed": {"qwen3.expert_count": 8}}, r"qwen3\.expert_count is 8; supported is 0"),
        ({"changed": {"llama.attention.sliding_window": 64}}, r"llama\.attention\.sliding_window is 64"),
        ({"changed": {"llama.rope.freq_base_swa": 50.0}}, r"llama\.rope\.freq_base_swa is 50\.0; supported is 500\.0"),
        ({"changed": {"llama.expert_gating_func": 2}}, r"llama\.expert_gating_func is 2; supported is 1 or 0"),
        ({"changed": {"llama.nextn_predict_layers": 2}}, r"nextn_predict_layers must be an integer from 0 to 1, got 2"),
        (
            {"arch": "granite", "changed": {"granite.rope.scaling.finetuned": False}},
            r"granite\.rope\.scaling\.finetuned is False; supported is True",
        ),
        (
            {"arch": "granite", "changed": {"granite.logit_scale": "big"}},
            r"granite\.logit_scale must be a positive number",
        ),
        (
            {"arch": "exaone4", "changed": {"exaone4.attention.sliding_window_pattern": [True]}},
            r"exaone4\.attention\.sliding_window_pattern has 1 elements for 2 layers",
        ),
        (
            {"changed": {"llama.rope.scaling.type": "longrope"}},
            r"rope\.scaling\.type is 'longrope'; supported are none",
        ),
        ({"changed": {"llama.rope.scaling.attn_factor": 2.0}}, r"attn_factor is supported with the type yarn alone"),
        ({"changed": {"tokenizer.ggml.eos_token_id": 48}}, r"eos_token_id must be a token id below 48, got 48"),
        ({"changed": {"general.type": "adapter"}}, r"general\.type is 'adapter'; supported is 'model'"),
        (
            {"changed": {"tokenizer.ggml.model": "t5"}},
            r"tokenizer\.ggml\.model is 't5'; supported are gpt2, gemma4, llama",
        ),
        ({"arch": "gemma3n"}, r"general\.architecture is 'gemma3n'; supported are llama, mistral3, qwen2,"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_files_that_are_refused(options, message, tmp_path):
    file = write(tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=rf"model\.gguf: .*{message}"):
        jlade.load(file)


def test_layers_that_predict_further_tokens_are_ignored(tmp_path):
    file = write(tmp_path / "model.gguf", "qwen3", changed={"qwen3.nextn_predict_layers": 1})
    with pytest.warns(UserWarning, match=r"model\.gguf: ignored 1 layers that predict further tokens"):
        params = load_gguf(file)
    assert len(params.layers) == 1
    with pytest.raises(ValueError, match=r"strict=True refuses 1 layers that predict further tokens"):
        jlade.load(file, strict=True)


def test_unknown_keys_are_named(tmp_path):
    file = write(tmp_path / "model.gguf", changed={"llama.new_feature": 1})
    with pytest.warns(UserWarning, match=r"model\.gguf: ignored unknown keys.*: llama\.new_feature"):
        load_gguf(file)
    with pytest.raises(ValueError, match=r"strict=True refuses unknown keys: llama\.new_feature"):
        jlade.load(file, strict=True)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_values_that_are_not_finite_are_named(kind, tmp_path):
    array = np.ones((64, 96), np.float32 if kind == "F32" else np.float16)
    array[3, 5] = np.nan
    file = write(tmp_path / "model.gguf", tensors={"blk.1.ffn_down.weight": array})
    message = r"NaN or infinite values in model\.layers\.1\.mlp\.down_proj\.weight \(1 of 64 rows: 3\)$"
    with pytest.warns(UserWarning, match=rf"model\.gguf: {message}"):
        load_gguf(file)
    with pytest.raises(ValueError, match=rf"model\.gguf: strict=True refuses {message}"):
        jlade.load(file, strict=True)


def test_a_file_that_is_not_there_or_not_of_the_format(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file '.*nowhere\.gguf'"):
        jlade.load(tmp_path / "nowhere.gguf")
    for content in (b"", b"GGUF", b"not a file of this format at all", bytes(100)):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.gguf is truncated or not a GGUF file"):
            jlade.load(tmp_path / "model.gguf")


def test_an_array_that_would_take_all_memory_is_refused(tmp_path):
    file = write(tmp_path / "model.gguf", changed={"numbers": [7] * 8})
    length = (8).to_bytes(8, "little") + (7).to_bytes(4, "little")
    content = file.read_bytes()
    assert content.count(length) == 1
    file.write_bytes(content.replace(length, (2**40).to_bytes(8, "little") + length[8:]))
    with pytest.raises(ValueError, match=r"model\.gguf is truncated .*: its arrays have more than 2097152 elements"):
        jlade.load(file)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    content = write(tmp_path / "whole.gguf", changed={"numbers": list(range(50))}).read_bytes()
    for size in [*range(0, 3000, 61), len(content) // 2, len(content) - 40]:
        (tmp_path / "model.gguf").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model\.gguf is truncated or not a GGUF file"):
            jlade.load(tmp_path / "model.gguf")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.binary(min_size=1, max_size=8))
@pytest.mark.filterwarnings("ignore:.*(unknown keys|NaN or infinite)")
def test_a_header_with_other_bytes_gives_an_error_with_the_name_or_a_model(place, change, tmp_path):
    file = tmp_path / "model.gguf"
    content = bytearray(write(file, layers=1, changed={"numbers": [1, 2]}).read_bytes())
    i = int(place * 2500)
    content[i : i + len(change)] = change
    file.write_bytes(content)
    message = "model"
    try:
        jlade.load(file)
    except ValueError as error:
        message = str(error)
    assert "model" in message


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    file = write(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r'pip install "jlade\[gguf\]"'):
        jlade.load(file)


def test_nothing_is_written_and_a_header_is_read_again_when_the_file_changes(tmp_path, cache_directory):
    file = write(tmp_path / "model.gguf")
    header = read(file)
    assert read(file) is header
    write(file, kind="F16")
    assert {tensor.dtype for tensor in read(file).tensors.values()} == {"F16", "F32"}
    assert load_gguf(os.path.relpath(file)).embedding.shape == (48, 64)
    assert [*tmp_path.iterdir(), *cache_directory.rglob("*")] == [file]


def test_a_file_that_vanishes_or_changes_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "model.gguf")
    header = read(file)
    monkeypatch.setattr("jlade.conversion.gguf.read", lambda path: header)
    write(file, kind="F16")
    with pytest.raises(ValueError, match=r"model\.gguf(: .* cannot be read| changed while it was read)"):
        load_gguf(file)
    file.unlink()
    with pytest.raises(ValueError, match=r"model\.gguf: token_embd\.weight cannot be read"):
        load_gguf(file)
