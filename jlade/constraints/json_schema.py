"""JSON Schema as expressions over the bytes of JSON: drafts 4 to 2020-12, as far as an automaton can hold them.

Properties are written in the order of their declaration, then those that a schema allows besides. An object has the
declared properties alone where `additionalProperties` says nothing, so every text is valid, and not every valid value
has a text. What cannot be held is refused by its keyword and path; annotations and unknown keywords have no effect.
"""

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jlade.constraints import formats, lark, numbers, regex
from jlade.constraints.automaton import (
    COUNTED,
    EMPTY,
    NOTHING,
    Automaton,
    Byte,
    Choice,
    Expression,
    Named,
    Network,
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
)
from jlade.constraints.code_points import ALL, Ranges, common, union, without
from jlade.constraints.formats import FORMATS, UNSUPPORTED
from jlade.constraints.json_document import (
    APPLIED,
    BOUNDS,
    DEPENDENCIES,
    GRAMMAR,
    OF_TYPE,
    TYPES,
    Document,
    Keywords,
    Schema,
    UnsupportedError,
    all_of,
    check,
    check_supported,
    equal,
    finds,
    includes,
    required,
    type_of,
)
from jlade.constraints.moves import MAX_COUNT
from jlade.constraints.numbers import Bound

DEPTH = 3  # of recursion, and of values of which nothing is known
MAX_NESTED = 100  # schemas within each other: far from Python's limit, whose error NumPy turns into others
MAX_OPTIONS = 64  # of combined choices
MAX_COUNTED = 64  # properties that are counted
MAX_UNIQUE = 6  # values of which items that differ may be: their sets are states
CHOICES = ("anyOf", "oneOf")
ITEMS = {"items", "prefixItems", "additionalItems"}
PROPERTIES = {"properties", "patternProperties", "additionalProperties"}
UNEVALUATED = "unevaluatedProperties"
EXPANDED = {"$ref", "allOf", "if", *DEPENDENCIES}
SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}  # after a backslash
RAW: Ranges = without(((0, 31), (34, 34), (92, 92)))
# What may stand between tokens has a bound: a model that has nothing to say could write it for ever.
LINE = sequence(optional(literal("\n")), Repeat(Byte(1 << ord(" ") | 1 << ord("\t")), 0, 20))


def parse(schema: Schema | str, depth: int = DEPTH, whitespace: bool = True) -> Expression:
    """Returns the texts of the values that a schema accepts.

    Args:
      schema: as an object, or as text.
      depth: how often a reference may be within itself, and how deep values are of which the schema says nothing.
      whitespace: whether a blank may stand after a colon, and after brackets and commas and before brackets a line
        break and up to 20 blanks. Otherwise there is none.

    Raises:
      UnsupportedError: names the keyword and its path.
      ValueError: the schema is wrong.
    """
    try:
        root: Schema = json.loads(schema) if isinstance(schema, str) else schema
        texts = _Compiler(root, depth, whitespace).value(root, "#")
    except RecursionError as error:
        raise UnsupportedError("#", "its references are too deep within each other") from error
    if _is_nothing(texts):
        raise ValueError(f"the schema accepts no value, or none of a depth up to {depth}")
    return texts


def string_of(ranges: Ranges) -> Expression:
    """Returns a character of some ranges in a string, in its usual spelling: itself, or escaped where it must be."""
    options = [characters(common(ranges, RAW))]
    for first, last in common(ranges, union([(0, 31), (34, 34), (92, 92)])):
        for code in range(first, last + 1):
            short = SHORT.get(chr(code))
            options.append(literal("\\" + short) if short else _escaped(code))
    return choice(*options)


def spelled(text: str) -> Expression:
    """Returns a text as a string in its usual spelling."""
    content = [literal(c) if " " <= c not in '"\\' else string_of(((ord(c), ord(c)),)) for c in text]
    return sequence(literal('"'), *content, literal('"'))


