"""GGUF files of the families whose weights or settings the converter changes, against transformers."""

import gguf
import jax
import numpy as np
import pytest

import jlade
from jlade.conversion import load_gguf
from jlade.models.rotary import LinearScaling, Rotary
from tests.conversion.gguf_files import convert, reference
from tests.conversion.hf_files import assert_placed
from tests.families import checkpoint, rope
from tests.forward import run_blocks
from tests.tiny import slow_but

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA_2 = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 7, "num_hidden_layers": 3}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
SHORT = [1.0, 1.5, 2.0, 2.5]
LONG_ROPE = rope("longrope", short_factor=SHORT, long_factor=[9.0] * 4)
ROTATIONS = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    SLIDING: {"rope_type": "default", "rope_theta": 50.0},
}
# The configuration in transformers, the architecture, and the keys that the converter adds to those of all.
CASES = {
    "gemma": ("Gemma", {"head_dim": 12}, "gemma", {}),
    "gemma2": ("Gemma2", GEMMA_2 | CAPS, "gemma2", CAPS | {"attention.sliding_window": 7}),
    "gemma2, default caps": ("Gemma2", GEMMA_2, "gemma2", {"attention.sliding_window": 7}),
    "gemma3": (
        "Gemma3Text",
        GEMMA_2 | {"layer_types": [SLIDING, SLIDING, FULL], "rope_parameters": ROTATIONS},
        "gemma3",
        {"attention.sliding_window": 7, "attention.sliding_window_pattern": 3, "rope.freq_base": 500.0}
        | {"rope.freq_base_swa": 50.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma3, listed layers": (
        "Gemma3Text",
        GEMMA_2 | {"layer_types": [SLIDING, FULL, SLIDING], "final_logit_softcapping": 5.0},
        "gemma3",
        {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, False, True]}
        | {"rope.freq_base": 1e6, "final_logit_softcapping": 5.0},
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": 7} | rope("default", partial_rotary_factor=0.75),
        "phi3",
        {"attention.sliding_window": 7, "rope.dimension_count": 6, "rope.freq_base": 500.0},
    ),
    "phi3, longrope": (
        "Phi3",
        {"max_position_embeddings": 400, "original_max_position_embeddings": 96, "tie_word_embeddings": True}
        | LONG_ROPE,
        "phi3",
        {"attention.sliding_window": 0, "rope.dimension_count": 8, "rope.freq_base": 500.0}
        | {"rope.scaling.original_context_length": 96}
        | {"rope.scaling.attn_factor": float(np.sqrt(1 + np.log(400 / 96) / np.log(96)))},
    ),
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
CASES |= {
    "qwen3moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        "qwen3moe",
        EXPERTS | {"expert_feed_forward_length": 24, "rope.freq_base": 10000.0},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, "llama", EXPERTS | {"rope.freq_base": 1e6}),
}
TENSORS = {
    "phi3, longrope": {
        "rope_factors_short.weight": np.array(SHORT, np.float32),
        "rope_factors_long.weight": np.full(4, 9.0, np.float32),
    }
}


