"""The keywords of JSON Schema: which types of values each one constrains, and what each one has to be."""

import itertools
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any] | bool
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords that constrain a value of one type alone.
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE = {
    "integer": OF_NUMBERS,
    "number": OF_NUMBERS,
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
}
DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
REFUSED = (
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
# All keywords with an effect: others are annotations.
APPLIED = {
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "$ref",
    *DEPENDENCIES,
    *REFUSED,
    *itertools.chain(*OF_TYPE.values()),
}


class UnsupportedError(ValueError):
    """A schema asks for something that an automaton cannot hold; the message has its path and keyword."""


class Kind(NamedTuple):
    """What the value of a keyword has to be."""

    is_right: Callable[[Any], bool]
    words: str  # "must be ..."
    member: "Kind | None" = None  # of a list or of an object: what each of its values has to be


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(each, str) and each in (*TYPES, "any") for each in names)


SCHEMA = Kind(_is_schema, "a schema: an object, true or false")
SCHEMAS = Kind(lambda value: isinstance(value, list), "a list of schemas", SCHEMA)
OPTIONS = Kind(lambda value: isinstance(value, list) and len(value) > 0, "a list of schemas", SCHEMA)
SCHEMAS_BY_NAME = Kind(lambda value: isinstance(value, Mapping), "an object of schemas", SCHEMA)
NAMES = Kind(_are_names, "a list of names")
COUNT = Kind(lambda value: _is_number(value) and value >= 0 and value == int(value), "an integer of at least 0")
NUMBER = Kind(_is_number, "a number")
BOUND = Kind(lambda value: isinstance(value, bool) or _is_number(value), "a number")  # draft 4 has booleans
TEXT = Kind(lambda value: isinstance(value, str), "a string")
TEXTS = Kind(lambda value: isinstance(value, str | tuple), "a string")  # see `all_of`
NEEDS = Kind(lambda value: _is_schema(value) or _are_names(value), "a list of names or a schema")
KINDS = {
    "type": Kind(_are_types, f"of {', '.join(TYPES)}"),
    "enum": Kind(lambda value: isinstance(value, list), "a list of values"),
    "anyOf": OPTIONS,
    "oneOf": OPTIONS,
    "allOf": SCHEMAS,
    "not": SCHEMA,
    "if": SCHEMA,
    "then": SCHEMA,
    "else": SCHEMA,
    "$ref": TEXT,
    "dependencies": Kind(lambda value: isinstance(value, Mapping), "an object of names and schemas", NEEDS),
    "dependentRequired": Kind(lambda value: isinstance(value, Mapping), "an object of names", NAMES),
    "dependentSchemas": SCHEMAS_BY_NAME,
    "minimum": NUMBER,
    "maximum": NUMBER,
    "exclusiveMinimum": BOUND,
    "exclusiveMaximum": BOUND,
    "multipleOf": Kind(lambda value: _is_number(value) and value > 0, "a number above 0"),
    "minLength": COUNT,
    "maxLength": COUNT,
    "pattern": TEXTS,
    "format": TEXTS,
    "items": Kind(lambda value: _is_schema(value) or isinstance(value, list), "a schema or a list of schemas"),
    "prefixItems": SCHEMAS,
    "additionalItems": SCHEMA,
    "minItems": COUNT,
    "maxItems": COUNT,
    "uniqueItems": Kind(lambda value: isinstance(value, bool), "true or false"),
    "contains": SCHEMA,
    "properties": SCHEMAS_BY_NAME,
    # Draft 3 has it in the schema of a property, as a boolean, which has no effect here.
    "required": Kind(lambda value: isinstance(value, bool) or _are_names(value), "a list of names"),
    "additionalProperties": SCHEMA,
    "patternProperties": SCHEMAS_BY_NAME,
    "propertyNames": SCHEMA,
    "minProperties": COUNT,
    "maxProperties": COUNT,
}


def all_of(value: Any) -> tuple[Any, ...]:
    """Returns the values of a keyword: of several schemas in one it is a tuple, which JSON has not."""
    return value if isinstance(value, tuple) else (value,)


def check(schema: Any, path: str) -> None:
    """Raises a ValueError with the path if a schema, or a keyword at its top, is not what it has to be."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"{path}: a schema is an object, true or false, got {reprlib.repr(schema)}")
    for keyword, value in schema.items():
        if keyword in KINDS:
            _check(value, KINDS[keyword], f"{path}/{keyword}")
    if isinstance(items := schema.get("items"), list):
        _check(items, SCHEMAS, f"{path}/items")


def _check(value: Any, kind: Kind, path: str) -> None:
    if not kind.is_right(value):
        raise ValueError(f"{path}: must be {kind.words}, got {reprlib.repr(value)}")
    if kind.member is not None:
        members = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, each in members:
            _check(each, kind.member, f"{path}/{name}")