def _escaped(code: int) -> Expression:
    digits = f"{code:04x}"
    return sequence(literal("\\u"), *(choice(*map(literal, sorted({d, d.upper()}))) for d in digits))


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
    def __init__(self, root: Schema, depth: int, whitespace: bool):
        self.document, self.depth = Document(root), depth
        self.line, self.blank = (LINE, optional(literal(" "))) if whitespace else (EMPTY, EMPTY)
        self.open: Counter[str] = Counter()  # references that are being followed
        self.followed: set[str] = set()  # references that the schema being read has been expanded by
        self.num_nested = 0  # schemas around the one that is being read
        self.known: dict[int, Expression] = {}  # any value, by its depth
        # Values by their schemas and the references that are being followed. A schema is kept, so that its id is.
        self.read: dict[tuple[int, frozenset[tuple[str, int]]], tuple[Schema, Expression]] = {}

    def begin(self, bracket: str) -> Expression:
        return sequence(literal(bracket), self.line)

    def comma(self) -> Expression:
        return sequence(literal(","), self.line)

    def end(self, bracket: str, is_empty: bool = False) -> Expression:
        """Returns the end of an array or an object."""
        return literal(bracket) if is_empty else sequence(self.line, literal(bracket))

    def item(self, item: Expression, is_first: bool) -> Expression:
        """Returns an item after the comma that parts it from the one before it."""
        return item if is_first else sequence(self.comma(), item)

    def property_of(self, name: Expression, item: Expression) -> Expression:
        return sequence(name, literal(":"), self.blank, item)

    # Schemas to schemas.

    def merged(self, first: Schema, second: Schema, path: str, within: tuple[str, ...] = ()) -> Schema:
        """Returns a schema that accepts the values that both accept; those within it are merged when they are read."""
        if _is_true(first) or _is_true(second):
            return second if _is_true(first) else first
        first, second = (self.expanded(schema, path, within) for schema in (first, second))
        if first is False or second is False:
            return False
        if _is_true(first) or _is_true(second):
            return second if _is_true(first) else first
        assert not isinstance(first, bool)
        assert not isinstance(second, bool)
        if UNEVALUATED in first or UNEVALUATED in second:
            raise UnsupportedError(f"{path}/{UNEVALUATED}", "not supported within other schemas beside anyOf or oneOf")
        both = first, second
        are_ordered = any("prefixItems" in schema or isinstance(schema.get("items"), list) for schema in both)
        if are_ordered and all(ITEMS & schema.keys() for schema in both) and first != second:
            raise UnsupportedError(f"{path}/allOf", "items in order beside other items are not supported")
        result = {key: value for key, value in {**first, **second}.items() if key in APPLIED}
        for key in result:
            if key in first and key in second:
                result[key] = self._merged_keyword(key, first, second, path)
        if "const" in first and "const" in second and not equal(first["const"], second["const"]):
            return False
        if all(PROPERTIES & schema.keys() for schema in both):
            self._merge_objects(result, first, second, path)
        return result

    def _merged_keyword(self, key: str, first: Keywords, second: Keywords, path: str) -> Any:
        one, other = first[key], second[key]
        if equal(one, other):
            return one
        match key:
            case "type":
                return [name for name in TYPES if includes(one, name) and includes(other, name)]
            case "enum":
                return [constant for constant in one if any(equal(constant, value) for value in other)]
            case "const":
                return one  # those that differ leave no value
            case "required" if isinstance(one, list) and isinstance(other, list):
                return [*one, *(name for name in other if name not in one)]
            case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(one, bool) or isinstance(other, bool):
                raise UnsupportedError(f"{path}/allOf", f"{key} of draft 4 in several schemas is not supported")
            case "minimum" | "minLength" | "minItems" | "minProperties" | "exclusiveMinimum":
                return max(one, other)
            case "maximum" | "maxLength" | "maxItems" | "maxProperties" | "exclusiveMaximum":
                return min(one, other)
            case "items" | "additionalItems" | "propertyNames" if not isinstance(one, list) | isinstance(other, list):
                return _both(one, other)
            case "contains" if first.get("contains") != second.get("contains"):
                raise UnsupportedError(f"{path}/allOf", f"{key} in several schemas is not supported")
            case "uniqueItems":
                return one or other
            case "anyOf" | "oneOf":  # a value of one option of each is of one pair
                pairs = list(itertools.product(one, other))
                if len(pairs) > MAX_OPTIONS:
                    raise UnsupportedError(f"{path}/{key}", f"more than {MAX_OPTIONS} combinations are not supported")
                return [_both(*pair) for pair in pairs]
            case "not":
                return {"anyOf": [one, other]}
            case "properties" | "patternProperties" | "additionalProperties":
                return one  # see `_merge_objects`
            case "pattern" | "format":
                return (*all_of(one), *all_of(other))
            case "multipleOf" if all(float(divisor).is_integer() for divisor in (one, other)):
                return math.lcm(int(one), int(other))
        raise UnsupportedError(f"{path}/allOf", f"{key} in several schemas is not supported")

    def _merge_objects(self, result: dict[str, Any], first: Keywords, second: Keywords, path: str) -> None:
        one_patterns, other_patterns = (schema.get("patternProperties", {}) for schema in (first, second))
        for patterns, other in ((one_patterns, second), (other_patterns, first)):
            is_open = other.get("additionalProperties", True) is True
            if patterns and patterns != other.get("patternProperties") and not is_open:
                raise UnsupportedError(f"{path}/allOf", "patternProperties beside additionalProperties")
        if names := dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})]):
            result["properties"] = {name: _both(_property(first, name), _property(second, name)) for name in names}
        if patterns := dict.fromkeys([*one_patterns, *other_patterns]):
            result["patternProperties"] = {
                pattern: _both(one_patterns.get(pattern, True), other_patterns.get(pattern, True))
                for pattern in patterns
            }
        if "additionalProperties" in result:
            further = (schema.get("additionalProperties", True) for schema in (first, second))
            result["additionalProperties"] = _both(*further)

    def expanded(self, schema: Schema, path: str, within: tuple[str, ...] = ()) -> Schema:
        """Returns a schema without a reference, `allOf`, `if` and dependencies at its top.

        Args:
          schema: to be expanded.
          path: of the schema.
          within: references of which it is a part, at the top of the same value.
        """
        if isinstance(schema, Mapping) and UNEVALUATED in schema:
            check(schema, path)
            whole = self.expanded(_without(schema, UNEVALUATED), path, within)
            return _closed(whole, schema[UNEVALUATED])
        while True:
            check(schema, path)
            if not isinstance(schema, Mapping) or not EXPANDED & schema.keys():
                return schema
            if "$ref" in schema:
                reference = schema["$ref"]
                if reference in within:
                    raise ValueError(f"{path}: a reference leads to itself")
                within = (*within, reference)
                self.followed.add(reference)
                rest = {} if self.document.refs_stand_alone else _without(schema, "$ref")
                schema = self.merged(rest, self.document.resolve(reference, path), path, within)
            elif "allOf" in schema:
                parts = schema["allOf"]
                schema = _without(schema, "allOf")
                for index, part in enumerate(parts):
                    schema = self.merged(schema, part, f"{path}/allOf/{index}", within)
            elif "if" in schema:
                condition = schema["if"]
                options = [
                    _both(condition, schema.get("then", True)),
                    _both({"not": condition}, schema.get("else", True)),
                ]
                is_idle = "then" not in schema and "else" not in schema
                schema = _without(schema, "if", "then", "else")
                schema = schema if is_idle else self.merged(schema, {"anyOf": options}, f"{path}/if", within)
            else:
                keyword = next(key for key in DEPENDENCIES if key in schema)
                needs = schema[keyword]
                base = schema = _without(schema, keyword)
                for name, needed in needs.items():
                    needed = {"required": needed} if isinstance(needed, list) else needed
                    options = [_absent(name, base), needed]
                    schema = self.merged(schema, {"anyOf": options}, f"{path}/{keyword}", within)

    # Schemas to expressions.

    def value(self, schema: Schema, path: str) -> Expression:
        """Returns the texts of the values of a schema; `NOTHING` if there are none up to the depth."""
        key = id(schema), frozenset((+self.open).items())
        if key not in self.read:
            self.read[key] = schema, self._value_to_depth(schema, path)
        return self.read[key][1]

    def _value_to_depth(self, schema: Schema, path: str) -> Expression:
        if self.num_nested >= MAX_NESTED:
            raise UnsupportedError("#", "its references are too deep within each other")
        schema, followed = self._followed(self.expanded, schema, path)
        ways = None
        if isinstance(schema, Mapping) and self._has_exclusion(schema):
            schema, no = _without(schema, "not"), schema["not"]
            ways, more = self._followed(self._failing, no, schema, f"{path}/not")
            followed |= more
        if any(self.open[reference] >= self.depth for reference in followed):
            return NOTHING
        self.num_nested += 1
        self.open.update(followed)
        try:
            if ways is None:
                return self._value(schema, path)
            assert isinstance(schema, Mapping)
            return self._one_of(schema, ways, f"{path}/not")
        finally:
            self.num_nested -= 1
            self.open.subtract(followed)

    def _followed(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, set[str]]:
        """Returns the result of a function, and the references that it follows."""
        outer, self.followed = self.followed, set()
        try:
            return function(*arguments), self.followed
        finally:
            self.followed = outer

    def _value(self, schema: Schema, path: str) -> Expression:
        if schema is False:
            return NOTHING
        if _is_true(schema):
            return self.anything(self.depth)
        assert isinstance(schema, Mapping)
        check_supported(_without(schema, UNEVALUATED), path)
        if (values := _values(schema)) is not None:
            return choice(*(self.constant(value) for value in values if self.document.accepts(value, schema, path)))
        for keyword in CHOICES:
            if keyword in schema:
                base, options = _without(schema, keyword), schema[keyword]
                if keyword == "oneOf":
                    options = self._apart(base, options, f"{path}/oneOf")
                return self._one_of(base, options, f"{path}/{keyword}")
        types = _types(schema)
        if "number" in types:
            types.remove("integer")
        texts = [getattr(self, f"_{name}")(schema, path) for name in types]
        if "not" in schema:  # strings alone
            excluded = self.value(_both({"type": "string"}, schema["not"]), f"{path}/not")
            # Other spellings of what is excluded are excluded, too.
            texts = [difference(intersection(text, _usual_string()), excluded) for text in texts]
        return choice(*(text for text in texts if not _is_nothing(text)))

    def _one_of(self, base: Keywords, options: Iterable[Schema], path: str) -> Expression:
        """Returns the texts of the values of a schema and of one of some options."""
        base, further = _without(base, UNEVALUATED), {key: base[key] for key in base if key == UNEVALUATED}
        wholes = (_both(base, option) for option in options)
        if further:  # the properties of an option are evaluated, too
            wholes = ({"allOf": [whole], **further} for whole in wholes)
        texts = [self.value(whole, f"{path}/{i}") for i, whole in enumerate(wholes)]
        return choice(*(text for text in texts if not _is_nothing(text)))

    def _apart(self, base: Keywords, options: Sequence[Schema], path: str) -> list[Schema]:
        """Returns the options of `oneOf` beside a schema, each without the values of the others."""
        base = _without(base, UNEVALUATED)
        wholes, others = [_both(base, option) for option in options], [list[Schema]() for _ in options]
        for i, j in itertools.combinations(range(len(options)), 2):
            if not self._are_disjoint(wholes[i], wholes[j], path, self.depth):
                others[i].append(options[j])
                others[j].append(options[i])
        return [
            _both(option, {"not": {"anyOf": excluded}}) if excluded else option
            for option, excluded in zip(options, others, strict=True)
        ]

    # What excludes values.

    def _has_exclusion(self, schema: Keywords) -> bool:
        """Whether `not` of a schema is to be replaced by `_failing`, rather than left to a difference of strings."""
        if "not" not in schema or _values(schema) is not None or any(keyword in schema for keyword in CHOICES):
            return False
        return not (_possible_types(schema) == {"string"} and _is_of_strings(schema["not"]))

    def _failing(self, no: Schema, base: Keywords, path: str) -> list[Schema]:
        """Returns schemas, one of which accepts each value of the texts of `base` that `no` refuses.

        Beside `base` none of them accepts a value that `no` accepts.

        Raises:
          UnsupportedError: a keyword of `no` is not supported here.
        """
        no = self.expanded(no, path)
        if _is_true(no):
            return []
        if isinstance(no, bool) or self._are_disjoint(base, no, path, self.depth):
            return [True]
        types, result = _possible_types(base), list[Schema]()
        check_supported(no, path)
        if "not" in no:
            result.append(no["not"])
        for keyword in [key for key in CHOICES if key in no]:
            if keyword == "oneOf":  # values of several options are refused, too
                pairs = itertools.combinations(no["oneOf"], 2)
                result += [_both(*pair) for pair in pairs if not self._are_disjoint(*pair, path, self.depth)]
            ways: list[Schema] = [True]
            for index, option in enumerate(no[keyword]):
                ways = _of_both(ways, self._failing(option, base, f"{path}/{keyword}/{index}"), path)
            result += ways
        if (values := _values(no)) is not None:
            result += self._other_values(values, types, base, path)
        if "type" in no:
            left = [name for name in TYPES if name in types and not includes(no["type"], name)]
            if includes(no["type"], "integer") and "number" in left:
                raise UnsupportedError(f"{path}/type", "numbers that are no integers are not supported")
            result += [{"type": left}] if left else []
        for name, find in (("string", _failing_strings), ("array", _failing_arrays), ("object", self._failing_objects)):
            if name in types and (part := {key: value for key, value in no.items() if key in OF_TYPE[name]}):
                result += [{"type": name, **failing} for failing in find(part, base, path)]
        if "number" in types or "integer" in types:
            result += [{"type": "number", **failing} for failing in _failing_numbers(no, path)]
        return _not_too_many(result, path)

    def _other_values(self, values: list[Any], types: set[str], base: Keywords, path: str) -> list[Schema]:
        """Returns schemas of the values of some types that are none of some others."""
        excluded: dict[str, list[Any]] = {name: [] for name in TYPES}
        for value in values:
            excluded["number" if type_of(value) == "integer" else type_of(value)].append(value)
        free = [name for name in TYPES if name in types and not excluded["number" if name == "integer" else name]]
        result: list[Schema] = [{"type": free}] if free else []
        if "boolean" in types and excluded["boolean"]:
            result.append({"enum": [value for value in (False, True) if value not in excluded["boolean"]]})
        if "string" in types and excluded["string"]:
            result.append({"type": "string", "not": {"enum": excluded["string"]}})
        if {"number", "integer"} & types and excluded["number"]:
            bounds = sorted(excluded["number"])
            result.append({"type": "number", "exclusiveMaximum": bounds[0]})
            result += [
                {"type": "number", "exclusiveMinimum": minimum, "exclusiveMaximum": maximum}
                for minimum, maximum in itertools.pairwise(bounds)
            ]
            result.append({"type": "number", "exclusiveMinimum": bounds[-1]})
        for name in ("array", "object"):
            if name in types and excluded[name]:
                ways: list[Schema] = [{"type": name}]
                for value in excluded[name]:
                    ways = _of_both(ways, self._failing(_only(value), {**base, "type": name}, path), path)
                result += ways
        return result

    def _failing_objects(self, no: Keywords, base: Keywords, path: str) -> Iterable[Keywords]:
        """Yields schemas of the objects in the texts of `base` that keywords of objects refuse."""
        properties, patterns = no.get("properties", {}), no.get("patternProperties", {})
        if no.get("minProperties", 0) > 0:
            yield {"maxProperties": no["minProperties"] - 1}
        if "maxProperties" in no:
            yield {"minProperties": no["maxProperties"] + 1}
        for name in required(no):
            if name not in required(base):
                yield _absent(name, base)
        refused = [(name, schema) for name, schema in properties.items()]  # properties, and what refuses their values
        further, names = no.get("additionalProperties", True), no.get("propertyNames", True)
        if not all(map(_is_true, (*patterns.values(), further, names))):
            if _additional(base) is not False or base.get("patternProperties"):
                if no.keys() == {"propertyNames"} and names is False:
                    yield {"minProperties": 1}
                    return
                raise UnsupportedError(path, "names that are not declared are not supported within not")
            for name in _declared(base):
                matching = [of for pattern, of in patterns.items() if finds(pattern, name, f"{path}/patternProperties")]
                refused += [(name, of) for of in (matching if matching or name in properties else [further])]
                if not self.document.accepts(name, names, f"{path}/propertyNames"):
                    refused.append((name, False))
        refused = [
            (name, schema)
            for name, schema in refused
            if _may_have(base, name) and not _implies(self.expanded(_property(base, name), path), schema)
        ]
        if _additional(base) is False and {name for name, schema in refused if schema is False} >= {*_declared(base)}:
            yield {"minProperties": 1}  # any of them: shorter than each of them
            refused = [(name, schema) for name, schema in refused if schema is not False]
        for name, schema in refused:
            of_name = {"properties": {name: {"not": schema}}, "required": [name]}
            yield of_name | ({} if base.get("properties") else {"additionalProperties": True})

    # Schemas that exclude each other.

    def _are_disjoint(self, first: Schema, second: Schema, path: str, depth: int) -> bool:
        """Whether it is certain that no text of one schema is a value of the other."""
        if depth == 0:
            return False
        first, second = self.expanded(first, path), self.expanded(second, path)
        if first is False or second is False:
            return True
        if first is True or second is True:
            return False
        both_ways = (first, second), (second, first)
        for one, other in both_ways:
            if (chosen := _values(one)) is not None:
                return not any(all(self.document.accepts(value, of, path) for of in (one, other)) for value in chosen)
        for one, other in both_ways:
            for keyword in CHOICES:
                if keyword in one:
                    base = _without(one, keyword, UNEVALUATED)
                    wholes = [_both(base, option) for option in one[keyword]]
                    return all(self._are_disjoint(whole, other, path, depth - 1) for whole in wholes)
        common = _possible_types(first) & _possible_types(second)
        if not common:
            return True
        if common == {"string"}:
            first_string, second_string = (self._string(schema, path) for schema in (first, second))
            if _any_string() in (first_string, second_string):
                return _is_nothing(first_string) or _is_nothing(second_string)
            return _is_nothing(intersection(first_string, second_string))
        if common == {"object"}:
            # Texts have no properties but those that `_object` gives them.
            if all(any(not _may_have(other, name) for name in required(one)) for one, other in both_ways):
                return True
            for one, other in both_ways:
                for name in required(one):
                    of_other = _property(other, name)
                    if self.expanded(of_other, path) is False:
                        return True
                    if name in required(other) and self._are_disjoint(_property(one, name), of_other, path, depth - 1):
                        return True
        return False

    def constant(self, value: Any) -> Expression:
        """Returns the text of a value, with whitespace between its tokens."""
        if not isinstance(value, dict | list):
            return spelled(value) if isinstance(value, str) else literal(json.dumps(value))
        if isinstance(value, dict):
            items = [self.property_of(spelled(key), self.constant(item)) for key, item in value.items()]
        else:
            items = [self.constant(item) for item in value]
        begin, end = "{}" if isinstance(value, dict) else "[]"
        parts = [self.item(item, index == 0) for index, item in enumerate(items)]
        return sequence(self.begin(begin), *parts, self.end(end, is_empty=not items))

    def anything(self, depth: int) -> Expression:
        """Returns any value, with arrays and objects up to some depth."""
        if depth not in self.known:
            inner = self.anything(depth - 1) if depth > 0 else NOTHING
            entry = self.property_of(_any_string(), inner) if depth > 0 else NOTHING
            self.known[depth] = choice(
                *(literal(text) for text in ("null", "true", "false")),
                numbers.NUMBER,
                _any_string(),
                self._listed("[", inner, "]", 0, None),
                self._listed("{", entry, "}", 0, None),
            )
        return self.known[depth]

    def _listed(self, begin: str, item: Expression, end: str, minimum: int, maximum: int | None) -> Expression:
        """Returns arrays or objects of a number of items, with commas between them."""
        if _is_nothing(item):
            maximum = 0
        if maximum is not None and maximum < minimum:
            return NOTHING
        if maximum == 0:
            return sequence(self.begin(begin), literal(end))
        comma, number = self.comma(), max(minimum, 1)
        if maximum is None and minimum <= COUNTED:  # the last of the least items repeats
            further = Network(3, ((0, item, 1), (1, comma, 0), (1, None, 2)))
            content = sequence(Repeat(sequence(item, comma), number - 1, number - 1), further)
        else:
            most_further = None if maximum is None else maximum - 1
            content = sequence(item, Repeat(sequence(comma, item), number - 1, most_further))
        whole = sequence(content, self.end(end))
        return sequence(self.begin(begin), whole if minimum else choice(whole, literal(end)))

    def _null(self, schema: Keywords, path: str) -> Expression:
        return literal("null")

    def _boolean(self, schema: Keywords, path: str) -> Expression:
        return choice(literal("true"), literal("false"))

    def _integer(self, schema: Keywords, path: str) -> Expression:
        return self._number(schema, path, numbers.integers)

    def _number(self, schema: Keywords, path: str, between: Callable[..., Expression] = numbers.decimals) -> Expression:
        divisor = _decimal(schema, "multipleOf", path) if "multipleOf" in schema else None
        minimum, maximum = (_bound(schema, path, *names_and_sign) for names_and_sign in BOUNDS)
        try:
            return between(minimum, maximum, divisor)
        except numbers.DivisorError as error:
            raise UnsupportedError(f"{path}/multipleOf", str(error)) from error

    def _string(self, schema: Keywords, path: str) -> Expression:
        parts: list[Expression] = []
        minimum, maximum = (_count(schema, key) for key in ("minLength", "maxLength"))
        for pattern in all_of(schema.get("pattern", ())):
            try:
                parts.append(regex.search(pattern, string_of))
            except ValueError as error:
                raise UnsupportedError(f"{path}/pattern", str(error)) from error
        for grammar in all_of(schema.get(GRAMMAR, ())):
            try:
                parts.append(lark.in_json(grammar, parse))
            except ValueError as error:
                raise UnsupportedError(f"{path}/{GRAMMAR}", str(error)) from error
        for name in map(str, all_of(schema.get("format", ()))):
            if name in UNSUPPORTED:
                raise UnsupportedError(f"{path}/format", f"{name!r} is not supported")
            if name in FORMATS:
                parts.append(formats.expression(name, string_of))
        if maximum is not None and maximum < (minimum or 0):
            return NOTHING
        limit = _limit(schema, path, "minLength", "maxLength")
        if not parts and not limit:
            return _any_string()
        name = f"{path}/{limit or ('pattern' if 'pattern' in schema else 'format')}"
        try:
            content = functools.reduce(intersection, parts) if parts else Repeat(_character(), minimum or 0, maximum)
            if parts and limit:
                content = counted(content, _characters(), minimum or 0, maximum)
        except TooLargeError as error:
            raise TooLargeError(name) from error
        if _is_nothing(content):
            return NOTHING
        string = sequence(literal('"'), content, literal('"'))
        return Named(string, name)

    def _array(self, schema: Keywords, path: str) -> Expression:
        minimum, maximum = (_count(schema, key) for key in ("minItems", "maxItems"))
        minimum, limit = minimum or 0, _limit(schema, path, "minItems", "maxItems")
        items, first = schema.get("items", True), schema.get("prefixItems", [])
        rest_path = f"{path}/items"
        if isinstance(items, list):
            first, items, rest_path = items, schema.get("additionalItems", True), f"{path}/additionalItems"
        if schema.get("uniqueItems") and (maximum is None or maximum > 1):
            if first or "contains" in schema:
                raise UnsupportedError(f"{path}/uniqueItems", "not supported beside prefixItems or contains")
            return self._unique(items, minimum, maximum, path)
        if "contains" in schema:
            if first:
                raise UnsupportedError(f"{path}/contains", "not supported beside prefixItems")
            return self._containing(items, schema["contains"], minimum, maximum, path)
        rest = self.value(items, rest_path) if maximum is None or maximum > len(first) else NOTHING
        if not first:
            array = self._listed("[", rest, "]", minimum, maximum)
            return Named(array, f"{path}/{limit}") if limit and not _is_nothing(array) else array
        edges: list[tuple[int, Expression | None, int]] = [(0, self.begin("["), 1)]
        # Place 1 + i is after i items; the last one is after the array.
        last = len(first) + 2
        for index, schema_of_item in enumerate(first):
            if index >= minimum:
                edges.append((1 + index, self.end("]", is_empty=index == 0), last))
            if maximum is not None and index >= maximum:
                break
            item = self.value(schema_of_item, f"{path}/prefixItems/{index}")
            if _is_nothing(item):
                break
            edges.append((1 + index, self.item(item, index == 0), 2 + index))
        else:
            after, most_left = len(first) + 1, None if maximum is None else maximum - len(first)
            further = [] if _is_nothing(rest) else [sequence(self.comma(), rest)]
            if further or minimum <= len(first):
                repeated = Repeat(choice(*further), max(0, minimum - len(first)), most_left) if further else EMPTY
                edges.append((after, sequence(repeated, self.end("]")), last))
        return Network(last + 1, tuple(edges))

    def _unique(self, items: Schema, minimum: int, maximum: int | None, path: str) -> Expression:
        """Returns arrays of different items, whose places are the sets of those that have been written."""
        values = self._finite(items, path)
        if values is None or len(values) > MAX_UNIQUE:
            raise UnsupportedError(f"{path}/uniqueItems", f"not supported but for items of up to {MAX_UNIQUE} values")
        sets, last = 2 ** len(values), 1 + 2 ** len(values)
        edges: list[tuple[int, Expression | None, int]] = [(0, self.begin("["), 1)]
        items_of = [self.constant(value) for value in values]
        for written in range(sets):
            if minimum <= written.bit_count():
                edges.append((1 + written, self.end("]", is_empty=written == 0), last))
            if maximum is None or written.bit_count() < maximum:
                edges += [
                    (1 + written, self.item(item, written == 0), 1 + (written | 1 << index))
                    for index, item in enumerate(items_of)
                    if not written & 1 << index
                ]
        return Network(last + 1, tuple(edges))

    def _finite(self, schema: Schema, path: str) -> list[Any] | None:
        """Returns the values of a schema, None if it is not known that there are few."""
        schema = self.expanded(schema, path)
        if not isinstance(schema, Mapping):
            return None if schema else []
        if (values := _values(schema)) is None:
            if keyword := next((key for key in CHOICES if key in schema), None):
                values = []
                for option in schema[keyword]:
                    if (of_option := self._finite(option, path)) is None:
                        return None
                    values += of_option
            elif _possible_types(schema) <= {"null", "boolean"}:
                values = [None, False, True]
            else:
                return None
        different = [value for i, value in enumerate(values) if not any(equal(value, other) for other in values[:i])]
        return [value for value in different if self.document.accepts(value, schema, path)]

    def _containing(self, items: Schema, contained: Schema, minimum: int, maximum: int | None, path: str) -> Expression:
        """Returns arrays, of whose items one is of another schema, too."""
        item, chosen = self.value(items, f"{path}/items"), self.value(_both(items, contained), f"{path}/contains")
        minimum = max(minimum, 1)
        if _is_nothing(chosen) or (maximum is not None and maximum < minimum):
            return NOTHING
        counted = minimum if maximum is None else maximum
        if counted > MAX_COUNTED:
            raise UnsupportedError(f"{path}/contains", f"not supported beside minItems or maxItems above {MAX_COUNTED}")
        # Places are numbered by the items that are written, as far as they are counted, and by whether one is chosen.
        edges: list[tuple[int, Expression | None, int]] = [(0, self.begin("["), 1)]
        last = 1 + 2 * (counted + 1)
        for written in range(counted + 1):
            after = min(written + 1, counted)
            for is_met in (False, True):
                here = 1 + 2 * written + is_met
                if maximum is None or written < maximum:
                    edges.append((here, self.item(item, written == 0), 1 + 2 * after + is_met))
                    edges.append((here, self.item(chosen, written == 0), 1 + 2 * after + True))
                if is_met and written >= minimum:
                    edges.append((here, self.end("]"), last))
        return Network(last + 1, tuple(edges))

    def _object(self, schema: Keywords, path: str) -> Expression:
        properties, patterns = dict(schema.get("properties", {})), schema.get("patternProperties", {})
        needed = required(schema)
        for name in needed:
            if name not in properties:
                properties[name] = _property(schema, name)
        names = self._names(schema, path)
        entries: list[tuple[Expression, bool]] = []  # of declared properties, and whether each is required
        for name, each in properties.items():
            whole = each
            for pattern, other in patterns.items():
                if name in schema.get("properties", {}) and finds(pattern, name, f"{path}/patternProperties"):
                    whole = _both(whole, other)
            item = self.value(whole, f"{path}/properties/{name}")
            if _is_nothing(item) or not (names is None or names.accepts(json.dumps(name, ensure_ascii=False).encode())):
                if name in needed:
                    return NOTHING
                continue
            entries.append((self.property_of(spelled(name), item), name in needed))
        further = self._further(schema, properties, names, path)
        if further:
            # Otherwise a name that has been passed could be begun, as that of another property, and never be ended.
            # Like the names of others it may repeat: the last value counts, and is one of the same schema.
            further += [entry for entry, is_required in entries if not is_required]
        minimum, maximum = (_count(schema, key) for key in ("minProperties", "maxProperties"))
        return self._properties(entries, further, minimum or 0, maximum, path)

    def _names(self, schema: Keywords, path: str) -> Automaton | None:
        if "propertyNames" not in schema:
            return None
        strings = self.value(_both({"type": "string"}, schema["propertyNames"]), f"{path}/propertyNames")
        return intersection(strings, _usual_string())

    def _further(
        self, schema: Keywords, properties: Iterable[str], names: Automaton | None, path: str
    ) -> list[Expression]:
        """Returns the properties that are not declared, by the patterns of their names."""
        left = _other_names(tuple(properties))
        if names is not None:
            left = intersection(left, names)
        # The names by the patterns that they match.
        cells: list[tuple[Automaton, Schema | None]] = [(left, None)]
        for pattern, own in schema.get("patternProperties", {}).items():
            matching = self._string({"pattern": pattern}, f"{path}/patternProperties")
            inside = [(intersection(key, matching), own if of is None else _both(of, own)) for key, of in cells]
            cells = [(difference(key, matching), of) for key, of in cells] + inside
            cells = [cell for cell in cells if not _is_nothing(cell[0])]
        entries = []
        for key, of in cells:
            item = self.value(_additional(schema) if of is None else of, f"{path}/additionalProperties")
            if not _is_nothing(item) and not _is_nothing(key):
                entries.append(self.property_of(key, item))
        return entries

    def _properties(
        self,
        entries: Sequence[tuple[Expression, bool]],
        further: list[Expression],
        minimum: int,
        maximum: int | None,
        path: str,
    ) -> Expression:
        """Returns objects of the declared properties, in order, and of further ones.

        Places are numbered by the declared properties that have been passed, by those that are written, as far as they
        are counted, and by whether a comma has been written.
        """
        number, num_required = len(entries), sum(is_required for _, is_required in entries)
        if maximum is not None and (maximum < minimum or maximum < num_required):
            return NOTHING
        if minimum <= num_required:
            minimum = 0
        if minimum > 1 and further:
            raise UnsupportedError(f"{path}/minProperties", f"{minimum} of names that may repeat are not supported")
        if maximum is not None and not further and maximum >= number:
            maximum = None
        counted = max(minimum, 0 if maximum is None else maximum)
        if counted > MAX_COUNTED or counted * (number + 1) > 40 * MAX_COUNTED:
            raise UnsupportedError(path, f"minProperties or maxProperties above {MAX_COUNTED} is not supported")

        def place(passed: int, written: int, has_comma: bool) -> int:
            return 1 + (min(written, counted) * (number + 1) + passed) * 2 + has_comma

        closing = 1 + 2 * (counted + 1) * (number + 1)  # one for all, as what is before the bracket has many states
        opened, last = closing + 1, closing + 2
        edges: list[tuple[int, Expression | None, int]] = [
            (0, self.begin("{"), opened),
            (opened, None, place(0, 0, True)),
            (closing, self.end("}"), last),
        ]
        comma = self.comma()
        left = [sum(is_required for _, is_required in entries[i:]) for i in range(number + 1)]
        if not num_required and minimum == 0:
            edges.append((opened, literal("}"), last))
        for written in range(counted + 1):
            goes_on = maximum is None or written < maximum
            for passed in range(number + 1):
                without_comma, with_comma = place(passed, written, False), place(passed, written, True)
                is_end = written >= minimum and not left[passed]
                if written or counted == 0:
                    if is_end:
                        edges.append((without_comma, None, closing))
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
                    edges += [(with_comma, entry, place(passed, written + 1, False)) for entry in further]
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


