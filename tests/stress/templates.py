"""Calls of tools and thoughts in real chat templates: written by a template, accepted by its grammar, and read back.

    python -m tests.stress.templates FOLDER

FOLDER has chat templates as files *.jinja, such as vendor/llama.cpp/models/templates of the source package of
llama-cpp-python. Each is tried twice: with the names that look like special tokens as such, and as plain text.
"""

import argparse
import json
import pathlib
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from jlade.constraints.special import MARK
from jlade.generation.chat_template import ChatTemplate
from jlade.server import calls, tools
from jlade.server.call_formats import OPTIONAL_ID, Form
from jlade.server.calls import AnswerReader, CallReader
from jlade.server.examples import Examples, marked
from jlade.server.fields import Body
from jlade.server.thoughts import Marks
from tests.server import json_chat

# Texts that end answers; of a template that has none of its own, all that it has.
ENDS = (
    "<EOS>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end_of_msg|>", "<|END_OF_TURN_TOKEN|>", "<turn|>",
    "<|tool_response>", "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|role_end|>", "<|end_of_text|>", "<seed:eos>",
    "<end_of_sentence>", "[e~[", "<SPECIAL_12>", "<sep>", "</assistant>", "<|calls|>",
    "<\uff5chy_eos:opensource\uff5c>",
    "<|assistant_end|>", "<|end|>",
)  # fmt: skip
OWN_ENDS = {"openai-gpt-oss-120b": ("<|return|>", "<|call|>")}
SPECIAL = re.compile(
    r"<\|[\w:/ \u2581]+\|?>|<[\w]+\|>|<\uff5c[^<>\uff5c]+\uff5c>|\[/?[A-Z_]{4,}\]|<SPECIAL_\d+>|<seed:\w+>"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "list": {"type": "array", "items": {}},
        "object": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}}},
    },
    "additionalProperties": False,
}
NAMES = ("shop", "shop_2")
TOOLS: list[Body] = [
    {"type": "function", "function": {"name": name, "description": "-", "parameters": SCHEMA}} for name in NAMES
]
GROUPS: dict[str, Body] = {
    "text": {"text": "a \"b\" 'c'\n<d> \\ {é}, [x]"},
    "words": {"number": -1.5, "flag": None},
    "nested": {"flag": True, "list": ["x", 1], "object": {"a": False, "b": "y"}},
    "none": {},
}


def examples_of(file: pathlib.Path, are_special: bool) -> Examples:
    """Returns the examples of a template."""
    source, tokenizer = file.read_text(), json_chat._tokenizer()
    if are_special:
        tokenizer.add_special_tokens(sorted(set(SPECIAL.findall(source))))
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<BOS>", eos_token="<EOS>", chat_template=source
    )
    return Examples(ChatTemplate(own), OWN_ENDS.get(file.stem, ENDS))


def round_trip(examples: Examples, marks: Marks, form: Form, made: Sequence[Body]) -> str:
    """Returns what is wrong with calls that a template writes, "" if nothing."""
    made_calls = [
        {"id": f"00000000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(zip(NAMES, made, strict=False))
    ]
    given = TOOLS if form.is_shown else None
    try:
        conversation = examples.conversation({"tool_calls": made_calls}, given)
        written = examples.whole(marks.answer(examples.prompt(given), conversation))
    except ValueError:  # the template writes more after an answer
        written = ""
    if NAMES[0] not in written:  # so messages have them
        written = form.written([(name, form.arguments(each)) for name, each in zip(NAMES, made, strict=False)])
    text = marked(examples.template.tokenizer, OPTIONAL_ID.sub("", written))
    begin, end = (marked(examples.template.tokenizer, part) for part in marks.content)
    for choice in ("auto", "required"):
        asked = tools.read({"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": True})
        assert asked is not None
        if not asked.grammar(form, (), (begin, end)).automaton.accepts(text.encode(errors="surrogateescape")):
            return f"refused with {choice}: {text.replace(MARK, '')!r}"
    for length in (len(text), 1):
        reader = AnswerReader((), CallReader(form, asked, (begin, end)))
        parts: list[calls.Part] = []
        for place in range(0, len(text), length):
            parts += reader.feed(text[place : place + length])
        gathered = calls.gather([*parts, *reader.feed("", last=True)])
        found = [(call["name"], json.loads(call["arguments"])) for call in gathered.functions]
        if gathered.content or found != list(zip(NAMES, made, strict=False)):
            return f"read as {gathered}"
    return ""


def main() -> None:
    """Prints a line for each template, and the numbers of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="part of the names of files")
    options = parser.parse_args()
    number = {"templates": 0, "tools": 0, "thoughts": 0}
    for file in sorted(file for file in options.folder.glob("*.jinja") if options.only in file.name):
        results, marks = [], Marks()
        for are_special in (True, False):
            examples = examples_of(file, are_special)
            marks = Marks.of(examples)
            try:
                form = Form.of(examples, marks)
                for name, arguments in GROUPS.items():
                    if problem := round_trip(examples, marks, form, [arguments]):
                        results.append(f"{name}: {problem}")
                if form.between is not None and (problem := round_trip(examples, marks, form, [{}, GROUPS["text"]])):
                    results.append(f"two calls: {problem}")
            except ValueError as error:
                results.append(str(error))
        number["templates"] += 1
        number["tools"] += not results
        number["thoughts"] += bool(marks.thoughts)
        shown = results[0][:300] if results else "two calls" if form.between is not None else "one call"
        print(f"{file.stem:50} {' ... '.join(marks.thoughts[0]) if marks.thoughts else '-':40} {shown}", flush=True)
    print(number)


if __name__ == "__main__":
    main()
