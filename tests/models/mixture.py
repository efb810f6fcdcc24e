"""Mixtures of experts: in NumPy, token by token, and every way of jlade to compute them."""

import functools

import jax
import numpy as np

from jlade.models.architecture import LlamaConfig
from jlade.models.experts import route, ways

E, F = 16, 12
WAYS = {"sorted": ways.by_expert, "each": ways.by_token, "all": ways.all_with_all}


def routed(x, router, bias, k, correction=None, **fields):
    """Returns the experts and weights of tokens by a router of the form that `fields` of a configuration describe."""
    config = LlamaConfig(2, E, 0, 1, 1, 1, 2, 8, num_experts=len(router), experts_per_token=k, **fields)
    return route(x, router, bias, correction, config)


def mixture(x, chosen, weights, experts, activation):
    """Returns the weighted sum of each token's experts in float64. Experts past the last are on other devices."""
    x, gate, up, down, *biases = (None if array is None else np.asarray(array, np.float64) for array in (x, *experts))
    gate = np.zeros_like(up) if gate is None else gate
    of_gate, of_up, of_down = (np.zeros(len(gate)) if bias is None else bias for bias in biases)
    mixed = np.zeros_like(x)
    for token, own in enumerate(np.asarray(chosen)):
        for expert, weight in zip(own, np.asarray(weights)[token], strict=True):
            if expert == len(gate):
                continue
            gated, product = x[token] @ gate[expert] + of_gate[expert], x[token] @ up[expert] + of_up[expert]
            if activation == "silu":
                inner = gated / (1 + np.exp(-gated)) * product
            elif activation == "relu2":  # without a gate
                inner = np.maximum(product, 0) ** 2
            else:  # that of GPT-OSS
                gated, product = np.minimum(gated, 7), np.clip(product, -7, 7)
                inner = gated / (1 + np.exp(-1.702 * gated)) * (product + 1)
            mixed[token] += weight * (inner @ down[expert] + of_down[expert])
    return mixed


def assert_same_mixtures(rounded, as_floats):
    """Every way gives eight experts in few bits the mixtures of the same ones in floating point."""
    x = jax.random.normal(jax.random.key(0), (20, E))
    chosen, weights = routed(x, jax.random.normal(jax.random.key(1), (8, E)), None, 3)
    for name, way in WAYS.items():
        wanted, mixed = (
            jax.jit(functools.partial(way, activation="silu"))(x, chosen, weights, each)
            for each in (as_floats, rounded)
        )
        np.testing.assert_allclose(mixed, wanted, rtol=1e-3, atol=1e-4, err_msg=name)
