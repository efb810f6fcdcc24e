"""Regular expressions in two dialects, against Python's and Node's own, and formats of strings."""

import json
import re

import pytest

from jlade import Grammar
from jlade.constraints import automaton, regex
from jlade.constraints.formats import FORMATS
from tests.stress import patterns

# Patterns of JSON Schema, with texts that have a match and texts that have none.
SEARCHED = [
    ("^(foo|bar)", ["foox", "bar"], ["xfoo"]),
    ("(foo)$", ["xfoo"], ["foox"]),
    ("^([A-Z]{2})", ["AB1"], ["1AB"]),
    (r"(\.png)$", ["a.png"], ["a.pngx"]),
    ("^(?P<n>a)", ["ab"], ["ba"]),
    ("^(a$)", ["a"], ["ba", "ab"]),
    ("^(a|b$)", ["ax", "b"], ["xa", "bx"]),
    ("^(a)|b", ["ax", "xb"], ["xa"]),
    ("(?:^(a|b))", ["a", "bx"], ["xa"]),
    ("^$|^[a-z]+$", ["", "ab"], ["1", "a1"]),
    ("^a$|^ab$", ["a", "ab"], ["abc", "b"]),
    ("a|a$", ["ab", "ba"], ["b"]),
    ("^(?:a|b$)", ["ax", "b"], ["bx"]),
    ("a(?:$|b)", ["xa", "abx"], ["ac"]),
    ("(?:^a|b){2}$", ["ab", "bb", "xbb"], ["ba", "aa"]),
    ("(?:a$|b)*c", ["bbc", "xc"], ["a"]),
    ("a^b|$^|c", ["", "xc"], ["ab", "a"]),
    (r"^\S$", ["a", "\x85", "é"], [*"\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff \n", "ab"]),
    (r"^\s$", ["\xa0", "\ufeff", "\u2029", "\v"], ["\x1c", "\x85", "\u180e", "a"]),
    ("^.$", ["a", "\x85", "😀"], ["\r", "\n", "\u2028", "\u2029"]),
    ("a$", ["a"], ["a\n"]),
    (r"^\d\w$", ["1a"], ["٣a", "1é"]),
    (r"^(?:\ud83d\ude00|\u{1F601}|a)$", ["😀", "😁", "a"], ["😂", "\ude00"]),
    (r"^[\ud83d\ude00-\u{1F602}]$", ["😀", "😂"], ["😃"]),
    (r"^\ud83d|^[\udc00-\udfff]", [], ["😀", "a"]),
    (r"^(?:[^]|\cA{2}|\0\x61|[]|[\b-\n])$", ["\n", "\x01\x01", "\0a"], ["", "ab"]),
    (r"^[\w-.]+\-\_\@\/\"{}]$", ['a-.-_@/"{}]'], ["+-_@/{}]"]),
    (r"^\p{Zs}|[^\P{Zl}\n]$|\p{gc=Letter_Number}", [" a", "x\u2028", "aⅫ"], ["\n", "a 1"]),
    (r"^\p{Lu}$", ["É"], ["é", "1"]),
    (r"(?i:k\u017F)$", ["KS", "\u212as"], ["k"]),
    (r"^(?i:a(?-i:b)c)(?s:.)(?m:$\n^)d", ["AbC\n\nd"], ["ABC\n\nd", "abcx d"]),
    (r"\bfoo\b|^\Bx", ["a foo.", "foo"], ["foods", "x"]),
    (r"^(?=.*[a-z])(?=.*\d).{3,}$", ["a-1", "12x4"], ["a1", "abc", "a1\n"]),
    (r"^(?!.*\.\.|-)[a-z.-]+$", ["a.b-.", "b"], ["a..b", "-a", ""]),
    (r"^P(?:\d+W|(?!.*W)(?=\d|T\d)(?:\d+D)?(?:T(?=\d)(?:\d+H)?)?)$", ["P1W", "P1D", "PT2H"], ["P", "P1DT", "P1D1W"]),
    (r"a(?!b)|(?=c)(?!cd).e|^(?=.*\bx\b)y", ["aba", "ce", "y x"], ["ab", "cd", "de", "yx", "y"]),
    (r"(?!)|^(?=(?!ab)a)", ["ac"], ["ab", "b", ""]),
]  # fmt: skip
# Patterns of whole texts, of which Python says what matches.
WHOLE = [
    ("(?s)a.b", ["a\nb", "ab"]),
    ("(?x)a b", ["ab", "a b"]),
    ("(?i)[a-c]k[^q]|é", ["BKx", "bkQ", "É", "b\u212ax"]),
    ("(?i:a)b(?-i:c)", ["Ab", "Abc", "ABc"]),
    ("(?m)a$\n^b", ["a\nb", "ab"]),
    ("a$\n?", ["a", "a\n", "a\n\n"]),
    (r"a\Z\n?", ["a", "a\n"]),
    (r"a$\n$\n?|^b|\Ac^", ["a\n", "a\n\n", "b", "c"]),
    (r"\B|x\B\W?|\bé\b|z", ["", "x", "x-", "é", "z"]),
    (r"^[a-z]{2,500}$", ["a", "ab"]),
    (r"(?P<n>[^\W\d])\s\S", ["a\x1cb", "a\xa0b", "a \xa0"]),
]


