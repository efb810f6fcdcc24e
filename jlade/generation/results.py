"""The results of a generation: `Generation`, `Piece` and `Statistics`, in NumPy."""

import dataclasses
import reprlib
import warnings
from typing import Any

import numpy as np

from jlade import mesh
from jlade.config import LookaheadConfig
from jlade.decoding.state import DecodeState
from jlade.drafts.sources import TABLE
from jlade.generation import constraining
from jlade.generation.request import DecodeRequest
from jlade.generation.text import Detokenizer

SHOWN = 8  # sequences in a `repr`
NOT_FINITE = "the model's logits are not finite: its weights hold NaN or infinity, or float16 overflowed"
DEAD_END = "the grammar allows no token here that logit_bias does not ban"
FAILURES = {"error": NOT_FINITE, "dead_end": DEAD_END}  # reasons for which a text ended before its end, in words
_shorten = reprlib.Repr()
_shorten.maxstring = 80  # characters of a text in a `repr`


@dataclasses.dataclass(frozen=True)
class Generation:
    """The generated continuations of B prompts, and the steps that they took.

    A stop string is cut off the text but not off the tokens: the last token is the one that completes it.

    The reason "error" means that the model gave logits with NaN or infinity, or of -inf alone, for the next token. The
    tokens before it, of which there may be none, are those of a sound model. "dead_end" means that all tokens that the
    grammar allows next are banned, by `logit_bias` or, end tokens, by `min_new_tokens`.

    Results that were not asked for are None. Their types have `Any` in its place, so that a type checker lets those who
    asked for them use them.

    Attributes:
      tokens: int32[B, max_new_tokens], -1 after the end of a sequence.
      lengths: int32[B], tokens generated, including an end token.
      steps: int[B], forward passes; prefill is not counted.
      accepted: int32[B, max(steps)], tokens accepted in each step, 0 after a sequence's last step.
      finish_reason: of each sequence, "eos", "stop", "length", "error" or "dead_end".
      text: of each sequence, without special tokens; None without a tokenizer.
      logprobs: float32[B, max_new_tokens], of the tokens under the model, NaN after the end of a sequence.
      processed_logprobs: float32[B, max_new_tokens], the same after `sampling`'s processing, at temperature 1 where it
        is 0.
      top_tokens: int32[B, max_new_tokens, K], the most probable ones under the model, -1 for none.
      top_logprobs: float32[B, max_new_tokens, K], of these, NaN after the end of a sequence.
      statistics: of steps and drafts.
      state: to continue from; see `jlade.generate`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    steps: np.ndarray
    accepted: np.ndarray
    finish_reason: tuple[str, ...]
    text: tuple[str, ...] | Any
    logprobs: np.ndarray | Any
    processed_logprobs: np.ndarray | Any
    top_tokens: np.ndarray | Any
    top_logprobs: np.ndarray | Any
    statistics: "Statistics | Any"
    state: DecodeState | Any

    @property
    def compression(self) -> np.ndarray:
        """float64[B], tokens per step."""
        return self.lengths / self.steps

    def __repr__(self) -> str:
        """A line for the arrays, and one for each of the first sequences."""
        names = ("tokens", "logprobs", "processed_logprobs", "top_tokens", "top_logprobs")
        held = [f"{name} {list(array.shape)}" for name in names if (array := getattr(self, name)) is not None]
        held += [name for name in ("statistics", "state") if getattr(self, name) is not None]
        lines = [f"Generation of {', '.join(held)}"]
        facts = zip(self.lengths, self.steps, self.compression, self.finish_reason, strict=True)
        for i, (length, steps, compression, reason) in enumerate(list(facts)[:SHOWN]):
            text = "" if self.text is None else f": {_shorten.repr(self.text[i])}"
            lines.append(f"  {i}: {length} tokens in {steps} steps ({compression:.2f} per step), {reason}{text}")
        if len(self.tokens) > SHOWN:
            lines.append(f"  and {len(self.tokens) - SHOWN} more")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens and the text that a step added to a stream, or the steps of an engine's round.

    Types are those of `Generation`.

    Attributes:
      tokens: int32[T].
      text: None without a tokenizer; may lag behind the tokens, and is never taken back.
      accepted: int32[steps], tokens accepted in each step, T together.
      logprobs: float32[T], of the tokens under the model.
      top_tokens: int32[T, K], the most probable ones.
      top_logprobs: float32[T, K], of these.
      generation: the whole result with the last piece, else None.
    """

    tokens: np.ndarray
    text: str | Any
    accepted: np.ndarray
    logprobs: np.ndarray | Any
    top_tokens: np.ndarray | Any
    top_logprobs: np.ndarray | Any
    generation: Generation | Any


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts of steps, accepted tokens and the final pool, in NumPy. A step is a forward pass after prefill.

    The fan-out of a key, a first token, is the number of its n-grams in the pool. Its mean, median and maximum are over
    the keys that have one, 0 in an empty pool.

    Attributes:
      steps: int32[B].
      accepted_histogram: int[B, A], steps that accepted 1, 2, ... A tokens, the most that a step can accept.
      num_drafted: int32[B, max(steps)], tokens that each step verified; 0 after the last step.
      contributed: int[B] for each source, tokens accepted from it.
      steps_with_accepted: int[B], steps that accepted more than one token.
      keys: int[B], keys in the pool.
      ngrams: int[B], n-grams in the pool.
      mean_fan_out: float64[B].
      median_fan_out: float64[B].
      max_fan_out: int[B].
    """

    steps: np.ndarray
    accepted_histogram: np.ndarray
    num_drafted: np.ndarray
    contributed: dict[str, np.ndarray]
    steps_with_accepted: np.ndarray
    keys: np.ndarray
    ngrams: np.ndarray
    mean_fan_out: np.ndarray
    median_fan_out: np.ndarray
    max_fan_out: np.ndarray

    @property
    def steps_with_draft(self) -> np.ndarray:
        """int[B], steps for which there was a draft."""
        return (self.num_drafted > 0).sum(axis=1)

    @property
    def draft_rate(self) -> np.ndarray:
        """float64[B], share of the steps for which there was a draft."""
        return self.steps_with_draft / self.steps

    @property
    def accepted_rate(self) -> np.ndarray:
        """float64[B], share of the steps that accepted more than one token."""
        return self.steps_with_accepted / self.steps


def statistics(state: DecodeState, lookahead: LookaheadConfig) -> Statistics:
    """Returns the statistics of a decode that has ended, and of its setting."""
    info, most, pool = state.info, lookahead.max_accepted, state.sources.get("pool")
    accepted, steps, num_drafted, contributed = mesh.fetch(
        (info.accepted, state.num_steps, info.num_drafted, info.contributed)
    )
    if contributed is None:  # all drafts are from the pool
        contributed = np.stack([(accepted - 1).clip(0).sum(axis=1) * (name == "pool") for name in TABLE], axis=1)
    fan_out = [np.zeros(0, int)] * len(steps) if pool is None else pool.fan_out()
    of_keys = [counts if len(counts) else np.zeros(1, int) for counts in fan_out]
    return Statistics(
        steps=steps,
        accepted_histogram=np.stack([np.bincount(counts, minlength=most + 1)[1:] for counts in accepted]),
        num_drafted=num_drafted[:, : steps.max()],
        contributed=dict(zip(TABLE, contributed.T, strict=True)),
        steps_with_accepted=(accepted > 1).sum(axis=1),
        keys=np.array(list(map(len, fan_out))),
        ngrams=np.array([counts.sum() for counts in fan_out]),
        mean_fan_out=np.array([counts.mean() for counts in of_keys]),
        median_fan_out=np.array([np.median(counts) for counts in of_keys]),
        max_fan_out=np.array([counts.max() for counts in of_keys]),
    )


def gather(state: DecodeState, request: DecodeRequest) -> Generation:
    """Returns the result of a decode that has ended."""
    tokens, ends, num_steps, stop_state, accepted, logprobs = mesh.fetch(
        (state.tokens, state.num_tokens, state.num_steps, state.stop_state, state.info.accepted, state.info.logprobs)
    )
    generation = assemble(tokens, ends, num_steps, accepted, logprobs, request, stop_state)
    return dataclasses.replace(
        generation,
        statistics=statistics(state, request.config.lookahead) if request.with_statistics else None,
        state=state if request.keep_state else None,
    )


def assemble(
    tokens: np.ndarray,
    ends: np.ndarray,
    num_steps: np.ndarray,
    accepted: np.ndarray,
    logprobs: Any,
    request: DecodeRequest,
    stop_state: np.ndarray | None = None,
) -> Generation:
    """Returns the result of sequences that ended, given fields of `DecodeState` in NumPy.

    Args:
      tokens: [B, C], with the prompts; they may go on after the end.
      ends: [B] tokens up to the end.
      num_steps: [B], those after the end included.
      accepted: [B, C].
      logprobs: those of `Info`.
      request: the arguments of the sequences.
      stop_state: [B], negative where a stop string is complete; None where the device looks for none.
    """
    prompt_lengths = request.inputs.lengths
    lengths = ends - prompt_lengths
    accepted = cut(accepted, lengths)
    offset = np.arange(max(request.inputs.stopping.max_new_tokens))[None, :]
    is_generated = offset < lengths[:, None]
    place = np.minimum(prompt_lengths[:, None] + offset, tokens.shape[1] - 1)

    def generated(kept: np.ndarray, empty: float) -> np.ndarray:
        shape = [*place.shape, *[1] * (kept.ndim - 2)]
        taken = np.take_along_axis(kept, place.reshape(shape), axis=1)
        return np.where(is_generated.reshape(shape), taken, np.asarray(empty, kept.dtype))

    def recorded(name: str, empty: float) -> np.ndarray | None:
        return None if logprobs is None else generated(getattr(logprobs, name), empty)

    new = generated(tokens, -1)
    has_top = request.config.top_logprobs > 0
    stopped = [False] * len(new) if stop_state is None else (stop_state < 0).tolist()
    endings = [_ending(i, new[i, :length].tolist(), stopped[i], request) for i, length in enumerate(lengths)]
    # The last step of a text that has failed may have accepted no token.
    has_failed = [reason in FAILURES for reason, _ in endings]
    steps = np.where(has_failed, num_steps, np.count_nonzero(accepted, axis=1))
    return Generation(
        tokens=new,
        lengths=lengths,
        steps=steps,
        accepted=accepted[:, : steps.max()],
        finish_reason=tuple(reason for reason, _ in endings),
        text=None if request.tokenizer is None else tuple(text or "" for _, text in endings),
        logprobs=recorded("model", np.nan),
        processed_logprobs=recorded("processed", np.nan),
        top_tokens=recorded("top_tokens", -1) if has_top else None,
        top_logprobs=recorded("top", np.nan) if has_top else None,
        statistics=None,
        state=None,
    )


def warn_of_errors(generation: Generation) -> None:
    """Warns of texts that ended with an error, for results that have no place for the reason."""
    for failure, message in FAILURES.items():
        failed = [index for index, reason in enumerate(generation.finish_reason) if reason == failure]
        if failed:
            warnings.warn(f"{message}; sequences that ended early: {', '.join(map(str, failed))}", stacklevel=3)


def of_piece(logprobs: Any, new: slice) -> dict[str, Any]:
    """Returns the fields of a `Piece` that log-probabilities fill, for the tokens of some places of one sequence.

    `logprobs` are fields of `LogProbs` in NumPy; None without.
    """
    has_top = logprobs is not None and logprobs.top.shape[-1] > 0
    return {
        "logprobs": None if logprobs is None else logprobs.model[0, new],
        "top_tokens": logprobs.top_tokens[0, new] if has_top else None,
        "top_logprobs": logprobs.top[0, new] if has_top else None,
    }


def cut(accepted: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the tokens that steps accepted [B, S] up to the ends of texts of `lengths` [B] tokens, 0 after them."""
    kept = np.minimum(np.cumsum(accepted, axis=1), lengths[:, None])
    return np.diff(kept, axis=1, prepend=0).astype(np.int32)


