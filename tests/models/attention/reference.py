"""Attention in NumPy, one query and one head at a time."""

import numpy as np


def plain_attention(
    queries,
    keys,
    values,
    cached_keys,
    cached_values,
    length,
    mask,
    positions,
    window=99,
    scale=None,
    cap=None,
    sinks=None,
):
    """One query, one head and one softmax at a time."""
    batch_size, block_size, heads, head_dim = queries.shape
    group = heads // keys.shape[2]
    mask = np.broadcast_to(mask, (batch_size, block_size, block_size))
    out = np.zeros(queries.shape)
    for b, t, h in np.ndindex(batch_size, block_size, heads):
        prefix = [entry for entry in range(length[b]) if positions[b, t] - entry < window]
        block = [i for i in range(block_size) if mask[b, t, i] and positions[b, t] - positions[b, i] < window]
        seen_keys = np.concatenate([cached_keys[b, h // group, prefix], keys[b, block, h // group]])
        seen_values = np.concatenate([cached_values[b, h // group, prefix], values[b, block, h // group]])
        scores = seen_keys @ queries[b, t, h] * (scale or head_dim**-0.5)
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        if sinks is not None:  # a key of its own, with a value of zeros
            scores, seen_values = np.append(scores, sinks[h]), np.pad(seen_values, ((0, 1), (0, 0)))
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ seen_values
    return out
