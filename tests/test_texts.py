"""Failing comparisons of texts say where these part."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.texts import assert_same_texts, assert_text


def generation(*rows, accepted=(2, 2)):
    tokens = np.array(rows)
    number, steps = len(rows), len(accepted)
    lengths = np.count_nonzero(tokens >= 0, axis=1)
    return SimpleNamespace(
        tokens=tokens, lengths=lengths, accepted=np.array([accepted] * number), steps=np.full(number, steps)
    )


def test_the_first_token_and_its_step_are_named():
    found = generation([5, 6, 7, 8], [5, 6, 9, 8])
    assert_same_texts(found, generation([5, 6, 7, 8], [5, 6, 9, 8]))
    with pytest.raises(AssertionError, match=r"row 1: token 2, of step 1, is 9, not 7, after \[5, 6\]"):
        assert_same_texts(found, generation([5, 6, 7, 8], [5, 6, 7, 8]))


def test_a_text_that_is_too_short_or_made_in_other_steps():
    found = generation([5, 6, 7, -1], accepted=(2, 1))
    assert_text(found, [5, 6, 7], [2, 1])
    with pytest.raises(AssertionError, match="row 0: token 3, of step 2, is no token, not 8"):
        assert_text(found, [5, 6, 7, 8])
    with pytest.raises(AssertionError, match=r"row 0: its steps accept \[2, 1\] tokens, not \[3\]"):
        assert_text(found, [5, 6, 7], [3])
