"""Verification against Algorithms 3 and 4 of the paper: a walk along the depth, and the exact law of the reference."""

import collections
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jlade.drafts import tree as tree_lib
from jlade.drafts.tree import NONE, Proposals, Tree, TreeShape
from jlade.lookahead.verification import verify_by_matching, verify_by_rejection
from tests import reference

VOCAB = 3


@jax.jit
def verify(candidates, next_token, predicted):
    """Verifies candidates [G, N-1], given the model's tokens after each of them [G, N-1]."""
    number, length = candidates.shape
    zeros = jnp.zeros(candidates.size, jnp.int32)
    tree = Tree(jnp.asarray(candidates).reshape(-1), TreeShape.chains(number, length), zeros, None)
    max_accepted = length + 1 if number else 1
    return verify_by_matching(tree, jnp.int32(next_token), jnp.asarray(predicted).reshape(-1), max_accepted)


def walk(candidates, next_token, predicted):
    """Accepts token after token, keeping the candidates that agree; returns the accepted tokens."""
    survivors, expected, accepted = list(range(len(candidates))), next_token, []
    for depth in range(predicted.shape[1]):
        survivors = [g for g in survivors if candidates[g][depth] == expected]
        if not survivors:
            break
        accepted.append(expected)
        expected = predicted[survivors[0]][depth]
    return [*accepted, expected]


@st.composite
def cases(draw):
    """Candidates, some empty, with predictions that agree wherever two candidates have the same beginning."""
    depth = draw(st.integers(1, 4))
    token = st.integers(0, VOCAB - 1)
    candidate = st.lists(token, min_size=depth, max_size=depth) | st.just([-1] * depth)
    candidates = draw(st.lists(candidate, max_size=6))
    model: dict[tuple[int, ...], int] = {}
    predicted = [
        [model.setdefault(tuple(candidate[: d + 1]), draw(token)) for d in range(depth)] for candidate in candidates
    ]
    shape = len(candidates), depth
    return np.array(candidates, np.int32).reshape(shape), draw(token), np.array(predicted, np.int32).reshape(shape)


@given(cases())
def test_accepts_what_the_walk_accepts(case):
    candidates, next_token, predicted = case
    verdict = verify(candidates, next_token, predicted)
    accepted = walk(candidates, next_token, predicted)
    assert verdict.tokens[: verdict.num_accepted].tolist() == accepted
    kept = candidates.reshape(-1)[verdict.path[: len(accepted) - 1]].tolist()
    assert kept == accepted[:-1]


def test_ties_go_to_the_first_candidate():
    verdict = verify(jnp.array([[9, 9], [1, 8], [1, 7]]), 1, jnp.array([[0, 0], [2, 0], [2, 0]]))
    assert (verdict.path[:1].tolist(), int(verdict.num_accepted)) == ([2], 2)


# By rejection: the joint law of the accepted tokens and their number.

EMPTY = (NONE, NONE, NONE)  # a slot of the pool without an n-gram
SHAPE = TreeShape.chains(5, len(EMPTY))
CANDIDATES = {
    "that part at once": [(0, 1, 2), (1, 2, 0), (2, 0, 1), EMPTY, EMPTY],
    "that begin alike": [(0, 1, 2), (0, 1, 0), (1, 0, 0), (0, 2, 2), (1, 0, 1)],
    "twice": [(1, 1, 1), (0, 2, 1), (1, 1, 1), (0, 2, 1), (0, 2, 0)],
    "between empty slots": [EMPTY, (2, 2, 0), EMPTY, (2, 1, 0), (0, 0, 0)],
    "none": [EMPTY] * 5,
}
NUM_DRAWS = 20_000
RIGHT = 1e-4  # a right sampler's p-value falls below this once in 10,000 runs


def random_model(seed):
    """Returns the distribution of the next token after any tokens; some have no probability."""

    def distribution(text):
        rng = np.random.default_rng([seed, *(token + 1 for token in text)])
        return {token: Fraction(int(sixths), 6) for token, sixths in enumerate(rng.multinomial(6, [1 / VOCAB] * VOCAB))}

    return distribution


def paths_of(tree):
    """Returns the path to each token of a tree; one that passes an empty slot has `NONE`."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.form.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@jax.jit
def draw_verdicts(tree, next_logits, logits):
    """Verifies a tree by rejection many times; returns the tokens [., N] and how many are accepted [.]."""
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    found = jax.vmap(lambda key: verify_by_rejection(key, tree, next_logits, logits, len(EMPTY) + 1))(keys)
    return found.tokens, found.num_accepted


@pytest.mark.parametrize(("seed", "is_merged"), [(0, False), (1, False), (2, False), (3, True)])
@pytest.mark.parametrize("candidates", CANDIDATES.values(), ids=CANDIDATES)
def test_rejection_has_the_law_of_algorithm_4(candidates, seed, is_merged):
    """Of candidates side by side, and of the tree of their cheapest tokens."""
    tokens = jnp.array(candidates, jnp.int32).reshape(-1)
    tree = Tree(tokens, SHAPE, jnp.zeros_like(tokens), None)
    if is_merged:
        proposals = Proposals.of(SHAPE, tokens, jnp.zeros_like(tokens))
        tree = tree_lib.merge(proposals, np.arange(15, dtype=np.int32), jnp.arange(1, 16), 7)
    distribution, paths = random_model(seed), paths_of(tree)
    expected = reference.law_of_sampling(distribution, [path for path in paths if NONE not in path])
    assert sum(expected.values()) == 1

    def logits(text):
        return jnp.log(jnp.array([float(probability) for probability in distribution(text).values()]))

    tokens, numbers = draw_verdicts(tree, logits(()), jnp.stack([logits(path) for path in paths]))
    observed = collections.Counter(
        tuple(row[:number]) for row, number in zip(tokens.tolist(), numbers.tolist(), strict=True)
    )
    assert observed.keys() <= expected.keys(), "an impossible result"
    counts = np.array([[observed[each], NUM_DRAWS * float(expected[each])] for each in expected])
    rare = counts[:, 1] < 5  # too few for the chi-square distribution: they count together
    counts = np.concatenate([counts[~rare], counts[rare].sum(axis=0, keepdims=True)][: 1 + rare.any()])
    assert scipy.stats.chisquare(*counts.T).pvalue > RIGHT


@pytest.mark.parametrize("candidates", CANDIDATES.values(), ids=CANDIDATES)
def test_algorithm_4_keeps_the_models_distribution(candidates):
    """Appendix B, of every text of N tokens: the model draws those that follow the accepted ones."""
    distribution = random_model(4)

    def probability(text, begin=0):
        return math.prod(distribution(text[:place])[text[place]] for place in range(begin, len(text)))

    law = reference.law_of_sampling(distribution, [candidate for candidate in candidates if candidate != EMPTY])
    for text in itertools.product(range(VOCAB), repeat=len(EMPTY) + 1):
        beginnings = [text[:end] for end in range(1, len(text) + 1)]
        assert sum(law.get(each, 0) * probability(text, len(each)) for each in beginnings) == probability(text)
    for first in range(VOCAB):
        assert sum(p for tokens, p in law.items() if tokens[0] == first) == distribution(())[first]
