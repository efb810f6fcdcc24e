"""Checkpoints of transformers with one thing changed: the model is the one that transformers reads, or refused."""

import json
import warnings

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlade.cli import main
from jlade.conversion import load, load_hf
from jlade.conversion.hf_config import read_config, to_hf
from jlade.conversion.memory import load_held
from jlade.conversion.tensors import named_arrays
from jlade.models.rotary import LongRopeScaling, YarnScaling, inverse_frequencies
from tests.conversion.hf_files import change_config
from tests.families import LLAMA_3, SIZES, YARN, class_of
from tests.forward import run_blocks

torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
transformers = pytest.importorskip("transformers")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WITHOUT_TOKENS = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))


def save(directory, family="Llama", changes=(), **arguments):
    """Saves a tiny random model of transformers."""
    torch.manual_seed(0)
    shape = SIZES | WITHOUT_TOKENS | {"max_position_embeddings": 128, "initializer_range": 0.3}
    config = getattr(transformers, f"{family}Config")(**shape | dict(changes))
    class_of(config.model_type)(config).save_pretrained(directory, **arguments)


def rewrite(directory, function):
    """Puts `function` of the tensors by name in their place."""
    save_file(function(load_file(directory / SINGLE)), directory / SINGLE, metadata={"format": "pt"})


def assert_same(params, model):
    """Asserts that all arrays are those of a model of transformers."""
    theirs = model.state_dict()
    for name, array in named_arrays(params).items():
        np.testing.assert_array_equal(np.asarray(array, np.float32), theirs[name].float().numpy(), err_msg=name)
    assert (params.output is None) == (model.lm_head.weight is model.model.embed_tokens.weight)


def other_head(tensors):
    return tensors | {HEAD: tensors[EMBEDDING][::-1].copy()}


def same_head(tensors):
    return tensors | {HEAD: tensors[EMBEDDING].copy()}


TIED = {"tie_word_embeddings": True}


def test_a_head_of_its_own_stays_through_every_format(tmp_path):
    save(tmp_path / "model", changes=TIED)
    rewrite(tmp_path / "model", other_head)
    expected = load_file(tmp_path / "model" / SINGLE)[HEAD]
    for kind in ("jlade", "hf"):
        assert main(["convert", str(tmp_path / "model"), str(tmp_path / kind), "--to", kind]) == 0
        assert json.loads((tmp_path / kind / "config.json").read_text())["tie_word_embeddings"] is False
    params = load(tmp_path / "jlade", "float32", strict=True)
    np.testing.assert_array_equal(params.output, expected)
    assert_same(params, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))


def test_a_head_of_its_own_is_taken_from_a_model_in_memory(tmp_path):
    save(tmp_path, changes=TIED)
    rewrite(tmp_path, other_head)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(load_held(model.config.to_dict(), model.state_dict(), lambda tensor: tensor.numpy()), model)


@pytest.mark.parametrize("indexed", ["a.safetensors", "both"])
def test_two_checkpoints_in_a_directory_are_refused(indexed, tmp_path):
    save(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    head_file = SINGLE if indexed == "both" else "a.safetensors"
    weight_map = {name: head_file if name == HEAD else "a.safetensors" for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    message = rf"two checkpoints, {SINGLE} and that of {INDEX}, with a\.safetensors: remove one of them"
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path)


@pytest.mark.parametrize("written", ["float16", None])
def test_auto_is_the_dtype_of_transformers(written, tmp_path):
    """That of config.json, or of the first tensor, which is a bfloat16 matrix before the norms in float32."""
    save(tmp_path)

    def half(tensors):
        return {name: array if "norm" in name else array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}

    rewrite(tmp_path, half)
    change_config(tmp_path, dtype=written)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    params = load_hf(tmp_path, "auto", strict=True)
    assert f"torch.{params.norm.dtype}" == f"torch.{params.embedding.dtype}" == str(model.dtype)
    assert params.norm.dtype == jnp.dtype(written or "bfloat16")
    assert_same(params, model)
    change_config(tmp_path, dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"config\.json: dtype is 'float8_e4m3fn'; supported are float32, bfloat16,"):
        load_hf(tmp_path, "auto")


LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [9.0] * 4}
ROTATIONS = {  # keys of config.json, the keys that are ignored
    "llama3 of all positions": ({"rope_scaling": LLAMA_3, "rope_theta": 5e3}, ()),
    "llama3, the outer length": ({"rope_scaling": LLAMA_3, "original_max_position_embeddings": 16}, ()),
    "yarn, both lengths": ({"rope_scaling": YARN, "original_max_position_embeddings": 16}, ()),
    "yarn": ({"rope_scaling": YARN | {"attn_factor": 2.0, "finetuned": True}}, ("attn_factor", "finetuned")),
    "default": ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, ("factor",)),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 8.0, "beta_slow": 1}}, ("beta_slow",)),
    "longrope": ({"rope_scaling": LONG, "original_max_position_embeddings": 32}, ()),
    "longrope, factor": ({"rope_scaling": LONG | {"factor": 3.0, "original_max_position_embeddings": 64}}, ()),
    "both, equal": (
        {"rope_parameters": YARN | {"rope_theta": 5e3}, "rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 5e3},
        (),
    ),
    "both, one empty": ({"rope_parameters": YARN, "rope_scaling": {}}, ()),
}