@pytest.mark.parametrize("case", slow_but(CASES, "gemma3", "phi3, longrope"))
def test_weights_and_logits_are_those_of_transformers(case, tmp_path):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")

    family, changes, arch, keys = CASES[case]
    model, expected = checkpoint(family, changes, tmp_path / "hf")
    file = convert(model, tmp_path / "model.gguf", arch, keys, TENSORS.get(case, {}))
    params = load_gguf(file, "float32", strict=True)
    assert params.config.family == expected.config.family
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-7 if got.ndim == 1 else 0)  # 1 + weight is rounded
    text = np.random.default_rng(1).integers(0, 50, (1, 24))  # longer than every window
    with torch.no_grad():
        logits = model(torch.tensor(text)).logits.numpy()
    np.testing.assert_allclose(run_blocks(params, text, [24]), logits, atol=1e-4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns models of transformers by architecture."""
    cases = {arch: (family, changes) for family, changes, arch, _ in reversed(CASES.values())}
    directory = tmp_path_factory.mktemp("models")
    return {arch: checkpoint(*case, directory / arch)[0] for arch, case in cases.items()}


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_experts_are_those_of_the_file(kind, tmp_path):
    family, changes, arch, keys = CASES["qwen3moe"]
    changes, keys = changes | {"moe_intermediate_size": 32}, keys | {"expert_feed_forward_length": 32}
    model, _ = checkpoint(family, changes, tmp_path / "hf")
    file = convert(model, tmp_path / "model.gguf", arch, keys, kind=kind)
    params, stored = load_gguf(file), reference(file)
    for number, layer in enumerate(params.layers):
        for field in ("gate", "up", "down"):
            wanted = np.swapaxes(stored[f"blk.{number}.ffn_{field}_exps.weight"], 1, 2)
            np.testing.assert_array_equal(getattr(layer.mixture, field), wanted)
    mesh = jlade.make_mesh(model=4)
    assert_placed(load_gguf(file, mesh=mesh), params, mesh)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_fused_matrices_are_divided(kind, tmp_path):
    model, _ = checkpoint("Phi3", {"intermediate_size": 64}, tmp_path / "hf")
    file = convert(model, tmp_path / "model.gguf", "phi3", {"attention.sliding_window": 0}, kind=kind)
    params, stored = load_gguf(file), reference(file)
    for number, layer in enumerate(params.layers):
        qkv, gate_up = (stored[f"blk.{number}.{name}.weight"] for name in ("attn_qkv", "ffn_up"))
        np.testing.assert_array_equal(layer.attention.query, qkv[:32])
        np.testing.assert_array_equal(layer.attention.key, qkv[32:48])
        np.testing.assert_array_equal(layer.attention.value, qkv[48:])
        np.testing.assert_array_equal(layer.mlp.gate, gate_up[:64])
        np.testing.assert_array_equal(layer.mlp.up, gate_up[64:])
    sizes = []
    load_gguf(file, progress=sizes.append)
    assert sum(sizes) == sum(tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)
    mesh = jlade.make_mesh(model=2)
    assert_placed(load_gguf(file, mesh=mesh), params, mesh)


def config_of(models, tmp_path, arch, keys, tensors=()):
    return load_gguf(convert(models[arch], tmp_path / "model.gguf", arch, keys, tensors), strict=True).config


@pytest.mark.parametrize(
    ("arch", "keys", "expected"),
    [
        ("gemma", {}, {"max_positions": 384, "tie_embeddings": True, "rope_theta": 10000.0}),
        ("gemma2", {}, {"sliding_windows": (4096, None, 4096), "attention_cap": 50.0, "logit_cap": 30.0}),
        ("gemma2", {"attention.sliding_window_pattern": 3}, {"sliding_windows": (4096, 4096, None)}),
        ("gemma3", {}, {"sliding_windows": (), "layer_rotary": (), "attention_scale": None, "logit_cap": None}),
        (
            "gemma3",
            {"attention.sliding_window": 7, "rope.freq_base": 1e6},
            {"sliding_windows": (7, 7, 7), "layer_rotary": (Rotary(10000.0),) * 3, "rope_theta": 1e6},
        ),
        (
            "gemma3",
            {"attention.sliding_window": 7, "attention.sliding_window_pattern": [False, True, False]}
            | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {
                "sliding_windows": (None, 7, None),
                "layer_rotary": tuple(Rotary(10000.0, scaling) for scaling in (LinearScaling(8.0), None) * 2)[:3],
            },
        ),
        ("phi3", {}, {"sliding_windows": (), "rotary_dim": None}),
        ("phi3", {"context_length": 4096}, {"sliding_windows": (2047, 2047)}),
        ("phi3", {"context_length": 4096, "attention.sliding_window": 0}, {"sliding_windows": ()}),
        ("phi3", {"rope.dimension_count": 4}, {"rotary_dim": 4}),
    ],
    ids=str,
)
def test_settings(arch, keys, expected, models, tmp_path):
    config = config_of(models, tmp_path, arch, keys)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_its_queries_by_its_width(arch, layers, tmp_path):
    for num_layers, scale in ((layers, 8**-0.5), (layers - 1, None)):
        family = {"gemma2": "Gemma2", "gemma3": "Gemma3Text"}[arch]
        model, _ = checkpoint(family, {"head_dim": 12, "num_hidden_layers": num_layers}, tmp_path / str(num_layers))
        assert config_of({arch: model}, tmp_path, arch, {"attention.sliding_window": 7}).attention_scale == scale


ONES = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("arch", "keys", "tensors", "message"),
    [
        ("gemma", {"rope.dimension_count": 6}, {}, r"gemma\.rope\.dimension_count must be the length of a head"),
        ("gemma", {"attention.sliding_window": 7}, {}, r"gemma\.attention\.sliding_window is 7; supported is 0"),
        ("gemma", {}, {"output.weight": np.ones((50, 32), np.float32)}, r"tensors are missing: lm_head\.weight"),
        ("gemma2", {"attn_logit_softcapping": -2.0}, {}, r"attn_logit_softcapping must be a positive number, got -2"),
        ("gemma2", {"attention.sliding_window": "all"}, {}, r"sliding_window must be a positive integer, got 'all'"),
        ("gemma3", {"attn_logit_softcapping": 2.0}, {}, r"gemma3\.attn_logit_softcapping is 2\.0; supported is 0\.0"),
        (
            "gemma3",
            {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True]},
            {},
            r"gemma3\.attention\.sliding_window_pattern has 1 elements for 3 layers",
        ),
        ("phi3", {"rope.dimension_count": 3}, {}, r"partial_rotary_factor must be a fraction that gives an even"),
        ("phi3", {"rope.scaling.type": "longrope"}, {}, r"rope\.scaling\.type is 'longrope'; supported are none"),
        ("phi3", {}, {"rope_factors_long.weight": ONES}, r"tensors are missing: rope_factors_short\.weight"),
        (
            "phi3",
            {},
            {"rope_factors_short.weight": ONES},
            r"phi3\.rope\.scaling\.attn_factor must be a positive number, got None",
        ),
        (
            "phi3",
            {"rope.scaling.attn_factor": 1.0},
            {"rope_factors_short.weight": ONES[:3]},
            r"short_factor must have 4 numbers, got 3",
        ),
        (
            "gemma",
            {"rope.scaling.attn_factor": 1.0},
            {"rope_factors_short.weight": ONES},
            r"short_factor must have 6 numbers, got 4",
        ),
    ],
    ids=str,
)
def test_files_that_are_refused(arch, keys, tensors, message, models, tmp_path):
    file = convert(models[arch], tmp_path / "model.gguf", arch, keys, tensors)
    with pytest.raises(ValueError, match=rf"model\.gguf: .*{message}"):
        load_gguf(file)
