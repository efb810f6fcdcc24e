"""The demo checkpoint against what transformers generates from it: 256 tokens a prompt, float32.

To keep this short, only a cheap setting decodes all 26 prompts. `benchmarks/compression.py --settings` does it for any
of them, and its results show it.
"""

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, SamplingConfig
from tests.decoding.test_sampling import TOGETHER

OPTIMIZED = True

ALL_PROMPTS = [LookaheadConfig.paper(4, 3, 2)]
SOME_PROMPTS = [
    LookaheadConfig.paper(0, 5, 10),
    LookaheadConfig.paper(15, 5, 15),
    LookaheadConfig.paper(15, 5, 15, pool_from_prompt=False),
    LookaheadConfig.paper(5, 4, 5, pool_from_prompt=False),
    LookaheadConfig.paper(10, 2, 10),
    LookaheadConfig(),
    LookaheadConfig.tree(7, step_cost=1.5),
    LookaheadConfig.paper(3, 8, 12, step_cost=3.5),  # more than some texts repay, so that steps become narrower
]


def assert_exact(params, cases, lookahead):
    for prompt, expected in cases:
        out = jlade.generate(params, prompt["ids"], max_new_tokens=256, lookahead=lookahead, eos_ids=())
        assert out.tokens[0].tolist() == expected, prompt["id"]


@pytest.mark.parametrize("lookahead", [None, *ALL_PROMPTS], ids=str)
def test_all_prompts(lookahead, demo, golden):
    """In two batches, which take less time than one prompt after the other."""
    cases = list(golden.values())
    for batch in (cases[::2], cases[1::2]):
        prompts = [prompt["ids"] for prompt, _ in batch]
        out = jlade.generate(demo[0], prompts, max_new_tokens=256, lookahead=lookahead, eos_ids=())
        different = [
            prompt["id"] for (prompt, ids), found in zip(batch, out.tokens.tolist(), strict=True) if found != ids
        ]
        assert different == []


@pytest.mark.parametrize("lookahead", SOME_PROMPTS, ids=str)
def test_some_prompts(lookahead, demo, golden):
    assert_exact(demo[0], list(golden.values())[::13], lookahead)


def test_on_eight_devices(demo, golden):
    """The steps, too, are those of one device. `benchmarks/meshes.py` decodes all prompts on several meshes."""
    cases = list(golden.values())[::13]
    options = {"max_new_tokens": 32, "lookahead": LookaheadConfig.paper(5, 4, 5), "eos_ids": ()}
    prompts = [prompt["ids"] for prompt, _ in cases]
    out = jlade.generate(demo[0], prompts, mesh=jlade.make_mesh(2, 2, 2), **options)
    assert out.tokens.tolist() == [expected[:32] for _, expected in cases]
    np.testing.assert_array_equal(out.steps, jlade.generate(demo[0], prompts, **options).steps)


def test_sampled_texts_of_the_demo_model_are_those_of_plain_sampling(demo, golden):
    prompts = [prompt["ids"] for prompt, _ in golden.values()][::7]
    configs = [
        TOGETHER,
        SamplingConfig(temperature=0.3),
        SamplingConfig(temperature=0.7),
        SamplingConfig(temperature=1.5),
    ]
    arguments = {"max_new_tokens": 48, "sampling": configs, "key": jax.random.key(1), "eos_ids": ()}
    plain = jlade.generate(demo[0], prompts, lookahead=None, **arguments)
    out = jlade.generate(
        demo[0], prompts, lookahead=LookaheadConfig(tree_size=12, window_size=3, ngram_size=4), **arguments
    )
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.compression.mean() > 1.1
