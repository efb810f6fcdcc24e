"""A generation step by step: guesses, drafts, accepted tokens and new n-grams, and the page that shows them."""

import dataclasses
import json
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from jlade import mesh
from jlade.config import LookaheadConfig, NGramConfig
from jlade.decoding import loop, prefill, sharding
from jlade.decoding.state import DecodeState
from jlade.drafts import graded
from jlade.drafts.record import BIT
from jlade.drafts.sources import TABLE
from jlade.drafts.tree import NONE, Tree
from jlade.generation import request as request_lib
from jlade.generation import results, text
from jlade.generation.options import Options, keywords
from jlade.generation.prompts import Prompts
from jlade.generation.text import Detokenizer
from jlade.lookahead import adaptive, block, names
from jlade.models.base import Params

TEMPLATE = pathlib.Path(__file__).with_name("trace.html")
WINDOW_AND_TREE = LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))
DATA = "TRACE_DATA"  # its place in the template
SOURCES = {name: f"{name}: {source.about}" for name, source in TABLE.items()}
MAX_LEARNED, BEST = 40, 3  # entries of a step, and tokens of an entry, that the trace keeps of recycled logits


@dataclasses.dataclass(frozen=True)
class Draft:
    """A token that a step verified."""

    token: int
    parent: int  # its place among the step's drafts, -1 for the current token
    source: str  # a name of `sources.TABLE`
    chance: float | None  # expected probability that it and its predecessors are accepted; None for a static tree
    verdict: str  # "accepted"; "rejected", the first wrong one of its path; or "unreached", after a rejected one
    is_kept: bool  # whether its keys and values entered the cache; of equal drafts one is kept


@dataclasses.dataclass(frozen=True)
class NGram:
    """An n-gram that a step completed."""

    tokens: list[int]  # N, the key first
    source: str  # "window" or "text"
    known: bool  # whether the pool had it before the step
    kept: bool  # whether the pool has it after the step


@dataclasses.dataclass(frozen=True)
class TableChange:
    """An entry of the table of recycled logits that a step changed."""

    token: int
    best: list[int]  # [up to BEST] the most probable tokens after it
    before: list[int]  # the same before the step; [] if the table had none


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """One step. Its tokens are read from the states before and after it."""

    level: int  # index of the step's setting in `Trace.settings`; W and M below are of that setting
    window: list[list[int]]  # [N-1, W] before the step, with the current token in its place
    predicted: list[int]  # [W] the row that the step appended to the window
    drafts: list[Draft]  # [up to M]
    accepted: list[int]  # [1 to A]
    ngrams: list[NGram]  # completed by the columns of the window, then by the accepted tokens; [] without a pool
    recycled: list[TableChange]  # [up to MAX_LEARNED], those of accepted tokens first; [] without that source


@dataclasses.dataclass(frozen=True)
class Trace:
    """A generation and its steps. `page` shows it."""

    lookahead: LookaheadConfig
    settings: tuple[LookaheadConfig, ...]  # of the steps; several where the width is adaptive
    prompt_length: int
    tokens: list[int]  # of the prompt and of the generated text
    texts: list[str]  # the addition of each token to the text; of a character in several tokens, with the last of them
    names: dict[int, str]  # token id -> its text alone, for all ids in the trace
    finish_reason: str
    steps: list[TracedStep]


@keywords(Options)
def trace(params: Params, prompt: Prompts, options: Options) -> Trace:
    """Generates the text of `jlade.generate` for one prompt, one step at a time, and records every step.

    Args:
      params, prompt, options: those of `jlade.stream`, with a tokenizer. A stop string is not cut off the text.
        `lookahead="auto"` is `WINDOW_AND_TREE` on any device, which has all that a page can show.

    Raises:
      TypeError, ValueError: as `jlade.stream` does.
    """
    if options.lookahead == "auto":
        options = dataclasses.replace(options, lookahead=WINDOW_AND_TREE)
    request = request_lib.make(params, prompt, options)
    request_lib.check_single(request)
    tokenizer = request.tokenizer
    if tokenizer is None:
        raise TypeError(f"a trace shows the text of tokens: {text.PASS_TOKENIZER}")
    inputs, config = request.inputs, request.config
    if config.lookahead.ngrams.window_advance != "step":
        raise ValueError("a trace shows windows that advance by step, got window_advance='token'")
    settings = (config.lookahead,) if inputs.costs is None else adaptive.settings(config.lookahead)
    params = sharding.put_params(params, config.mesh)

    state = prefill.start(prefill.prefill(params, inputs, config), inputs, config)
    before, steps = _snapshot(state), []
    while not before.done:
        state = loop.run_steps(params, state, config, max_steps=1)
        after = _snapshot(state)
        steps.append(_step(before, after, settings[before.level]))
        before = after

    tokens = before.tokens.tolist()
    detokenizer = Detokenizer(tokenizer)
    used = set(tokens).union(*map(_tokens_of, steps))
    return Trace(
        lookahead=config.lookahead,
        settings=settings,
        prompt_length=int(inputs.lengths[0]),
        tokens=tokens,
        texts=[detokenizer.feed([token], last=i == len(tokens) - 1) for i, token in enumerate(tokens)],
        names={token: text.token_name(tokenizer, token) for token in sorted(used)},
        finish_reason=results.gather(state, request).finish_reason[0],
        steps=steps,
    )


