"""The tokenizer of a GGUF file, as llama.cpp builds it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jlade.conversion.gguf_splits import ALWAYS_BEGIN, LINES, NFC, OF_CHARACTERS, SPLITS, WHOLE_WORDS, WITH_BEGIN
from jlade.conversion.json_files import Values, refuse_or_warn

KEYS = "tokenizer.ggml."
PRE, ADD_BOS = f"{KEYS}pre", f"{KEYS}add_bos_token"
BOS, EOS = f"{KEYS}bos_token_id", f"{KEYS}eos_token_id"
TEMPLATE = "tokenizer.chat_template"  # a name may follow
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
LONGEST = 1024  # characters of a token, several times those of any; SentencePiece's are divided at every one
SPACE = "▁"  # in the vocabularies of SentencePiece

# The other special tokens of Phi-3 take the spaces that follow them. No key says so.
_WITHOUT_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def read_tokenizer(values: Values, vocab_size: int) -> Tokenizer | None:
    """Returns the tokenizer in the metadata of a file, None if there is none."""
    kind = values.get(f"{KEYS}model", "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    readers = {"gpt2": _read_merges, "gemma4": _read_merges, "llama": _read_sentence_piece}
    if kind not in readers:
        raise ValueError(f"{values.file}: {KEYS}model is {kind!r}; supported are {', '.join(readers)}")
    tokens = _array(values, "tokens", str)
    if len(set(tokens)) < len(tokens) or len(tokens) > vocab_size:
        raise ValueError(
            f"{values.file}: {KEYS}tokens must be up to {vocab_size} different strings, got {len(tokens)}, "
            f"{len(set(tokens))} of them different"
        )
    if max(map(len, tokens), default=0) > LONGEST:
        raise ValueError(f"{values.file}: {KEYS}tokens must be strings of up to {LONGEST} characters")
    types = _array(values, "token_type", int, [NORMAL] * len(tokens))
    try:
        tokenizer, begins = readers[kind](values, tokens, types)
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{values.file} has no valid tokenizer: {error}") from error
    takes_spaces = values.get("general.architecture") == "phi3" and kind == "llama"
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=kind != USER_DEFINED,
                rstrip=takes_spaces and token not in _WITHOUT_SPACES,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    begin = [_name(values, BOS, tokens)] if begins else []
    end = [_name(values, EOS, tokens)] if values.boolean(f"{KEYS}add_eos_token") else []
    if begin or end:
        added = {token: tokens.index(token) for token in begin + end}
        tokenizer.post_processor = processors.Sequence(
            [
                *([] if tokenizer.post_processor is None else [tokenizer.post_processor]),
                processors.TemplateProcessing(single=[*begin, "$A", *end], special_tokens=list(added.items())),
            ]
        )
    return tokenizer


def check_split(values: Values, strict: bool) -> None:
    """Warns of a file that does not say how a text is divided into words, or refuses it if `strict`."""
    if values.get(f"{KEYS}model") == "gpt2" and not values.get(PRE):
        warning = (
            f"{values.file} lacks {PRE}, which names the expressions that divide a text into words: taking llama.cpp's "
            "default. The tokens may be others than the model was trained with, and its texts worse; a newer converter "
            "writes the key"
        )
        refuse_or_warn(strict, values.file, f"a tokenizer without {PRE}", warning)


def tokenizer_config(values: Values) -> dict[str, Any]:
    """Returns the chat templates and the names of special tokens, by the keys of tokenizer_config.json."""
    tokens = values.get(f"{KEYS}tokens")
    keys = {"bos_token": BOS, "eos_token": EOS, "unk_token": f"{KEYS}unknown_token_id"}
    keys["pad_token"] = f"{KEYS}padding_token_id"
    names = {name: _name(values, key, tokens) for name, key in keys.items() if values.get(key) is not None}
    return {"clean_up_tokenization_spaces": False, "chat_template": _chat_templates(values), **names}


def _chat_templates(values: Values) -> Any:
    """Returns the chat template, or a list of several with their names."""
    template, named = values.get(TEMPLATE), [key for key in values.values if key.startswith(f"{TEMPLATE}.")]
    if not named:
        return template
    templates = {"default": template} | {key.removeprefix(f"{TEMPLATE}."): values.get(key) for key in named}
    return [{"name": name, "template": each} for name, each in templates.items() if each is not None]


def _read_merges(values: Values, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Returns a tokenizer by BPE of a list of merges, and whether texts begin with the token bos."""
    words = _name_of_split(values)
    merges: list[Any] = [tuple(merge.split(" ")) for merge in _array(values, "merges", str)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise ValueError(f"{values.file}: {KEYS}merges must be pairs of tokens, got {' '.join(wrong)!r}")
    begins = values.boolean(ADD_BOS, words in WITH_BEGIN) or words in ALWAYS_BEGIN
    if words in OF_CHARACTERS:
        tokenizer = _of_characters(tokens, types, merges)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), "isolated")
        return tokenizer, begins
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words in WHOLE_WORDS))
    if words in NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[words]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, begins


