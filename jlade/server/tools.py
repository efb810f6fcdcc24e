"""Tools: the functions that an answer may call, and the grammar of its calls in the form of a chat template."""

import contextlib
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jlade.constraints import automaton, plain
from jlade.constraints.automaton import MAX_STATES
from jlade.constraints.grammar import Grammar
from jlade.constraints.json_document import APPLIED, Schema
from jlade.constraints.loosening import LOOSE, loosened
from jlade.constraints.tags import Field, Tags
from jlade.server import fields, kinds
from jlade.server.call_formats import Fields, Form
from jlade.server.fields import Body, RequestError, refused
from jlade.server.thoughts import Thoughts

AUTO, NO_TOOLS = "auto", "none"
ANY_OBJECT: Body = {"type": "object"}
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # as those of MCP
OF_FIELDS = {"type", "properties", "required", "additionalProperties"}  # keywords that fields hold
SIMPLE = ("string", "integer", "number", "boolean", "null")  # types of values without parts
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = {"title", "description", "default", "examples"}  # by which alone most schemas of arguments differ
log = logging.getLogger(__name__)


class Tool(NamedTuple):
    """A function that the model may call, with a JSON schema of its arguments. One that is strict has no other ones."""

    name: str
    parameters: Body
    is_strict: bool
    path: str  # of the schema in its body


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a body.

    Attributes:
      given: the field, for the template.
      tools: those that the answer may use.
      must_call: whether the answer is a block of calls.
      is_parallel: whether a block may have several calls.
    """

    given: list[Body]
    tools: Sequence[Tool]
    must_call: bool
    is_parallel: bool

    def shown(self, form: Form) -> str:
        """Returns what a system message says of the tools, for a template that shows none."""
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.given)
        return f"You can call these functions:\n{functions}\n\nA call is written so:\n{form.example()}"

    def grammar(
        self,
        form: Form,
        thoughts: Thoughts = (),
        content: tuple[str, str] = ("", ""),
        other: Grammar | None = None,
    ) -> Grammar:
        """Returns the grammar of the answer.

        Args:
          form: of the calls.
          thoughts: with which the answer may begin.
          content: texts that may be around other text than thoughts and calls.
          other: of an answer without calls, which are the whole of one with them; None for any text around calls.

        Raises:
          RequestError: the schema of a strict tool is wrong or not supported; names its field and the tool.
        """
        grammar = Grammar.tags(
            Tags(
                [tag for tool in self.tools for tag in _tags(tool, form)],
                opening=(form.alone if self.must_call else "") + ("" if form.others else form.opening),
                closing=form.closing,
                between=form.between if self.is_parallel else None,
                triggers=() if self.must_call else form.triggers([tool.name for tool in self.tools]),
                maximum=None if self.is_parallel else 1,
                thoughts=() if self.must_call else thoughts,
                content=content,
                other=None if other is None else (other.kind, other.source),
            ),
            is_checked=False,
        )
        return grammar.after(thoughts) if self.must_call else grammar

    def looser(self, form: Form, reason: str) -> "Tools":
        """Returns the tools for a smaller grammar: the largest ones that are not strict have any arguments.

        They are as many as leave three quarters of the states, and no more than an automaton may have.

        Args:
          form: of the calls.
          reason: why the grammar is too large.

        Raises:
          RequestError: there are none; names the field of the largest tool's schema, and the tool.
        """
        sizes = {tool.name: _num_states(tool, form.fields) for tool in self.tools}
        by_size = sorted(self.tools, key=lambda tool: -sizes[tool.name])
        number, loose = sum(sizes.values()), dict[str, Tool]()
        most = min(MAX_STATES, number * 3 // 4)
        for tool in by_size:
            looser = _looser(tool, form.fields)
            if number > most and not tool.is_strict and looser != tool:
                kinds.warn_once(LOOSE, f"the schema of the tool {tool.name}", f"beside the other tools {reason}")
                loose[tool.name] = looser
                number -= sizes[tool.name]
        if not loose:
            raise _refused(by_size[0], reason)
        return dataclasses.replace(self, tools=[loose.get(tool.name, tool) for tool in self.tools])


def _looser(tool: Tool, form: Fields | None) -> Tool:
    """Returns a tool with any arguments, or in a form of fields any texts where values have several parts or types."""
    if form is None:
        return tool._replace(parameters=ANY_OBJECT)
    types = {
        name: {"type": schema["type"] if isinstance(schema, dict) and schema.get("type") in SIMPLE else "string"}
        for name, schema in _properties(tool).items()
    }
    return tool._replace(parameters={"properties": types, "required": tool.parameters.get("required", [])})


def _properties(tool: Tool) -> dict[str, Schema]:
    """Returns the schemas of the arguments that a tool declares or requires, in order."""
    declared = tool.parameters.get("properties", {})
    return declared | {name: True for name in tool.parameters.get("required", []) if name not in declared}


def _num_states(tool: Tool, form: Fields | None) -> int:
    """Returns the number of states of a tool's arguments."""
    if form is None:
        return len(Grammar.json_schema(json.dumps(_content(tool, form))).automaton.is_final)
    values = (plain.parse(field.schema, field.end, field.values) for field in fields_of(tool, form).values())
    return sum(len(automaton.build(value, counts=True).is_final) for value in values)


