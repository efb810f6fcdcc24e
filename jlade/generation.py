"""Generating text: prompts in, a `Generation` out, or pieces of it as they come."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jlade import decoding, request, statistics, text
from jlade.config import LookaheadConfig, SamplingConfig
from jlade.decoding import DecodeState
from jlade.lookahead.ngram_pool import NGramPool
from jlade.models.base import Decoder, KVCache, Params
from jlade.request import Request
from jlade.statistics import Statistics

Prompt = str | Sequence[int] | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated after B prompts, and in how many steps. Arrays are NumPy's.

    A stop string is cut off the text, but not off the tokens: the last one is the token that completes it, whole.
    """

    tokens: np.ndarray  # [B, max_new_tokens] int32, -1 after a row's end
    lengths: np.ndarray  # [B] tokens generated, an end token included
    steps: np.ndarray  # [B] forward passes, prefill not counted
    accepted: np.ndarray  # [B, max(steps)] tokens accepted in each step, 0 after a row's last
    finish_reason: tuple[str, ...]  # per row, "eos", "stop" or "length"
    text: tuple[str, ...] | None  # per row, without special tokens; None without a tokenizer
    logprobs: np.ndarray | None  # [B, max_new_tokens] float32, of `tokens` under the model, NaN after a row's end
    processed_logprobs: np.ndarray | None  # the same after `sampling`'s processing, at temperature 1 where it is 0
    statistics: Statistics | None
    state: DecodeState | None  # what the next turn can continue from

    @property
    def compression(self) -> np.ndarray:
        """[B] tokens per step."""
        return self.lengths / self.steps


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step added to a streamed text."""

    tokens: np.ndarray  # [1 to N] int32
    text: str | None  # None without a tokenizer; may lag behind the tokens, and is never taken back
    generation: Generation | None  # the whole, with the last piece


class Streamer(Protocol):
    """What transformers calls a streamer: it is given the prompt, then tokens as they come."""

    def put(self, value: np.ndarray) -> Any:
        """Takes the prompt [1, L], or the next tokens [1 to N]."""

    def end(self) -> Any:
        """Is told that all tokens were given."""


def generate(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] = 256,
    min_new_tokens: int | Sequence[int] = 0,
    lookahead: LookaheadConfig | Literal["auto"] | None = LookaheadConfig(),  # noqa: B008, it is immutable
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),  # noqa: B008, likewise
    tokenizer: Any = None,
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    key: jax.Array | None = None,
    decoder: Decoder | None = None,
    state: DecodeState | None = None,
    pool: NGramPool | None = None,
    streamer: Streamer | None = None,
    logprobs: bool = False,
    with_statistics: bool = False,
    keep_state: bool = False,
) -> Generation:
    """Generates the text that plain decoding gives, in fewer steps.

    Args:
      params: the model's parameters, as `jlade.load` returns them.
      prompt: a string, token ids (a sequence or an array), or a list of these, of any lengths. A row of a batch gets
        what it would get alone.
      max_new_tokens: most tokens to generate after each prompt, 1 or more; one for all rows or one for each.
      min_new_tokens: before so many tokens no end token is generated and no stop string ends the text; likewise.
      lookahead: the setting of W, N and G; None for plain decoding, one token a step; "auto" for what `jlade.tune`
        found on this device for this model and as many prompts at once, or an estimate if it was not run.
      sampling: how tokens are drawn, for all rows or one for each; greedily by default. Other values compile nothing, a
        control that was not used before does.
      tokenizer: turns string prompts into tokens and tokens into `Generation.text`; a `tokenizers.Tokenizer` or one of
        transformers' that is built on one.
      eos_ids: token ids that end a text; by default the checkpoint's own, `()` for none. For all rows, or a sequence of
        them for each.
      stop: strings that end a text, wherever in the generated tokens they begin and end; the text is cut before them.
        For all rows, or a sequence of them for each. They need `tokenizer`.
      key: a key of `jax.random`, or an array of one for each row. It decides sampled text; W, N and G do not, unless
        verification is "rejection", and with a key for each row nor does the rest of the batch. Greedy text is the same
        for every key; it changes only how many steps are taken.
      decoder: the model that `params` belong to; needed when they are not jlade's own.
      state: `Generation.state` of an earlier call. The prompt is the whole text all the same, of the conversation so
        far, say; what the state has read of it is not read again, and its pool is used on. The text is the same. A
        state of one row serves all rows of a batch: what they begin with is read once.
      pool: n-grams to begin with, `Generation.state.pool` of another call, say, or what `jlade.load_pool` returns; one
        for all rows [V, G, N-1], or one for each [B, V, G, N-1]. By default no call sees the n-grams of another.
      streamer: an object like transformers' streamers, for one prompt; it is given NumPy arrays.
      logprobs: whether to return the log-probabilities of the tokens.
      with_statistics: whether to return `Generation.statistics`.
      keep_state: whether to return `Generation.state`, which holds the device memory of cache and pool.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted, before anything is compiled.
    """
    checked = request.check(
        params,
        prompt,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        lookahead=lookahead,
        sampling=sampling,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        stop=stop,
        key=key,
        decoder=decoder,
        state=state,
        pool=pool,
        logprobs=logprobs,
        with_statistics=with_statistics,
        keep_state=keep_state,
    )
    if streamer is None:
        return _generation(decoding.decode(params, *checked.arrays, **checked.static), checked)
    request.check_streamer(streamer, checked)
    return _feed(streamer, checked, _pieces(params, checked))


def stream(
    params: Params,
    prompt: Prompt,
    *,
    max_new_tokens: int = 256,
    min_new_tokens: int = 0,
    lookahead: LookaheadConfig | Literal["auto"] | None = LookaheadConfig(),  # noqa: B008, it is immutable
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),  # noqa: B008, likewise
    tokenizer: Any = None,
    eos_ids: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    key: jax.Array | None = None,
    decoder: Decoder | None = None,
    state: DecodeState | None = None,
    pool: NGramPool | None = None,
    logprobs: bool = False,
    with_statistics: bool = False,
    keep_state: bool = False,
) -> Iterator[Piece]:
    """Generates as `generate` does, for one prompt, and yields what each step adds as soon as it is there.

    The last piece has the whole `Generation`. Closing the iterator before that ends the work. Arguments and errors are
    those of `generate`; they are checked by this call, before the first piece is asked for.
    """
    checked = request.check(
        params,
        prompt,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        lookahead=lookahead,
        sampling=sampling,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        stop=stop,
        key=key,
        decoder=decoder,
        state=state,
        pool=pool,
        logprobs=logprobs,
        with_statistics=with_statistics,
        keep_state=keep_state,
    )
    request.check_single(checked)
    return _pieces(params, checked)


_prefill = jax.jit(decoding.prefill, static_argnames=("decoder", "lookahead", "logprobs"))


@functools.partial(jax.jit, static_argnames=("decoder", "lookahead"), donate_argnames=("cache", "pool"))
def _step_in_place(
    params: Params, state: DecodeState, cache: KVCache, pool: NGramPool, *, decoder: Decoder, lookahead: LookaheadConfig
) -> DecodeState:
    """A step that takes over what is large; the rest of the state may be the caller's."""
    state = dataclasses.replace(state, cache=cache, pool=pool)
    return decoding.step(params, state, decoder=decoder, lookahead=lookahead)


