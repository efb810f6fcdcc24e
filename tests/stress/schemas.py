"""Wrong and changed JSON schemas: each one is refused by a ValueError with a path, or its texts are valid.

    python -m tests.stress.schemas                               # the kinds of pydantic, some minutes
    python -m tests.stress.schemas --schemas DIR --changes 1000  # also those of the JSON files in DIR

Every keyword gets values of all types, at the top and within other schemas. Then schemas of files and of pydantic are
changed at random: parts are left out, exchanged, or given other keywords. The judge of the texts is jsonschema.
"""

import argparse
import collections
import contextlib
import datetime
import decimal
import json
import pathlib
import random
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Optional

import jsonschema  # type: ignore[import-untyped]

from benchmarks import measure
from jlade.constraints import automaton, json_schema
from jlade.constraints.json_document import KINDS, REFUSED, UnsupportedError
from jlade.constraints.moves import DEAD

KEYWORDS = [*KINDS, *REFUSED, "const", "title", "$defs", "definitions"]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1.5, 1e30, 1e308, float("inf"), "", "a", "object", "#", "#/$defs/a", "(", "^a$",
    [], [None], ["a"], [1], [{}], [True], ["a", "a"], [[]], {}, {"a": None}, {"a": 1}, {"a": "b"}, {"a": ["b"]},
    {"a": {}}, {"a": {"type": "integer"}}, {"type": "string"}, {"type": 5}, {"enum": [1, "a"]}, {"$ref": "#"},
    {"not": {}}, {"anyOf": [{}, None]},
]  # fmt: skip
# Schemas around another one.
AROUND: dict[str, Callable[[Any], Any]] = {
    "top": lambda schema: schema,
    "beside a type": lambda schema: {"type": ["object", "array", "string", "integer"], **schema},
    "property": lambda schema: {"type": "object", "properties": {"a": schema}, "required": ["a"]},
    "items": lambda schema: {"type": "array", "items": schema, "minItems": 1},
    "option": lambda schema: {"anyOf": [schema, {"type": "null"}], "title": "A"},
    "allOf": lambda schema: {"allOf": [{"type": ["object", "string"], "minLength": 0}, schema]},
    "not": lambda schema: {"type": ["string", "integer"], "not": schema},
    "reference": lambda schema: {"$defs": {"a": schema}, "$ref": "#/$defs/a", "default": None},
}
# Spaces in a pattern of Python, which the judge has, and none in ECMA-262's, or the other way round.
OTHER_SPACES = re.compile("\\\\u001[c-f]|[\x85\ufeff]", re.IGNORECASE)
# Not their errors: these take long.
SECONDS = 5


def keywords() -> Iterator[tuple[str, Any]]:
    """Yields a name and a schema for each keyword with each value at each place."""
    for keyword in KEYWORDS:
        for value in VALUES:
            for place, around in AROUND.items():
                yield f"{place}: {keyword}={value!r}", around({keyword: value})


def outcome(schema: Any, rng: random.Random, walks: int = 5) -> str:
    """Returns what becomes of a schema.

    Raises:
      AssertionError: it is refused without a path, or a text is not valid.
      Exception: any other one that reading it raises.
    """
    try:
        found = automaton.build(json_schema.parse(json.dumps(schema)))
    except automaton.TooLargeError:
        return "too large"
    except ValueError as error:
        if "#" not in str(error) and "accepts no value" not in str(error):
            raise AssertionError("the error has no path") from error
        return "refused" if isinstance(error, UnsupportedError) else "wrong"
    kind = jsonschema.Draft202012Validator  # which takes formats for annotations
    if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
        kind = jsonschema.validators.validator_for(schema, kind)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return "held, in another draft's form"  # such as a list as `items`
    for text in [walked(found, rng) for _ in range(walks)]:
        if OTHER_SPACES.search(text):
            continue
        with contextlib.suppress(RecursionError):  # of a judge that follows `if` without need
            assert kind(schema).is_valid(json.loads(text)), f"a text is not valid: {text}"
    return "held"


def walked(found: automaton.Automaton, rng: random.Random) -> str:
    """Returns a text of random bytes, which turns to the nearest end after a while."""
    next_state, is_final = found.next_state, found.is_final
    distance = automaton._distances(next_state, is_final)
    bytes_of: dict[int, list[int]] = {}
    for byte in (*range(32, 127), 9, 10, *range(128, 256)):
        bytes_of.setdefault(int(found.class_of_byte[byte]), []).append(byte)
    text, state = bytearray(), 0
    while not (is_final[state] and (len(text) > 60 or rng.random() < 0.3)):
        options = [each for each in bytes_of if next_state[state, each] != DEAD]
        if len(text) > 60:
            options = [min(options, key=lambda each: distance[next_state[state, each]])]
        if not options:
            break
        chosen = rng.choice(options)
        # Whitespace is long, and says little.
        found_bytes = [each for each in bytes_of[chosen] if each > 32] or bytes_of[chosen]
        text.append(rng.choice(found_bytes))
        state = next_state[state, chosen]
    return text.decode()


