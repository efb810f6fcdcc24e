"""Schemas without the keywords that a table cannot hold, for those who may have more values rather than an error."""

import copy
import json
from typing import Any

from jlade.constraints.automaton import TooLargeError
from jlade.constraints.grammar import Grammar
from jlade.constraints.json_document import Document, Schema, UnsupportedError

MAX_LEFT_OUT = 32  # keywords, for each of which the schema is compiled again
LOOSE = "%s, which is not strict, is not held in full: %s"  # what the log says of a schema, with each error
EXCLUDING = {"not", "if", "oneOf"}  # without a keyword within them a schema accepts fewer values


def loosened(schema: Schema) -> tuple[Schema, list[str]]:
    """Returns a schema without its keywords that are not supported or take too many states, and the errors of these.

    Raises:
      UnsupportedError, TooLargeError: it is no keyword that can be left out.
      ValueError: the schema is wrong.
    """
    reasons: list[str] = []
    while True:
        try:
            Grammar.json_schema(json.dumps(schema))
            return schema, reasons
        except (UnsupportedError, TooLargeError) as error:
            reasons.append(str(error))
            schema = copy.deepcopy(schema)
            if len(reasons) > MAX_LEFT_OUT or not _leave_out(Document(schema), error.name or "#"):
                raise


def _leave_out(document: Document, name: str) -> bool:
    """Leaves out the keyword of a path, which may have its value after it, and returns whether it has been there."""
    *within, last = name.removeprefix("#/").split("/")
    keyword = last.split(" ")[0]  # as in "#/maxLength of 5000"
    if EXCLUDING & {*within, keyword}:
        return False
    found: list[Any] = [document.root]
    for part in within:
        found = [child for each in _parts(document, found) if (child := _child(each, part)) is not None]
    owners = [each for each in _parts(document, found) if isinstance(each, dict) and keyword in each]
    for owner in owners:
        del owner[keyword]
    return bool(owners)


def _parts(document: Document, found: list[Any]) -> list[Any]:
    """Returns schemas with those that are part of them, by references and `allOf`."""
    parts = list(found)
    for each in parts:  # which grows
        if isinstance(each, dict):
            others = [document.resolve(each["$ref"], "#")] if "$ref" in each else []
            others += each.get("allOf", [])
            parts += [other for other in others if all(other is not part for part in parts)]
    return parts


def _child(value: Any, part: str) -> Any:
    if isinstance(value, list):
        return value[int(part)] if part.isdigit() and int(part) < len(value) else None
    return value.get(part) if isinstance(value, dict) else None
