"""The files of a tokenizer: tokenizer.json, and those beside it that add tokens, read as transformers 5 reads them."""

import json
import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from jlade.conversion import tokenizer_classes
from jlade.conversion.gguf_splits import SPLITS
from jlade.conversion.json_files import Values, check_size, read_json, shown
from jlade.errors import errors_of

MAX_BYTES = 2**27  # of tokenizer.json, several times those of any
MAX_GROWTH = 1024  # of a text by a normalizer; those of models replace a character by one or two
UNREAD = ("tokenizer.model", "tekken.json", "vocab.json")  # tokenizers that transformers makes a tokenizer.json of
CONFIG, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
CLEANING = (  # keys that make transformers remove spaces before punctuation
    "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)
# Families whose early files may divide words otherwise than Mistral did, if they have so many tokens.
MISTRAL, LARGE_VOCABULARY = ("mistral", "mistral3", "voxtral", "ministral", "pixtral"), 100_000
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(path: str | os.PathLike[str], strict: bool = False) -> Tokenizer | None:
    """Returns the tokenizer in `path`/tokenizer.json, or None when there is no such file.

    It also has the added tokens of tokenizer_config.json, or else of added_tokens.json and special_tokens_map.json.

    Raises:
      ValueError: when a file is broken or another one than tokenizer.json is to be read; names the token that has
        another id in tokenizer.json than in another file; if `strict`, when there is a tokenizer in other files alone,
        or a setting of decoding is ignored.

    Warns:
      UserWarning: when there is a tokenizer in other files alone, or a setting of decoding is ignored.
    """
    directory = pathlib.Path(path)
    file = directory / "tokenizer.json"
    if not file.exists():
        _say_unread(directory, strict)
        return None
    check_size(file, MAX_BYTES)
    with errors_of(f"{file} is not a tokenizer"):
        tokenizer = Tokenizer.from_file(os.fspath(file))
        _check_growth(tokenizer.normalizer)
        tokenizer.no_truncation()  # a prompt is never cut, nor padded to a length that the file gives
        if tokenizer.padding is not None:
            tokenizer.enable_padding(**(tokenizer.padding | {"length": None, "pad_to_multiple_of": None}))
    config, added, special = (_read(directory / name) for name in (CONFIG, ADDED, SPECIAL))
    model = _read(directory / "config.json")
    name = tokenizer_classes.class_of(tokenizer, config, model)
    if (
        name == "LlamaTokenizer"
    ):  # files made for older classes of this name divide a text after a special token otherwise
        tokenizer_classes.build(tokenizer, name, config)
    _check_settings(directory / CONFIG, config, tokenizer, name, strict)
    tokenizer.encode_special_tokens = Values(directory / CONFIG, config).boolean("split_special_tokens")
    with errors_of(f"{directory}: the tokens that files add to tokenizer.json cannot be read"):
        stated = add_tokens(tokenizer, config, added, special)
    for token_id, content in stated.items():
        if (found := tokenizer.token_to_id(content)) != token_id:
            raise ValueError(
                f"{directory / (CONFIG if 'added_tokens_decoder' in config else ADDED)}: {content!r} must have the id "
                f"{found}, that of tokenizer.json or the next free one, got {token_id}"
            )
    if model.get("model_type") in MISTRAL and tokenizer.get_vocab_size() > LARGE_VOCABULARY:
        _fix_mistral(directory / CONFIG, config, tokenizer, str(model.get("transformers_version") or ""), strict)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: str | os.PathLike[str], strict: bool) -> None:
    """Warns of added tokens that the model does not have.

    Raises:
      ValueError: if there are any and `strict`.
    """
    added = tokenizer.get_added_tokens_decoder()
    if outside := ", ".join(f"{added[i].content!r} ({i})" for i in sorted(added) if i >= vocab_size):
        message = f"{os.fspath(path)}: the tokenizer has tokens beyond the model's vocabulary of {vocab_size}"
        if strict:
            raise ValueError(f"{message}; strict=True refuses them: {outside}")
        warnings.warn(f"{message}; prompts with them are refused, as strict=True does: {outside}", stacklevel=2)


