"""The marks around the thoughts and the content of answers, read off examples that a chat template writes."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jlade.generation import text as text_lib
from jlade.generation.text import Tokenizer
from jlade.server.examples import Examples, marked
from jlade.server.fields import Body

# Of thoughts that a template does not write again. They count where it has one, or the tokenizer both as tokens.
USUAL = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
LONGEST = 64  # tokens of a mark and the blanks after it
CONTENT, THOUGHT, NAME = "probed content", "probed thought", "probe"  # of the examples
CALL: Body = {"id": "000000000", "type": "function", "function": {"name": NAME, "arguments": {}}}
WITH_THOUGHTS: Mapping[str, Any] = {"enable_thinking": True, "thinking": True}  # variables of templates
BETWEEN_MARKS = re.compile(r"(?<=[>\]])(?=[<\[])|\n")

Thoughts = Sequence[tuple[str, str]]  # as `Tags.thoughts`


@dataclasses.dataclass(frozen=True)
class Marks:
    """Texts around parts of an answer, without the blanks beside them. Special tokens have their names.

    Attributes:
      thoughts: around thoughts with which an answer may begin.
      again: the text after these that repeats how an answer begins; mostly empty.
      content: around the content; mostly empty.
    """

    thoughts: Thoughts = ()
    again: str = ""
    content: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, examples: Examples) -> "Marks":
        """Returns the marks that a template writes, or in part names."""
        if (written := _around_thought(examples)) is None:
            marks = cls(_usual(examples))
            return cls(marks.thoughts, content=marks._around_content(examples))
        begin, between = written
        end = BETWEEN_MARKS.split(between)[0].rstrip()
        content = cls([(begin, end)])._around_content(examples)
        again = between.removesuffix(content[0]).removeprefix(end) if content[0] else ""
        return cls([(begin, end)], again.strip(), content)

    def _around_content(self, examples: Examples) -> tuple[str, str]:
        try:
            written = self.answer(examples.prompt(), examples.conversation({"content": CONTENT}))
        except ValueError:
            return "", ""
        begin, found, end = examples.whole(written).partition(CONTENT)
        return (begin.strip(), end.strip()) if found else ("", "")

    def answer(self, prompt: str, conversation: str) -> str:
        """Returns the answer in an example, without its thoughts.

        Raises:
          ValueError: the conversation does not begin as the prompt does.
        """
        answer, begin = conversation.removeprefix(prompt), prompt
        if answer == conversation:
            for mark in (mark for pair in self.thoughts for mark in reversed(pair)):
                begin = begin.rstrip().removesuffix(mark)
            begin = begin.rstrip()
            if not conversation.startswith(begin):
                raise ValueError("the model's chat template begins an answer otherwise than its prompt ends")
            answer = conversation.removeprefix(begin).lstrip()
        for first, last in self.thoughts:
            answer = re.sub(rf"\A\s*({re.escape(first)})?\s*{re.escape(last)}\s*", "", answer)
        return answer

    def after(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> "Marks":
        """Returns the marks of an answer to a prompt in token ids, special tokens written by `special`.

        Where the prompt has begun thoughts, there are only these, after an empty beginning. Where it has ended them,
        there are none.
        """
        begun = text_lib.decode_with_special(tokenizer, list(prompt[-LONGEST:])).rstrip()
        thoughts = [(first, last + self.again) for first, last in self.thoughts]
        if any(begun.endswith(last) for _, last in self.thoughts):
            thoughts = []
        elif ends := [last for first, last in thoughts if begun.endswith(first)]:
            thoughts = [("", last) for last in ends]
        begin, end = (marked(tokenizer, text) for text in self.content)
        spelled = [(marked(tokenizer, first), marked(tokenizer, last)) for first, last in thoughts]
        return Marks(spelled, content=(begin, end))


def _around_thought(examples: Examples) -> tuple[str, str] | None:
    """Returns the text before a thought, and that between it and the content or a call; None where there is no thought.

    Both are without the blanks around them.
    """
    for answer, after in ({"content": CONTENT}, CONTENT), ({"tool_calls": [CALL]}, NAME):
        try:
            prompts = examples.prompt(**WITH_THOUGHTS), examples.prompt()
            written = examples.conversation(answer | {"reasoning_content": THOUGHT}, **WITH_THOUGHTS)
        except ValueError:
            continue
        before, _, rest = written.partition(THOUGHT)
        between, found, _ = rest.partition(after)
        between, begun = between.strip(), before.rstrip()
        begins = [before.removeprefix(prompt) for prompt in prompts if before.startswith(prompt)]
        begins += [prompt.removeprefix(begun) for prompt in prompts if prompt.startswith(begun)]
        begins = [begin.strip() for begin in (*begins, BETWEEN_MARKS.split(begun)[-1])]
        begin = next((begin for begin in begins if begin and not between.startswith(begin)), "")
        if found and begin and between:
            return begin, between
    return None


def _usual(examples: Examples) -> Thoughts:
    """Returns the usual marks that a template or its tokenizer has."""
    template, tokens = examples.template.source(), examples.template.tokenizer.get_vocab()
    return [pair for pair in USUAL if any(mark in template for mark in pair) or tokens.keys() >= set(pair)]
