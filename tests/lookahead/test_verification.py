"""Greedy verification against a walk along the depth, Algorithm 3 of the paper."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jlade.drafts.tree import Shape, Tree
from jlade.lookahead.verification import verify_by_matching

VOCAB = 3


@jax.jit
def verify(candidates, next_token, predicted):
    """Verifies candidates [G, N-1], given the model's tokens after each of them [G, N-1]."""
    number, length = candidates.shape
    zeros = jnp.zeros(candidates.size, jnp.int32)
    tree = Tree(jnp.asarray(candidates).reshape(-1), Shape.chains(number, length), zeros, None)
    most = length + 1 if number else 1
    return verify_by_matching(tree, jnp.int32(next_token), jnp.asarray(predicted).reshape(-1), most)


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
    candidates = draw(st.lists(candidate, min_size=1, max_size=6))
    model: dict[tuple[int, ...], int] = {}
    predicted = [
        [model.setdefault(tuple(candidate[: d + 1]), draw(token)) for d in range(depth)] for candidate in candidates
    ]
    return np.array(candidates, np.int32), draw(token), np.array(predicted, np.int32)


@given(cases())
def test_accepts_what_the_walk_accepts(case):
    candidates, next_token, predicted = case
    verdict = verify(candidates, next_token, predicted)
    accepted = walk(candidates, next_token, predicted)
    assert verdict.tokens[: verdict.num_accepted].tolist() == accepted
    kept = candidates.reshape(-1)[verdict.path[: len(accepted) - 1]].tolist()
    assert kept == accepted[:-1]


def test_ties_go_to_the_first_candidate():
    candidates = jnp.array([[9, 9], [1, 8], [1, 7]])
    verdict = verify(candidates, 1, jnp.array([[0, 0], [2, 0], [2, 0]]))
    assert (verdict.path[:1].tolist(), int(verdict.num_accepted)) == ([2], 2)


def test_a_whole_candidate_and_the_token_after_it_are_accepted():
    verdict = verify(jnp.array([[1, 2, 3]]), 1, jnp.array([[2, 3, 4]]))
    assert verdict.tokens.tolist() == [1, 2, 3, 4]
    assert int(verdict.num_accepted) == 4


def test_without_candidates_the_next_token_alone_is_accepted():
    verdict = verify(jnp.zeros((0, 3), jnp.int32), 6, jnp.zeros((0, 3), jnp.int32))
    assert verdict.tokens.tolist() == [6]
    assert int(verdict.num_accepted) == 1
