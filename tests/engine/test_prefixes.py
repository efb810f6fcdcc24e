"""The beginnings that an engine keeps, without a model."""

import types

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jlade.engine.prefixes import Prefixes
from jlade.engine.reading import PromptReader, PromptReading

LEAST, MEMORY, KEY = 2, 20, "key"


def tokens(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def store(*texts, memory=MEMORY, divisible=99):
    prefixes = Prefixes(memory, LEAST, divisible)
    for text in texts:
        prefixes.add(tokens(text), KEY, text, len(text))
    return prefixes


def test_a_prompt_waits_for_the_beginning_of_one_with_its_key():
    def job(key):
        request = types.SimpleNamespace(num_cached=0)
        return types.SimpleNamespace(prompt=tokens("abcd"), prefix_key=key, request=request)

    reader = types.SimpleNamespace(_sizes=[64], _least=LEAST)
    readings = [PromptReading(job("a"))]
    assert [PromptReader.is_read(reader, job(key), readings) for key in "ab"] == [True, False]


def test_without_memory_nothing_is_kept():
    prefixes = store("abc", memory=0)
    assert not prefixes.is_new(tokens("xyz"), KEY)
    assert prefixes.find(tokens("abc"), KEY) == (None, 0)


TEXTS = st.tuples(st.sampled_from("kl"), st.text("ab", max_size=9))  # each with its key


@given(
    divisible=st.integers(0, 9),
    events=st.lists(st.tuples(st.sampled_from(["add", "find"]), TEXTS), max_size=30),
)
def test_any_order_of_events_equals_a_search_of_all_texts(divisible, events):
    prefixes, known = store(divisible=divisible), []  # the most recently used last

    def num_shared(one, by):
        (key, text), (of_key, other) = one, by
        shared = next((n for n, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(text), len(other)) if shared is None else shared
        return shared if key == of_key and shared >= LEAST else 0

    def served(one, by):
        shared = num_shared(one, by)
        return shared if by[1] == one[1][:shared] or len(by[1]) <= divisible else 0

    for event, one in events:
        key, text = one
        most = max((served(one, each) for each in known), default=0)
        assert prefixes.num_served(tokens(text), key) == most
        assert prefixes.parting(tokens(text), key) == max((num_shared(one, each) for each in known), default=0)
        if event == "find":
            value, number = prefixes.find(tokens(text), key)
            assert number == most
            assert (value is None) == (number == 0)
            if value is not None:
                assert served(one, value) == number
                known.append(known.pop(known.index(value)))
        elif prefixes.is_new(tokens(text), key):
            prefixes.add(tokens(text), key, one, len(text))
            known = [each for each in known if each[0] != key or served(each, one) < len(each[1])] + [one]
            while sum(len(text) for _, text in known) > MEMORY:
                known.pop(0)
        else:
            assert len(text) < LEAST or any(served(one, each) == len(text) for each in known)
        assert prefixes.num_bytes == sum(len(text) for _, text in known) <= MEMORY
    prefixes.clear()
    assert prefixes.num_bytes == 0