def steps_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yields the settings of a normalizer or pre-tokenizer, those of a sequence one by one."""
    left = [] if part is None else [json.loads(part.__getstate__())]
    while left:
        settings = left.pop()
        if settings["type"] == "Sequence":
            left += settings.get("normalizers") or settings.get("pretokenizers") or []
        else:
            yield settings


def _say_unread(directory: pathlib.Path, strict: bool) -> None:
    """Warns of a tokenizer in a format that is not read, or refuses it if `strict`."""
    unread = [name for name in UNREAD if (directory / name).exists()]
    if not unread:
        return
    message = (
        f"a tokenizer in {unread[0]} without tokenizer.json, which alone is read. Where transformers is installed, for "
        'tokenizer.model also sentencepiece, this writes it: python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{directory}').save_pretrained('{directory}')\""
    )
    if strict:
        raise ValueError(f"{directory}: strict=True refuses {message}")
    warnings.warn(f"{directory}: the tokenizer is None, as there is {message}", stacklevel=3)


def _check_settings(
    file: pathlib.Path, config: Mapping[str, Any], tokenizer: Tokenizer, name: str | None, strict: bool
) -> None:
    """Refuses other versions of tokenizer.json, and warns of settings by which transformers has other tokens or texts.

    `name` is that of the class that transformers makes of the files, if it is known.
    """
    versions = config.get("fast_tokenizer_files")
    if versions not in (None, [], ["tokenizer.json"]):
        raise ValueError(f"{file}: fast_tokenizer_files is {shown(versions)}; supported is ['tokenizer.json']")
    ignored = [key for key in CLEANING if config.get(key)]
    # For BPE transformers ignores the first unless the second is there.
    if CLEANING[0] not in ignored or (isinstance(tokenizer.model, models.BPE) and CLEANING[1] not in ignored):
        ignored = []
    if name is not None and (parts := tokenizer_classes.differences(tokenizer, name, config)):
        ignored.append(f"the class {name}, whose {', '.join(parts)} in transformers 5 is not that of tokenizer.json")
    if not ignored:
        return
    if strict:
        raise ValueError(f"{file}: strict=True refuses {', '.join(ignored)}")
    warnings.warn(f"{file}: ignored, which strict=True refuses: {', '.join(ignored)}", stacklevel=3)


def _fix_mistral(
    file: pathlib.Path, config: Mapping[str, Any], tokenizer: Tokenizer, version: str, strict: bool
) -> None:
    """Divides words by Mistral's expression if the files say so, or warns where transformers does and it would differ.

    `version` is that of transformers that wrote config.json: files of the fifth are right.
    """
    major = re.match(r"\d+", version)
    is_old = major is None or int(major[0]) < 5 or re.fullmatch(r"5(\.0)*\.?(a|b|rc|dev)\d*", version) is not None
    fix, parts = config.get("fix_mistral_regex"), tokenizer.pre_tokenizer
    if not is_old or parts is None or (fix is not None and fix is not True):
        return
    split, state = _state(pre_tokenizers.Split(Regex(SPLITS["tekken"][0]), "isolated")), _state(parts)
    others = state["pretokenizers"][1:] if state["type"] == "Sequence" else [state]
    if state["type"] == "Metaspace":
        others = [_state(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))]
    fixed = {"type": "Sequence", "pretokenizers": [split, *others]}
    if fix:
        changed: Any = pre_tokenizers.Sequence([])
        changed.__setstate__(json.dumps(fixed).encode())
        tokenizer.pre_tokenizer = changed
    elif state != fixed:
        said = "words are divided otherwise than Mistral's, which fix_mistral_regex: true in this file would change"
        if strict:
            raise ValueError(f"{file}: strict=True refuses a tokenizer without fix_mistral_regex: {said}")
        warnings.warn(f"{file}: {said}, as transformers would; strict=True refuses it", stacklevel=3)


def _state(part: Any) -> dict[str, Any]:
    """Returns a part of a tokenizer as JSON has it."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _read(file: pathlib.Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _check_growth(normalizer: Any) -> None:
    """Raises if replacements, one after the other, can make a text so much longer that it fills the memory."""
    growth = 1
    for step in steps_of(normalizer):
        growth *= max(1, len(step.get("content", "")))  # of Replace
        if growth > MAX_GROWTH:
            raise ValueError(f"its normalizer makes texts more than {MAX_GROWTH} times longer")


def add_tokens(
    tokenizer: Tokenizer, config: Mapping[str, Any], added: Mapping[str, int], special: Mapping[str, Any]
) -> dict[int, str]:
    """Adds tokens in the order of transformers 5, which decides their ids, and returns the ids that the files state.

    Args:
      tokenizer: that of tokenizer.json.
      config, added, special: the content of tokenizer_config.json, added_tokens.json and special_tokens_map.json. The
        last two are older, and not read if the first has "added_tokens_decoder".
    """
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if "added_tokens_decoder" in config:
        stated = {int(token_id): _token(token) for token_id, token in config["added_tokens_decoder"].items()}
    else:
        config = {**config, **special}
        listed = [*(config[key] for key in NAMED if config.get(key)), *(extra if isinstance(extra, list) else ())]
        names = {_token(value).content for value in listed}
        stated = {
            token_id: AddedToken(content, special=content in names, normalized=content not in names)
            for content, token_id in added.items()
        }
        stated |= tokenizer.get_added_tokens_decoder()
        extra = extra or special.get("additional_special_tokens") or []
    named = _named(config, extra if isinstance(extra, dict) else {})
    first = [stated[token_id] for token_id in sorted(stated)]
    for token in first:
        token.special |= token.content in {other.content for other in named}
    known = {token.content for token in [*first, *tokenizer.get_added_tokens_decoder().values()]}
    others = [*named, *(map(_token, extra) if isinstance(extra, list) else ())]
    tokenizer.add_tokens([*first, *(token for token in others if token.content not in known)])
    return {token_id: token.content for token_id, token in stated.items()}


def _named(config: Mapping[str, Any], extra: Mapping[str, Any]) -> list[AddedToken]:
    """Returns the special tokens that have a name like "bos_token", and `extra` ones."""
    own = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)}
    values = [own.pop(key) for key in NAMED if key in own]
    values += sorted([*own.values(), *extra.values()], key=lambda value: isinstance(value, str))  # objects are first
    tokens = [_token(value) for value in values]
    for token in tokens:
        token.special = True
    return tokens


def _token(value: Any) -> AddedToken:
    """Returns the token that a file writes as its content or as an object."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{key: value[key] for key in value if key != "__type"})
