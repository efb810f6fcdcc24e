"""Decoding on eight virtual devices: tokens and step counts are those of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig, SamplingConfig
from jlade.drafts.sources import TABLE
from jlade.mesh import MODEL
from jlade.models import kernels, sharding
from jlade.models.architecture import Heads
from jlade.models.kernels import HeadShape
from jlade.models.llama import Llama, quantize
from jlade.models.rotary import QueryScaling, Rotary
from tests.compilations import recorded
from tests.texts import assert_same_texts
from tests.tiny import LIKE_DEEPSEEK, PAPER, slow, tiny_llama, tiny_tokenizer

CASES = [
    slow("greedy", (1, 8, 1)),
    slow("filters", (2, 2, 2)),
    ("rejection", (1, 2, 4)),
    ("plain", (2, 1, 4)),
    slow("adaptive", (2, 2, 2)),
    slow("penalties", (1, 1, 8)),
    slow("no window", (1, 3, 1)),
    slow("wide window and tree", (2, 2, 2)),
    slow("vocabulary that does not divide", (1, 2, 4)),
]
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 1, 5], [8, 1, 8, 1], [2, 2], [3, 9, 4, 3, 9], [12], [7, 1, 2], [4, 4, 5, 4]]
SETTINGS = {
    "greedy": {},
    "adaptive": {"lookahead": LookaheadConfig.tree(7, relative_step_time=1.5)},
    "penalties": {"sampling": SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: 1.0})},
    "filters": {
        "sampling": SamplingConfig(temperature=0.9, top_k=9, top_p=0.95, min_p=0.01),
        "logprobs": True,
        "top_logprobs": 3,
        "min_new_tokens": 3,
        "eos_ids": [5],
    },
    "rejection": {
        "lookahead": LookaheadConfig.paper(3, 3, 5, verification="rejection", window_draw="greedy"),
        "sampling": SamplingConfig(temperature=1.0),
    },
    "no window": {"lookahead": LookaheadConfig.paper(0, 4, 3)},
    "plain": {"lookahead": None},
    "wide window and tree": {
        "lookahead": LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10)),
        "sampling": SamplingConfig(temperature=0.7, repetition_penalty=1.1),
        "max_new_tokens": 16,
        "logprobs": True,
        "with_statistics": True,
    },
}
SETTINGS["vocabulary that does not divide"] = SETTINGS["penalties"]


@functools.cache
def qwen(vocab_size):
    """Returns a model like Qwen3, with 2 KV heads."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 32, "qk_norm": True, "qkv_bias": True}
    return tiny_llama(vocab_size=vocab_size, **shape)


def assert_same(found, expected):
    assert_same_texts(found, expected)
    np.testing.assert_array_equal(found.steps, expected.steps)
    np.testing.assert_array_equal(found.accepted, expected.accepted)
    assert found.finish_reason == expected.finish_reason
    if expected.logprobs is not None:
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    if expected.top_tokens is not None:
        np.testing.assert_array_equal(found.top_tokens, expected.top_tokens)
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-4)
    if expected.statistics is not None:
        np.testing.assert_array_equal(found.statistics.num_drafted, expected.statistics.num_drafted)


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_settings(name, sizes):
    options = {"max_new_tokens": 24, "lookahead": PAPER} | SETTINGS[name]
    params = qwen(13 if name == "vocabulary that does not divide" else 16)  # it is whole on each device
    expected = jlade.generate(params, PROMPTS, **options)
    assert_same(jlade.generate(params, PROMPTS, mesh=jlade.make_mesh(*sizes), **options), expected)