def page(trace: Trace) -> str:
    """Returns a page of HTML that shows the trace. It needs no network and no other file."""
    windows = [block.window(setting.window_size, setting.ngram_size) for setting in trace.settings]
    blocks = [
        {
            "sizes": [setting.window_size, setting.ngram_size, setting.num_drafted],
            "label": names.label(setting),
            "positions": window.positions.tolist(),
            "seen": [_runs(row) for row in window.mask],
        }
        for setting, window in zip(trace.settings, windows, strict=True)
    ]
    kind, description = describe(trace.lookahead)
    data = dataclasses.asdict(trace) | {"blocks": blocks, "kind": kind, "description": description, "sources": SOURCES}
    data |= {"is_tree": trace.lookahead.has_tree, "pool_from_prompt": trace.lookahead.ngrams.pool_from_prompt}
    # Within a script element, only "<" could end the data.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(DATA, embedded)


def describe(lookahead: LookaheadConfig) -> tuple[str, str]:
    """Returns the name of decoding with the setting, and an explanation in one or two sentences."""
    window, several = lookahead.window_size, "Several tokens can be accepted at once."
    if not lookahead.num_drafted and not window:
        return "Plain decoding", "Each forward pass gives one token."
    if not lookahead.num_drafted:
        alone = "Each forward pass guesses future tokens. None is verified, so a step accepts one token."
        return "Decoding with a window alone", alone
    if lookahead.sources == ("chain",):
        converged = "Each forward pass updates a chain of guesses, and accepts those that have converged."
        return "Jacobi decoding", converged
    if lookahead.has_tree:
        guesses = "guesses future tokens in a window, and verifies" if window else "verifies"
        tree = f"Each forward pass {guesses} a tree of drafts from several sources. {several}"
        return "Lookahead decoding with a tree" if window else "Decoding with a tree", tree
    if not window:
        drafts = f"Drafts are n-grams of {lookahead.ngram_size} tokens from the text so far."
        return "Prompt lookup", f"{drafts} One forward pass verifies all tokens of a draft at once."
    ngrams = "guesses future tokens in a window, and verifies n-grams collected from earlier guesses"
    return "Lookahead decoding", f"Each forward pass {ngrams}. {several}"


class _Snapshot(NamedTuple):
    """The part of a state that the trace reads, of its only sequence, in NumPy."""

    tokens: np.ndarray  # those so far
    window: np.ndarray  # [N-1, W]
    tree: Tree
    pool: np.ndarray | None  # [R, S, N]
    table: np.ndarray | None  # [V, 2k], of recycled logits
    level: int
    done: bool


def _snapshot(state: DecodeState) -> _Snapshot:
    sources = state.sources
    # A step that rests is a plain one.
    level = None if state.pace is None else np.minimum(state.pace.level, len(state.pace.num_steps) - 1)
    pool = sources["pool"].ngrams if "pool" in sources else None
    table = sources["recycled"].after_token if "recycled" in sources else None
    found = mesh.fetch((state.tokens, state.window, state.drafts.tree, pool, table, state.done))
    # The next step takes over some of these buffers.
    tokens, window, tree, pool, table, done = jax.tree.map(lambda x: x[0].copy(), found)
    table = None if table is None else graded.tokens(table)
    length, level = mesh.fetch((state.num_tokens, level))
    return _Snapshot(tokens[: length[0]], window, tree, pool, table, 0 if level is None else int(level), bool(done))


