"""Masks of tables over a vocabulary of byte-level BPE against those of llguidance, along random texts."""

import json
import re
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jlade.constraints import automaton, json_schema, regex
from jlade.constraints.tokens import Table, Trie
from jlade.generation.text import token_bytes
from tests.constraints.strategies import patterns, schemas

CORPUS = [
    '{"name": "ab", "size": 12, "tags": ["a", "b", "café"], "ok": true, "no": null}',
    '{"a":1,"b":false,"c":[1,2.5,-10e3],"d":{"x":"y z"}}',
    '{\n  "date": "2024-02-29",\n  "items": [\n    1,\n    20,\n    300\n  ]\n}',
    'abc abd (é|ü) 😀 x-1 a.b 100 1000 0.25 \\n \\" \\u001f',
]


def trained():
    """Returns a tokenizer of all bytes and of a hundred longer tokens, many across the parts of JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["</s>"],
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZER = trained()
V, EOS = TOKENIZER.get_vocab_size(), TOKENIZER.token_to_id("</s>")
TOKENS = [token_bytes(TOKENIZER)[token] for token in range(V)]
TRIE = Trie(TOKENS)
OTHER_TOKENIZER = LLTokenizer(TOKENIZER.to_str(), eos_token=EOS)
BETWEEN = [token for token in range(V) if TOKENS[token][:1] in (b'"', b",", b":", b"]", b"}")]  # parts of JSON

NO_MORE = {"additionalProperties": False}  # which jlade adds where a schema says nothing
RAW = {"json_allow_general_unicode_escapes": True}  # as jlade allows them in strings without any limit


def other_grammar(rule):
    """Returns a grammar of llguidance. It would else ban all spellings of a text that must come but one."""
    return LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\nstart: ' + rule)


class Walk:
    """A text that grows in both libraries, and where their masks differ."""

    def __init__(self, table, grammar):
        self.table, self.state, self.text = table, 0, b""
        self.other = LLMatcher(OTHER_TOKENIZER, grammar, log_level=0)
        assert not self.other.is_error(), self.other.get_error()

    def masks(self):
        bits = np.frombuffer(self.other.compute_bitmask(), np.uint8)
        return self.table.allowed(self.state), np.unpackbits(bits, bitorder="little")[:V].astype(bool)

    def differences(self):
        """Yields who allows a token, and the text with it."""
        ours, other = self.masks()
        for token in np.flatnonzero(ours != other):
            yield "jlade" if ours[token] else "llguidance", self.text + TOKENS[token]

    def advance(self, token):
        self.state, self.text = self.table.advance(self.state, token), self.text + TOKENS[token]
        assert self.other.consume_token(int(token))


def differences(expression, grammar, texts=()):
    """Yields the differences along random texts, which both allow, and along given ones, byte by byte."""
    table = Table.of(automaton.build(expression, counts=True), TRIE, [EOS], V)
    for seed in range(12):
        walk, rng = Walk(table, grammar), np.random.default_rng(seed)
        for _ in range(40):
            yield from walk.differences()
            both = np.flatnonzero(np.logical_and(*walk.masks()))
            parts = np.intersect1d(both, BETWEEN)  # else strings would seldom end
            token = rng.choice(parts if len(parts) and rng.random() < 0.4 else both)
            if token == EOS:
                break
            walk.advance(token)
    for text in texts:
        walk = Walk(table, grammar)
        for byte in text.encode():
            yield from walk.differences()
            walk.advance(TOKENS.index(bytes([byte])))
        yield from walk.differences()


# Numbers that a double may not hold: of more than 20 digits, or on the way there, or of more than two in the exponent.
LARGE = rb"(?<![.0-9])[0-9]{20}|[eE][+-]?[0-9]{3}"


def schema_differences(schema, texts=(), **options):
    """Yields the differences of a schema without whitespace, and with it, which is bounded, those of jlade alone.

    Large numbers, which llguidance allows, are left out.
    """
    for whitespace in (False, True):
        guidance = {"x-guidance": {"whitespace_flexible": whitespace, **options}}
        grammar = other_grammar(f"%json {json.dumps(schema | guidance)}")
        for allowed_by, text in differences(json_schema.parse(schema, whitespace=whitespace), grammar, texts):
            if allowed_by == "jlade" or not (whitespace or re.search(LARGE, text)):
                yield allowed_by, text


@pytest.mark.parametrize(
    "pattern",
    [
        "abc|abd*",
        "(ab|ba){2,3}c?",
        r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
        "[^a-c]*",
        "(é|ü|[à-æ])+x",
        "[😀-😎]{1,2}",
        "[^😀é]+",
        r"[\s\S]{2,5}x",
        "[ -~]{3,12}",
        r"(?:[a-z]|\\.){2,9}(?:,[0-9]{8})*",
        "(?:a{2,9}b|😀){8,10}",
        r".[ \n].",
        r'(?:\\.|[^"\\])*',
        "(a|b)*a(a|b){6}",
        r"([a-z]+ ){2,4}\.",
        "",
    ],
)
def test_regexes_have_the_masks_of_llguidance(pattern):
    assert not list(differences(regex.parse(pattern), other_grammar(f"/{pattern}/")))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
        {"type": "number", "minimum": 0.5, "maximum": 10},
        {"type": "integer", "multipleOf": 7},
        {"type": ["number", "null", "boolean"]},
        {"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"},
        {"type": "string", "format": "uuid"},
        {"enum": ['a"b', 1, None, {"x": [1, 2]}, "é", -0.5]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        {"type": "array", "items": {"enum": [0, 10, "a"]}, "minItems": 3, "maxItems": 9},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": {"const": 0}, "maxItems": 4},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y z"]},
         "c": {"type": "boolean"}}, "required": ["b"], **NO_MORE},
        {"type": "object", "properties": {"a": {"type": "integer"}},
         "patternProperties": {"^[a-z]{1,3}$": {"type": "null"}}, **NO_MORE},
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}},
                   {"type": "object", "properties": {"a": {"type": "null"}}, **NO_MORE}]},
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}, k: {"type": "integer"}},
                    "required": ["k", k], **NO_MORE} for k in "ab"]},
        {"allOf": [{"type": "object", "properties": {"a": {"minimum": 2}, "c": {}}, "required": ["a"], **NO_MORE},
                   {"properties": {"a": {"type": "integer"}, "c": {"type": "null"}}, **NO_MORE}]},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_schemas_have_the_masks_of_llguidance(schema):
    assert not list(schema_differences(schema))


class Difference(NamedTuple):
    """A choice in which the libraries differ."""

    allowed_by: str
    in_text: bytes  # a regular expression that finds it in a text


DIFFERENCES = {
    # RFC 8259 lets U+007F stand in a string as it is. llguidance wants it escaped.
    "delete": Difference("jlade", rb"\x7f"),
    # RFC 8259 has the escape "\/". llguidance leaves it out.
    "solidus": Difference("jlade", rb"\\/$"),
    # Strings with limits have one spelling in jlade: the short escape where there is one, and U+007F as it is.
    "long escape": Difference("llguidance", rb"\\u(00(0[89aAcCdD]|7)|(00)?$)"),
    # Zero may have a sign in JSON. llguidance never writes it next to a bound.
    "negative zero": Difference("jlade", rb"-0?[\s,\]}]*$"),
    # llguidance misses 2.2 below an exclusive bound of 2.25, and at some bounds zeros at the end of a fraction.
    "missed number": Difference("jlade", rb"^2\.2$"),
    "zeros": Difference("jlade", rb"\.([0-9]*0)?$"),
    # 29 February in each year, and a year 0, which `datetime.date` and the validator refuse.
    "no such day": Difference("llguidance", rb'^"0000$|-02-29$'),
    # RFC 3339 has a second 60 in a leap second, which the validator refuses.
    "leap second": Difference("llguidance", rb":[0-9]{2}:6$"),
    # An IPv6 address may end in an IPv4 address. llguidance leaves it out.
    "IPv4 in IPv6": Difference("jlade", rb"\."),
    # A reference goes as deep as jlade's `DEPTH`.
    "depth": Difference("llguidance", rb'("next".*){2}"n"[^}]*,'),
}
TREE = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("names", "schema", "options", "texts"),
    [
        (["delete", "solidus"], {"type": "string"}, RAW, ['"\\u00', '"\\ud83d\\ude']),
        (["delete", "long escape"], {"type": "string", "maxLength": 4}, {}, ['"\\u00', '"\\u001']),
        (["delete", "long escape"], {"type": "string", "minLength": 3, "maxLength": 12}, {}, ['"\\u00', '"\\u001']),
        (["delete", "long escape"], {"type": "object", "additionalProperties": {"type": "null"}}, {}, ['{"\\u000']),
        (["long escape"], {"enum": ["é\n"]}, {}, []),
        (["negative zero"], {"type": "number", "minimum": 0}, {}, []),
        (["negative zero"], {"type": "integer", "maximum": 3}, {}, ["-"]),
        (["missed number"], {"type": "number", "minimum": 1, "exclusiveMaximum": 2.25}, {}, ["2.2"]),
        (["zeros"], {"type": "number", "minimum": 109, "maximum": 109}, {}, ["109"]),
        (["zeros"], {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, {}, ["1.100"]),
        (["no such day"], {"type": "string", "format": "date"}, {}, ['"000', '"1900-02-2']),
        (["leap second"], {"type": "string", "format": "time"}, {}, ['"23:59:']),
        (["IPv4 in IPv6"], {"type": "string", "format": "ipv6"}, {}, ['"::1']),
        (["depth"], {"$ref": "#/$defs/tree", "$defs": {"tree": TREE | NO_MORE}}, {}, []),
    ],
    ids=str,
)
def test_other_masks_differ_by_named_choices_alone(names, schema, options, texts):
    found = {explained(names, *each) for each in schema_differences(schema, texts, **options)}
    assert found == set(names)


def explained(names, allowed_by, text):
    """Returns which of some differences one is."""
    found = [
        name for name in names
        if DIFFERENCES[name].allowed_by == allowed_by and re.search(DIFFERENCES[name].in_text, text, re.DOTALL)
    ]  # fmt: skip
    assert len(found) == 1, (allowed_by, text)
    return found[0]


@settings(max_examples=60)
@given(patterns())
def test_random_regexes_have_the_masks_of_llguidance(pattern):
    assert not list(differences(regex.parse(pattern), other_grammar(f"/{pattern}/")))


@settings(max_examples=60)
@given(schemas())
def test_random_schemas_have_the_masks_of_llguidance(schema):
    for each in schema_differences(schema):
        explained(["negative zero"], *each)
