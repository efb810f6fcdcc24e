"""Regular expressions as expressions over bytes, in two dialects."""

from collections.abc import Callable

from jlade.constraints import ecma, patterns, python_re
from jlade.constraints.automaton import Expression, characters
from jlade.constraints.patterns import ANY_TEXT, Concatenation, Spelling, Tree


def parse(pattern: str, spell: Spelling = characters) -> Expression:
    """Returns the texts that a regular expression of Python's `re` matches as a whole, with the flag ASCII.

    Args:
      pattern: the regular expression.
      spell: how a character of some ranges is written; in UTF-8 by default.

    Raises:
      ValueError: names the pattern, and what is wrong or not supported: look-around, references to groups, atomic
        groups and possessive quantifiers.
    """
    return patterns.expression(_tree(python_re.parse, pattern), spell)


def search(pattern: str, spell: Spelling = characters) -> Expression:
    """Returns the texts in which a regular expression of ECMA-262 with the flag u has a match.

    Args:
      pattern: the regular expression.
      spell: how a character of some ranges is written; in UTF-8 by default.

    Raises:
      ValueError: names the pattern, and what is wrong or not supported: look-around, references to groups, and
        properties of which Python has no exact data.
    """
    return patterns.expression(Concatenation((ANY_TEXT, _tree(ecma.parse, pattern), ANY_TEXT)), spell)


def _tree(parse: Callable[[str], Tree], pattern: str) -> Tree:
    try:
        return parse(pattern)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"regex {pattern!r}: {error}") from error
