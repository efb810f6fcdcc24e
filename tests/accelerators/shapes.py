"""Shapes of models whose programs are compiled for devices that are not there."""

import dataclasses
import math

from jlade.drafts import pool as ngram_pool
from jlade.models.llama import LlamaConfig

LLAMA = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=2,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_positions=4096,
)  # LLaMA 2 7B
QWEN = dataclasses.replace(
    LLAMA, vocab_size=151936, intermediate_size=12288, num_kv_heads=8, qk_norm=True, max_positions=40960
)  # Qwen3 8B


def state_bytes(config, setting):
    """Returns the bytes of a cache of 1024 entries, of the pool, and of the tables of recycled logits."""
    cache = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 1024
    return cache + pool_bytes(config, setting) + (4 * config.vocab_size * 16 + 40 * 16_416 if setting.has_tree else 0)


def pool_bytes(config, setting):
    return 4 * math.prod(ngram_pool.shape(config.vocab_size, setting.ngram_size, setting.ngrams.guess_set_size))
