"""Reads the calls of tools in an answer, piece by piece, into the parts of OpenAI's interface."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from jlade.constraints import plain
from jlade.constraints.automaton import Automaton
from jlade.constraints.grammar import MAX_BREAKS, Grammar
from jlade.constraints.special import MARK
from jlade.constraints.tags import Field
from jlade.server.call_formats import Form
from jlade.server.fields import Body
from jlade.server.protocol import Completion
from jlade.server.thoughts import Thoughts
from jlade.server.tools import Tools, fields_of

WHITESPACE = " \t\n\r"  # of JSON


class Content(NamedTuple):
    """A part of an answer that is no call."""

    text: str


class Thought(NamedTuple):
    """A part of the thoughts with which an answer begins."""

    text: str


class Called(NamedTuple):
    """The beginning of a call."""

    name: str


class Arguments(NamedTuple):
    """A part of the arguments of the last call, in JSON."""

    text: str


Part = Content | Thought | Called | Arguments


class Taken(NamedTuple):
    """The next part of a call's arguments."""

    length: int  # of the text that it takes
    arguments: str
    is_last: bool = False


class AnswerReader:
    """Reads an answer of a grammar of `Grammar.after` in pieces: what comes after the thoughts and the line breaks.

    Args:
      end: of the thoughts.
    """

    def __init__(self, end: str):
        self._end, self._held = end, ""
        self._has_ended = self._has_begun = False  # the thoughts, the answer

    def feed(self, text: str, last: bool = False) -> Iterator[Part]:
        """Takes a piece of the text and yields that of the answer."""
        self._held += text
        if not self._has_ended:
            _, end, rest = self._held.partition(self._end)
            self._has_ended = bool(end)
            self._held = rest if end else self._held[1 - len(self._end) :]
        if self._has_ended and not self._has_begun:
            answer = re.sub(rf"\n{{0,{MAX_BREAKS}}}", "", self._held, count=1)
            # Until the answer begins, line breaks may follow.
            self._has_begun = bool(answer)
            self._held = answer or self._held
        if self._has_begun and self._held:
            yield Content(self._held)
            self._held = ""


class CallReader:
    """Reads an answer of a grammar of `Tools.grammar` in pieces. Its special tokens are written by `special`.

    Args:
      form: of the calls.
      tools: that the answer may use.
      thoughts: as of `Tools.grammar`; calls there are none.
    """

    def __init__(self, form: Form, tools: Tools, thoughts: Thoughts = ()):
        self._form, self._tools = form, {tool.name: tool for tool in tools.tools}
        self._brace = "{" if form.fields is None else ""  # without which a name may be the beginning of another
        self._first, self._next = (
            {} if text is None else {f"{text}{name}{form.middle}{self._brace}": name for name in self._tools}
            for text in (form.opening, form.between and form.between.lstrip(WHITESPACE))
        )
        self._closing = form.closing.lstrip(WHITESPACE)
        self._held = ""
        self._arguments: _JsonReader | _FieldReader = _JsonReader()
        self._thoughts = thoughts
        self._read: Callable[[bool], Part | None] = self._read_beginning

    def feed(self, text: str, last: bool = False) -> Iterator[Part]:
        """Takes a piece of the answer and yields the parts that are now certain; with `last`, all that is left."""
        self._held += text
        while self._held and (part := self._read(last)) is not None:
            if part not in (Content(""), Arguments("")):
                yield part

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _begin_call(self, begins: Mapping[str, str]) -> Called | None:
        begin = next((begin for begin in begins if self._held.startswith(begin)), None)
        if begin is None:
            return None
        name = begins[begin]
        self._take(len(begin) - len(self._brace))
        if self._form.fields is None:
            self._arguments = _JsonReader()
        else:
            self._arguments = _FieldReader(fields_of(self._tools[name], self._form.fields))
        self._read = self._read_arguments
        return Called(name)

    def _read_beginning(self, last: bool) -> Part | None:
        held = self._held.lstrip(WHITESPACE)
        begun = [(begin, end) for begin, end in self._thoughts if held.startswith(begin)]
        if not begun and not last and any(begin.startswith(held) for begin, _ in self._thoughts):
            return None
        self._read = functools.partial(self._read_thoughts, begun[0][1]) if begun else self._read_content
        return Content("")

    def _read_thoughts(self, end: str, last: bool) -> Part | None:
        _, found, rest = self._held.partition(end)
        if found:
            self._read = self._read_content
        left = len(rest) if found else 0 if last else _begun(self._held, [end])
        length = len(self._held) - left
        return Content(self._take(length).replace(MARK, "")) if length else None

    def _read_content(self, last: bool) -> Part | None:
        if (call := self._begin_call(self._first)) is not None:
            return call
        starts = [start for begin in self._first if (start := self._held.find(begin)) >= 0]
        end = min(starts, default=len(self._held))
        if not starts and not last:
            end -= _begun(self._held, self._first)
        # What begins a call and is cut off is no content where a special token begins it.
        return Content(self._take(end).partition(MARK)[0]) if end else None

    def _read_arguments(self, last: bool) -> Part | None:
        taken = self._arguments.take(self._held)
        if taken is None:
            return None
        self._take(taken.length)
        if taken.is_last:
            self._read = self._read_end
        return Arguments(taken.arguments)

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


