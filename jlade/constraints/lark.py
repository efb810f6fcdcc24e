"""Grammars in Lark's notation, as Lark, llguidance and OpenAI's custom tools have them; see `jlade.constraints.rules`.

A terminal may end wherever its texts do, as with Lark's lexer `dynamic_complete`; it need not be as long as possible.
What `%ignore` names may follow each terminal of a rule. Priorities, aliases and the marks `?` and `!` of rules choose
between trees of a text, and have no effect here.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jlade.constraints import regex, special
from jlade.constraints.automaton import (
    EMPTY,
    Automaton,
    Byte,
    Expression,
    Network,
    Repeat,
    build,
    characters,
    choice,
    difference,
    literal,
    optional,
    replaced,
    sequence,
)
from jlade.constraints.json_document import ESCAPES
from jlade.constraints.moves import DEAD
from jlade.constraints.rules import DEPTH, Name, Node, Parser, automaton_of, error_at

OfJson = Callable[[Any], Expression]
START = "start"
_IGNORED: Node = Name("%ignore")  # what may follow a terminal
# Blanks, lines and comments before "|" belong to the alternative that follows.
_TOKEN = re.compile(
    r"""(?P<space>(?>(?:\s|//[^\n]*+|\#[^\n]*+)++)(?=\|)|[^\S\n]+|//[^\n]*|\#[^\n]*)"""
    r"""|(?P<line>\n(?:\s|//[^\n]*+|\#[^\n]*+)*+)"""
    r"""|(?P<object>%(?:json|regex|llguidance)\s*(?=\{))|(?P<directive>%[a-z]+)|(?P<name>[A-Za-z_](?:\w|-(?!>))*)"""
    r"""|(?P<text>"(?P<content>(?:[^"\\\n]|\\.)*)"(?P<fold>i)?)"""
    r"""|(?P<regex>/(?P<pattern>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*))|(?P<special><[^<>\s]+>)"""
    r"""|(?P<count>(?:~[ ]*(?=\d)|(?P<brace>\{)[ ]*(?=[\d,]))(?P<minimum>\d*)"""
    r"""(?P<comma>[ ]*(?:\.\.|,)[ ]*(?P<maximum>\d*))?(?(brace)[ ]*\}))"""
    r"""|(?P<number>\.?-?\d[\d.]*)|(?P<sign>->|\.\.|[][()|*+?!:.,=&~@{}])|(?P<end>\Z)"""
)
_UNSUPPORTED = {
    "&": "intersections (&)",
    "~": "complements (~)",
    "@": "other grammars (@)",
    "{": "templates",
}
_NUMBER = r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+)"
_FLOAT = r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)"
# The terminals of Lark's grammar "common", as regular expressions.
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": rf"[+-]?{_FLOAT}",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": rf"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}


def parse(text: str, of_json: OfJson, depth: int = DEPTH, counts: bool = False) -> Automaton:
    """Returns the texts of the rule "start", or of the first one if there is no such rule.

    Args:
      text: rules `name: expression` and terminals `NAME: expression`. An expression has texts `"a"` and `"a"i`, ranges
        `"a".."z"`, regular expressions `/a/imsx` of Python's `re`, names, parentheses, brackets around what may be left
        out, `|`, and `*`, `+`, `?`, `~2`, `~2..4` or `{2,4}` after a part; in rules also `%json {...}` and special
        tokens `<name>`. A rule of a terminal may have the attributes `[capture, lazy, suffix="a"]` of llguidance.
      of_json: returns the texts of a JSON schema: `jlade.constraints.json_schema.parse`.
      depth: how often a rule may be within itself, where this is no loop.
      counts: as of `jlade.constraints.automaton.build`.

    Raises:
      ValueError: names the line and what is expected or not supported there, a rule that is missing, or a rule without
        texts.
    """
    try:
        rules = _Parser(text, _tokens(text), of_json).rules()
        first = START if START in rules else next(iter(rules))
        if first == _IGNORED.name:
            raise ValueError("lark: there are no rules")
        return automaton_of("lark", rules, first, depth, counts)
    except RecursionError as error:
        raise ValueError("lark: parentheses, terminals or rules are too many within each other") from error


