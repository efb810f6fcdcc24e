"""JSON's numbers in a range, as expressions.

A finite double holds each of them: they have at most `MAX_WHOLE` digits before the point, and at most two in the
exponent, which those without bounds may have.
"""

import dataclasses
import functools
from fractions import Fraction

import numpy as np

from jlade.constraints import moves
from jlade.constraints.automaton import (
    EMPTY,
    Automaton,
    Expression,
    Repeat,
    build,
    byte_range,
    choice,
    counted,
    difference,
    intersection,
    literal,
    optional,
    sequence,
)
from jlade.constraints.moves import DEAD

MAX_WHOLE = 20  # digits before the point, as 64 bits have
LIMIT = 10**MAX_WHOLE
MAX_PLACES = 40  # digits of a bound or a divisor after the point
MAX_REMAINDERS = 10_000  # states of the multiples of a divisor
DIGIT = byte_range(ord("0"), ord("9"))
NOT_ZERO = byte_range(ord("1"), ord("9"))
DIGITS = Repeat(DIGIT, 0, None)
WHOLE = choice(literal("0"), sequence(NOT_ZERO, DIGITS))  # without a sign, of any size
LIMITED = choice(literal("0"), sequence(NOT_ZERO, Repeat(DIGIT, 0, MAX_WHOLE - 1)))
FRACTION = sequence(literal("."), Repeat(DIGIT, 1, None))
EXPONENT = sequence(
    choice(literal("e"), literal("E")), optional(choice(literal("+"), literal("-"))), Repeat(DIGIT, 1, 2)
)
MINUS = literal("-")
INTEGER = sequence(optional(MINUS), LIMITED)
NUMBER = sequence(optional(MINUS), LIMITED, optional(FRACTION), optional(EXPONENT))
UNSIGNED = sequence(WHOLE, optional(FRACTION))
ZERO = sequence(literal("0"), optional(sequence(literal("."), Repeat(literal("0"), 1, None))))
NOT_POSITIVE = choice(ZERO, sequence(MINUS, UNSIGNED))
NOT_NEGATIVE = choice(UNSIGNED, sequence(MINUS, ZERO))


class DivisorError(ValueError):
    """A divisor has too many remainders."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound of numbers, and whether it is one of them."""

    value: Fraction
    inclusive: bool = True


def integers(minimum: Bound | None, maximum: Bound | None, divisor: Fraction | None = None) -> Expression:
    """Returns the integers between two bounds, written without a fraction or an exponent.

    Args:
      minimum, maximum: the bounds.
      divisor: a number of which they are multiples.

    Raises:
      DivisorError: the divisor has too many remainders.
    """
    if minimum is None and maximum is None and divisor is None:
        return INTEGER
    # A multiple of a fraction in its lowest terms is an integer if it is one of the numerator.
    multiple = None if divisor is None else Fraction(divisor.numerator)
    return _limited(minimum, maximum, multiple, sequence(optional(MINUS), WHOLE))


def decimals(minimum: Bound | None, maximum: Bound | None, divisor: Fraction | None = None) -> Expression:
    """Returns the numbers between two bounds. With a bound or a divisor they are written without an exponent.

    Args and errors are those of `integers`.
    """
    if minimum is None and maximum is None and divisor is None:
        return NUMBER
    return _limited(minimum, maximum, divisor, sequence(optional(MINUS), UNSIGNED))


