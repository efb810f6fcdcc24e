"""Generating text: prompts in, a `Generation` out, or pieces of it as they come."""

import dataclasses
import functools
import itertools
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade import decoding, text
from jlade import sampling as sampling_lib
from jlade.config import PLAIN, LookaheadConfig, SamplingConfig, check_int
from jlade.decoding import DecodeState
from jlade.models.base import Decoder, Params
from jlade.sampling import Sampling

Prompt = str | Sequence[int] | np.ndarray | jax.Array

SMALLEST_CAPACITY = 1024  # tokens; capacities are this times a power of two, so that few programs are compiled
EOS_SLOTS = 8  # end tokens are padded to a multiple of this, likewise


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated after B prompts, and in how many steps. Arrays are NumPy's."""

    tokens: np.ndarray  # [B, max_new_tokens] int32, -1 after a row's end
    lengths: np.ndarray  # [B] tokens generated, an end token included
    steps: np.ndarray  # [B] forward passes, prefill not counted
    accepted: np.ndarray  # [B, max(steps)] tokens accepted in each step, 0 after a row's last
    finish_reason: tuple[str, ...]  # per row, "eos" or "length"
    text: tuple[str, ...] | None  # per row, without special tokens; None without a tokenizer

    @property
    def compression(self) -> np.ndarray:
        """[B] tokens per step."""
        return self.lengths / self.steps


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step added to a streamed text."""

    tokens: np.ndarray  # [1 to N] int32
    text: str | None  # None without a tokenizer; may lag behind the tokens by part of a character


def generate(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    lookahead: LookaheadConfig | None = LookaheadConfig(),  # noqa: B008, it is immutable
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),  # noqa: B008, likewise
    tokenizer: Any = None,
    eos_ids: int | Sequence[int] | None = None,
    key: jax.Array | None = None,
    decoder: Decoder | None = None,
) -> Generation:
    """Generates the text that plain decoding gives, in fewer steps.

    Args:
      params: the model's parameters, as `jlade.load` returns them.
      prompt: a string, token ids (a sequence or an array), or a list of these, of any lengths. A row of a batch gets
        what it would get alone.
      max_new_tokens: most tokens to generate after each prompt; 1 or more.
      lookahead: the setting of W, N and G; None for plain decoding, one token a step.
      sampling: how tokens are drawn, for all rows or one for each; greedily by default. Other values compile nothing, a
        control that was not used before does.
      tokenizer: turns string prompts into tokens and tokens into `Generation.text`; a `tokenizers.Tokenizer` or one of
        transformers'.
      eos_ids: token ids that end a text; by default the checkpoint's own, `()` for none.
      key: a key of `jax.random`, or an array of one for each row. It decides sampled text; W, N and G do not, unless
        verification is "rejection", and with a key for each row nor does the rest of the batch. Greedy text is the same
        for every key; it changes only how many steps are taken.
      decoder: the model that `params` belong to; needed when they are not jlade's own.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted, before anything is compiled.
    """
    request = _Request.check(params, prompt, max_new_tokens, lookahead, sampling, tokenizer, eos_ids, key, decoder)
    state = decoding.decode(params, *request.arrays, **request.static)
    return _to_generation(state, request, tokenizer)


def stream(
    params: Params,
    prompt: Prompt,
    *,
    max_new_tokens: int = 256,
    lookahead: LookaheadConfig | None = LookaheadConfig(),  # noqa: B008, it is immutable
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),  # noqa: B008, likewise
    tokenizer: Any = None,
    eos_ids: int | Sequence[int] | None = None,
    key: jax.Array | None = None,
    decoder: Decoder | None = None,
) -> Iterator[Piece]:
    """Generates as `generate` does, for one prompt, and yields what each step adds as soon as it is there.

    Arguments and errors are those of `generate`; they are checked by this call, before the first piece is asked for.
    """
    request = _Request.check(params, prompt, max_new_tokens, lookahead, sampling, tokenizer, eos_ids, key, decoder)
    if len(request.prompt_lengths) != 1:
        raise ValueError(f"prompt must be a single prompt, got a batch of {len(request.prompt_lengths)}")
    return _pieces(params, request, tokenizer)


_prefill = jax.jit(decoding.prefill, static_argnames=("decoder", "lookahead"))
_step_in_place = jax.jit(decoding.step, static_argnames=("decoder", "lookahead"), donate_argnames="state")


def _pieces(params: Params, request: "_Request", tokenizer: Any) -> Iterator[Piece]:
    state = _prefill(params, *request.arrays, **request.static)
    detokenizer = None if tokenizer is None else text.Detokenizer(tokenizer)
    start, done = int(request.prompt_lengths[0]), False
    while not done:
        state = _step_in_place(params, state, **request.static)
        tokens, end, done = (x[0] for x in jax.device_get((state.tokens, state.num_tokens, state.done)))
        new = tokens[start:end]
        yield Piece(new, None if detokenizer is None else detokenizer.feed(new.tolist(), last=bool(done)))
        start = end


def _to_generation(state: DecodeState, request: "_Request", tokenizer: Any) -> Generation:
    tokens, ends, steps, accepted = jax.device_get((state.tokens, state.num_tokens, state.steps, state.accepted))
    new = [row[start:end] for row, start, end in zip(tokens, request.prompt_lengths, ends, strict=True)]
    padded = np.full((len(new), request.max_new_tokens), -1, np.int32)
    for row, generated in zip(padded, new, strict=True):
        row[: len(generated)] = generated
    return Generation(
        tokens=padded,
        lengths=ends - request.prompt_lengths,
        steps=steps,
        accepted=accepted[:, : steps.max()],
        finish_reason=tuple("eos" if generated[-1] in request.eos_ids else "length" for generated in new),
        text=None if tokenizer is None else tuple(text.decode(tokenizer, generated) for generated in new),
    )


@dataclasses.dataclass(frozen=True)
class _Request:
    """Checked arguments, in the form that `decoding` takes."""

    prompts: np.ndarray  # [B, C] int32
    prompt_lengths: np.ndarray  # [B] int32
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    key: jax.Array
    sampling: Sampling
    decoder: Decoder
    lookahead: LookaheadConfig

    @property
    def arrays(self) -> tuple[Any, ...]:
        batch_size = len(self.prompts)
        limits = np.full(batch_size, self.max_new_tokens, np.int32)
        slots = EOS_SLOTS * max(1, -(-len(self.eos_ids) // EOS_SLOTS))
        eos_ids = np.full((batch_size, slots), -1, np.int32)
        eos_ids[:, : len(self.eos_ids)] = self.eos_ids
        return self.prompts, self.prompt_lengths, limits, eos_ids, self.key, self.sampling

    @property
    def static(self) -> dict[str, Any]:
        return {"decoder": self.decoder, "lookahead": self.lookahead}

    @classmethod
    def check(cls, params, prompt, max_new_tokens, lookahead, sampling, tokenizer, eos_ids, key, decoder) -> "_Request":
        decoder = _check_decoder(params, decoder)
        max_new_tokens = check_int("max_new_tokens", max_new_tokens, 1)
        if not isinstance(lookahead, LookaheadConfig | None):
            raise TypeError(f"lookahead must be a LookaheadConfig, or None for plain decoding, got {lookahead!r}")
        prompts = _check_prompts(prompt, tokenizer, decoder.vocab_size)
        longest = max(len(ids) for ids in prompts)
        if longest + max_new_tokens > decoder.max_positions:
            raise ValueError(
                f"prompt of {longest} tokens and max_new_tokens={max_new_tokens} make {longest + max_new_tokens} "
                f"tokens; the model reads at most {decoder.max_positions} positions"
            )
        capacity = min(_capacity(longest + max_new_tokens), decoder.max_positions)
        padded = np.zeros((len(prompts), capacity), np.int32)
        for row, ids in zip(padded, prompts, strict=True):
            row[: len(ids)] = ids
        return cls(
            prompts=padded,
            prompt_lengths=np.array([len(ids) for ids in prompts], np.int32),
            max_new_tokens=max_new_tokens,
            eos_ids=_check_eos_ids(decoder.eos_ids if eos_ids is None else eos_ids, decoder.vocab_size),
            key=_check_key(key, len(prompts)),
            sampling=_check_sampling(sampling, len(prompts), decoder.vocab_size),
            decoder=decoder,
            lookahead=PLAIN if lookahead is None else lookahead,
        )


def _capacity(num_tokens: int) -> int:
    """Rounds up to `SMALLEST_CAPACITY` times a power of two."""
    return next(c for c in (SMALLEST_CAPACITY << i for i in itertools.count()) if c >= num_tokens)


def _check_decoder(params: Params, decoder: Decoder | None) -> Decoder:
    if decoder is not None:
        return decoder
    if not hasattr(params, "decoder"):
        raise TypeError(
            f"params of type {type(params).__name__} do not say which model they belong to: pass decoder=, or "
            f"parameters made by jlade.load"
        )
    return params.decoder


def _check_prompts(prompt: Any, tokenizer: Any, vocab_size: int) -> list[np.ndarray]:
    """Returns the token ids of every prompt in the batch."""
    check = functools.partial(_check_prompt, tokenizer=tokenizer, vocab_size=vocab_size)
    is_array = isinstance(prompt, np.ndarray | jax.Array)
    if isinstance(prompt, str) or (is_array and prompt.ndim < 2):
        return [check("prompt", prompt)]
    if not is_array and not isinstance(prompt, Sequence):
        raise TypeError(f"prompt must be a string, token ids, or a list of these, got {type(prompt).__name__}")
    if len(prompt) == 0:
        raise ValueError("prompt is empty; at least one token is needed")
    if not is_array and isinstance(prompt[0], numbers.Number):
        return [check("prompt", prompt)]
    return [check(f"prompt[{i}]", row) for i, row in enumerate(prompt)]


def _check_prompt(name: str, prompt: Any, tokenizer: Any, vocab_size: int) -> np.ndarray:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"{name} is a string, {prompt[:40]!r}: pass tokenizer= with it, or token ids instead")
        prompt = text.encode(tokenizer, prompt)
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # rows of different lengths
        raise TypeError(f"{name} must be a string or a flat sequence of token ids, got {prompt!r}") from error
    if ids.ndim != 1:
        raise TypeError(f"{name} must be a string or a flat sequence of token ids, got {type(prompt).__name__}")
    if len(ids) == 0:
        raise ValueError(f"{name} is empty; at least one token is needed")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"{name} must hold integer token ids, got {ids.dtype} ({ids[0]!r}, ...)")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{name} holds token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def _check_eos_ids(eos_ids: Any, vocab_size: int) -> tuple[int, ...]:
    if isinstance(eos_ids, numbers.Integral):
        eos_ids = (eos_ids,)
    try:
        ids = tuple(check_int("eos_ids", i, 0) for i in eos_ids)
    except TypeError as error:
        raise TypeError(f"eos_ids must be a token id or a sequence of them, got {eos_ids!r}") from error
    if any(i >= vocab_size for i in ids):
        raise ValueError(f"eos_ids holds {max(ids)}; accepted are 0 to {vocab_size - 1}")
    return ids


def _check_key(key: Any, batch_size: int) -> jax.Array:
    if key is None:
        return jax.random.key(0)
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim > 0:
        key = jax.random.wrap_key_data(key)  # the form that jax.random.PRNGKey makes
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape in ((), (batch_size,)):
            return key
        raise ValueError(f"key must be one key or one for each of {batch_size} prompts, got keys of shape {key.shape}")
    raise TypeError(f"key must be a key made by jax.random.key, or an array of them, got {key!r}")


def _check_sampling(sampling: Any, batch_size: int, vocab_size: int) -> Sampling:
    configs = [sampling] * batch_size if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(configs, Sequence) or not all(isinstance(config, SamplingConfig) for config in configs):
        raise TypeError(f"sampling must be a SamplingConfig, or a sequence of one for each prompt, got {sampling!r}")
    if len(configs) != batch_size:
        raise ValueError(
            f"sampling must be one SamplingConfig or {batch_size}, one for each prompt, got {len(configs)}"
        )
    outside = [token for config in configs for token in dict(config.logit_bias or ()) if token >= vocab_size]
    if outside:
        raise ValueError(f"logit_bias names token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return sampling_lib.to_arrays(configs, vocab_size)
