"""Models of other JAX packages: `jlade.adopt` of their arrays has their logits, and lookahead their texts.

    pip install keras-hub==0.32.0
    python -m tests.stress.layouts keras-hub
    pip install gemma==4.0.1 "sentencepiece<0.2.2"
    python -m tests.stress.layouts gemma
    pip install maxtext==0.2.5  # and of the packages that its extra `tpu` names those that it imports
    python -m tests.stress.layouts maxtext

The models are tiny and random. docs/models.md says which versions go together. None of the packages is installed with
jlade's tests, so each one takes an environment of its own, on Python 3.12 or newer.
"""

import argparse
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from tests.forward import run_blocks

Keys = dict[str, Any]  # of a configuration

LENGTH, PROMPT = 40, 8  # of a text and of its beginning
SHAPE: Keys = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
LLAMA_3: Keys = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR: Keys = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
GEMMA: Keys = {"head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 6, "num_hidden_layers": 7}


class Model(NamedTuple):
    """A model of another package."""

    name: str
    tree: Any  # what is adopted
    config: Keys  # the content of config.json
    logits: Callable[[np.ndarray], np.ndarray]  # of int32[B, L]


def main() -> None:
    packages = {"keras-hub": of_keras_hub, "gemma": of_gemma, "maxtext": of_maxtext}
    parser = argparse.ArgumentParser()
    parser.add_argument("package", choices=packages)
    for model in packages[parser.parse_args().package]():
        check(model)


def check(model: Model) -> None:
    """Compares the logits of a text, and the text that the package's own logits continue it by."""
    params = jlade.adopt(model.tree, model.config)
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, LENGTH), dtype=np.int32)
    expected = model.logits(tokens)
    difference = np.abs(run_blocks(params, tokens, [LENGTH]) - expected).max()
    assert difference < 2e-4, f"{model.name}: logits differ by {difference}, and are {np.abs(expected).max()} at most"
    text = np.zeros((1, LENGTH), np.int32)
    text[:, :PROMPT] = tokens[:, :PROMPT]
    for at in range(PROMPT, LENGTH):
        text[:, at] = model.logits(text)[:, at - 1].argmax(axis=-1)
    settings = jlade.LookaheadConfig.paper(4, 4, 3)
    out = jlade.generate(params, text[0, :PROMPT], max_new_tokens=LENGTH - PROMPT, lookahead=settings, eos_ids=())
    np.testing.assert_array_equal(out.tokens, text[:, PROMPT:], err_msg=model.name)
    print(f"{model.name}: logits within {difference:.1e}, {LENGTH - PROMPT} tokens in {out.steps[0]} steps", flush=True)


