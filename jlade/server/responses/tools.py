"""Tools of `/v1/responses`: functions, custom tools, and namespaces of both become the functions of a chat.

A custom tool, whose input is a text, becomes a function with a single argument.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jlade.constraints.json_document import GRAMMAR
from jlade.server import kinds
from jlade.server import tools as tools_lib
from jlade.server.fields import Body, refused
from jlade.server.kinds import Table, only

INPUT = "input"  # the argument of a custom tool
LEFT_OUT = "%s of the type %s are left out: the server runs no tools"
# Tools that OpenAI's servers run, or that their models know by their type.
HOSTED = frozenset(
    (
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
        "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    )
)  # fmt: skip
OF_TOOLS: Table = {"allowed_callers": only(["direct"]), "async": only(False)}  # which are not supported


class Origin(NamedTuple):
    """The tool that a function of the chat is made of.

    Attributes:
      kind: "function" or "custom".
      name: within its namespace.
      namespace: None for a tool outside of one.
    """

    kind: str
    name: str
    namespace: str | None = None


def function_name(name: str, namespace: str | None) -> str:
    """Returns the name of the function that a tool becomes."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class ToolSet(NamedTuple):
    """The tools of a body.

    Attributes:
      functions: in the form of a chat.
      paths: of the tools that they are made of, for errors.
      schemas: the paths of their schemas, and of custom tools' grammars.
      origins: by the names of the functions.
    """

    functions: list[Body]
    paths: list[str]
    schemas: list[str]
    origins: dict[str, Origin]


def read(tools: Any) -> ToolSet:
    """Reads the field `tools`. Hosted tools are left out, which the log says."""
    found = ToolSet([], [], [], {})
    for path, tool, namespace in _flat("tools", tools):
        match tool:
            case {"type": "function" | "custom" as kind, "name": str(name)} if tools_lib.NAME.fullmatch(name):
                kinds.values(tool, OF_TOOLS, f"{path}.")
            case {"type": str(kind)} if kind in HOSTED:
                kinds.warn_once(LEFT_OUT, "tools", kind)
                continue
            case _:
                accepted = "a function or a custom tool with its type and name, a namespace of them, or a hosted tool"
                raise refused(path, tool, accepted)
        function = {key: value for key, value in tool.items() if key != "type" and value is not None}
        if kind == "custom":
            function = _function_of_custom(path, function)
        function["name"] = function_name(name, namespace)
        found.functions.append({"type": "function", "function": function})
        found.paths.append(path)
        found.schemas.append(f"{path}.format.definition" if kind == "custom" else f"{path}.parameters")
        found.origins[function["name"]] = Origin(kind, name, namespace)
    return found


def _flat(path: str, tools: Any, namespace: str | None = None) -> Iterator[tuple[str, Any, str | None]]:
    """Yields the path, the tool and the namespace of each tool, with those of namespaces."""
    if not isinstance(tools, list):
        raise refused(path, tools, "a list of tools")
    for i, tool in enumerate(tools):
        match tool:
            case {"type": "namespace", "name": str(name), "tools": inner} if namespace is None:
                yield from _flat(f"{path}[{i}].tools", inner, kinds.text(f"{path}[{i}].name", name))
            case _:
                yield f"{path}[{i}]", tool, namespace


def _function_of_custom(path: str, tool: Body) -> Body:
    """Returns a function that takes the text of a custom tool."""
    schema: Body = {"type": "string"}
    match tool.get("format", {"type": "text"}):
        case {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(definition)}:
            schema["pattern"] = f"^(?:{definition})$"
        case {"type": "grammar", "syntax": "lark", "definition": str(definition)}:
            schema[GRAMMAR] = definition
        case other:
            accepted = 'text, or a grammar {"type": "grammar", "syntax": "lark" or "regex", "definition": ...}'
            raise refused(f"{path}.format", other, accepted)
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    described = {"description": tool["description"]} if "description" in tool else {}
    return {"name": tool["name"], **described, "parameters": parameters, "strict": True}


def choice(given: Any, origins: Mapping[str, Origin]) -> Any:
    """Returns a `tool_choice` in the form of a chat, which refuses others."""
    match given:
        case {"type": "function" | "custom"}:
            return _named(given, origins)
        case {"type": "allowed_tools", "tools": list(tools), **others}:
            allowed = [_named(tool, origins) for tool in tools if not _is_hosted(tool)]
            mode = others.get("mode", tools_lib.AUTO)
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    return given


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in HOSTED


def _named(tool: Any, origins: Mapping[str, Origin]) -> Any:
    """Returns a function by its name in the form of a chat, which refuses others."""
    match tool:
        case {"type": "function" | "custom" as kind, "name": name, **others}:
            named = (
                function
                for function, origin in origins.items()
                if (origin.kind, origin.name) == (kind, name) and others.get("namespace") in (None, origin.namespace)
            )
            return {"type": "function", "function": {"name": next(named, name)}}
    return tool


# Of the arguments of a custom tool's call: their beginning, and characters of the text whose escapes are whole.
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}\\u[0-9a-fA-F]{4})*')


class InputReader:
    """Reads the input of a custom tool from the arguments of the function that it became, in pieces."""

    def __init__(self) -> None:
        self._held, self._has_begun = "", False

    def feed(self, arguments: str) -> str:
        """Takes a piece of the arguments and returns that of the text."""
        self._held += arguments
        if not self._has_begun:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._held, self._has_begun = self._held[begin.end() :], True
        whole = _WHOLE.match(self._held)
        assert whole is not None
        self._held = self._held[whole.end() :]
        text: str = json.loads(f'"{whole[0]}"')
        return text
