"""Recycled logits: the most probable tokens after each token, as the model last saw it (arXiv 2408.08696).

Every token of a block yields logits, also those of rejected drafts. The table keeps the best tokens of each row, by the
last two tokens (arXiv 2604.02047), and by the last one, where it has the mean of two rows. Drafts follow the table
from the current token on, in layers: of all tokens after the drafts of one depth, the most promising ones are the next
layer.

Each token has a grade of the probability that it had there (`jlade.drafts.graded`). Its odds are recorded by both
grades, after the pair and after the second token: a token that both find probable is more so than either says.

A prior, a `PriorTable` of other texts, has the tokens after what the table does not know.

The row that chose the current token also tells of the token after it: its runners-up often come next (LogitSpec, arXiv
2507.01449). They are drafts even where the table does not know the current token.
"""

import dataclasses
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import graded, suffix
from jlade.drafts.graded import GRADES
from jlade.drafts.record import cost, given_noise
from jlade.drafts.source import RANKS, Guide, Passage, Setting, Source, Step, Text
from jlade.drafts.tree import NEVER, NONE, Proposals, Tree
from jlade.vocabulary import VocabularyShard

SHARES = (0.58, 0.48, 0.38, 0.29, 0.21, 0.16, 0.11)  # drafts of each depth from the second on, relative to the tree's
MIN_WIDTH = 2  # drafts of a depth
MAX_LENGTH = 8  # tokens of a draft
PAIRS = 16_411  # most places for pairs, a prime; a later pair takes the place of an earlier one with its hash
# Acceptance rates, measured with SmolLM2: by the grade after a token where the pair is unknown; and log-odds by the
# grade after a pair, the last one for tokens that it lacks, to which those by the grade after its second token add,
# the last two for `MISSING` and `ONE_ROW`.
RATES_AFTER_TOKENS = (0.65, 0.65, 0.6, 0.5, 0.34, 0.08, 0.03, 0.016)
ODDS_AFTER_PAIRS = (1.6, 1.0, 0.3, -0.3, -0.8, -2.0, -2.9, -3.9, -3.9)
ODDS_AFTER_TOKENS = (1.9, 1.9, 1.5, 1.3, 0.8, 0.2, -0.5, -1.0, -1.0, 0.2)
RATES_AFTER_PAIRS = 1 / (1 + np.exp(-np.add.outer(ODDS_AFTER_PAIRS, ODDS_AFTER_TOKENS))).reshape(-1)
RATES_OF_RUNNERS_UP = (0.06, 0.053, 0.028, 0.023, 0.02, 0.017, 0.016, 0.015)  # by rank, the first if another was drawn
MISSING, ONE_ROW = GRADES, GRADES + 1  # in the place of a grade: not among these tokens; there is no other row
# The first kinds after a token, of the runners-up, after a pair, and after a pair of a prior.
AFTER_TOKEN, RUNNERS_UP, AFTER_PAIR = 0, GRADES, GRADES + RANKS
AFTER_PRIOR_PAIR = AFTER_PAIR + (GRADES + 1) * (ONE_ROW + 1)
# The kinds of tokens that a grammar makes likely, and of those that it makes certain.
LIKELY, CERTAIN = AFTER_TOKEN + 2, AFTER_PAIR + ONE_ROW


