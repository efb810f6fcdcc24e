"""JSON Schema against an independent validator: texts of an automaton are valid, and instances are accepted or not."""

import functools
import ipaddress
import json
import random
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlade.constraints import automaton, json_schema
from jlade.constraints.json_document import UnsupportedError
from tests.stress import schemas

# Schemas, each with instances that it should accept and refuse.
OF_A = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_B = {"type": "object", "properties": {"b": {"type": "integer"}}}
CASES = [
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11], [-4, 12, 1.5, "1", None]),
    ({"type": "number", "minimum": 0.5, "maximum": 10}, [0.5, 1, 9.99, 10], [0.49, 10.01, -1, True]),
    ({"type": "integer", "multipleOf": 7}, [0, -14, 700], [1, 13]),
    ({"type": ["string", "null"], "minLength": 1, "maxLength": 3}, ["a", "é😀\n", None], ["", "abcd", 1]),
    ({"type": "string", "pattern": "^[a-z]+-\\d{2}$"}, ["ab-12"], ["ab-1", "AB-12", "xab-12x"]),
    ({"type": "string", "pattern": "a.b", "maxLength": 4}, ["axb", "axby"], ["ab", "axbyz"]),
    (
        {"type": "string", "pattern": "^[a-z]+@?[a-z]{2}$", "minLength": 5, "maxLength": 9},
        ["ab@cd", "abcdef@hi", "abcdefghi"],
        ["a@bc", "abcdefg@hi", "abcdefghij"],
    ),
    ({"type": "string", "format": "email", "maxLength": 12}, ["a@b.c", "abcdefgh@i.j"], ["abcdefghi@i.j", "a.b"]),
    (
        {"type": "array", "items": {"type": "string", "pattern": "^a", "maxLength": 9}, "minItems": 9},
        [["a" * 9] * 9],
        [["a"] * 8, ["a" * 10] * 9],
    ),
    (
        {"allOf": [{"type": "string", "pattern": "^[a-z]*$"}, {"pattern": "b.*c"}, {"pattern": "d", "maxLength": 9}]},
        ["bdc", "dabac"],
        ["bc", "bd", "bdC", "bbbbdccccc"],
    ),
    (
        {"allOf": [OF_A, OF_B], "anyOf": [OF_B, {"properties": {"c": {}}}], "unevaluatedProperties": False},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"c": None}],
        [{"d": 1}, {"a": 1, "d": 1}, {"a": "x"}],
    ),
    ({**OF_A, "allOf": [OF_B | {"unevaluatedProperties": False}]}, [{}, {"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
    ({"allOf": [OF_A], "unevaluatedProperties": OF_B}, [{"a": 1, "c": {"b": 2}}], [{"c": 1}, {"a": {}}]),
    (
        {"$ref": "node", "$defs": {"N": {"$id": "node", "items": {"$ref": "node"}, "type": "array"}}},
        [[], [[], [[]]]],
        [[1], {}],
    ),
    ({"type": "number", "multipleOf": 0.5, "minimum": 0}, [0, 0.5, 1.5, 20], [0.25, -0.5, "1"]),
    ({"type": "number", "multipleOf": 0.25, "exclusiveMaximum": 3}, [0.25, 2.75, -7], [0.1, 3]),
    ({"type": "number", "minimum": -1e308, "maximum": 1e308}, [0, -5.25, 10**19], ["a"]),
    ({"type": "string", "format": "of-my-own", "maxLength": 2}, ["", "ab"], ["abc", 1]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29"], ["2024-13-01", "2023-02-29", "1900-02-29"]),
    ({"enum": ["a\"b", 1, None, {"x": [1, 2]}]}, ['a"b', 1, None, {"x": [1, 2]}], ["a", 2, {"x": [1]}]),
    ({"const": False}, [False], [0, True, None]),
    ({"allOf": [{"enum": [1, False]}, {"enum": [True, False]}]}, [False], [1, True, 0]),
    (
        {"properties": {"a": {"enum": [0, 2]}}, "allOf": [{"properties": {"a": {"enum": [False, 2]}}}]},
        [{}, {"a": 2}],
        [{"a": 0}, {"a": False}],
    ),
    ({"anyOf": [{"const": 1}, {"const": True}], "not": {"const": True}}, [1], [True]),
    ({"oneOf": [{"const": 1}, {"const": True}]}, [1, True], [0]),
    ({"enum": [0.5, 2, 5.5], "minimum": 1}, [2, 5.5], [0.5]),
    ({"const": 1, "enum": [1, 2]}, [1], [2]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        [[1], [1, 2, 3]],
        [[], [1] * 4, ["1"]],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[], [1], [1, "a"]],
        [["a"], [1, "a", 2]],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        [{"b": "x"}, {"a": 1, "b": "x"}, {"b": "", "c": True}, {"a": 1, "b": "x", "c": False}],
        [{}, {"a": 1}, {"b": 1}, {"b": "x", "d": 1}],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        [{"x": 1}, {"x": 1, "y": 2}],
        [{}, {"x": "1"}, {"x": 1, "y": 2, "z": 3}],
    ),
    (
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        [{}, {"x-1": 2}, {"y": None}, {"x-1": 2, "y": None}],
        [{"x-1": None}, {"y": 1}],
    ),
    (
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 2}, "additionalProperties": True},
        [{"a": [1, {"b": None}]}, {"bc": 1}],
        [{"abc": 1}],
    ),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", 1.5]),
    (
        {"type": "object", "oneOf": [
            {"properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
            {"properties": {"k": {"const": "b"}, "w": {"type": "string"}}, "required": ["k", "w"]},
        ]},
        [{"k": "a", "v": 1}, {"k": "b", "w": "x"}],
        [{"k": "a", "w": "x"}, {"k": "c", "v": 1}, {"k": "a"}],
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
         "oneOf": [{"required": ["a", "b"]}, {"required": ["c"]}]},
        [{"a": 1, "b": 2}, {"c": 3}, {"a": 1, "c": 3}, {"b": 2, "c": 3}],
        [{}, {"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    (
        {"type": "object", "oneOf": [
            {"properties": {"a": {"const": 1}, "x": {}}, "required": ["a"]},
            {"properties": {"b": {"const": 2}, "x": {}}, "required": ["b"]},
        ]},
        [{"a": 1}, {"a": 1, "x": 3}, {"b": 2, "x": 3}],
        [{}, {"x": 3}, {"a": 1, "b": 2}],
    ),
    (
        {"type": "object", "allOf": [
            {"properties": {"a": {"minimum": 2}}, "required": ["a"]}, {"properties": {"a": {"type": "integer"}}},
        ]},
        [{"a": 2}, {"a": 30}],
        [{"a": 1}, {}],
    ),
    (
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"n": {"type": "integer"},
         "next": {"$ref": "#/$defs/tree"}}, "required": ["n"], "additionalProperties": False}}},
        [{"n": 1}, {"n": 1, "next": {"n": 2, "next": {"n": 3}}}],
        [{"next": {"n": 1}}, {"n": 1, "next": {}}],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {"const": 1}},
         "additionalProperties": False, "dependentRequired": {"a": ["b"], "c": ["a"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 1}],
        [{"a": 1}, {"c": 1}, {"b": 1, "c": 1}, {"a": 1, "c": 1}],
    ),
    (
        {"type": ["object", "null"], "properties": {"a": {}, "b": {"type": ["integer", "string"]}},
         "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}}},
        [{}, None, {"b": "x"}, {"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": "x"}, 3],
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{}, {"x": 1}, {"b": 1, "a": 2}], [{"a": 1}]),
    ({"type": ["integer", "string", "boolean"], "not": {"type": "string"}}, [1, True], ["a"]),
    (True, [1, "a", [None, {"a": [1]}], {}], []),
    # Open objects: what is declared may come later, too.
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "additionalProperties": True},
        [{"b": 1, "a": 2}, {"b": 1, "a1": "x", "a": 2}, {"c": 1, "b": 2, "a": 1}], [{"b": 1, "a": "x"}],
    ),
    # Values at hand are judged by the rest of their schema.
    ({"enum": [{"bar": 2}, {"foo": 1}, 3], "not": {"not": {"required": ["bar"]}}}, [{"bar": 2}, 3], [{"foo": 1}]),
    (
        {"allOf": [{"enum": [{"a": 21, "aa": 18}, {"a": 21, "aa": 21}]}, {"patternProperties": {"aa*": {"maximum": 21},
         "aaa*": {"maximum": 20}}}]},
        [{"a": 21, "aa": 18}], [{"a": 21, "aa": 21}, {"a": 21}],
    ),
    # Exclusion.
    ({"type": "string", "not": {"minLength": 2}}, ["", "a"], ["ab", 1]),
    ({"type": "string", "not": {"enum": ["a\u001f", "b"]}}, ["a", "ab", "c"], ["a\u001f", "b"]),
    ({"type": "string", "pattern": "^[ab]+$", "not": {"pattern": "^a"}}, ["b", "ba"], ["a", "ab"]),
    ({"type": ["integer", "null"], "not": {"minimum": 3}}, [2, -5], [3, 4, None]),
    ({"type": "integer", "not": {"enum": [1, 3]}}, [0, 2, 4], [1, 3]),
    ({"type": "object", "not": {"propertyNames": False}}, [{"a": 1}], [{}]),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}],
    ),
    (
        {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
         "not": {"properties": {"k": {"const": "x"}}, "required": ["k"]}},
        [{}, {"k": "y"}, {"n": 1}], [{"k": "x"}],
    ),
    ({"type": "array", "items": {"enum": [1, 2]}, "not": {"items": {"const": 1}}}, [[2], [1, 2]], [[], [1]]),
    ({"not": {"anyOf": [{"type": ["object", "array", "number", "null"]}, {"const": True}]}}, [False, "a"], [True, 1]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}], "type": ["integer", "string"]}, [1, 2, "a"], [3, 4, 1.5]),
    # Values of several options are excluded by `not` of none of them, and allowed by `not` of one of them.
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "not": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        [{}, {"a": 1, "b": 1}], [{"a": 1}, {"b": 1}],
    ),
    (
        {"type": ["integer", "string", "null"],
         "not": {"oneOf": [{"type": "integer"}, {"minimum": 3}, {"type": ["string", "integer"], "maximum": 10}]}},
        [0, 3, 11, "a"], [None],
    ),
    (
        {"oneOf": [{"type": "object", "properties": {name: {"type": "integer"}}, "additionalProperties": False}
         for name in "abc"]},
        [{"a": 1}, {"b": 1}, {"c": 1}], [{}, {"a": 1, "b": 1}, {"a": "x"}],
    ),
    (
        {"type": "object", "properties": {"country": {"enum": ["US", "NL"]}, "zip": {"type": "string"}},
         "required": ["country"], "if": {"properties": {"country": {"const": "US"}}}, "then": {"required": ["zip"]},
         "else": {"properties": {"zip": {"maxLength": 1}}}},
        [{"country": "US", "zip": "long"}, {"country": "NL"}, {"country": "NL", "zip": "a"}],
        [{"country": "US"}, {"country": "NL", "zip": "long"}],
    ),
    # Arrays.
    ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1},
     [["a"], ["b", "a", 1]], [[], ["a", "a"], ["a", "c"]]),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 3},
     [[5], [1, 9, 2]], [[], [1], [1, 2, 3, 5]]),
    # Names that several patterns match.
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 3}, ".*": {"maximum": 9}},
         "propertyNames": {"maxLength": 3}},
        [{"a": 1, "xb": 4, "ab": 5}, {"x": 9}], [{"ab": 2}, {"a": 1.5}, {"xb": 2}, {"x": 10}],
    ),
]  # fmt: skip


