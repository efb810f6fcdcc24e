"""The form in which a chat template writes calls of tools, read off an example that it writes."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jlade.constraints.plain import KINDS, Values
from jlade.constraints.special import ID, MARK
from jlade.server.examples import Examples, marked
from jlade.server.fields import Body
from jlade.server.thoughts import Marks

NAME, KEYS, TEXT, NUMBER = "probe", ("alpha", "beta"), "gamma", 7  # of the example
ARGUMENTS: Body = dict(zip(KEYS, (TEXT, NUMBER), strict=True))
TOOL: Body = {"name": NAME, "description": "-", "parameters": {"type": "object", "properties": {}}}
# Values of other kinds, and how they may be written: in JSON, in Python.
OTHERS = {
    "boolean": (True, "true", "True"),
    "null": (None, "null", "None"),
    "list": (["x"], '["x"]', "['x']"),
    "object": ({"a": True}, '{"a": true}', "{'a': True}"),
}
QUOTED = "<&>"  # a string that may have quotes where others have none
AGAIN = "\0"  # the name once more
IDS = "00000000"  # begin the ids of the example
NUMBERINGS = ((f"{IDS}0", f"{IDS}1"), ("0", "1"), ("1", "2"))  # of two calls
# Models of Mistral may leave out the id of a call.
OPTIONAL_ID = re.compile(rf'(, "id": "|\[CALL_ID\]){IDS}\d"?')
IN_JSON = re.compile(rf"{NAME}(?P<middle>[^{{}}]*)(?P<arguments>{{[^{{}}]*}})")
IN_FIELDS = re.compile(
    rf"{NAME}(?P<before>.*?){KEYS[0]}(?P<of_string>.*?){TEXT}(?P<after>.*?){KEYS[1]}(?P<of_number>.*?){NUMBER}",
    re.DOTALL,
)
Answer = Callable[..., str]  # of a number of calls with arguments


class Fields(NamedTuple):
    """Arguments as fields: each is `begin`, its name, `middle`, its value, and `end`."""

    begin: str
    middle: str
    end: str
    values: Values = Values()
    is_sorted: bool = False  # by name


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of the calls in a text: a block of one or more, each a name and arguments.

    The texts have special tokens, written by `special`, and `ID` for an id or a number.

    Attributes:
      opening: the text before the first name of a block.
      middle: the text between a name and its arguments; it may have the name once more, as `AGAIN`.
      closing: the text after the last arguments of a block.
      between: the text between arguments and the next name; None for blocks of one call.
      fields: how arguments are written that are no object in JSON.
      bare: the text in place of `middle` where there are no arguments, if it is another.
      others: texts before and after the name, in place of `opening` and `middle`, that models write as well.
      alone: the text before a block that has no content before it.
      is_shown: whether the template shows the tools.
    """

    opening: str
    middle: str
    closing: str
    between: str | None = None
    fields: Fields | None = None
    bare: str | None = None
    others: Sequence[tuple[str, str]] = ()
    alone: str = ""
    is_shown: bool = True

    @classmethod
    def of(cls, examples: Examples, marks: Marks) -> "Form":
        """Returns the form in which a template writes the calls of an earlier answer.

        Args:
          examples: of the template.
          marks: around the other parts of its answers.

        Returns:
          That form, or `HERMES` for a template that neither shows tools nor writes calls.

        Raises:
          ValueError: the template writes calls in a form that is not supported.
        """
        tools: list[Body] | None = [{"type": "function", "function": TOOL}]
        tokenizer = examples.template.tokenizer
        try:
            is_shown = NAME in (prompt := examples.prompt(tools))
        except ValueError:  # of the tools
            is_shown, tools, prompt = False, None, examples.prompt()

        def answer(number: int = 1, arguments: Body = ARGUMENTS) -> str:
            function = {"name": NAME, "arguments": arguments}
            calls = [{"id": f"{IDS}{i}", "type": "function", "function": function} for i in range(number)]
            written = marks.answer(prompt, examples.conversation({"tool_calls": calls}, tools))
            return marked(tokenizer, OPTIONAL_ID.sub("", examples.whole(written)))

        named = (
            dataclasses.replace(form, opening=marked(tokenizer, form.opening), closing=marked(tokenizer, form.closing))
            for text, form in NAMED.items()
            if is_shown and text in examples.template.source(tools)
        )
        try:
            form = _numbered(answer) or _form(answer) or next(named, None)
        except ValueError:  # no example can be read
            form = next(named, None)
            if form is None and is_shown:
                raise
        if form is None and not is_shown:
            return HERMES
        if form is None or not form.opening.strip() or NAME in str(form) or IDS in str(form):
            shown = answer().replace(MARK, "")
            raise ValueError(
                f"the model's chat template writes calls of tools in a form that is not supported: {shown!r}"
            )
        begins = BEGINNINGS.get(form.opening, ())
        others = tuple((marked(tokenizer, before), marked(tokenizer, after)) for before, after in begins)
        form = dataclasses.replace(form, others=others, is_shown=is_shown)
        alone = marked(tokenizer, marks.content[0])
        if alone and form.opening.lstrip().startswith(alone):
            form = dataclasses.replace(form, opening=form.opening.lstrip().removeprefix(alone), alone=alone)
        return form

    def example(self) -> str:
        """Returns a call as the model is to write it."""
        arguments = '{"ARGUMENT": VALUE}'
        if self.fields is not None:
            arguments = f"{self.fields.begin}ARGUMENT{self.fields.middle}VALUE{self.fields.end}"
        return self.written([("NAME", arguments)])

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns calls, each the name of a function and the text of its arguments. Special tokens have their names."""
        texts = [name + self.middle.replace(AGAIN, name) + arguments for name, arguments in calls]
        blocks = texts if self.between is None else [self.between.join(texts)]
        written = "".join(f"{self.opening}{block}{self.closing}" for block in blocks)
        return written.replace(MARK, "").replace(ID, "1")

    def arguments(self, arguments: Body) -> str:
        """Returns the text of arguments: in JSON, or in fields whose values are Python's."""
        if self.fields is None:
            return json.dumps(arguments, ensure_ascii=False)
        begin, middle, end, values, _ = self.fields
        quote, unquote = values.quotes
        separator = values.follows[0] if values.follows else ""
        texts = (f"{quote}{each}{unquote}" if isinstance(each, str) else repr(each) for each in arguments.values())
        return separator.join(f"{begin}{name}{middle}{text}{end}" for name, text in zip(arguments, texts, strict=True))

    def begins(self, before: str, name: str) -> list[str]:
        """Returns the texts with which calls of a function begin after `before`: with and without arguments."""
        return [before + name + text.replace(AGAIN, name) for text in (self.middle, self.bare) if text is not None]

    def firsts(self, name: str) -> list[str]:
        """Returns the texts with which blocks whose first call is of a function begin."""
        return [*self.begins(self.opening, name), *(opening + name + middle for opening, middle in self.others)]

    def triggers(self, names: Sequence[str]) -> list[str]:
        """Returns the beginnings of blocks with calls of some functions that no other text has.

        They are all up to a blank or a name, or if there is none up to the first special token, which other text lacks.
        """
        triggers = list[str]()
        for opening, middle in ((self.opening, self.middle), *self.others):
            if MARK in opening or MARK not in middle:
                match = re.match(rf"\s*[^\s{{{ID}]*", opening)
                trigger = match[0] if match and match[0].strip() else opening
                triggers.append(trigger.lstrip() or trigger)
            else:
                triggers += [(opening + name + middle).partition(MARK)[0] + MARK for name in names]
        return list(dict.fromkeys(triggers))


