"""Random tiny LLaMA models and a tokenizer for them, and a small part of the demo model."""

import dataclasses
import functools
import shutil
from collections.abc import Mapping

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

import jlade
from jlade.cli.arguments import DEMO
from jlade.conversion import save_hf
from jlade.models.architecture import (
    BEFORE_GATE,
    CHANNEL_DELTA,
    CONVOLUTION,
    DELTA,
    STATE_SPACE,
    Heads,
    IndexSizes,
    Latent,
    Multipliers,
    Recurrence,
)
from jlade.models.layers import Layer, changed
from jlade.models.llama import LlamaConfig, LlamaParams, init_params
from jlade.models.rotary import ProportionalScaling, Rotary

# The block of all tests that are not about blocks, so that they share programs.
PAPER = jlade.LookaheadConfig.paper(4, 4, 3)
# Changes of `tiny_llama` for a model like Qwen3-Next, whose first layer is recurrent.
RECURRENT = {"recurrent_layers": (0,), "recurrence": Recurrence(DELTA, 2, 4, 8, 6, 4), "output_gate": True}
# And like Kimi Linear, with attention of heads, like Granite 4 H, and like LFM2.
CHANNELS = {"recurrent_layers": (0,), "recurrence": Recurrence(CHANNEL_DELTA, 4, 4, 8, 8, 3, gate_rank=5)}
STATE_SPACES = {"recurrent_layers": (0,), "recurrence": Recurrence(STATE_SPACE, 2, 4, 8, 6, 4, filter_bias=True)}
CONVOLUTIONS = {"recurrent_layers": (0,), "recurrence": Recurrence(CONVOLUTION, 16, 16, 1, 1, 3)}
# And like Falcon-H1, with attention in the recurrent layer too.
BESIDE_ATTENTION = {
    "recurrent_layers": (0,),
    "recurrence": Recurrence(STATE_SPACE, 2, 4, 8, 6, 4, norm_place=BEFORE_GATE),
    "recurrent_attention": True,
    "embedding_scale": 1.25,
    "multipliers": Multipliers(0.8, 0.7, 1.4, 1.2, 0.9, 1.3, 0.75, 1.1, 0.6, 1.5, 0.85, 1.15),
}
# And like Nemotron H, whose layers are a mixer or an MLP alone.
ALONE = STATE_SPACES | {"num_layers": 4, "mlp_layers": (1, 3)}
# And like DeepSeek V3, with latent attention and experts in the second layer.
LATENT_SIZES = Latent(12, rank=10, rotated=4, unrotated=6, value_size=5)
LIKE_DEEPSEEK = {"latent": LATENT_SIZES, "num_kv_heads": 1, "head_dim": 14, "rotary_dim": 4, "interleaved_rotary": True}
LIKE_DEEPSEEK |= {"num_experts": 8, "expert_size": 6, "experts_per_token": 3, "routing": "sigmoids"}
LIKE_DEEPSEEK |= {"selection_bias": True, "expert_groups": 4, "groups_per_token": 2, "expert_scale": 1.5}
LIKE_DEEPSEEK |= {"dense_layers": (0,), "dense_size": 24}
# And like GLM 5.2, with an index of the tokens that are seen, in two of three layers.
INDEX_SIZES = IndexSizes(12, 6, chosen=7, interleaved=True, shared_layers=(1,))
LIKE_GLM_5 = LIKE_DEEPSEEK | {"latent": dataclasses.replace(LATENT_SIZES, index=INDEX_SIZES), "head_dim": 20}
LIKE_GLM_5 |= {"num_layers": 3}
# And like Gemma 4, with every part that its layers may have.
LIKE_GEMMA_4 = {
    "num_layers": 4,
    "num_kv_heads": 4,
    "sliding_windows": (9, None, 9, None),
    "layer_rotary": (Rotary(50.0), Rotary(1e4, ProportionalScaling(0.5))) * 2,
    "global_heads": Heads(2, 8),
    "values_from_keys": True,
    "norm": "rms_late",
    "qk_norm": True,
    "value_norm": True,
    "post_norms": True,
    "layer_scale": True,
    "attention_scale": 1.0,
    "activation": "gelu_tanh",
    "shared_kv_layers": 2,
    "wide_mlp": True,
    "per_layer_size": 6,
    "per_layer_vocab_size": 14,
    "num_experts": 4,
    "expert_size": 6,
    "experts_per_token": 2,
    "separate_experts": True,
}


@functools.cache
def tiny_llama(seed: int = 0, **changes) -> LlamaParams:
    """Returns random parameters of a two-layer model with 13 tokens and the `changes` of its configuration."""
    shape = {
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "max_positions": 64,
        "norm_eps": 1e-5,
    }
    params = init_params(jax.random.key(seed), LlamaConfig(**(shape | changes)))
    # Larger layers than the embedding give texts with some loops and some variety; otherwise one token repeats.
    larger = "attention.query", "attention.output", "recurrent.output", "mlp.down"

    def enlarge(number: int, layer: Layer) -> Layer:
        return changed(params.config, number, layer, lambda path, _, array: 4 * array if path in larger else array)

    return dataclasses.replace(params, layers=tuple(enlarge(*layer) for layer in enumerate(params.layers)))


def with_arrays(layer: Layer, arrays: Mapping[str, jax.Array]) -> Layer:
    """Returns a layer with other arrays, by their paths."""
    for path, array in arrays.items():
        part, field = path.split(".")
        layer = layer.replace(**{part: getattr(layer, part).replace(**{field: array})})
    return layer


# Tokens of one to three bytes that spell the same text in several ways, halves of a character, and a special token.
TOKENS = [b"a", b"b", b"ab", b"ba", b"c", b"\xc3", b"\xa9", b"abc", b"cab", b"\xc3\xa9", b"bb", b"aa", b""]


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Returns a byte-level tokenizer with the 13 tokens `TOKENS`."""
    names = {"".join(chr(byte) for byte in token): i for i, token in enumerate(TOKENS[:-1])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def save_small_demo(directory) -> None:
    """Writes a checkpoint of the demo model's first layer, whose programs compile in a fraction of the time."""
    params, _ = jlade.demo(dtype="bfloat16")
    config = dataclasses.replace(params.config, num_layers=1)
    save_hf(dataclasses.replace(params, layers=params.layers[:1], config=config), directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / name, directory / name)


def slow(*values, **options):
    """Returns a parameter set of a test that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def slow_but(values, *quick):
    """Returns `values` for a parametrization, of which `make test` takes `quick` alone."""
    return [value if value in quick else slow(value) for value in values]


def piece(tokens, text, generation=None):
    """Returns the piece of a stream that a step added."""
    recorded = dict.fromkeys(("logprobs", "top_tokens", "top_logprobs"))
    return jlade.Piece(np.array(tokens), text, np.array([len(tokens)]), **recorded, generation=generation)
