"""Grammars in EBNF, as llama.cpp (GBNF) and XGrammar write them; see `jlade.constraints.rules`."""

import re
from collections.abc import Iterator

from jlade.constraints.automaton import Automaton, Expression, characters, literal
from jlade.constraints.code_points import ALL, character_set
from jlade.constraints.rules import DEPTH, Node, Parser, automaton_of, error_at

ROOT = "root"
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<is>::=)|(?P<name>[A-Za-z_][\w.-]*)|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<set>\[(?:[^\]\\\n]|\\.)*\])|(?P<count>\{\s*(?P<minimum>\d+)\s*(?P<comma>,\s*(?P<maximum>\d*)\s*)?\})"""
    r"""|(?P<sign>[()|*+?.])|(?P<end>\Z)"""
)


def parse(text: str, depth: int = DEPTH, counts: bool = False) -> Automaton:
    """Returns the texts of the rule "root".

    Args:
      text: rules `name ::= expression`. An expression has texts in double quotes, sets of characters `[a-z]` and
        `[^a-z]`, `.` for any character, names of rules, parentheses, `|`, and `*`, `+`, `?`, `{2}`, `{2,}` or `{2,4}`
        after a part. Comments begin with `#`.
      depth: how often a rule may be within itself, where this is no loop.
      counts: as of `jlade.constraints.automaton.build`.

    Raises:
      ValueError: names the line and what is expected there, a rule that is missing, or a rule without texts.
    """
    try:
        return automaton_of("ebnf", _Parser(text, _tokens(text)).rules(), ROOT, depth, counts)
    except RecursionError as error:
        raise ValueError("ebnf: parentheses or rules are too many within each other") from error


class _Parser(Parser):
    """Reads the rules of a text, each as a node."""

    notation = "ebnf"
    escapes = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in "\\\"'[]^-"}

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self.token.lastgroup != "end":
            name = self.take("name", "the name of a rule")[0]
            if name in rules:
                raise self.error(f"another name than {name!r}, which is a rule already", -1)
            self.take("is", "'::='")
            rules[name] = self.options()
        self.check_references(rules)
        return rules

    def part(self) -> Node | None:
        token = self.token
        if token.lastgroup == "name" and self.tokens[self.index + 1].lastgroup == "is":
            return None
        if token.lastgroup in ("name", "text", "set"):
            self.index += 1
        match token.lastgroup:
            case "name":
                return self.reference(token)
            case "text":
                return literal("".join(chr(code) for _, code in self.spelled(token, token[0][1:-1])))
            case "set":
                return self._set(token)
        if self.is_sign("."):
            return characters(ALL)
        return self.within(")") if self.is_sign("(") else None

    def _set(self, token: re.Match[str]) -> Expression:
        content = token[0][1:-1]
        is_negated = content.startswith("^")
        spelled = list(self.spelled(token, content[is_negated:]))
        ranges, index = list[tuple[int, int]](), 0
        while index < len(spelled):
            first = last = spelled[index][1]
            if index + 2 < len(spelled) and spelled[index + 1][0] == "-":
                last = spelled[index + 2][1]
                index += 2
            if last < first:
                raise self.wrong(token, f"{token[0]} has a range that ends before it begins")
            ranges.append((first, last))
            index += 1
        return characters(character_set(ranges, is_negated))


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """Yields the tokens of a grammar, the last one of which is its end."""
    begin = 0
    while True:
        token = _TOKEN.match(text, begin)
        if token is None:
            got = text[begin : begin + 12]
            raise error_at("ebnf", text, begin, f"expected a part of a rule, got {got!r}")
        if token.lastgroup != "space":
            yield token
        if token.lastgroup == "end":
            return
        begin = token.end()
