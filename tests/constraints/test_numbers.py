"""Ranges of numbers against arithmetic."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlade.constraints import automaton, numbers
from jlade.constraints.numbers import Bound

VALUES = ["0", "1", "-1", "7", "10", "99", "100", "-100", "0.5", "-0.25", "12.34", "1999", "-0.007", "105.05"]


def decimal(value):
    digits = str(int(abs(value) * 10**6)).rjust(7, "0")
    text = f"{digits[:-6]}.{digits[-6:]}".rstrip("0").rstrip(".")
    return ("-" if value < 0 else "") + text


# Texts of numbers, many of them near a bound.
OFFSETS = ["0", "0.1", "-0.1", "1", "-1", "0.001", "10"]
NEAR = st.tuples(*(st.sampled_from(each) for each in (VALUES, OFFSETS))).map(
    lambda pair: decimal(sum(map(Fraction, pair)))
)
TEXTS = NEAR | st.from_regex("-?(0|[1-9][0-9]{0,4})([.][0-9]{1,4})?", fullmatch=True)


@settings(max_examples=300)
@given(st.data())
def test_numbers_between_bounds(data):
    least, most = (
        data.draw(st.none() | st.builds(Bound, st.sampled_from(VALUES).map(Fraction), st.booleans())) for _ in range(2)
    )
    text = data.draw(TEXTS)
    value = Fraction(text)
    within = least is None or value > least.value or (least.inclusive and value == least.value)
    within &= most is None or value < most.value or (most.inclusive and value == most.value)
    found = automaton.build(numbers.decimals(least, most))
    assert found.accepts(text.encode()) == within
    whole = automaton.build(numbers.integers(least, most))
    assert whole.accepts(text.encode()) == (within and "." not in text)


@pytest.mark.parametrize("text", ["00", "01", "-", "1.", ".5", "+1", "1e", "1e5", "-0", "0", "-12.5e-3", "0E+1", ""])
def test_the_form_of_a_number(text):
    assert automaton.build(numbers.NUMBER).accepts(text.encode()) == bool(
        re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", text)
    )


@settings(max_examples=200)
@given(st.integers(1, 60), st.integers(-(10**6), 10**6))
def test_multiples(divisor, value):
    assert numbers.multiples(divisor).accepts(str(value).encode()) == (value % divisor == 0)
