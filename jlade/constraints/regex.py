"""Regular expressions as expressions over bytes, in two dialects: of Python's `re` and, from `ecma`, of JSON Schema."""

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]  # Python's own; no public function returns its tree
from collections.abc import Callable
from typing import Any

from jlade.constraints import ecma, patterns
from jlade.constraints.automaton import Expression, Repeat, Series, TooLargeError, characters, choice, sequence
from jlade.constraints.code_points import ALL, LAST_CODE_POINT, Ranges, character_set, common, union, without
from jlade.constraints.ecma import DIGIT, WORD
from jlade.constraints.patterns import ANY_NEIGHBOR, ANY_TEXT, Assertion, Characters, Neighbor, Spelling, Tree

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
_CHARACTER = Neighbor(ALL, is_edge=False)
_IN_TEXT = patterns.either(Assertion(_CHARACTER, ANY_NEIGHBOR), Assertion(ANY_NEIGHBOR, _CHARACTER))
_ASSERTIONS = {
    codes.AT_BEGINNING: patterns.begin(),
    codes.AT_BEGINNING_STRING: patterns.begin(),
    codes.AT_END: _END,
    codes.AT_END_STRING: patterns.end(),
    codes.AT_BOUNDARY: patterns.boundary(WORD),
    codes.AT_NON_BOUNDARY: Series((patterns.no_boundary(WORD), _IN_TEXT)),
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


def parse(pattern: str, spell: Spelling = characters) -> Expression:
    """Returns the texts that a regular expression of Python's `re` matches as a whole, with the flag ASCII.

    Args:
      pattern: the regular expression.
      spell: how a character of some ranges is written; in UTF-8 by default.

    Raises:
      ValueError: names the pattern, and what is wrong or not supported: look-around, references to groups, atomic
        groups and possessive quantifiers.
    """
    return _expression(lambda: _python_tree(pattern), pattern, spell)


def search(pattern: str, spell: Spelling = characters) -> Expression:
    """Returns the texts in which a regular expression of ECMA-262 with the flag u has a match.

    Args:
      pattern: the regular expression.
      spell: how a character of some ranges is written; in UTF-8 by default.

    Raises:
      ValueError: names the pattern, and what is wrong or not supported: look-behind, a look-ahead in a repetition,
        references to groups, and properties of which Python has no exact data.
    """
    return _expression(lambda: Series((ANY_TEXT, ecma.parse(pattern), ANY_TEXT)), pattern, spell)


def _expression(parse: Callable[[], Tree], pattern: str, spell: Spelling) -> Expression:
    try:
        return patterns.expression(parse(), spell)
    except TooLargeError:
        raise
    except (ValueError, RecursionError, OverflowError, re.error) as error:
        raise ValueError(f"regex {pattern!r}: {error}") from error


def _python_tree(pattern: str) -> Tree:
    parsed = parser.parse(pattern, re.ASCII)
    return _concatenation(parsed, parsed.state.flags)


def _concatenation(items: Any, flags: int) -> Tree:
    return sequence(*(_item(op, argument, flags) for op, argument in items))


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
            return Repeat(_concatenation(part, flags), minimum, None if maximum is codes.MAXREPEAT else maximum)
        case codes.SUBPATTERN:
            _, added, removed, part = argument
            if added & re.UNICODE:
                raise ValueError("the flag (?u: is not supported")
            return _concatenation(part, (flags | added) & ~removed)
        case codes.BRANCH:
            return choice(*(_concatenation(option, flags) for option in argument[1]))
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
