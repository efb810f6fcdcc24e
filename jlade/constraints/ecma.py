"""Regular expressions of ECMA-262 with the flag u, as JSON Schema has them, as trees.

What the flag forbids and Annex B allows with one meaning is read too: escapes such as `\\-`, brackets and braces that
stand for themselves, and classes such as `[\\w-.]`. So is the named group of other dialects, `(?P<name>...)`.
"""

import re
from typing import NamedTuple, NoReturn

from jlade.constraints import code_points, patterns
from jlade.constraints.automaton import Repeat, choice, sequence
from jlade.constraints.code_points import LAST_CODE_POINT, Ranges, character_set, union, without
from jlade.constraints.patterns import Characters, LookAhead, Tree

DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
SPACE: Ranges = union([*without(((0x85, 0x85), *without(code_points.WHITE_SPACE))), (0xFEFF, 0xFEFF)])
_CONTROLS = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_LOOK = re.compile(r"\(\?(?P<behind><)?(?P<sign>[=!])")
_GROUP = re.compile(r"\((?:\?(?:P?<(?P<name>[^>]*)>|(?P<added>[ims]*)(?P<minus>-?)(?P<removed>[ims]*):))?")
_QUANTIFIER = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<minimum>[0-9]+)(?P<comma>,(?P<maximum>[0-9]*))?\})\??")
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_REFERENCE = re.compile(r"\\(?:[1-9][0-9]*|k<[^>]*>)")
_ESCAPE = re.compile(
    r"""\\(?: (?P<set>[dDsSwW]) | (?P<sign>[pP])\{(?P<property>[^}]*)\} | (?P<control>[fnrtv]) | c(?P<letter>[A-Za-z])
        | (?P<null>0)(?![0-9]) | u(?P<high>[Dd][89ABab][0-9A-Fa-f]{2})\\u(?P<low>[Dd][C-Fc-f][0-9A-Fa-f]{2})
        | x(?P<byte>[0-9A-Fa-f]{2}) | u(?P<unit>[0-9A-Fa-f]{4}) | u\{(?P<code>[0-9A-Fa-f]+)\}
        | (?P<itself>[^A-Za-z0-9]) )""",
    re.VERBOSE | re.DOTALL,
)


class _Flags(NamedTuple):
    i: bool = False  # whether case is ignored
    m: bool = False  # whether "^" and "$" are at the ends of lines too
    s: bool = False  # whether "." may be the end of a line


