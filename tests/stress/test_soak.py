"""A short form of soak.py: calls of all kinds in one process, whose texts are right and leave no arrays."""

import operator
import time

import pytest

import jlade
from tests.stress import soak
from tests.stress.soak import MOST, SEEDS
from tests.tiny import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.slow

NUMBER = 60  # calls of each half
ADAPTIVE = jlade.LookaheadConfig.tree(3, relative_step_time=1.5)


@pytest.fixture(scope="module")
def tiny():
    params = tiny_llama(max_positions=256)
    prompts = [[5, 1, 7, i] for i in range(5)]
    texts = jlade.generate(params, prompts, max_new_tokens=3 * MOST, lookahead=None, eos_ids=()).tokens.tolist()
    golden = list(zip(prompts, texts, strict=True))
    with soak.opened(
        params, tiny_tokenizer(), golden, [None, ADAPTIVE], max_sequences=2, prefix_memory=1 << 16
    ) as made:
        yield made


def test_texts_are_right_and_leave_no_arrays(tiny):
    assert len(tiny.sampled) == 5 * len(soak.SAMPLINGS) * SEEDS
    for name, (function, _) in soak.kinds().items():
        function(tiny, soak.random.Random(name))
    held = []
    for seed in range(2):
        counts = soak.run(tiny, NUMBER, seed)
        assert counts.total() == NUMBER
        held.append(lowest())
    assert held[1]["threads"] == held[0]["threads"]
    assert held[1]["arrays"] <= held[0]["arrays"] + (1 << 16)  # prefixes of the engine


def lowest():
    """Returns the least memory of two seconds: the engine may still copy the rows that a cancelled request leaves."""
    measured = []
    for _ in range(20):
        measured.append(soak.held())
        time.sleep(0.1)
    return min(measured, key=operator.itemgetter("arrays"))


def test_a_wrong_text_is_found(tiny):
    prompt, text = tiny.golden[0]
    wrong = soak.dataclasses.replace(tiny, golden=[(prompt, [(text[0] + 1) % 13, *text[1:]])])
    with pytest.raises(AssertionError):
        wrong.single(soak.random.Random(0))
