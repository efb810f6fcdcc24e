"""Tools: their calls in the form of a chat template, asked for by a grammar, and read back from a text."""

import dataclasses
import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jlade.constraints.grammar import Grammar
from jlade.constraints.tags import Tags
from jlade.generation import text as text_lib
from jlade.generation.chat_template import ChatTemplate
from jlade.server import fields
from jlade.server.fields import Body

AUTO, NO_TOOLS = "auto", "none"
ANY_OBJECT: Body = {"type": "object"}
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
WHITESPACE = " \t\n\r"  # of JSON
THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)  # before an answer
# The call of a tool without arguments, as templates write it.
CALL = re.compile(r'\{"name": "probe", "(?P<key>arguments|parameters)": \{\}\}')
PROBE: Body = {"name": "probe", "description": "-", "parameters": {"type": "object", "properties": {}}}
log = logging.getLogger(__name__)


class Tool(NamedTuple):
    """A function that the model may call, with a JSON schema of its arguments. One that is strict has no other ones."""

    name: str
    parameters: Body
    is_strict: bool


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of the calls in a text: a block of one or more, each a JSON object with a name and arguments.

    Attributes:
      opening, closing: the text before and after the calls of a block.
      between: the text between two calls; None for blocks of one call.
      key: the name of the arguments.
    """

    opening: str
    closing: str
    between: str | None
    key: str

    @classmethod
    def of(cls, template: ChatTemplate, ends: Sequence[str]) -> "Form":
        """Returns the form in which a template writes the calls of an earlier answer.

        Args:
          template: of the model.
          ends: texts that end an answer.

        Raises:
          ValueError: the template shows the model no tools, or writes calls in a form that is not supported.
        """
        question: Body = {"role": "user", "content": "-"}
        prompt = template.render([question], tools=[{"type": "function", "function": PROBE}])
        if PROBE["name"] not in prompt:
            raise ValueError("the model's chat template shows it no tools")

        def answer(number: int) -> str:
            function = {"name": PROBE["name"], "arguments": {}}
            calls = [{"id": f"{i:09}", "type": "function", "function": function} for i in range(number)]
            messages = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
            text = template.render(messages, False, tools=[{"type": "function", "function": PROBE}])
            return THOUGHTS.sub("", text.removeprefix(prompt))

        one = answer(1)
        call = CALL.search(one)
        if call is None:
            raise ValueError(
                f"the model's chat template writes calls of tools in a form that is not supported: {one!r}"
            )
        between = None
        try:
            several = CALL.split(answer(2))  # with the key of each
            between = several[2] if len(several) == 5 else None
        except ValueError:  # it refuses more than one
            pass
        cuts = [place for end in ends if (place := one.find(end, call.end())) >= 0]
        form = cls(one[: call.start()], one[call.end() : min(cuts, default=None)].rstrip(), between, call["key"])
        for part in (form.opening, form.closing, form.between or ""):
            ids = template.encode(part)
            if text_lib.decode(template.tokenizer, ids) != part:
                raise ValueError(f"the model's chat template writes calls of tools with special tokens: {part!r}")
        return form

    def begin(self, name: str) -> str:
        """Returns the text of a call up to its arguments."""
        return f'{{"name": "{name}", "{self.key}": '


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

    def grammar(self, form: Form) -> Grammar:
        """Returns the grammar of the answer.

        Raises:
          ValueError: the schema of a strict tool is wrong or not supported; names the tool.
        """
        trigger = form.opening.rstrip() or f'{form.opening}{{"name": "'
        return Grammar.tags(
            Tags(
                [(form.begin(tool.name), _schema(tool), "}") for tool in self.tools],
                opening=form.opening,
                closing=form.closing,
                between=form.between if self.is_parallel else None,
                triggers=() if self.must_call else (trigger,),
            )
        )


def _schema(tool: Tool) -> Body:
    """Returns the schema of a tool's arguments; that of any object if a tool that is not strict has another one."""
    schema = ANY_OBJECT | tool.parameters
    try:
        Grammar.json_schema(schema)
    except ValueError as error:
        if tool.is_strict:
            raise ValueError(f"{tool.name}: {error}") from error
        _say_loose(tool.name, str(error))
        return ANY_OBJECT
    return schema


@functools.lru_cache(maxsize=1024)  # once
def _say_loose(name: str, reason: str) -> None:
    log.warning("the arguments of the tool %s, which is not strict, may be any object: %s", name, reason)