# The form for models of which no template shows tools: the oldest one, which many models have read.
HERMES = Form(
    '\n<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    is_shown=False,
)
# Other beginnings of calls, by the opening that templates write. OpenAI's harmony lets the recipient stand before the
# channel, as its template has it, and after it, as gpt-oss mostly writes it.
BEGINNINGS: Mapping[str, Sequence[tuple[str, str]]] = {
    " to=functions.": (
        (" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
        ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
        ("<|channel|>commentary to=functions.", "<|message|>"),
    ),
}
# Forms of which templates have no example, by texts of these.
IN_PYTHON = Values(
    words=("True", "False", "None"), in_python=("list", "object"), quotes=('"', '"'), follows=(", ", ")")
)
NAMED = {
    "respond only with <|tool_call|> followed by a JSON list": Form(
        '<|tool_call|>[{"name": "', '", "arguments": ', "}]", '}, {"name": "'
    ),
    "followed by a json-formatted list of actions": Form(
        'Action:\n```json\n[\n    {\n        "tool_name": "',
        '",\n        "parameters": ',
        "\n    }\n]```",
        '\n    },\n    {\n        "tool_name": "',
    ),
    "List of tools: ": Form("<|tool_call_start|>[", "(", ")]<|tool_call_end|>", "), ", Fields("", "=", "", IN_PYTHON)),
}


def _form(answer: Answer) -> Form | None:
    return _in_json(answer) or _in_fields(answer)


def _numbered(answer: Answer) -> Form | None:
    """Returns the form of calls with ids or numbers, None if they have none."""
    for numbers in NUMBERINGS:
        pattern = re.compile(rf"(?<![\w.])({'|'.join(numbers)})(?![\w.])")
        with_ids = functools.partial(_with_ids, answer, pattern)
        if ID in with_ids() and (form := _form(with_ids)) is not None and form.between is not None:
            return form
    return None


def _with_ids(answer: Answer, numbers: re.Pattern[str], *arguments: Any) -> str:
    """Returns an answer with `ID` in place of numbers."""
    return numbers.sub(ID, answer(*arguments))


def _between(answer: Answer, call: str, rest: str) -> str | None:
    """Returns the text between two calls, None if there are not two before the same rest as of one."""
    try:
        parts = answer(2).split(call)
    except ValueError:  # the template refuses more than one
        return None
    return parts[1] if len(parts) == 3 and parts[2] == rest else None


def _in_json(answer: Answer) -> Form | None:
    one = answer()
    call = IN_JSON.search(one)
    try:
        if call is None or json.loads(call["arguments"]) != ARGUMENTS:
            return None
    except ValueError:
        return None
    rest = one[call.end() :]
    return Form(one[: call.start()], call["middle"], rest, _between(answer, call[0], rest))


def _in_fields(answer: Answer) -> Form | None:
    """Returns the form of arguments in fields."""
    one = answer()
    call = IN_FIELDS.search(one)
    if call is None:
        return None
    rest = one[call.end() :]
    between = _between(answer, call[0], rest)
    end = _common_beginning([call["after"], rest, rest if between is None else between])
    begin = call["after"].removeprefix(end)
    opening, middle, closing = one[: call.start()], call["before"].removesuffix(begin), rest.removeprefix(end)
    if not end:
        return _joined(answer, call, rest, between)
    if not (begin and closing) or KEYS[0] in call["after"]:
        return None
    between = None if between is None else between.removeprefix(end)

    bare = answer(1, {}).removeprefix(opening + NAME).removesuffix(closing)
    written = functools.partial(_last_value, answer, call, rest)
    before, values = _values(call["of_string"], call["of_number"], written)
    middle = middle.replace(NAME, AGAIN)
    bare = bare.replace(NAME, AGAIN)
    return Form(opening, middle, closing, between, Fields(begin, before, end, values), None if bare == middle else bare)


def _joined(answer: Answer, call: re.Match[str], rest: str, between: str | None) -> Form | None:
    """Returns the form of fields that have a text between two of them, and no end."""
    one = answer()
    opening, middle, of_number = one[: call.start()], call["before"], call["of_number"]
    written = functools.partial(_last_value, answer, call, rest)
    quote, _, unquote = written(TEXT).removeprefix(of_number).partition(TEXT)
    separator = call["after"].removeprefix(unquote)
    if not (quote and unquote and separator and rest) or answer(1, {}) != f"{opening}{NAME}{middle}{rest}":
        return None
    _, values = _values(of_number, of_number, written)
    in_quotes = {"list": (["x"], f"[{quote}x{unquote}]"), "object": ({"a": True}, "{a:true}")}
    values = values._replace(
        quotes=(quote, unquote),
        in_quotes=tuple(
            kind
            for kind, (value, text) in in_quotes.items()
            if kind not in values.in_python and written(value) == of_number + text
        ),
        follows=(separator, rest[0]),
    )
    is_sorted = answer(1, dict(reversed(ARGUMENTS.items()))) == one
    return Form(opening, middle, rest, between, Fields("", of_number, "", values, is_sorted))


def _last_value(answer: Answer, call: re.Match[str], rest: str, value: Any) -> str:
    """Returns the text between the name of the last argument and the end of its value, in a call before `rest`."""
    return answer(1, {KEYS[0]: TEXT, KEYS[1]: value})[call.start("of_number") :].removesuffix(rest)


def _values(of_string: str, of_number: str, written: Callable[[Any], str]) -> tuple[str, Values]:
    """Returns the text before all values, and how they are written.

    Args:
      of_string, of_number: the texts before values of these kinds.
      written: returns a value and the text before it.
    """
    before, spelled = {"string": of_string, "number": of_number}, {}
    for kind, (value, *spellings) in OTHERS.items():
        text = written(value)
        spelled[kind] = next(filter(text.endswith, spellings), spellings[0])
        before[kind] = text.removesuffix(spelled[kind]) if text.endswith(spelled[kind]) else of_number
    quote, _, unquote = written(QUOTED).removeprefix(of_string).partition(QUOTED)
    common = _common_beginning(list(before.values()))
    words = (spelled["boolean"], "False" if spelled["boolean"] == "True" else "false", spelled["null"])
    return common, Values(
        before=tuple(before[kind].removeprefix(common) for kind in KINDS),
        words=words,
        in_python=tuple(kind for kind in ("list", "object") if spelled[kind] == OTHERS[kind][2]),
        quotes=(quote, unquote),
    )


def _common_beginning(texts: Sequence[str]) -> str:
    alike = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(first for first, *_ in alike)
