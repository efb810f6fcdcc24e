"""Schemas without the keywords that are not supported."""

import pytest

from jlade.constraints.json_document import UnsupportedError
from jlade.constraints.loosening import loosened

TREE = {
    "properties": {
        "names": {"type": "array", "items": {"$ref": "#/$defs/name"}, "uniqueItems": True},
        "size": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]},
    },
    "$defs": {
        "name": {"type": "string", "pattern": "(?<=a)b", "maxLength": 4},
        "size": {"allOf": [{"type": "array", "minContains": 2, "maxItems": 4}], "title": "Size"},
    },
}


def test_leaves_out_what_is_not_supported_alone():
    schema, reasons = loosened(TREE)
    assert schema == {
        "properties": {
            "names": {"type": "array", "items": {"$ref": "#/$defs/name"}},
            "size": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]},
        },
        "$defs": {
            "name": {"type": "string", "maxLength": 4},
            "size": {"allOf": [{"type": "array", "maxItems": 4}], "title": "Size"},
        },
    }
    paths = {reason.partition(": ")[0] for reason in reasons}
    of_size = "#/properties/size/anyOf/0/minContains"
    assert paths == {"#/properties/names/uniqueItems", "#/properties/names/items/pattern", of_size}
    assert "uniqueItems" in TREE["properties"]["names"], "the argument is left as it is"


def test_leaves_out_what_is_too_large():
    string = {"type": "string", "pattern": "(a.{16}|b)*"}
    schema, reasons = loosened({"type": "array", "items": string, "maxItems": 3})
    assert schema == {"type": "array", "items": {"type": "string"}, "maxItems": 3}
    assert reasons[0].startswith("#/items/pattern: an automaton of more than")


def test_what_is_held_stays():
    schema = {"type": "object", "minProperties": 1}
    assert loosened(schema) == (schema, [])


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "array", "minContains": 2}},
        {"oneOf": [{"type": "array", "minContains": 2}, {"type": "null"}]},
        {"$ref": "other.json"},
    ],
)
def test_raises_where_fewer_values_would_be_left(schema):
    with pytest.raises(UnsupportedError, match=r"^#"):
        loosened(schema)
