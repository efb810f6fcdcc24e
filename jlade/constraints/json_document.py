"""A JSON Schema with what its references name, and whether it accepts a value that is at hand."""

import functools
import itertools
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from jlade.constraints import formats, regex
from jlade.constraints.automaton import Automaton, build, characters
from jlade.constraints.formats import FORMATS, UNSUPPORTED
from jlade.constraints.json_keywords import DEPENDENCIES, REFUSED, TYPES, Schema, UnsupportedError, all_of, check


class Document:
    """A schema with the schemas that its references name."""

    def __init__(self, root: Schema):
        self.root = root
        text = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        self.refs_stand_alone = bool(re.search(r"draft-0[3-7]", text))  # keywords beside them have no effect

    def resolve(self, reference: str, path: str) -> Schema:
        """Returns the schema of a reference within the document."""
        own = str(self.root.get("$id", self.root.get("id", ""))) if isinstance(self.root, Mapping) else ""
        base, _, fragment = reference.partition("#")
        if base and base.rstrip("#") != own.rstrip("#"):
            raise UnsupportedError(f"{path}/$ref: {reference!r} is not in this document")
        found: Any = self.root
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = next(iter(_anchored(self.root, fragment)), None)
            if found is None:
                raise ValueError(f"{path}/$ref: {reference!r} names no schema")
            return found
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"{path}/$ref: {reference!r} names no schema") from None
        return found

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
        for keyword in REFUSED:
            if keyword in schema:
                raise UnsupportedError(f"{path}/{keyword}: not supported")

        def is_valid(keyword: str) -> bool:
            return self.accepts(value, schema[keyword], f"{path}/{keyword}")

        def is_valid_if_there(keyword: str) -> bool:
            return keyword not in schema or is_valid(keyword)

        def number_valid(keyword: str) -> int:
            options = enumerate(schema[keyword])
            return sum(self.accepts(value, each, f"{path}/{keyword}/{index}") for index, each in options)

        return (
            includes(schema.get("type", list(TYPES)), type_of(value))
            and ("const" not in schema or equal(value, schema["const"]))
            and ("enum" not in schema or any(equal(value, each) for each in schema["enum"]))
            and ("allOf" not in schema or number_valid("allOf") == len(schema["allOf"]))
            and ("anyOf" not in schema or number_valid("anyOf") > 0)
            and ("oneOf" not in schema or number_valid("oneOf") == 1)
            and ("not" not in schema or not is_valid("not"))
            and (
                "if" not in schema or (branch := "then" if is_valid("if") else "else") not in schema or is_valid(branch)
            )
            and self._accepts_of_type(value, schema, path)
        )

    def _accepts_of_type(self, value: Any, schema: Mapping[str, Any], path: str) -> bool:
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

    def _accepts_array(self, value: list[Any], schema: Mapping[str, Any], path: str) -> bool:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        schemas = itertools.chain(first, itertools.repeat(rest))
        return (
            is_between(len(value), schema, "Items")
            and not (schema.get("uniqueItems") and any(equal(*pair) for pair in itertools.combinations(value, 2)))
            and all(self.accepts(each, of_item, f"{path}/items") for each, of_item in zip(value, schemas, strict=False))
            and (
                "contains" not in schema
                or any(self.accepts(each, schema["contains"], f"{path}/contains") for each in value)
            )
        )

    def _accepts_object(self, value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> bool:
        properties, names = schema.get("properties", {}), schema.get("required", [])
        if not is_between(len(value), schema, "Properties") or not (
            isinstance(names, bool) or set(names) <= set(value)
        ):
            return False
        for name, each in value.items():
            of_name = [properties[name]] if name in properties else []
            of_name += [of for pattern, of in schema.get("patternProperties", {}).items() if finds(pattern, name, path)]
            if not all(
                self.accepts(each, of, f"{path}/properties/{name}")
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


def _accepts_number(value: float, schema: Mapping[str, Any]) -> bool:
    # Draft 4 has booleans that make the other bound exclusive.
    minimum, maximum = (schema.get(f"exclusive{name}") for name in ("Minimum", "Maximum"))
    return (
        ("minimum" not in schema or (value > schema["minimum"] if minimum is True else value >= schema["minimum"]))
        and ("maximum" not in schema or (value < schema["maximum"] if maximum is True else value <= schema["maximum"]))
        and (minimum is None or isinstance(minimum, bool) or value > minimum)
        and (maximum is None or isinstance(maximum, bool) or value < maximum)
        and ("multipleOf" not in schema or not Fraction(str(value)) % Fraction(str(schema["multipleOf"])))
    )


def _accepts_string(value: str, schema: Mapping[str, Any], path: str) -> bool:
    for name in all_of(schema.get("format", ())):
        if name in UNSUPPORTED:
            raise UnsupportedError(f"{path}/format: {name!r} is not supported")
        if name in FORMATS and not build(formats.expression(name, characters)).accepts(value.encode()):
            return False
    return is_between(len(value), schema, "Length") and all(
        finds(pattern, value, f"{path}/pattern") for pattern in all_of(schema.get("pattern", ()))
    )


def is_between(number: int, schema: Mapping[str, Any], of: str) -> bool:
    """Whether a number is in the bounds of a schema, such as `minItems` and `maxItems` of "Items"."""
    return schema.get(f"min{of}", 0) <= number <= schema.get(f"max{of}", number)


def _anchored(schema: Any, name: str) -> Iterable[Any]:
    """Yields the schemas in a document that have a name of their own."""
    if isinstance(schema, Mapping):
        if schema.get("$anchor") == name or schema.get("$id") == f"#{name}" or schema.get("id") == f"#{name}":
            yield schema
        for each in schema.values():
            yield from _anchored(each, name)
    elif isinstance(schema, list):
        for each in schema:
            yield from _anchored(each, name)


def finds(pattern: str, text: str, path: str) -> bool:
    """Whether a text has a match of a pattern.

    Raises:
      UnsupportedError: the pattern is not supported.
    """
    try:
        return _search(pattern).accepts(text.encode())
    except ValueError as error:
        raise UnsupportedError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=64)
def _search(pattern: str) -> Automaton:
    return build(regex.search(pattern))


def required(schema: Mapping[str, Any]) -> list[str]:
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
        return first.keys() == second.keys() and all(equal(each, second[name]) for name, each in first.items())
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)
