"""Text to tokens and tokens to text, byte by byte, so that streamed text is never taken back."""

import codecs
import contextlib
import copy
import functools
import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tokenizers

from jlade.constraints import special
from jlade.errors import ArgumentValueError, errors_of

# In errors about text without a tokenizer:
PASS_TOKENIZER = "pass tokenizer=, as jlade.load returns it (only parameters straight from jlade.load know theirs)"


class Tokenizer(Protocol):
    """A `tokenizers.Tokenizer`, or a tokenizer of transformers that is built on one."""

    def __hash__(self) -> int:
        """A tokenizer is hashable by identity."""

    def encode(self, text: str, /) -> Any:
        """Returns the token ids, or an object with the attribute `ids`."""

    def decode(self, ids: list[int], /) -> Any:
        """Returns the text of the token ids, a string."""


def encode(
    tokenizer: Tokenizer, text: str, parse_special: bool = True, add_special_tokens: bool = True, name: str = "prompt"
) -> list[int]:
    """Returns the token ids of `text`, whole and without padding. Other threads go on meanwhile.

    Args:
      tokenizer: of the model.
      text: of the prompt.
      parse_special: whether the names of special tokens in `text` are these tokens, rather than plain characters.
      add_special_tokens: whether those that the tokenizer adds to texts are there.
      name: of the text in errors.

    Raises:
      ValueError: when UTF-8 cannot write the text, for example an argument of a command in another encoding.

    Warns:
      UserWarning: the token that begins texts is there twice.
    """
    check_utf8(name, "must be", text)
    with errors_of("tokenizer cannot encode the text"):
        own = _own(tokenizer, parse_special)
        if isinstance(own, tokenizers.Tokenizer):
            # For a single text the library holds Python's lock, seconds for a megabyte; for a batch it does not.
            ids = own.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = list(own.encode(text, add_special_tokens=add_special_tokens))
    twice = [name for name in special_names(tokenizer) if text.startswith(name)] if ids[:1] == ids[1:2] else []
    if any(_backend(tokenizer).token_to_id(name) == ids[0] for name in twice):
        warnings.warn(
            f"the prompt begins with {twice[0]!r} twice: the text has it, as from a chat template, and the tokenizer "
            "adds it. Leave it out of the text, or pass the token ids of the template",
            stacklevel=2,
        )
    return ids


def check_utf8(name: str, must: str, text: str) -> None:
    """Raises a ValueError that says what the argument of this name `must` be or have if UTF-8 cannot write the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentValueError(name, f"{must} text that UTF-8 can write, got {text[:40]!r}") from error


def _own(tokenizer: Any, parse_special: bool) -> Any:
    """Returns a tokenizer for one call, which other threads cannot make cut or pad its text.

    It shares the model and its vocabulary, so that it takes a fraction of a millisecond.
    """
    backend = _backend(tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
        return tokenizer
    own = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (value := getattr(backend, part)) is not None:
            setattr(own, part, value)
    added = backend.get_added_tokens_decoder()
    own.add_tokens([added[i] for i in sorted(added)])
    if backend is tokenizer:
        own.encode_special_tokens = backend.encode_special_tokens or not parse_special
        return own
    of_transformers = copy.copy(tokenizer)
    of_transformers._tokenizer = own
    of_transformers.split_special_tokens |= not parse_special
    return of_transformers


def _backend(tokenizer: Any) -> Any:
    """Returns the `tokenizers.Tokenizer` on which a tokenizer of transformers is built, or the tokenizer itself."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def pad_id(tokenizer: Tokenizer) -> int | None:
    """Returns the token with which batches are padded; None if it is not known."""
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        return getattr(tokenizer, "pad_token_id", None)
    if tokenizer.padding is not None:
        return tokenizer.padding["pad_id"]
    usual = (tokenizer.token_to_id(name) for name in ("<pad>", "[PAD]", "<|pad|>"))
    return next((i for i in usual if i is not None), None)


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Returns the text that the token ids add to the preceding text, without special tokens."""
    return Detokenizer(tokenizer).feed(list(ids), last=True)


def decode_with_special(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of the token ids as the tokenizer decodes it, with the names of special tokens."""
    text: str = _backend(tokenizer).decode_batch([ids], skip_special_tokens=False)[0]
    return text


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Returns a token's own text, with incomplete characters as \xc3; of a special token its name."""
    own = token_bytes(tokenizer)[token_id].decode(errors="backslashreplace")
    return own or _backend(tokenizer).id_to_token(token_id) or f"[{token_id}]"


def special_names(tokenizer: Tokenizer) -> list[str]:
    """Returns the names of the special tokens."""
    return [token.content for token in _backend(tokenizer).get_added_tokens_decoder().values() if token.special]