def accepts(schema, text):
    return Grammar.json_schema(schema).accepts(json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(("pattern", "right", "wrong"), SEARCHED)
def test_a_pattern_of_json_schema(pattern, right, wrong):
    schema = {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "null"}]}
    names = Grammar.json_schema({"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False})
    for text in [*right, *wrong]:
        assert accepts(schema, text) == (text in right), text
        assert names.accepts(json.dumps({text: 1}, ensure_ascii=False)) == (text in right), text


@pytest.mark.parametrize(("pattern", "texts"), WHOLE)
def test_a_pattern_of_whole_texts(pattern, texts):
    for text in texts:
        assert Grammar.regex(pattern).accepts(text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


@pytest.mark.parametrize("dialect", patterns.dialects(), ids=lambda each: type(each).__name__)
def test_random_patterns(dialect):
    counts, differences = patterns.compare(dialect, 75, seed=3)
    assert not differences
    assert counts["held"] >= 72


@pytest.mark.parametrize("pattern", ["^[a-z]{2,500}$", "^(?:x[ab]{2,500}$|y)", "(?s)^.{0,500}", "a|b{8,90}$"])
def test_repetitions_beside_anchors_are_counted(pattern):
    found = automaton.build(regex.parse(pattern), counts=True)
    assert found.bounds is not None
    assert len(found.is_final) < 20


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?:(?=a)a)?" * 7, "look-ahead in 128 combinations of alternatives is not supported"),
        ("(?:a(?=b))*", "a look-ahead that is repeated is not supported"),
        (r"\b(?=a)", "a look-ahead after $, \\b or \\B is not supported"),
        ("(?<!a)b", "look-behind (?<! is not supported at position 0"),
        (r"(a)\1", r"back reference \1 is not supported at position 3"),
        (r"(?<n>a)\k<n>", r"back reference \k<n> is not supported at position 7"),
        (r"\p{Script=Greek}", "the property 'Script=Greek' is not supported at position 0"),
        (r"\Aab", r"\A is no escape of ECMA-262 with the flag u at position 0"),
        ("(?i)a", "unknown group (?i at position 0"),
        ("(?ii:a)", "flags occur twice in (?ii: at position 0"),
        ("(?-:a)", "(?-: has no flags at position 0"),
        ("(?<1>a)", "'1' is no name of a group"),
        ("(?<a>a)(?<a>b)", "'a' is no name of a group, or that of two at position 7"),
        ("a**", "nothing to repeat at position 2"),
        ("^*", "nothing to repeat at position 1"),
        ("{2}", "nothing to repeat at position 0"),
        ("a{3,2}", "{3,2}: numbers out of order at position 1"),
        ("[b-a]", "range b-a out of order at position 1"),
        ("[a", "missing ] of the class at position 0"),
        ("[a-", "missing ] of the class at position 0"),
        ("(a", "missing ) of the group at position 0"),
        ("a)", "unmatched ) at position 1"),
        (r"\u{110000}", r"\u{110000} is above 10FFFF at position 0"),
        ("a\\", "\\ is no escape"),
        ("(" * 5000, "recursion"),
    ],
)
def test_what_json_schema_cannot_have_is_named(pattern, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        regex.search(pattern)
    assert str(caught.value).startswith(f"regex {pattern!r}: ")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", "look-ahead (?= is not supported"),
        ("(?<!a)b", "look-behind (?<! is not supported"),
        (r"(a)\1", r"back reference \1 is not supported"),
        ("(?>a)", "atomic group (?> is not supported"),
        ("a++", "possessive quantifier is not supported"),
        ("(a)(?(1)b|c)", "conditional (?( is not supported"),
        (r"(?u:\w)", "the flag (?u: is not supported"),
        ("(", "missing ), unterminated subpattern at position 0"),
    ],
)
def test_what_whole_texts_cannot_have_is_named(pattern, message):
    with pytest.raises(ValueError, match=re.escape(f"regex {pattern!r}: {message}")):
        Grammar.regex(pattern)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("hostname", ["a" * 28 + ".b-c.de", "localhost"], ["a" * 64, "a." * 127 + "a", "-a", "a-", "a..b", ""]),
        ("email", ["first.last+tag@mail.example.com"], ["a@" + "b" * 64, "a" * 65 + "@b", "a..b@c", ".a@b", "a@b..c"]),
        ("uri", ["http://a:80/", "http://u:p@[::1]:8/a?b#c", "mailto:a@b", "a:"],
         ["http://a:b/", "http://a:80b/", "http://[::1/", "http://a@b@c/", "/a", "a:%zz", "a:b#c#d"]),
        ("uri-reference", ["a/b:c", "", "//h:1/", "?q", "#f", "../a"], ["1a:b", "a b", "#a#b"]),
        ("uri-template", ["http://x/{id}", "/a{?q,r*}{+p:3}", "a%20b", ""], ["{", "a b", "{a", "%2", "{a-b}"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["", "01", "/a", "-1"]),
        ("idn-email", ["a@b.c"], ["a"]),
        ("iri", ["http://a/b"], ["x"]),
        ("ipv6", ["::ffff:1.2.3.4", "1:2:3:4:5:6:7.8.9.0", "::", "1:2:3:4:5:6:7::"],
         ["1.2.3.4", "::1.2.3", "1:2:3:4:5:6:7:1.2.3.4"]),
    ],
)  # fmt: skip
def test_formats(name, right, wrong):
    schema = {"type": "string", "format": name}
    assert [text for text in [*right, *wrong] if accepts(schema, text)] == right
    assert len(Grammar.json_schema(schema).automaton.is_final) < {"ipv6": 160}.get(name, 60)


def test_a_format_of_expressions_is_an_annotation():
    assert "regex" not in FORMATS
    assert accepts({"type": "string", "format": "regex"}, "(")


def test_grammars_accept_whole_texts():
    grammar = Grammar.json_schema({"type": "object", "properties": {"é": {"type": "integer"}}})
    texts = ['{"é": 1}', "{}", '{"é": 1', '{"é": "1"}', ""]
    assert [grammar.accepts(text) for text in texts] == [True, True, False, False, False]
    assert not Grammar.regex(".*").accepts("\ud800"), "half of a pair has no bytes"