def assert_same_rotation(directory, config):
    """Asserts that frequencies and scale are those of transformers; no model is made."""
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.AutoConfig.from_pretrained(directory)
    )
    ours = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-6)
    is_scaled = isinstance(config.rope_scaling, YarnScaling | LongRopeScaling)
    scale = config.rope_scaling.attention_factor if is_scaled else 1.0
    np.testing.assert_allclose(scale, theirs.attention_scaling, rtol=1e-12)


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations_are_those_of_transformers(case, tmp_path):
    keys, ignored = ROTATIONS[case]
    sizes = SIZES | {"model_type": "llama", "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | keys))
    if ignored:
        named = ", ".join(f"rope_scaling.{key}" for key in ignored)
        with pytest.warns(UserWarning, match=f"ignored unknown keys, which strict=True refuses: {named}$"):
            config = read_config(tmp_path)
        with pytest.raises(ValueError, match=f"strict=True refuses unknown keys: {named}$"):
            read_config(tmp_path, strict=True)
    else:
        config = read_config(tmp_path, strict=True)
    assert_same_rotation(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config, "float32")))
    assert_same_rotation(tmp_path, config)


def test_longrope_of_a_llama_has_the_logits_of_transformers(tmp_path):
    save(tmp_path, changes={"rope_parameters": LONG | {"rope_theta": 500.0, "original_max_position_embeddings": 32}})
    tokens = np.random.default_rng(0).integers(0, 50, (1, 32), dtype=np.int32)
    params = load_hf(tmp_path, "float32", strict=True)
    assert params.config.max_positions == 32
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(run_blocks(params, tokens, [32]), expected, atol=2e-4)


def test_the_base_of_olmo_3_is_that_of_layers_without_a_window(tmp_path):
    sizes = SIZES | {"model_type": "olmo3", "layer_types": ["sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"rope_theta": 77.0}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    ours = [rotary.theta for rotary in read_config(tmp_path, strict=True).layer_rotary]
    assert ours == [theirs[kind]["rope_theta"] for kind in sizes["layer_types"]]
    assert ours[1] == 77.0


def test_the_base_of_ministral_3_belongs_to_the_scaling_of_the_family(tmp_path):
    for changes in ({}, {"rope_scaling": YARN}):
        (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "ministral3"} | changes))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert read_config(tmp_path, strict=True).rope_theta == theirs["rope_theta"] == (1e4 if changes else 1e6)


@pytest.mark.parametrize("family", ["gpt_oss", "ministral3"])
@pytest.mark.parametrize(
    "changes", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": None}], ids=str
)
def test_null_is_the_scaling_of_the_family(family, changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": family} | changes))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    scaling = read_config(tmp_path, strict=True).rope_scaling
    assert (theirs["rope_type"], theirs["factor"]) == ("yarn", scaling.factor)


def test_no_scaling_is_written_as_none(tmp_path):
    """Where the family has one by default, which null would stand for."""
    unscaled = {"model_type": "gpt_oss", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | unscaled))
    config = read_config(tmp_path, strict=True)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config, "float32")))
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_type"] == "default"
    assert read_config(tmp_path, strict=True).rope_scaling is None


def test_the_first_wrong_bit_of_a_large_head_unties(tmp_path):
    """Whatever chunk it is in; the last row of a vocabulary that no chunk divides."""
    save(tmp_path, changes=TIED | {"vocab_size": 53})
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr("jlade.conversion.weight_files.CHUNK", 4 * 32)
        rewrite(tmp_path, same_head)
        assert load_hf(tmp_path, "float32").output is None

        def last_bit(tensors):
            tensors[HEAD].view(np.uint32)[-1, -1] ^= 1
            return tensors

        rewrite(tmp_path, last_bit)
        assert load_hf(tmp_path, "float32").output is not None