def _tags(tool: Tool, form: Form) -> list[tuple[str, Schema | Sequence[Field], str]]:
    """Returns the tags of the calls of a tool: those with arguments, and that without any if it is written otherwise.

    Where the form has other beginnings of blocks, all are of the tags.
    """
    content = _content(tool, form.fields)
    if form.others:
        return [(begin, content, "") for begin in form.firsts(tool.name)]
    begin, *bare = form.begins("", tool.name)
    without = () if tool.parameters.get("required") else bare
    return [(begin, content, ""), *((other, (), "") for other in without)]


def _content(tool: Tool, form: Fields | None) -> Schema | Sequence[Field]:
    """Returns the schema of a tool's arguments, or their fields."""
    if form is None:
        return _supported(tool, None, "", ANY_OBJECT | tool.parameters, ANY_OBJECT)
    return list(fields_of(tool, form).values())


def fields_of(tool: Tool, form: Fields) -> dict[str, Field]:
    """Returns the fields of a tool's arguments by their names: those that it declares or requires, in order."""
    if others := (tool.parameters.keys() & APPLIED) - OF_FIELDS:
        _lose(tool, f"#/{min(others)}: not supported where arguments are no JSON")
    required = tool.parameters.get("required", [])
    definitions = {key: tool.parameters[key] for key in DEFINITIONS if key in tool.parameters}
    of_names = {}
    declared = _properties(tool)
    if form.is_sorted:
        declared = dict(sorted(declared.items(), key=lambda item: item[0].lower()))
    for name, schema in declared.items():
        begin = form.begin + kinds.text("the name of an argument", name) + form.middle
        looser: list[Schema] = [True]
        if isinstance(schema, dict):
            schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
            looser = [{"type": schema.get("type", [])}, True]
            if "$ref" in json.dumps(schema):
                schema = definitions | schema
        supported = _supported(tool, form, f"{name}: ", schema, *looser)
        of_names[name] = Field(begin, supported, form.end, name in required, form.values)
    return of_names


def _supported(tool: Tool, form: Fields | None, path: str, schema: Schema, *looser: Schema) -> Schema:
    """Returns the schema, or the first looser one that has a grammar if it has none and the tool is not strict."""
    if reason := _refusal(json.dumps(schema), form):
        reasons: list[str] = []
        with contextlib.suppress(ValueError):
            schema, reasons = loosened(schema)
            looser = (schema, *looser)
        for each in reasons or [reason]:
            _lose(tool, path + each)
        return next(other for other in looser if not _refusal(json.dumps(other), form))
    return schema


@functools.lru_cache(maxsize=1024)
def _refusal(schema: str, form: Fields | None) -> str | None:
    """Returns why a schema has no grammar, None if it has one: in JSON, or as a field."""
    try:
        if form is None:
            Grammar.json_schema(schema)
        else:
            plain.parse(json.loads(schema), form.end, form.values)
    except (ValueError, RecursionError) as error:
        return str(error)
    return None


def _lose(tool: Tool, reason: str) -> None:
    """Raises a RequestError if a tool is strict; else the log says that its schema is not held."""
    if tool.is_strict:
        raise _refused(tool, reason)
    kinds.warn_once(LOOSE, f"the schema of the tool {tool.name}", reason)


def _refused(tool: Tool, reason: str) -> RequestError:
    return RequestError(f"{tool.path} has no grammar: {tool.name}: {reason}", tool.path)


