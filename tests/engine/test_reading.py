"""Prompts that begin as earlier texts: which of their tokens are not read again, and that their texts stay the same."""

import jax
import numpy as np
import pytest

import jlade
from jlade import SamplingConfig
from jlade.engine import rows
from tests.tiny import PAPER, slow_but, tiny_llama

CAPACITY = 300  # entries of layers are kept up to 128, 256 or 300
OPTIONS = {"max_new_tokens": 9, "eos_ids": ()}
MODELS = {
    "full": tiny_llama(3, max_positions=CAPACITY),
    "windows": tiny_llama(3, max_positions=CAPACITY, sliding_windows=(5, None)),  # a ring of 8 tokens
}
SYSTEM = np.random.default_rng(0).integers(13, size=140).tolist()


@pytest.fixture(scope="module", params=slow_but(MODELS, "windows"))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind):
    with jlade.Engine(MODELS[kind], max_sequences=2, lookahead=PAPER, prefix_memory=10**7) as running:
        yield running


def text_of(engine, kind, prompt, num_cached, **options):
    """Returns prompt and text after checking the text against plain decoding, and the tokens that were not read."""
    request = engine.submit(prompt, **OPTIONS | options)
    tokens = request.result(timeout=300).tokens
    alone = jlade.generate(MODELS[kind], prompt, lookahead=None, **OPTIONS | options)
    np.testing.assert_array_equal(tokens, alone.tokens)
    assert request.num_cached == num_cached
    return [*prompt, *tokens[0].tolist()]


@pytest.mark.slow
def test_the_next_turn_reads_what_is_new(engine, kind):
    chat = [1, *SYSTEM[:110]]
    text, known = chat, 0
    for turn in ([5], [6, 7, 8], [9] * 30):
        before = engine.prompt_tokens
        text = text_of(engine, kind, text + turn, known)
        assert np.subtract(engine.prompt_tokens, before).tolist() == [len(text) - 9, known]
        known = len(text) - 1


@pytest.mark.slow
def test_equal_prompts_are_read_once(engine, kind):
    prompt, sampling = [2, *SYSTEM], SamplingConfig(temperature=1.0)
    for number in range(4):
        known = len(prompt) - 1 if number else 0
        text_of(engine, kind, prompt, known, sampling=sampling, key=jax.random.key(number))


def test_prompts_with_a_common_beginning(engine, kind):
    """A ring that has lost tokens cannot be shortened. The second prompt leaves a copy of it where the two part."""
    beginning = [3, *SYSTEM]
    text_of(engine, kind, [*beginning, 1, 2, 3], 0)
    text_of(engine, kind, [*beginning, 4, 5], 0 if kind == "windows" else len(beginning))
    text_of(engine, kind, [*beginning, 6, 7, 8], len(beginning))
    text_of(engine, kind, beginning, len(beginning) - 1 if kind == "full" else 0)


def test_a_part_of_an_answer_is_continued(engine, kind):
    prompt = [4, *SYSTEM]
    text = text_of(engine, kind, prompt, 0)
    text_of(engine, kind, [*text[: len(prompt) + 4], 1], len(prompt) - 1 if kind == "windows" else len(prompt) + 4)


def test_short_beginnings_are_read_again(engine, kind):
    """They save no pass: on a CPU the shortest reads 16 tokens."""
    for _ in range(2):
        text_of(engine, kind, [7, 7, 7, 7], 0)


@pytest.mark.slow
def test_after_a_fault_prompts_are_read_anew(engine, kind, monkeypatch):
    """A program that failed may have spoilt a prefix."""
    prompt = [8, *SYSTEM]
    text_of(engine, kind, prompt, 0)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "read", lambda *_: (_ for _ in ()).throw(RuntimeError("a fault")))
        with pytest.raises(RuntimeError, match="a fault"):
            engine.submit([*prompt, 1, 2], **OPTIONS).result(timeout=300)
    text_of(engine, kind, prompt, 0)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 1000])
def test_a_memory_that_holds_no_prefix(memory):
    with jlade.Engine(MODELS["full"], max_sequences=2, lookahead=None, prefix_memory=memory) as running:
        for _ in range(2):
            text_of(running, "full", SYSTEM, 0)
