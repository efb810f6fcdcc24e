"""The mixture of experts in NumPy, token by token."""

import numpy as np


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