class TokenBytes:
    """The UTF-8 bytes that each token adds to a text; none for special and unknown tokens. See `token_bytes`.

    A text is the concatenation of its tokens' bytes. Each token's share is therefore known before the next token comes;
    the tokenizer's own decoding of several tokens does not give it.

    Raises:
      TypeError, ValueError: when the tokenizer is neither byte-level BPE nor SentencePiece, LLaMA's two kinds.
    """

    def __init__(self, tokenizer: Tokenizer):
        backend = _backend(tokenizer)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TypeError(
                f"tokenizer must be a tokenizers.Tokenizer or one of transformers' that is built on one, "
                f"got {type(tokenizer).__name__}"
            )
        self._tokenizer = backend
        added = backend.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        state = {"type": None} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._decoders = state.get("decoders", [state])
        for decoder in self._decoders:
            is_space = decoder.get("content") == " " and not decoder.get("stop")
            is_space &= decoder["type"] != "Replace" or "String" in decoder["pattern"]
            if decoder["type"] not in _DECODERS or (decoder["type"] in ("Replace", "Strip") and not is_space):
                raise ValueError(f"tokenizer decodes by {decoder}; accepted are {', '.join(_DECODERS)} of spaces")

    def __getitem__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(int(token_id))
        if token is None or token_id in self._special:
            return b""
        for decoder in self._decoders:
            match decoder["type"]:
                case "ByteLevel":
                    known = all(character in BYTE_OF for character in token)
                    return bytes(BYTE_OF[character] for character in token) if known else token.encode()
                case "ByteFallback" if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                    return bytes.fromhex(token[3:5])
                case "Replace":
                    token = token.replace(decoder["pattern"]["String"], " ")
                case "Metaspace":
                    token = token.replace(decoder["replacement"], " ")
        return token.encode()

    def in_grammar(self, token_id: int) -> bytes:
        """Returns the bytes of a token in the texts of grammars, which have special tokens; see `special`."""
        if token_id in self._special:
            return special.encode(special.special(self._special[token_id]))
        spelled = self[token_id]
        return b"" if special.BYTE in spelled else spelled

    def first_tokens(self, texts: Sequence[bytes]) -> list[int]:
        """Returns the token with which the tokenizer begins each of some texts of a grammar; -1 for none."""
        anchored = [ANCHOR + text.decode(errors="ignore") for text in texts]
        return [
            self._first(encoding.ids, text)
            for encoding, text in zip(
                self._tokenizer.encode_batch(anchored, add_special_tokens=False), texts, strict=True
            )
        ]

    def _first(self, ids: Sequence[int], text: bytes) -> int:
        """Returns the first of the tokens after `ANCHOR` if it begins the text, else -1."""
        before = b""
        for token in ids:
            spelled = self.in_grammar(token)
            if before.endswith(ANCHOR.encode()):
                return token if spelled and text.startswith(spelled) else -1
            before += spelled
        return -1


# No token of a text that follows it has a part of it, and no tokenizer adds a space after it.
ANCHOR = "\n"

# Strip removes a space at the beginning of a whole text, where generated text never is.
_DECODERS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")

# Byte-level BPE writes bytes that are not printable in Latin-1 as the characters from 256 on (GPT-2's alphabet).
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
LETTERS_OF_BYTES = list(BYTE_OF)
BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]  # of SentencePiece


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Returns the `TokenBytes` of a tokenizer, the same ones until a token is added."""
    backend = _backend(tokenizer)
    return _token_bytes(tokenizer, backend.get_vocab_size() if isinstance(backend, tokenizers.Tokenizer) else 0)


def tokenizer_of(params: Any) -> Tokenizer | None:
    """Returns the tokenizer that parameters know, those that `jlade.load` returned; None without one."""
    tokenizer: Any = getattr(params, "tokenizer", None)
    with contextlib.suppress(TypeError, ValueError):  # None, or one that is not of the kinds of `TokenBytes`
        token_bytes(tokenizer)
        return tokenizer
    return None


@functools.lru_cache(maxsize=8)
def _token_bytes(tokenizer: Tokenizer, num_tokens: int) -> TokenBytes:
    return TokenBytes(tokenizer)


class Detokenizer:
    """Turns tokens into text as they arrive; returned text is never taken back.

    It holds back an incomplete character, and the beginning of a possible stop string until another token decides.

    Args:
      tokenizer: the tokenizer of the tokens.
      stop: stop strings; one that the last token completes is cut off.
      with_special: whether the text has special tokens, as the texts of grammars do.
      keeps_stop: whether the text ends after the stop string, not before it.

    Attributes:
      stop_string: the stop string that was cut off, None for none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        with_special: bool = False,
        keeps_stop: bool = False,
    ):
        self.stop_string: str | None = None
        self._keeps_stop = keeps_stop
        spelled = token_bytes(tokenizer)
        self._bytes_of = spelled.in_grammar if with_special else spelled.__getitem__
        self._stop = [string.encode() for string in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")(special.DECODE_ERRORS if with_special else "replace")
        self._held = b""

    def feed(self, ids: Sequence[int], last: bool = False, cuts: bool = True) -> str:
        """Takes the next tokens and returns the text that is now certain; with `last`, all of the remaining text.

        `cuts` is whether a stop string that the last token completes ends the text.
        """
        new = [self._bytes_of(i) for i in ids]
        text = self._held + b"".join(new)
        if last:
            found = find_stop(text, len(text) - len(new[-1]), self._stop) if new and cuts else None
            self.stop_string = None if found is None else text[slice(*found)].decode()
            end = len(text) if found is None else found[self._keeps_stop]
        else:
            end = len(text) - _length_of_beginning(text, self._stop)
        self._held = text[end:]
        return self._decoder.decode(text[:end], final=last)


def find_stop(text: bytes, begin: int, stop: Sequence[bytes]) -> tuple[int, int] | None:
    """Returns the place of the first stop string that ends after `begin`; of several that end there, of the longest."""
    for end in range(begin + 1, len(text) + 1):
        lengths = [len(string) for string in stop if text.endswith(string, 0, end)]
        if lengths:
            return end - max(lengths), end
    return None


def _length_of_beginning(text: bytes, stop: Sequence[bytes]) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = max(map(len, stop), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(len(s) > n and s.startswith(text[-n:]) for s in stop)), 0)
