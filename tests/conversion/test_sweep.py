"""A good checkpoint with one change: it is read as transformers reads it, or refused by name, or the change is said."""

import functools
import json
import os
import re
import shutil

import numpy as np
import pytest

import jlade
from tests.families import ROWS, checkpoint, class_of, rope
from tests.forward import run_blocks
from tests.tiny import slow_but

TOKENS = np.random.default_rng(0).integers(0, 50, (1, 24), dtype=np.int32)
LISTED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA_4 = LISTED | {"head_dim": 12, "global_head_dim": 20, "hidden_size_per_layer_input": 6}
GEMMA_4 |= {"vocab_size_per_layer_input": 52}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "gemma2": ("Gemma2", LISTED | {"head_dim": 12, "query_pre_attn_scalar": 10}),
    "gemma3": ("Gemma3Text", LISTED | {"head_dim": 12, "query_pre_attn_scalar": 10}),
    "gemma4": ("Gemma4Text", GEMMA_4),
    "phi3": ("Phi3", {"sliding_window": 7}),
    "mixtral": ("Mixtral", EXPERTS),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", LISTED | {"no_rope_layers": [1, 0], "use_sliding_window": True}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "ministral3": ("Ministral3", {"head_dim": 12} | rope("yarn", factor=4.0, llama_4_scaling_beta=0.7)),
    "stablelm": ("StableLm", {}),
    **{name: ROWS[name] for name in ("deepseek_v2", "deepseek_v3", "mistral4")},
    **{name: ROWS[name] for name in ("gpt_neox", "falcon", "falcon, 40B", "ernie4_5_moe", "afmoe", "hy_v3")},
    "afmoe, no shared experts": ("Afmoe", ROWS["afmoe"][1] | {"num_shared_experts": 0}),
    "gpt_oss": ("GptOss", EXPERTS | LISTED | {"head_dim": 8} | rope("yarn", factor=4.0)),
    "nemotron_h": ROWS["nemotron_h, experts"],
}
QUERY = "model.layers.0.self_attn.q_proj.weight"
SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
HEADS = {"lm_head.weight": "model.lm_head.weight"}
REMOVED = object()


def keys(*path, file="config.json", **changes):
    """Changes keys of a JSON file, `path` inside."""

    def change(directory):
        content = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
        inner = functools.reduce(lambda outer, key: outer[key], path, content)
        inner.update(changes)
        for key in [key for key, value in changes.items() if value is REMOVED]:
            del inner[key]
        (directory / file).write_text(json.dumps(content))

    return change


def rotary(**changes):
    return keys("rope_parameters", **changes)


def tensors(change):
    """Replaces the tensors of the weight file by those that `change` returns."""

    def write(directory):
        from safetensors.torch import load_file, save_file

        changed = change(load_file(directory / "model.safetensors"))
        arrays = {name: array.clone().contiguous() for name, array in changed.items()}
        save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})

    return write


def retyped(*dtypes, names=(QUERY,)):
    """Casts the tensors with these names, or all."""

    def cast(found):
        import torch

        for name in names or found:
            for dtype in dtypes:
                found[name] = found[name].to(getattr(torch, dtype))
        return found

    return tensors(cast)


def renamed(rename):
    return tensors(lambda found: {rename(name): array for name, array in found.items()})


def with_tensor(name, *shape):
    def add(found):
        import torch

        return found | {name: torch.ones(shape)}

    return tensors(add)


def sharded(names=SHARDS, rewrite=dict, repeated=None):
    """Divides the weights between two files with an index, whose map `rewrite` changes."""

    def divide(directory):
        from safetensors.torch import load_file, save_file

        found = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        files = {name: names[i % 2] for i, name in enumerate(sorted(found))}
        for file in names:
            (directory / file).parent.mkdir(exist_ok=True)
            part = {name: array for name, array in found.items() if files[name] == file or name == repeated}
            save_file(part, directory / file, metadata={"format": "pt"})
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": rewrite(files)}))

    return divide


def indexed(file):
    """Names one file for all tensors in an index beside the weights."""

    def write(directory):
        from safetensors.torch import load_file

        weight_map = dict.fromkeys(load_file(directory / "model.safetensors"), file)
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return write


