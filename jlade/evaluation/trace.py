"""A generation step by step: what each step guessed, verified, accepted and learned, and a page that shows it."""

import dataclasses
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh
from jlade.config import LookaheadConfig
from jlade.decoding import loop, prefill, sharding
from jlade.decoding.state import DecodeState
from jlade.drafts.pool import NGramPool
from jlade.drafts.tree import Shape
from jlade.generation import request as request_lib
from jlade.generation import results, text
from jlade.generation.options import Options, keywords
from jlade.generation.prompts import Prompts
from jlade.generation.text import Detokenizer
from jlade.lookahead import adaptive, block
from jlade.models.base import Params

TEMPLATE = pathlib.Path(__file__).with_name("trace.html")
SHOWN = LookaheadConfig.paper(7, 5, 7)  # by default: a window and candidates, in a block that fits a page
DATA = "TRACE_DATA"  # its place in the template


@dataclasses.dataclass(frozen=True)
class NGram:
    """An n-gram that a step completed."""

    tokens: list[int]  # N, the key first
    source: str  # "window" or "text"
    known: bool  # whether the pool had it before the step
    kept: bool  # whether the pool has it after the step


@dataclasses.dataclass(frozen=True)
class Step:
    """One step. Its tokens are read from the states before and after it."""

    level: int  # index of the step's setting in `Trace.levels`; W and G below are of that setting
    window: list[list[int]]  # [N-1, W] before the step, with the current token in its place
    predicted: list[int]  # [W] the row that the step appended to the window
    candidates: list[list[int]]  # [up to G, N-1]
    matched: list[int]  # accepted tokens of each candidate, 0 to N-1
    chosen: int | None  # the candidate that the accepted tokens follow; None if none had an accepted token
    accepted: list[int]  # [1 to N]
    ngrams: list[NGram]  # completed by the columns of the window, then by the accepted tokens


@dataclasses.dataclass(frozen=True)
class Trace:
    """A generation and its steps. `page` shows it."""

    lookahead: LookaheadConfig
    levels: tuple[LookaheadConfig, ...]  # settings of the steps; several where the width is adaptive
    prompt_length: int
    tokens: list[int]  # of the prompt and of the generated text
    texts: list[str]  # the addition of each token to the text; of a character in several tokens, with the last of them
    names: dict[int, str]  # token id -> its text alone, for all ids in the trace
    finish_reason: str
    steps: list[Step]


@keywords(Options)
def trace(params: Params, prompt: Prompts, options: Options) -> Trace:
    """Generates the text of `jlade.generate` for one prompt, one step at a time, and records every step.

    Args:
      params, prompt, options: those of `jlade.stream`; `tokenizer` is required. A stop string is not cut off the text.
        For `lookahead="auto"` it is `SHOWN`; there must be no tree.

    Raises:
      TypeError, ValueError: as `jlade.stream` does.
    """
    if options.lookahead == "auto":
        options = dataclasses.replace(options, lookahead=SHOWN)
    request = request_lib.check(params, prompt, options)
    request_lib.check_single(request)
    tokenizer = request.tokenizer
    if tokenizer is None:
        raise TypeError("tokenizer must be given: the trace shows the text of tokens")
    inputs, config = request.inputs, request.config
    if config.lookahead.tree_size is not None:
        raise ValueError(
            f"lookahead has tree_size={config.lookahead.tree_size}; a trace shows candidates side by side: use "
            "tree_size=None"
        )
    levels = (config.lookahead,) if inputs.relative_step_time is None else adaptive.levels(config.lookahead)
    params = sharding.put_params(params, config.mesh)

    state = prefill.start(prefill.prefill(params, inputs, config), inputs, config)
    before, steps = _snapshot(state), []
    while not before.done:
        state = loop.run_steps(params, state, config, max_steps=1)
        after = _snapshot(state)
        steps.append(_step(before, after, levels[before.level]))
        before = after

    tokens = before.tokens.tolist()
    detokenizer = Detokenizer(tokenizer)
    used = set(tokens).union(*map(_tokens_of, steps))
    return Trace(
        lookahead=config.lookahead,
        levels=levels,
        prompt_length=int(inputs.lengths[0]),
        tokens=tokens,
        texts=[detokenizer.feed([token], last=i == len(tokens) - 1) for i, token in enumerate(tokens)],
        names={token: text.token_name(tokenizer, token) for token in sorted(used)},
        finish_reason=results.gather(state, request).finish_reason[0],
        steps=steps,
    )


def page(trace: Trace) -> str:
    """Returns a page of HTML that shows the trace. It needs no network and no other file."""
    blocks = [
        {"sizes": _sizes(level), "positions": built.positions.tolist(), "seen": [_runs(row) for row in built.mask]}
        for level in trace.levels
        for built in [
            block.build(level.window_size, level.ngram_size, Shape.chains(level.guess_set_size, level.ngram_size - 1))
        ]
    ]
    kind, description = describe(trace.lookahead)
    data = dataclasses.asdict(trace) | {"blocks": blocks, "kind": kind, "description": description}
    # Within a script element, only "<" could end the data.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(DATA, embedded)


