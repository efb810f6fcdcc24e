"""Grammars in Lark's notation against `re`, against llguidance along random texts, and their errors."""

import re

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

import jlade
from jlade.constraints import automaton, json_schema, lark
from jlade.constraints.moves import DEAD
from tests.constraints.expressions import TEXTS

APPLY_PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
SUMS = """
?start: sum
?sum: product | sum "+" product -> add
?product: atom
    | product "*" atom
?atom: NUMBER | "-" atom | NAME | "(" sum ")"
%import common.CNAME -> NAME
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
QUERY = """
start: SELECT columns " from " NAME [" where " NAME OP value]
columns: "*" | NAME ("," NAME)~0..2
value: SIGNED_INT | ESCAPED_STRING
OP: "=" | "<" | "<="
SELECT: "select"i " "
NAME: "a".."c" | /x[yz]/i
%import common (SIGNED_INT, ESCAPED_STRING)
"""
CALL = """%llguidance {}
start: thought "f(" %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]} ")"
thought[capture, suffix="</t>"]: /[a-z<>\\/]*/
"""


class Bytes:
    """A vocabulary of llguidance."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")

    def __call__(self, text):
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(grammar, text):
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return (
        matcher.validate_tokens(list(text)) == len(text)
        and matcher.consume_tokens(list(text))
        and matcher.is_accepting()
    )


def some_texts(found, rng):
    """Yields random texts of an automaton, and others that differ in a byte."""
    bytes_of = [np.flatnonzero(found.class_of_byte == each) for each in range(found.next_state.shape[1])]
    while True:
        state, text = 0, b""
        while len(text) < 60:
            moves = np.flatnonzero(found.next_state[state] != DEAD)
            if found.is_final[state] and (len(moves) == 0 or rng.random() < 0.3):
                yield text
                place = rng.integers(len(text))
                yield text[:place] + text[place + 1 :]
                yield text[:place] + text[place : place + 1] + text[place:]
                break
            chosen = rng.choice(moves)
            text += bytes([rng.choice(bytes_of[chosen])])
            state = found.next_state[state, chosen]


@pytest.mark.parametrize("grammar", [APPLY_PATCH, SUMS, QUERY, CALL], ids=["patch", "sums", "query", "call"])
def test_accepts_what_llguidance_accepts(grammar):
    found, rng = lark.parse(grammar, json_schema.parse), np.random.default_rng(0)
    outcomes = set()
    for _, text in zip(range(60), some_texts(found, rng), strict=False):
        outcomes.add(found.accepts(text))
        assert found.accepts(text) == accepts(grammar, text), text
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('start: /a+/ B~1..2\nB: "b"', "a+b{1,2}"),
        ('start: ["a" | "b"] "a"{2}', "[ab]?aa"),
        ('x: y ("b" x)?\n!y.-1: "A"i~2 -> z # of lines\n   | "c"', "(aa|c)(b(aa|c))*"),
        ('start: start "a" | "b"', "ba*"),
        ('start: a\na[lazy]: /.*ab/ "b"?', "((?!.*ab.).)*ab"),
        ('start: X "b"*\nX: _Y (\n "a".."b" )\n_Y: "" | "\\x61"', "a?[ab]b*"),
        ('start: "a" "a"\n%ignore /b+/', "ab*ab*"),
    ],
)
def test_notation(grammar, pattern):
    found = automaton.build(lark.parse(grammar, json_schema.parse))
    for text in TEXTS:
        assert found.accepts(text.encode()) == bool(re.fullmatch(pattern, text)), text


def test_brackets_are_followed_to_a_depth():
    found = lark.parse(SUMS, json_schema.parse)
    assert all(found.accepts(text) for text in (b"1 + (2 * (a + (b + 1)) + x)", b"1+" * 50 + b"1", b"-" * 50 + b"x"))
    assert not found.accepts(b"((((1))))")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: a", "line 1: there is no rule 'a'"),
        ("", "there are no rules"),
        ('start: "a"\nstart: "b"', "line 2: there is a rule 'start' already"),
        ('start: "a" )', r"line 1: expected the end of the line, got '\)'"),
        ('start: A\nA: b\nb: "x"', "line 2: a terminal cannot have the rule 'b'"),
        ("start: /(?=a)b/", "line 1: regex .*: look-ahead .* is not supported"),
        ('start: "z".."a"', "a range has two characters in order, got 'z' and 'a'"),
        ('start: %json {"type": 3}', "line 1: #/type: must be of null"),
        ("start: %json {", "line 1: %json has no object in JSON"),
        ('start: "a"{3,2}', "expected a count of at least 3"),
        ('start: "a" & "b"', r"line 1: not supported: intersections \(&\)"),
        ("start: <[12-14]>", "not supported: special tokens by their numbers"),
        ("sep{x}: x", "not supported: templates"),
        ('start[max_tokens=3]: "a"', "not supported: the attribute max_tokens"),
        ('start: "a"\n%declare X', "line 2: not supported: %declare"),
        ("%import python.NAME", "not supported: the library python"),
        ('%llguidance {"no_forcing": true}', "not supported: the option no_forcing of %llguidance"),
    ],
)
def test_errors_name_the_line(grammar, message):
    with pytest.raises(ValueError, match=f"^lark.*{message}"):
        jlade.Grammar.lark(grammar)


def test_special_tokens_have_no_characters():
    grammar = jlade.Grammar.lark("start: <|call|> TEXT?\nTEXT: /a+/")
    assert not grammar.accepts("<|call|>a")
    assert grammar.automaton.accepts(b"\xff<|call|>\xffaa")
