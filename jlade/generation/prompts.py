"""The prompts of a request, in text, token ids or a padded batch, as the token ids of each."""

import itertools
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jlade.decoding.stopping import Stopping
from jlade.generation import text
from jlade.generation.text import Tokenizer

OF_CHAT = "what tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True) returns"

HostArray = Any  # of NumPy; the device makes it a jax.Array, which the fields of `Inputs` are declared as
SMALLEST_CAPACITY = 1024  # tokens; capacities are this times a power of two, so that few programs are compiled

Prompt = str | Sequence[int] | np.ndarray | jax.Array
NO_PROMPT = np.zeros(1, np.int32)  # in the place of a wrong one
Prompts = Prompt | Sequence[Prompt] | Mapping[str, Any]  # the mapping is a `BatchEncoding` of transformers, or like one


def read(
    prompt: Any,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    attention_mask: Any = None,
    parse_special: Any = True,
    errors: dict[int, Exception] | None = None,
) -> list[np.ndarray]:
    """Returns the token ids of every prompt in the batch, without padding.

    Args:
      prompt, attention_mask, parse_special: of `jlade.generate`.
      tokenizer, vocab_size: of the model.
      errors: takes the error of each prompt that is wrong, by its index; it has `NO_PROMPT` in its place. The default
        is to raise the first one.

    Raises:
      TypeError, ValueError: name the prompt or its mask, the value and what is accepted.
    """
    if isinstance(prompt, Mapping):
        _check_no_message("prompt", prompt)
        if "input_ids" not in prompt:
            raise TypeError(f'prompt is a mapping without "input_ids"; it has {", ".join(map(repr, prompt))}')
        if attention_mask is not None and "attention_mask" in prompt:
            raise TypeError("attention_mask cannot be given twice: prompt has one too")
        prompt, attention_mask = prompt["input_ids"], prompt.get("attention_mask", attention_mask)
    prompts = _split(prompt)
    ids: dict[str, np.ndarray] = {}
    for index, (name, one) in enumerate(prompts.items()):
        try:
            ids[name] = token_ids(name, one, tokenizer, vocab_size, parse_special)
        except (TypeError, ValueError) as error:
            if errors is None or (tokenizer is None and isinstance(one, str)):  # the error of all
                raise
            errors[index] = error
    if attention_mask is not None:
        return _unpad(ids, prompts, attention_mask)
    if tokenizer is not None and not any(isinstance(one, str) for one in prompts.values()):
        _check_not_padded(ids, text.pad_id(tokenizer))
    return [ids.get(name, NO_PROMPT) for name in prompts]