@functools.lru_cache(maxsize=64)
def _other_names(names: tuple[str, ...]) -> Automaton:
    """Returns any string but some names, in its usual spelling."""
    return difference(_usual_string(), choice(*map(spelled, names))) if names else _usual_string()


def _closed(schema: Schema, further: Schema) -> Schema:
    """Returns an expanded schema with what holds for the properties that it does not evaluate."""
    if schema is False:
        return False
    keywords = {} if schema is True else schema
    assert not isinstance(keywords, bool)
    if any(keyword in keywords for keyword in CHOICES):  # which evaluate others
        return {**keywords, UNEVALUATED: further}
    return {"additionalProperties": further, **keywords}


def _absent(name: str, base: Keywords) -> dict[str, Any]:
    """Returns the schema of values without a property, to be merged with another one."""
    # To name it must not exclude other names where no property is declared.
    return {"properties": {name: False}} | ({} if base.get("properties") else {"additionalProperties": True})


def _declared(schema: Keywords) -> list[str]:
    """Returns the names that a schema declares or requires, and that its objects may have."""
    names = dict.fromkeys([*schema.get("properties", {}), *required(schema)])
    return [name for name in names if _may_have(schema, name)]


def _implies(schema: Schema, other: Schema) -> bool:
    """Whether it is certain that a schema accepts only values that another one accepts, by their types."""
    if _is_true(other) or equal(schema, other):
        return True
    if not isinstance(schema, Mapping) or not isinstance(other, Mapping):
        return False
    types = other.get("type", list(TYPES))
    return APPLIED & other.keys() == {"type"} and all(includes(types, name) for name in _possible_types(schema))


