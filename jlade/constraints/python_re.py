"""Regular expressions of Python's `re` with the flag ASCII, as trees."""

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]  # Python's own; no public function returns its tree
from typing import Any

from jlade.constraints import patterns
from jlade.constraints.automaton import LAST_CODE_POINT, Ranges, character_set, common, union, without
from jlade.constraints.ecma import DIGIT, WORD
from jlade.constraints.patterns import (
    ANY_NEIGHBOR,
    Alternation,
    Assertion,
    Characters,
    Concatenation,
    Neighbor,
    Repetition,
    Tree,
)

SPACE: Ranges = ((9, 13), (32, 32))
LINE_END: Ranges = ((10, 10),)
_CATEGORIES = {
    codes.CATEGORY_DIGIT: DIGIT,
    codes.CATEGORY_NOT_DIGIT: without(DIGIT),
    codes.CATEGORY_WORD: WORD,
    codes.CATEGORY_NOT_WORD: without(WORD),
    codes.CATEGORY_SPACE: SPACE,
    codes.CATEGORY_NOT_SPACE: without(SPACE),
}
# "$" is before a line feed at the end of the text too.
_END = Assertion(ANY_NEIGHBOR, Neighbor(LINE_END, is_edge=True, is_last=True))
# "\B" is not in the empty text, up to Python 3.13.
_CHARACTER = Neighbor(patterns.ALL, is_edge=False)
_IN_TEXT = Alternation((Assertion(_CHARACTER, ANY_NEIGHBOR), Assertion(ANY_NEIGHBOR, _CHARACTER)))
_ASSERTIONS = {
    codes.AT_BEGINNING: patterns.begin(),
    codes.AT_BEGINNING_STRING: patterns.begin(),
    codes.AT_END: _END,
    codes.AT_END_STRING: patterns.end(),
    codes.AT_BOUNDARY: patterns.boundary(WORD),
    codes.AT_NON_BOUNDARY: Concatenation((patterns.no_boundary(WORD), _IN_TEXT)),
}
_ASSERTIONS_OF_LINES = _ASSERTIONS | {
    codes.AT_BEGINNING: patterns.begin(LINE_END),
    codes.AT_END: patterns.end(LINE_END),
}
_UNSUPPORTED = {
    codes.ATOMIC_GROUP: "atomic group (?>",
    codes.POSSESSIVE_REPEAT: "possessive quantifier",
    codes.GROUPREF_EXISTS: "conditional (?(",
    codes.FAILURE: "look-ahead (?!",
}


def parse(pattern: str) -> Tree:
    """Returns the tree of a regular expression.

    Raises:
      ValueError: names what is wrong or not supported.
    """
    try:
        found = parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from error
    return _concatenation(found, found.state.flags)


def _concatenation(items: Any, flags: int) -> Tree:
    return Concatenation(tuple(_item(op, argument, flags) for op, argument in items))


def _item(op: Any, argument: Any, flags: int) -> Tree:
    match op:
        case codes.ANY:
            return Characters(without(() if flags & re.DOTALL else LINE_END))
        case codes.LITERAL | codes.NOT_LITERAL | codes.RANGE | codes.CATEGORY:
            return Characters(_set([(op, argument)], flags))
        case codes.IN:
            return Characters(_set(argument, flags))
        case codes.AT:
            return (_ASSERTIONS_OF_LINES if flags & re.MULTILINE else _ASSERTIONS)[argument]
        case codes.MAX_REPEAT | codes.MIN_REPEAT:
            minimum, maximum, part = argument
            return Repetition(_concatenation(part, flags), minimum, None if maximum is codes.MAXREPEAT else maximum)
        case codes.SUBPATTERN:
            _, added, removed, part = argument
            if added & re.UNICODE:
                raise ValueError("the flag (?u: is not supported")
            return _concatenation(part, (flags | added) & ~removed)
        case codes.BRANCH:
            return Alternation(tuple(_concatenation(option, flags) for option in argument[1]))
        case codes.ASSERT | codes.ASSERT_NOT:
            sign = "=" if op is codes.ASSERT else "!"
            name = f"look-ahead (?{sign}" if argument[0] > 0 else f"look-behind (?<{sign}"
        case codes.GROUPREF:
            name = f"back reference \\{argument}"
        case _:
            name = _UNSUPPORTED[op]
    raise ValueError(f"{name} is not supported")


def _set(items: Any, flags: int) -> Ranges:
    ranges: list[tuple[int, int]] = []
    is_negated = False
    for op, argument in items:
        match op:
            case codes.NEGATE:
                is_negated = True
            case codes.LITERAL:
                ranges.append((argument, argument))
            case codes.NOT_LITERAL:
                ranges.append((argument, argument))
                is_negated = True
            case codes.RANGE:
                ranges.append((argument[0], min(argument[1], LAST_CODE_POINT)))
            case codes.CATEGORY:
                ranges += _CATEGORIES[argument]
    if flags & re.IGNORECASE:  # with the flag ASCII, of ASCII's letters alone
        known = union(ranges)
        ranges += [(first + 32, last + 32) for first, last in common(known, ((65, 90),))]
        ranges += [(first - 32, last - 32) for first, last in common(known, ((97, 122),))]
    return character_set(ranges, is_negated)
