"""The fields within a body's fields that are read, refused or harmless, and the log of those that are not known."""

import logging
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from jlade.server import unsupported
from jlade.server.fields import Body

MAX_SAID = 1000  # names of unknown fields; anyone may make up more
log = logging.getLogger(__name__)

# The names of an object's fields. Those of an object, or of each object of a list, have fields of their own; the values
# of others, None here, are not looked into.
Known = Mapping[str, Optional["Known"]]


def _of(*names: str, **within: Known) -> Known:
    return dict.fromkeys(names) | within


PART = _of("type", "text", "cache_control", "prompt_cache_breakpoint")
MESSAGE = _of(
    "annotations", "cache_control", "name", "reasoning", "reasoning_content", "role", "thinking", "tool_call_id",
    *unsupported.OF_MESSAGES,
    content=PART,
    tool_calls=_of("id", "index", "type", function=_of("arguments", "name")),
)  # fmt: skip
NAMED = _of("type", function=_of("name"))  # a function by its name
TAG = _of("begin", "end", "schema", "type", content=_of("json_schema", "type"))
OF_BOTH: Known = {
    "jlade": _of("steps"),
    "prediction": _of("type", content=PART),
    "response_format": _of(
        "schema",
        "triggers",
        "type",
        format=_of("triggers", "type", tags=TAG),
        json_schema=_of("description", "name", "schema", "strict"),
        structures=TAG,
    ),
    "stream_options": _of("continuous_usage_stats", "include_obfuscation", "include_usage"),
}
OF_CHAT: Known = {
    **OF_BOTH,
    "messages": MESSAGE,
    "tool_choice": {**NAMED, "allowed_tools": _of("mode", tools=NAMED)},
    "tools": _of("cache_control", "type", function=_of("description", "name", "parameters", "strict")),
}

# Within a body of `/v1/responses`. The items have fields by their types.
OF_RESPONSE: Known = {
    "reasoning": _of("context", "effort", "generate_summary", "mode", "summary"),
    "stream_options": _of("include_obfuscation"),
    "text": _of("verbosity", format=_of("description", "name", "schema", "strict", "type")),
    "tool_choice": _of("mode", "name", "type", tools=_of("name", "type")),
    "tools": _of(
        "allowed_callers", "async", "defer_loading", "description", "name", "output_schema", "parameters", "strict",
        "type",
    ),
}  # fmt: skip
_OF_ITEMS = ("id", "status", "type")
ITEMS: dict[str, Known] = {
    "message": _of(*_OF_ITEMS, "phase", "role", content={**PART, **_of("annotations", "logprobs")}),
    "function_call": _of(*_OF_ITEMS, "arguments", "async", "call_id", "caller", "name", "namespace"),
    "function_call_output": _of(*_OF_ITEMS, "call_id", "caller", "name", "namespace", output=PART),
}
_cut = reprlib.Repr()
_cut.maxstring = 100  # characters of a path
_said: set[str] = set()


def say_others(body: Body, names: Iterable[str], within: Known) -> None:
    """Logs each field of a body that is not known, once.

    Args:
      body: of a request.
      names: its fields that are known, besides the harmless ones.
      within: the fields within some of them.
    """
    say_unknown(body, dict.fromkeys([*names, *unsupported.HARMLESS]) | dict(within))


def say_unknown(value: Any, known: Known, path: str = "", place: str = "") -> None:
    """Logs each field of an object, or of the objects of a list, that is not known, once.

    Args:
      value: of JSON.
      known: the fields of an object.
      path: that of the value.
      place: the same without the indices of lists, by which it is logged once.
    """
    if isinstance(value, list):
        for i, each in enumerate(value):
            if isinstance(each, dict):
                say_unknown(each, known, f"{path}[{i}]", place)
    elif isinstance(value, dict):
        for name, each in value.items():
            within, dot = known.get(name), "." if path else ""
            if within is not None:
                say_unknown(each, within, f"{path}{dot}{name}", f"{place}{dot}{name}")
            elif name not in known:
                _say(f"{path}{dot}{name}", f"{place}{dot}{name}")


def _say(path: str, place: str) -> None:
    place = place if len(place) <= _cut.maxstring else _cut.repr(place)  # which takes longer
    if place not in _said and len(_said) < MAX_SAID:
        _said.add(place)
        log.warning("the field %s of a request is not known and not read", _cut.repr(path))
