"""A JSON Schema: its keywords, the schemas that its references name, and whether it accepts a value at hand."""

import functools
import itertools
import json
import math
import re
import reprlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Set
from fractions import Fraction
from typing import Any, NamedTuple

from jlade.constraints import formats, regex
from jlade.constraints.automaton import Automaton, build, characters
from jlade.constraints.formats import FORMATS, UNSUPPORTED

Keywords = Mapping[str, Any]  # a schema that is an object
Schema = Keywords | bool
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
REFUSED = ("minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")


class UnsupportedError(ValueError):
    """A schema asks for something that an automaton cannot hold.

    Args:
      name: of the keyword, by its path.
      problem: what is not supported.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


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
TEXTS = Kind(lambda value: isinstance(value, str | tuple), "a string")  # see `all_of`
NEEDS = Kind(lambda value: _is_schema(value) or _are_names(value), "a list of names or a schema")
# Bytes that strings in JSON do not have as they are, and how they are written.
ESCAPES = {byte: json.dumps(chr(byte))[1:-1].encode() for byte in (*range(32), *b'"\\')}
GRAMMAR = "x-lark"  # a keyword of our own: the text of a string is one of this grammar in Lark
# Keywords that constrain a value of one type alone.
OF_NUMBERS = {
    "minimum": NUMBER,
    "maximum": NUMBER,
    "exclusiveMinimum": BOUND,
    "exclusiveMaximum": BOUND,
    "multipleOf": Kind(lambda value: _is_number(value) and value > 0, "a number above 0"),
}
OF_TYPE = {
    "integer": OF_NUMBERS,
    "number": OF_NUMBERS,
    "string": {"minLength": COUNT, "maxLength": COUNT, "pattern": TEXTS, "format": TEXTS, GRAMMAR: TEXTS},
    "array": {
        "items": Kind(lambda value: _is_schema(value) or isinstance(value, list), "a schema or a list of schemas"),
        "prefixItems": SCHEMAS,
        "additionalItems": SCHEMA,
        "minItems": COUNT,
        "maxItems": COUNT,
        "uniqueItems": Kind(lambda value: isinstance(value, bool), "true or false"),
        "contains": SCHEMA,
    },
    "object": {
        "properties": SCHEMAS_BY_NAME,
        # Draft 3 has it in the schema of a property, as a boolean, which has no effect here.
        "required": Kind(lambda value: isinstance(value, bool) or _are_names(value), "a list of names"),
        "additionalProperties": SCHEMA,
        "patternProperties": SCHEMAS_BY_NAME,
        "propertyNames": SCHEMA,
        "minProperties": COUNT,
        "maxProperties": COUNT,
    },
}
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
    "unevaluatedProperties": SCHEMA,
    "$ref": Kind(lambda value: isinstance(value, str), "a string"),
    "dependencies": Kind(lambda value: isinstance(value, Mapping), "an object of names and schemas", NEEDS),
    "dependentRequired": Kind(lambda value: isinstance(value, Mapping), "an object of names", NAMES),
    "dependentSchemas": SCHEMAS_BY_NAME,
} | {keyword: kind for kinds in OF_TYPE.values() for keyword, kind in kinds.items()}
# All keywords with an effect of their own: others are annotations.
APPLIED = {"const", *REFUSED, *KINDS} - {"then", "else"}


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


def check_supported(schema: Keywords, path: str) -> None:
    """Raises an UnsupportedError with the path for a keyword that is refused."""
    for keyword in REFUSED:
        if keyword in schema:
            raise UnsupportedError(f"{path}/{keyword}", "not supported")


def _check(value: Any, kind: Kind, path: str) -> None:
    if not kind.is_right(value):
        raise ValueError(f"{path}: must be {kind.words}, got {reprlib.repr(value)}")
    if kind.member is not None:
        members = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, member in members:
            _check(member, kind.member, f"{path}/{name}")


class Document:
    """A schema with the schemas that its references name."""

    def __init__(self, root: Schema):
        self.root = root
        text = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        self.refs_stand_alone = bool(re.search(r"draft-0[3-7]", text))  # keywords beside them have no effect

    def resolve(self, reference: str, path: str) -> Schema:
        """Returns the schema of a reference within the document."""
        own_id = str(self.root.get("$id", self.root.get("id", ""))) if isinstance(self.root, Mapping) else ""
        base, _, fragment = reference.partition("#")
        schema: Any = self.root
        if base and base.rstrip("#") != own_id.rstrip("#"):
            schema = next(_identified(self.root, {("$id", base), ("id", base)}), None)
            if schema is None:
                raise UnsupportedError(f"{path}/$ref", f"{reference!r} is not in this document")
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            identifiers = {("$anchor", fragment), ("$id", f"#{fragment}"), ("id", f"#{fragment}")}
            schema = next(_identified(schema, identifiers), None)
            if schema is None:
                raise ValueError(f"{path}/$ref: {reference!r} names no schema")
            return schema
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(part)] if isinstance(schema, list) else schema[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"{path}/$ref: {reference!r} names no schema") from None
        return schema

    def accepts(self, value: Any, schema: Schema, path: str) -> bool:
        """Whether a schema accepts a value.

        Raises:
          ValueError: the schema is wrong, or has a keyword that is not supported.
        """
        check(schema, path)
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            reference = schema["$ref"]
            if not self.accepts(value, self.resolve(reference, path), reference):
                return False
            if self.refs_stand_alone:
                return True
        check_supported(schema, path)

        def is_valid(keyword: str) -> bool:
            return self.accepts(value, schema[keyword], f"{path}/{keyword}")

        def number_valid(keyword: str) -> int:
            options = enumerate(schema[keyword])
            return sum(self.accepts(value, option, f"{path}/{keyword}/{index}") for index, option in options)

        return (
            includes(schema.get("type", list(TYPES)), type_of(value))
            and ("const" not in schema or equal(value, schema["const"]))
            and ("enum" not in schema or any(equal(value, constant) for constant in schema["enum"]))
            and ("allOf" not in schema or number_valid("allOf") == len(schema["allOf"]))
            and ("anyOf" not in schema or number_valid("anyOf") > 0)
            and ("oneOf" not in schema or number_valid("oneOf") == 1)
            and ("not" not in schema or not is_valid("not"))
            and (
                "if" not in schema or (branch := "then" if is_valid("if") else "else") not in schema or is_valid(branch)
            )
            and self._accepts_of_type(value, schema, path)
        )

    def _accepts_of_type(self, value: Any, schema: Keywords, path: str) -> bool:
        match value:
            case bool() | None:
                return True
            case int() | float():
                return _accepts_number(value, schema)
            case str():
                return _accepts_string(value, schema, path)
            case list():
                return self._accepts_array(value, schema, path)
        return self._accepts_object(value, schema, path)

    def _accepts_array(self, value: list[Any], schema: Keywords, path: str) -> bool:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        schemas = itertools.chain(first, itertools.repeat(rest))
        return (
            is_between(len(value), schema, "Items")
            and not (schema.get("uniqueItems") and any(equal(*pair) for pair in itertools.combinations(value, 2)))
            and all(self.accepts(item, of_item, f"{path}/items") for item, of_item in zip(value, schemas, strict=False))
            and (
                "contains" not in schema
                or any(self.accepts(item, schema["contains"], f"{path}/contains") for item in value)
            )
        )

    def _accepts_object(self, value: Mapping[str, Any], schema: Keywords, path: str) -> bool:
        properties, names = schema.get("properties", {}), schema.get("required", [])
        if not is_between(len(value), schema, "Properties") or not (
            isinstance(names, bool) or set(names) <= set(value)
        ):
            return False
        for name, item in value.items():
            of_name = [properties[name]] if name in properties else []
            of_name += [of for pattern, of in schema.get("patternProperties", {}).items() if finds(pattern, name, path)]
            if not all(
                self.accepts(item, of, f"{path}/properties/{name}")
                for of in of_name or [schema.get("additionalProperties", True)]
            ):
                return False
            if not self.accepts(name, schema.get("propertyNames", True), f"{path}/propertyNames"):
                return False
            for keyword in DEPENDENCIES:
                needed = schema.get(keyword, {}).get(name, True)
                needed = {"required": needed} if isinstance(needed, list) else needed
                if not self.accepts(value, needed, f"{path}/{keyword}/{name}"):
                    return False
        return True


def _accepts_number(value: float, schema: Keywords) -> bool:
    for inclusive, exclusive, sign in BOUNDS:
        bound, strict = schema.get(inclusive), schema.get(exclusive, False)
        if strict is True:  # in draft 4 it makes the other bound exclusive
            strict = False if bound is None else bound
        if bound is not None and sign * value < sign * bound:
            return False
        if strict is not False and sign * value <= sign * strict:
            return False
    return "multipleOf" not in schema or not Fraction(str(value)) % Fraction(str(schema["multipleOf"]))


def _accepts_string(value: str, schema: Keywords, path: str) -> bool:
    for name in all_of(schema.get("format", ())):
        if name in UNSUPPORTED:
            raise UnsupportedError(f"{path}/format", f"{name!r} is not supported")
        if name in FORMATS and not build(formats.expression(name, characters)).accepts(value.encode()):
            return False
    return is_between(len(value), schema, "Length") and all(
        finds(pattern, value, f"{path}/pattern") for pattern in all_of(schema.get("pattern", ()))
    )


def is_between(number: int, schema: Keywords, of: str) -> bool:
    """Whether a number is in the bounds of a schema, such as `minItems` and `maxItems` of "Items"."""
    return schema.get(f"min{of}", 0) <= number <= schema.get(f"max{of}", number)


def _identified(schema: Any, identifiers: Set[tuple[str, str]]) -> Iterator[Any]:
    """Yields the schemas in a document with one of some keywords and its value."""
    if isinstance(schema, Mapping):
        if any(schema.get(keyword) == value for keyword, value in identifiers):
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _identified(part, identifiers)


def finds(pattern: str, text: str, path: str) -> bool:
    """Whether a text has a match of a pattern.

    Raises:
      UnsupportedError: the pattern is not supported.
    """
    try:
        return _search(pattern).accepts(text.encode())
    except ValueError as error:
        raise UnsupportedError(path, str(error)) from error


@functools.lru_cache(maxsize=64)
def _search(pattern: str) -> Automaton:
    return build(regex.search(pattern))


def required(schema: Keywords) -> list[str]:
    """Returns the names of the properties that a schema requires."""
    names = schema.get("required", ())
    return [] if isinstance(names, bool) else list(names)


def includes(types: Any, name: str) -> bool:
    """Whether `type` allows values of a type."""
    names = types if isinstance(types, list) else [types]
    return name in names or "any" in names or (name == "integer" and "number" in names)


def type_of(value: Any) -> str:
    """Returns the type of a value: "integer" for numbers without a fraction."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kind = kinds.get(type(value), "null")
    return "integer" if kind == "number" and value.is_integer() else kind


def equal(first: Any, second: Any) -> bool:
    """Whether two values are equal: true and 1 are not."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(value, second[name]) for name, value in first.items())
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)
