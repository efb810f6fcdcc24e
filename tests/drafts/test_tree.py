"""The merged tree against a dictionary of paths, and its verification against a walk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jlade.drafts import tree as tree_lib
from jlade.drafts.tree import NONE, Proposals, Tree, TreeShape
from jlade.lookahead import block as blocks
from jlade.lookahead.verification import verify_by_matching, verify_by_rejection

PARENTS = (-1, 0, 1, 2, -1, 4, 5, -1, -1, 7, 7, 9, 10)  # two chains, and a tree that branches
SHAPE = TreeShape(PARENTS)
SIZE = 7
VOCAB = 3


def paths_of(tokens):
    """The path to each proposal, None where a token is missing."""
    paths: list[tuple[int, ...] | None] = []
    for token, parent in zip(tokens, PARENTS, strict=True):
        before = () if parent < 0 else paths[parent]
        paths.append(None if before is None or token == NONE else (*before, token))
    return paths


@jax.jit
def merged(tokens, costs):
    proposals = Proposals.of(SHAPE, tokens, jnp.zeros_like(tokens))
    return tree_lib.merge(proposals, np.arange(len(PARENTS), dtype=np.int32), costs, SIZE)


def merge(tokens, costs):
    return jax.device_get(merged(np.array(tokens, np.int32), np.array(costs, np.int32)))


@functools.partial(jax.jit, static_argnames="max_accepted")
def verified(tree, next_token, predicted, max_accepted):
    return verify_by_matching(tree, next_token, predicted, max_accepted)


def paths_in(tree):
    """The paths of a tree by its parents, checked against depths and mask."""
    paths: list[tuple[int, ...]] = []
    lines: list[list[int]] = []
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.form.parents.tolist(), strict=True)):
        if token == NONE:
            assert np.flatnonzero(tree.form.mask[i]).tolist() == [i]
            continue
        assert parent < i, "predecessors come first"
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
        lines.append([*(lines[parent] if parent >= 0 else []), i])
        assert tree.form.depths[i] == len(paths[i])
        assert np.flatnonzero(tree.form.mask[i]).tolist() == sorted(lines[i])
    return paths


drawn = st.tuples(
    st.lists(st.integers(NONE, VOCAB - 1), min_size=len(PARENTS), max_size=len(PARENTS)),
    st.lists(st.integers(1, 4), min_size=len(PARENTS), max_size=len(PARENTS)),
)


@given(drawn)
def test_the_cheapest_paths_are_kept_and_equal_ones_are_one(case):
    tokens, costs = case
    of_token: dict[tuple[int, ...], int] = {}
    for path, cost in zip(paths_of(tokens), costs, strict=True):
        if path is not None:
            of_token[path] = min(of_token.get(path, cost), cost)
    cheapest = {path: sum(of_token[path[:end]] for end in range(1, len(path) + 1)) for path in of_token}
    expected = sorted(cheapest, key=cheapest.__getitem__)[:SIZE]
    tree = merge(tokens, costs)
    assert paths_in(tree) == expected
    assert tree.costs[: len(expected)].tolist() == [cheapest[path] for path in expected]
    for path, source in zip(expected, tree.sources.tolist(), strict=False):
        assert paths_of(tokens)[source] == path
        assert costs[source] == of_token[path]
    assert paths_in(tree.first(4)) == expected[:4]


def test_shapes_are_joined():
    joined = TreeShape.join([TreeShape((-1, 0)), TreeShape((-1, -1, 1))])
    assert joined.parents == (-1, 0, -1, -1, 3)
    assert joined.depths.tolist() == [1, 2, 1, 1, 2]
    assert joined.lineage.tolist() == [[0, 5], [0, 1], [2, 5], [3, 5], [3, 4]]


@given(drawn, st.dictionaries(st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple), st.integers(0, VOCAB - 1)))
def test_accepts_the_longest_path_that_the_model_agrees_with(case, model):
    """The model says 0 where the dictionary says nothing."""
    tree = merge(*case)
    paths, max_accepted = paths_in(tree), int(SHAPE.depths.max()) + 1
    walked: list[int] = []
    while tuple(walked) in [(), *paths]:
        walked.append(model.get(tuple(walked), 0))
    predicted = [model.get(path, 0) for path in paths] + [0] * (SIZE - len(paths))
    verdict = jax.device_get(verified(tree, np.int32(model.get((), 0)), np.array(predicted, np.int32), max_accepted))
    assert verdict.tokens.shape == (max_accepted,)
    assert verdict.tokens[: verdict.num_accepted].tolist() == walked
    assert tree.tokens[verdict.path[: len(walked) - 1]].tolist() == walked[:-1]


def test_without_a_tree_the_next_token_alone_is_accepted():
    verdict = verify_by_matching(merge([1] * 13, [1] * 13).first(0), jnp.int32(2), jnp.zeros(0, jnp.int32), 1)
    assert (verdict.tokens.tolist(), int(verdict.num_accepted), verdict.path.shape) == ([2], 1, (0,))


MERGED = jax.tree.map(
    jnp.asarray, merge([0, 1, 2, 0, 1, 0, 1, 0, 1, 1, 2, 0, 0], [1, 2, 3, 3, 1, 2, 3, 4, 4, 1, 1, 2, 2])
)
CHAINS = Tree(
    jnp.array([0, 1, 2, 0, 2, 1, 0, 1, 1, 2, 0, 0, NONE, NONE, NONE]), TreeShape.chains(5, 3), jnp.zeros(15), None
)


@pytest.mark.parametrize("tree", [MERGED, CHAINS], ids=["merged", "chains that begin alike"])
def test_rejection_draws_from_the_models_distribution(tree):
    """The first two tokens: those that the tree decides, completed by draws where a step accepted only one."""
    rng = np.random.default_rng(0)
    first, second = rng.dirichlet(np.ones(VOCAB)), rng.dirichlet(np.ones(VOCAB), VOCAB)
    last = np.maximum(tree.tokens, 0)
    logits = jnp.log(jnp.asarray(second, jnp.float32))
    max_accepted = int(np.max(tree.form.depths)) + 1

    def draw(key):
        verdict = verify_by_rejection(key, tree, jnp.log(jnp.asarray(first, jnp.float32)), logits[last], max_accepted)
        again = jax.random.categorical(jax.random.fold_in(key, 9), logits[verdict.tokens[0]]).astype(jnp.int32)
        second_token = jnp.where(verdict.num_accepted > 1, verdict.tokens[1], again)
        return verdict.tokens[0], second_token, verdict.num_accepted

    number = 20_000
    one, two, accepted = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), number))
    observed = np.bincount(one * VOCAB + two, minlength=VOCAB**2)
    assert scipy.stats.chisquare(observed, number * (first[:, None] * second).reshape(-1)).pvalue > 1e-3
    assert accepted.max() > 2


@pytest.mark.slow
@given(st.integers(0, 4), st.integers(2, 5), drawn)
def test_a_block_with_a_tree(window_size, ngram_size, case):
    form = merge(*case).form
    window, block = blocks.window(window_size, ngram_size), blocks.build(window_size, ngram_size, form)
    size = len(window.positions)
    np.testing.assert_array_equal(block.positions, [*window.positions, *form.depths])
    np.testing.assert_array_equal(block.mask[:size, :size], window.mask)
    assert not block.mask[:size, size:].any(), "the window does not attend to the tree"
    assert block.mask[size:, 0].all(), "the tree attends to the current token"
    assert not block.mask[size:, 1:size].any(), "and to nothing else of the window"
    np.testing.assert_array_equal(block.mask[size:, size:], form.mask)
