"""The sources of drafts together: what they propose for a text, and the tree of the best of it, for one sequence."""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import LookaheadConfig
from jlade.drafts import record as record_lib
from jlade.drafts import recycled as recycling
from jlade.drafts import suffix
from jlade.drafts import tree as tree_lib
from jlade.drafts.record import Record
from jlade.drafts.recycled import RecycledLogits, Template
from jlade.drafts.tree import Proposals, Shape, Tree

MATCHES = 4  # matches of the text's end that are read on
NOISE_REACH = 6  # depths at which drafts use the noise of sampling
SPARE = 2.5  # drafts from recycled logits, relative to the size of the tree: those that others propose too make room

# Kinds of proposals: slots of the pool, the last one for all others; matches by length and rank, in the text and in the
# corpus; ranks in the table, after tokens and after pairs.
SLOTS = 8
_SPANS = suffix.LONGEST * MATCHES
KINDS = {"pool": SLOTS, "suffix": _SPANS, "recycled": 2 * recycling.RANKS, "corpus": _SPANS}
FIRST = dict(zip(KINDS, np.cumsum([0, *KINDS.values()]).tolist(), strict=False))
SOURCE_OF_KIND = np.repeat(np.arange(len(KINDS)), list(KINDS.values()))  # [K]
# Initial odds, measured with SmolLM2: of the first match by length, and of the others relative to it; those of a corpus
# are assumed.
_OTHER_TEXT = 0.6
_BY_LENGTH = np.array([0.25, 0.48, 0.56, 0.61, 0.7, 0.75, 0.8, 0.86])
_BY_RANK = np.array([1.0, 0.6, 0.45, 0.4])
_OF_SPANS = (_BY_LENGTH[:, None] * _BY_RANK[None, :]).reshape(-1)
_OF_SLOTS = np.array([0.4, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.1])
_OF_RANKS = np.array(recycling.ODDS_AFTER_TOKENS + recycling.ODDS_AFTER_PAIRS)
ODDS = np.concatenate([_OF_SLOTS, _OF_SPANS, _OF_RANKS, _OTHER_TEXT * _OF_SPANS])


@flax.struct.dataclass
class Drafts:
    """The drafts for the next step and the state of their sources, of one sequence; [B, ...] for a batch."""

    tree: Tree  # of M tokens
    proposals: Proposals  # that the tree was made of
    record: Record
    table: RecycledLogits | None  # of recycled logits, None without that source


class Plan(NamedTuple):
    """The static part: the sources and the shape of their proposals."""

    template: Template | None  # None without recycled logits
    shape: Shape
    size: int  # M


@functools.cache
def plan(lookahead: LookaheadConfig, has_corpus: bool = False) -> Plan:
    """Returns the plan of a setting with a tree, with or without a corpus to search."""
    size = lookahead.num_drafted
    shapes: list[Shape] = []
    template = None
    reach = lookahead.reach
    if "pool" in reach:
        shapes += [suffix.shape(lookahead.guess_set_size, reach["pool"])]
    if "suffix" in reach:
        shapes += [suffix.shape(MATCHES, reach["suffix"])] * (1 + has_corpus)
    if "recycled" in reach:
        template = recycling.template(max(recycling.RANKS, round(SPARE * size)), reach["recycled"])
        shapes += [template.shape]
    shape = Shape.join(shapes)
    return Plan(template, shape, min(size, len(shape.parents)))


def start() -> Record:
    """Returns the record of a sequence before its first step."""
    return record_lib.start(ODDS)


def empty_table(batch_size: int, vocab_size: int) -> RecycledLogits:
    """Returns tables [B, ...] without any token."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *x.shape)), recycling.empty(vocab_size))


def draft(
    text: jax.Array,
    length: jax.Array,
    ngrams: jax.Array,
    record: Record,
    table: RecycledLogits | None,
    noise: jax.Array | None,
    corpus: jax.Array | None,
    lookahead: LookaheadConfig,
) -> Drafts:
    """Returns the drafts for the step after a text.

    Args:
      text: [C] int32.
      length: [] int32, tokens of the text; the last one is the current token.
      ngrams: [G, N-1] int32, of the pool for the current token.
      record: what the model agreed with so far.
      table: of recycled logits.
      noise: [D, V] float32, of the next positions, NaN for greedy decoding; None where it is not known.
      corpus: [S] int32, other texts to search, each followed by `NONE`; None for none.
      lookahead: the setting.
    """
    template, shape, size = plan(lookahead, corpus is not None)
    tokens, kinds = [], []
    if "pool" in lookahead.reach:
        slot = np.minimum(np.arange(len(ngrams)), SLOTS - 1) + FIRST["pool"]
        tokens.append(ngrams.reshape(-1))
        kinds.append(jnp.asarray(np.repeat(slot, ngrams.shape[1]), jnp.int32))
    last = suffix.last(text, length)
    if "suffix" in lookahead.reach:
        reach = lookahead.reach["suffix"]
        spans = [_spans("suffix", text, length, last, reach)]
        if corpus is not None:
            spans += [_spans("corpus", corpus, jnp.int32(len(corpus)), last, reach)]
        tokens += [span_tokens for span_tokens, _ in spans]
        kinds += [span_kinds for _, span_kinds in spans]
    if template is not None:
        assert table is not None
        first = FIRST["recycled"]
        recycled, ranks = recycling.draft(
            table, last[1::-1], template, record.odds[first : first + KINDS["recycled"]], noise
        )
        tokens.append(recycled)
        kinds.append(first + ranks)
    proposals = Proposals(jnp.concatenate(tokens), jnp.concatenate(kinds), shape)
    odds = record.odds[proposals.kinds]
    if noise is not None:
        of_tokens = noise.at[shape.depths - 1, jnp.maximum(proposals.tokens, 0)].get(mode="fill", fill_value=jnp.nan)
        odds = record_lib.given_noise(odds, of_tokens)
    tree = tree_lib.merge(proposals, record_lib.cost(odds), size)
    return Drafts(tree, proposals, record, table)


def _spans(source: str, text: jax.Array, length: jax.Array, last: jax.Array, reach: int) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens and the kinds of the spans after the longest matches of `last` in a text."""
    places, lengths = suffix.find(text, length, last, MATCHES)
    spans = suffix.read(text, length, places, reach)
    matched = jnp.minimum(lengths[:, None] + jnp.arange(reach, dtype=jnp.int32)[None, :], suffix.LONGEST)
    rank = jnp.arange(MATCHES, dtype=jnp.int32)[:, None]
    tokens = jnp.where(lengths[:, None] > 0, spans, tree_lib.NONE)
    kinds = FIRST[source] + (jnp.maximum(matched, 1) - 1) * MATCHES + rank
    return tokens.reshape(-1), kinds.reshape(-1)


def learn(
    drafts: Drafts,
    pairs: jax.Array,
    best: jax.Array | None,
    order: jax.Array,
    accepted: jax.Array,
    num_accepted: jax.Array,
) -> tuple[Record, RecycledLogits | None]:
    """Returns the record and the table after a step.

    Args:
      drafts: of the step.
      pairs, best, order: see `recycling.update`.
      accepted: [A] int32, the tokens after the current one.
      num_accepted: [] int32, how many of these were accepted.
    """
    record = record_lib.update(drafts.record, drafts.proposals, accepted, num_accepted)
    if drafts.table is None or best is None:
        return record, drafts.table
    return record, recycling.update(drafts.table, pairs, best, order)
