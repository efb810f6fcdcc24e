"""The analytic work of a step against the programs that XLA compiles for eight CPU devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlade import LookaheadConfig, NGramConfig
from jlade.config import PLAIN
from jlade.conversion.tensors import param_shapes
from jlade.costs import work as work_lib
from jlade.costs.work import MeshShape
from jlade.drafts.tree import TreeShape
from jlade.lookahead import division
from jlade.models.architecture import STATE_SPACE, Heads, Latent, Recurrence
from jlade.models.attention import plain
from jlade.models.llama import LlamaConfig
from tests.costs import meshed
from tests.tiny import slow

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    max_positions=1024,
)
SETTING = LookaheadConfig.paper(6, 4, 6)
TREE = LookaheadConfig.tree(40, ngrams=NGramConfig(4, 3, 2))
GEMMA_4 = {
    "model_type": "gemma4_text",
    "sliding_windows": (3 * plain.CHUNK_ON_CPU, None) * 2,  # as many chunks in each layer, whose heads differ
    "global_heads": Heads(2, 32),
    "values_from_keys": True,
    "shared_kv_layers": 2,
    "wide_mlp": True,
    "per_layer_size": 16,
    "per_layer_vocab_size": 512,
}
BATCH, CAPACITY = 2, 3 * plain.CHUNK_ON_CPU


LATENT = {"latent": Latent(48, rank=32, rotated=16, unrotated=24, value_size=20), "num_kv_heads": 1, "head_dim": 48}
LATENT |= {"rotary_dim": 16}


NEMOTRON = {
    "model_type": "nemotron_h",
    "num_layers": 4,
    "mlp_layers": (1, 3),
    "recurrent_layers": (0,),
    "recurrence": Recurrence(STATE_SPACE, 4, 8, 8, 16, 4, filter_bias=True),
    "layer_rotary": (None,) * 4,
    "dense_layers": (3,),
    "dense_size": 256,
    "gated_mlp": False,
    "activation": "relu2",
    "num_experts": 8,
    "expert_size": 32,
    "expert_latent": 48,
    "experts_per_token": 2,
    "routing": "sigmoids",
}


@pytest.mark.parametrize(
    ("sizes", "setting", "changes"),
    [
        slow((1, 8, 1), SETTING, {}),
        slow((1, 1, 8), SETTING, {}),  # with copies of the KV heads
        ((2, 2, 2), SETTING, {"tie_embeddings": True}),
        slow((1, 2, 4), SETTING, {"vocab_size": 511}),  # whole on each device
        slow((2, 1, 4), PLAIN, {}),
        slow((2, 2, 2), SETTING, {"num_layers": 2, "sliding_windows": (2 * plain.CHUNK_ON_CPU, None)}),
        slow((2, 2, 2), SETTING, {"num_layers": 4} | GEMMA_4),
        slow((2, 2, 2), SETTING, NEMOTRON),
        slow((1, 8, 1), TREE, {}),
        slow((1, 2, 4), SETTING, LATENT),
        slow((2, 2, 2), TREE, {}),
    ],
)
def test_work_and_memory_are_those_of_compiled_programs(sizes, setting, changes):
    config = LlamaConfig(**vars(CONFIG) | changes)
    layout = MeshShape(*sizes)
    program = meshed.compile_steps("cpu", sizes, config, setting, BATCH, CAPACITY, jnp.float32)
    chunks = sum(config.entries_by_layer(CAPACITY)) // plain.CHUNK_ON_CPU
    launched = meshed.step_launches(program, chunks / len(config.attention_layers))
    shard = work_lib.shard(param_shapes(config, jnp.float32), layout.model)
    work = work_lib.work(shard, layout, setting, BATCH, CAPACITY)
    memory = work_lib.memory(shard, layout, setting, BATCH, CAPACITY)
    assert work.flops == pytest.approx(sum(x.flops * x.times for x in launched), rel=0.02)
    assert sum(each.num_bytes for each in work.collectives) == meshed.collectives(launched)
    # The embedding's matrix is an argument and is not read. The text, the proposals and other small arrays are too.
    arguments = program.memory_analysis().argument_size_in_bytes
    assert 0 <= arguments - (memory.weights + memory.cache + memory.pool) < 28_672 * BATCH
    assert work.num_bytes <= sum(x.traffic * x.times for x in launched)


def test_attention_and_a_recurrent_mixer_side_by_side_are_two_sums_and_have_two_caches():
    mixer = {
        "model_type": "falcon_h1",
        "recurrent_layers": (0,),
        "recurrence": Recurrence(STATE_SPACE, 4, 8, 16, 16, 4),
    }
    config = LlamaConfig(**vars(CONFIG) | mixer | {"recurrent_attention": True})
    layout = MeshShape(1, 2, 2)
    program = meshed.compile_steps("cpu", layout, config, SETTING, BATCH, CAPACITY, jnp.float32)
    shard = work_lib.shard(param_shapes(config, jnp.float32), layout.model)
    work = work_lib.work(shard, layout, SETTING, BATCH, CAPACITY)
    launched = meshed.step_launches(program, CAPACITY // plain.CHUNK_ON_CPU)
    assert sum(each.num_bytes for each in work.collectives) == meshed.collectives(launched)
    alone = LlamaConfig(**vars(CONFIG) | mixer)
    caches = [
        work_lib.cache_bytes(work_lib.shard(param_shapes(each, jnp.float32), 2), CAPACITY)
        for each in (config, alone, CONFIG)
    ]
    assert caches[0] == caches[1] + caches[2]


def test_a_step_reads_weights_and_cache_once():
    """With a single token, of a model whose matrices are large, little else is read or written."""
    config = LlamaConfig(**vars(CONFIG) | {"hidden_size": 512, "intermediate_size": 2048, "num_kv_heads": 8})
    program = meshed.compile_steps("cpu", (1, 1, 4), config, PLAIN, 1, CAPACITY, jnp.float32)
    launched = meshed.step_launches(program, CAPACITY // plain.CHUNK_ON_CPU)
    work = work_lib.work(work_lib.shard(param_shapes(config, jnp.float32), 4), MeshShape(1, 1, 4), PLAIN, 1, CAPACITY)
    assert work.num_bytes == pytest.approx(sum(x.traffic * x.times for x in launched), rel=0.15)


def test_int8_weights_are_read_as_such():
    whole, halves = (work_lib.shard(param_shapes(CONFIG, jnp.bfloat16, bits), 4) for bits in (None, 8))
    assert whole.elements == halves.elements
    assert 0.5 < halves.layer_bytes / whole.layer_bytes < 0.55  # norms and scales
    assert halves.item == 2


@settings(max_examples=30)
@given(st.integers(0, 20), st.integers(2, 6), st.integers(0, 20), st.integers(1, 9))
def test_the_size_of_a_share(window, ngram, guesses, number):
    setting = LookaheadConfig.paper(window, ngram, guesses)
    if number == 1:
        assert division.share_size(setting, 1) == (setting.block_size, 1 + window + guesses * (ngram - 1))
        return
    find = functools.partial(division.share, setting, TreeShape.chains(guesses, ngram - 1), number)
    share = jax.eval_shape(find, jnp.int32(0))
    assert division.share_size(setting, number) == (len(share.members), len(share.outputs))
