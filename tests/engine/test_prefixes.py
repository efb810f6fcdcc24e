"""The beginnings that an engine keeps, without a model."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jlade.engine.prefixes import Prefixes

LEAST, MEMORY = 2, 20


def tokens(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def store(*texts, memory=MEMORY, divisible=99):
    prefixes = Prefixes(memory, LEAST, divisible)
    for text in texts:
        prefixes.add(tokens(text), text, len(text))
    return prefixes


def test_the_value_that_serves_most_tokens_is_found():
    prefixes = store("abcd", "abXY")
    assert prefixes.find(tokens("abc")) == ("abcd", 3)
    assert prefixes.find(tokens("abXYZ")) == ("abXY", 4)
    assert prefixes.find(tokens("aX")) == (None, 0), "one token is less than the least"
    assert prefixes.find(tokens("")) == (None, 0)


def test_a_text_takes_the_place_of_its_beginnings():
    prefixes = store("abc", "xyz", "abcdef")
    assert prefixes.num_bytes == len("xyz") + len("abcdef")
    assert (prefixes.is_new(tokens("abcd")), prefixes.is_new(tokens("abcX"))) == (False, True)


def test_the_least_recently_used_values_are_dropped():
    prefixes = store("aaaa", "bbbb", memory=8)
    prefixes.find(tokens("aaaa"))
    prefixes.add(tokens("cccc"), "cccc", 4)
    assert [prefixes.find(tokens(text))[1] for text in ("aaaa", "bbbb", "cccc")] == [4, 0, 4]
    prefixes.clear()
    assert (prefixes.find(tokens("aaaa")), prefixes.num_bytes) == ((None, 0), 0)


def test_a_value_that_cannot_be_divided_serves_texts_that_begin_with_all_of_it():
    prefixes = store("abc", "abcdef", divisible=4)
    assert prefixes.find(tokens("abcdXX")) == ("abc", 3)
    assert (prefixes.parting(tokens("abcdXX")), prefixes.parting(tokens("aX"))) == (4, 0)
    assert prefixes.find(tokens("abcdefX")) == ("abcdef", 6)
    assert prefixes.is_new(tokens("abcde"))


def test_without_memory_nothing_is_kept():
    prefixes = store("abc", memory=0)
    assert not prefixes.is_new(tokens("xyz"))
    assert prefixes.find(tokens("abc")) == (None, 0)


TEXTS = st.text("ab", max_size=9)


@given(
    divisible=st.integers(0, 9),
    events=st.lists(st.tuples(st.sampled_from(["add", "find"]), TEXTS), max_size=30),
)
def test_any_order_of_events_equals_a_search_of_all_texts(divisible, events):
    prefixes, known = store(divisible=divisible), []  # the most recently used last

    def served(text, by):
        shared = next((n for n, pair in enumerate(zip(text, by, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(text), len(by)) if shared is None else shared
        return shared if by == text[:shared] or len(by) <= divisible else 0

    for event, text in events:
        if event == "find":
            value, number = prefixes.find(tokens(text))
            assert number == max([n for n in (served(text, each) for each in known) if n >= LEAST], default=0)
            assert (value is None) == (number == 0)
            if value is not None:
                assert served(text, value) == number
                known.append(known.pop(known.index(value)))
        elif prefixes.is_new(tokens(text)):
            prefixes.add(tokens(text), text, len(text))
            known = [each for each in known if served(each, text) < len(each)] + [text]
            while sum(map(len, known)) > MEMORY:
                known.pop(0)
        else:
            assert len(text) < LEAST or any(served(text, each) == len(text) for each in known)
        assert prefixes.num_bytes == sum(map(len, known)) <= MEMORY
