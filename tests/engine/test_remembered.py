"""The memory of answers, without a model, against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.drafts.suffix import LONGEST
from jlade.engine import remembered
from jlade.engine.remembered import Remembered

SIZE, MEMORY = 11, 6 * remembered.OVERHEAD


class Twin:
    """Texts in a list, the most recently used last, each a key, a prompt and an answer."""

    def __init__(self):
        self.texts = []

    @staticmethod
    def ngrams(tokens):
        return {tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)}

    def num_bytes(self):
        return sum(
            4 * len(prompt + answer) + 4 * len(self.ngrams(prompt + answer)) + 4 * len(key) + remembered.OVERHEAD
            for key, prompt, answer in self.texts
        )

    def add(self, key, prompt, answer):
        if answer:
            same = [each for each in self.texts if (each[0], each[1] + each[2]) == (key, prompt + answer)]
            self.texts = [each for each in self.texts if each not in same] + [(key, prompt, answer)]
            while self.num_bytes() > MEMORY:
                del self.texts[0]

    def find(self, key, prompt):
        """Returns the tokens, the place of the answer in them, and how many tokens before it match."""
        own = [each for each in self.texts if each[0] == key]

        def shared(text):
            return len(self.ngrams(prompt) & self.ngrams(text[1] + text[2]))

        own = [text for text in reversed(own) if 2 * shared(text) >= len(self.ngrams(prompt))]
        own.sort(key=shared, reverse=True)  # keeps the latest of equal ones first
        tokens, used = [], []
        for text in own:
            tail = text[1][-LONGEST:] if text[1] else []
            room = SIZE - len(tokens) - 1
            if room <= len(tail):
                break
            tokens += [*(tail + text[2])[:room], -1]
            used.append(text)
        for text in reversed(used):
            self.texts.remove(text)
            self.texts.append(text)
        if not used:
            return [-1] * SIZE, 0, 1
        tail, agree = used[0][1][-LONGEST:], 0
        while agree < min(len(prompt), len(tail)) and prompt[-1 - agree] == tail[-1 - agree]:
            agree += 1
        return tokens + [-1] * (SIZE - len(tokens)), len(tail), max(1, agree)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
EVENTS = st.tuples(
    st.sampled_from(["add", "add", "find"]), st.sampled_from("ab"), TOKENS, st.one_of(st.just([]), TOKENS)
)


@given(st.lists(EVENTS, max_size=25))
def test_any_order_of_events_equals_a_search_of_all_texts(events):
    memory, twin = Remembered(MEMORY), Twin()
    for event, key, prompt, answer in events:
        if event == "add":
            memory.add(key, np.array(prompt + answer), len(prompt))
            twin.add(key, prompt, answer)
        else:
            reading = memory.find(key, np.array(prompt), SIZE)
            found = reading.text[0].tolist(), int(reading.places[0, 0]), int(reading.matched[0, 0])
            assert found == twin.find(key, prompt)
            assert (reading.anchor[0], reading.matched[0, 1]) == (found[1], 0)
        kept = [
            (text.key, text.tokens[: text.begin].tolist(), text.tokens[text.begin :].tolist())
            for text in memory.texts()
        ]
        assert kept == twin.texts
        assert memory.num_bytes == twin.num_bytes() <= MEMORY


def test_the_buckets_of_the_twins_ngrams_differ():
    every = np.stack(np.meshgrid(*[np.arange(3)] * 3), axis=-1).reshape(-1, 3)
    assert len({int(remembered.buckets(ngram)[0]) for ngram in every}) == len(every)


def test_a_text_that_exceeds_the_memory_drops_no_other():
    memory = Remembered(MEMORY)
    memory.add("a", np.arange(9), 3)
    memory.add("a", np.arange(2000), 3)
    assert [len(text.tokens) for text in memory.texts()] == [9]


@pytest.mark.parametrize("memory", [0, remembered.OVERHEAD])
def test_without_memory_nothing_is_kept(memory):
    empty = Remembered(memory)
    empty.add("a", np.arange(9), 3)
    assert (len(empty), empty.num_bytes, empty.num_changes) == (0, 0, 0)