def describe(lookahead: LookaheadConfig) -> tuple[str, str]:
    """Returns the name of decoding with the setting, and an explanation in one or two sentences."""
    window, ngram, guesses = _sizes(lookahead)
    if not window and not guesses:
        return "Plain decoding", "Each forward pass gives one token."
    if not guesses:
        return (
            "Decoding with a window alone",
            "Each forward pass guesses future tokens. None is verified, so a step accepts one token.",
        )
    if not window:
        return (
            "Prompt lookup",
            f"Candidates are n-grams of {ngram} tokens from the text so far. One forward pass verifies all tokens of a "
            "candidate at once.",
        )
    if ngram == 2:
        return (
            "Jacobi decoding",
            "Each forward pass guesses a row of future tokens, and verifies pairs of tokens that earlier passes found.",
        )
    return (
        "Lookahead decoding",
        "Each forward pass guesses future tokens in a window, and verifies n-grams collected from earlier guesses. "
        "Several tokens can be accepted at once.",
    )


class _Snapshot(NamedTuple):
    """The part of a state that the trace reads, of its only sequence, in NumPy."""

    tokens: np.ndarray  # those so far
    window: np.ndarray  # [N-1, W]
    pool: np.ndarray  # [V, G, N-1]
    candidates: np.ndarray  # [G, N-1]
    level: int
    done: bool


def _snapshot(state: DecodeState) -> _Snapshot:
    level = None if state.pace is None else state.pace.level
    of_pool, of_tree = _ngrams(state), state.memory.drafts.tree.tokens
    tokens, length, window, pool, candidates, done, level = mesh.fetch(
        (state.tokens, state.num_tokens, state.window, of_pool, of_tree, state.done, level)
    )
    # The next step takes over the pool's buffer.
    return _Snapshot(
        tokens=tokens[0, : length[0]],
        window=window[0],
        pool=pool[0].copy(),
        candidates=candidates[0].reshape(-1, window.shape[1]).copy(),
        level=0 if level is None else int(level),
        done=done[0],
    )


def _ngrams(state: DecodeState) -> jax.Array:
    return jnp.zeros((1, 0, 0, 0), jnp.int32) if state.pool is None else state.pool.ngrams


def _step(before: _Snapshot, after: _Snapshot, level: LookaheadConfig) -> Step:
    """Returns the step between two states."""
    accepted = after.tokens[len(before.tokens) :]
    window, predicted = before.window[:, : level.window_size].copy(), after.window[-1, : level.window_size]
    window[0, :1] = before.tokens[-1]  # the array's value there is arbitrary
    columns = np.concatenate([window, predicted[None]]).T  # [W, N]

    # A candidate's accepted tokens are the first accepted tokens: the model's own.
    candidates = before.candidates[: level.guess_set_size]
    candidates = candidates[candidates[:, 0] != NGramPool.EMPTY]
    compared = min(len(accepted), candidates.shape[1])
    matched = np.cumprod(candidates[:, :compared] == accepted[:compared], axis=1).sum(axis=1)
    return Step(
        level=before.level,
        window=window.tolist(),
        predicted=predicted.tolist(),
        candidates=candidates.tolist(),
        matched=matched.tolist(),
        chosen=int(np.argmax(matched)) if matched.any() else None,
        accepted=accepted.tolist(),
        ngrams=[
            NGram(ngram.tolist(), source, known=_has(before.pool, ngram), kept=_has(after.pool, ngram))
            for source, ngrams in (("window", columns), ("text", _ngrams_of_text(before, after, level)))
            for ngram in ngrams
        ],
    )


def _ngrams_of_text(before: _Snapshot, after: _Snapshot, level: LookaheadConfig) -> list[np.ndarray]:
    """Returns the n-grams [N] that end with an accepted token, if the pool takes them."""
    if not level.pool_from_prompt:
        return []
    first = max(len(before.tokens) + 1, level.ngram_size)
    return [after.tokens[end - level.ngram_size : end] for end in range(first, len(after.tokens) + 1)]


def _has(pool: np.ndarray, ngram: np.ndarray) -> bool:
    """Returns whether the pool [V, G, N-1] has the n-gram [N]."""
    return pool.size > 0 and bool((pool[ngram[0]] == ngram[1:]).all(axis=-1).any())


def _tokens_of(step: Step) -> set[int]:
    """Returns the ids of all tokens in a step, but those of the text."""
    rows = [*step.window, step.predicted, *step.candidates, *(ngram.tokens for ngram in step.ngrams)]
    return set().union(*rows)


def _sizes(lookahead: LookaheadConfig) -> tuple[int, int, int]:
    return lookahead.window_size, lookahead.ngram_size, lookahead.guess_set_size


def _runs(seen: np.ndarray) -> list[int]:
    """Returns the bounds of the runs of True in a row [T] of a mask: begin, end, begin, end, ..."""
    return np.flatnonzero(np.diff(seen, prepend=False, append=False)).tolist()
