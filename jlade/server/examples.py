"""Earlier answers as a chat template writes them: examples, off which the forms of new answers are read."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from jlade.constraints.special import special
from jlade.generation import text as text_lib
from jlade.generation.chat_template import ChatTemplate
from jlade.generation.text import Tokenizer
from jlade.server.fields import Body

QUESTION: Body = {"role": "user", "content": "-"}


@dataclasses.dataclass(frozen=True)
class Examples:
    """Writes examples: a question, and an answer to it. Special tokens have their names.

    Attributes:
      template: of the model.
      ends: texts that end an answer.
    """

    template: ChatTemplate
    ends: Sequence[str]

    def prompt(self, tools: Sequence[Body] | None = None, **variables: Any) -> str:
        """Returns the question, up to the beginning of the answer."""
        return self.template.render([QUESTION], tools=tools, variables=variables)

    def conversation(self, answer: Body, tools: Sequence[Body] | None = None, **variables: Any) -> str:
        """Returns the question and an answer, given as a message without its role."""
        message = {"role": "assistant", "content": "", **answer}
        return self.template.render([QUESTION, message], False, tools=tools, variables=variables)

    def whole(self, text: str) -> str:
        """Returns the text of an answer up to its end."""
        cuts = [cut for end in self.ends if (cut := text.find(end)) >= 0]
        return text[: min(cuts, default=None)].rstrip()


def marked(tokenizer: Tokenizer, text: str) -> str:
    """Returns a text with the names of special tokens, these written by `special`."""
    return _specials(tokenizer).sub(lambda name: special(name[0]), text)


@functools.lru_cache(maxsize=8)
def _specials(tokenizer: Tokenizer) -> re.Pattern[str]:
    names = sorted(text_lib.special_names(tokenizer), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")
