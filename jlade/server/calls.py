"""Reads the thoughts, the content and the calls of an answer, piece by piece, from the text that a model writes."""

import functools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jlade.constraints import plain
from jlade.constraints.automaton import Automaton
from jlade.constraints.grammar import Grammar
from jlade.constraints.special import ID, MARK
from jlade.constraints.tags import MAX_BREAKS, OF_IDS, Field
from jlade.generation.text import Detokenizer, Tokenizer
from jlade.server.call_formats import Form
from jlade.server.fields import Body
from jlade.server.protocol import Completion
from jlade.server.thoughts import Thoughts
from jlade.server.tools import Tools, fields_of

WHITESPACE = " \t\n\r"  # of JSON
SPECIAL = re.compile(f"{MARK}[^{MARK}]*{MARK}")


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
    """Reads an answer in pieces: the thoughts with which it begins, and then the rest.

    Args:
      thoughts: texts around them, as in `Tags.thoughts`.
      rest: reads the text after them.
      blanks: characters that may be between both; None for all blanks.
      most: how many of these.
    """

    def __init__(self, thoughts: Thoughts, rest: "CallReader", blanks: str | None = None, most: int = sys.maxsize):
        self._thoughts, self._rest, self._blanks, self._most = thoughts, rest, blanks, most
        self._left = 0  # of the blanks, which come after thoughts alone
        self._held, self._end = "", ""  # of the thoughts that have begun
        self._has_thought = False
        self._read: Callable[[bool], Iterator[Part]] = self._read_beginning

    @property
    def is_thinking(self) -> bool:
        """Whether the thoughts have begun and not ended."""
        return self._read == self._read_thought

    @property
    def is_after_thoughts(self) -> bool:
        """Whether the thoughts have ended, or there are none."""
        return self._read == self._read_rest

    def feed(self, text: str, last: bool = False) -> Iterator[Part]:
        """Takes a piece of the answer and yields the parts that are now certain; with `last`, all that is left."""
        self._held += text
        yield from self._read(last)

    def _read_beginning(self, last: bool) -> Iterator[Part]:
        held = self._held.lstrip()
        begun = next((pair for pair in self._thoughts if held.startswith(pair[0])), None)
        if begun is not None:
            begin, self._end = begun
            self._held, self._read = held.removeprefix(begin), self._read_thought
        elif last or not any(begin.startswith(held) for begin, _ in self._thoughts):
            self._read = self._read_rest
        else:
            return
        yield from self._read(last)

    def _read_thought(self, last: bool) -> Iterator[Part]:
        held = self._held if self._has_thought else self._held.lstrip()
        thought, found, rest = held.partition(self._end)
        length = len(thought) - (0 if found or last else _begun(thought, [self._end]))
        if certain := thought[:length].rstrip():  # without the blanks that may be before the end
            self._has_thought = True
            yield Thought(_shown(certain))
        self._held = rest if found else held[len(certain) :]
        if found:
            self._read, self._left = self._read_rest, self._most
            yield from self._read(last)

    def _read_rest(self, last: bool) -> Iterator[Part]:
        held, self._held = self._held, ""
        for part in self._rest.feed(held, last):
            if self._left and isinstance(part, Content):
                length = len(part.text) - len(part.text.lstrip(self._blanks))
                cut = min(length, self._left)
                part = Content(part.text[cut:])
                self._left = 0 if part.text else self._left - cut
            else:
                self._left = 0
            if part != Content(""):
                yield part


