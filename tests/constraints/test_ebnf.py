"""EBNF against a recognizer that follows the rules themselves, against `re` and `json`, and its errors."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jlade
from jlade.constraints import automaton, ebnf
from tests.constraints.expressions import TEXTS
from tests.constraints.grammars import COMMON
from tests.tiny import PAPER, tiny_llama

RULES = ("root", "x", "y")


def nodes():
    """Yields parts of rules: letters, rules, sequences, choices and repetitions."""
    leaves = st.sampled_from(["a", "b", *RULES]).map(lambda name: ("name" if name in RULES else "letter", name))
    several = st.sampled_from([(0, 1), (0, None), (1, None), (2, 2)])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda parts: ("sequence", *parts)),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: ("options", *options)),
            st.tuples(st.just("several"), inner, several),
        ),
        max_leaves=5,
    )


def written(node):
    match node:
        case ("letter", letter):
            return f'"{letter}"'
        case ("name", name):
            return name
        case ("sequence", *parts):
            return f"({' '.join(map(written, parts))})"
        case ("options", *options):
            return f"({' | '.join(map(written, options))})"
        case (_, part, (minimum, maximum)):
            count = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((minimum, maximum), f"{{{minimum},{maximum}}}")
            return written(part) + count


def ends_of(rules, text, depth):
    """Returns the ends of a rule's texts that begin at each place, with rules at most `depth` within each other."""
    found = {name: [set() for _ in range(len(text) + 1)] for name in rules}

    def ends(node, begin, below):
        match node:
            case ("letter", letter):
                return {begin + 1} if text[begin : begin + 1] == letter else set()
            case ("name", name):
                return below[name][begin]
            case ("sequence", *parts):
                reached = {begin}
                for part in parts:
                    reached = set().union(*(ends(part, each, below) for each in reached))
                return reached
            case ("options", *options):
                return set().union(*(ends(option, begin, below) for option in options))
            case (_, part, (minimum, maximum)):
                reached, total = {begin}, {begin} if minimum == 0 else set()
                for number in range(1, (len(text) + 2 if maximum is None else maximum) + 1):
                    reached = set().union(*(ends(part, each, below) for each in reached))
                    total |= reached if number >= minimum else set()
                return total

    for _ in range(depth + 1):
        found = {name: [ends(node, at, found) for at in range(len(text) + 1)] for name, node in rules.items()}
    return found


@settings(max_examples=150)
@given(st.tuples(nodes(), nodes(), nodes()))
def test_accepts_what_the_rules_derive(drawn):
    rules = dict(zip(RULES, drawn, strict=True))
    text = "\n".join(f"{name} ::= {written(node)}" for name, node in rules.items())
    try:
        found = automaton.build(ebnf.parse(text))
    except automaton.TooLargeError:
        return
    except ValueError:  # no text ends
        found = automaton.build(automaton.NOTHING)
    for each in TEXTS:
        accepted = found.accepts(each.encode())
        if accepted:
            assert len(each) in ends_of(rules, each, 40)["root"][0]
        elif len(each) in ends_of(rules, each, ebnf.DEPTH)["root"][0]:
            raise AssertionError(f"{each!r} is not accepted")


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "a" root | "b"', "a*b"),
        ('root ::= root "a" | "b"', "ba*"),
        ('root ::= x ("a" root)?\nx ::= "b"+ # some', "b+(ab+)*"),
        ('root ::= x | root "b" x\nx ::= "a"', "a(ba)*"),
        ('root ::= root "b" root | "a"', "a(ba)*"),
        ('root ::= "a" x | ""\nx ::= "b" root', "(ab)*"),
        ('root ::= x "b"\nx ::= root "a" | "a"', "a(ba)*b"),
        ("root ::= [^b] . [a-b]{2,}", "a.[ab]{2,}"),
        ('root ::= ( "a"\n | "b" ) {2}', "[ab]{2}"),
        ('root ::= "\\x61\\u0062" | [\\]\\-a]', "ab|a"),
    ],
)
def test_loops_have_any_length(grammar, pattern):
    found = automaton.build(ebnf.parse(grammar))
    for text in TEXTS:
        assert found.accepts(text.encode()) == bool(re.fullmatch(pattern, text)), text


JSON = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
"""


def test_json_is_followed_to_a_depth():
    found = automaton.build(ebnf.parse(JSON))
    for value in ([{"é": [-1.5e-07, None]}, "\\"], [[[1]]], [[[[1]]]], {"a": 0}):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert found.accepts(text.encode()) == (value != [[[[1]]]])
        assert not found.accepts(text[:-1].encode())


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= a", "line 1: there is no rule 'a'"),
        ('x ::= "a"', "the rule 'root' is missing; there are x"),
        ("", "the rule 'root' is missing; there are none"),
        ('root ::= "a', "line 1: expected a part of a rule, got '\"a'"),
        ('root ::=\n("a"', r"line 2: expected '\)', got the end"),
        ('root ::= "a" )', r"line 1: expected the name of a rule, got '\)'"),
        ('root "a"', "line 1: expected '::=', got '\"a\"'"),
        ('root ::= "a" root', "no text of the rule 'root' ends"),
        ('root ::= "a"{3,2}', "expected a count of at least 3, got '.3,2.'"),
        ('root ::= "\\q"', r"\\q is no known escape"),
        ('root ::= "a"\nroot ::= "b"', "line 2: expected another name than 'root'"),
        ("root ::= [z-a]", r"\[z-a\] has a range that ends before it begins"),
        (f"root ::= {'(' * 5000}", "parentheses or rules are too many within each other"),
        ("root ::= [\\uD800]", r"\\uD800 is no character"),
    ],
)
def test_errors_name_the_line(grammar, message):
    with pytest.raises(ValueError, match=f"^ebnf.*{message}"):
        jlade.Grammar.ebnf(grammar)


def test_a_generation_is_one_of_its_texts():
    grammar = jlade.Grammar.ebnf('root ::= ("ab" | "c") root | "é"')
    found = jlade.generate(tiny_llama(2), [0, 1], lookahead=PAPER, grammar=grammar, **COMMON)
    assert re.fullmatch("(ab|c)*é?", found.text[0])
    plain = jlade.generate(tiny_llama(2), [0, 1], lookahead=None, grammar=grammar, **COMMON)
    assert found.text == plain.text