@dataclasses.dataclass(frozen=True)
class Recycled(Source):
    """The most probable tokens after the current one, and after these.

    Kinds are grades after tokens, ranks of the runners-up, grades after a pair and after its second token together, and
    these for pairs of a prior.
    """

    about = "most probable tokens when last seen"
    rates = np.concatenate([RATES_AFTER_TOKENS, RATES_OF_RUNNERS_UP, RATES_AFTER_PAIRS, RATES_AFTER_PAIRS])
    vocab_size: int
    size: int  # of the tree
    depth: int  # most tokens of a draft

    @classmethod
    def max_length(cls, lookahead: Setting) -> int:
        return MAX_LENGTH

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        size = lookahead.num_drafted
        return cls(vocabulary.size, size, min(MAX_LENGTH, size))

    @property
    def reader(self) -> Self:
        return dataclasses.replace(self, size=0, depth=0)

    def empty(self) -> "RecycledLogits":
        return empty(self.vocab_size)

    def read(self, state: "RecycledLogits", passage: Passage) -> "RecycledLogits":
        pairs = jnp.stack([passage.previous, passage.tokens], axis=-1)
        place = jnp.arange(len(pairs), dtype=jnp.int32)
        return update(state, pairs, passage.best, jnp.where(place < passage.length, place, -1))

    def propose(self, state: "RecycledLogits", text: Text, rates: jax.Array) -> Proposals:
        last, prior = suffix.last(text.tokens, text.length)[1::-1], text.shared.get("recycled")
        return draft(state, prior, last, widths(self.size, self.depth), rates, text.noise, text.guide)

    def learn(self, state: "RecycledLogits", step: Step) -> "RecycledLogits":
        assert step.best is not None
        return update(state, pairs_of(step), step.best, order_of(step))


@flax.struct.dataclass
class RecycledLogits:
    """The most probable next tokens of a sequence, graded, best first, -1 where none are known; a batch has an axis B.

    Attributes:
      after_token: int32[V, 16], after each token: the mean of its last two rows, then the last one. In one array, as a
        step that reads one and writes another would have a copy of it in programs for CPUs. Rows are read whole and
        divided after: XLA for TPUs makes kernels for each part that a gather cuts out.
      pairs: int32[P, 2], the pairs of tokens that have one of P places.
      after_pair: int32[P, 8], after each of these pairs.
      last: int32[8], those among which the model chose the current token.
    """

    after_token: jax.Array
    pairs: jax.Array
    after_pair: jax.Array
    last: jax.Array


@flax.struct.dataclass
class PriorTable:
    """The most probable tokens after pairs of tokens, and after single ones, as the model saw them in other texts.

    It is the floor under recycled logits, which begin each text with an empty table (arXiv 2411.03786 has such tables
    of bigrams of a model). No step writes to it, and all sequences share it. A pair has one place by its hash; of
    several pairs the most frequent one has it. Tokens are graded, the K best first, -1 where none are known.

    Attributes:
      pairs: int32[P, 2], the pairs that have a place; P is a power of two.
      after_pair: int32[P, K], the tokens after each of them.
      after_token: int32[V, K], those after each token.
    """

    pairs: jax.Array
    after_pair: jax.Array
    after_token: jax.Array


def widths(size: int, depth: int) -> tuple[int, ...]:
    """Returns the numbers of drafts of each depth, up to `depth` of 1 or more, for a tree of `size`."""
    found = [3 * RANKS]  # all that follow the text
    for share in SHARES[: depth - 1]:
        found.append(min(2 * RANKS * found[-1], max(MIN_WIDTH, round(share * size))))
    return tuple(found)


def empty(vocab_size: int) -> RecycledLogits:
    """Returns an empty table."""
    num_pairs = num_places(vocab_size)
    shapes = {
        "after_token": (vocab_size, 2 * RANKS),
        "pairs": (num_pairs, 2),
        "after_pair": (num_pairs, RANKS),
        "last": (RANKS,),
    }
    return RecycledLogits(**{name: jnp.full(shape, NONE, jnp.int32) for name, shape in shapes.items()})


