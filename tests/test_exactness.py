"""The demo checkpoint against what transformers generates from it: 256 tokens a prompt, float32.

To keep this short, only a cheap setting decodes all 26 prompts. `benchmarks/exactness.py` does it for
more of them.
"""

import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig
from tests.texts import assert_text
from tests.tiny import slow

OPTIMIZED = True

ALL_PROMPTS = [LookaheadConfig.paper(4, 3, 2)]
SOME_PROMPTS = [
    slow(LookaheadConfig.paper(0, 5, 10)),
    LookaheadConfig.paper(15, 5, 15),
    slow(LookaheadConfig.paper(5, 4, 5, pool_from_prompt=False)),
    slow(LookaheadConfig()),
    slow(LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))),
    slow(LookaheadConfig.tree(7, relative_step_time=1.5)),
    slow(LookaheadConfig.paper(3, 8, 12)),
]


def assert_exact(params, cases, lookahead):
    for prompt, expected in cases:
        out = jlade.generate(params, prompt["ids"], max_new_tokens=256, lookahead=lookahead, eos_ids=())
        assert_text(out, expected, name=prompt["id"])


@pytest.mark.slow
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