def multiples(divisor: Fraction) -> Automaton:
    """Returns the multiples of a number above 0, with no more digits after the point than it has itself.

    Raises:
      DivisorError: it has too many remainders.
    """
    places = len(_digits(divisor)[1])
    size = int(divisor * 10**places)  # the remainders of the digits that are read, as an integer
    number = places + 2 if places else 1
    if number * size > MAX_REMAINDERS:
        maximum = MAX_REMAINDERS // number
        raise DivisorError(f"with {places} decimal places must be at most {maximum / 10**places}, got {float(divisor)}")
    # States: the beginning, after a sign, after a leading zero; and by the remainder of the digits that are read those
    # before the point, after the point, and after each further digit.
    table = np.full((3 + number * size, 13), DEAD, np.int32)  # classes: ten digits, "-", ".", all others
    table[:2, :10] = 3 + np.arange(10) % size
    table[:2, 0] = 2
    table[0, 10] = 1
    remainders = np.arange(size)
    after = (10 * remainders[:, None] + np.arange(10)) % size
    is_final = np.zeros(len(table), bool)
    is_final[2] = True
    for place in range(number):
        first = 3 + place * size
        here, next_place = slice(first, first + size), first + size if place else first
        if place < number - 1 or not place:
            table[here, :10] = next_place + after
        if place != 1:
            is_final[here] = remainders * pow(10, places - max(0, place - 1), size) % size == 0
    if places:
        table[2, 11] = 3 + size
        table[3 : 3 + size, 11] = 3 + size + remainders
    return Automaton(table, _CLASS_OF_BYTE, is_final)


_CLASS_OF_BYTE: np.ndarray = np.full(256, 12, np.int32)
_CLASS_OF_BYTE[ord("0") : ord("9") + 1] = np.arange(10)
_CLASS_OF_BYTE[[ord("-"), ord(".")]] = 10, 11


@functools.cache
def _whole_digits() -> Automaton:
    """Returns the automaton that counts the digits before the point."""
    table = np.ones((2, 13), np.int32)
    table[0, :10], table[0, 10] = moves.move(0, 1), 0
    return Automaton(table, _CLASS_OF_BYTE, np.ones(2, bool), moves.without_bounds(2))


def _limited(minimum: Bound | None, maximum: Bound | None, divisor: Fraction | None, form: Expression) -> Expression:
    numbers = build(form)
    if minimum is not None and minimum.value > -LIMIT:
        numbers = _above(numbers, minimum, EMPTY, MINUS, NOT_POSITIVE)
    if maximum is not None and maximum.value < LIMIT:
        numbers = _above(numbers, Bound(-maximum.value, maximum.inclusive), MINUS, EMPTY, NOT_NEGATIVE)
    if divisor is not None:
        numbers = intersection(numbers, multiples(divisor))
    return counted(numbers, _whole_digits(), 0, MAX_WHOLE)


def _above(
    numbers: Automaton, minimum: Bound, sign: Expression, opposite: Expression, not_above: Expression
) -> Automaton:
    """Returns the numbers from a minimum on. With the signs exchanged it is the minimum of their negatives.

    Args:
      numbers: all numbers.
      minimum: the bound.
      sign, opposite: how numbers above 0, and those below it, begin.
      not_above: the numbers that are not above 0.
    """
    if minimum.value > 0:
        return intersection(numbers, sequence(sign, _magnitude(minimum)))
    if minimum.value or minimum.inclusive:
        return difference(numbers, sequence(opposite, _magnitude(Bound(-minimum.value, not minimum.inclusive))))
    return difference(numbers, not_above)


def _magnitude(bound: Bound) -> Expression:
    """Returns the unsigned numbers that are at least, or above, a bound of at least 0."""
    whole, fraction = _digits(bound.value)
    options = [sequence(NOT_ZERO, Repeat(DIGIT, len(whole), None), optional(FRACTION))]
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
    same, zeros = literal("." + digits), Repeat(literal("0"), 0, None)
    options.append(sequence(same, zeros, NOT_ZERO, DIGITS))
    if inclusive:
        options += [sequence(same, zeros)] if digits else [EMPTY, sequence(same, literal("0"), zeros)]
    return choice(*options)


def _digits(value: Fraction) -> tuple[str, str]:
    """Returns the digits of a number of at least 0 before and after its point, without zeros at the end."""
    whole, left = divmod(value, 1)
    fraction = ""
    while left:
        digit, left = divmod(left * 10, 1)
        fraction += str(int(digit))
    return str(int(whole)), fraction
