"""JSON Schema as expressions over the bytes of JSON: drafts 4 to 2020-12, as far as an automaton can hold them.

Properties are written in the order of their declaration, then those that a schema allows besides. An object has the
declared properties alone where `additionalProperties` says nothing, so every text is valid, and not every valid value
has a text. What cannot be held is refused by its keyword and path; annotations and unknown keywords have no effect.
"""

import functools
import itertools
import json
import math
import re
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jlade.constraints import numbers, regex
from jlade.constraints.automaton import (
    COUNTED,
    EMPTY,
    LAST_CODE_POINT,
    NOTHING,
    Automaton,
    Choice,
    Expression,
    Named,
    Network,
    Ranges,
    Repeat,
    TooLargeError,
    build,
    characters,
    choice,
    counted,
    difference,
    intersection,
    literal,
    meter,
    minimal,
    optional,
    sequence,
    union,
    without,
)
from jlade.constraints.formats import FORMATS, UNSUPPORTED
from jlade.constraints.moves import MOST_COUNT
from jlade.constraints.numbers import Bound

Schema = Mapping[str, Any] | bool
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DEPTH = 3  # of recursion, and of values of which nothing is known
MOST_NESTED = 100  # schemas within each other: far from Python's limit, whose error NumPy turns into others
MOST_OPTIONS = 64  # of combined choices
MOST_COUNTED = 64  # properties that are counted
SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}  # after a backslash
RAW: Ranges = without(((0, 31), (34, 34), (92, 92)))
ALL: Ranges = ((0, LAST_CODE_POINT),)
SPACE = Repeat(choice(*map(literal, " \n\r\t")), 0, None)
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
    "if",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
APPLIED = {
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "$ref",
    *DEPENDENCIES,
    *REFUSED,
    *itertools.chain(*OF_TYPE.values()),
}


class UnsupportedError(ValueError):
    """A schema asks for something that an automaton cannot hold; the message has its path and keyword."""


def parse(schema: Schema | str, depth: int = DEPTH, whitespace: bool = True) -> Expression:
    """Returns the texts of the values that a schema accepts.

    Args:
      schema: as an object, or as text.
      depth: how often a reference may be within itself, and how deep values are of which the schema says nothing.
      whitespace: whether any whitespace may stand between tokens. Otherwise there is none.

    Raises:
      UnsupportedError: names the keyword and its path.
      ValueError: the schema is wrong.
    """
    root: Schema = json.loads(schema) if isinstance(schema, str) else schema
    try:
        found = _Compiler(root, depth, SPACE if whitespace else EMPTY).value(root, "#")
    except RecursionError as error:
        raise UnsupportedError("#: its references are too deep within each other") from error
    if _is_nothing(found):
        raise ValueError(f"the schema accepts no value, or none of a depth up to {depth}")
    return found


def string_of(ranges: Ranges) -> Expression:
    """Returns a character of some ranges in a string, in its usual spelling: itself, or escaped where it must be."""
    options = [characters(_common(ranges, RAW))]
    for first, last in _common(ranges, union([(0, 31), (34, 34), (92, 92)])):
        for code in range(first, last + 1):
            short = SHORT.get(chr(code))
            options.append(literal("\\" + short) if short else _escaped(code))
    return choice(*options)


def _escaped(code: int) -> Expression:
    digits = f"{code:04x}"
    return sequence(literal("\\u"), *(choice(*map(literal, sorted({d, d.upper()}))) for d in digits))


def _common(first: Ranges, second: Ranges) -> Ranges:
    return without(union([*without(first), *without(second)]))


# Half of a pair of surrogates is no character: `json.loads` reads it, but what it returns has no bytes.
ESCAPED_CODE = sequence(
    literal("\\u"),
    choice(
        regex.parse(r"([0-9A-CE-Fa-ce-f][0-9A-Fa-f]|[Dd][0-7])[0-9A-Fa-f]{2}"),
        regex.parse(r"[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}"),
    ),
)


def _is_nothing(expression: Expression) -> bool:
    if isinstance(expression, Automaton):
        return not expression.is_final.any()
    return isinstance(expression, Choice) and expression == NOTHING  # a series of nothing, the empty text, is equal