VARIATIONS = {
    "like Qwen2-MoE": {"num_experts": 8, "expert_size": 6, "experts_per_token": 3, "shared_router": True}
    | {"normalized_experts": False, "mlp_bias": True, "router_bias": True},
    "like OLMo 2": {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_kind": "whole"},
    "like Gemma 2": {"norm": "rms_plus_one", "post_norms": True, "activation": "gelu_tanh", "embedding_scale": 3.0}
    | {"attention_cap": 3.0, "logit_cap": 5.0, "attention_scale": 0.3, "sliding_windows": (5, None)},
    "like Gemma 4": {"num_layers": 4, "sliding_windows": (5, None) * 2, "global_heads": Heads(2, 10)}
    | {"values_from_keys": True, "value_norm": True, "shared_kv_layers": 2, "wide_mlp": True, "layer_scale": True}
    | {"per_layer_size": 6, "per_layer_vocab_size": 16, "num_experts": 8, "expert_size": 6, "experts_per_token": 2}
    | {"separate_experts": True, "post_norms": True, "qk_norm": True},
    "like Phi-MoE": {"num_experts": 8, "expert_size": 6, "experts_per_token": 2, "routing": "sparsemixer"}
    | {"norm": "layer", "norm_bias": True, "output_bias": True},
    "like Llama 4": {"num_experts": 8, "expert_size": 6, "experts_per_token": 1, "routing": "sigmoid"}
    | {"qk_norm": True, "qk_norm_kind": "weightless", "interleaved_rotary": True, "layer_rotary": (Rotary(1e4), None)}
    | {"query_scalings": (None, QueryScaling(0.5, 6, offset=1))},
    "like Command R+": {"norm": "layer", "parallel": True, "qk_norm": True, "qk_norm_kind": "each"},
    "like DeepSeek V3": LIKE_DEEPSEEK,
    "like StableLM, parallel": {"norm": "layer", "norm_bias": True, "parallel": True, "rotary_dim": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_of_the_architecture(name):
    """On 4 devices for 2 KV heads, whose norm of all heads counts each head once."""
    params = tiny_llama(**{"num_heads": 8, "intermediate_size": 32, "vocab_size": 16} | VARIATIONS[name])
    options = {"max_new_tokens": 24, "lookahead": PAPER}
    expected = jlade.generate(params, PROMPTS[:2], **options)
    assert_same(jlade.generate(params, PROMPTS[:2], mesh=jlade.make_mesh(lookahead=2, model=4), **options), expected)


@pytest.mark.slow
def test_the_demo_model(demo, golden):
    """`benchmarks/meshes.py` decodes all prompts on several meshes."""
    cases = list(golden.values())[::13]
    options = {"max_new_tokens": 32, "lookahead": LookaheadConfig.paper(5, 4, 5), "eos_ids": ()}
    prompts = [prompt["ids"] for prompt, _ in cases]
    out = jlade.generate(demo[0], prompts, mesh=jlade.make_mesh(2, 2, 2), **options)
    assert out.tokens.tolist() == [expected[:32] for _, expected in cases]
    np.testing.assert_array_equal(out.steps, jlade.generate(demo[0], prompts, **options).steps)


@pytest.mark.slow
def test_a_tree():
    """A tree beside a window, with a corpus, a prior and predictions: tables are whole on a device, logits divided."""
    options = {
        "max_new_tokens": 24,
        "lookahead": LookaheadConfig.tree(16, ngrams=NGramConfig(2, 3, 3)),
        "sampling": SamplingConfig(temperature=0.5),
        "with_statistics": True,
    }
    texts = jlade.generate(qwen(16), PROMPTS, **options | {"lookahead": None}).tokens
    options["corpus"] = [text[text >= 0][:8] for text in texts[::2]]
    options["prior"] = jlade.prior(qwen(16), [text[text >= 0] for text in texts])
    options["prediction"] = [text[text >= 0][-4:] for text in texts]
    expected = jlade.generate(qwen(16), PROMPTS, **options)
    assert expected.statistics.contributed.keys() == set(TABLE)
    found = jlade.generate(qwen(16), PROMPTS, mesh=jlade.make_mesh(1, 2, 4), **options)
    assert_same(found, expected)
    for source, counts in expected.statistics.contributed.items():
        assert (counts.sum() > 0) == (source not in ("chain", "grammar")), source
        np.testing.assert_array_equal(found.statistics.contributed[source], counts)


@pytest.mark.slow
def test_all_that_a_call_may_bring():
    """int8, stop strings, streams, turns of a conversation, saved pools and statistics."""
    params = quantize(tiny_llama(num_heads=8, num_kv_heads=4, intermediate_size=32))
    mesh = jlade.make_mesh(1, 2, 4)
    placed = sharding.put(params, sharding.mesh_for(params.config, mesh))
    options = {"lookahead": PAPER, "tokenizer": tiny_tokenizer(), "stop": ["aab"], "max_new_tokens": 16}
    kept = {"keep_state": True, "with_statistics": True}
    first, second = (jlade.generate(p, PROMPTS[0], **options, **kept) for p in (params, placed))
    assert_same(second, first)
    assert second.text == first.text
    np.testing.assert_array_equal(second.statistics.ngrams, first.statistics.ngrams)
    np.testing.assert_array_equal(second.state.sources["pool"].ngrams, first.state.sources["pool"].ngrams)
    *_, last = jlade.stream(placed, PROMPTS[0], **options, with_statistics=True)
    assert_same(last.generation, first)

    turn = [*PROMPTS[0], *first.tokens[0, : first.lengths[0]].tolist(), 3, 1]
    expected = jlade.generate(params, turn, state=first.state, **options)
    assert_same(jlade.generate(placed, turn, state=second.state, **options), expected)
    with_pool = jlade.generate(params, turn, pool=first.state.sources["pool"], **options)
    assert_same(jlade.generate(placed, turn, pool=first.state.sources["pool"], **options), with_pool)


@dataclasses.dataclass(frozen=True)
class Other:
    """A decoder that is not jlade's own, though it is made of one."""

    llama: Llama

    def __getattr__(self, name):
        return getattr(self.llama, name)


@pytest.mark.slow
def test_a_model_of_another_kind_needs_model_1():
    params = tiny_llama()
    other = Other(params.decoder)
    expected = jlade.generate(params, PROMPTS[:2], max_new_tokens=8, lookahead=None)
    options = {"max_new_tokens": 8, "lookahead": None, "decoder": other}
    assert_same(jlade.generate(params, PROMPTS[:2], mesh=jlade.make_mesh(2, 3), **options), expected)
    with pytest.raises(ValueError, match="mesh has model=2, and only jlade's own models can be divided, not Other"):
        jlade.generate(params, [1], mesh=jlade.make_mesh(model=2), **options)


def test_a_batch_that_data_does_not_divide():
    with pytest.raises(ValueError, match=r"data=4, which does not divide a batch of 6: .* or data one of 1, 2, 3, 6"):
        jlade.generate(tiny_llama(), PROMPTS[:6], max_new_tokens=2, mesh=jlade.make_mesh(4))
    with pytest.raises(ValueError, match="data=2, which does not divide a batch of 1"):
        jlade.stream(tiny_llama(), PROMPTS[0], max_new_tokens=2, mesh=jlade.make_mesh(2))


@pytest.fixture
def compiled():
    """A list of the programs that compile."""
    with recorded() as events:
        yield events


@pytest.mark.slow
def test_compiled_once(compiled):
    """Another prompt, length, limit, seed and temperature compile nothing, nor do the steps of a stream."""
    params = tiny_llama(num_heads=8, intermediate_size=32)
    mesh = jlade.make_mesh(1, 2, 4)

    def generate(prompt, seed, temperature, max_new_tokens, lookahead):
        options = {"sampling": SamplingConfig(temperature=temperature), "key": jax.random.key(seed), "mesh": mesh}
        options |= {"max_new_tokens": max_new_tokens, "lookahead": lookahead}
        jlade.generate(params, prompt, **options)
        list(jlade.stream(params, prompt, **options))

    generate(PROMPTS[0], 0, 0.7, 8, PAPER)
    assert compiled
    compiled.clear()
    generate(PROMPTS[1], 1, 0.9, 12, PAPER)
    assert compiled == []
    jlade.generate(params, PROMPTS[1], max_new_tokens=9, mesh=mesh, lookahead=None)
    assert compiled != []


def test_attention_is_chosen_for_the_heads_of_a_device(monkeypatch):
    """Of 8 heads and 2 KV heads, each of 4 devices has 2 and one."""
    asked = []
    monkeypatch.setattr(kernels, "PLATFORMS", {"cpu"})
    monkeypatch.setattr(kernels, "choose", lambda *call: asked.append(call[:3]) or "plain")
    params = tiny_llama(num_heads=8, num_kv_heads=2, intermediate_size=32)
    mesh = jlade.make_mesh(lookahead=2, model=4)
    placed = sharding.put(params, sharding.mesh_for(params.config, mesh))
    jlade.prepare(params, [1, 2], mesh=mesh)
    jlade.prepare(placed, [1, 2])
    assert placed.decoder.axes == MODEL
    assert asked == [("attention", "auto", [HeadShape(2, 1, 6, "float32")])] * 3
