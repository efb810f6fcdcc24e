"""Sets of code points, and Unicode's properties and case folding, as far as Python's data has them exactly."""

import functools
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Mapping

LAST_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]  # of code points, sorted and apart


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the ranges of code points that are in one of several."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def without(ranges: Ranges) -> Ranges:
    """Returns the code points of characters that are in none of some ranges."""
    left, begin = [], 0
    for first, last in union([*ranges, SURROGATES]):
        if begin < first:
            left.append((begin, first - 1))
        begin = last + 1
    return (*left, (begin, LAST_CODE_POINT)) if begin <= LAST_CODE_POINT else tuple(left)


def common(first: Ranges, second: Ranges) -> Ranges:
    """Returns the code points of characters that are in ranges of both."""
    return without(union([*without(first), *without(second)]))


def character_set(ranges: Iterable[tuple[int, int]], is_negated: bool) -> Ranges:
    """Returns the code points of characters that are in one of some ranges, or in none of them."""
    rest = without(union(ranges))
    return rest if is_negated else without(rest)


ALL = without(())
_CATEGORIES = {
    "Lu": "Uppercase_Letter", "Ll": "Lowercase_Letter", "Lt": "Titlecase_Letter", "LC": "Cased_Letter",
    "Lm": "Modifier_Letter", "Lo": "Other_Letter", "L": "Letter", "Mn": "Nonspacing_Mark", "Mc": "Spacing_Mark",
    "Me": "Enclosing_Mark", "M": "Mark Combining_Mark", "Nd": "Decimal_Number digit", "Nl": "Letter_Number",
    "No": "Other_Number", "N": "Number", "Pc": "Connector_Punctuation", "Pd": "Dash_Punctuation",
    "Ps": "Open_Punctuation", "Pe": "Close_Punctuation", "Pi": "Initial_Punctuation", "Pf": "Final_Punctuation",
    "Po": "Other_Punctuation", "P": "Punctuation punct", "Sm": "Math_Symbol", "Sc": "Currency_Symbol",
    "Sk": "Modifier_Symbol", "So": "Other_Symbol", "S": "Symbol", "Zs": "Space_Separator", "Zl": "Line_Separator",
    "Zp": "Paragraph_Separator", "Z": "Separator", "Cc": "Control cntrl", "Cf": "Format", "Co": "Private_Use",
    "Cn": "Unassigned", "C": "Other", "Cs": "Surrogate",
}  # fmt: skip
_CATEGORY = {name: short for short, names in _CATEGORIES.items() for name in (short, *names.split())}
WHITE_SPACE: Ranges = (
    (9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_RANGES: dict[str, Ranges] = {
    "Any": ALL, "ASCII": ((0, 127),), "White_Space": WHITE_SPACE, "space": WHITE_SPACE,
}  # fmt: skip
_TESTS: dict[str, Callable[[str], bool]] = {
    "Lowercase": str.islower, "Lower": str.islower, "Uppercase": str.isupper, "Upper": str.isupper
}  # fmt: skip
_FOLDED = {"\ufb05": "\ufb06", "\u1fd3": "\u0390", "\u1fe3": "\u03b0"}  # letters that differ in their codes alone


@functools.lru_cache(maxsize=64)
def property_of(name: str) -> Ranges:
    """Returns the characters with a property, as ECMA-262 names it between `\\p{` and `}`.

    Raises:
      ValueError: Python has no exact data of this property.
    """
    key, _, value = name.rpartition("=")
    if key in ("", "General_Category", "gc") and (short := _CATEGORY.get(value)):
        categories = ("Lu", "Ll", "Lt") if short == "LC" else short
        chosen = (ranges for name, ranges in _of_categories().items() if name.startswith(categories))
        return union(itertools.chain(*chosen))
    if name == "Assigned":
        return without(property_of("Cn"))
    if name in _TESTS:
        return union((code, code) for code in range(LAST_CODE_POINT + 1) if _TESTS[name](chr(code)))
    if name in _RANGES:
        return _RANGES[name]
    raise ValueError(f"the property {name!r} is not supported")


@functools.cache
def _of_categories() -> Mapping[str, Ranges]:
    ranges_of: dict[str, list[tuple[int, int]]] = {}
    for category, codes in itertools.groupby(range(LAST_CODE_POINT + 1), lambda code: unicodedata.category(chr(code))):
        run = list(codes)
        ranges_of.setdefault(category, []).append((run[0], run[-1]))
    return {category: union(ranges) for category, ranges in ranges_of.items()}


def folded(ranges: Ranges) -> Ranges:
    """Returns the characters that are in some ranges but for their case, by Unicode's simple case folding."""
    others = (alike for alike in _alike() if any(first <= code <= last for code in alike for first, last in ranges))
    return union([*ranges, *((code, code) for alike in others for code in alike)])


@functools.cache
def _alike() -> Iterable[tuple[int, ...]]:
    """Returns the sets of characters that differ in case alone."""
    alike: dict[str, list[int]] = {}
    for code in range(0x20000):  # no letters after these have a case
        if (other := _fold(chr(code))) != chr(code):
            alike.setdefault(other, [ord(other)]).append(code)
    return tuple(map(tuple, alike.values()))


def _fold(character: str) -> str:
    """Returns the simple case folding of a character; Python has the full one."""
    whole, lower = character.casefold(), character.lower()
    if len(whole) == 1:
        return whole
    return _FOLDED.get(character, lower if len(lower) == 1 else character)