class _Compiler:
    def __init__(self, root: Schema, depth: int, space: Expression):
        self.root, self.depth, self.space = root, depth, space
        self.open: Counter[Any] = Counter()  # references that are being followed
        self.num_nested = 0  # schemas around the one that is being read
        text = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        self.refs_stand_alone = bool(re.search(r"draft-0[3-7]", text))
        self.known: dict[int, Expression] = {}  # any value, by its depth

    def comma(self) -> Expression:
        return sequence(self.space, literal(","), self.space)

    def property_of(self, name: Expression, item: Expression) -> Expression:
        return sequence(name, self.space, literal(":"), self.space, item)

    # Schemas to schemas.

    def resolve(self, reference: str, path: str) -> Schema:
        """Returns the schema of a reference within the document."""
        if not isinstance(reference, str):
            raise ValueError(f"{path}/$ref: must be a string, got {reference!r}")
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

    def merged(self, first: Schema, second: Schema, path: str) -> Schema:
        """Returns a schema that accepts the values that both accept."""
        if first is True or first == {}:
            return second
        if second is True or second == {}:
            return first
        if first is False or second is False:
            return False
        first, second = (self.expanded(each, path) for each in (first, second))
        if first is False or second is False:
            return False
        assert not isinstance(first, bool)
        assert not isinstance(second, bool)
        if (_has_places(first) or _has_places(second)) and _has_items(first) and _has_items(second) and first != second:
            raise UnsupportedError(f"{path}/allOf: items in order beside other items are not supported")
        result: dict[str, Any] = {}
        for key in (*first, *(key for key in second if key not in first)):
            if key not in APPLIED:
                continue
            if key not in first or key not in second:
                result[key] = first[key] if key in first else second[key]
                continue
            result[key] = self._merged_keyword(key, first, second, path)
        if "const" in first and "const" in second and not _equal(first["const"], second["const"]):
            return False
        if _has_objects(first) and _has_objects(second):
            self._merge_objects(result, first, second, path)
        return result

    def _merged_keyword(self, key: str, first: Mapping[str, Any], second: Mapping[str, Any], path: str) -> Any:
        one, other = first[key], second[key]
        if one == other:
            return one
        match key:
            case "type":
                return [each for each in TYPES if _includes(one, each) and _includes(other, each)]
            case "enum":
                return [each for each in one if any(_equal(each, value) for value in other)]
            case "const":
                return one  # those that differ leave no value
            case "required":
                return [*one, *(each for each in other if each not in one)]
            case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(one, bool) or isinstance(other, bool):
                raise UnsupportedError(f"{path}/allOf: {key} of draft 4 in several schemas is not supported")
            case "minimum" | "minLength" | "minItems" | "minProperties" | "exclusiveMinimum":
                return max(one, other)
            case "maximum" | "maxLength" | "maxItems" | "maxProperties" | "exclusiveMaximum":
                return min(one, other)
            case "items" | "additionalItems" | "propertyNames" if not isinstance(one, list) | isinstance(other, list):
                return self.merged(one, other, path)
            case "anyOf":
                pairs = list(itertools.product(one, other))
                if len(pairs) > MOST_OPTIONS:
                    raise UnsupportedError(f"{path}/anyOf: more than {MOST_OPTIONS} combinations are not supported")
                return [self.merged(*pair, path) for pair in pairs]
            case "properties" | "patternProperties" | "additionalProperties":
                return one  # see `_merge_objects`
            case "pattern" | "format":
                return (*_all(one), *_all(other))
            case "multipleOf" if all(float(each).is_integer() for each in (one, other)):
                return math.lcm(int(one), int(other))
        raise UnsupportedError(f"{path}/allOf: {key} in several schemas is not supported")

    def _merge_objects(
        self, result: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any], path: str
    ) -> None:
        for each, other in ((first, second), (second, first)):
            patterns = each.get("patternProperties")
            if patterns and patterns != other.get("patternProperties") and not _is_open(other):
                raise UnsupportedError(f"{path}/allOf: patternProperties beside additionalProperties")
        names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
        if names:
            result["properties"] = {
                name: self.merged(_property(first, name), _property(second, name), path) for name in names
            }
        patterns = dict.fromkeys([*first.get("patternProperties", {}), *second.get("patternProperties", {})])
        if patterns:
            result["patternProperties"] = {
                pattern: self.merged(
                    first.get("patternProperties", {}).get(pattern, True),
                    second.get("patternProperties", {}).get(pattern, True),
                    path,
                )
                for pattern in patterns
            }
        if "additionalProperties" in first or "additionalProperties" in second:
            result["additionalProperties"] = self.merged(
                first.get("additionalProperties", True), second.get("additionalProperties", True), path
            )

    def expanded(self, schema: Schema, path: str) -> Schema:
        """Returns a schema without a reference, `allOf` and dependencies at its top."""
        seen = 0
        while isinstance(schema, Mapping) and any(key in schema for key in ("$ref", "allOf", *DEPENDENCIES)):
            seen += 1
            if seen > 50:
                raise ValueError(f"{path}: a reference leads to itself")
            if "$ref" in schema:
                rest = {} if self.refs_stand_alone else _without(schema, "$ref")
                schema = self.merged(rest, self.resolve(schema["$ref"], path), path)
            elif "allOf" in schema:
                parts = schema["allOf"]
                schema = _without(schema, "allOf")
                for index, part in enumerate(parts):
                    schema = self.merged(schema, part, f"{path}/allOf/{index}")
            else:
                keyword = next(key for key in DEPENDENCIES if key in schema)
                needs = schema[keyword]
                base = schema = _without(schema, keyword)
                for name, needed in needs.items():
                    options = [_absent(name, base), _needed(needed, f"{path}/{keyword}/{name}")]
                    schema = self.merged(schema, {"anyOf": options}, f"{path}/{keyword}")
        return schema

    # Schemas to expressions.

    def value(self, schema: Schema, path: str) -> Expression:
        """Returns the texts of the values of a schema; `NOTHING` if there are none up to the depth."""
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"{path}: a schema is an object, true or false, got {schema!r}")
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if reference is not None and self.open[reference] >= self.depth:
            return NOTHING
        if self.num_nested >= MOST_NESTED:
            raise UnsupportedError("#: its references are too deep within each other")
        self.num_nested += 1
        self.open[reference] += 1
        try:
            return self._value(schema, path)
        finally:
            self.num_nested -= 1
            self.open[reference] -= 1

    def _value(self, schema: Schema, path: str) -> Expression:
        schema = self.expanded(schema, path)
        if schema is False:
            return NOTHING
        if schema is True or not APPLIED & schema.keys():
            return self.anything(self.depth)
        assert isinstance(schema, Mapping)
        for keyword in REFUSED:
            if keyword in schema:
                raise UnsupportedError(f"{path}/{keyword}: not supported")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = schema[keyword]
                if not isinstance(options, list) or not options:
                    raise ValueError(f"{path}/{keyword}: must be a list of schemas, got {options!r}")
                base = _without(schema, keyword)
                if keyword == "oneOf":
                    options = _apart(options, base)
                wholes = [self.merged(base, each, f"{path}/{keyword}/{i}") for i, each in enumerate(options)]
                if keyword == "oneOf":
                    self._check_disjoint(wholes, f"{path}/oneOf")
                found = [self.value(each, f"{path}/{keyword}/{i}") for i, each in enumerate(wholes)]
                return choice(*(each for each in found if not _is_nothing(each)))
        if "not" in schema:
            schema = self._excluded(schema, path)
            if schema is False:
                return NOTHING
            assert isinstance(schema, Mapping)
        if (values := _values(schema)) is not None:
            return self._enumerated(schema, values, path)
        types = [each for each in TYPES if _includes(schema.get("type", list(TYPES)), each)]
        if "number" in types:
            types.remove("integer")
        _check_types(schema.get("type"), path)
        found = [getattr(self, f"_{each}")(schema, path) for each in types]
        return choice(*(each for each in found if not _is_nothing(each)))

    def _excluded(self, schema: Mapping[str, Any], path: str) -> Schema:
        """Returns a schema without `not`, which excludes types, or values of strings."""
        no, rest = self.expanded(schema["not"], path), _without(schema, "not")
        if no is False:
            return rest
        if no is True or not APPLIED & no.keys():
            return False
        if set(no) & APPLIED == {"type"}:
            types = [each for each in TYPES if _includes(rest.get("type", list(TYPES)), each)]
            left = [each for each in types if not _includes(no["type"], each)]
            if _includes(no["type"], "integer") and "number" in left:
                raise UnsupportedError(f"{path}/not: numbers that are no integers are not supported")
            return {**rest, "type": left}
        values, excluded = _values(rest), _values(no)
        if values is not None and excluded is not None and set(no) & APPLIED <= {"enum", "const"}:
            left = [each for each in values if not any(_equal(each, other) for other in excluded)]
            return {**_without(rest, "const"), "enum": left}
        raise UnsupportedError(f"{path}/not: not supported")

    def _check_disjoint(self, options: Sequence[Schema], path: str) -> None:
        for (i, first), (j, second) in itertools.combinations(enumerate(options), 2):
            if not self._are_disjoint(first, second, path, self.depth):
                raise UnsupportedError(f"{path}: a value may be one of {i} and of {j}, which is not supported")

    def _are_disjoint(self, first: Schema, second: Schema, path: str, depth: int) -> bool:
        """Whether it is certain that no text of one schema is a value of the other."""
        if depth == 0:
            return False
        first, second = self.expanded(first, path), self.expanded(second, path)
        if first is False or second is False:
            return True
        if first is True or second is True:
            return False
        for one, other in ((first, second), (second, first)):
            for keyword in ("anyOf", "oneOf"):
                if keyword in one:
                    base = _without(one, keyword)
                    return all(
                        self._are_disjoint(self.merged(base, each, path), other, path, depth - 1)
                        for each in one[keyword]
                    )
        values = [_values(each) for each in (first, second)]
        if values[0] is not None and values[1] is not None:
            return not any(_equal(one, other) for one in values[0] for other in values[1])
        types = [_possible_types(each) for each in (first, second)]
        common = types[0] & types[1]
        if not common:
            return True
        if common == {"string"} and not any(values):
            first_string, second_string = (self._string(each, path) for each in (first, second))
            if _any_string() in (first_string, second_string):
                return _is_nothing(first_string) or _is_nothing(second_string)
            return _is_nothing(intersection(first_string, second_string))
        if common == {"string"}:
            chosen, other = (values[0], second) if values[0] is not None else (values[1] or [], first)
            accepted = build(self._string(other, path))
            return not any(isinstance(v, str) and accepted.accepts(_dumps(v)) for v in chosen)
        if common == {"object"}:
            # Texts have no properties but those that `_object` gives them.
            if all(
                any(not _may_have(other, name) for name in one.get("required", ()))
                for one, other in ((first, second), (second, first))
            ):
                return True
            for one, other in ((first, second), (second, first)):
                for name in one.get("required", ()):
                    schema = _property(other, name)
                    if schema is False:
                        return True
                    if name in other.get("required", ()) and self._are_disjoint(
                        _property(one, name), schema, path, depth - 1
                    ):
                        return True
        return False

    def _enumerated(self, schema: Mapping[str, Any], values: Iterable[Any], path: str) -> Expression:
        rest = {key: each for key, each in schema.items() if key in APPLIED and key not in ("enum", "const")}
        options = []
        for value in values:
            if not _includes(rest.get("type", list(TYPES)), _type_of(value)):
                continue
            others = _without(rest, "type").keys() & set(OF_TYPE.get(_type_of(value), ()))
            if others and not isinstance(value, list | dict):
                of_type = {key: rest[key] for key in others} | {"type": _type_of(value)}
                if not build(self.value(of_type, path)).accepts(_dumps(value)):
                    continue
            elif others:
                raise UnsupportedError(f"{path}/enum: values beside {', '.join(sorted(others))} are not supported")
            options.append(self.constant(value))
        return choice(*options)

    def constant(self, value: Any) -> Expression:
        """Returns the text of a value, with whitespace between its tokens."""
        if isinstance(value, dict):
            items = [self.property_of(self.constant(key), self.constant(each)) for key, each in value.items()]
            return self._between("{", items, "}")
        if isinstance(value, list):
            return self._between("[", [self.constant(each) for each in value], "]")
        return literal(_dumps(value))

    def _between(self, begin: str, items: Sequence[Expression], end: str) -> Expression:
        parts: list[Expression] = [literal(begin), self.space]
        for index, item in enumerate(items):
            parts += [self.comma(), item] if index else [item]
        return sequence(*parts, self.space, literal(end))

    def anything(self, depth: int) -> Expression:
        """Returns any value, with arrays and objects up to some depth."""
        if depth not in self.known:
            options: list[Expression] = [
                *(literal(each) for each in ("null", "true", "false")),
                numbers.NUMBER,
                _any_string(),
            ]
            inner = self.anything(depth - 1) if depth > 0 else NOTHING
            options += [self._array_of(inner, 0, None), self._object_of(_any_string(), inner)]
            self.known[depth] = choice(*options)
        return self.known[depth]

    def _array_of(self, item: Expression, least: int, most: int | None) -> Expression:
        """Returns arrays of a number of items."""
        return self._listed("[", [] if _is_nothing(item) else [item], "]", least, most)

    def _object_of(self, name: Expression, item: Expression) -> Expression:
        """Returns objects of any number of properties."""
        items = [] if _is_nothing(item) else [self.property_of(name, item)]
        return self._listed("{", items, "}", 0, None)

    def _listed(self, begin: str, items: Sequence[Expression], end: str, least: int, most: int | None) -> Expression:
        """Returns lists of any of some items, with commas between them."""
        if not items:
            most = 0
        if most is not None and most < least:
            return NOTHING
        if most == 0:
            return sequence(literal(begin), self.space, literal(end))
        item = sequence(choice(*items), self.space)
        comma = sequence(literal(","), self.space)
        number = max(least, 1)
        if most is None and least <= COUNTED:  # the last of the least items repeats
            further = Network(3, ((0, item, 1), (1, comma, 0), (1, None, 2)))
            content = sequence(Repeat(sequence(item, comma), number - 1, number - 1), further)
        else:
            content = sequence(item, Repeat(sequence(comma, item), number - 1, None if most is None else most - 1))
        return sequence(literal(begin), self.space, content if least else optional(content), literal(end))

    def _null(self, schema: Mapping[str, Any], path: str) -> Expression:
        return literal("null")

    def _boolean(self, schema: Mapping[str, Any], path: str) -> Expression:
        return choice(literal("true"), literal("false"))

    def _integer(self, schema: Mapping[str, Any], path: str) -> Expression:
        return self._number(schema, path, numbers.integers)

    def _number(
        self, schema: Mapping[str, Any], path: str, between: Callable[..., Expression] = numbers.decimals
    ) -> Expression:
        divisor = _decimal(schema, "multipleOf", path) if "multipleOf" in schema else None
        if divisor is not None and divisor <= 0:
            raise ValueError(f"{path}/multipleOf: must be above 0, got {schema['multipleOf']}")
        try:
            return between(*_bounds(schema, path), divisor)
        except numbers.DivisorError as error:
            raise UnsupportedError(f"{path}/multipleOf: {error}") from error

    def _string(self, schema: Mapping[str, Any], path: str) -> Expression:
        parts: list[Expression] = []
        least, most = (_count(schema, key, path) for key in ("minLength", "maxLength"))
        for pattern in _all(schema.get("pattern", ())):
            try:
                parts.append(regex.parse(pattern, string_of, anchored=False))
            except ValueError as error:
                raise UnsupportedError(f"{path}/pattern: {error}") from error
        for name in map(str, _all(schema.get("format", ()))):
            if name in UNSUPPORTED:
                raise UnsupportedError(f"{path}/format: {name!r} is not supported")
            if name in FORMATS:
                parts.append(regex.parse(FORMATS[name], string_of))
        if most is not None and most < (least or 0):
            return NOTHING
        limit = _limit(schema, path, "minLength", "maxLength")
        if not parts and not limit:
            return _any_string()
        try:
            content = functools.reduce(intersection, parts) if parts else Repeat(_character(), least or 0, most)
            if parts and limit:
                content = counted(content, _characters(), least or 0, most)
        except TooLargeError as error:
            raise TooLargeError(f"{path}/{limit or 'pattern'}") from error
        if _is_nothing(content):
            return NOTHING
        found = sequence(literal('"'), content, literal('"'))
        return Named(found, f"{path}/{limit}") if limit else found

    def _array(self, schema: Mapping[str, Any], path: str) -> Expression:
        least, most = (_count(schema, key, path) for key in ("minItems", "maxItems"))
        least, limit = least or 0, _limit(schema, path, "minItems", "maxItems")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise UnsupportedError(f"{path}/uniqueItems: not supported")
        if "contains" in schema:
            raise UnsupportedError(f"{path}/contains: not supported")
        items, first = schema.get("items", True), schema.get("prefixItems", [])
        rest_path = f"{path}/items"
        if isinstance(items, list):
            first, items, rest_path = items, schema.get("additionalItems", True), f"{path}/additionalItems"
        rest = self.value(items, rest_path) if most is None or most > len(first) else NOTHING
        if not first:
            found = self._array_of(rest, least, most)
            return Named(found, f"{path}/{limit}") if limit and not _is_nothing(found) else found
        edges: list[tuple[int, Expression | None, int]] = [(0, sequence(literal("["), self.space), 1)]
        # Place 1 + i is after i items; the last one is after the array.
        last = len(first) + 2
        for index, each in enumerate(first):
            if index >= least:
                edges.append((1 + index, sequence(self.space, literal("]")), last))
            if most is not None and index >= most:
                break
            item = self.value(each, f"{path}/prefixItems/{index}")
            if _is_nothing(item):
                break
            edges.append((1 + index, sequence(*([self.comma()] if index else []), item), 2 + index))
        else:
            after, most_left = len(first) + 1, None if most is None else most - len(first)
            further = [] if _is_nothing(rest) else [sequence(self.comma(), rest)]
            if further or least <= len(first):
                repeated = Repeat(choice(*further), max(0, least - len(first)), most_left) if further else EMPTY
                edges.append((after, sequence(repeated, self.space, literal("]")), last))
        return Network(last + 1, tuple(edges))

    def _object(self, schema: Mapping[str, Any], path: str) -> Expression:
        properties, patterns = dict(schema.get("properties", {})), schema.get("patternProperties", {})
        required = list(schema.get("required", ())) if not isinstance(schema.get("required"), bool) else []
        additional = _additional(schema)
        for name in required:
            if name not in properties:
                properties[name] = _property(schema, name)
        names = self._names(schema, path)
        entries: list[tuple[Expression, bool]] = []  # of declared properties, and whether each is required
        for name, each in properties.items():
            whole = each
            for pattern, other in patterns.items():
                if name in schema.get("properties", {}) and _finds(pattern, name, path):
                    whole = self.merged(whole, other, f"{path}/patternProperties")
            item = self.value(whole, f"{path}/properties/{name}")
            if _is_nothing(item) or not (names is None or build(names).accepts(_dumps(name))):
                if name in required:
                    return NOTHING
                continue
            entries.append((self.property_of(literal(_dumps(name)), item), name in required))
        further = self._further(schema, properties, additional, names, path)
        least, most = (_count(schema, key, path) for key in ("minProperties", "maxProperties"))
        return self._properties(entries, further, least or 0, most, path)

    def _names(self, schema: Mapping[str, Any], path: str) -> Expression | None:
        if "propertyNames" not in schema:
            return None
        return self.value(self.merged({"type": "string"}, schema["propertyNames"], path), f"{path}/propertyNames")

    def _further(
        self,
        schema: Mapping[str, Any],
        properties: Mapping[str, Any],
        additional: Schema,
        names: Expression | None,
        path: str,
    ) -> list[Expression]:
        """Returns the properties that are not declared, by the patterns of their names."""
        found, left = [], names if names is not None else _usual_string()
        if properties:
            left = difference(left, choice(*(literal(_dumps(name)) for name in properties)))
        patterns = schema.get("patternProperties", {})
        automata = {pattern: self._string({"pattern": pattern}, f"{path}/patternProperties") for pattern in patterns}
        for first, second in itertools.combinations(patterns, 2):
            if patterns[first] != patterns[second] and not _is_nothing(intersection(automata[first], automata[second])):
                raise UnsupportedError(f"{path}/patternProperties: {first!r} and {second!r} have names in common")
        for pattern, each in patterns.items():
            item = self.value(each, f"{path}/patternProperties/{pattern}")
            key = intersection(left, automata[pattern])
            if not _is_nothing(item) and not _is_nothing(key):
                found.append(self.property_of(key, item))
        for automaton in automata.values():
            left = difference(left, automaton)
        if additional is not False and not _is_nothing(left):
            item = self.value(additional, f"{path}/additionalProperties")
            if not _is_nothing(item):
                found.append(self.property_of(left, item))
        return found

    def _properties(
        self,
        entries: Sequence[tuple[Expression, bool]],
        further: list[Expression],
        least: int,
        most: int | None,
        path: str,
    ) -> Expression:
        """Returns objects of the declared properties, in order, and of further ones.

        Places are numbered by the declared properties that have been passed, by those that are written, as far as they
        are counted, and by whether a comma has been written.
        """
        number, num_required = len(entries), sum(is_required for _, is_required in entries)
        if most is not None and (most < least or most < num_required):
            return NOTHING
        if least <= num_required:
            least = 0
        if least > 1 and further:
            raise UnsupportedError(f"{path}/minProperties: {least} of names that may repeat are not supported")
        if most is not None and not further and most >= number:
            most = None
        counted = max(least, 0 if most is None else most)
        if counted > MOST_COUNTED or counted * (number + 1) > 40 * MOST_COUNTED:
            raise UnsupportedError(f"{path}: minProperties or maxProperties above {MOST_COUNTED} is not supported")

        def place(passed: int, written: int, has_comma: bool) -> int:
            return 1 + (min(written, counted) * (number + 1) + passed) * 2 + has_comma

        last = 1 + 2 * (counted + 1) * (number + 1)
        edges: list[tuple[int, Expression | None, int]] = [(0, sequence(literal("{"), self.space), place(0, 0, True))]
        close, comma = sequence(self.space, literal("}")), self.comma()
        left = [sum(is_required for _, is_required in entries[i:]) for i in range(number + 1)]
        if not num_required and least == 0:
            edges.append((0, sequence(literal("{"), self.space, literal("}")), last))
        for written in range(counted + 1):
            goes_on = most is None or written < most
            for passed in range(number + 1):
                without_comma, with_comma = place(passed, written, False), place(passed, written, True)
                is_end = written >= least and not left[passed]
                if written or counted == 0:
                    if is_end:
                        edges.append((without_comma, close, last))
                    if goes_on and (passed < number or further):
                        edges.append((without_comma, comma, with_comma))
                if not goes_on:
                    continue
                if passed < number:
                    entry, is_required = entries[passed]
                    edges.append((with_comma, entry, place(passed + 1, written + 1, False)))
                    if not is_required:
                        edges.append((with_comma, None, place(passed + 1, written, True)))
                else:
                    edges += [(with_comma, each, place(passed, written + 1, False)) for each in further]
        return Network(last + 1, tuple(edges))


