"""The sources of drafts, each against its definition in plain Python."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade import LookaheadConfig, NGramConfig
from jlade.drafts import graded, record, suffix
from jlade.drafts import recycled as recycling
from jlade.drafts.source import Prompt, Source, Text
from jlade.drafts.sources import TABLE, Sources
from jlade.drafts.tree import NONE, Proposals, TreeShape
from jlade.generation import prior as prior_lib
from jlade.vocabulary import VocabularyShard
from tests.texts import assert_same_texts
from tests.tiny import slow, tiny_llama

CAPACITY = 24
update = jax.jit(recycling.update)


def padded(text):
    return jnp.array(text + [text[-1]] * (CAPACITY - len(text)), jnp.int32), jnp.int32(len(text))


@functools.partial(jax.jit, static_argnames="number")
def find(tokens, length, number):
    places, lengths = suffix.find(tokens, length, suffix.last(tokens, length), number)
    return places, lengths, suffix.read(tokens, length, places, 5)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY), st.integers(1, 4))
def test_the_longest_matches_are_found_and_read_on(text, number):
    found = []
    for place in range(1, len(text)):
        length = 0
        while length < min(place, suffix.LONGEST) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        found += [(length, place)] if length else []
    expected = sorted(found, reverse=True)[:number]
    places, lengths, spans = find(*padded(text), number)
    assert [pair for pair in zip(lengths.tolist(), places.tolist(), strict=True) if pair[0]] == expected
    for span, (_, place) in zip(spans.tolist(), expected, strict=False):
        rest = text[place : place + 5]
        assert span == rest + [NONE] * (5 - len(rest))


@pytest.mark.parametrize("size", [1, 3, 119])
def test_layers_hold_more_than_the_tree(size):
    widths = recycling.widths(size, 4)
    assert len(widths) == 4
    assert sum(widths) >= size
    assert all(width <= 2 * recycling.RANKS * before for before, width in itertools.pairwise(widths))


MISSING, ONE_ROW = graded.GRADES, graded.GRADES + 1


def row_of(tokens, grades):
    """A row of a table, with the first level of each grade, and `NONE` for what it lacks."""
    pairs = zip(tokens, grades, strict=False)
    row = [token * graded.LEVELS + grade * graded.LEVELS // graded.GRADES for token, grade in pairs]
    return np.array(row + [NONE] * (recycling.RANKS - len(row)), np.int32)


@pytest.mark.parametrize("text", [(0, 1), slow((2, 1)), slow((1, 6))])
def test_drafts_follow_the_table_and_begin_with_runners_up_too(text):
    """After a pair that the table has both its tokens and those after its second token count, each once."""
    after_pair = {(0, 1): [3, 2, 1, 0, 4], (3, 5): [7, 6, 5, 4, 3, 2, 1, 0]}
    after_token = {
        1: [2, 3, 0, 1, 4, 5, 6, 7],
        2: [3, 1, 0, 2, 4, 5, 6, 7],
        3: [5, 4, 0, 1, 2, 3, 6, 7],
        5: after_pair[3, 5],
    }
    grades = np.random.default_rng(0).integers(0, graded.GRADES, (2, 8, 8)).tolist()  # after pairs, and after tokens
    grades[0][5] = grades[1][5]
    arrays = jax.tree.map(np.array, recycling.empty(8))
    for token, tokens in after_token.items():
        arrays.after_token[token, : recycling.RANKS] = row_of(tokens, grades[1][token])
    for pair, tokens in after_pair.items():
        at = recycling.place(np.array(pair), 8)
        arrays.pairs[at], arrays.after_pair[at] = pair, row_of(tokens, grades[0][pair[1]])
    table = arrays.replace(last=arrays.after_token[5, : recycling.RANKS])
    runners_up = [token for token in after_pair[3, 5] if token != text[-1]]  # of the last row

    def followers(line):
        pair, token = line[-2:], line[-1]
        by_token = dict(zip(after_token.get(token, []), grades[1][token], strict=False))
        by_pair = dict(zip(after_pair.get(pair, []), grades[0][token], strict=False))
        if not by_pair:
            return list(by_token.items())
        kinds = {
            follower: (grade, ONE_ROW if by_pair == by_token else by_token.get(follower, MISSING))
            for follower, grade in by_pair.items()
        }
        kinds |= {follower: (MISSING, grade) for follower, grade in by_token.items() if follower not in kinds}
        first = graded.GRADES + recycling.RANKS
        return [(follower, first + 10 * one + other) for follower, (one, other) in kinds.items()]

    rates = np.linspace(0.9, 0.1, len(recycling.Recycled.rates))
    np.random.default_rng(1).shuffle(rates)
    widths = (16, 6, 9)
    draft = jax.jit(lambda table, *arrays: recycling.draft(table, None, arrays[0], widths, arrays[1], None, None))
    found = draft(table, np.array(text), rates.astype(np.float32))
    costs = record.cost(jnp.asarray(rates, jnp.float32)).tolist()
    layer: list[tuple[int, tuple[int, ...], int]] = [(0, (), 0)]  # costs, tokens, kinds
    expected: list[tuple[tuple[int, ...], int]] = []
    for width in widths:
        longer = []
        for cost, path, _ in layer:
            options = followers((*text, *path))
            if not path:
                options += [(token, graded.GRADES + after_pair[3, 5].index(token)) for token in runners_up]
            longer += [(cost + costs[kind], (*path, token), kind) for token, kind in options]
        layer = sorted(longer, key=lambda option: option[0])[:width]
        expected += [(path, kind) for _, path, kind in layer]
        layer = list({path: (cost, path, kind) for cost, path, kind in reversed(layer)}.values())[::-1]
    tokens = np.append(found.tokens, NONE)
    paths = [tuple(token for token in tokens[line].tolist() if token != NONE) for line in found.lineage]
    drafted = np.flatnonzero(found.tokens != NONE).tolist()
    assert [(paths[place], int(found.kinds[place])) for place in drafted] == expected
    assert len(expected) < sum(widths)


# Two pairs of the same place.
VOCAB = 200
COLLIDING = st.sampled_from([(0, 5), (recycling.PAIRS // VOCAB, recycling.PAIRS % VOCAB + 5)])


@given(
    st.lists(st.tuples(st.integers(NONE, 4), st.integers(0, 4)) | COLLIDING, min_size=1, max_size=8),
    st.permutations(range(-2, 6)),
)
def test_the_last_row_of_a_token_and_of_a_pair_is_kept(pairs, order):
    rows = list(zip(pairs, order, strict=False))
    best = np.arange(len(rows) * recycling.RANKS, dtype=np.int32).reshape(len(rows), -1)
    expected = jax.tree.map(np.array, recycling.empty(VOCAB))
    for i in sorted(range(len(rows)), key=lambda i: rows[i][1]):
        (before, token), number = rows[i]
        if number < 0:
            continue
        (mean,) = graded.mean(expected.after_token[None, token, recycling.RANKS :], best[None, i])
        expected.after_token[token] = [*mean, *best[i]]
        if before != NONE:
            place = (before * VOCAB + token) % recycling.PAIRS
            expected.pairs[place], expected.after_pair[place] = (before, token), best[i]
        expected.last[:] = best[i]
    found = update(recycling.empty(VOCAB), np.array(pairs[: len(rows)]), best, np.array(order[: len(rows)]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_pair_whose_place_another_one_took_is_unknown():
    table, pairs = recycling.empty(VOCAB), np.array([[0, 5], [82, 16]], np.int32)
    assert recycling.place(pairs[0], VOCAB) == recycling.place(pairs[1], VOCAB)
    for i in range(2):
        row = row_of([i], [2])[None]
        table = update(table, pairs[i : i + 1], row, np.array([0]))
    best, kinds = jax.jit(recycling.find)(table, None, pairs)
    places = [recycling.RANKS, 0]  # those after tokens follow those after pairs
    assert [int(kinds[i, place]) for i, place in enumerate(places)] == [2, recycling.AFTER_PAIR + 2 * 10 + ONE_ROW]
    assert [np.flatnonzero(row != NONE).tolist() for row in best] == [[place] for place in places]
    assert [int(best[i, place]) for i, place in enumerate(places)] == [0, 1]


def test_a_prior_has_what_the_table_does_not_know():
    """After a pair of the text, after one of the prior, after a token of the text, after one of the prior."""
    of_text, of_prior = {(3, 4): 10, (5, 6): 11}, {(3, 4): 20, (1, 4): 21, (7, 8): 22}
    table = recycling.empty(VOCAB)
    for pair, token in of_text.items():
        row = row_of([token], [0])[None]
        table = update(table, np.array([pair]), row, np.array([0]))
    pairs, best = np.array(list(of_prior), np.int32), np.array(list(of_prior.values()), np.int32)[:, None]
    known = prior_lib.table_of(pairs, best, np.ones(best.shape, np.float32), VOCAB)
    after_pair, after_prior_pair = recycling.AFTER_PAIR, recycling.AFTER_PRIOR_PAIR
    expected = {
        (3, 4): [(10, after_pair + ONE_ROW)],
        (1, 4): [(21, after_prior_pair + MISSING), (10, after_prior_pair + 10 * MISSING)],
        (9, 4): [(10, 0)],
        (9, 8): [(22, 0)],
        (7, 8): [(22, after_prior_pair + ONE_ROW)],
        (9, 9): [],
    }
    arrays = jax.tree.map(jnp.asarray, known), np.array(list(expected), np.int32)
    for best, kinds, options in zip(*jax.jit(recycling.find)(table, *arrays), expected.values(), strict=True):
        assert [(int(best[i]), int(kinds[i])) for i in np.flatnonzero(best != NONE)] == options


@pytest.mark.parametrize("size", [13, 96, 1000])
def test_the_highest_logits_are_found(size):
    logits = np.random.default_rng(0).normal(size=(2, 5, size)).astype(np.float32)
    equal = np.round(logits)  # where several are the highest, the first one counts
    np.testing.assert_array_equal(jax.jit(VocabularyShard(size).argmax)(equal), np.argmax(equal, axis=-1))
    found = jax.jit(VocabularyShard(size).top, static_argnums=1)(logits, 8)
    np.testing.assert_array_equal(found[0], np.argsort(-logits, axis=-1)[..., :8])
    np.testing.assert_array_equal(found[1], -np.sort(-logits, axis=-1)[..., :8])
    assert found[0].dtype == jnp.int32
    few = jax.jit(VocabularyShard(3).top, static_argnums=1)(np.array([[5, 7, 6]], np.float32), 5)
    assert [each.tolist() for each in few] == [[[1, 2, 0, -1, -1]], [[7, 6, 5, -np.inf, -np.inf]]]


@pytest.mark.parametrize("size", [3, 40])
def test_grades_are_by_the_probabilities_of_the_highest_logits(size):
    logits = 3 * np.random.default_rng(0).normal(size=(6, size)).astype(np.float32)
    found = np.asarray(jax.jit(graded.best, static_argnums=1)(logits, VocabularyShard(size)))
    for row, expected in zip(found, logits, strict=True):
        best = np.argsort(-expected)[: recycling.RANKS]
        chances = np.exp(expected[best]) / np.sum(np.exp(expected[best]))
        log_odds = [math.log(chance / (1 - chance)) if chance < 1 else math.inf for chance in chances]
        of_best = [int(min(max((5.2 - each) // 1.3, 0), 7)) for each in log_odds]
        assert graded.tokens(row).tolist() == [*best, *[NONE] * (recycling.RANKS - len(best))]
        assert graded.grades(row)[: len(best)].tolist() == of_best
    assert graded.of(np.array([NONE, 0, 5]), np.array([0.5, 0.99, 0.0])).tolist() == [NONE, 3, 5 * graded.LEVELS + 63]


ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 63)), max_size=8, unique_by=lambda each: each[0])


@given(ROWS, ROWS.filter(len))
def test_the_mean_of_two_rows_has_their_most_probable_tokens(old, new):
    chances = [round(2**15 / (1 + math.exp(10.4 / 64 * (level + 0.5) - 5.2))) for level in range(64)]
    rows = [np.array([[token * 64 + level for token, level in row] + [NONE] * (8 - len(row))]) for row in (old, new)]
    totals = {token: 0 for token, _ in new + old}
    for token, level in new + old:
        totals[token] += chances[level]
    best = sorted(totals, key=lambda token: -totals[token])[:8]
    (found,) = jax.jit(graded.mean)(*rows)
    if not old:
        assert found.tolist() == rows[1][0].tolist()
    else:
        assert graded.tokens(found).tolist() == best + [NONE] * (8 - len(best))
        least = [round(2**16 / (1 + math.exp(10.4 / 64 * level - 5.2))) for level in range(1, 64)]
        of_means = [token * 64 + sum(totals[token] < each for each in least) for token in best]
        assert found[: len(best)].tolist() == of_means


def test_the_record_counts_proposals_whose_predecessors_were_accepted():
    shape = TreeShape((-1, 0, 1, -1, 3))
    proposals = Proposals.of(shape, jnp.array([1, 2, 3, 4, NONE]), jnp.array([0, 1, 2, 0, 1]))
    before = record.start(np.array([0.5, 0.5, 0.5]))
    count = jax.jit(lambda number: record.update(before, proposals, jnp.array([1, 9, 7]), number))
    after = count(np.int32(2))
    np.testing.assert_allclose(after.accepted, [16, 15, 15])
    np.testing.assert_allclose(after.tried, [32, 31, 30])  # the last proposal does not exist
    assert record.cost(after.rates[0]) == record.cost(before.rates[0]) == 256
    assert record.cost(after.rates[1]) > record.cost(before.rates[1])
    unchanged = count(np.int32(0))
    np.testing.assert_allclose(unchanged.tried, before.tried)


def test_the_record_forgets():
    proposals = Proposals.of(TreeShape((-1,)), jnp.array([1]), jnp.array([0]))
    update = jax.jit(lambda state, token: record.update(state, proposals, token[None], jnp.int32(1)))
    state = record.start(np.array([0.5]))
    for token in [1] * 300 + [2] * 200:
        state = update(state, jnp.int32(token))
    assert state.tried[0] == pytest.approx(record.MEMORY)
    assert state.accepted[0] / state.tried[0] < 0.2


def test_the_probability_of_a_draw_is_given_its_noise():
    """Against the share of draws in which the first token, with noise close to a value, is the highest."""
    rates = np.array([0.3, 0.5, 0.15, 0.05])
    noise = np.random.default_rng(0).gumbel(size=(400_000, 4))
    is_first = np.argmax(np.log(rates) + noise, axis=1) == 0
    for value in (-1.0, 0.0, 1.0, 3.0):
        share = is_first[np.abs(noise[:, 0] - value) < 0.05].mean()
        assert record.given_noise(jnp.float32(0.3), jnp.float32(value)) == pytest.approx(share, abs=0.02)
    assert record.given_noise(jnp.float32(0.3), jnp.float32(np.nan)) == np.float32(0.3)


@pytest.mark.parametrize(
    "lookahead",
    [
        LookaheadConfig.tree(9, sources=tuple(name for name in TABLE if name != "pool")),
        slow(LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))),
        slow(LookaheadConfig.paper(3, 4, 2)),
    ],
)
def test_sources_propose_in_their_shapes_and_kinds(lookahead):
    """The form of what decoding relies on, for every source of the table."""
    sources = Sources.of(lookahead, VocabularyShard(13))
    tokens, length = padded([1, 2, 3, 1, 2])
    shared = {"corpus": jlade.Corpus([[1, 2, 3]]).on_device}
    prompt = Prompt(tokens, length, jnp.int32(0), jnp.int32(5))

    @jax.jit
    def run():
        states = sources.start(sources.empty(), prompt)
        text = Text(tokens, length, None, None, shared, states)
        rates = {name: jnp.asarray(source.rates, jnp.float32) for name, source in sources.sources}
        proposed = {name: source.propose(states[name], text, rates[name]) for name, source in sources.sources}
        return states, sources.draft(None, text, None), proposed

    states, drafts, proposed = run()
    for name, source in sources.sources:
        tokens, kinds, lineage = (getattr(proposed[name], field) for field in ("tokens", "kinds", "lineage"))
        assert tokens.dtype == kinds.dtype == lineage.dtype == jnp.int32
        assert len(tokens) == len(kinds) == len(lineage) > 0
        np.testing.assert_array_equal(
            lineage[np.arange(len(tokens)), proposed[name].depths - 1], np.arange(len(tokens))
        )
        assert 0 <= kinds.min() <= kinds.max() < len(source.rates)
        assert jax.tree.structure(states[name]) == jax.tree.structure(source.empty())
    assert len(drafts.tree.tokens) == lookahead.num_drafted
    assert set(drafts.tree.sources.tolist()) <= {list(TABLE).index(name) for name, _ in sources.sources}
    assert {name for name, _ in sources.sources} == set(lookahead.reach)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sources": ("trie",)}, ValueError, "sources must be one or more of 'prediction', 'suffix'"),
        ({"sources": ("pool",)}, ValueError, r"got \('pool',\); 'pool' comes with ngrams"),
        ({"sources": ()}, ValueError, "sources must be one or more"),
        ({"sources": (), "ngrams": NGramConfig(5, 5, 0)}, ValueError, "sources must be one or more"),
        ({"sources": ("suffix", "suffix")}, ValueError, "sources must be one or more"),
        ({"sources": "suffix"}, TypeError, "sources must be a tuple of"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": 2.5}, TypeError, "size must be an integer"),
        ({"ngrams": (15, 5, 15)}, TypeError, r"ngrams must be an NGramConfig or None, got \(15, 5, 15\)"),
        ({"size": 5000, "ngrams": NGramConfig()}, ValueError, r"size=5000 make .* \(N-1\)W\+M = 5060 tokens"),
    ],
)
def test_wrong_trees_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LookaheadConfig.tree(**{"size": 9} | arguments)


@pytest.mark.parametrize("name", TABLE)
def test_a_source_needs_no_other(name):
    ngrams, others = (NGramConfig(0, 3, 2), ()) if name == "pool" else (None, (name,))
    lookahead = LookaheadConfig.tree(9, sources=others, ngrams=ngrams)
    assert [each for each, _ in Sources.of(lookahead, VocabularyShard(13)).sources] == [name]


@dataclasses.dataclass(frozen=True)
class Repeat(Source):
    """The current token again."""

    about = "the current token again"
    rates = np.array([0.3])
    length: int

    @classmethod
    def max_length(cls, lookahead):
        return 4

    @classmethod
    def of(cls, lookahead, vocabulary):
        return cls(min(4, lookahead.num_drafted))

    def propose(self, state, text, rates):
        tokens = jnp.broadcast_to(text.tokens[text.length - 1], self.length)
        return Proposals.of(TreeShape.chains(1, self.length), tokens, jnp.zeros(self.length, jnp.int32))


def test_an_entry_of_the_table_is_all_that_another_source_needs(monkeypatch):
    generate = functools.partial(jlade.generate, tiny_llama(2), [3, 1, 4], max_new_tokens=30, with_statistics=True)
    expected = generate(lookahead=None)
    monkeypatch.setitem(TABLE, "repeat", Repeat)
    found = generate(lookahead=LookaheadConfig.tree(5, sources=("repeat",)))
    assert_same_texts(found, expected)
    assert found.statistics.contributed["repeat"][0] == 30 - found.steps[0] > 0


def test_sizes_of_a_setting_with_a_tree():
    setting = LookaheadConfig.tree(20, sources=("recycled",), ngrams=NGramConfig(4, 5, 3))
    assert setting.sources == ("pool", "recycled"), "in the order of the table"
    assert (setting.block_size, setting.num_drafted, setting.max_accepted) == (36, 20, 9)
    assert setting.reach == {"pool": 4, "recycled": 8}