def in_json(text: str, of_json: OfJson) -> Automaton:
    """Returns the texts of `parse` as they are spelled in a string of JSON, each character in its usual way."""
    texts = parse(text, of_json)
    if (texts.next_state[:, texts.class_of_byte[special.BYTE]] != DEAD).any():
        raise ValueError("lark: special tokens are not supported within a string")
    end = len(texts.is_final)
    moves: list[tuple[int, Expression | None, int]] = [
        (state, None, end) for state in np.flatnonzero(texts.is_final).tolist()
    ]
    for state, after in enumerate(texts.next_state[:, texts.class_of_byte]):
        for other in np.unique(after[after != DEAD]).tolist():
            read = set(np.flatnonzero(after == other).tolist())
            escapes = [literal(ESCAPES[byte]) for byte in sorted(read & ESCAPES.keys())]
            as_they_are = Byte(sum(1 << byte for byte in read - ESCAPES.keys()))
            moves.append((state, choice(as_they_are, *escapes), other))
    return build(Network(end + 1, tuple(moves)))


class _Parser(Parser):
    """Reads the rules and terminals of a text, each as a node."""

    notation = "lark"
    escapes = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"} | {each: each for each in "\\\"'/"}

    def __init__(self, text: str, tokens: Iterator[re.Match[str]], of_json: OfJson) -> None:
        super().__init__(text, tokens)
        self._of_json = of_json

    def rules(self) -> dict[str, Node]:
        self.named, self.ignored = dict[str, Node](), list[Node]()
        self.shortest: list[str] = []  # rules of which the shortest texts count
        self.is_rule = False  # whether what is read is a rule, in which ignored texts may follow terminals
        while (token := self.token).lastgroup != "end":
            if token.lastgroup in ("directive", "object"):
                self.index += 1
                self._directive(token)
            elif token.lastgroup != "line":
                self._rule()
            if self.token.lastgroup not in ("line", "end"):
                raise self.error("the end of the line")
            self.index += self.token.lastgroup == "line"
        self.named[_IGNORED.name] = Repeat(choice(*self.ignored), 0, None) if self.ignored else EMPTY
        self.check_references(self.named)
        self.named |= {name: sequence(self._shortest(self.named[name]), _IGNORED) for name in self.shortest}
        return self.named

    def option(self) -> Node:
        option = super().option()
        if self.is_sign("->"):
            self.take("name", "the name of an alternative")
        return option

    def part(self) -> Node | None:
        token = self.token
        if token.lastgroup in ("text", "regex", "special", "object") or _is_terminal(token):
            self.index += 1
            terminal = self._terminal(token)
            return sequence(terminal, _IGNORED) if self.is_rule else terminal
        if token.lastgroup == "name":
            if not self.is_rule:
                raise self.wrong(token, f"a terminal cannot have the rule {token[0]!r}")
            self.index += 1
            return self.reference(token)
        if token[0] in _UNSUPPORTED:
            raise self._unsupported(token, _UNSUPPORTED[token[0]])
        if self.is_sign("("):
            return self.within(")")
        return optional(self.within("]")) if self.is_sign("[") else None

    def _rule(self) -> None:
        while self.is_sign("?") or self.is_sign("!"):
            pass
        name = self.take("name", "the name of a rule")
        if self.token[0] == "{":
            raise self._unsupported(self.token, _UNSUPPORTED["{"])
        self.index += self.token.lastgroup == "number"  # its priority
        attributes = self._attributes() if self.is_sign("[") else {}
        if not self.is_sign(":"):
            raise self.error("':'")
        is_shortest = not attributes.keys().isdisjoint(("lazy", "suffix"))
        self.is_rule = not _is_terminal(name) and not is_shortest
        node = self.options()
        if is_shortest:
            self.shortest.append(name[0])
            node = sequence(node, attributes.get("suffix", EMPTY))
        self._add(name, node)

    def _add(self, name: re.Match[str], node: Node) -> None:
        if name[0] in self.named:
            raise self.wrong(name, f"there is a rule {name[0]!r} already")
        self.named[name[0]] = node

    def _attributes(self) -> dict[str, Node]:
        """Reads what stands in brackets after the name of a rule."""
        attributes: dict[str, Node] = {}
        while not self.is_sign("]"):
            name = self.take("name", "an attribute")
            if name[0] not in ("capture", "lazy", "suffix"):
                raise self._unsupported(name, f"the attribute {name[0]}")
            attributes[name[0]] = self.part() if self.is_sign("=") else EMPTY
            if self.token[0] != "]" and not self.is_sign(","):
                raise self.error("',' or ']'")
        return attributes

    def _shortest(self, node: Node) -> Automaton:
        """Returns those texts of a node without rules that do not begin with another one of it."""

        def of_leaf(leaf: Node) -> Expression:
            return replaced(self.named[leaf.name], of_leaf) if isinstance(leaf, Name) else leaf

        texts = replaced(node, of_leaf)
        return difference(texts, sequence(texts, Repeat(special.OTHERS, 1, None)))

    def _directive(self, token: re.Match[str]) -> None:
        self.is_rule = False
        match token[0].strip():
            case "%ignore":
                self.ignored.append(self.options())
            case "%import":
                self._import()
            case "%llguidance":
                for name in self._object(token):
                    raise self._unsupported(token, f"the option {name} of %llguidance")
            case directive:
                raise self._unsupported(token, directive)

    def _import(self) -> None:
        library = self.take("name", "the library common")
        if library[0] != "common":
            raise self._unsupported(library, f"the library {library[0]}")
        if self.is_sign("("):
            while not self.is_sign(")"):
                name = self.take("name", "the name of a terminal")
                self._add(name, self._common(name))
                self.is_sign(",")
        elif self.is_sign("."):
            name = self.take("name", "the name of a terminal")
            self._add(self.take("name", "a name") if self.is_sign("->") else name, self._common(name))
        else:
            raise self.error("'.' or '('")

    def _common(self, name: re.Match[str]) -> Expression:
        if name[0] not in COMMON:
            raise self._unsupported(name, f"common.{name[0]}")
        return regex.parse(COMMON[name[0]])

    def _terminal(self, token: re.Match[str]) -> Node:
        """Returns the texts of a token that has been taken."""
        match token.lastgroup:
            case "name":
                return self.reference(token)
            case "text" if self.is_sign(".."):
                ends = self._text(token), self._text(self.take("text", "a text"))
                if not len(ends[0]) == len(ends[1]) == 1 or ends[1] < ends[0]:
                    raise self.wrong(token, f"a range has two characters in order, got {ends[0]!r} and {ends[1]!r}")
                return characters(((ord(ends[0]), ord(ends[1])),))
            case "text":
                text = self._text(token)
                if not token["fold"]:
                    return literal(text)
                return sequence(*(choice(*map(literal, {c, c.lower(), c.upper()})) for c in text))
            case "regex":
                flags = f"(?{token['flags']})" if token["flags"] else ""
                try:
                    return regex.parse(flags + token["pattern"])
                except ValueError as error:
                    raise self.wrong(token, str(error)) from error
        if not self.is_rule:
            raise self.wrong(token, f"a terminal cannot have {token[0].strip()}")
        if token[0].startswith("<["):
            raise self._unsupported(token, "special tokens by their numbers")
        if token.lastgroup == "special":
            return literal(special.encode(special.special(token[0])))
        if token[0].strip() != "%json":
            raise self._unsupported(token, token[0].strip())
        try:
            return self._of_json(self._object(token))
        except ValueError as error:
            raise self.wrong(token, str(error)) from error

    def _text(self, token: re.Match[str]) -> str:
        return "".join(chr(code) for _, code in self.spelled(token, token["content"]))

    def _object(self, token: re.Match[str]) -> Any:
        """Returns the object in JSON after a token."""
        return _decoded(self.text, token)[0]

    def _unsupported(self, token: re.Match[str], name: str) -> ValueError:
        return self.wrong(token, f"not supported: {name}")


def _is_terminal(token: re.Match[str]) -> bool:
    return token.lastgroup == "name" and token[0].lstrip("_")[:1].isupper()


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """Yields the tokens of a grammar but blanks and lines within brackets, the last one of which is its end."""
    begin = depth = 0
    while True:
        token = _TOKEN.match(text, begin)
        if token is None:
            raise error_at("lark", text, begin, f"expected a part of a rule, got {text[begin : begin + 12]!r}")
        depth += (token[0] in ("(", "[")) - (token[0] in (")", "]"))
        if token.lastgroup != "space" and not (token.lastgroup == "line" and depth > 0):
            yield token
        if token.lastgroup == "end":
            return
        begin = _decoded(text, token)[1] if token.lastgroup == "object" else token.end()


def _decoded(text: str, token: re.Match[str]) -> tuple[Any, int]:
    """Returns the object in JSON after a token, and the position of its end."""
    try:
        return json.JSONDecoder().raw_decode(text, token.end())
    except ValueError as error:
        raise error_at("lark", text, token.start(), f"{token[0].strip()} has no object in JSON: {error}") from error
