"""The prompts of a request, in text, token ids or a padded batch, as the token ids of each."""

import itertools
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jlade.errors import ArgumentTypeError, ArgumentValueError, check_int
from jlade.generation import text
from jlade.generation.text import Tokenizer

OF_CHAT = "what tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True) returns"

HostArray = Any  # of NumPy; the device makes it a jax.Array, which the fields of `Inputs` are declared as
SMALLEST_CAPACITY = 1024  # tokens; capacities are this times a power of two, so that few programs are compiled
DEFAULT_NEW_TOKENS = 256
MAX_INT32 = 2**31 - 1

Prompt = str | Sequence[int] | np.ndarray | jax.Array
NO_PROMPT = np.zeros(1, np.int32)  # in the place of a wrong one, and where any will do
Prompts = Prompt | Sequence[Prompt] | Mapping[str, Any]  # the mapping is a `BatchEncoding` of transformers, or like one


class Room(NamedTuple):
    """The place for a prompt and its text."""

    capacity: int  # tokens
    bound: str  # what has set it, for errors


def read(
    prompt: Any,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    attention_mask: Any = None,
    parse_special: bool = True,
) -> list[np.ndarray]:
    """Returns the token ids of every prompt in the batch, without padding.

    Args:
      prompt, attention_mask, parse_special: of `jlade.generate`.
      tokenizer, vocab_size: of the model.

    Raises:
      TypeError, ValueError: name the prompt or its mask, the value and what is accepted.
    """
    prompts, errors = read_each(prompt, tokenizer, vocab_size, attention_mask, parse_special)
    if errors:
        raise next(iter(errors.values()))
    return prompts


def read_each(
    prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, attention_mask: Any, parse_special: bool
) -> tuple[list[np.ndarray], dict[int, Exception]]:
    """Returns what `read` does, with `NO_PROMPT` in place of each wrong prompt, and the errors of these by their index.

    Raises:
      TypeError, ValueError: there is text and no tokenizer, or no batch of prompts, or the mask is wrong.
    """
    if isinstance(prompt, Mapping):
        if attention_mask is not None and "attention_mask" in prompt:
            raise ArgumentTypeError("attention_mask", "cannot be given twice: prompt has one too")
        attention_mask = prompt.get("attention_mask", attention_mask)
    prompts = _split(prompt)
    ids: dict[str, np.ndarray] = {}
    errors: dict[int, Exception] = {}
    for index, (name, one) in enumerate(prompts.items()):
        try:
            ids[name] = token_ids(name, one, tokenizer, vocab_size, parse_special)
        except (TypeError, ValueError) as error:
            if tokenizer is None and isinstance(one, str):  # the error of all
                raise
            errors[index] = error
    if attention_mask is not None:
        return _unpad(ids, prompts, attention_mask), errors
    if tokenizer is not None and not any(isinstance(one, str) for one in prompts.values()):
        _check_not_padded(ids, text.pad_id(tokenizer))
    return [ids.get(name, NO_PROMPT) for name in prompts], errors