class CallReader:
    """Reads an answer after its thoughts in pieces. Its special tokens are written by `special`.

    Args:
      form: of the calls; None for an answer without calls.
      tools: that the answer may use.
      content: texts around the content, which are no part of it.
      is_either: whether the answer is either content or calls.
    """

    def __init__(
        self,
        form: Form | None = None,
        tools: Tools | None = None,
        content: tuple[str, str] = ("", ""),
        is_either: bool = False,
    ):
        self._form, self._content = form, content
        self._tools = {} if tools is None else {tool.name: tool for tool in tools.tools}
        self._first, self._next, self._closing = dict[str, str](), dict[str, str](), ""  # names by what begins a call
        if form is not None:
            first = self._names(form, form.firsts)
            self._first = first | {begin.lstrip(): name for begin, name in first.items()}
            self._closing = form.closing.lstrip(WHITESPACE)
            if form.between is not None:
                self._next = self._names(form, functools.partial(form.begins, form.between.lstrip(WHITESPACE)))
        self._is_either = is_either
        self._held = ""
        self._arguments: _JsonReader | _FieldReader = _JsonReader()
        self._read: Callable[[bool], Part | None] = self._read_beginning

    def _names(self, form: Form, begins: Callable[[str], Sequence[str]]) -> dict[str, str]:
        """Returns the names of functions by the texts with which their calls begin."""
        brace = "{" if form.fields is None else ""  # without which a name could be the beginning of another
        return {f"{begin}{brace}": name for name in self._tools for begin in begins(name)}

    def feed(self, text: str, last: bool = False) -> Iterator[Part]:
        """Takes a piece of the answer and yields the parts that are now certain; with `last`, all that is left."""
        self._held += text
        while self._held and (part := self._read(last)) is not None:
            if part not in (Content(""), Arguments("")):
                yield part

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _begin_call(self, name: str, length: int) -> Called:
        assert self._form is not None
        # A brace is part of the arguments.
        self._take(length - (self._form.fields is None))
        if self._form.fields is None:
            self._arguments = _JsonReader()
        else:
            self._arguments = _FieldReader(fields_of(self._tools[name], self._form.fields))
        self._read = self._read_arguments
        return Called(name)

    def _read_beginning(self, last: bool) -> Part | None:
        begin, held = self._content[0], self._held.lstrip()
        if begin and not last and held != begin and begin.startswith(held):
            return None
        if begin and held.startswith(begin):
            self._held = held.removeprefix(begin)
        self._read = self._read_content
        return Content("")

    def _read_content(self, last: bool) -> Part | None:
        place, text, length = _find([*self._first, *filter(None, [self._content[1]])], self._held, last)
        if place:
            if self._is_either and self._held[:place].strip(WHITESPACE):
                self._first = {}
            return Content(_shown(self._take(place)))
        if text in self._first:
            return self._begin_call(self._first[text], length)
        if text or last:  # the end of the content, or what begins a call and is cut off
            return Content(_shown(self._take(length or len(self._held)).partition(MARK)[0]))
        return None

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
        place, begin, length = _find(self._next, self._held, last)
        if place == 0 and begin:
            return self._begin_call(self._next[begin], length)
        if not last and (not place or self._closing.startswith(self._held)):
            return None
        self._take(len(self._closing) if self._held.startswith(self._closing) else len(self._held))
        self._read = self._read_beginning
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
        self._values = next((plain.Values(*field.values) for field in fields.values()), plain.Values())
        self._read: Callable[[str], Taken | None] = self._read_begin
        self._before = "{"  # the next name

    def take(self, held: str) -> Taken | None:
        """Returns the part with which a text begins, None if more text decides."""
        return self._read(held)

    def _read_begin(self, held: str) -> Taken | None:
        separator = "" if self._before == "{" or not self._values.follows else self._values.follows[0]
        begin = next((begin for begin in self._fields if held.startswith(separator + begin)), None)
        if begin is None:
            may_begin = any((separator + begin).startswith(held) for begin in self._fields)
            return None if may_begin else Taken(0, "{}" if self._before == "{" else "}", is_last=True)
        name, field = self._fields[begin]
        in_json = Grammar.json_schema(json.dumps(field.schema)).automaton
        opening = f"{self._before}{json.dumps(name, ensure_ascii=False)}: "
        self._before = ", "
        if plain.are_strings(in_json) and not any(self._values.before) and not any(self._values.quotes):
            self._read, opening = functools.partial(self._read_string, plain.End.of(field.end)), f'{opening}"'
        else:
            self._read = functools.partial(self._read_value, plain.End.of(field.end), in_json)
        return Taken(len(separator + begin), opening)

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
        if self._values.follows:
            length = plain.length_before(held, self._values)
            value = held[:length]
        else:
            value, length = _value(held, end)
        if not length:
            return None
        self._read = self._read_begin
        return Taken(length, plain.to_json(value, in_json, self._values))


def _value(held: str, end: plain.End) -> tuple[str, int]:
    """Returns the value with which a text begins, and the length of both up to the end of `end`; 0 if it is cut off."""
    value, found, _ = held.partition(end.tag + end.rest)
    return value.removesuffix(end.blanks), len(value) + len(found) if found else 0


def _begun(text: str, begins: Iterable[str]) -> int:
    """Returns the length of the longest suffix of a text that is the beginning of one of `begins`."""
    longest = min(len(text), max(map(len, begins)))
    return next((n for n in range(longest, 0, -1) if any(begin.startswith(text[-n:]) for begin in begins)), 0)


def _find(begins: Collection[str], text: str, last: bool) -> tuple[int, str, int]:
    """Returns the first place in a text where one of `begins` is or may be, that one, and the length of its text.

    "" and 0 if more text decides; the place is the end of the text if none may be there.
    """
    firsts = {begin[0] for begin in begins}
    for place, character in enumerate(text):
        if character in firsts:
            lengths = {begin: _length(begin, text, place) for begin in begins}
            is_open = None in lengths.values()
            if is_open and not last:
                return place, "", 0
            length, begin = max((length or 0, begin) for begin, length in lengths.items())
            if length or is_open:
                return place, begin if length else "", length
    return len(text), "", 0


def _length(begin: str, text: str, place: int) -> int | None:
    """Returns the length of `begin` at a place of a text: 0 if it is not there, None if more text decides."""
    end = place
    for number, part in enumerate(begin.split(ID)):
        while number and end < len(text) and text[end] in OF_IDS:
            end += 1
        if not text.startswith(part, end):
            return None if part.startswith(text[end:]) else 0
        end += len(part)
    return end - place


def _shown(text: str) -> str:
    """Returns a text without special tokens."""
    return SPECIAL.sub("", text).replace(MARK, "")


def reader(completion: Completion) -> AnswerReader | None:
    """Returns the reader of an answer; None for one whose text is its content."""
    if completion.tools is None and not completion.thoughts and not any(completion.content):
        return None
    form, tools = completion.tools or (None, None)
    rest = CallReader(form, tools, completion.content, completion.has_format)
    blanks = ("\n", MAX_BREAKS) if completion.has_format else ()  # others may be of the grammar
    return AnswerReader(completion.thoughts, rest, *blanks)


def num_thinking(completion: Completion, tokenizer: Tokenizer, tokens: Iterable[int]) -> int:
    """Returns how many tokens of an answer are thoughts or of the mark that begins them."""
    answer, detokenizer, number = reader(completion), Detokenizer(tokenizer, with_special=True), 0
    for token in tokens:
        if answer is None or answer.is_after_thoughts:
            break
        list(answer.feed(detokenizer.feed([token])))
        number += answer.is_thinking
    return number


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