def _pieces(params: Params, request: Request) -> Iterator[Piece]:
    state = _prefill(params, *request.arrays, **request.static)
    detokenizer = None if request.tokenizer is None else text.Detokenizer(request.tokenizer, request.stop[0])
    start, done = int(request.prompt_lengths[0]), False
    while not done:
        small = dataclasses.replace(state, cache=None, pool=None)
        state = _step_in_place(
            params, small, state.cache, state.pool, decoder=request.decoder, lookahead=request.lookahead
        )
        tokens, end, done = (x[0] for x in jax.device_get((state.tokens, state.num_tokens, state.done)))
        new = tokens[start:end]
        piece = None if detokenizer is None else detokenizer.feed(new.tolist(), last=bool(done))
        yield Piece(new, piece, _generation(state, request) if done else None)
        start = end


def _feed(streamer: Streamer, request: Request, pieces: Iterator[Piece]) -> Generation:
    """Passes everything on to `streamer`, and tells it the end also when something fails: others may wait for it."""
    try:
        streamer.put(request.prompts[:, : request.prompt_lengths[0]])
        for piece in pieces:
            streamer.put(piece.tokens)
    finally:
        streamer.end()
    assert piece.generation is not None
    return piece.generation


def _generation(state: DecodeState, request: Request) -> Generation:
    tokens, ends, steps, accepted, logprobs = jax.device_get(
        (state.tokens, state.num_tokens, state.steps, state.accepted, state.logprobs)
    )
    lengths = ends - request.prompt_lengths
    offset = np.arange(max(request.stopping.max_new_tokens))[None, :]
    is_generated = offset < lengths[:, None]
    place = np.minimum(request.prompt_lengths[:, None] + offset, tokens.shape[1] - 1)

    def cut(kept: np.ndarray, empty: float) -> np.ndarray:
        return np.where(is_generated, np.take_along_axis(kept, place, axis=1), np.asarray(empty, kept.dtype))

    new = cut(tokens, -1)
    endings = [_ending(*row, request) for row in zip(range(len(new)), new, lengths, strict=True)]
    return Generation(
        tokens=new,
        lengths=lengths,
        steps=steps,
        accepted=accepted[:, : steps.max()],
        finish_reason=tuple(reason for reason, _ in endings),
        text=None if request.tokenizer is None else tuple(whole or "" for _, whole in endings),
        logprobs=None if logprobs is None else cut(logprobs.model, np.nan),
        processed_logprobs=None if logprobs is None else cut(logprobs.processed, np.nan),
        statistics=statistics.gather(state) if request.with_statistics else None,
        state=state if request.keep_state else None,
    )


def _ending(row: int, tokens: np.ndarray, length: int, request: Request) -> tuple[str, str | None]:
    """Returns why a row ended, and its text when there is a tokenizer."""
    reason = "eos" if tokens[length - 1] in request.stopping.eos_ids[row] else "length"
    if request.tokenizer is None:
        return reason, None
    detokenizer = text.Detokenizer(request.tokenizer, request.stop[row])
    whole = detokenizer.feed(tokens[:length].tolist(), last=True)
    return "stop" if detokenizer.stopped else reason, whole
