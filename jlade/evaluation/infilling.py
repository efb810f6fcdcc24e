"""Infilling prompts: a program with a gap, in the form that models are trained on (arXiv 2207.14255)."""

from collections.abc import Sequence
from typing import Any

from jlade.generation import text
from jlade.generation.text import Tokenizer

# The tokens before the beginning, before the rest and before the gap's text, and the one that ends it: of CodeLlama,
# of StarCoder, of Qwen2.5-Coder, and of DeepSeek-Coder.
MARKERS = (
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|EOT|>"),  # noqa: RUF001, the names of the tokens
)


def prompt(tokenizer: Tokenizer, before: str, after: str) -> list[int]:
    """Returns the token ids that ask for the text between two others.

    Raises:
      ValueError: when the tokenizer has no tokens for it.
    """
    first, second, third, _ = _markers(tokenizer)
    beginning = text.encode(tokenizer, "", parse_special=False)  # such as a token that begins every text

    def encode(part: str) -> list[int]:
        return text.encode(tokenizer, part, parse_special=False)[len(beginning) :]

    return [*beginning, first, *encode(before), second, *encode(after), third]


def filled(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Returns the text that generated tokens fill the gap with, up to the token that ends it."""
    end = _markers(tokenizer)[3]
    return text.decode(tokenizer, tokens[: tokens.index(end)] if end in tokens else tokens)


def _markers(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the markers."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    for names in MARKERS:
        ids = [backend.token_to_id(name) for name in names]
        if None not in ids:
            return ids
    known = "; ".join(" ".join(names[:3]) for names in MARKERS)
    raise ValueError(f"a question with a suffix is for models that fill gaps, whose tokenizers have {known}")
