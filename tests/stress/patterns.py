"""Random regular expressions: what grammars accept, against what Python and JavaScript match.

    python -m tests.stress.patterns --patterns 5000

Each pattern has anchors, alternatives, classes, counts and flags at any depth, and 50 texts that match it, nearly match
it or do not. `Grammar.regex` is compared with `re.fullmatch`, and `pattern` of JSON Schema with
`RegExp(pattern, "u")` in a process of Node. Refused patterns are counted by the reason. The characters are older
than Unicode 14, so that no version knows more of them.
"""

import argparse
import collections
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from jlade import Grammar
from jlade.constraints.moves import DEAD

TEXTS = 50  # of each pattern
MAX_CHARACTERS = 8  # of a text: Python and Node try all ways to match
ALPHABET = "aaaabbbbAB1_- \n\n\r\té\xa0\u2028\u017f\u212aß\u03a3\u03c3\u03c2😀\x00\x08\ufeff"
ATOMS = (
    ".", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[ab]", "[^a]", r"[a-c\n]", r"[^\s\w]", "[B-Za-]", "[^_é😀]",
    r"\x61", r"\u00e9", r"[\b]", "[A-b]",
)  # fmt: skip
ASSERTIONS = ("^", "$", "^", "$", r"\b", r"\B")
COUNTS = ("*", "+", "?", "*?", "{2}", "{0,2}", "{1,}", "{0}")
JAVASCRIPT = """
const found = JSON.parse(require("fs").readFileSync(0)).map(([pattern, flags, texts]) => {
  try {
    // V8 also looks for a match within a pair of surrogates: without "y", /\\B/u matches "a😀a".
    const expression = new RegExp(pattern, "uy" + flags);
    const matchesAt = (text, place) => { expression.lastIndex = place; return expression.test(text); };
    return texts.map(text => {
      const places = [0];
      for (const character of text) places.push(places.at(-1) + character.length);
      return places.some(place => matchesAt(text, place));
    });
  } catch (error) { return String(error); }
});
console.log(JSON.stringify(found));
"""


class Case(NamedTuple):
    """A pattern, and texts to match."""

    pattern: str
    flags: str
    texts: list[str]


Found = list[bool] | str  # whether each text matches, or what is wrong with the pattern


class Python:
    """`Grammar.regex`, against Python."""

    atoms = ATOMS
    assertions = (*ASSERTIONS, r"\A", r"\Z")
    groups = ("(", "(?:", "(?P<{}>", "(?i:", "(?s:", "(?m:", "(?-i:", "(?x: ", "(?ims:", "(?s-m:")
    refused = ("(?=a)", "(?<!a)", "(?>a)", "a++")
    quote = ""

    def spell(self, character: str) -> str:
        return character

    def grammar(self, pattern: str, flags: str) -> Grammar:
        return Grammar.regex(f"(?{flags}){pattern}" if flags else pattern)

    def matches(self, cases: list[Case]) -> list[Found]:
        return [self._matches(*case) for case in cases]

    def _matches(self, pattern: str, flags: str, texts: list[str]) -> Found:
        try:
            expression = re.compile(f"(?{flags}){pattern}" if flags else pattern, re.ASCII)
        except re.error as error:
            return str(error)
        return [bool(expression.fullmatch(text)) for text in texts]


class JavaScript:
    """`pattern` of JSON Schema, against Node, which does not know the flags of groups yet."""

    atoms = (
        *ATOMS, *ATOMS, r"\ud83d\ude00", r"\u{1F600}", r"\cJ", "[^]", "[]", r"\p{L}", r"\P{Lu}", r"\p{Lowercase}",
        r"\0", r"[\p{Ll}\-\]]", r"[^\W\p{Nd}]", r"[^\P{Lu}]",
    )  # fmt: skip
    assertions = ASSERTIONS
    groups = ("(", "(?:", "(?<{}>")
    refused = ("(?:(?=a))*", "(?<!a)", r"(a)\1", r"\p{Script=Greek}")
    quote = '"'

    def spell(self, character: str) -> str:
        return json.dumps(character, ensure_ascii=False)[1:-1]

    def grammar(self, pattern: str, flags: str) -> Grammar:
        own = {"type": "string", "pattern": f"(?{flags}:{pattern})" if flags else pattern}
        return Grammar.json_schema({"anyOf": [own, {"type": "null"}]})  # some value, if no string matches

    def matches(self, cases: list[Case]) -> list[Found]:
        given = json.dumps(cases).encode()
        done = subprocess.run(["node", "-e", JAVASCRIPT], input=given, stdout=subprocess.PIPE, check=True)
        found: list[Found] = json.loads(done.stdout)
        return found


class Difference(NamedTuple):
    """A text that one side matches, or a pattern that it takes as wrong."""

    pattern: str
    flags: str
    text: str | None
    reason: bool | str  # whether the other side matches the text, or what is wrong with the pattern


