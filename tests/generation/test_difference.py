"""The first difference of two texts, with the logits of a LLaMA in NumPy."""

import numpy as np
import pytest

from jlade.generation import difference
from tests import plain_llama
from tests.tiny import tiny_llama

PROMPT, TEXT = [3, 1, 4], [1, 5, 9, 2, 6]


@pytest.mark.parametrize(
    ("other", "position"),
    [([1, 5, 8, 2, 6], 2), ([0, 5, 9, 2, 6], 0), ([1, 5, 9, 2], 4), ([1, 5, 9, 2, 6, 7], 5)],
)
def test_the_first_difference_and_its_logits(other, position):
    found = difference.find(tiny_llama(), PROMPT, TEXT, other)
    first, second = np.sort(plain_llama.logits(tiny_llama(), [*PROMPT, *TEXT[:position]])[-1])[::-1][:2]
    assert found.position == position
    assert found.logit_gap == pytest.approx(first - second, abs=1e-4)


def test_equal_texts_have_none():
    assert difference.find(tiny_llama(), PROMPT, TEXT, TEXT) is None