def _ending(index: int, tokens: list[int], stopped: bool, request: DecodeRequest) -> tuple[str, str | None]:
    """Returns the reason for which a sequence ended and, when there is a tokenizer, its text.

    The stop string of a text that has `stopped` on the device may have begun in the prompt.
    """
    stopping = request.inputs.stopping
    reason = "stop" if stopped else "length" if len(tokens) == stopping.max_new_tokens[index] else "error"
    if tokens and tokens[-1] in stopping.eos_ids[index]:
        reason = "eos"
    if reason == "error" and _is_dead_end(index, tokens, request):
        reason = "dead_end"
    if request.tokenizer is None:
        return reason, None
    detokenizer = Detokenizer(request.tokenizer, request.stop[index])
    text = detokenizer.feed(tokens, last=True)
    return "stop" if detokenizer.stop_string is not None else reason, text


def _is_dead_end(index: int, tokens: list[int], request: DecodeRequest) -> bool:
    """Whether the grammar of a sequence, if it has one, allows no token after its text that may be drawn."""
    table = request.tables and request.tables[index]
    if not table:
        return False
    sampling, stopping = request.inputs.sampling, request.inputs.stopping
    is_banned = np.zeros(len(table.class_of_token), bool)
    if sampling.logit_bias is not None:
        is_banned |= np.asarray(sampling.logit_bias[index]) == -np.inf
    if stopping.min_new_tokens is not None and len(tokens) < stopping.min_new_tokens[index]:
        eos_ids = np.asarray(stopping.eos_ids[index])
        is_banned[eos_ids[eos_ids >= 0]] = True
    return constraining.is_dead_end(table, tokens, is_banned)