@functools.cache
def _character() -> Automaton:
    """Returns any character of a string in its usual spelling."""
    return minimal(build(string_of(ALL)))


@functools.cache
def _characters() -> Automaton:
    """Returns the automaton that counts the characters of strings in their usual spelling."""
    return meter(_character())


@functools.cache
def _any_string() -> Automaton:
    """Returns any string in any spelling."""
    escaped = choice(sequence(literal("\\"), choice(*map(literal, '"\\/bfnrt'))), ESCAPED_CODE)
    return minimal(build(sequence(literal('"'), Repeat(choice(characters(RAW), escaped), 0, None), literal('"'))))


@functools.cache
def _usual_string() -> Automaton:
    """Returns any string in its usual spelling."""
    return minimal(build(sequence(literal('"'), Repeat(_character(), 0, None), literal('"'))))


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


def _absent(name: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of values without a property, to be merged with another one."""
    # To name it must not exclude other names where no property is declared.
    return {"properties": {name: False}} | ({} if base.get("properties") else {"additionalProperties": True})


def _apart(options: Sequence[Schema], base: Mapping[str, Any]) -> Sequence[Schema]:
    """Returns the options of `oneOf`; those that require properties alone exclude the properties of each other."""
    if not all(isinstance(each, Mapping) and set(each) & APPLIED == {"required"} for each in options):
        return options
    names: list[list[str]] = [each["required"] for each in options if isinstance(each, Mapping)]
    result: list[Schema] = []
    for own in names:
        others = [[name for name in each if name not in own] for each in names if each is not own]
        lacks = [{"anyOf": [_absent(name, base) for name in other]} for other in others]
        result.append({"allOf": [{"required": own}, *lacks]} if all(others) else False)
    return result


def _may_have(schema: Mapping[str, Any], name: str) -> bool:
    """Whether the texts of a schema may have a property."""
    if name in schema.get("properties", {}):
        return schema["properties"][name] is not False
    patterns = schema.get("patternProperties", {})
    if name in schema.get("required", ()) or any(_finds(pattern, name, "#") for pattern in patterns):
        return True
    return _additional(schema) is not False


def _additional(schema: Mapping[str, Any]) -> Schema:
    """Returns the schema of properties that are not declared: none beside declared ones, unless it says so."""
    is_open = not schema.get("properties") and not schema.get("patternProperties")
    found: Schema = schema.get("additionalProperties", is_open)
    return found


def _needed(needed: Any, path: str) -> Schema:
    """Returns the schema of values with a property that needs others, or a schema."""
    if not isinstance(needed, list | Mapping | bool):
        raise ValueError(f"{path}: must be a list of names or a schema, got {needed!r}")
    return {"required": needed} if isinstance(needed, list) else needed


def _without(schema: Mapping[str, Any], *keywords: str) -> dict[str, Any]:
    return {key: each for key, each in schema.items() if key not in keywords}


def _has_objects(schema: Mapping[str, Any]) -> bool:
    return bool({"properties", "patternProperties", "additionalProperties"} & schema.keys())


def _has_places(schema: Mapping[str, Any]) -> bool:
    return "prefixItems" in schema or isinstance(schema.get("items"), list)


def _has_items(schema: Mapping[str, Any]) -> bool:
    return bool({"items", "prefixItems", "additionalItems"} & schema.keys())


def _is_open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties", True) is True


def _property(schema: Mapping[str, Any], name: str) -> Schema:
    """Returns what a schema says of a property."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    for pattern, each in schema.get("patternProperties", {}).items():
        if _finds(pattern, name, "#"):
            return each
    return schema.get("additionalProperties", True)


def _finds(pattern: str, name: str, path: str) -> bool:
    try:
        return _search(pattern).accepts(name.encode())
    except ValueError as error:
        raise UnsupportedError(f"{path}/patternProperties: {error}") from error


@functools.lru_cache(maxsize=64)
def _search(pattern: str) -> Automaton:
    return build(regex.parse(pattern, anchored=False))


def _check_types(types: Any, path: str) -> None:
    names = types if isinstance(types, list) else [types]
    if types is not None and not set(names) <= {*TYPES, "any"}:
        raise ValueError(f"{path}/type: must be of {', '.join(TYPES)}, got {types!r}")


def _includes(types: Any, name: str) -> bool:
    names = types if isinstance(types, list) else [types]
    return name in names or "any" in names or (name == "integer" and "number" in names)


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kind = kinds.get(type(value), "null")
    return "integer" if kind == "number" and value.is_integer() else kind


def _equal(first: Any, second: Any) -> bool:
    """Whether two values are equal: true and 1 are not."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True) or (
        not isinstance(first, bool) and not isinstance(second, bool) and first == second
    )


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that `enum` and `const` allow, None without either."""
    if "const" in schema:
        const = schema["const"]
        return [const] if any(_equal(const, each) for each in schema.get("enum", [const])) else []
    return list(schema["enum"]) if "enum" in schema else None


def _possible_types(schema: Mapping[str, Any]) -> set[str]:
    values = _values(schema)
    types = {each for each in TYPES if _includes(schema.get("type", list(TYPES)), each)}
    return types if values is None else types & {_type_of(value) for value in values}


def _dumps(value: Any) -> bytes:
    """Returns the text of a value in its usual spelling."""
    return json.dumps(value, ensure_ascii=False).encode()


def _count(schema: Mapping[str, Any], key: str, path: str) -> int | None:
    if key not in schema:
        return None
    value = schema[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise ValueError(f"{path}/{key}: must be an integer of at least 0, got {value!r}")
    return int(value)


def _all(value: Any) -> tuple[Any, ...]:
    """Returns the values of a keyword: of several schemas in one it is a tuple, which JSON has not."""
    return value if isinstance(value, tuple) else (value,)


def _limit(schema: Mapping[str, Any], path: str, least: str, most: str) -> str | None:
    """Returns the keyword of the larger of two counts with its value, None without counts.

    Raises:
      UnsupportedError: the least number is too large to be counted.
    """
    if (schema.get(least) or 0) > MOST_COUNT:
        raise UnsupportedError(f"{path}/{least}: must be at most {MOST_COUNT}, got {schema[least]}")
    key = next((key for key in (most, least) if schema.get(key) is not None), None)
    return key and f"{key} of {schema[key]}"


def _bounds(schema: Mapping[str, Any], path: str) -> tuple[Bound | None, Bound | None]:
    """Returns the least and the greatest number of a schema."""
    bounds = []
    for inclusive, exclusive, tighter in (
        ("minimum", "exclusiveMinimum", max),
        ("maximum", "exclusiveMaximum", min),
    ):
        found = []
        for key, is_inclusive in ((inclusive, True), (exclusive, False)):
            value = schema.get(key)
            if value is None or isinstance(value, bool):
                continue
            found.append(Bound(_decimal(schema, key, path), is_inclusive and schema.get(exclusive) is not True))
            if abs(value) >= numbers.LIMIT and (value > 0) == (tighter is max):
                raise UnsupportedError(f"{path}/{key}: numbers have up to {numbers.MOST_WHOLE} digits, got {value}")
        # At equal values the exclusive bound is the tighter one.
        sign = 1 if tighter is max else -1
        bounds.append(max(found, key=lambda bound: (sign * bound.value, not bound.inclusive)) if found else None)
    return bounds[0], bounds[1]


def _decimal(schema: Mapping[str, Any], key: str, path: str) -> Fraction:
    """Returns the value of a number in a schema."""
    value = schema[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{path}/{key}: must be a number, got {value!r}")
    found = Fraction(str(value))
    if (found * 10**numbers.MOST_PLACES).denominator > 1:
        raise UnsupportedError(f"{path}/{key}: must have up to {numbers.MOST_PLACES} decimal places, got {value}")
    return found