def accepts(schema, value, **options):
    text, parsed = json.dumps(value, ensure_ascii=False, **options).encode(), json_schema.parse(schema)
    found, counting = (automaton.build(parsed, counts).accepts(text) for counts in (False, True))
    assert found == counting
    return found


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=lambda each: None)
def test_instances(schema, right, wrong):
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for value in right:
        assert validator.is_valid(value)
        assert accepts(schema, value)
        assert accepts(schema, value, indent=2)
    for value in wrong:
        assert not validator.is_valid(value)
        assert not accepts(schema, value)


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=lambda each: None)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_texts_are_valid(schema, right, wrong, data):
    found = automaton.build(json_schema.parse(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    value = json.loads(schemas.walked(found, data.draw(st.randoms(use_true_random=False))))
    assert validator.is_valid(value), value


UUID = "9afa87a9-9a8b-{}ab9-a3c9-989c498e4acf"


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        *((f"UUID{version}", [UUID.format(version)], [UUID.format(2), "a"]) for version in (1, 3, 4, 5, 6, 7, 8)),
        (ipaddress.IPv4Interface, ["10.0.0.1/8", "10.0.0.1"], ["10.0.0.1/33", "::"]),
        (ipaddress.IPv6Interface, ["2001:db8::1/64", "::"], ["::/129", "10.0.0.1"]),
        (
            ipaddress.IPv4Network,
            ["172.16.0.0/12", "10.0.0.0/9", "0.0.0.0/0", "10.0.0.1"],
            ["10.0.0.1/8", "172.8.0.0/12"],
        ),
        (ipaddress.IPv6Network, ["2001:db8::/32", "::/0", "::1", "1:2:3:4:5:6:7::/112"], ["2001:db8::/16", "::/129"]),
        ("IPvAnyAddress", ["10.0.0.1", "::1"], ["10.0.0.0/8", "a"]),
        ("IPvAnyInterface", ["10.0.0.1/8", "::1/64"], ["10.0.0.1/64"]),
        ("IPvAnyNetwork", ["10.0.0.0/8", "2001:db8::/32"], ["10.0.0.1/8"]),
        ("Base64Bytes", ["", "ab+/", "YQ==", "YWI="], ["a", "YQ="]),
        ("Base64UrlBytes", ["", "ab-_", "YQ=="], ["abc"]),
    ],
)
def test_formats_of_pydantic(kind, right, wrong):
    pydantic = pytest.importorskip("pydantic")
    judge = pydantic.TypeAdapter(getattr(pydantic, kind) if isinstance(kind, str) else kind)
    found = automaton.build(json_schema.parse(judge.json_schema()))
    for text in right:
        assert found.accepts(f'"{text}"'.encode())
    for text in wrong:
        assert not found.accepts(f'"{text}"'.encode())
        with pytest.raises(ValueError, match="validation error"):
            judge.validate_python(text)
    rng = random.Random(0)
    for text in [*(f'"{text}"' for text in right), *(schemas.walked(found, rng) for _ in range(20))]:
        judge.validate_json(text)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["0041", "d7ff", "D800", "dbff", "DC00", "dfFf", "e000", "ffff"]), max_size=5))