def num_places(vocab_size: int) -> int:
    """Returns P, a multiple of 8, as TPUs copy arrays of other sizes; enough for all pairs of a small vocabulary."""
    return -(-_num_hashes(vocab_size) // 8) * 8


def _num_hashes(vocab_size: int) -> int:
    return min(vocab_size**2, PAIRS)


def place(pairs: jax.Array, vocab_size: int) -> jax.Array:
    """Returns the places [...] of pairs of tokens [..., 2]."""
    return (pairs[..., 0] * vocab_size + pairs[..., 1]) % _num_hashes(vocab_size)  # the product may overflow


def find(table: RecycledLogits, prior: PriorTable | None, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the best tokens after pairs [Q, 2] and their kinds, both [Q, 2k], `NONE` where there are fewer.

    They are those after the pair, in the table or else in the prior, and those after the second token that are not
    among these.
    """
    at = place(pairs, len(table.after_token))
    is_pair = jnp.all(table.pairs[at] == pairs, axis=1)
    of_pair, of_token = table.after_pair[at], table.after_token[jnp.maximum(pairs[:, 1], 0)][:, :RANKS]
    first = jnp.full(len(pairs), AFTER_PAIR, jnp.int32)
    if prior is not None:
        of_prior, is_pair_of_prior = find_in_prior(prior, pairs)
        is_of_prior = ~is_pair & is_pair_of_prior
        of_pair = jnp.where(is_of_prior[:, None], of_prior, of_pair)
        of_token = jnp.where((~is_pair_of_prior & (of_token[:, 0] == NONE))[:, None], of_prior, of_token)
        first = jnp.where(is_of_prior, AFTER_PRIOR_PAIR, first)
        is_pair |= is_pair_of_prior

    of_pair = jnp.where(is_pair[:, None], of_pair, NONE)
    same, grade = graded.same(of_pair, of_token), graded.grades(of_token)
    is_one_row = (jnp.all(of_pair == of_token, axis=1) | (of_token[:, 0] == NONE))[:, None]
    grade_after_token = jnp.min(jnp.where(same, grade[:, None, :], MISSING), axis=2)
    kinds = first[:, None] + _kind(graded.grades(of_pair), jnp.where(is_one_row, ONE_ROW, grade_after_token))
    kinds_after_token = jnp.where(is_pair[:, None], first[:, None] + _kind(MISSING, grade), AFTER_TOKEN + grade)
    of_token = jnp.where(jnp.any(same, axis=1), NONE, of_token)
    return (
        graded.tokens(jnp.concatenate([of_pair, of_token], axis=1)),
        jnp.concatenate([kinds, kinds_after_token], axis=1),
    )


def _kind(after_pair: Any, after_token: Any) -> Any:
    """Returns the kinds of tokens by their grades after a pair and after its second token, from 0."""
    return after_pair * (ONE_ROW + 1) + after_token


def draft(
    table: RecycledLogits,
    prior: PriorTable | None,
    last: jax.Array,
    widths: tuple[int, ...],
    rates: jax.Array,
    noise: jax.Array | None,
    guide: Guide | None,
) -> Proposals:
    """Returns drafts in layers: at each depth the most promising tokens after the drafts of the depth before.

    Args:
      table: of a sequence.
      prior: of other texts, None for none.
      last: [2] int32, the last tokens of the text; `NONE` before the first one.
      widths: the numbers of drafts of each depth, with the sum L.
      rates: [K] float32, acceptance rates of the kinds of `Recycled`.
      noise: [D, V] float32, of the positions after the text, see `record.given_noise`; None for unknown noise.
      guide: tokens that its constraint does not accept are no drafts, and those that are likely by it are; None for
        none.

    Returns:
      L proposals.
    """
    total = sum(widths)
    layers: list[Proposals] = []
    # Of the drafts of the depth before: the last two tokens, the costs of their paths, their lineage, and the states.
    pairs, costs, lineage = last[None], jnp.zeros(1, jnp.int32), jnp.full((1, len(widths)), total, jnp.int32)
    states: Any = None if guide is None else guide.state[None]
    for depth, width in enumerate(widths):
        best, kind = find(table, prior, pairs)
        if depth == 0:
            chosen_among = graded.tokens(table.last)
            runners_up = jnp.where(chosen_among == last[1], NONE, chosen_among)
            best = jnp.append(best, runners_up[None], axis=1)
            kind = jnp.append(kind, RUNNERS_UP + jnp.arange(RANKS, dtype=jnp.int32)[None], axis=1)
        if guide is not None:
            best, kind = _guided(best, kind, guide.constraint, states)
        chances = rates[kind]
        if noise is not None and depth < len(noise):
            chances = given_noise(chances, noise[depth][jnp.maximum(best, 0)])
        is_missing = (best == NONE) | (costs == NEVER)[:, None]
        ranked = jnp.where(is_missing, NEVER, costs[:, None] + cost(chances)).reshape(-1)
        # In float32, which holds these numbers exactly: programs for CPUs and GPUs sort all integers.
        negative, chosen = jax.lax.top_k(-ranked.astype(jnp.float32), width)
        parents, costs = chosen // best.shape[1], -negative.astype(jnp.int32)
        tokens = jnp.where(costs == NEVER, NONE, best.reshape(-1)[chosen])
        lineage = lineage[parents].at[:, depth].set(sum(widths[:depth]) + jnp.arange(width, dtype=jnp.int32))
        layers.append(Proposals(tokens, kind.reshape(-1)[chosen], lineage))
        if depth == 0:  # of a runner-up that the table has too, the less promising one has no drafts after it
            is_same = tokens[:, None] == tokens[None, :]
            costs = jnp.where(jnp.any(jnp.tril(is_same, -1), axis=1), NEVER, costs)
        if guide is not None:
            states = jnp.maximum(guide.constraint.after(states[parents], jnp.maximum(tokens, 0)), 0)
            states, tokens = jax.lax.optimization_barrier((states, tokens))  # see `constraint.along`
        pairs = jnp.stack([pairs[parents, 1], tokens], axis=1)
    return Proposals(
        tokens=jnp.concatenate([layer.tokens for layer in layers]),
        kinds=jnp.concatenate([layer.kinds for layer in layers]),
        lineage=jnp.concatenate([layer.lineage for layer in layers]),
    )


def _guided(best: jax.Array, kind: jax.Array, constraint: Any, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tokens and their kinds [Q, R] without those that a constraint refuses, and with those likely by it.

    The constraint of a `Guide` has the `states` [Q] before the tokens.
    """
    best = jnp.where(constraint.after(states[:, None], jnp.maximum(best, 0)) < 0, NONE, best)
    likely, is_certain = constraint.likely(states)
    is_known = best == likely[:, None]
    best = jnp.where(is_known & is_certain[:, None], NONE, best)
    likely = jnp.where(jnp.any(is_known, axis=1) & ~is_certain, NONE, likely)
    of_likely = jnp.where(is_certain, CERTAIN, LIKELY)
    return jnp.append(best, likely[:, None], axis=1), jnp.append(kind, of_likely[:, None], axis=1)


def update(table: RecycledLogits, pairs: jax.Array, best: jax.Array, order: jax.Array) -> RecycledLogits:
    """Returns the table with the best tokens of a block's rows.

    Args:
      table: before.
      pairs: [R, 2] int32, the token before the one that each row read, `NONE` for none, and that one.
      best: [R, k] int32, the most probable tokens after each, graded.
      order: [R] int32, different numbers: of several rows for a place the last one by `order` counts. Negative for rows
        to leave out.
    """
    vocab_size, tokens = len(table.after_token), pairs[:, 1]
    token_places = _targets(tokens, order, vocab_size)
    pair_places = _targets(place(pairs, vocab_size), jnp.where(pairs[:, 0] == NONE, -1, order), len(table.pairs))

    # The row before the last one of each token: of this block, else of the table.
    is_earlier = (tokens[:, None] == tokens[None, :]) & (order[None, :] < order[:, None]) & (order >= 0)[None, :]
    before = jnp.argmax(jnp.where(is_earlier, order[None, :], -1), axis=1)
    has_earlier = jnp.any(is_earlier, axis=1)[:, None]
    earlier = jnp.where(has_earlier, best[before], table.after_token[jnp.maximum(tokens, 0)][:, RANKS:])

    def put(rows: jax.Array, targets: jax.Array, new: jax.Array) -> jax.Array:
        return rows.at[targets].set(new, mode="drop", unique_indices=True)

    latest = jnp.argmax(order)
    return RecycledLogits(
        after_token=put(table.after_token, token_places, jnp.append(graded.mean(earlier, best), best, axis=1)),
        pairs=put(table.pairs, pair_places, pairs),
        after_pair=put(table.after_pair, pair_places, best),
        last=jnp.where(order[latest] < 0, table.last, best[latest]),
    )


def pairs_of(step: Step) -> jax.Array:
    """Returns the tokens with logits, each after the token before it [R, 2]: `Step.best` has the tokens after these."""
    before, current = last = suffix.last(step.text, step.before)[1::-1]
    window = jnp.zeros((0, 2), jnp.int32)
    if step.window.size:
        rows = step.window.at[0, 0].set(current)
        above = rows[-2] if len(rows) > 1 else jnp.append(before, rows[0, :-1])
        window = jnp.stack([above, rows[-1]], axis=1)
    parents = jnp.asarray(step.tree.form.parents)
    parent_tokens = jnp.where(parents == Tree.CURRENT, current, step.tree.tokens[jnp.maximum(parents, 0)])
    return jnp.concatenate([last[None], window, jnp.stack([parent_tokens, step.tree.tokens], axis=1)])


def order_of(step: Step) -> jax.Array:
    """Returns the `order` [R] of `update`: the text counts most, then the most promising draft, then the window."""
    tree, num_accepted, window_size = step.tree, step.length - step.before, step.window.shape[1]
    size = len(tree.tokens)
    place = jnp.arange(size, dtype=jnp.int32)
    within = jnp.arange(1, step.max_accepted, dtype=jnp.int32) < num_accepted
    is_accepted = jnp.any((step.path[:, None] == place[None, :]) & within[:, None], axis=0)
    text = jnp.int32(window_size + 2 * size)
    drafts = jnp.where(is_accepted, text + tree.form.depths, window_size + size - place)
    drafts = jnp.where(tree.tokens == NONE, -1, drafts)
    order = jnp.concatenate([text[None], jnp.arange(window_size, dtype=jnp.int32), drafts])
    return jnp.where(num_accepted == 0, -1, order)


def _targets(places: jax.Array, order: jax.Array, size: int) -> jax.Array:
    """Returns the places [R] of the last rows for each, other numbers from `size` on for all other rows."""
    is_later = order[None, :] > order[:, None]
    is_last = (order >= 0) & ~jnp.any((places[:, None] == places[None, :]) & is_later, axis=1)
    return jnp.where(is_last, places, size + jnp.arange(len(places), dtype=jnp.int32))


def place_in_prior(pairs: Any, num_places: int) -> Any:
    """Returns the places [...] uint32 of pairs of tokens [..., 2] int32, of JAX or NumPy."""
    first, second = pairs[..., 0].astype(np.uint32), pairs[..., 1].astype(np.uint32)
    mixed = first * np.uint32(0x9E3779B1) ^ second * np.uint32(0x85EBCA77)  # odd constants of xxHash
    mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE3D)
    return (mixed ^ mixed >> np.uint32(13)) & np.uint32(num_places - 1)


def find_in_prior(table: PriorTable, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the best tokens, graded [Q, k], after pairs [Q, 2], and whether the table has these [Q].

    Those after the second token take the place of those after an unknown pair.
    """
    at = place_in_prior(pairs, len(table.pairs))
    is_pair = jnp.all(table.pairs[at] == pairs, axis=1) & (pairs[:, 1] != NONE)
    return jnp.where(is_pair[:, None], table.after_pair[at], table.after_token[jnp.maximum(pairs[:, 1], 0)]), is_pair
