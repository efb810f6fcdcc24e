"""LoRA adapters merged while their base model is read: the weights by hand and of PEFT, and what is refused."""

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jlade
from jlade import cli, conversion
from jlade.cli import arguments, generate
from jlade.conversion import load_gguf, load_hf, save_hf
from jlade.models.llama import quantize
from tests.conversion import gguf_files
from tests.conversion.adapter_files import PREFIX, shapes_of, write_adapter
from tests.conversion.hf_files import assert_equal, random_params, random_tensors, write_checkpoint
from tests.families import NEMOTRON_EXPERTS, RECURRENT_EXPERTS
from tests.tiny import slow


@pytest.fixture
def base(tmp_path):
    """A base model, and its tensors, in exact numbers of float32."""
    (tmp_path / "base").mkdir()
    tensors = {name: np.round(array * 2**10) / 2**10 for name, array in random_tensors().items()}
    return write_checkpoint(tmp_path / "base", tensors, tie_word_embeddings=False), tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 3.0),
        ({"r": 4, "lora_alpha": 3, "use_rslora": True}, 1.5),
        ({"fan_in_fan_out": True, "lora_dropout": 0.1, "bias": "none", "init_lora_weights": "gaussian"}, 3.0),
        ({"target_modules": r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj"}, 3.0),
        ({"target_modules": "all-linear"}, 3.0),
    ],
    ids=["plain", "rank stabilized", "without effect", "pattern", "all linear"],
)
def test_weights_by_hand(dtype, changes, scale, base, tmp_path):
    """W + alpha / r * B @ A for W in the dtype of the parameters, rounded once."""
    directory, tensors = base
    ranks = {name.removesuffix(".weight"): changes.get("r", 2) for name in tensors}
    products = write_adapter(tmp_path / "adapter", shapes_of(directory), ranks=ranks, **changes)
    assert len(products) == 6
    for name, product in products.items():
        weight = tensors[name].astype(jnp.dtype(dtype)).astype(np.float32)
        tensors[name] = (weight + np.float32(scale) * product).astype(jnp.dtype(dtype)).astype(np.float32)
    merged = load_hf(directory, dtype, adapter=tmp_path / "adapter", strict=True)
    assert_equal(merged, load_hf(write_checkpoint(tmp_path, tensors), dtype))