def _name_of_split(values: Values) -> str:
    """Returns the name of the way to divide a text into words."""
    name = "gemma4" if values.get(f"{KEYS}model") == "gemma4" else values.get(PRE)
    if not name:
        return "default"  # see `check_split`
    if name in SPLITS or name in OF_CHARACTERS:
        return str(name)
    raise ValueError(
        f"{values.file}: {PRE} is {name!r}; supported are {', '.join((*SPLITS, *OF_CHARACTERS))}. It names the "
        "expressions that divide a text into words; another one would give other tokens than the model was trained with"
    )


def _read_sentence_piece(values: Values, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Returns a tokenizer by SentencePiece's BPE, and whether texts begin with the token bos."""
    scores = _array(values, "scores", float)
    has_prefix = values.boolean(f"{KEYS}add_space_prefix", True)
    tokenizer = _of_characters(tokens, types, _joins(tokens, types, scores), has_prefix)
    return tokenizer, values.boolean(ADD_BOS, True)


def _joins(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens whose union is a token, in the order in which SentencePiece joins them.

    The tokens of a large vocabulary can be divided at more than a million places. Those between two other tokens are
    found by hashes of 64 bits, sums of letters times powers of a number. A pair found by mistake, once in a hundred
    million vocabularies, would be refused by `models.BPE`.
    """
    lengths = np.array([*map(len, tokens)], np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    begins = ends - lengths
    owners = np.repeat(np.arange(len(tokens), dtype=np.int32), lengths)  # of each letter of all tokens
    places = np.arange(len(owners), dtype=np.int32) - begins[owners]  # within the token
    base = 0x9E3779B97F4A7C15  # any odd number
    powers, inverses = (np.cumprod(np.full(LONGEST, b, np.uint64)) for b in (base, pow(base, -1, 2**64)))
    letters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
    sums = np.append(np.uint64(0), np.cumsum(letters * powers[places]))
    hashes = sums[ends] - sums[begins]
    ids = np.argsort(hashes)
    hashes = hashes[ids]
    first_bits = np.zeros(2**24, bool)  # leaves few to search for
    first_bits[hashes >> 40] = True

    at = np.flatnonzero((places > 0) & (np.array(types) == NORMAL)[owners])
    left = sums[at] - sums[begins[owners[at]]]
    at, left = (each[first_bits[left >> 40]] for each in (at, left))
    right = (sums[ends[owners[at]]] - sums[at]) * inverses[places[at] - 1]
    at, left, right = (each[first_bits[right >> 40]] for each in (at, left, right))
    halves = np.searchsorted(hashes, [left, right]).clip(max=len(ids) - 1)
    found = (hashes[halves] == [left, right]).all(axis=0)
    at, (left, right) = at[found], ids[halves[:, found]]
    # Of unions with the same score the one of longer halves comes first.
    order = np.lexsort((-lengths[right], -lengths[left], -np.array(scores)[owners[at]]))
    names = np.array(tokens, object)
    return list(zip(names[left[order]].tolist(), names[right[order]].tolist(), strict=True))


def _of_characters(
    tokens: list[str], types: list[int], merges: list[tuple[str, str]], has_prefix: bool = False
) -> Tokenizer:
    """Returns a tokenizer by BPE of characters, and of bytes for those that are no tokens."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _array(values: Values, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    """Returns an array that has an element for each token, or the merges."""
    array = values.get(KEYS + name, default)
    if not isinstance(array, list) or not {*map(type, array)} <= {kind}:
        raise ValueError(f"{values.file}: {KEYS}{name} must be an array of {kind.__name__}s")
    if name != "merges" and len(array) != len(tokens := values.get(f"{KEYS}tokens", ())):
        raise ValueError(f"{values.file}: {KEYS}{name} has {len(array)} elements for {len(tokens)} tokens")
    return array


def _name(values: Values, key: str, tokens: Sequence[str]) -> str:
    """Returns the token whose id has a key."""
    token_id = values.get(key)
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ValueError(f"{values.file}: {key} must be a token id below {len(tokens)}, got {token_id!r}")
    return tokens[token_id]
