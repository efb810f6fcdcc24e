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
    minimum, maximum = (
        data.draw(st.none() | st.builds(Bound, st.sampled_from(VALUES).map(Fraction), st.booleans())) for _ in range(2)
    )
    text = data.draw(TEXTS)
    value = Fraction(text)
    within = minimum is None or value > minimum.value or (minimum.inclusive and value == minimum.value)
    within &= maximum is None or value < maximum.value or (maximum.inclusive and value == maximum.value)
    found = automaton.build(numbers.decimals(minimum, maximum))
    assert found.accepts(text.encode()) == within
    whole = automaton.build(numbers.integers(minimum, maximum))
    assert whole.accepts(text.encode()) == (within and "." not in text)


@pytest.mark.parametrize("text", ["00", "01", "-", "1.", ".5", "+1", "1e", "1e5", "-0", "0", "-12.5e-3", "0E+1", ""])
def test_the_form_of_a_number(text):
    assert automaton.build(numbers.NUMBER).accepts(text.encode()) == bool(
        re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", text)
    )


# Divisors, and the digits of each after the point.
DIVISORS = {"1": 0, "7": 0, "60": 0, "0.5": 1, "0.25": 2, "0.05": 2, "0.01": 2, "0.000001": 6, "2.5": 1, "12.75": 2}


@settings(max_examples=300)
@given(st.data())
def test_multiples(data):
    name = data.draw(st.sampled_from([*DIVISORS]))
    divisor, places = Fraction(name), DIVISORS[name]
    text = decimal(divisor * data.draw(st.integers(-(10**6), 10**6)))
    if data.draw(st.booleans()):
        text += data.draw(st.sampled_from("0125")) if "." in text else data.draw(st.sampled_from([".0", ".5", "5"]))
    is_right = (Fraction(text) / divisor).denominator == 1 and len(text.partition(".")[2]) <= places
    assert numbers.multiples(divisor).accepts(text.encode()) == is_right
    counting = automaton.build(numbers.decimals(None, Bound(Fraction(100)), divisor), counts=True)
    assert counting.accepts(text.encode()) == (is_right and Fraction(text) <= 100)
    whole = automaton.build(numbers.integers(None, None, divisor), counts=True)
    assert whole.accepts(text.encode()) == (is_right and "." not in text)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("minimum", [None, *(Bound(Fraction(value)) for value in ("0", "12", "0.25", "-1e30"))])
@pytest.mark.parametrize("divisor", [None, Fraction(1, 2), Fraction(7)])
def test_a_double_holds_each_number(minimum, divisor, counts):
    """No number has more than 20 digits before its point, or more than two in its exponent."""
    nines, sevens = "9" * 20, "7" * 20
    for make in (numbers.decimals, numbers.integers):
        found = automaton.build(make(minimum, None, divisor), counts=counts)
        assert found.accepts((sevens if divisor else nines).encode())
        assert not found.accepts((sevens + "7" if divisor else nines + "9").encode())
        assert not found.accepts(b"7e400")
        assert not found.accepts(b"7E+100")
    plain = automaton.build(numbers.NUMBER, counts=counts)
    assert plain.accepts(f"-{nines}.{nines}E+99".encode())
    assert plain.accepts(b"0.5e-99")