def test_ranks_and_scales_of_single_modules(base, tmp_path):
    directory, tensors = base
    first = "model.layers.0.self_attn.q_proj"
    patterns = {"rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 1}, "alpha_pattern": {"down_proj": 1}}
    products = write_adapter(tmp_path / "adapter", shapes_of(directory), ranks={first: 1}, **patterns)
    for name, product in products.items():
        scale = 6.0 if name == f"{first}.weight" else 0.5 if "down_proj" in name else 3.0
        tensors[name] += np.float32(scale) * product
    expected = load_hf(write_checkpoint(tmp_path, tensors), "float32")
    assert_equal(load_hf(directory, "float32", adapter=tmp_path / "adapter"), expected)


def test_matrices_that_an_adapter_has_whole(base, tmp_path):
    """Beside a product for the embedding, and for a model that ties the embedding to its output."""
    directory, tensors = base
    names = ["lm_head.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"]
    changes = {"modules_to_save": ["lm_head", "model.norm", "1.input_layernorm"]}
    products = write_adapter(
        tmp_path / "adapter", shapes_of(directory), ["embed_tokens", "q_proj"], saved=names, **changes
    )
    own = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = tensors | {name: own[PREFIX + name] for name in names}
    for name, product in products.items():
        expected[name] = tensors[name] + 3 * product
    wanted = load_hf(write_checkpoint(tmp_path, expected), "float32")
    assert_equal(load_hf(directory, "float32", adapter=tmp_path / "adapter"), wanted)

    write_checkpoint(
        directory, {name: tensors[name] for name in tensors if name != "lm_head.weight"}, tie_word_embeddings=True
    )
    assert_equal(load_hf(directory, "float32", adapter=tmp_path / "adapter"), wanted)
    assert cli.main(["convert", str(directory), str(tmp_path / "own"), "--adapter", str(tmp_path / "adapter")]) == 0
    assert json.loads((tmp_path / "own" / "config.json").read_text())["tie_word_embeddings"] is False
    assert_equal(conversion.load(tmp_path / "own", "float32"), wanted)


def test_devices_have_the_merged_weights_of_one(base, tmp_path):
    directory, _ = base
    write_adapter(tmp_path / "adapter", shapes_of(directory), ["q_proj", "o_proj", "embed_tokens", "lm_head"])
    own = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    rng = np.random.default_rng(0)  # numbers whose sums are rounded
    inexact = {name: rng.normal(size=array.shape).astype(np.float32) for name, array in own.items()}
    save_file(inexact, tmp_path / "adapter" / "adapter_model.safetensors")
    merged = load_hf(directory, "bfloat16", adapter=tmp_path / "adapter")
    mesh = jlade.make_mesh(model=2)
    assert_equal(load_hf(directory, "bfloat16", adapter=tmp_path / "adapter", mesh=mesh), merged)
    for where in ({}, {"mesh": mesh}):
        assert_equal(load_hf(directory, "bfloat16", adapter=tmp_path / "adapter", bits=8, **where), quantize(merged))


def test_one_expert(tmp_path):
    """An adapter that transformers 4 has trained; later versions hold experts in a tensor that has no module."""
    mixture = {"num_experts": 4, "expert_size": 64, "experts_per_token": 2, "intermediate_size": 0}
    save_hf(random_params(mixture | {"model_type": "mixtral", "norm_eps": 1e-5}, jnp.float32), tmp_path / "base")
    shapes = shapes_of(tmp_path / "base")
    products = write_adapter(
        tmp_path / "adapter", shapes, ["1.w1", "3.w2", "gate"], target_modules=["w1", "w2", "gate"]
    )
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    assert len(products) == 6
    for name, product in products.items():
        tensors[name] += 3 * product
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    merged = load_hf(tmp_path / "base", "float32", adapter=tmp_path / "adapter")
    assert_equal(merged, load_hf(tmp_path / "merged", "float32"))
    for layer in "model.layers.0", "model.layers.1":
        gate, up, down = (
            np.stack([tensors.pop(f"{layer}.block_sparse_moe.experts.{i}.{name}.weight") for i in range(4)])
            for name in ("w1", "w3", "w2")
        )
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{layer}.mlp.experts.down_proj"] = down
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    with pytest.raises(ValueError, match="has one tensor for all experts; the adapter changes single ones"):
        load_hf(tmp_path / "base", adapter=tmp_path / "adapter")


def test_a_gguf_file_is_a_base_model(tmp_path):
    gguf_files.write(tmp_path / "base.gguf")
    params = load_gguf(tmp_path / "base.gguf")
    save_hf(params, tmp_path / "base")
    write_adapter(tmp_path / "adapter", shapes_of(tmp_path / "base"))
    merged = load_gguf(tmp_path / "base.gguf", adapter=tmp_path / "adapter")
    assert_equal(merged, load_hf(tmp_path / "base", "float32", adapter=tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; supported is 'LORA'. Where PEFT can merge such an adapter"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'; supported is 'CAUSAL_LM' or None"),
        ({"use_dora": True}, "use_dora is True; supported is False"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'; supported is True or False"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, r"layer_replication is \[\[0, 2\], \[1, 2\]\]"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, r"target_parameters is \['mlp.experts.down_proj'\]"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens is \[1, 2\]"),
        ({"megatron_config": {"x": 1}}, "megatron_config is {'x': 1}"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"target_modules": None}, "target_modules must be names or a regular expression, got None"),
        ({"target_modules": [3]}, r"target_modules must be a list of names, got \[3\]"),
        ({"target_modules": "(q_proj"}, "target_modules has a broken regular expression"),
        ({"rank_pattern": [2]}, r"rank_pattern must be an object, got \[2\]"),
        ({"r": 0}, "r must be a positive integer, got 0"),
        ({"lora_alpha": None}, "lora_alpha must be a positive number, got None"),
    ],
    ids=str,
)
def test_settings_that_are_refused(changes, message, base, tmp_path):
    write_adapter(tmp_path / "adapter", shapes_of(base[0]), **changes)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {message}"):
        load_hf(base[0], adapter=tmp_path / "adapter")