class _JsonReader:
    """Reads arguments that are an object in JSON."""

    def __init__(self) -> None:
        self._depth, self._is_string, self._is_escaped = 0, False, False

    def take(self, held: str) -> Taken | None:
        """Returns the part with which a text begins, None if more text decides."""
        for i, character in enumerate(held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = character == "\\", character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    return Taken(i + 1, held[: i + 1], is_last=True)
        return Taken(len(held), held)


class _FieldReader:
    """Reads arguments in fields as an object in JSON.

    Args:
      fields: by the names of the arguments.
    """

    def __init__(self, fields: Mapping[str, Field]):
        self._fields = {field.begin: (name, field) for name, field in fields.items()}
        self._read: Callable[[str], Taken | None] = self._read_begin
        self._before = "{"  # the next name

    def take(self, held: str) -> Taken | None:
        """Returns the part with which a text begins, None if more text decides."""
        return self._read(held)

    def _read_begin(self, held: str) -> Taken | None:
        begin = next((begin for begin in self._fields if held.startswith(begin)), None)
        if begin is None:
            may_begin = any(begin.startswith(held) for begin in self._fields)
            return None if may_begin else Taken(0, "{}" if self._before == "{" else "}", is_last=True)
        name, field = self._fields[begin]
        in_json = Grammar.json_schema(json.dumps(field.schema)).automaton
        opening = f"{self._before}{json.dumps(name, ensure_ascii=False)}: "
        self._before = ", "
        if plain.are_strings(in_json):
            self._read, opening = functools.partial(self._read_string, plain.End.of(field.end)), f'{opening}"'
        else:
            self._read = functools.partial(self._read_value, plain.End.of(field.end), in_json)
        return Taken(len(begin), opening)

    def _read_string(self, end: plain.End, held: str) -> Taken | None:
        value, length = _value(held, end)
        if not length:
            value = held[: len(held) - _begun(held, [end.blanks + end.tag + end.rest, end.tag + end.rest])]
        escaped = json.dumps(value, ensure_ascii=False)[1:-1]
        if not length:
            return Taken(len(value), escaped) if value else None
        self._read = self._read_begin
        return Taken(length, f'{escaped}"')

    def _read_value(self, end: plain.End, in_json: Automaton, held: str) -> Taken | None:
        value, length = _value(held, end)
        if not length:
            return None
        self._read = self._read_begin
        return Taken(length, plain.to_json(value, in_json))


def _value(held: str, end: plain.End) -> tuple[str, int]:
    """Returns the value with which a text begins, and the length of both up to the end of `end`; 0 if it is cut off."""
    value, found, _ = held.partition(end.tag + end.rest)
    return value.removesuffix(end.blanks), len(value) + len(found) if found else 0


def _begun(text: str, begins: Iterable[str]) -> int:
    """Returns the length of the longest suffix of a text that is the beginning of one of `begins`."""
    longest = min(len(text), max(map(len, begins)))
    return next((n for n in range(longest, 0, -1) if any(begin.startswith(text[-n:]) for begin in begins)), 0)


def reader(completion: Completion) -> CallReader | AnswerReader | None:
    """Returns the reader of an answer; None for one whose text is its content."""
    if completion.tools is not None:
        return CallReader(*completion.tools, completion.thoughts)
    return None if completion.after is None else AnswerReader(completion.after)


class Gathered(NamedTuple):
    """A whole answer: its thoughts, its content, and its calls as functions with name and arguments."""

    thoughts: str
    content: str
    functions: list[Body]


def gather(parts: Iterable[Part]) -> Gathered:
    """Returns the whole of the parts of an answer."""
    thoughts, content, functions = "", "", list[Body]()
    for part in parts:
        match part:
            case Thought(text):
                thoughts += text
            case Content(text):
                content += text
            case Called(name):
                functions.append({"name": name, "arguments": ""})
            case Arguments(text):
                functions[-1]["arguments"] += text
    return Gathered(thoughts, content, functions)
