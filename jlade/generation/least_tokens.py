"""The fewest tokens that a text can have, known from its length alone, before it is tokenized."""

import math
from typing import Any

from tokenizers import models

from jlade.conversion.tokenizer_files import steps_of
from jlade.generation.text import BYTE_NAMES, LETTERS_OF_BYTES, Tokenizer

COMPOSED = 4  # characters that NFC and NFKC make one at most: no character decomposes into more, and none into none

# Normalizers and pre-tokenizers that leave no character out, and those that leave out spaces alone.
WHOLE = ("ByteLevel", "Digits", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend", "UnicodeScripts")
WITHOUT_SPACES = ("BertPreTokenizer", "Strip", "Whitespace", "WhitespaceSplit")


class LeastTokens:
    """Bounds the numbers of tokens of texts from below: no token stands for more characters than the longest one has.

    Where a tokenizer leaves out characters, or makes one unknown token of many, the bound is 0. Where it leaves out
    spaces, or a token takes those beside it, the bound counts the other characters.
    """

    def __init__(self, tokenizer: Tokenizer):
        backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        steps = [*steps_of(backend.normalizer), *steps_of(backend.pre_tokenizer)]
        added = backend.get_added_tokens_decoder().values()
        self._counts_spaces = not any(token.lstrip or token.rstrip for token in added) and not any(
            step["type"] in WITHOUT_SPACES for step in steps
        )
        normalize = str if backend.normalizer is None else backend.normalizer.normalize_str
        names = [*backend.get_vocab(), *(normalize(token.content) for token in added)]
        self._longest = max(map(len, names)) * math.prod(map(_shrinking, steps))
        if not _knows_all(backend, steps):
            self._longest = math.inf

    def __call__(self, text: str) -> int:
        """Returns a number of tokens that the text has at least."""
        length = len(text) if self._counts_spaces else sum(map(len, text.split()))
        return math.ceil(length / self._longest)


def _shrinking(step: dict[str, Any]) -> float:
    """Returns how many characters a normalizer or pre-tokenizer makes one at most."""
    match step:
        case {"type": "NFC" | "NFKC"}:
            return COMPOSED
        case {"type": "Replace", "pattern": {"String": replaced}, "content": content} if content.strip():
            return max(1, len(replaced) / len(content))
        case {"type": "Split" | "Punctuation", "behavior": behavior} if behavior != "Removed":
            return 1
    return 1 if step["type"] in (*WHOLE, *WITHOUT_SPACES) else math.inf


def _knows_all(backend: Any, steps: list[dict[str, Any]]) -> bool:
    """Returns whether each character has a share in a token: it is known, one of bytes, or an unknown token alone."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        names = LETTERS_OF_BYTES
    elif model.byte_fallback:
        names = BYTE_NAMES
    else:
        names = [""]  # which no vocabulary has
    is_known = all(backend.token_to_id(name) is not None for name in names)
    return is_known or (model.unk_token is not None and not model.fuse_unk)
