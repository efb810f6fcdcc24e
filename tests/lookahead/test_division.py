import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.lookahead import block as blocks
from jlade.lookahead import division


@given(W=st.integers(0, 9), N=st.integers(2, 6), G=st.integers(0, 7), number=st.integers(1, 9))
def test_shares_are_parts_of_the_block(W, N, G, number):  # noqa: N803
    """Each token is delivered by one device, which has it at its position with all the tokens that it sees."""
    block, shares = blocks.build(W, N, G), division.divide(W, N, G, number)
    size, num_outputs = shares.members.shape[1], shares.outputs.shape[1]
    np.testing.assert_array_equal(np.sum(shares.delivered_tokens < size, axis=0), 1)
    np.testing.assert_array_equal(np.sum(shares.delivered_outputs < num_outputs, axis=0), 1)
    for device in range(number):
        share = division.Share(*(x[device] for x in shares))
        np.testing.assert_array_equal(share.positions, block.positions[share.members])
        for token, place in enumerate(share.delivered_tokens):
            if place < size:
                assert share.members[place] == token
                seen = sorted(share.members[share.mask[place]].tolist())
                assert seen == np.flatnonzero(block.mask[token]).tolist()
        for output, place in enumerate(share.delivered_outputs):
            if place < num_outputs:
                assert share.rows[place] == output
                assert share.delivered_tokens[block.outputs[output]] == share.outputs[place]


@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [(15, 5, 15), (120, 5, 120), (7, 2, 7), (0, 5, 10), (10, 4, 0)])
def test_no_share_is_larger_than_needed(sizes, number):
    """At most as many tokens as columns and candidates in equal numbers for all devices would take."""
    window, ngram, guesses = sizes
    columns, candidates = -(-window // number), -(-guesses // number)
    equal = max(1, window + (ngram - 2) * columns) + (ngram - 1) * candidates
    assert division.divide(*sizes, number).members.shape[1] <= equal
    if number == 1:
        assert division.divide(*sizes, 1).members.shape[1] == len(blocks.build(*sizes).positions)