def read(
    values: Body,
    within: str = ".function",
    paths: Sequence[str] | None = None,
    schemas: Sequence[str] | None = None,
) -> Tools | None:
    """Returns the tools of a chat; None if there are none, or `tool_choice` forbids them.

    A named function is called once, and an answer that has to call does so once unless `parallel_tool_calls` is true.

    Args:
      values: of the fields of a body.
      within: the path of the fields of a function in a tool, as its client wrote it.
      paths: of the tools; None for their places in `tools`.
      schemas: the paths of their schemas; None for those of `parameters`.
    """
    written, choice = values.get("tools", []), values.get("tool_choice", AUTO)
    if not isinstance(written, list):
        raise refused("tools", written, "a list of functions")
    paths = paths or [f"tools[{i}]" for i in range(len(written))]
    schemas = schemas or [f"{path}{within}.parameters" for path in paths]
    tools = [_tool(path, tool, within, schema) for path, tool, schema in zip(paths, written, schemas, strict=True)]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise refused("tools", names, "functions of different names")
    match choice:
        case "auto" | "required" | "none":
            chosen = tools
        case {"type": "function", "function": {"name": name}} if name in names:
            chosen = [tool for tool in tools if tool.name == name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            chosen, choice = _allowed(tools, allowed), mode
        case _:
            raise refused("tool_choice", choice, "auto, required, none, or functions of tools")
    if choice == NO_TOOLS:
        return None
    if not tools:
        if choice != AUTO:
            raise refused("tools", written, f"at least one function for tool_choice={choice}")
        return None
    is_parallel = kinds.boolean("parallel_tool_calls", values.get("parallel_tool_calls", choice == AUTO))
    return Tools(written, chosen, choice != AUTO, is_parallel and isinstance(choice, str))


def _allowed(tools: list[Tool], allowed: list[Any]) -> list[Tool]:
    """Returns the tools that `tool_choice` allows, by its list of functions."""
    chosen, by_name = list[Tool](), {tool.name: tool for tool in tools}
    for one in allowed:
        match one:
            case {"type": "function", "function": {"name": str(name)}} if name in by_name:
                chosen.append(by_name[name])
            case _:
                raise refused("tool_choice", one, "auto, required, none, or functions of tools")
    if len(set(chosen_names := [tool.name for tool in chosen])) < max(1, len(chosen)):
        raise refused("tool_choice", chosen_names, "auto, required, none, or different functions of tools")
    return chosen


def _tool(path: str, tool: Any, within: str, path_of_schema: str) -> Tool:
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function} if NAME.fullmatch(name):
            parameters = function.get("parameters") or {"properties": {}}
            if not is_of_object(parameters):
                raise refused(path_of_schema, parameters, "the JSON schema of an object")
            strict = kinds.values(function, {"strict": kinds.boolean}, f"{path}{within}.")
            return Tool(name, parameters, strict.get("strict", False), path_of_schema)
    raise refused(path, tool, 'a function {"type": "function", "function": {"name": ..., "parameters": ...}}')


def is_of_object(schema: Any) -> bool:
    """Returns whether a JSON schema is that of an object."""
    match isinstance(schema, dict) and {"type": "object", "properties": {}, "required": []} | schema:
        case {"type": "object", "properties": dict(), "required": list()}:
            return True
    return False


def read_calls(path: str, calls: Any) -> list[Body]:
    """Returns the calls of an earlier answer as templates take them: with their arguments as objects."""
    if not isinstance(calls, list):
        raise refused(path, calls, "a list of calls")
    return [_call(f"{path}[{i}]", call) for i, call in enumerate(calls)]


def _call(path: str, call: Any) -> Body:
    match call:
        case {"function": {"name": name} as function}:
            path = f"{path}.function"
            read = {
                "name": kinds.text(f"{path}.name", name),
                "arguments": read_arguments(f"{path}.arguments", function.get("arguments")),
            }
            return {"id": str(call.get("id", "")), "type": "function", "function": read}
    raise refused(path, call, 'a call {"function": {"name": ..., "arguments": ...}}')


def read_arguments(path: str, arguments: Any) -> Body:
    """Returns the arguments of an earlier call, which may have been cut off, or may have had none."""
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    text = kinds.text(path, arguments)
    if text.strip() in ("", "null"):
        return {}
    try:
        return fields.parse(text.encode(), "the text")
    except RequestError as error:
        log.warning("%s is taken as {}: %s", path, error)
        return {}
