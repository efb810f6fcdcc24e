"""Text to tokens and back, with the tokenizer of the checkpoint, and where a stop string cuts a text."""

import codecs
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Returns the tokenizer in `path`/tokenizer.json, or None when there is no such file.

    Raises:
      ValueError: when the file is not a tokenizer.
    """
    file = pathlib.Path(path) / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(os.fspath(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file} is not a tokenizer: {error}") from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of `text`, with what the tokenizer itself puts before it.

    Args:
      tokenizer: a `tokenizers.Tokenizer`, or one of transformers' tokenizers.
    """
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """Returns the text that the token ids add to the text before them, special tokens left out."""
    return Detokenizer(tokenizer).feed(list(ids), last=True)


class TokenBytes:
    """The UTF-8 bytes that each token adds to a text; none for special and unknown tokens.

    A text is its tokens' bytes, one after another. So each token's share of it can be told, whatever comes later, which
    the tokenizer's own decoding of several tokens at once does not show.

    Raises:
      TypeError, ValueError: when the tokenizer is of another kind than LLaMA's: byte-level BPE, or SentencePiece.
    """

    def __init__(self, tokenizer: Any):
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(backend, Tokenizer):
            raise TypeError(
                f"tokenizer must be a tokenizers.Tokenizer or one of transformers' that is built on one, "
                f"got {type(tokenizer).__name__}"
            )
        self._tokenizer = backend
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        state = {"type": None} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._decoders = state.get("decoders", [state])
        for decoder in self._decoders:
            is_space = decoder.get("content") == " " and not decoder.get("stop")
            if decoder["type"] not in _DECODERS or (decoder["type"] in ("Replace", "Strip") and not is_space):
                raise ValueError(f"tokenizer decodes by {decoder}; accepted are {', '.join(_DECODERS)} of spaces")

    def __getitem__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(int(token_id))
        if token is None or token_id in self._special:
            return b""
        for decoder in self._decoders:
            match decoder["type"]:
                case "ByteLevel":
                    known = all(character in _BYTE_OF for character in token)
                    return bytes(_BYTE_OF[character] for character in token) if known else token.encode()
                case "ByteFallback" if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                    return bytes.fromhex(token[3:5])
                case "Replace":
                    token = token.replace(decoder["pattern"]["String"], " ")
                case "Metaspace":
                    token = token.replace(decoder["replacement"], " ")
        return token.encode()


# Strip takes a space from the beginning of a whole text, and what is generated is never that.
_DECODERS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")

# Byte-level BPE writes bytes that are not printable Latin-1 as the characters from 256 on (GPT-2's alphabet).
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}

token_bytes = functools.lru_cache(maxsize=8)(TokenBytes)  # the same tokenizer comes again with every call


class Detokenizer:
    """Turns tokens into text as they come; what it has returned is never taken back.

    It holds back a character until its last byte is there, and what a stop string may begin with until it is clear that
    it does not.

    Args:
      tokenizer: a `tokenizers.Tokenizer`, or one of transformers' that is built on one.
      stop: strings of which one, completed by the very last token, is cut off.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.stopped = False  # whether a stop string was cut off
        self._token_bytes = token_bytes(tokenizer)
        self._stop = [string.encode() for string in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    def feed(self, ids: Sequence[int], last: bool = False) -> str:
        """Takes the next tokens and returns the text that is now certain; with `last`, all that is left."""
        new = [self._token_bytes[i] for i in ids]
        text = self._held + b"".join(new)
        if last:
            cut = _find_stop(text, len(text) - len(new[-1]), self._stop) if new else None
            self.stopped = cut is not None
            end = len(text) if cut is None else cut
        else:
            end = len(text) - _length_of_beginning(text, self._stop)
        self._held = text[end:]
        return self._decoder.decode(text[:end], final=last)


def _find_stop(text: bytes, begin: int, stop: Sequence[bytes]) -> int | None:
    """Returns where the first stop string that ends after `begin` starts; of several that end there, the longest."""
    for end in range(begin + 1, len(text) + 1):
        lengths = [len(string) for string in stop if text.endswith(string, 0, end)]
        if lengths:
            return end - max(lengths)
    return None


def _length_of_beginning(text: bytes, stop: Sequence[bytes]) -> int:
    """Returns the length of the longest end of `text` that a stop string begins with, but is not all of it."""
    longest = max(map(len, stop), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(len(s) > n and s.startswith(text[-n:]) for s in stop)), 0)