def test_escaped_surrogates_come_in_pairs(codes):
    text = "".join(['"', *(f"\\u{code}" for code in codes), '"'])
    is_text = not any("\ud800" <= character <= "\udfff" for character in json.loads(text))
    assert automaton.build(json_schema.parse({"type": "string"})).accepts(text.encode()) == is_text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"unevaluatedItems": {}}, "#/unevaluatedItems: not supported"),
        ({"allOf": [{"anyOf": [OF_A, OF_B], "unevaluatedProperties": False}, OF_A]}, "#/allOf/1/unevaluatedProperties"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems: not supported but for items of up to 6 values"),
        ({"properties": {"a/b": {"minContains": 2}}, "type": "object"}, "#/properties/a/b/minContains"),
        ({"type": "string", "format": "color"}, "#/format: 'color' is not supported"),
        ({"type": "string", "pattern": "(?<=a)"}, "#/pattern: regex"),
        ({"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 3}]}, "#/oneOf/1/not"),
        ({"type": "object", "not": {"additionalProperties": False}}, "#/not: names that are not declared"),
        ({"not": {"type": "string", "format": "date"}}, "#/not/format: not supported within not"),
        ({"$ref": "other.json#/a"}, "#/$ref: 'other.json#/a' is not in this document"),
        ({"type": "string", "minLength": 65_536}, "#/minLength: must be at most 65535, got 65536"),
        ({"items": {"type": "array", "minItems": 10**6}}, "#/items/minItems: must be at most 65535, got 1000000"),
        ({"type": "number", "minimum": 1e308}, "#/minimum: numbers have up to 20 digits, got 1e+308"),
        ({"type": "number", "maximum": 5e-324}, "#/maximum: must have up to 40 decimal places, got 5e-324"),
        ({"type": "number", "multipleOf": 1.23456}, "#/multipleOf: with 5 decimal places must be at most 0.01428"),
        ({"type": "object", "minProperties": 2}, "#/minProperties: 2 of names that may repeat"),
        (functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(120), {}), "#: its references"),
        ({"allOf": [{"prefixItems": [{}]}, {"items": {"type": "null"}}]}, "items in order beside other items"),
    ],
)  # fmt: skip
def test_what_a_table_cannot_hold_is_refused(schema, message):
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        json_schema.parse(schema)


