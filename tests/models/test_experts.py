"""Mixtures of experts against a loop over tokens in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.models.architecture import LlamaConfig
from jlade.models.experts import Experts, hopper, mix, ways
from jlade.models.quantization import quantize_matrix
from tests.models.mixture import WAYS, E, F, assert_same_mixtures, mixture, routed
from tests.tiny import slow


def random_experts(number, biases):
    rng = np.random.default_rng(number)
    shapes = [(number, E, F), (number, E, F), (number, F, E)]
    if biases:
        shapes += [(number, F), (number, F), (number, E)]
    return Experts(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))


@pytest.mark.parametrize(
    ("tokens", "number", "k", "activation"),
    [
        (1, 4, 2, "silu"),
        (7, 8, 3, "clipped_silu"),
        (7, 8, 3, "relu2"),
        slow(100, 5, 2, "clipped_silu"),
        slow(40, 64, 8, "silu"),
    ],
)
def test_every_way_gives_the_mixture_of_each_token(tokens, number, k, activation):
    rng = np.random.default_rng(0)
    experts = random_experts(number, biases=activation == "clipped_silu")
    experts = experts._replace(gate=None) if activation == "relu2" else experts
    x, router = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((tokens, E), (number, E)))
    chosen, weights = jax.jit(lambda x: routed(x, router, None, k))(x)
    wanted = mixture(x, chosen, weights, experts, activation)
    for name, way in WAYS.items():
        mixed = jax.jit(functools.partial(way, activation=activation))(x, chosen, weights, experts)
        np.testing.assert_allclose(mixed, wanted, atol=1e-4, err_msg=name)
    as_block = jax.jit(mix, static_argnums=4)(*(np.asarray(x)[None] for x in (x, chosen, weights)), experts, activation)
    np.testing.assert_allclose(as_block[0], wanted, atol=1e-4)


@pytest.mark.parametrize("normalized", [True, False])
def test_the_router_takes_the_most_probable_experts(normalized):
    rng = np.random.default_rng(1)
    x, router, bias = rng.normal(size=(2, 9, E)), rng.normal(size=(6, E)), rng.normal(size=6)
    chosen, weights = routed(
        *(jnp.asarray(array, jnp.float32) for array in (x, router, bias)), 3, normalized_experts=normalized
    )
    probabilities = np.exp(x @ router.T + bias)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    order = np.argsort(-probabilities, axis=-1)[..., :3]
    np.testing.assert_array_equal(chosen, order)
    highest = np.take_along_axis(probabilities, order, axis=-1)
    np.testing.assert_allclose(weights, highest / highest.sum(-1, keepdims=True) if normalized else highest, rtol=1e-4)


def test_the_sparse_mixer_is_that_of_transformers():
    """With logits far apart, near each other, equal, and all negative."""
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    rng = np.random.default_rng(2)
    logits = np.concatenate([rng.normal(size=(20, 6)), 1 + 0.02 * rng.normal(size=(20, 6)), -2 + rng.random((20, 6))])
    logits = np.append(logits, [[1, 3, 3, 0, 2.99, 2.9]], axis=0).astype(np.float32)
    wanted, wanted_experts = phimoe.sparsemixer(torch.tensor(logits), jitter_eps=0.01, training=False)
    chosen, weights = routed(jnp.asarray(logits), jnp.eye(6), None, 2, routing="sparsemixer")
    np.testing.assert_array_equal(chosen, wanted_experts.numpy())
    np.testing.assert_allclose(weights, wanted.numpy(), rtol=1e-5)
    assert np.mean(weights < 1) > 0.2


@pytest.mark.parametrize(
    ("groups", "chosen_groups", "normalized", "scale"), [(1, 1, True, 1.0), (4, 2, True, 2.5), (4, 3, False, 1.0)]
)
def test_the_router_of_deepseek_v3_is_that_of_transformers(groups, chosen_groups, normalized, scale):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    glm = pytest.importorskip("transformers.models.glm4_moe.modeling_glm4_moe")
    rng = np.random.default_rng(3)
    x, router, bias = rng.normal(size=(50, E)), rng.normal(size=(16, E)), 0.3 * rng.normal(size=16)
    x, router, bias = (array.astype(np.float32) for array in (x, router, bias))
    settings = {"n_group": groups, "topk_group": chosen_groups, "norm_topk_prob": normalized}
    settings |= {"routed_scaling_factor": scale, "n_routed_experts": 16, "num_experts_per_tok": 5, "hidden_size": E}
    theirs = glm.Glm4MoeTopkRouter(glm.Glm4MoeConfig(**settings))
    theirs.weight.data, theirs.e_score_correction_bias = torch.tensor(router), torch.tensor(bias)
    _, wanted, wanted_experts = theirs(torch.tensor(x))
    chosen, weights = routed(
        x, router, None, 5, bias, routing="sigmoids", normalized_experts=normalized, expert_scale=scale,
        selection_bias=True, expert_groups=groups, groups_per_token=chosen_groups,
    )  # fmt: skip
    order, wanted_order = np.argsort(chosen, axis=-1), np.argsort(wanted_experts.numpy(), axis=-1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(chosen), order, axis=-1),
        np.take_along_axis(wanted_experts.numpy(), wanted_order, axis=-1),
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(weights), order, axis=-1),
        np.take_along_axis(wanted.detach().numpy(), wanted_order, axis=-1),
        rtol=1e-5,
    )


@pytest.mark.parametrize("model_type", ["deepseek_v2", "mistral4"])
def test_routers_by_probabilities_are_those_of_transformers(model_type):
    """A group counts as much as its best expert, or its two best ones."""
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    modeling = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    rng = np.random.default_rng(4)
    x, router = (rng.normal(size=shape).astype(np.float32) for shape in ((50, E), (16, E)))
    settings = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_routed_experts": 16}
    settings |= {"num_experts_per_tok": 5, "hidden_size": E, "num_attention_heads": 4}
    if model_type == "deepseek_v2":
        config = modeling.DeepseekV2Config(topk_method="group_limited_greedy", **settings)
        theirs, own = modeling.DeepseekV2TopkRouter(config), {"group_leaders": 1, "normalized_experts": False}
    else:
        theirs, own = modeling.Mistral4TopkRouter(modeling.Mistral4Config(**settings)), {}
    theirs.weight.data = torch.tensor(router)
    _, wanted, wanted_experts = theirs(torch.tensor(x))
    fields = {"routing": "probabilities", "expert_scale": 2.5, "expert_groups": 4, "groups_per_token": 2}
    chosen, weights = routed(x, router, None, 5, **fields | own)
    order = np.argsort(-wanted.detach().numpy(), axis=-1)
    np.testing.assert_array_equal(chosen, np.take_along_axis(wanted_experts.numpy(), order, axis=-1))
    np.testing.assert_allclose(weights, np.take_along_axis(wanted.detach().numpy(), order, axis=-1), rtol=1e-5)


@pytest.mark.slow
def test_int8_experts_stay_within_half_a_step_of_their_scale():
    experts = random_experts(8, biases=False)
    rounded = Experts(*(quantize_matrix(matrices) for matrices in experts[:3]))
    as_floats = Experts(*(int8.weight.astype(jnp.float32) * int8.scale[:, None] for int8 in rounded[:3]))
    for matrices, int8, values in zip(experts[:3], rounded[:3], as_floats[:3], strict=True):
        assert float(jnp.max(jnp.abs(values - matrices) / int8.scale[:, None])) <= 0.5001
    assert_same_mixtures(rounded, as_floats)


def test_products_of_tiles_are_those_of_ragged_dot():
    """Experts without rows, with a few, and with several tiles; rows after the last expert."""
    sizes = jnp.array([0, 3, 70, 0, 1, 33], jnp.int32)
    x = jax.random.normal(jax.random.key(0), (120, E))
    matrices = jax.random.normal(jax.random.key(1), (6, E, F))
    used = int(sizes.sum())
    wanted = jax.lax.ragged_dot(x[:used], matrices, sizes)
    np.testing.assert_allclose(jax.jit(ways.in_tiles)(x, matrices, sizes)[:used], wanted, atol=1e-4)


@pytest.mark.slow
def test_the_share_of_experts_that_tokens_choose():
    """By counting the choices of random tokens."""
    config = LlamaConfig(13, 16, 0, 1, 4, 2, 4, 64, num_experts=32, expert_size=8, experts_per_token=4)
    rng = np.random.default_rng(0)
    for tokens in (1, 8, 30):
        choices = rng.permuted(np.tile(np.arange(32), (2000, tokens, 1)), axis=-1)[..., :4].reshape(2000, -1)
        share = np.mean([len(set(row)) for row in choices]) / 32
        assert config.share_of_experts(tokens) == pytest.approx(share, rel=0.02)
    assert LlamaConfig(13, 16, 24, 1, 4, 2, 4, 64).share_of_experts(1) == 1


@pytest.mark.slow
def test_mix_takes_the_kernel_for_several_tokens(monkeypatch):
    calls = []
    monkeypatch.setattr(ways, "tiled", lambda x, *rest: calls.append(rest[-2:]) or x)
    experts, chosen = random_experts(6, biases=False), jnp.tile(jnp.arange(2, dtype=jnp.int32), (3, 1))
    for num_tokens in (1, 3):
        arguments = jnp.ones((num_tokens, E)), chosen[:num_tokens], jnp.ones((num_tokens, 2)), experts, "silu"
        for name in ("auto", "plain", "gpu"):
            mix(*arguments, implementation=name)
    assert calls == [(ways.rows_of_tile(3 * 2 / 6, hopper.ROWS), hopper.multiply)]
