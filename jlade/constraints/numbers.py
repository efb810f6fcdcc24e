"""JSON's numbers in a range, as expressions."""

import dataclasses
from fractions import Fraction

import numpy as np

from jlade.constraints.automaton import (
    EMPTY,
    NOTHING,
    Automaton,
    Expression,
    Repeat,
    build,
    byte_range,
    choice,
    difference,
    intersection,
    literal,
    optional,
    sequence,
)

DIGIT = byte_range(ord("0"), ord("9"))
DIGITS = Repeat(DIGIT, 0, None)
WHOLE = choice(literal("0"), sequence(byte_range(ord("1"), ord("9")), DIGITS))  # without a sign
FRACTION = sequence(literal("."), Repeat(DIGIT, 1, None))
EXPONENT = sequence(
    choice(literal("e"), literal("E")), optional(choice(literal("+"), literal("-"))), Repeat(DIGIT, 1, None)
)
INTEGER = sequence(optional(literal("-")), WHOLE)
NUMBER = sequence(optional(literal("-")), WHOLE, optional(FRACTION), optional(EXPONENT))
UNSIGNED = sequence(WHOLE, optional(FRACTION))
ZERO = sequence(literal("0"), optional(sequence(literal("."), Repeat(literal("0"), 1, None))))
NOT_POSITIVE = choice(ZERO, sequence(literal("-"), UNSIGNED))
NOT_NEGATIVE = choice(UNSIGNED, sequence(literal("-"), ZERO))
MOST_DIGITS = 40  # of a bound


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound of numbers, and whether it is one of them."""

    value: Fraction
    inclusive: bool = True


def integers(least: Bound | None, most: Bound | None) -> Expression:
    """Returns the integers between two bounds, written without a fraction or an exponent."""
    return INTEGER if least is None and most is None else _between(least, most, INTEGER)


def decimals(least: Bound | None, most: Bound | None) -> Expression:
    """Returns the numbers between two bounds. With a bound they are written without an exponent."""
    if least is None and most is None:
        return NUMBER
    return _between(least, most, sequence(INTEGER, optional(FRACTION)))


def multiples(divisor: int) -> Automaton:
    """Returns the integers that an integer of at least 1 divides, by the remainder of the digits that are read."""
    # States: the beginning, after a sign, after a leading zero, and after other digits by their remainder.
    table = np.full((3 + divisor, 12), -1, np.int32)  # classes: ten digits, "-", all others
    for state in range(2):
        table[state, 0] = 2
        for digit in range(1, 10):
            table[state, digit] = 3 + digit % divisor
    table[0, 10] = 1
    for remainder in range(divisor):
        for digit in range(10):
            table[3 + remainder, digit] = 3 + (10 * remainder + digit) % divisor
    class_of_byte = np.full(256, 11, np.int32)
    class_of_byte[ord("0") : ord("9") + 1] = np.arange(10)
    class_of_byte[ord("-")] = 10
    is_final = np.zeros(3 + divisor, bool)
    is_final[[2, 3]] = True
    return Automaton(table, class_of_byte, is_final)


def _between(least: Bound | None, most: Bound | None, form: Expression) -> Automaton:
    found = build(form)
    if least is not None:
        found = difference(found, _below(least)) if least.value <= 0 else intersection(found, _magnitude(least))
    if most is not None:
        mirrored = Bound(-most.value, most.inclusive)
        found = difference(found, _signed_above(most)) if most.value >= 0 else intersection(found, _negated(mirrored))
    return found


def _negated(bound: Bound) -> Expression:
    """Returns the negative numbers whose size is at least a bound above 0."""
    return sequence(literal("-"), _magnitude(bound))


def _below(bound: Bound) -> Expression:
    """Returns the numbers below a bound of at most 0: the negative ones whose size is too large."""
    return _negated(Bound(-bound.value, not bound.inclusive)) if bound.value or bound.inclusive else NOT_POSITIVE


def _signed_above(bound: Bound) -> Expression:
    """Returns the numbers above a bound of at least 0: the ones whose size is too large."""
    return _magnitude(Bound(bound.value, not bound.inclusive)) if bound.value or bound.inclusive else NOT_NEGATIVE


def _magnitude(bound: Bound) -> Expression:
    """Returns the unsigned numbers that are at least, or above, a bound of at least 0."""
    whole, fraction = _digits(bound.value)
    options = [sequence(byte_range(ord("1"), ord("9")), Repeat(DIGIT, len(whole), None), optional(FRACTION))]
    for place, digit in enumerate(whole):
        if digit < "9":
            same = Repeat(DIGIT, len(whole) - place - 1, len(whole) - place - 1)
            options.append(
                sequence(literal(whole[:place]), byte_range(ord(digit) + 1, ord("9")), same, optional(FRACTION))
            )
    options.append(sequence(literal(whole), _fraction_above(fraction, bound.inclusive)))
    return choice(*options)


def _fraction_above(digits: str, inclusive: bool) -> Expression:
    """Returns the fractions, with their point or empty, that are at least or above the one with some digits."""
    options: list[Expression] = []
    for place, digit in enumerate(digits):
        if digit < "9":
            options.append(sequence(literal("." + digits[:place]), byte_range(ord(digit) + 1, ord("9")), DIGITS))
    beyond = Repeat(literal("0"), 0, None), byte_range(ord("1"), ord("9")), DIGITS
    options.append(sequence(literal("." + digits), *beyond))
    if inclusive:
        zeros = Repeat(literal("0"), 0, None)
        if digits:
            options.append(sequence(literal("." + digits), zeros))
        else:
            options += [EMPTY, sequence(literal("."), literal("0"), zeros)]
    return choice(*options) if options else NOTHING


def _digits(value: Fraction) -> tuple[str, str]:
    """Returns the digits of a number of at least 0 before and after its point, without zeros at the end.

    Raises:
      ValueError: it has more than `MOST_DIGITS` digits.
    """
    whole, left = divmod(value, 1)
    fraction = ""
    while left and len(fraction) <= MOST_DIGITS:
        digit, left = divmod(left * 10, 1)
        fraction += str(int(digit))
    if left or len(str(int(whole))) > MOST_DIGITS:
        raise ValueError(f"a bound of numbers has more than {MOST_DIGITS} digits")
    return str(int(whole)), fraction