HTTP_URL = {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}
RECORD = {
    "url": HTTP_URL,
    "other": {"anyOf": [HTTP_URL, {"type": "null"}]},
    "time": {"type": "string", "format": "date-time"},
    "id": {"type": "string", "format": "uuid"},
    "emails": {"type": "array", "items": {"type": "string", "format": "email", "maxLength": 254}, "maxItems": 10},
}


@pytest.mark.parametrize(
    ("schema", "maximum"),
    [
        (HTTP_URL, 40),
        ({"type": "object", "properties": RECORD, "required": [*RECORD]}, 2200),
        ({"type": "string", "pattern": r"\S", "maxLength": 1000}, 60),
        ({"type": "string", "pattern": r"^\S+$", "maxLength": 65_535}, 60),
        ({"type": "string", "format": "uri", "minLength": 3000, "maxLength": 65_535}, 40),
        ({"type": "string", "minLength": 2500}, 20),
        ({"type": "string", "maxLength": 10**9}, 20),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1000, "maxItems": 10**6}, 60),
        ({"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 1000}}, 80),
    ],
)
def test_counts_take_no_states(schema, maximum):
    assert len(automaton.build(json_schema.parse(schema), counts=True).is_final) <= maximum


# Objects within each other in a million orders, each of which is read once.
NAMES = "abcd"
OF_ALL = {"type": "object", "properties": {name: {"$ref": f"#/$defs/{name}"} for name in NAMES}}
GRAPH = {"$ref": "#/$defs/a", "$defs": dict.fromkeys(NAMES, OF_ALL)}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": each} for each in (5000, 6000)]}}},
            "#/properties/a/anyOf/0/maxLength of 5000: an automaton of more than 32767 states",
        ),
        (
            {"type": "array", "items": {"type": "array", "items": HTTP_URL, "maxItems": 50}, "maxItems": 5000},
            "#/items/items/maxLength of 2083: an automaton of more than 32767 states",
        ),
        ({"type": "string", "pattern": "^(a|b)*a(a|b){20}$", "maxLength": 30}, "#/maxLength of 30: an automaton of"),
        (GRAPH, "an automaton of more than 32767 states"),
    ],
)
def test_what_is_too_large_has_a_name(schema, message):
    with pytest.raises(automaton.TooLargeError, match=re.escape(message)):
        automaton.build(json_schema.parse(schema), counts=True)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "#/type: must be of null, boolean"),
        ({"$ref": "#/$defs/a"}, "names no schema"),
        ({"type": "string", "minLength": -1}, "#/minLength: must be an integer of at least 0, got -1"),
        (False, "the schema accepts no value"),
        ({"allOf": [{"const": 1}, {"const": 2}]}, "the schema accepts no value"),
        ({"const": 1, "enum": [2]}, "the schema accepts no value"),
        ({"dependencies": {"a": 3}}, "#/dependencies/a: must be a list of names or a schema, got 3"),
        ({"multipleOf": 0}, "#/multipleOf: must be a number above 0, got 0"),
        ('{"minimum": 1e999}', "#/minimum: must be a number, got inf"),
        ({"anyOf": []}, "#/anyOf: must be a list of schemas"),
        ({"dependentRequired": None}, "#/dependentRequired: must be an object of names, got None"),
        ({"not": 1}, "#/not: must be a schema: an object, true or false, got 1"),
        ({"properties": {"a": {"anyOf": ["a"]}}, "type": "object"}, "#/properties/a/anyOf/0: must be a schema"),
        ({"allOf": "a"}, "#/allOf: must be a list of schemas, got 'a'"),
        ({"allOf": [{"type": "string"}, {"enum": None}]}, "#/allOf/1/enum: must be a list of values, got None"),
        ({"patternProperties": ["a"]}, "#/patternProperties: must be an object of schemas, got ['a']"),
        ({"propertyNames": "a"}, "#/propertyNames: must be a schema"),
        ({"enum": "ab"}, "#/enum: must be a list of values, got 'ab'"),
        ({"type": "object", "required": "ab"}, "#/required: must be a list of names, got 'ab'"),
        ({"type": 5}, "#/type: must be of null, boolean"),
        ({"items": 3}, "#/items: must be a schema or a list of schemas, got 3"),
        ({"pattern": None}, "#/pattern: must be a string, got None"),
        ({"minLength": float("inf")}, "#/minLength: must be an integer of at least 0, got inf"),
        ({"$ref": "#"}, "leads to itself"),
    ],
)
def test_wrong_schemas(schema, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        json_schema.parse(schema)


LIST = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
NODE = {"$ref": "#/$defs/L"}


def recursive(following, root=NODE, **others):
    """Returns a schema of lists, each of which has the next one under `next`."""
    list_of = LIST | {"properties": LIST["properties"] | {"next": following}}
    return {"$defs": {"L": list_of, **others}, **root}


@pytest.mark.parametrize(
    "schema",
    [
        recursive({"anyOf": [NODE, {"type": "null"}]}),
        recursive({"anyOf": [NODE, {"type": "null"}], "default": None}),
        recursive({"oneOf": [NODE, {"type": "null"}], "title": "Next"}),
        recursive({"allOf": [NODE], "description": "as pydantic 1 and FastAPI write it"}),
        recursive({"allOf": [NODE], "type": "object"}),
        recursive({**NODE, "description": "a reference with others beside it"}),
        recursive({**NODE, "type": "object"}, NODE | {"required": ["value"]}),
        recursive({"anyOf": [{"$ref": "#/$defs/M"}, {"type": "null"}], "default": None},
                  M={"allOf": [{"properties": {"value": {}}}, NODE], "title": "two classes"}),
        recursive({"not": {"not": {"anyOf": [NODE, {"type": "null"}]}}}),
        LIST | {"properties": LIST["properties"] | {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}], "title": ""}}},
    ],
)  # fmt: skip
def test_references_are_counted_however_they_are_reached(schema):
    found = automaton.build(json_schema.parse(schema))
    of_depth = functools.reduce(lambda inner, _: [*inner, {"value": 1, "next": inner[-1]}], range(8), [{"value": 1}])
    accepted = [found.accepts(json.dumps(each).encode()) for each in of_depth]
    assert accepted[:3] == [True] * 3
    assert not all(accepted)
    assert not found.accepts(b'{"value": 1, "next": {"value": "a"}}')


