"""Automata against Python's `re`, and sets of characters against their encodings."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlade.constraints import automaton, regex

PATTERNS = [
    "abc|abd*",
    "(ab|ba){2,3}c?",
    r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?",
    r"[^a-c]*",
    r"(é|ü|[à-æ])+x",
    r"\w+@\w+\.(com|org)",
    "",
    r"a{0}b",
    r".\s\S",
    r"(a*)*b",
    "(?:x|)y",
    "[😀-😎]{1,2}",
    "a*a{2,9}",
    "(a?b?){9}",
    "(a{0,9}b?)*",
    "[ab]{8}|[bc]{8}",
]
COUNTED = [
    "[ab]{3,9}",
    "(a|bc){0,9}d?",
    "x[^x]{8,12}x",
    "[ab]{2,9}[0-9]{0,8}c",
    '("[ab]{1,10}",)*y',
    "(0{1,3}1){2,9}",
    "(12?){9}|com",
    "(ab{2,10}c){0,3}",
    "a?b{0,8}|c{9}",
    "(x|a{0,8}y)a{8}",
]
CHARACTERS = "abcdxy0129.-+eE@ é😀â\n\t_comrg"


@pytest.mark.parametrize("pattern", [*PATTERNS, *COUNTED])
@settings(max_examples=60)
@given(data=st.data())
def test_accepts_what_re_matches(pattern, data):
    found = automaton.build(regex.parse(pattern), counts=True)
    assert (found.bounds is not None) == (pattern in COUNTED)
    text = data.draw(st.text(CHARACTERS, max_size=8) | st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    if text and data.draw(st.booleans()):  # one more or less
        place = data.draw(st.integers(0, len(text) - 1))
        text = text[:place] + text[place] * data.draw(st.sampled_from([0, 2, 3])) + text[place + 1 :]
    assert found.accepts(text.encode()) == bool(re.fullmatch(pattern, text, re.ASCII))


@settings(max_examples=100)
@given(st.integers(0, automaton.LAST_CODE_POINT), st.integers(0, automaton.LAST_CODE_POINT), st.characters())
def test_a_range_of_characters_is_spelled_in_utf_8(first, last, character):
    first, last = min(first, last), max(first, last)
    found = automaton.build(automaton.characters(((first, last),)))
    assert found.accepts(character.encode()) == (first <= ord(character) <= last)


@settings(max_examples=60)
@given(st.sampled_from(PATTERNS), st.sampled_from(PATTERNS), st.data())
def test_products(first, second, data):
    pattern = re.compile(data.draw(st.sampled_from([first, second])), re.ASCII)
    text = data.draw(st.from_regex(pattern, fullmatch=True))
    one, other = (bool(re.fullmatch(pattern, text, re.ASCII)) for pattern in (first, second))
    parsed = regex.parse(first), regex.parse(second)
    assert automaton.intersection(*parsed).accepts(text.encode()) == (one and other)
    assert automaton.difference(*parsed).accepts(text.encode()) == (one and not other)


@pytest.mark.parametrize("pattern", [*PATTERNS, "(a|b)*a(a|b){3}", "a{3}|b{3}", "(ab|cb)*", "[^x]{3}"])
def test_the_fewest_states_accept_the_same_texts(pattern):
    found = automaton.build(regex.parse(pattern))
    least = automaton.minimal(found)
    for larger, other in ((found, least), (least, found)):
        assert not automaton.difference(larger, other).is_final.any(), "both accept the same texts"
    # Pairs of states that some text tells apart, by the table of pairs.
    states, after = range(len(least.next_state)), least.next_state.tolist()
    apart = {(p, q) for p in states for q in states if least.is_final[p] != least.is_final[q]}
    while True:
        found_apart = {
            (p, q)
            for p in states
            for q in states
            if any(x != y and (-1 in (x, y) or (x, y) in apart) for x, y in zip(after[p], after[q], strict=True))
        }
        if found_apart <= apart:
            break
        apart |= found_apart
    assert len(apart) == len(states) * (len(states) - 1)


def test_an_automaton_that_is_too_large_is_refused():
    with pytest.raises(automaton.TooLargeError):
        automaton.build(regex.parse("(a|b)*a(a|b){20}"))
