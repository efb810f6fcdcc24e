"""Automata against Python's `re`, and sets of characters against their encodings."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlade.constraints import automaton, regex
from jlade.constraints.code_points import ALL, LAST_CODE_POINT
from tests.constraints.expressions import COUNTED, LENGTHS, PATTERNS, characters

CHARACTER = st.characters(exclude_categories=["Cs"])
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


@pytest.mark.parametrize(("pattern", "minimum", "maximum"), LENGTHS)
def test_characters_are_counted(pattern, minimum, maximum):
    """The automaton is that of the product with a repetition, and each of its texts can be completed at any count."""
    character = automaton.characters(ALL)
    expected = automaton.intersection(regex.parse(pattern), automaton.Repeat(character, minimum, maximum))
    found = characters(pattern, minimum, maximum)
    both = [automaton.build(found), expected]
    for one, other in (both, reversed(both)):
        assert not automaton.difference(one, other).is_final.any()
    counting = automaton.build(found, counts=True)
    if maximum is None:  # the count ends at 65,535
        return
    reached, left, before = {0}, [0], {}
    while left:
        here = left.pop()
        for byte in range(256):
            after = counting.run(bytes([byte]), here)
            if after >= 0:
                before.setdefault(after, set()).add(here)
                left += {after} - reached
                reached.add(after)
    completed = left = {state for state in reached if counting.ends(state)}
    while left:
        left = set().union(*(before.get(state, set()) for state in left)) - completed
        completed |= left
    assert completed == reached or not completed


@pytest.mark.parametrize(
    ("pattern", "bounds"),
    [
        ("[a-c]+", [(0, 2083), (2500, None), (60_000, 65_535)]),
        ("(é|😀|%[0-9]{2})*", [(0, 2083), (2500, None), (60_000, 65_535)]),
        ("x*%[0-9]{2}", [(0, 2083), (3, 65_535)]),  # where nothing may follow a text, a least length takes states
    ],
)
def test_lengths_take_no_states(pattern, bounds):
    plain = automaton.build(regex.parse(pattern))
    for minimum, maximum in bounds:
        assert (
            len(automaton.build(characters(pattern, minimum, maximum), counts=True).is_final) <= len(plain.is_final) + 1
        )


def test_the_largest_length():
    found = automaton.build(characters("(é|%[0-9]{2})*", 65_534, 65_535), counts=True)
    for text, is_accepted in {
        "é" * 65_533: False,
        "é" * 65_534: True,
        "é" * 65_535: True,
        "é" * 65_536: False,
        "é" * 65_532 + "%12": True,
        "é" * 65_533 + "%12": False,
    }.items():
        assert found.accepts(text.encode()) == is_accepted
    assert found.run(("é" * 65_533 + "%").encode()) < 0, "two digits more have no place"


@settings(max_examples=100)
@given(st.integers(0, LAST_CODE_POINT), st.integers(0, LAST_CODE_POINT), CHARACTER)
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
    minimum = automaton.minimal(found)
    for larger, other in ((found, minimum), (minimum, found)):
        assert not automaton.difference(larger, other).is_final.any(), "both accept the same texts"
    # Pairs of states that some text tells apart, by the table of pairs.
    states, after = range(len(minimum.next_state)), minimum.next_state.tolist()
    apart = {(p, q) for p in states for q in states if minimum.is_final[p] != minimum.is_final[q]}
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


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a|b)*a(a|b){20}", "^an automaton of more than 32767 states"),
        ("[ab]{1,1000000000}a", "a repetition of 1 to 1000000000: an automaton of more than 32767 states"),
        ("[ab]{70000,}", "a repetition of 70000 to any number: "),
    ],
)
def test_an_automaton_that_is_too_large_is_refused(pattern, message):
    with pytest.raises(automaton.TooLargeError, match=message):
        automaton.build(regex.parse(pattern), counts=True)