@pytest.mark.parametrize("indent", [None, 0, 2, 4, "\t"])
def test_whitespace_has_a_bound(indent):
    value = {"a": {"b": [1, {"c": [], "d": {"e": None}}]}, "f": ""}
    schema = {"anyOf": [{"const": {"a": {"b": 3}}}, {"const": value}]}
    for counts in (False, True):
        found = automaton.build(json_schema.parse(schema), counts=counts)
        assert found.accepts(json.dumps(value, indent=indent).encode())
        assert found.accepts(json.dumps(value, separators=(",", ":")).encode())
        for wrong in ('"f" : ""', '"f":  ""', '"f": ""\n\n', '"f": ""' + 21 * " ", '\n\n"f": ""'):
            assert not found.accepts(json.dumps(value).replace('"f": ""', wrong).encode())
        for right in ('"f":""', '"f": ""\n', '"f": ""\n' + 20 * " ", '\n\t"f": ""'):
            text = json.dumps(value, separators=(",", ": ")).replace('"f": ""', right)
            assert found.accepts(text.encode())


def test_line_breaks_take_few_states():
    options = [{"type": "object", "properties": {name: {"type": "integer"}}} for name in ("aa", "ab", "b")]
    items = {"type": "array", "items": {"anyOf": options}, "maxItems": 9}
    assert len(automaton.build(json_schema.parse({"anyOf": options}), counts=True).moves) < 60
    assert len(automaton.build(json_schema.parse(items), counts=True).moves) < 300


def test_wrong_and_changed_schemas():
    rng = random.Random(0)
    of_keywords = rng.sample(list(schemas.keywords()), 70)
    changes = [("changed", schemas.changed(rng.choice(CASES)[0], rng)) for _ in range(25)]
    counts = schemas.sweep([*of_keywords, *changes], 0)
    assert counts["fault"] == 0
    assert min(counts["wrong"], counts["held"], counts["refused"]) > 3, counts
