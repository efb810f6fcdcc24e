"""Regular expressions as expressions over bytes, in the syntax of Python's `re`."""

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]  # Python's own; no public function returns its tree
from collections.abc import Callable
from typing import Any

from jlade.constraints.automaton import (
    EMPTY,
    LAST_CODE_POINT,
    Expression,
    Ranges,
    Repeat,
    character_set,
    characters,
    choice,
    sequence,
    union,
    without,
)

DIGIT: Ranges = ((48, 57),)
WORD: Ranges = union([(48, 57), (65, 90), (95, 95), (97, 122)])
SPACE: Ranges = ((9, 13), (32, 32))
_CATEGORIES = {
    codes.CATEGORY_DIGIT: DIGIT,
    codes.CATEGORY_NOT_DIGIT: without(DIGIT),
    codes.CATEGORY_WORD: WORD,
    codes.CATEGORY_NOT_WORD: without(WORD),
    codes.CATEGORY_SPACE: SPACE,
    codes.CATEGORY_NOT_SPACE: without(SPACE),
}
ANY = without(((10, 10),))
Spelling = Callable[[Ranges], Expression]  # of one character


def parse(pattern: str, spell: Spelling = characters, anchored: bool = True) -> Expression:
    """Returns the texts that a regular expression matches.

    Classes such as \\d and \\w have ASCII's characters alone, as in JavaScript.

    Args:
      pattern: the regular expression.
      spell: how a character of some ranges is written; in UTF-8 by default.
      anchored: whether it matches whole texts. Otherwise it matches a part of the text, unless "^" and "$" say more.

    Raises:
      ValueError: names what is not supported: assertions but for "^" and "$" at the ends, and references to groups.
    """
    try:
        tree = parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regex {pattern!r}: {error}") from error
    if tree.state.flags & re.IGNORECASE:
        raise ValueError(f"regex {pattern!r}: flags are not supported")
    rest = Repeat(spell(without(())), 0, None)

    def ends(items: list[Any]) -> Expression:
        """Returns an alternative at the top, which may have anchors."""
        begins = finishes = anchored
        while items and items[0] in ((codes.AT, codes.AT_BEGINNING), (codes.AT, codes.AT_BEGINNING_STRING)):
            items, begins = items[1:], True
        while items and items[-1] in ((codes.AT, codes.AT_END), (codes.AT, codes.AT_END_STRING)):
            items, finishes = items[:-1], True
        if len(items) == 1 and items[0][0] is codes.SUBPATTERN and not (begins and finishes):
            return alternatives(items[0][1][3])
        body = _sequence(items, pattern, spell)
        return sequence(*([] if begins else [rest]), body, *([] if finishes else [rest]))

    def alternatives(items: Any) -> Expression:
        items = list(items)
        if len(items) == 1 and items[0][0] is codes.BRANCH:
            return choice(*(ends(list(option)) for option in items[0][1][1]))
        return ends(items)

    return alternatives(tree)


def _sequence(items: Any, pattern: str, spell: Spelling) -> Expression:
    parts = [_item(op, argument, pattern, spell) for op, argument in items]
    return sequence(*parts) if parts else EMPTY


def _item(op: Any, argument: Any, pattern: str, spell: Spelling) -> Expression:
    if op is codes.LITERAL:
        return spell(((argument, argument),))
    if op is codes.NOT_LITERAL:
        return spell(without(((argument, argument),)))
    if op is codes.ANY:
        return spell(ANY)
    if op is codes.IN:
        return spell(_set(argument, pattern))
    if op in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        least, most, part = argument
        if op is codes.POSSESSIVE_REPEAT:
            raise ValueError(f"regex {pattern!r}: possessive repetitions are not supported")
        return Repeat(_sequence(part, pattern, spell), least, None if most is codes.MAXREPEAT else most)
    if op is codes.SUBPATTERN:
        _, added, removed, part = argument
        if added or removed:
            raise ValueError(f"regex {pattern!r}: flags are not supported")
        return _sequence(part, pattern, spell)
    if op is codes.BRANCH:
        return choice(*(_sequence(option, pattern, spell) for option in argument[1]))
    raise ValueError(f"regex {pattern!r}: {str(op).lower().replace('_', ' ')} is not supported here")


def _set(items: Any, pattern: str) -> Ranges:
    ranges: list[tuple[int, int]] = []
    is_negated = False
    for op, argument in items:
        if op is codes.NEGATE:
            is_negated = True
        elif op is codes.LITERAL:
            ranges.append((argument, argument))
        elif op is codes.RANGE:
            ranges.append((argument[0], min(argument[1], LAST_CODE_POINT)))
        elif op is codes.CATEGORY and argument in _CATEGORIES:
            ranges += _CATEGORIES[argument]
        else:
            raise ValueError(f"regex {pattern!r}: {str(argument).lower()} is not supported")
    return character_set(ranges, is_negated)