def _of_both(ways: list[Schema], others: list[Schema], path: str) -> list[Schema]:
    """Returns the schemas of the values that one of `ways` and one of `others` accept."""
    pairs = (_both(*pair) for pair in itertools.product(ways, others))
    return _not_too_many([way for way in pairs if way is not False], path)


def _not_too_many(ways: list[Schema], path: str) -> list[Schema]:
    if len(ways) > MAX_OPTIONS:
        raise UnsupportedError(path, f"more than {MAX_OPTIONS} ways to differ are not supported")
    return ways


def _failing_strings(no: Keywords, base: Keywords, path: str) -> Iterable[Keywords]:
    """Yields the schemas of the strings that keywords of strings refuse."""
    if no.get("format") in {*FORMATS, *UNSUPPORTED}:
        raise UnsupportedError(f"{path}/format", "not supported within not")
    if part := _without(no, "format"):
        yield {"not": part}


def _failing_numbers(no: Keywords, path: str) -> Iterable[Keywords]:
    """Yields the schemas of the numbers that keywords of numbers refuse."""
    if "multipleOf" in no:
        raise UnsupportedError(f"{path}/multipleOf", "not supported within not")
    for bound, opposite in (("inimum", "aximum"), ("aximum", "inimum")):
        exclusive = no.get(f"exclusiveM{bound}")
        if f"m{bound}" in no:
            yield {f"m{opposite}" if exclusive is True else f"exclusiveM{opposite}": no[f"m{bound}"]}
        if exclusive is not None and not isinstance(exclusive, bool):
            yield {f"m{opposite}": exclusive}