def _step(before: _Snapshot, after: _Snapshot, setting: LookaheadConfig) -> TracedStep:
    """Returns the step between two states."""
    accepted = after.tokens[len(before.tokens) :].tolist()
    window, predicted = before.window[:, : setting.window_size].copy(), after.window[-1, : setting.window_size]
    window[0, :1] = before.tokens[-1]  # the array's value there is arbitrary
    completed = [("window", column) for column in np.concatenate([window, predicted[None]]).T]  # [W, N]
    completed += [("text", ngram) for ngram in _ngrams_of_text(before, after, setting)]
    pools = before.pool, after.pool
    return TracedStep(
        level=before.level,
        window=window.tolist(),
        predicted=predicted.tolist(),
        drafts=_drafts(before.tree.first(setting.num_drafted), accepted),
        accepted=accepted,
        ngrams=[
            NGram(ngram.tolist(), source, *(_has(pool, ngram) for pool in pools))
            for source, ngram in completed
            if before.pool is not None
        ],
        recycled=_recycled(before, after, accepted),
    )


def _drafts(tree: Tree, accepted: list[int]) -> list[Draft]:
    """Returns the drafts of a tree, with the verdicts that the accepted tokens tell."""
    sources, parents = list(TABLE), np.asarray(tree.form.parents).tolist()
    found: list[Draft] = []
    depths: list[int] = []
    for i in range(int(tree.size)):
        parent, token = parents[i], int(tree.tokens[i])
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
        is_reached = (parent < 0 or found[parent].verdict == "accepted") and depths[i] <= len(accepted)
        agrees = is_reached and token == accepted[depths[i] - 1]
        verdict = "accepted" if agrees else "rejected" if is_reached else "unreached"
        chance = None if tree.costs is None else round(2 ** (-int(tree.costs[i]) / BIT), 4)
        found.append(Draft(token, parent, sources[int(tree.sources[i])], chance, verdict, is_kept=False))
    accepted_drafts = (i for i, draft in enumerate(found) if draft.verdict == "accepted")
    deepest = max(accepted_drafts, key=depths.__getitem__, default=-1)
    while deepest >= 0:
        found[deepest] = dataclasses.replace(found[deepest], is_kept=True)
        deepest = found[deepest].parent
    return found


def _recycled(before: _Snapshot, after: _Snapshot, accepted: list[int]) -> list[TableChange]:
    """Returns the entries of the table that a step changed."""
    if before.table is None or after.table is None:
        return []
    changed = np.flatnonzero((before.table[:, :BEST] != after.table[:, :BEST]).any(axis=1)).tolist()
    first = [int(before.tokens[-1]), *accepted]
    changed.sort(key=lambda token: first.index(token) if token in first else len(first))
    known = [[[i for i in row[:BEST].tolist() if i != NONE] for row in x[changed]] for x in (after.table, before.table)]
    return [TableChange(*entry) for entry in zip(changed, *known, strict=True)][:MAX_LEARNED]


def _ngrams_of_text(before: _Snapshot, after: _Snapshot, setting: LookaheadConfig) -> list[np.ndarray]:
    """Returns the n-grams [N] that end with an accepted token, if the pool takes them."""
    if not setting.ngrams.pool_from_prompt:
        return []
    first = max(len(before.tokens) + 1, setting.ngram_size)
    return [after.tokens[end - setting.ngram_size : end] for end in range(first, len(after.tokens) + 1)]


def _has(pool: np.ndarray | None, ngram: np.ndarray) -> bool:
    """Returns whether the pool [R, S, N] has the n-gram [N]."""
    return pool is not None and bool((pool[ngram[0] % len(pool)] == ngram).all(axis=-1).any())


def _tokens_of(step: TracedStep) -> set[int]:
    """Returns the ids of all tokens in a step, but those of the text."""
    rows = [*step.window, step.predicted, *(ngram.tokens for ngram in step.ngrams)]
    rows += [[draft.token for draft in step.drafts]]
    rows += [[entry.token, *entry.best, *entry.before] for entry in step.recycled]
    return set().union(*rows)


def _runs(seen: np.ndarray) -> list[int]:
    """Returns the bounds of the runs of True in a row [T] of a mask: begin, end, begin, end, ..."""
    return np.flatnonzero(np.diff(seen, prepend=False, append=False)).tolist()