def ending_with(eos_token_id):
    def change(directory):
        (directory / "generation_config.json").unlink()  # beside which config.json's do not count
        keys(eos_token_id=eos_token_id)(directory)

    return change


def moved(old, new, link=False):
    def move(directory):
        (directory / new).parent.mkdir(exist_ok=True)
        (directory / old).rename(directory / new)
        if link:
            os.symlink(directory / new, directory / old)

    return move


def copied(old, new):
    return lambda directory: shutil.copy(directory / old, directory / new)


EQUAL = None  # to transformers, without a warning


class Said(str):
    """What a warning matches; the logits are those of transformers."""


class Refused(str):
    """What the error matches."""


LINEAR = {"rope_type": "linear", "factor": 2.0}
LONG = {"short_factor": [1.5] * 4, "long_factor": [3.0] * 4}
CASES = {
    "llama: no architectures": (keys(architectures=REMOVED), EQUAL),
    "llama: no rms_norm_eps": (keys(rms_norm_eps=REMOVED), EQUAL),
    "llama: no head_dim": (keys(head_dim=REMOVED), EQUAL),
    "llama: null head_dim": (keys(head_dim=None), EQUAL),
    "llama: a string for a size": (keys(vocab_size="50"), Refused("config.json: vocab_size .* '50'")),
    "llama: a float for a size": (keys(num_hidden_layers=2.0), Refused("config.json: num_hidden_layers .* 2.0")),
    "llama: no model_type": (keys(model_type=REMOVED), Refused("config.json: model_type")),
    "llama: model_type in capitals": (keys(model_type="LLaMA"), Refused("config.json: model_type is 'LLaMA'")),
    "llama: model_type of mistral": (keys(model_type="mistral"), Refused("config.json: architectures is")),
    "llama: attention_bias without biases": (keys(attention_bias=True), Refused("missing.*q_proj.bias")),
    "llama: tied in config.json alone": (keys(tie_word_embeddings=True), EQUAL),
    "llama: rope_theta outside alone": (lambda d: (rotary(rope_theta=REMOVED)(d), keys(rope_theta=50.0)(d)), EQUAL),
    "llama: no rope_theta": (rotary(rope_theta=REMOVED), EQUAL),
    "llama: a string for rope_theta": (rotary(rope_theta="500"), Refused("config.json: rope_theta .* '500'")),
    "llama: linear": (rotary(**LINEAR), EQUAL),
    "llama: linear without a factor": (rotary(rope_type="linear"), Refused("config.json: factor .* None")),
    "llama: a factor without a type": (rotary(factor=2.0), Said("rope_parameters.factor")),
    "llama: an unknown rope_type": (rotary(rope_type="su"), Refused("config.json: rope_type is 'su'")),
    "llama: yarn with mscale": (rotary(rope_type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.3), EQUAL),
    "llama: yarn with null truncate": (
        rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=None),
        EQUAL,
    ),
    "llama: llama3": (rotary(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0), EQUAL),
    "llama: another configuration file": (
        keys(configuration_files=["config.99.0.json"]),  # of a later version of transformers
        Said("configuration_files"),
    ),
    "llama: an unknown key": (keys(layer_norm_eps=0.1), Said("layer_norm_eps")),
    "llama: fewer layers than files": (keys(num_hidden_layers=1), Said("more layers than num_hidden_layers, 1")),
    "llama: a layer more in the files": (
        with_tensor("model.layers.2.mlp.up_proj.weight", 48, 32),
        Said("1 tensors of more layers than .*, 2:"),
    ),
    "llama: a longer list of layers": (keys(layer_types=["full_attention"] * 3), Refused("config.json: layer_types")),
    "llama: bos_token_id beyond the vocabulary": (keys(bos_token_id=60), EQUAL),
    "llama: end tokens beyond the vocabulary": (ending_with([3, 50]), Said("end tokens that no text has")),
    "llama: a negative end token": (ending_with(-1), Said("eos_token_id is -1, and the vocabulary")),
    "llama: a query in float64": (retyped("float64"), EQUAL),
    "llama: a query in bfloat16": (retyped("bfloat16"), EQUAL),
    "llama: all in float16": (retyped("float16", names=()), EQUAL),
    "llama: a query in int8": (retyped("int8"), Refused("q_proj.weight is of type I8")),
    "llama: a query in float8": (retyped("float8_e4m3fn"), Refused("q_proj.weight is of type F8_E4M3")),
    "llama: a key transposed": (
        tensors(lambda t: {name: a.T if "k_proj" in name else a for name, a in t.items()}),
        Refused(r"k_proj.weight has shape \(32, 16\)"),
    ),
    "llama: no final norm": (
        tensors(lambda t: {name: a for name, a in t.items() if name != "model.norm.weight"}),
        Refused("1 tensors are missing: model.norm.weight"),
    ),
    "llama: names without a prefix": (renamed(lambda name: name.removeprefix("model.")), EQUAL),
    "llama: a prefix of the output matrix": (renamed(lambda name: HEADS.get(name, name)), EQUAL),
    "llama: names with another prefix": (renamed(lambda name: f"module.{name}"), Refused("begin with module.")),
    "llama: old names of norms": (
        renamed(lambda name: name.replace("norm.weight", "norm.gamma")),
        Refused("missing.*norm.weight"),
    ),
    "llama: one tensor more": (with_tensor("score.weight", 2, 32), Refused("not of this model: score.weight")),
    "llama: a bias more": (with_tensor(QUERY.replace("weight", "bias"), 32), Refused("configuration has no biases")),
    "llama: rotary tables": (with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 4), EQUAL),
    "llama: two files": (sharded(), EQUAL),
    "llama: files with other names": (sharded(("a.safetensors", "b.safetensors")), EQUAL),
    "llama: an index of the file itself": (indexed("model.safetensors"), EQUAL),
    "llama: an index of missing files": (indexed(SHARDS[0]), Said("whose files are not there: model-00001")),
    "llama: files in a folder": (sharded(("a/1.safetensors", "a/2.safetensors")), Refused(f"{INDEX}: weight_map")),
    "llama: an index without a tensor": (
        sharded(rewrite=lambda files: {name: file for name, file in files.items() if name != QUERY}),
        EQUAL,
    ),
    "llama: an index that swaps the files": (
        sharded(rewrite=lambda files: {name: SHARDS[file == SHARDS[0]] for name, file in files.items()}),
        EQUAL,
    ),
    "llama: a tensor in both files": (sharded(repeated=QUERY), Refused("both have the tensor .*q_proj")),
    "llama: a shard without an index": (moved("model.safetensors", SHARDS[0]), Refused("has no weights")),
    "llama: weights in a folder": (moved("model.safetensors", "a/model.safetensors"), Refused("has no weights")),
    "llama: weights by a link": (moved("model.safetensors", "a/weights", link=True), EQUAL),
    "llama: another file of weights": (copied("model.safetensors", "consolidated.safetensors"), EQUAL),
    "tied: an equal output matrix": (
        tensors(lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]}),
        EQUAL,
    ),
    "tied: another output matrix": (
        tensors(lambda t: t | {"lm_head.weight": 2 * t["model.embed_tokens.weight"]}),
        EQUAL,
    ),
    "tied: the output matrix alone": (renamed(lambda name: name.replace("model.embed_tokens", "lm_head")), EQUAL),
    "tied: an index with an absent output matrix": (
        sharded(rewrite=lambda files: files | {"lm_head.weight": SHARDS[1]}),
        EQUAL,
    ),
    "tied: names without a prefix": (renamed(lambda name: name.removeprefix("model.")), EQUAL),
    "tied: not according to config.json": (keys(tie_word_embeddings=False), Refused("lm_head must be stored")),
    "mistral: null sliding_window": (keys(sliding_window=None), EQUAL),
    "mistral: no sliding_window": (keys(sliding_window=REMOVED), EQUAL),
    "mistral: sliding_window 0": (keys(sliding_window=0), Refused("config.json: sliding_window .* 0")),
    "qwen2: a window in the second layer": (
        keys(use_sliding_window=True, sliding_window=7, max_window_layers=1, layer_types=REMOVED),
        EQUAL,
    ),
    "qwen2: a window that is not used": (keys(sliding_window=7), EQUAL),
    "qwen2: attention_bias": (keys(attention_bias=True), Refused("config.json: attention_bias is True")),
    "qwen2: layers with a window that is not used": (
        keys(sliding_window=7, layer_types=LISTED["layer_types"]),
        Refused("config.json: layer_types is .*, which needs use_sliding_window"),
    ),
    "qwen3: no head_dim": (keys(head_dim=REMOVED), Refused("config.json implies")),
    "gemma2: no caps": (keys(attn_logit_softcapping=None), EQUAL),
    "gemma2: no query_pre_attn_scalar": (keys(query_pre_attn_scalar=REMOVED), EQUAL),
    "gemma2: no layer_types": (keys(layer_types=REMOVED), EQUAL),
    "gemma2: a pattern that it does not read": (
        keys(layer_types=REMOVED, sliding_window_pattern=1),
        Said("sliding_window_pattern"),
    ),
    "gemma2: the activation gelu": (
        keys(hidden_activation="gelu"),
        Refused("config.json: hidden_activation is 'gelu'"),
    ),
    "gemma3: full attention in every layer": (keys(layer_types=["full_attention"] * 2), EQUAL),
    "gemma3: one rotation for all layers": (
        keys(rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        Refused("config.json: rope_parameters must be an object for each type"),
    ),
    "gemma4: the older form of heads": (keys(per_layer_config=REMOVED, global_head_dim=20), EQUAL),
    "gemma4: KV heads without attention_k_eq_v": (
        keys(per_layer_config=REMOVED, global_head_dim=20, num_global_key_value_heads=4),
        EQUAL,
    ),
    "gemma4: heads of size 512 by default": (keys(per_layer_config=REMOVED), Refused("config.json implies")),
    "gemma4: a window in the last layer": (keys(layer_types=["sliding_attention"] * 2), EQUAL),
    "gemma4: no layer_types": (
        keys(layer_types=REMOVED),
        EQUAL,
    ),
    "gemma4: no rope_parameters": (keys(rope_parameters=REMOVED), EQUAL),
    "gemma4: attention in both directions among the tokens of an image": (
        keys(use_bidirectional_attention="vision"),
        EQUAL,
    ),
    "gemma4: no cap": (keys(final_logit_softcapping=None), EQUAL),
    "gemma4: experts that are not used": (keys(num_experts=4, top_k_experts=2, moe_intermediate_size=24), EQUAL),
    "gemma4: fewer tokens with embeddings for each layer": (
        keys(vocab_size_per_layer_input=40),
        Refused("config.json: vocab_size_per_layer_input must be at least vocab_size, 50, got 40"),
    ),
    "phi3: longrope": (
        keys(rope_parameters=REMOVED, rope_scaling=LONG | {"type": "longrope"}, original_max_position_embeddings=64),
        EQUAL,
    ),
    "mixtral: experts by another name": (keys(num_experts=4), Refused("config.json: num_experts is 4")),
    "mixtral: one expert for a token": (keys(num_experts_per_tok=1), EQUAL),
    "mixtral: fewer experts than files": (keys(num_local_experts=2), Refused("tensors|shape")),
    "olmo2: clip_qkv": (keys(clip_qkv=0.1), Refused("config.json: clip_qkv is 0.1")),
    "smollm3: layers with a window against use_sliding_window": (keys(use_sliding_window=False), EQUAL),
    "smollm3: layers with a window of no size": (
        keys(sliding_window=None),
        Refused("config.json: layer_types is .*, which needs sliding_window"),
    ),
    "smollm3: rotations by the interval": (keys(no_rope_layers=REMOVED, no_rope_layer_interval=2), EQUAL),
    "qwen3_moe: a window": (keys(use_sliding_window=True, sliding_window=7, max_window_layers=2), EQUAL),
    "qwen3_moe: a window in one layer": (
        keys(use_sliding_window=True, **LISTED),
        Refused("config.json: layer_types is"),
    ),
    "qwen3_moe: full attention in every layer": (keys(layer_types=["full_attention"] * 2), EQUAL),
    "qwen3_moe: use_qk_norm": (keys(use_qk_norm=True), EQUAL),
    "ministral3: no original length": (rotary(original_max_position_embeddings=REMOVED), EQUAL),
    "stablelm: the key of another family": (keys(rms_norm_eps=0.5), Said("rms_norm_eps")),
    "gpt_oss: experts of a token by another name": (keys(num_experts_per_tok=REMOVED, experts_per_token=1), EQUAL),
    "deepseek_v3: another rms_norm_eps, which latents do not have": (keys(rms_norm_eps=0.3), EQUAL),
    "deepseek_v3: rotations of halves": (keys(rope_interleave=False), EQUAL),
    "deepseek_v3: null rope_interleave": (keys(rope_interleave=None), EQUAL),
    "deepseek_v3: no rope_interleave": (keys(rope_interleave=REMOVED), EQUAL),
    "deepseek_v3: no mscale_all_dim": (rotary(mscale_all_dim=REMOVED), EQUAL),
    "deepseek_v3: no mscale": (rotary(mscale=REMOVED), EQUAL),
    "deepseek_v3: no rotary settings": (keys(rope_parameters=REMOVED), EQUAL),
    "deepseek_v3: no groups": (keys(n_group=1, topk_group=1), EQUAL),
    "deepseek_v3: null norm_topk_prob": (keys(norm_topk_prob=None), EQUAL),
    "deepseek_v3: no head_dim": (keys(head_dim=REMOVED), EQUAL),
    "deepseek_v3: no latent of queries": (keys(q_lora_rank=None), Refused("missing.*q_proj")),
    "deepseek_v3: two layers without experts": (keys(first_k_dense_replace=2), Refused("missing.*mlp.down_proj")),
    "deepseek_v2: experts of all groups": (keys(topk_method="greedy"), EQUAL),
    "deepseek_v2: experts of one group": (keys(topk_group=1, num_experts_per_tok=2), EQUAL),
    "deepseek_v2: no mscale_all_dim": (rotary(mscale_all_dim=REMOVED, mscale=REMOVED), EQUAL),
    "deepseek_v2: attention_bias": (keys(attention_bias=True), Refused("config.json: attention_bias is True")),
    "mistral4: another fraction rotated": (
        rotary(partial_rotary_factor=0.5),
        Refused("config.json: partial_rotary_factor must give the 4 elements"),
    ),
    "mistral4: no fraction": (rotary(partial_rotary_factor=REMOVED), EQUAL),
    "mistral4: no original length": (rotary(original_max_position_embeddings=REMOVED), EQUAL),
    "mistral4: another scaling of queries": (rotary(llama_4_scaling_beta=0.2, mscale_all_dim=REMOVED), EQUAL),
    "mistral4: unscaled weights of experts": (keys(norm_topk_prob=False, routed_scaling_factor=1.0), EQUAL),
    "gpt_neox: keys of transformers 4": (keys(rope_parameters=REMOVED, rotary_pct=0.5, rotary_emb_base=500), EQUAL),
    "gpt_neox: no rotary settings": (keys(rope_parameters=REMOVED), EQUAL),
    "gpt_neox: attention before the MLP": (keys(use_parallel_residual=False), EQUAL),
    "gpt_neox: a key that it does not read": (keys(num_key_value_heads=2), Said("num_key_value_heads")),
    "gpt_neox: a key of its only value": (keys(num_key_value_heads=None), EQUAL),
    "falcon: no rotary settings": (keys(rope_parameters=REMOVED, rope_theta=500), EQUAL),
    "falcon: keys that it does not read": (keys(num_key_value_heads=4, intermediate_size=9, num_kv_heads=2), EQUAL),
    "falcon: keys that are missing": (
        keys(**dict.fromkeys(("multi_query", "parallel_attn", "num_kv_heads", "activation", "alibi"), REMOVED)),
        EQUAL,
    ),
    "falcon: null for a flag": (keys(multi_query=None), Refused("query_key_value.weight has shape")),
    "falcon: attention before the MLP": (keys(parallel_attn=False), Refused("missing.*post_attention_layernorm")),
    "falcon: a norm too many": (with_tensor("transformer.h.0.ln_mlp.weight", 32), Refused("not of this model")),
    "falcon, 40B: the norms by default": (keys(num_ln_in_parallel_attn=REMOVED), EQUAL),
    "falcon, 40B: one norm": (keys(num_ln_in_parallel_attn=1), Refused("missing.*input_layernorm")),
    "falcon, 40B: another number of KV heads": (keys(num_kv_heads=4), Refused("query_key_value.* has shape")),
    "falcon, 40B: a tied output matrix of its own": (keys(tie_word_embeddings=True), EQUAL),
    "ernie4_5_moe: another least divisor": (keys(moe_norm_min=0.3), EQUAL),
    "ernie4_5_moe: keys by other names": (keys(moe_k=REMOVED, num_experts_per_tok=2), EQUAL),
    "ernie4_5_moe: no experts beside the others": (keys(moe_num_shared_experts=0), Refused("not of this model")),
    "ernie4_5_moe: experts in another layer": (keys(moe_layer_start_index=2), Refused("missing")),
    "afmoe: embeddings without a scale": (keys(mup_enabled=False), EQUAL),
    "afmoe: layers by the interval": (keys(layer_types=REMOVED, global_attn_every_n_layers=2), EQUAL),
    "afmoe: another scale of experts": (keys(route_scale=0.5), EQUAL),
    "afmoe, no shared experts: as they are": (lambda directory: None, EQUAL),
    "hy_v3: another scale of experts": (keys(router_scaling_factor=0.5), EQUAL),
    "hy_v3: sums of experts in the dtype of the model": (keys(enable_moe_fp32_combine=False), EQUAL),
    "gpt_oss: a pattern that it does not read": (
        keys(layer_types=REMOVED, sliding_window_pattern=1),
        Said("sliding_window_pattern"),
    ),
    "gpt_oss: swiglu_limit": (keys(swiglu_limit=1.0), Refused("config.json: swiglu_limit is 1.0")),
    "nemotron_h: a letter for each layer": (keys(layers_block_type=REMOVED, hybrid_override_pattern="ME*-"), EQUAL),
    "nemotron_h: letters beside the list": (keys(hybrid_override_pattern="M*"), EQUAL),
    "nemotron_h: old names of parts": (keys(layers_block_type=["mamba", "moe", "attention", "mlp"]), EQUAL),
    "nemotron_h: another number of layers": (keys(num_hidden_layers=2), Refused("num_hidden_layers must be 4")),
    "nemotron_h: old names of keys": (keys(n_groups=REMOVED, mamba_n_groups=2), EQUAL),
    "nemotron_h: another width by expand": (keys(expand=5), EQUAL),
    "nemotron_h: another scale of experts": (keys(routed_scaling_factor=0.5, norm_topk_prob=False), EQUAL),
    "nemotron_h: another rms_norm_eps": (keys(rms_norm_eps=0.3), Refused("rms_norm_eps is 0.3: remove one")),
    "nemotron_h: names of transformers": (renamed(lambda name: name.replace("backbone.", "model.")), EQUAL),
}