def whole(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the token ids of prompts with a mask that says that none is padding, though one may be the pad token."""
    return {"input_ids": prompts, "attention_mask": [np.ones_like(ids) for ids in prompts]}


def made_up(number: int, length: int = 1) -> dict[str, Any]:
    """Returns prompts for programs and arguments that are the same whatever the tokens are."""
    return whole([[0] * length] * number)


def _split(prompt: Any) -> dict[str, Any]:
    """Returns the prompts of the batch by their names in messages."""
    is_array = hasattr(prompt, "__array__")  # of NumPy, JAX or torch
    if isinstance(prompt, str) or (is_array and prompt.ndim < 2):
        return {"prompt": prompt}
    if not is_array and not isinstance(prompt, Sequence):
        raise TypeError(f"prompt must be a string, token ids, or a list of these, got {type(prompt).__name__}")
    if len(prompt) == 0:
        raise ValueError("prompt is empty; at least one token is needed")
    if not is_array and isinstance(prompt[0], numbers.Number):
        return {"prompt": prompt}
    return {f"prompt[{i}]": one for i, one in enumerate(prompt)}


def token_ids(
    name: str, prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, parse_special: bool = True
) -> np.ndarray:
    """Returns the token ids of a prompt that is called `name` in errors."""
    _check_no_message(name, prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"{name} is a string, {prompt[:40]!r}: {text.PASS_TOKENIZER}, or token ids")
        text.check_utf8(f"{name} must be", prompt)
        prompt = text.encode(tokenizer, prompt, parse_special)
    elif not parse_special:
        raise TypeError(f"parse_special=False needs text, but {name} is token ids, which are taken as they are")
    accepted = f"{name} must be a string or a flat sequence of token ids"
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # sequences of different lengths
        raise TypeError(f"{accepted}, got {reprlib.repr(prompt)}") from error
    if ids.ndim != 1:
        raise TypeError(f"{accepted}, got {type(prompt).__name__}")
    if len(ids) == 0:
        raise ValueError(f"{name} is empty; at least one token is needed")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"{name} must hold integer token ids, got {ids.dtype} ({ids[0]!r}, ...)")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{name} holds token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def check_room(
    prompts: list[np.ndarray],
    stopping: Stopping,
    max_positions: int,
    capacity: int | None,
    errors: dict[int, Exception] | None,
) -> None:
    """Checks that prompts and their new tokens fit.

    Args:
      prompts: token ids of each. One that has no room is treated as `read` treats a wrong one.
      errors: see `read`.
      stopping: with the fewest and the most new tokens of each.
      max_positions: tokens that the model reads.
      capacity: tokens of a row of an engine, for a prompt and its text; None for a batch, which the model alone limits.

    Raises:
      ValueError: names the number of tokens and the bound.
    """
    room, bound = max_positions, f"the model reads at most {max_positions} positions"
    if capacity is not None:
        room, bound = capacity, f"the engine was made with capacity={capacity}"
    least_of_all = 0 if stopping.min_new_tokens is None else stopping.min_new_tokens
    fewest, most = np.broadcast_arrays(least_of_all, stopping.max_new_tokens)
    for index, (ids, least, limit) in enumerate(zip(prompts, fewest, most, strict=True)):
        length, message = len(ids), None
        if length >= room:
            message = f"prompt of {length} tokens leaves no room for a new one; {bound}"
        elif length + limit > room:
            message = f"prompt of {length} tokens and max_new_tokens={limit} make {length + limit} tokens; {bound}"
        elif least > limit:
            message = f"min_new_tokens must be at most max_new_tokens={limit}, got {least}"
        if message is None:
            continue
        if errors is None:
            raise ValueError(message)
        errors.setdefault(index, ValueError(message))
        prompts[index] = NO_PROMPT


def _check_no_message(name: str, prompt: Any) -> None:
    """Raises a TypeError for a message of a chat, or a list of them."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    if isinstance(first, Mapping) and "role" in first:
        raise TypeError(f"{name} is a message of a chat, not its text: pass {OF_CHAT}")


def round_up(number: int, smallest: int) -> int:
    """Rounds a number of tokens up to `smallest` times a power of two, so that few programs are compiled."""
    return next(size for size in (smallest << i for i in itertools.count()) if size >= number)


def pad(prompts: list[np.ndarray], limits: HostArray, least: int, max_positions: int) -> tuple[HostArray, HostArray]:
    """Returns the prompts [B, C] with room for new tokens, C at least `least`, and their lengths [B]."""
    lengths: HostArray = np.array([len(ids) for ids in prompts], np.int32)
    capacity = min(round_up(int(max(lengths + limits)), SMALLEST_CAPACITY), max_positions)
    padded: HostArray = np.zeros((len(prompts), max(capacity, least)), np.int32)
    for tokens, ids in zip(padded, prompts, strict=True):
        tokens[: len(ids)] = ids
    return padded, lengths


def _unpad(ids: dict[str, np.ndarray], prompts: dict[str, Any], attention_mask: Any) -> list[np.ndarray]:
    """Returns the tokens where the mask is 1; `ids` lack the prompts that are wrong."""
    if any(isinstance(prompt, str) for prompt in prompts.values()):
        raise TypeError("attention_mask goes with token ids; prompts in text are not padded")
    try:
        masks = [np.asarray(row) for row in ([attention_mask] if "prompt" in prompts else attention_mask)]
    except (TypeError, ValueError) as error:  # a number, or sequences of different lengths in a row
        raise TypeError(f"attention_mask must hold 0 and 1 in the shape of prompt, got {attention_mask!r}") from error
    if len(masks) != len(prompts):
        raise ValueError(f"attention_mask must have a row for each of {len(prompts)} prompts, got {len(masks)}")
    named = zip(prompts, masks, strict=True)
    return [_unpad_row(name, ids[name], mask) if name in ids else NO_PROMPT for name, mask in named]


def _unpad_row(name: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    mask_name = name.replace("prompt", "attention_mask")
    if mask.shape != ids.shape:
        raise ValueError(f"{mask_name} must have the shape of {name}, {list(ids.shape)}, got {list(mask.shape)}")
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise ValueError(f"{mask_name} must hold 0 and 1, got {other[0]}")
    places = np.flatnonzero(mask)
    if len(places) == 0:
        raise ValueError(f"{mask_name} has no 1; at least one token is needed")
    holes = np.flatnonzero(np.diff(places) > 1)
    if len(holes):
        raise ValueError(
            f"{mask_name} must be 0 at the ends of {name} alone, got 0 at {places[holes[0]] + 1}, between tokens"
        )
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
                raise ValueError(
                    f"{name} seems to be padded, with {run} times token {pad_id}: pass attention_mask= with the batch, "
                    f"all 1 if these tokens are part of the text, or prompts of different lengths in a list"
                )