def test_unknown_settings_are_said(base, tmp_path):
    write_adapter(tmp_path / "adapter", shapes_of(base[0]), use_new_kind=True)
    with pytest.warns(UserWarning, match=r"adapter_config\.json: ignored unknown keys, .*: use_new_kind"):
        load_hf(base[0], adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"adapter_config\.json: strict=True refuses unknown keys: use_new_kind"):
        load_hf(base[0], adapter=tmp_path / "adapter", strict=True)


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "rename", "message"),
    [
        ({}, {f"{QUERY}.lora_B.weight": None}, f"1 tensors are missing: {QUERY}.lora_B.weight$"),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"]},
            {},
            "4 tensors are missing: model.layers.0.mlp.up_proj.lora_A.weight, model.layers.0.mlp.up_proj.lora_B.weight",
        ),
        (
            {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["v_proj"]},
            {},
            "2 tensors are missing: model.layers.0.self_attn.v_proj.weight, model.layers.1.self_attn.v_proj.weight; "
            "4 tensors are of no module that adapter_config.json names: model.layers.0.self_attn.v_proj.lora_A",
        ),
        ({"layers_to_transform": [1]}, {}, "6 tensors are of no module that adapter_config.json names: model.layers.0"),
        ({"exclude_modules": ["q_proj"]}, {}, f"4 tensors are of no module .* names: {QUERY}.lora_A"),
        (
            {},
            {f"{QUERY}.lora_A.weight": "model.layers.7.self_attn.q_proj.lora_A.weight"},
            f"1 tensors are missing: {QUERY}.lora_A.weight; 1 tensors are of no module .* names: model.layers.7",
        ),
        ({"r": 3}, {}, rf"{QUERY}.lora_A.weight has shape \(2, 8\); the base model and .*json imply \(3, 8\)"),
    ],
    ids=["half", "not there", "not whole", "layers", "excluded", "no such layer", "rank"],
)
def test_tensors_that_do_not_fit_are_named(settings, rename, message, base, tmp_path):
    write_adapter(tmp_path / "adapter", shapes_of(base[0]), **settings)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    for old, new in rename.items():
        array = tensors.pop(PREFIX + old)
        tensors |= {} if new is None else {PREFIX + new: array}
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"adapter_model\.safetensors: {message}"):
        load_hf(base[0], adapter=tmp_path / "adapter")


def test_a_product_for_a_tied_matrix_is_refused(base, tmp_path):
    directory, tensors = base
    write_checkpoint(
        directory, {name: tensors[name] for name in tensors if name != "lm_head.weight"}, tie_word_embeddings=True
    )
    write_adapter(tmp_path / "adapter", shapes_of(directory), ["embed_tokens"])
    with pytest.raises(
        ValueError, match=r"embed_tokens\.lora_embedding_A, .* would change the embedding and lm_head at"
    ):
        load_hf(directory, adapter=tmp_path / "adapter")


def test_files_that_are_no_adapter(base, tmp_path):
    directory, _ = base
    with pytest.raises(ValueError, match=r"adapter must be a directory with adapter_config\.json .*, got 'owner/name'"):
        load_hf(directory, adapter="owner/name")
    with pytest.raises(ValueError, match=r"base/adapter_config\.json is missing"):
        load_hf(directory, adapter=directory)
    write_adapter(tmp_path / "adapter", shapes_of(directory))
    shutil.copy(directory / "model.safetensors", tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"names must begin with base_model\.model\., .* got lm_head\.weight, model\."):
        load_hf(directory, adapter=tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors, and adapter_model\.bin is in a format"):
        load_hf(directory, adapter=tmp_path / "adapter")


def test_an_adapter_is_no_model(base, tmp_path):
    write_adapter(tmp_path / "adapter", shapes_of(base[0]), base_model_name_or_path="owner/base")
    with pytest.raises(ValueError, match=r"has no model but an adapter of 'owner/base': load it with jlade\.load\("):
        jlade.load(tmp_path / "adapter")


def test_an_adapter_beside_the_model_is_said_or_merged(base, tmp_path):
    """transformers loads it too, if PEFT is installed."""
    directory, _ = base
    write_adapter(directory, shapes_of(directory))
    with pytest.warns(UserWarning, match=rf"ignored, .* of .*/adapter_config\.json; adapter='{directory}'"):
        load_hf(directory)
    with pytest.raises(ValueError, match=rf"strict=True refuses to ignore the adapter of {directory}/adapter_config"):
        load_hf(directory, strict=True)
    merged = load_hf(directory, adapter=directory, strict=True)
    arguments = ["convert", str(directory), str(tmp_path / "new"), "--to", "hf", "--adapter", str(directory)]
    assert cli.main(arguments) == 0
    assert_equal(load_hf(tmp_path / "new", strict=True), merged)  # no adapter is beside it


def test_a_checkpoint_of_jlade_is_no_base_model(base, tmp_path):
    conversion.save(load_hf(base[0]), tmp_path / "own")
    with pytest.raises(ValueError, match=r"adapter must be None for .*/own, a checkpoint of jlade: merge it into"):
        jlade.load(tmp_path / "own", adapter=tmp_path / "adapter")


def test_commands_load_an_adapter(small_demo, tmp_path):
    write_adapter(tmp_path / "adapter", shapes_of(small_demo))
    given = ["--adapter", str(tmp_path / "adapter")]
    params, _ = arguments.load(generate.parser().parse_args(["--model", str(small_demo), *given]))
    assert_equal(params, load_hf(small_demo, adapter=tmp_path / "adapter"))
    assert (params.layers[0].attention.query != load_hf(small_demo).layers[0].attention.query).any()
    with pytest.raises(ValueError, match=r"--adapter .*/adapter needs --model, the model that it was trained on"):
        arguments.load(generate.parser().parse_args(given))


LORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
PATTERNS = {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 3}}


