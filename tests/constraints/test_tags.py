"""Tagged parts: special tokens around them, and fields in plain text."""

import contextlib
import json
import random

import jsonschema
import numpy as np
import pytest

from jlade.constraints import automaton, plain, special
from jlade.constraints.grammar import Grammar
from jlade.constraints.tags import Field, Tags
from jlade.constraints.tokens import Trie
from jlade.generation import constraining
from jlade.generation.text import Detokenizer, decode, token_bytes
from tests.server.json_chat import EOS, TOKENIZER

V, CALLS = TOKENIZER.get_vocab_size(), TOKENIZER.token_to_id("[TOOL_CALLS]")
SPELLED = token_bytes(TOKENIZER)
MARKED = [token for token in range(V) if special.BYTE in SPELLED[token]]  # which no text in UTF-8 has
SPECIAL = [token for token in range(V) if not SPELLED[token]]
CALL = Tags(
    [("f", {"type": "object"}, "")], opening=special.special("[TOOL_CALLS]"), triggers=[special.special("[TOOL_CALLS]")]
)


def table_of(grammar):
    return constraining.table_of(grammar, SPELLED, [EOS], V)


def test_a_special_token_is_where_the_grammar_has_it():
    table = table_of(Grammar.tags(CALL))
    may_begin = table.allowed(0)
    assert np.flatnonzero(~may_begin).tolist() == sorted({*SPECIAL, *MARKED} - {CALLS, EOS})
    called = table.advance(0, CALLS)
    assert np.flatnonzero(table.allowed(called)).tolist() == TOKENIZER.encode("f").ids
    assert table.likely[called] == TOKENIZER.token_to_id("f")
    state = 0
    for token in TOKENIZER.encode("ab [TOOL_").ids:  # the name alone is text
        state = table.advance(state, token)
    np.testing.assert_array_equal(table.allowed(state), may_begin)


def test_a_special_token_is_drafted():
    table, state = table_of(Grammar.tags(Tags([("a", {"const": 1}, special.special("[ARGS]"))]))), 0
    for token in TOKENIZER.encode("a1").ids:
        state = table.advance(state, token)
    assert table.likely[state] == TOKENIZER.token_to_id("[ARGS]")


@pytest.mark.parametrize(
    "grammar", [Grammar.regex(r"[^a]*(.|\n)*"), Grammar.json_schema({"type": ["string", "object"]})]
)
def test_no_other_grammar_has_special_tokens(grammar):
    table = table_of(grammar)
    is_allowed = np.any([table.allowed(state) for state in range(table.num_states)], axis=0)
    assert not is_allowed[sorted({*SPECIAL, *MARKED} - {EOS})].any()


def test_text_with_special_tokens():
    ids = [*TOKENIZER.encode("é[TOOL_CALLS]f").ids, MARKED[0], TOKENIZER.encode("é").ids[0], CALLS]
    shown, text = Detokenizer(TOKENIZER, with_special=True), ""
    for token in ids:
        text += shown.feed([token])
    text += shown.feed([], last=True)
    mark = special.special("[TOOL_CALLS]")
    assert text == f"é{mark}f\ufffd{mark}"
    assert special.encode(text) == "é".encode() + special.encode(mark) + "f\ufffd".encode() + special.encode(mark)
    assert decode(TOKENIZER, ids) == "éf\ufffd\ufffd"


END = "\n</p>\n<"
VALUES = [
    "",
    "a",
    "aa",
    "7",
    "07",
    "null",
    "true",
    '"a"',
    "a\nb\\",
    "é😀",
    "\n</p\n",
    "[1]",
    '["a"]',
    '{"a": 1}',
    "2024-02-29",
]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "minLength": 1, "maxLength": 2},
        {"type": "string", "pattern": r"^[\w\\\n]+$"},
        {"type": "string", "format": "date"},
        {"enum": ["a\nb\\", "é😀", 7, None]},
        {"type": "integer"},
        {"type": ["string", "null"], "maxLength": 1},
        {
            "anyOf": [{"$ref": "#/$defs/short"}, {"type": "boolean"}],
            "$defs": {"short": {"type": "string", "maxLength": 1}},
        },
        {"type": "array", "items": {"type": "string"}},
        True,
    ],
)
def test_values_in_plain_text(schema):
    found, in_json = plain.parse(schema, END), Grammar.json_schema(json.dumps(schema)).automaton
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for text in VALUES:
        readings = [text]
        with contextlib.suppress(ValueError):
            readings += [value for value in [json.loads(text)] if not isinstance(value, str)]
        is_valid = any(map(validator.is_valid, readings))
        assert found.accepts((text + END).encode()) is is_valid, text
        if is_valid:
            read = json.loads(plain.to_json(text, in_json))
            assert validator.is_valid(read)
            assert read in readings
            assert isinstance(read, str) or not plain.are_strings(in_json)
    assert not found.accepts(("a" + END + "b" + END).encode())
    assert not found.accepts(("\n</p>" + END).encode()), "a value has not the tag of its end"


@pytest.mark.parametrize(
    "lengths", [{"maxLength": 9}, {"minLength": 2, "maxLength": 12}, {"minLength": 9}, {"maxLength": 3}]
)
def test_characters_before_an_end_are_counted(lengths):
    texts = plain.parse({"type": "string"} | lengths, "\n</p>\n")
    automata, rng = [automaton.build(texts, counts) for counts in (True, False)], random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["a", "é", "😀", "\n", "<", "</", "</p", "p>", "</p>"], k=rng.randrange(10)))
        value = text.removesuffix("\n")
        is_right = lengths.get("minLength", 0) <= len(value) <= lengths.get("maxLength", 99) and "</p>" not in value
        for each in automata:
            assert each.accepts(f"{text}</p>\n".encode()) is is_right, text


def test_counts_of_fields_take_no_states():
    fields = [Field(f"<{name}>\n", {"type": "string", "maxLength": 1000}, "\n</p>\n", False) for name in "abc"]
    grammar = Grammar.tags(Tags([("<f>", fields, "</f>")], triggers=["<f>"]))
    assert len(grammar.automaton.is_final) < 200
    tokens = [bytes([byte]) for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
    assert Trie(tokens).may_count(grammar.automaton, []), "no character has other bytes"
    assert not Trie(tokens[:-4]).may_count(grammar.automaton, [])


def test_fields():
    fields = [Field("a=", {"type": "string"}, ";", True), Field("b=", {"enum": ["x", "y;"]}, ";", False)]
    found = Grammar.tags(Tags([("f(", fields, ")")])).automaton
    for text, is_accepted in (("f(a=1;)", True), ("f(a=;b=x;)", True), ("f(b=x;)", False), ("f(a=1;b=y;;)", False)):
        assert found.accepts(text.encode()) is is_accepted, text
    with pytest.raises(ValueError, match=r"of the tag 'f\(': the schema accepts no value without ';'"):
        Grammar.tags(Tags([("f(", [Field("b=", {"enum": ["y;"]}, ";", False)], ")")]))


def test_blocks_may_be_limited():
    tags = [("<", {"const": 1}, ">")]
    for maximum, is_accepted in ((None, True), (2, True), (1, False)):
        found = Grammar.tags(Tags(tags, triggers=["<"], maximum=maximum)).automaton
        assert found.accepts(b"a<1>b<1>c") is is_accepted
        assert found.accepts(b"a<1>b")
