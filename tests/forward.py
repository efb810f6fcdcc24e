"""Logits of texts that a decoder reads block by block."""

import jax
import numpy as np


def run_blocks(params, tokens, sizes):
    """Returns the logits [B, L, V] of `tokens` [B, L], read in causal blocks of the given sizes."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    blocks, start = [], 0
    for size in sizes:
        read = slice(start, start + size)
        indices = np.broadcast_to(np.arange(size, dtype=np.int32), (len(tokens), size))
        blocks.append((tokens[:, read], positions[:, read], np.tri(size, dtype=bool), indices, size))
        start += size
    return np.concatenate(_run(params, blocks, tokens.shape[1]), axis=1)


def _run(params, blocks, capacity):
    """Returns the logits of each block: tokens, positions, mask, the indices to keep, and how many of these."""
    decoder = params.decoder

    @jax.jit
    def step(params, cache, tokens, positions, mask, indices, number):
        hidden, block_kv = decoder.forward(params, tokens, positions, cache, mask)
        return decoder.logits(params, hidden), decoder.commit(cache, block_kv, indices, number)

    batch_size = len(blocks[0][0])
    cache, logits = decoder.init_cache(params, batch_size, capacity), []
    for *arrays, number in blocks:
        of_block, cache = step(params, cache, *arrays, np.full(batch_size, number, np.int32))
        logits.append(of_block)
    assert cache.length.tolist() == [sum(number for *_, number in blocks)] * batch_size
    return logits


def run_branches(params, prefix, branches, rest):
    """Returns logits of a text that branches within a block, like the drafts of a step: three arrays [1, L, V].

    All blocks have the same size, for one compiled program.

    Args:
      params: of a model.
      prefix: [L], a causal block.
      branches: [2, L / 2], a block of two branches that do not see each other. The second one is kept.
      rest: [L], a causal block after it.
    """
    size, half = len(prefix), len(branches[0])
    index, causal = np.arange(size, dtype=np.int32), np.tri(size, dtype=bool)
    apart = causal & (index[:, None] // half == index // half)
    blocks = [
        (prefix, index, causal, index, size),
        (branches.reshape(-1), size + index % half, apart, np.roll(index, half), half),
        (rest, size + half + index, causal, index, size),
    ]
    return _run(params, [(text[None], at[None], mask, kept[None], n) for text, at, mask, kept, n in blocks], 3 * size)