def _failing_arrays(no: Keywords, base: Keywords, path: str) -> Iterable[Keywords]:
    """Yields the schemas of the arrays that keywords of arrays refuse."""
    if no.get("uniqueItems"):
        raise UnsupportedError(f"{path}/uniqueItems", "not supported within not")
    if no.get("minItems", 0) > 0:
        yield {"maxItems": no["minItems"] - 1}
    if "maxItems" in no:
        yield {"minItems": no["maxItems"] + 1}
    if "contains" in no:
        yield {"items": {"not": no["contains"]}}
    first, rest = no.get("prefixItems", []), no.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, no.get("additionalItems", True)
    for index, item in enumerate(first):
        yield {"prefixItems": [*[True] * index, {"not": item}], "minItems": index + 1}
    if first and not _is_true(rest):
        if no.get("maxItems") != len(first):
            raise UnsupportedError(f"{path}/items", "not supported beside prefixItems within not")
    elif not _is_true(rest):
        yield {"contains": {"not": rest}}


def _only(value: Any) -> Schema:
    """Returns the schema of a value alone; of a list or an object by its parts."""
    if isinstance(value, list):
        items = [{"const": part} for part in value]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    properties = {name: {"const": part} for name, part in value.items()}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _may_have(schema: Keywords, name: str) -> bool:
    """Whether the texts of a schema may have a property."""
    if name in schema.get("properties", {}):
        return schema["properties"][name] is not False
    patterns = schema.get("patternProperties", {})
    if name in required(schema) or any(finds(pattern, name, "#/patternProperties") for pattern in patterns):
        return True
    return _additional(schema) is not False


