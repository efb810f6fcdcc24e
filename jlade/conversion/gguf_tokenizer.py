"""The tokenizer of a GGUF file, as llama.cpp builds it."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jlade.conversion.json_files import Values

KEYS = "tokenizer.ggml."
BOS, EOS = f"{KEYS}bos_token_id", f"{KEYS}eos_token_id"
TEMPLATE = "tokenizer.chat_template"  # a name may follow
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
LONGEST = 1024  # characters of a token, several times those of any; SentencePiece's are divided at every one
SPACE = "▁"  # in the vocabularies of SentencePiece

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_BEFORE_DIGITS + r"\p{N}{1,3}" + _AFTER_DIGITS,)
_QWEN2 = (_BEFORE_DIGITS + r"\p{N}" + _AFTER_DIGITS,)
_LARGE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (rf"{_LARGE}*{_SMALL}+|{_LARGE}+{_SMALL}*|\p{{N}}|{_OTHERS}",)
_GPT4O = (rf"{_LARGE}*{_SMALL}+{_ENDING}|{_LARGE}+{_SMALL}*{_ENDING}|\p{{N}}{{1,3}}|{_OTHERS}",)
# tokenizer.ggml.pre -> expressions for the words of a text. Each divides the pieces that the one before leaves.
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "dbrx": _LLAMA3,  # Phi-4
    "gpt-4o": _GPT4O,  # Phi-4-mini
}
# A word that is in the vocabulary is one token there, whatever the merges; and texts begin with the token bos.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
# The other special tokens of Phi-3 take the spaces that follow them. No key says so.
_WITHOUT_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def read_tokenizer(values: Values, vocab_size: int) -> Tokenizer | None:
    """Returns the tokenizer in the metadata of a file, None if there is none."""
    kind = values.get(f"{KEYS}model", "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    readers = {"gpt2": _read_byte_level, "llama": _read_sentence_piece}
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
        tokenizer, adds_bos = readers[kind](values, tokens, types)
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
    begin = [_name(values, BOS, tokens)] if values.boolean(f"{KEYS}add_bos_token", adds_bos) else []
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


def _read_byte_level(values: Values, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Returns a tokenizer by byte-level BPE, and whether texts begin with the token bos by default."""
    words = values.get(f"{KEYS}pre")
    if words not in SPLITS:
        raise ValueError(
            f"{values.file}: {KEYS}pre is {words!r}; supported are {', '.join(SPLITS)}. It names the expressions that "
            "divide a text into words; another one would give other tokens than the model was trained with"
        )
    whole = words in _WHOLE_WORDS
    merges: list[Any] = [tuple(merge.split(" ")) for merge in _array(values, "merges", str)]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"{values.file}: {KEYS}merges must be pairs of tokens, got {' '.join(wrong[0])!r}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole))
    if SPLITS[words] is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()  # of Qwen's own tokenizer; llama.cpp takes the text as it is
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[words]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, whole


def _read_sentence_piece(values: Values, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Returns a tokenizer by SentencePiece's BPE, and whether texts begin with the token bos by default."""
    scores = _array(values, "scores", float)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # SentencePiece joins the neighbours whose union has the highest score.
    pieces = [(score, token) for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL]
    halves = [
        (score, i, len(token) - i, token)
        for score, token in pieces
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    merges = [(token[:i], token[i:]) for _, i, _, token in sorted(halves, reverse=True)]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = values.boolean(f"{KEYS}add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


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