def main() -> None:
    """Reads the options, and prints the counts and the differences of each dialect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=int, default=5000, metavar="N", help="of each dialect")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    is_different = False
    for dialect in dialects():
        counts, differences = compare(dialect, options.patterns, options.seed)
        print(type(dialect).__name__, dict(counts.most_common()), len(differences), "differences")
        for each in differences[:20]:
            print(" ", each)
        is_different |= bool(differences)
    sys.exit(is_different)


def dialects() -> list[Python | JavaScript]:
    """Returns the dialects that this machine can compare."""
    return [Python(), JavaScript()] if shutil.which("node") else [Python()]


def compare(
    dialect: Python | JavaScript, num_patterns: int, seed: int
) -> tuple[collections.Counter[str], list[Difference]]:
    """Returns the numbers of patterns that are held and refused and of texts, and the differences."""
    cases, ours = list[Case](), list[Found]()
    for number in range(num_patterns):
        rng = random.Random(f"{seed} {number}")
        pattern = _pattern(rng, dialect, 3)
        pattern = f"^(?:{pattern})$" if rng.random() < 0.3 else pattern
        case = Case(pattern, "".join(rng.sample("ims", rng.choice([0, 0, 0, 1, 2]))), [])
        try:
            grammar = dialect.grammar(pattern, case.flags)
        except ValueError as error:
            reason = re.sub(r".*(?:'|\"): | at position \d+.*", "", str(error), flags=re.DOTALL)
            if reason.endswith("has no text"):
                case.texts.extend(_random_text(rng) for _ in range(TEXTS))
                ours.append([False] * TEXTS)
            else:
                ours.append(reason)
        else:
            case.texts.extend(_texts(rng, dialect, grammar))
            quoted = [dialect.quote + "".join(map(dialect.spell, text)) + dialect.quote for text in case.texts]
            ours.append(list(map(grammar.accepts, quoted)))
        cases.append(case)

    counts, differences = collections.Counter[str](), list[Difference]()
    for case, own, theirs in zip(cases, ours, dialect.matches(cases), strict=True):
        counts[f"refused: {own}" if isinstance(own, str) else "held"] += 1
        if isinstance(own, str) and (isinstance(theirs, str) or re.search("not supported|more than .* states", own)):
            continue
        if isinstance(own, str) or isinstance(theirs, str):
            reason = own if isinstance(own, str) else str(theirs)
            differences.append(Difference(case.pattern, case.flags, None, reason))
            continue
        counts["texts that match"] += sum(theirs)
        counts["texts that do not match"] += len(theirs) - sum(theirs)
        for text, is_ours, is_theirs in zip(case.texts, own, theirs, strict=True):
            if is_ours != is_theirs:
                differences.append(Difference(case.pattern, case.flags, text, is_theirs))
    return counts, differences


def _pattern(rng: random.Random, dialect: Python | JavaScript, depth: int) -> str:
    options = range(rng.choice([1, 1, 1, 2, 3]))
    return "|".join("".join(_term(rng, dialect, depth) for _ in range(rng.randrange(4))) for _ in options)


def _term(rng: random.Random, dialect: Python | JavaScript, depth: int) -> str:
    chance = rng.random()
    if chance < 0.002:
        return rng.choice(dialect.refused)
    if chance < 0.2:
        return rng.choice(dialect.assertions)
    if chance < 0.45 and depth:
        begin = rng.choice(dialect.groups).format(f"g{rng.randrange(10**9)}")
        atom = begin + _pattern(rng, dialect, depth - 1) + ")"
    elif chance < 0.7:
        atom = rng.choice(ALPHABET)
    else:
        atom = rng.choice(dialect.atoms)
        if rng.random() < 0.05:
            return atom + "{2,9}"  # which is counted
    return atom + (rng.choice(COUNTS) if rng.random() < 0.35 else "")


def _texts(rng: random.Random, dialect: Python | JavaScript, grammar: Grammar) -> Iterator[str]:
    """Yields `TEXTS` texts: of the automaton, others that differ in a character, and any."""
    for _ in range(TEXTS // 5):
        text = _walked(rng, dialect, grammar)
        place = rng.randrange(len(text) + 1)
        yield text
        yield text[:place] + rng.choice(ALPHABET) + text[place:]
        yield text[:place] + text[place + 1 :]
        yield text[:place] + rng.choice(ALPHABET) + text[place + 1 :]
        yield _random_text(rng)


def _random_text(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randrange(MAX_CHARACTERS)))


def _walked(rng: random.Random, dialect: Python | JavaScript, grammar: Grammar) -> str:
    """Returns a text that the automaton accepts, or the beginning of one."""
    automaton, text = grammar.automaton, ""
    state = automaton.run(dialect.quote.encode())
    while state != DEAD and len(text) < MAX_CHARACTERS:
        end = automaton.run(dialect.quote.encode(), state)
        if end != DEAD and automaton.ends(end) and rng.random() < 0.3:
            break
        after = {each: automaton.run(dialect.spell(each).encode(), state) for each in ALPHABET}
        if not (left := [each for each in ALPHABET if after[each] != DEAD]):
            break
        character = rng.choice(left)
        text, state = text + character, after[character]
    return text


if __name__ == "__main__":
    main()