def _additional(schema: Keywords) -> Schema:
    """Returns the schema of properties that are not declared: none beside declared ones, unless it says so."""
    is_open = not schema.get("properties") and not schema.get("patternProperties")
    additional: Schema = schema.get("additionalProperties", is_open)
    return additional


def _is_true(schema: Schema) -> bool:
    """Whether a schema accepts every value: it has no keywords but annotations."""
    return schema is True or (isinstance(schema, Mapping) and not APPLIED & schema.keys())


def _is_of_strings(schema: Schema) -> bool:
    """Whether a schema has keywords of strings, and values, alone."""
    keywords = {"type", "enum", "const", "anyOf", *OF_TYPE["string"]}
    if not isinstance(schema, Mapping) or not schema.keys() & APPLIED <= keywords:
        return False
    if schema.get("format") in {*FORMATS, *UNSUPPORTED} or not includes(schema.get("type", "string"), "string"):
        return False
    return all(map(_is_of_strings, schema.get("anyOf", ())))


def _both(first: Schema, second: Schema) -> Schema:
    """Returns a schema that accepts the values that both accept."""
    if first is False or second is False:
        return False
    if _is_true(first) or equal(first, second):
        return second
    return first if _is_true(second) else {"allOf": [first, second]}


def _without(schema: Keywords, *keywords: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keywords}