def parse(pattern: str) -> Tree:
    """Returns the tree of a regular expression.

    Raises:
      ValueError: names what is wrong or not supported, and where.
    """
    parser = _Parser(pattern)
    tree = parser.alternation()
    if parser.position < len(pattern):
        parser.fail("unmatched )")
    return tree


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.position = pattern, 0
        self.flags, self.names = _Flags(), set[str]()

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        raise ValueError(f"{message} at position {self.position if position is None else position}")

    def takes(self, text: str) -> bool:
        """Whether a text comes next, which is then read."""
        is_next = self.pattern.startswith(text, self.position)
        self.position += len(text) * is_next
        return is_next

    def match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        """Returns the match of an expression that comes next, which is then read."""
        match = expression.match(self.pattern, self.position)
        self.position = match.end() if match else self.position
        return match

    def alternation(self) -> Tree:
        options = [self.concatenation()]
        while self.takes("|"):
            options.append(self.concatenation())
        return choice(*options)

    def concatenation(self) -> Tree:
        parts = []
        while self.position < len(self.pattern) and self.pattern[self.position] not in "|)":
            parts.append(self.assertion() or self.repetition())
        return sequence(*parts)

    def assertion(self) -> Tree | None:
        begin = self.position
        if look := self.match(_LOOK):
            if look["behind"]:
                self.fail(f"look-behind {look[0]} is not supported", begin)
            return LookAhead(self.grouped(begin), look["sign"] == "!")
        word, line_ends = self.folded(WORD), LINE_ENDS if self.flags.m else ()
        if self.takes("^"):
            return patterns.begin(line_ends)
        if self.takes("$"):
            return patterns.end(line_ends)
        if self.takes(r"\b"):
            return patterns.boundary(word)
        return patterns.no_boundary(word) if self.takes(r"\B") else None

    def repetition(self) -> Tree:
        atom, begin = self.atom(), self.position
        if not (count := self.match(_QUANTIFIER)):
            return atom
        minimum, maximum = _SIGNS.get(count["sign"]) or (int(count["minimum"]), int(count["maximum"] or 0))
        if not count["sign"] and not count["maximum"]:
            maximum = None if count["comma"] else minimum
        if maximum is not None and maximum < minimum:
            self.fail(f"{count[0]}: numbers out of order", begin)
        return Repeat(atom, minimum, maximum)

    def atom(self) -> Tree:
        if _QUANTIFIER.match(self.pattern, self.position):
            self.fail("nothing to repeat")
        if self.pattern[self.position] == "(":
            return self.group()
        if self.takes("."):
            return Characters(without(() if self.flags.s else LINE_ENDS))
        if self.takes("["):
            return Characters(self.character_class())
        character = self.character(is_in_class=False)
        return Characters(character_set(self.folded(_ranges(character)), is_negated=False))

    def group(self) -> Tree:
        begin, flags = self.position, self.flags
        group = self.match(_GROUP)
        assert group
        if group[0] == "(" and self.takes("?"):
            self.fail(f"unknown group {self.pattern[begin : self.position + 1]}", begin)
        if (name := group["name"]) is not None:
            if not name.replace("$", "_").isidentifier() or name in self.names:
                self.fail(f"{name!r} is no name of a group, or that of two", begin)
            self.names.add(name)
        elif changed := (group["added"] or "") + (group["removed"] or ""):
            if len({*changed}) < len(changed):
                self.fail(f"flags occur twice in {group[0]}", begin)
            self.flags = flags._replace(**{flag: flag in group["added"] for flag in changed})
        elif group["minus"]:
            self.fail(f"{group[0]} has no flags", begin)
        tree = self.grouped(begin)
        self.flags = flags
        return tree

    def grouped(self, begin: int) -> Tree:
        """Returns what is within a group that begins somewhere, up to its end."""
        tree = self.alternation()
        if not self.takes(")"):
            self.fail("missing ) of the group", begin)
        return tree

    def character_class(self) -> Ranges:
        """Returns the characters of a class whose "[" has been read."""
        begin, is_negated = self.position - 1, self.takes("^")
        ranges: list[tuple[int, int]] = []
        while not self.takes("]"):
            if self.position == len(self.pattern):
                self.fail("missing ] of the class", begin)
            position, first = self.position, self.character(is_in_class=True)
            if self.pattern.startswith("-]", self.position) or not self.takes("-"):
                ranges += _ranges(first)
                continue
            if self.position == len(self.pattern):
                self.fail("missing ] of the class", begin)
            last = self.character(is_in_class=True)
            if not isinstance(first, int) or not isinstance(last, int):
                ranges += [*_ranges(first), (ord("-"), ord("-")), *_ranges(last)]
            elif last < first:
                self.fail(f"range {self.pattern[position : self.position]} out of order", position)
            else:
                ranges.append((first, last))
        return character_set(self.folded(union(ranges)), is_negated)

    def character(self, is_in_class: bool) -> int | Ranges:
        """Returns the code point of a character, or the ranges of an escape that stands for several."""
        begin = self.position
        if not self.pattern.startswith("\\", begin):
            self.position += 1
            return ord(self.pattern[begin])
        if is_in_class and self.takes(r"\b"):
            return 8
        if not is_in_class and (reference := self.match(_REFERENCE)):
            self.fail(f"back reference {reference[0]} is not supported", begin)
        if not (escape := self.match(_ESCAPE)):
            self.fail(f"{self.pattern[begin : begin + 2]} is no escape of ECMA-262 with the flag u", begin)
        text = escape[escape.lastgroup or 0]
        match escape.lastgroup:
            case "set":
                ranges = {"d": DIGIT, "s": SPACE, "w": self.folded(WORD)}[text.lower()]
                return without(ranges) if text.isupper() else ranges
            case "property":
                try:
                    ranges = code_points.property_of(text)
                except ValueError as error:
                    self.fail(str(error), begin)
                return without(ranges) if escape["sign"] == "P" else ranges
            case "control":
                return _CONTROLS[text]
            case "letter":
                return ord(text) % 32
            case "null":
                return 0
            case "low":
                return 0x10000 + (int(escape["high"], 16) - 0xD800) * 0x400 + int(text, 16) - 0xDC00
            case "itself":
                return ord(text)
        if (code := int(text, 16)) > LAST_CODE_POINT:
            self.fail(f"{escape[0]} is above 10FFFF", begin)
        return code

    def folded(self, ranges: Ranges) -> Ranges:
        return code_points.folded(ranges) if self.flags.i else ranges


def _ranges(character: int | Ranges) -> Ranges:
    return ((character, character),) if isinstance(character, int) else character