@pytest.mark.parametrize(
    ("model_type", "sizes", "settings"),
    [
        ("llama", {}, LORA | PATTERNS | {"use_rslora": True}),
        ("llama", {}, LORA | {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
        ("llama", {}, LORA | {"layers_to_transform": [1], "modules_to_save": ["norm"]}),
        ("llama", {}, LORA | {"target_modules": ["embed_tokens", "lm_head"]}),
        ("llama", {"tie_word_embeddings": True}, LORA | {"modules_to_save": ["embed_tokens"]}),
        ("llama", {"tie_word_embeddings": True}, LORA | {"modules_to_save": ["lm_head"]}),
        (
            "llama",
            {"tie_word_embeddings": True},
            LORA | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ),
        ("qwen2", {}, LORA | {"bias": "all"}),
        ("phi3", {}, LORA | {"target_modules": ["qkv_proj", "gate_up_proj"]}),
        (
            "gpt_neox",
            {"num_key_value_heads": 4, "rotary_pct": 0.5},
            LORA | {"target_modules": ["query_key_value", "dense", "embed_in"]},
        ),
        ("gpt_neox", {"num_key_value_heads": 4, "rotary_pct": 0.5}, LORA | {"target_modules": "all-linear"}),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
            LORA | {"target_modules": ["query_key_value", "dense_4h_to_h"], "layers_to_transform": [1]},
        ),
        ("mixtral", {"num_local_experts": 4}, LORA | {"target_modules": ["q_proj"]}),
        (
            "qwen3_next",
            RECURRENT_EXPERTS | {"eos_token_id": 2},
            LORA | {"target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba"]},
        ),
        (
            "nemotron_h",
            NEMOTRON_EXPERTS | {"eos_token_id": 2},
            LORA | {"target_modules": ["q_proj", "in_proj", "up_proj", "embeddings"], "modules_to_save": ["lm_head"]},
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
            | {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
            | {"n_group": 1, "topk_group": 1},
            LORA | {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_weights_are_those_of_peft(dtype, model_type, sizes, settings, tmp_path):
    peft = pytest.importorskip("peft", reason="the test extra installs peft on Python 3.11 only")
    import torch
    import transformers

    shape = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "eos_token_id": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **shape | heads | sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")

    def read():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype))

    with warnings.catch_warnings(action="ignore"):  # of tied matrices
        trained = peft.get_peft_model(read(), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        for weight in trained.parameters():
            if weight.requires_grad:
                weight.data += 0.1 * torch.randn_like(weight)
        trained.save_pretrained(tmp_path / "adapter")
        merged = peft.PeftModel.from_pretrained(read(), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    expected = load_hf(tmp_path / "merged", dtype)
    params = load_hf(tmp_path / "base", dtype, adapter=tmp_path / "adapter", strict=True)
    assert params.config == expected.config
    for array, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (array, other)), rtol=0, atol=2e-7)