def random(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> jax.Array:
    """Returns an array that moves a norm from 1 or 0 a little, and logits far."""
    values = rng.normal(size=shape) * (0.2 if len(shape) == 1 else 0.3)
    return jnp.asarray(values + ("norm" in path), jnp.float32)


def of_keras_hub() -> Iterator[Model]:
    """Returns models of keras-hub."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras_hub

    models, rng = keras_hub.models, np.random.default_rng(0)
    shape: Keys = {"vocabulary_size": 50, "hidden_dim": 24, "intermediate_dim": 44, "num_layers": 2}
    shape |= {"num_query_heads": 4, "num_key_value_heads": 1, "layer_norm_epsilon": 1e-6}
    llama_3: Keys = {"rope_frequency_adjustment_factor": 4.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
    llama_3 |= {"rope_pretraining_sequence_length": 16, "rope_max_wavelength": 5000.0}
    scaling = LLAMA_3 | {"factor": 4.0, "original_max_position_embeddings": 16}
    gemma: Keys = {"head_dim": 10, "num_layers": 7}
    gemma_2: Keys = gemma | {"use_post_ffw_norm": True, "use_post_attention_norm": True, "sliding_window_size": 6}
    gemma_2 |= {"use_sliding_window_attention": True}
    gemma_3: Keys = gemma_2 | {"image_size": None, "global_rope_scaling_factor": 8.0}
    caps: Keys = {"attention_logit_soft_cap": 2.0, "final_logit_soft_cap": 5.0}
    rows: list[tuple[str, Keys, str, Keys]] = [
        ("Llama", {}, "llama", {}),
        ("Llama", {"tie_word_embeddings": True}, "llama", {"tie_word_embeddings": True}),
        ("Llama3", llama_3, "llama", {"rope_theta": 5000.0, "rope_scaling": scaling}),
        ("Mistral", {"sliding_window": None}, "mistral", {"sliding_window": None}),
        ("Qwen", {"tie_word_embeddings": False}, "qwen2", {}),
        ("Qwen3", {"head_dim": 10, "tie_word_embeddings": False}, "qwen3", {"head_dim": 10}),
        ("Qwen3", {"head_dim": 10}, "qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
        ("Gemma", gemma | {"intermediate_dim": 88}, "gemma", {"head_dim": 10, "num_hidden_layers": 7}),
        (
            "Gemma",
            gemma_2 | caps | {"intermediate_dim": 88},
            "gemma2",
            GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        ),
        ("Gemma3", gemma_3, "gemma3_text", GEMMA | LINEAR),
    ]
    for name, changes, model_type, of_config in rows:
        backbone = getattr(models, f"{name}Backbone")(**(shape | changes))
        for weight in backbone.weights:
            weight.assign(random(weight.path if "Gemma" not in name else "", weight.shape, rng))

        def logits(tokens: np.ndarray, backbone: Any = backbone) -> np.ndarray:
            hidden = backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
            return np.asarray(backbone.token_embedding(hidden, reverse=True))

        tree = {weight.path: weight.value for weight in backbone.weights}
        yield Model(f"{name}, {model_type}", tree, SHAPE | of_config | {"model_type": model_type}, logits)


def of_maxtext() -> Iterator[Model]:
    """Returns models of MaxText."""
    import maxtext
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    rng = np.random.default_rng(0)
    base = pathlib.Path(maxtext.__path__[0]) / "configs" / "base.yml"
    settings: Keys = {"run_name": "tiny", "override_model_config": True, "vocab_size": 50, "base_emb_dim": 24}
    settings |= {"base_mlp_dim": 44, "base_num_decoder_layers": 2, "base_num_query_heads": 4, "base_num_kv_heads": 1}
    settings |= {"head_dim": 10, "normalization_layer_epsilon": 1e-6, "max_target_length": LENGTH}
    settings |= {
        "max_prefill_predict_length": PROMPT,
        "per_device_batch_size": 1,
        "dtype": "float32",
        "scan_layers": False,
    }
    settings |= {
        "weight_dtype": "float32",
        "attention": "dot_product",
        "matmul_precision": "highest",
        "enable_checkpointing": False,
    }
    settings |= {"skip_jax_distributed_system": True, "hardware": "cpu", "log_config": False}
    scaling = LLAMA_3 | {"factor": 8.0, "original_max_position_embeddings": 8192}
    llama_3: Keys = {"rope_theta": 5e5, "rope_scaling": scaling}
    experts: Keys = {"num_experts": 4, "num_experts_per_tok": 2}
    of_qwen = experts | {"rope_theta": 1e7, "moe_intermediate_size": 44, "norm_topk_prob": True}
    mixture = experts | {"base_moe_mlp_dim": 44, "sparse_matmul": False}
    rows: list[tuple[str, Keys, str, Keys]] = [
        ("llama2-7b", {}, "llama", {}),
        ("llama3.1-8b", {}, "llama", llama_3),
        ("llama3.1-8b", {"scan_layers": True}, "llama", llama_3),
        ("mistral-7b", {}, "mistral", {"rope_theta": 1e6, "sliding_window": None}),
        ("mixtral-8x7b", mixture, "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6}),
        ("qwen2.5-7b", {}, "qwen2", {"rope_theta": 1e6}),
        ("qwen3-8b", {}, "qwen3", {"rope_theta": 1e6}),
        ("qwen3-30b-a3b", mixture, "qwen3_moe", of_qwen),
    ]
    for name, changes, model_type, of_config in rows:
        given = settings | changes | {"model_name": name}
        config = pyconfig.initialize(["", str(base), *(f"{key}={value}" for key, value in given.items())])
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
        state = nnx.state(model, nnx.Param)
        state = jax.tree.map_with_path(lambda path, each: random(str(path), each.shape, rng), state)
        nnx.update(model, state)

        def logits(tokens: np.ndarray, model: Any = model) -> np.ndarray:
            positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
            segments = np.ones_like(tokens)
            return np.asarray(model(tokens, positions, decoder_segment_ids=segments, enable_dropout=False))

        yield Model(name, state, SHAPE | {"head_dim": 10} | of_config | {"model_type": model_type}, logits)


def of_gemma() -> Iterator[Model]:
    """Returns models of gemma."""
    from gemma import gm

    config, rng = gm.nn.config, np.random.default_rng(0)
    local, everywhere = config.AttentionType.LOCAL_SLIDING, config.AttentionType.GLOBAL
    shape: Keys = {
        "num_embed": 50,
        "embed_dim": 24,
        "hidden_dim": 44,
        "num_heads": 4,
        "head_dim": 10,
        "num_kv_heads": 1,
    }
    shape |= {"final_logit_softcap": None, "use_post_attn_norm": False, "use_post_ffw_norm": False}
    shape |= {"attention_types": [everywhere] * 7}
    gemma_2: Keys = shape | {"use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 6}
    gemma_3: Keys = gemma_2 | {"use_qk_norm": True, "global_base_frequency": 1_000_000, "global_scale_factor": 8.0}
    gemma_2 |= {"attn_logits_soft_cap": 2.0, "final_logit_softcap": 5.0}
    gemma_2 |= {"attention_types": [local, everywhere] * 3 + [local], "num_kv_heads": 4}
    gemma_3 |= {"attention_types": [local] * 5 + [everywhere, local], "transpose_gating_einsum": True}
    caps: Keys = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "num_key_value_heads": 4}
    rows: list[tuple[Keys, str, Keys]] = [
        (shape, "gemma", {"head_dim": 10, "num_hidden_layers": 7}),
        (gemma_2, "gemma2", GEMMA | caps),
        (gemma_3, "gemma3_text", GEMMA | LINEAR),
    ]
    for given, model_type, of_config in rows:
        model = gm.nn.Transformer(config=config.TransformerConfig(**given), dtype=jnp.float32)
        params = model.init(jax.random.key(0), np.zeros((1, LENGTH), np.int32))["params"]
        params = jax.tree.map(lambda each: random("", each.shape, rng), params)

        def logits(tokens: np.ndarray, model: Any = model, params: Any = params) -> np.ndarray:
            positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)  # pad tokens, too, are read
            mask = np.tri(LENGTH, dtype=bool)[None]
            return np.asarray(model.apply({"params": params}, tokens, positions=positions, attention_mask=mask).logits)

        yield Model(model_type, params, SHAPE | of_config | {"model_type": model_type}, logits)


if __name__ == "__main__":
    main()