def read(body: Body) -> Tools | None:
    """Returns the tools of a body; None if there are none, or `tool_choice` forbids them.

    Raises:
      RequestError: names the field, its value and what is accepted.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    given, choice = [] if given is None else given, AUTO if choice is None else choice
    if not isinstance(given, list):
        raise fields.refused("tools", given, "a list of functions")
    tools = [_tool(f"tools[{i}]", each) for i, each in enumerate(given)]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise fields.refused("tools", names, "functions of different names")
    match choice:
        case "auto" | "required" | "none":
            chosen = tools
        case {"type": "function", "function": {"name": name}} if name in names:
            chosen = [tool for tool in tools if tool.name == name]
        case _:
            raise fields.refused("tool_choice", choice, "auto, required, none, or a function of tools")
    if choice == NO_TOOLS:
        return None
    if not tools:
        if choice != AUTO:
            raise fields.refused("tools", given, f"at least one function for tool_choice={choice}")
        return None
    return Tools(given, chosen, choice != AUTO, fields.boolean(body, "parallel_tool_calls", default=True))


def _tool(path: str, given: Any) -> Tool:
    match given:
        case {"type": "function", "function": {"name": str(name)} as function} if NAME.fullmatch(name):
            parameters = function.get("parameters") or {"properties": {}}
            if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
                raise fields.refused(f"{path}.function.parameters", parameters, "the JSON schema of an object")
            return Tool(name, parameters, fields.boolean(function, "strict", f"{path}.function"))
    raise fields.refused(path, given, 'a function {"type": "function", "function": {"name": ..., "parameters": ...}}')


def read_calls(path: str, calls: Any) -> list[Body]:
    """Returns the calls of an earlier answer as templates take them: with their arguments as objects.

    Raises:
      RequestError: names the field at `path`, its value and what is accepted.
    """
    if not isinstance(calls, list):
        raise fields.refused(path, calls, "a list of calls")
    return [_call(f"{path}[{i}]", call) for i, call in enumerate(calls)]


def _call(path: str, call: Any) -> Body:
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            name, parsed = fields.text(f"{path}.function.name", name), fields.parse(arguments.encode(), "arguments")
        case {"function": {"name": str(name), "arguments": dict(parsed)}}:
            pass
        case _:
            raise fields.refused(path, call, 'a call {"function": {"name": ..., "arguments": ...}}')
    function = {"name": name, "arguments": parsed}
    return {"id": str(call.get("id", "")), "type": "function", "function": function}


class Content(NamedTuple):
    """A part of an answer that is no call."""

    text: str


class Called(NamedTuple):
    """The beginning of a call."""

    name: str


class Arguments(NamedTuple):
    """A part of the arguments of the last call."""

    text: str


Part = Content | Called | Arguments


class CallReader:
    """Reads an answer of a grammar of `Tools.grammar` in pieces.

    Args:
      form: of the calls.
      tools: that the answer may use.
    """

    def __init__(self, form: Form, tools: Tools):
        begins = {form.begin(tool.name): tool.name for tool in tools.tools}
        self._first = {form.opening + begin: name for begin, name in begins.items()}
        between = form.between
        self._next = {} if between is None else {f"}}{between}{begin}": name for begin, name in begins.items()}
        self._closing = "}" + form.closing
        self._held = ""
        self._read = self._read_content
        self._depth, self._is_string, self._is_escaped = 0, False, False

    def feed(self, text: str, last: bool = False) -> Iterator[Part]:
        """Takes a piece of the answer and yields the parts that are now certain; with `last`, all that is left."""
        self._held += text
        while self._held and (part := self._read(last)) is not None:
            if part != Content(""):
                yield part

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _begin_call(self, begins: Mapping[str, str]) -> Called | None:
        begin = next((begin for begin in begins if self._held.startswith(begin)), None)
        if begin is None:
            return None
        self._take(len(begin))
        self._read, self._depth = self._read_arguments, 0
        return Called(begins[begin])

    def _read_content(self, last: bool) -> Part | None:
        if (call := self._begin_call(self._first)) is not None:
            return call
        places = [place for begin in self._first if (place := self._held.find(begin)) >= 0]
        end = min(places, default=len(self._held))
        if not places and not last:
            end -= _begun(self._held, self._first)
        return Content(self._take(end)) if end else None

    def _read_arguments(self, last: bool) -> Part | None:
        for place, character in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = character == "\\", character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    self._read = self._read_end
                    return Arguments(self._take(place + 1))
        return Arguments(self._take(len(self._held)))

    def _read_end(self, last: bool) -> Part | None:
        self._held = self._held.lstrip(WHITESPACE)
        if (call := self._begin_call(self._next)) is not None:
            return call
        may_go_on = any(begin.startswith(self._held) for begin in (*self._next, self._closing))
        if may_go_on and not last:
            return None
        self._take(len(self._closing) if self._held.startswith(self._closing) else len(self._held))
        self._read = self._read_content
        return Content("")


def _begun(text: str, begins: Mapping[str, str]) -> int:
    """Returns the length of the longest suffix of a text that is the beginning of one of `begins`."""
    longest = min(len(text), max(map(len, begins)))
    return next((n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in begins)), 0)


def gather(parts: Iterable[Part]) -> tuple[str, list[Body]]:
    """Returns the content and the calls of the parts of a whole answer, as functions with name and arguments."""
    content, calls = "", list[Body]()
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Called(name):
                calls.append({"name": name, "arguments": ""})
            case Arguments(text):
                calls[-1]["arguments"] += text
    return content, calls
