"""The form in which a chat template writes calls of tools, read off an example that it writes."""

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from jlade.constraints.special import MARK
from jlade.server.examples import Examples, marked
from jlade.server.fields import Body
from jlade.server.thoughts import Marks

NAME, KEYS, TEXT, NUMBER = "probe", ("alpha", "beta"), "gamma", 7  # of the example
ARGUMENTS: Body = dict(zip(KEYS, (TEXT, NUMBER), strict=True))
TOOL: Body = {"name": NAME, "description": "-", "parameters": {"type": "object", "properties": {}}}
IDS = "00000000"  # begin the ids of the example
# Models of Mistral may leave out the id of a call.
ID = re.compile(rf'(, "id": "|\[CALL_ID\]){IDS}\d"?')
IN_JSON = re.compile(rf"{NAME}(?P<middle>[^{{}}]*)(?P<arguments>{{[^{{}}]*}})")
IN_FIELDS = re.compile(
    rf"{NAME}(?P<before>.*?){KEYS[0]}(?P<middle>.*?){TEXT}(?P<after>.*?){KEYS[1]}(?P=middle){NUMBER}", re.DOTALL
)


class Fields(NamedTuple):
    """Arguments as fields: each is `begin`, its name, `middle`, its value, and `end`."""

    begin: str
    middle: str
    end: str


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of the calls in a text: a block of one or more, each a name and arguments.

    The texts have special tokens, written by `special`.

    Attributes:
      opening: the text before the first name of a block.
      middle: the text between a name and its arguments.
      closing: the text after the last arguments of a block.
      between: the text between arguments and the next name; None for blocks of one call.
      fields: how arguments are written that are no object in JSON.
    """

    opening: str
    middle: str
    closing: str
    between: str | None = None
    fields: Fields | None = None

    @classmethod
    def of(cls, examples: Examples, marks: Marks) -> "Form":
        """Returns the form in which a template writes the calls of an earlier answer.

        Args:
          examples: of the template.
          marks: around the other parts of its answers.

        Raises:
          ValueError: the template shows the model no tools, or writes calls in a form that is not supported.
        """
        tools = [{"type": "function", "function": TOOL}]
        prompt = examples.prompt(tools)
        if NAME not in prompt:
            raise ValueError("the model's chat template shows it no tools")

        def answer(number: int, arguments: Body = ARGUMENTS) -> str:
            function = {"name": NAME, "arguments": arguments}
            calls = [{"id": f"{IDS}{i}", "type": "function", "function": function} for i in range(number)]
            written = marks.answer(prompt, examples.conversation({"tool_calls": calls}, tools))
            return marked(examples.template.tokenizer, ID.sub("", examples.whole(written)))

        one = answer(1)
        try:
            two = answer(2)
        except ValueError:  # it refuses more than one
            two = None
        form = _in_json(one, two) or _in_fields(one, two, answer(1, {}))
        if form is None or NAME in str(form) or IDS in str(form):
            shown = one.replace(MARK, "")
            raise ValueError(
                f"the model's chat template writes calls of tools in a form that is not supported: {shown!r}"
            )
        return form

    def begins(self, before: str, name: str) -> list[str]:
        """Returns the texts with which the calls of a function begin after `before`."""
        return [f"{before}{name}{self.middle}{'{' if self.fields is None else ''}"]

    @property
    def trigger(self) -> str:
        """The beginning of a block that no other text has: all up to a blank or a name."""
        match = re.match(r"\s*[^\s{]*", self.opening)
        return match[0] if match and match[0].strip() else self.opening


def _between(two: str | None, call: str) -> str | None:
    """Returns the text between two calls, None if there are not two."""
    parts = [] if two is None else two.split(call)
    return parts[1] if len(parts) == 3 else None


def _in_json(one: str, two: str | None) -> Form | None:
    call = IN_JSON.search(one)
    try:
        if call is None or json.loads(call["arguments"]) != ARGUMENTS:
            return None
    except ValueError:
        return None
    return Form(one[: call.start()], call["middle"], one[call.end() :], _between(two, call[0]))


def _in_fields(one: str, two: str | None, without: str) -> Form | None:
    """Returns the form of arguments in fields, given answers with a call, two, and one without arguments."""
    call = IN_FIELDS.search(one)
    if call is None:
        return None
    rest, between = one[call.end() :], _between(two, call[0])
    end = _common_beginning([call["after"], rest, rest if between is None else between])
    begin = call["after"].removeprefix(end)
    opening, middle, closing = one[: call.start()], call["before"].removesuffix(begin), rest.removeprefix(end)
    if not (end and begin and closing and call["middle"]) or f"{opening}{NAME}{middle}{closing}" != without:
        return None
    between = None if between is None else between.removeprefix(end)
    return Form(opening, middle, closing, between, Fields(begin, call["middle"], end))


def _common_beginning(texts: Sequence[str]) -> str:
    alike = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(first for first, *_ in alike)
