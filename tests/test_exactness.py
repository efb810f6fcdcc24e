"""The demo checkpoint against what transformers generates from it: 256 tokens a prompt, float32.

To keep this short, only a cheap setting decodes all 26 prompts. `benchmarks/compression.py --settings` does it for any
of them, and its results show it.
"""

import pytest

import jlade
from jlade import LookaheadConfig

OPTIMIZED = True

ALL_PROMPTS = [LookaheadConfig(4, 3, 2)]
SOME_PROMPTS = [
    LookaheadConfig(0, 5, 10),
    LookaheadConfig(15, 5, 15),
    LookaheadConfig(15, 5, 15, pool_from_prompt=False),
    LookaheadConfig(5, 4, 5, pool_from_prompt=False),
    LookaheadConfig(1, 5, 30),
    LookaheadConfig(30, 5, 1, pool_from_prompt=False),
    LookaheadConfig(10, 2, 10),
    LookaheadConfig(3, 8, 12, step_cost=3.5),  # more than some texts repay, so that steps become narrower
]


def assert_exact(params, cases, lookahead):
    for prompt, expected in cases:
        out = jlade.generate(params, prompt["ids"], max_new_tokens=256, lookahead=lookahead, eos_ids=())
        assert out.tokens[0].tolist() == expected, prompt["id"]


@pytest.mark.parametrize("lookahead", [None, *ALL_PROMPTS], ids=str)
def test_all_prompts(lookahead, demo, golden):
    assert_exact(demo[0], golden.values(), lookahead)


@pytest.mark.parametrize("lookahead", SOME_PROMPTS, ids=str)
def test_some_prompts(lookahead, demo, golden):
    assert_exact(demo[0], list(golden.values())[::13], lookahead)
