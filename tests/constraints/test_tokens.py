"""Tables over tokens against automata over the bytes of each token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlade.constraints import automaton, regex
from jlade.constraints.tokens import Table, Trie
from tests.constraints.expressions import COUNTED, EOS, LENGTHS, PATTERNS, TOKENS, TRIE, characters


@pytest.mark.parametrize("pattern", [*PATTERNS, *COUNTED])
@settings(max_examples=20)
@given(data=st.data())
def test_a_token_is_allowed_where_its_bytes_lead_on(pattern, data):
    found = automaton.build(regex.parse(pattern), counts=True)
    assert (found.bounds is not None) == (pattern in COUNTED)
    check_tokens(found, data)


@pytest.mark.parametrize(("pattern", "minimum", "maximum"), [each for each in LENGTHS if each[1:] != (10, 11)])
@settings(max_examples=20)
@given(data=st.data())
def test_tokens_of_texts_whose_characters_are_counted(pattern, minimum, maximum, data):
    check_tokens(automaton.build(characters(pattern, minimum, maximum), counts=True), data)


def check_tokens(found, data):
    """Compares the tokens that a table allows with the runs of their bytes, along a random text."""
    table = Table.of(found, TRIE, [EOS], len(TOKENS))
    state, byte_state = 0, 0
    for _ in range(12):
        runs = [found.run(token, byte_state) for token in TOKENS]
        expected = np.array(runs) >= 0
        expected[EOS] = found.ends(byte_state)
        np.testing.assert_array_equal(table.allowed(state), expected)
        token = data.draw(st.sampled_from(np.flatnonzero(expected).tolist()))
        state = table.advance(state, token)
        if token == EOS:
            break
        byte_state = runs[token]


def test_states_that_no_token_leaves_are_not_entered():
    tokens = [b"a", b"bc", b""]
    table = Table.of(automaton.build(regex.parse("ab|abc|a")), Trie(tokens), [2], 3)
    assert table.allowed(0).tolist() == [True, False, False]
    assert table.allowed(table.advance(0, 0)).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="no tokens of this vocabulary"):
        Table.of(automaton.build(regex.parse("ab")), Trie(tokens), [2], 3)


@pytest.mark.parametrize("pattern", [*PATTERNS, *COUNTED])
@settings(max_examples=20)
@given(data=st.data())
def test_an_end_token_with_bytes_ends_whole_texts_alone(pattern, data):
    """Other tokens are allowed where a text can be completed without it; here that is searched token by token."""
    found = automaton.build(regex.parse(pattern))
    runs = np.array([[found.run(token, state) for token in TOKENS] for state in range(len(found.moves))])
    used = np.flatnonzero((runs >= 0).any(axis=0)).tolist()
    ends = [EOS, *data.draw(st.lists(st.sampled_from(used), max_size=4))] if used else [EOS]
    runs[:, ends] = -1
    can_end, before = found.is_final.copy(), None
    while before is None or (can_end != before).any():
        before = can_end.copy()
        can_end |= (np.append(can_end, False)[runs]).any(axis=1)
    if not can_end[0]:
        with pytest.raises(ValueError, match="no tokens of this vocabulary"):
            Table.of(found, TRIE, ends, len(TOKENS))
        return
    table, state, byte_state = Table.of(found, TRIE, ends, len(TOKENS)), 0, 0
    for _ in range(8):
        expected = np.append(can_end, False)[runs[byte_state]]
        expected[ends] = found.is_final[byte_state]
        np.testing.assert_array_equal(table.allowed(state), expected)
        token = data.draw(st.sampled_from(np.flatnonzero(expected).tolist()))
        if token in ends:
            break
        state, byte_state = table.advance(state, token), runs[byte_state, token]


def test_tokens_that_act_alike_are_one_class():
    table = Table.of(automaton.build(regex.parse(r"[a-z]+(,[a-z]+)*")), TRIE, [EOS], len(TOKENS))
    assert table.num_classes == 4, "none, the end, letters, and the comma"


def test_a_token_that_acts_as_the_end_does_is_not_one():
    table = Table.of(automaton.build(regex.parse("a *")), Trie([b"a", b" ", b""]), [2], 3)
    assert table.allowed(table.advance(0, 0)).tolist() == [False, True, True]
    assert table.shortest() > 1, "spaces may follow"


def test_the_empty_text_alone_has_a_table():
    table = Table.of(automaton.build(automaton.EMPTY), TRIE, [EOS], len(TOKENS))
    assert np.flatnonzero(table.allowed(0)).tolist() == [EOS]


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("(a|b)*", 2**30), ("[ab]+", 2**30), ("a|bb", 1), ("a{3}b*", 2**30), ("", 0), ("[ab]{8,9}", 5), ("a{8}b?", 9)],
)
def test_the_number_of_tokens_after_which_a_text_may_have_to_end(pattern, number):
    tokens = [b"a", b"b", b"bb", b""]
    table = Table.of(automaton.build(regex.parse(pattern), counts=True), Trie(tokens), [3], 4)
    assert table.shortest() == number
