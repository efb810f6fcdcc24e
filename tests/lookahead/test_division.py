import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlade.config import LookaheadConfig, NGramConfig
from jlade.drafts.tree import Form, TreeShape
from jlade.lookahead import block as blocks
from jlade.lookahead import division


@st.composite
def trees(draw):
    """The form of a tree whose siblings stand anywhere after their parent, as costs order them; some drafts absent."""
    size = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, place - 1)) for place in range(size)]
    shape = TreeShape(tuple(parents))
    return Form(*(jnp.asarray(x) for x in (np.array(parents, np.int32), shape.depths, shape.mask)))


def check_shares(setting, form, number):
    """Each token is delivered by one device, which has it at its position with all the tokens that it attends to."""
    block = blocks.build(setting.window_size, setting.ngram_size, form)
    share = jax.jit(functools.partial(division.share, setting, form, number))
    shares = [division.Share(*map(np.asarray, share(device=jnp.int32(device)))) for device in range(number)]
    size, num_outputs = len(shares[0].members), len(shares[0].outputs)
    if number > 1:
        assert (size, num_outputs) == division.share_size(setting, number)
    np.testing.assert_array_equal(sum((share.delivered_tokens < size).astype(int) for share in shares), 1)
    np.testing.assert_array_equal(sum((share.delivered_outputs < num_outputs).astype(int) for share in shares), 1)
    for share in shares:
        for token, place in enumerate(share.delivered_tokens):
            if place < size:
                assert share.members[place] == token
                assert share.positions[place] == block.positions[token]
                attended = share.members[share.mask[place]]
                assert sorted(attended.tolist()) == np.flatnonzero(block.mask[token]).tolist()
                np.testing.assert_array_equal(share.positions[share.mask[place]], block.positions[attended])
        for output, place in enumerate(share.delivered_outputs):
            if place < num_outputs:
                assert share.rows[place] == output
                assert share.delivered_tokens[block.outputs[output]] == share.outputs[place]


few = settings(max_examples=30)  # each compiles a program


@pytest.mark.slow
@few
@given(W=st.integers(0, 9), N=st.integers(2, 6), G=st.integers(0, 7), number=st.integers(1, 9))
def test_shares_of_the_paper_are_parts_of_the_block(W, N, G, number):  # noqa: N803
    check_shares(LookaheadConfig.paper(W, N, G), TreeShape.chains(G, N - 1), number)


@pytest.mark.slow
@few
@given(form=trees(), W=st.integers(0, 4), N=st.integers(2, 5), number=st.integers(1, 9))
def test_shares_of_a_tree_are_parts_of_the_block(form, W, N, number):  # noqa: N803
    setting = LookaheadConfig.tree(len(form.parents), ngrams=NGramConfig(W, N, 2))
    check_shares(setting, form, number)


@pytest.mark.parametrize("number", [2, 3, 8])
@pytest.mark.parametrize("sizes", [(15, 5, 15), (120, 5, 120), (7, 2, 7), (0, 5, 10), (10, 4, 0)])
def test_no_share_is_larger_than_needed(sizes, number):
    """At most as many tokens as columns and candidates in equal numbers for all devices would take."""
    window, ngram, guesses = sizes
    columns, candidates = -(-window // number), -(-guesses // number)
    equal = max(1, window + (ngram - 2) * columns) + (ngram - 1) * candidates
    assert division.share_size(LookaheadConfig.paper(*sizes), number)[0] <= equal


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("tree_size", [7, 63, 959])
def test_a_part_of_a_tree_has_its_drafts_and_the_predecessors_of_the_first(tree_size, number):
    setting = LookaheadConfig.tree(tree_size)
    tokens, outputs = division.share_size(setting, number)
    assert tokens <= 1 + -(-tree_size // number) + setting.max_accepted - 2
    assert outputs <= 1 + -(-tree_size // number) + setting.max_accepted - 2


def test_the_largest_shares_of_the_paper():
    """Devices with late columns have fewer drafts."""
    sizes = {sizes: division.share_size(LookaheadConfig.paper(*sizes), 8)[0] for sizes in [(15, 5, 15), (120, 5, 120)]}
    assert sizes == {(15, 5, 15): 21, (120, 5, 120): 160}