def whole(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the token ids of prompts with a mask that says that none is padding, though one may be the pad token."""
    return {"input_ids": prompts, "attention_mask": [np.ones_like(ids) for ids in prompts]}


def count(prompt: Any) -> int:
    """Returns the number of prompts in the batch.

    Raises:
      TypeError, ValueError: it is no batch of prompts.
    """
    prompt = _unwrap(prompt)
    return 1 if _is_single(prompt) else len(prompt)


def _unwrap(prompt: Any) -> Any:
    """Returns the "input_ids" of a mapping, and what is none as it is."""
    if not isinstance(prompt, Mapping):
        return prompt
    _check_no_message("prompt", prompt)
    if "input_ids" not in prompt:
        raise ArgumentTypeError("prompt", f'is a mapping without "input_ids"; it has {", ".join(map(repr, prompt))}')
    return prompt["input_ids"]


def _split(prompt: Any) -> dict[str, Any]:
    """Returns the prompts of the batch by their names in messages."""
    prompt = _unwrap(prompt)
    return {"prompt": prompt} if _is_single(prompt) else {f"prompt[{i}]": one for i, one in enumerate(prompt)}


def _is_single(prompt: Any) -> bool:
    """Returns whether this is one prompt, and not a sequence of prompts."""
    is_array = hasattr(prompt, "__array__")  # of NumPy, JAX or torch
    if isinstance(prompt, str) or (is_array and prompt.ndim < 2):
        return True
    if not is_array and not isinstance(prompt, Sequence):
        raise ArgumentTypeError(
            "prompt", f"must be a string, token ids, or a list of these, got {type(prompt).__name__}"
        )
    if len(prompt) == 0:
        raise ArgumentValueError("prompt", "is empty; at least one token is needed")
    return not is_array and isinstance(prompt[0], numbers.Number)


def token_ids(
    name: str, prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, parse_special: bool = True
) -> np.ndarray:
    """Returns the token ids of a prompt that is called `name` in errors."""
    _check_no_message(name, prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ArgumentTypeError(name, f"is a string, {prompt[:40]!r}: {text.PASS_TOKENIZER}, or token ids")
        prompt = text.encode(tokenizer, prompt, parse_special, name=name)
    elif not parse_special:
        raise TypeError(f"parse_special=False needs text, but {name} is token ids, which are taken as they are")
    accepted = "must be a string or a flat sequence of token ids"
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # sequences of different lengths
        raise ArgumentTypeError(name, f"{accepted}, got {reprlib.repr(prompt)}") from error
    if ids.ndim != 1:
        raise ArgumentTypeError(name, f"{accepted}, got {type(prompt).__name__}")
    if len(ids) == 0:
        raise ArgumentValueError(name, "is empty; at least one token is needed")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ArgumentTypeError(name, f"must hold integer token ids, got {ids.dtype} ({ids[0]!r}, ...)")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ArgumentValueError(name, f"holds token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def limits(
    prompts: list[np.ndarray], max_new_tokens: Any, min_new_tokens: Any, room: Room
) -> tuple[HostArray, HostArray]:
    """Returns the most and the fewest new tokens of B prompts, each [B], given one for all or one for each."""
    if max_new_tokens is None:
        max_new_tokens = [min(max(room.capacity - len(ids), 1), DEFAULT_NEW_TOKENS) for ids in prompts]
    return (
        _check_ints("max_new_tokens", max_new_tokens, 1, len(prompts)),
        _check_ints("min_new_tokens", min_new_tokens, 0, len(prompts)),
    )


def _check_ints(name: str, values: Any, min_value: int, batch_size: int) -> HostArray:
    """Returns integers [B], given one for all sequences or one for each."""
    if isinstance(values, numbers.Number) or not isinstance(values, Sequence | np.ndarray):
        values = [values] * batch_size
    if len(values) != batch_size:
        raise ArgumentValueError(name, f"must be one integer or {batch_size}, one for each prompt, got {values!r}")
    return np.array([check_int(name, value, min_value, MAX_INT32) for value in values], np.int32)


def check_room(length: int, limit: int, minimum: int, room: Room) -> None:
    """Raises a ValueError unless a prompt of so many tokens has room for its `minimum` to `limit` new ones."""
    if length >= room.capacity:
        raise ArgumentValueError("prompt", f"of {length} tokens leaves no room for a new one; {room.bound}")
    if (together := length + int(limit)) > room.capacity:
        raise ArgumentValueError(
            "prompt", f"of {length} tokens and max_new_tokens={limit} make {together} tokens; {room.bound}"
        )
    if minimum > limit:
        raise ArgumentValueError("min_new_tokens", f"must be at most {limit}, the limit of new tokens, got {minimum}")


def check_no_media(prompts: Sequence[np.ndarray], media_ids: Sequence[int]) -> None:
    """Raises a ValueError for a prompt with one of the tokens that stand for images, videos and sounds."""
    for ids in prompts if media_ids else ():
        media = ids[np.isin(ids, media_ids)]
        if len(media):
            raise ArgumentValueError(
                "prompt",
                f"holds token {media[0]}, in whose place the model reads an image, a video or a sound; only its "
                "text part is here, so accepted are texts without",
            )


def _check_no_message(name: str, prompt: Any) -> None:
    """Raises a TypeError for a message of a chat, or a list of them."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    if isinstance(first, Mapping) and "role" in first:
        raise ArgumentTypeError(name, f"is a message of a chat, not its text: pass {OF_CHAT}")


def round_up(number: int, smallest: int) -> int:
    """Rounds a number of tokens up to `smallest` times a power of two, so that few programs are compiled."""
    return next(size for size in (smallest << i for i in itertools.count()) if size >= number)


def capacity(prompts: list[np.ndarray], limits: HostArray, max_positions: int) -> int:
    """Returns the tokens for which each prompt and its text have place, rounded up."""
    longest = max(len(ids) + int(limit) for ids, limit in zip(prompts, limits, strict=True))
    return min(round_up(longest, SMALLEST_CAPACITY), max_positions)


def pad(prompts: list[np.ndarray], size: int) -> tuple[HostArray, HostArray]:
    """Returns the prompts [B, size], and their lengths [B]."""
    padded: HostArray = np.zeros((len(prompts), size), np.int32)
    for tokens, ids in zip(padded, prompts, strict=True):
        tokens[: len(ids)] = ids
    return padded, np.array([len(ids) for ids in prompts], np.int32)


def num_shared(tokens: np.ndarray, others: np.ndarray) -> int:
    """Returns the number of tokens with which both of two texts begin."""
    size = min(len(tokens), len(others))
    differs = np.flatnonzero(tokens[:size] != others[:size])
    return int(differs[0]) if len(differs) else size


def _unpad(ids: dict[str, np.ndarray], prompts: dict[str, Any], attention_mask: Any) -> list[np.ndarray]:
    """Returns the tokens where the mask is 1; `ids` lack the prompts that are wrong."""
    if any(isinstance(prompt, str) for prompt in prompts.values()):
        raise ArgumentTypeError("attention_mask", "goes with token ids; prompts in text are not padded")
    try:
        masks = [np.asarray(row) for row in ([attention_mask] if "prompt" in prompts else attention_mask)]
    except (TypeError, ValueError) as error:  # a number, or sequences of different lengths in a row
        raise ArgumentTypeError(
            "attention_mask", f"must hold 0 and 1 in the shape of prompt, got {attention_mask!r}"
        ) from error
    if len(masks) != len(prompts):
        raise ArgumentValueError(
            "attention_mask", f"must have a row for each of {len(prompts)} prompts, got {len(masks)}"
        )
    named = zip(prompts, masks, strict=True)
    return [_unpad_row(name, ids[name], mask) if name in ids else NO_PROMPT for name, mask in named]


def _unpad_row(name: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    mask_name = name.replace("prompt", "attention_mask")
    if mask.shape != ids.shape:
        shape = f"must have the shape of {name}, {list(ids.shape)}, got {list(mask.shape)}"
        raise ArgumentValueError(mask_name, shape)
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise ArgumentValueError(mask_name, f"must hold 0 and 1, got {other[0]}")
    places = np.flatnonzero(mask)
    if len(places) == 0:
        raise ArgumentValueError(mask_name, "has no 1; at least one token is needed")
    holes = np.flatnonzero(np.diff(places) > 1)
    if len(holes):
        hole = places[holes[0]] + 1
        raise ArgumentValueError(mask_name, f"must be 0 at the ends of {name} alone, got 0 at {hole}, between tokens")
    return ids[places]


def _check_not_padded(ids: dict[str, np.ndarray], pad_id: int | None) -> None:
    """Raises a ValueError for a row of a rectangular batch that begins or ends with padding.

    One pad is padding where another row has none: the tokenizer's pad token may also end texts.
    """
    if pad_id is None or len({len(row) for row in ids.values()}) > 1:
        return
    for ends in ([row[::-1] for row in ids.values()], list(ids.values())):
        runs = [int(np.argmin(np.append(row == pad_id, False))) for row in ends]
        for name, run in zip(ids, runs, strict=True):
            if run > 1 or run > min(runs):
                raise ArgumentValueError(
                    name,
                    f"seems to be padded, with {run} times token {pad_id}: pass attention_mask= with the batch, all 1 "
                    "if these tokens are part of the text, or prompts of different lengths in a list",
                )