WEIGHTS = [case for case in CASES if case.startswith("tied:") or "end token" in case or "index of" in case]
WEIGHTS += [f"llama: {case}" for case in ("names without a prefix", "a prefix of the output matrix")]
WEIGHTS += ["llama: a layer more in the files"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Returns the directory of a family's good checkpoint."""
    made = {}

    def directory_of(family):
        if family not in made:
            directory = tmp_path_factory.mktemp("base") / family
            checkpoint(*BASES[family], directory)  # skips without torch
            made[family] = directory
        return made[family]

    return directory_of


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("case", slow_but(CASES, *list(CASES)[::8], *WEIGHTS))
def test_a_changed_checkpoint_is_read_as_transformers_does_or_refused_by_name(case, bases, tmp_path):
    change, expected = CASES[case]
    directory = shutil.copytree(bases(case.partition(":")[0]), tmp_path / "model")
    change(directory)
    if isinstance(expected, Refused):
        with pytest.raises(ValueError, match=f"(?s){re.escape(str(directory))}.*{expected}"):
            jlade.load(directory, dtype="float32")
        return
    if isinstance(expected, Said):
        with pytest.raises(ValueError, match=rf"{re.escape(str(directory))}.*strict=True refuses .*{expected}"):
            jlade.load(directory, dtype="float32", strict=True)
        with pytest.warns(UserWarning, match=expected):
            params, _ = jlade.load(directory, dtype="float32")
    else:
        params, _ = jlade.load(directory, dtype="float32", strict=True)

    import torch

    theirs = class_of(params.config.family).from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(run_blocks(params, TOKENS, [24]), logits, atol=2e-4)
    is_tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert (params.output is None) == is_tied
    assert all(0 <= token < 50 for token in params.config.eos_ids)