def _property(schema: Keywords, name: str) -> Schema:
    """Returns what a schema says of a property."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    of_patterns: list[Schema] = [
        of_pattern
        for pattern, of_pattern in schema.get("patternProperties", {}).items()
        if finds(pattern, name, "#/patternProperties")
    ]
    return functools.reduce(_both, of_patterns) if of_patterns else schema.get("additionalProperties", True)


def _values(schema: Keywords) -> list[Any] | None:
    """Returns the values that `enum` and `const` allow, None without either."""
    if "const" in schema:
        const = schema["const"]
        return [const] if any(equal(const, value) for value in schema.get("enum", [const])) else []
    return list(schema["enum"]) if "enum" in schema else None


def _types(schema: Keywords) -> list[str]:
    return [name for name in TYPES if includes(schema.get("type", list(TYPES)), name)]


def _possible_types(schema: Keywords) -> set[str]:
    values, types = _values(schema), set(_types(schema))
    return types if values is None else types & {type_of(value) for value in values}


def _count(schema: Keywords, key: str) -> int | None:
    return int(schema[key]) if key in schema else None


def _limit(schema: Keywords, path: str, minimum: str, maximum: str) -> str | None:
    """Returns the keyword of the larger of two counts with its value, None without counts.

    Raises:
      UnsupportedError: the least number is too large to be counted.
    """
    if (schema.get(minimum) or 0) > MAX_COUNT:
        raise UnsupportedError(f"{path}/{minimum}", f"must be at most {MAX_COUNT}, got {schema[minimum]}")
    key = next((key for key in (maximum, minimum) if schema.get(key) is not None), None)
    return key and f"{key} of {schema[key]}"


def _bound(schema: Keywords, path: str, inclusive: str, exclusive: str, sign: int) -> Bound | None:
    """Returns the tighter one of two bounds, None without them; the sign is 1 for least numbers, -1 for greatest."""
    bounds = []
    for key in (inclusive, exclusive):
        value = schema.get(key)
        if value is None or isinstance(value, bool):
            continue
        is_inclusive = key == inclusive and schema.get(exclusive) is not True
        bounds.append(Bound(_decimal(schema, key, path), is_inclusive))
        if sign * value >= numbers.LIMIT:
            raise UnsupportedError(f"{path}/{key}", f"numbers have up to {numbers.MAX_WHOLE} digits, got {value}")
    # At equal values the exclusive bound is the tighter one.
    return max(bounds, key=lambda bound: (sign * bound.value, not bound.inclusive), default=None)


def _decimal(schema: Keywords, key: str, path: str) -> Fraction:
    """Returns the value of a number in a schema."""
    value = schema[key]
    decimal = Fraction(str(value))
    if (decimal * 10**numbers.MAX_PLACES).denominator > 1:
        raise UnsupportedError(f"{path}/{key}", f"must have up to {numbers.MAX_PLACES} decimal places, got {value}")
    return decimal
