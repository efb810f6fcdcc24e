"""The marks around the thoughts with which an answer may begin."""

import re
from collections.abc import Sequence

from jlade.constraints.special import MARK, special
from jlade.generation import text as text_lib
from jlade.generation.text import Tokenizer

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
NAMES = frozenset(name for pair in MARKS for name in pair)  # which may be those of special tokens
LONGEST = 32  # tokens of a mark and the blanks after it
# In a text with special tokens, written by `special`: the thoughts with which it begins, or which its prompt has begun.
THOUGHTS = re.compile(
    r"\s*(?:"
    + "|".join(rf"(?:{MARK}?{re.escape(begin)})?.*?{re.escape(end)}" for begin, end in MARKS)
    + rf"){MARK}?\s*",
    re.DOTALL,
)

Thoughts = Sequence[tuple[str, str]]  # as `Tags.thoughts`


def of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts:
    """Returns the marks of an answer to a prompt in token ids, special tokens written by `special`.

    Where the prompt has begun thoughts, they are the end of these alone, after an empty beginning.
    """
    special_names = text_lib.special_names(tokenizer)
    begun = text_lib.decode_with_special(tokenizer, list(prompt[-LONGEST:])).rstrip()
    spelled = {name: special(name) if name in special_names else name for name in NAMES}
    ends = [("", spelled[end]) for begin, end in MARKS if begun.endswith(begin)]
    return ends or [(spelled[begin], spelled[end]) for begin, end in MARKS]


def end_of_begun(thoughts: Thoughts) -> str | None:
    """Returns the end of the thoughts that the prompt has begun, None if it has begun none."""
    return next((end for begin, end in thoughts if not begin), None)