# Changes.


def places(schema: Any) -> list[tuple[Any, Any]]:
    """Returns the parts of a schema, each as what has it and its key there."""
    found, left = [], [schema]
    while left:
        here = left.pop()
        pairs = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, each in pairs:
            found.append((here, key))
            left.append(each)
    return found


def changed(schema: Any, rng: random.Random) -> Any:
    """Returns a copy of a schema with one to three changes."""
    result = json.loads(json.dumps(schema))
    for _ in range(rng.randint(1, 3)):
        found = places(result)
        if not found:
            return rng.choice(VALUES)
        here, key = rng.choice(found)
        match rng.choice(["leave out", "replace", "copy", "rename", "add", "wrap"]):
            case "leave out":
                del here[key]
            case "replace":
                here[key] = rng.choice(VALUES)
            case "copy":
                other, name = rng.choice(found)
                here[key] = json.loads(json.dumps(other[name]))
            case "rename" if isinstance(here, dict):
                here[rng.choice(KEYWORDS)] = here.pop(key)
            case "add" if isinstance(here[key], dict):
                here[key][rng.choice(KEYWORDS)] = rng.choice(VALUES)
            case "wrap" if isinstance(here[key], dict):
                here[key] = {rng.choice(["not", "if"]): here[key]} | rng.choice([{}, {"type": "object"}])
    return result


def of_pydantic() -> list[Any]:
    """Returns the schemas of usual models of pydantic."""
    import pydantic
    from pydantic import BaseModel, Field

    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int = Field(ge=0, le=9)

    class Dog(BaseModel, extra="allow"):
        kind: Literal["dog"]
        good: bool = True

    class Tree(BaseModel, extra="forbid"):
        name: str
        children: list["Tree"] = []
        next: Optional["Tree"] = Field(None, description="beside it")

    kinds: list[Any] = [
        bool, float, None, Any, dict[str, int], tuple[int, str], tuple[int, ...], frozenset[bool], int | str,
        Literal["a", 1, None], datetime.date, datetime.datetime, datetime.timedelta, uuid.UUID, decimal.Decimal, bytes,
        Annotated[int, Field(gt=0, lt=100, multiple_of=5)],
        Annotated[str, Field(min_length=1, max_length=8, pattern="^[a-z]+$")],
        Annotated[list[str], Field(min_length=1, max_length=3)], Annotated[dict[str, int], Field(min_length=1)],
        Annotated[Cat | Dog, Field(discriminator="kind")], Cat | Dog, Tree, list[Tree],
    ]  # fmt: skip
    return [pydantic.TypeAdapter(kind).json_schema() for kind in kinds]


def sweep(schemas: Iterator[tuple[str, Any]] | list[tuple[str, Any]], seed: int) -> collections.Counter[str]:
    """Returns how often what became of some schemas, and prints the faults."""
    counts: collections.Counter[str] = collections.Counter()
    for name, schema in schemas:
        try:
            with measure.at_most(SECONDS):
                counts[outcome(schema, random.Random(seed))] += 1
        except measure.TimeLimit:
            counts["too slow"] += 1
        except Exception as error:
            counts["fault"] += 1
            print(f"{name}: {type(error).__name__}: {error}\n  {json.dumps(schema)[:2000]}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schemas", type=pathlib.Path, metavar="DIR", help="with JSON files of schemas, or of MaskBench"
    )
    parser.add_argument("--changes", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print("keywords", dict(sweep(keywords(), options.seed)))
    schemas = of_pydantic()
    print("pydantic", dict(sweep([(f"pydantic {i}", each) for i, each in enumerate(schemas)], options.seed)))
    for file in sorted(options.schemas.glob("*.json")) if options.schemas else ():
        content = json.loads(file.read_text(encoding="utf-8"))
        schemas.append(content["schema"] if "tests" in content else content)
    small = [each for each in schemas if len(json.dumps(each)) < 5000]
    changes = [(f"change {i}", changed(rng.choice(small), rng)) for i in range(options.changes)]
    print("changes", dict(sweep(changes, options.seed)))


if __name__ == "__main__":
    main()
