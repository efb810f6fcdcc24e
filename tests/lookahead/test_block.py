"""The block's order, positions and mask, against the table they come from."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.config import LookaheadConfig
from jlade.drafts.tree import TreeShape
from jlade.lookahead import block as blocks

settings = st.tuples(st.integers(0, 7), st.integers(2, 6), st.integers(0, 6))


def build(window_size, ngram_size, guess_set_size):
    return blocks.build(window_size, ngram_size, TreeShape.chains(guess_set_size, ngram_size - 1))


def table(window_size, ngram_size, guess_set_size):
    """The parts of a block in order: a name, a position, and the names of what it sees besides itself and `cur`."""
    rows = [("cur", 0, set())]
    row0 = [("r", 0, j) for j in range(window_size - 1)]
    rows += [(row0[j], 1 + j, set(row0[:j])) for j in range(len(row0))]
    for k in range(1, ngram_size - 1):
        for i in range(window_size):
            column = {("r", m, i) for m in range(1, k)}
            rows.append((("r", k, i), k + i, set(row0[:i]) | column))
    for g in range(guess_set_size):
        for d in range(ngram_size - 1):
            rows.append((("c", g, d), 1 + d, {("c", g, e) for e in range(d)}))
    return rows


@given(settings)
def test_equals_the_table(setting):
    block, rows = build(*setting), table(*setting)
    names = [name for name, _, _ in rows]
    assert block.positions.tolist() == [position for _, position, _ in rows]
    for visible, (name, _, others) in zip(block.mask, rows, strict=True):
        assert {names[i] for i in np.flatnonzero(visible)} == {"cur", name} | others


@given(settings)
def test_every_token_sees_one_text(setting):
    block = build(*setting)
    for visible, position in zip(block.mask, block.positions, strict=True):
        assert sorted(block.positions[visible]) == list(range(position + 1))


@given(settings)
def test_sizes(setting):
    window_size, ngram_size, guess_set_size = setting
    block = build(*setting)
    config = LookaheadConfig.paper(*setting)
    assert len(block.positions) == config.block_size
    if window_size:
        assert config.block_size == (ngram_size - 1) * (window_size + guess_set_size)
    else:
        assert config.block_size == 1 + guess_set_size * (ngram_size - 1)
    assert len(block.outputs) == 1 + window_size + guess_set_size * (ngram_size - 1)
    assert block.first_draft + config.num_drafted == len(block.positions)


def test_tokens_are_laid_out_in_the_order_of_the_table():
    current, window = jnp.int32(7), jnp.array([[-9, 11, 12], [20, 21, 22], [30, 31, 32]])
    laid_out = blocks.tokens(current, window, jnp.array([40, 41, 42, 50, 51, 52]))
    assert laid_out.tolist() == [7, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42, 50, 51, 52]
    block = build(3, 4, 2)
    assert laid_out[block.outputs].tolist() == [7, 30, 31, 32, 40, 41, 42, 50, 51, 52]
    assert laid_out[block.first_draft :].tolist() == [40, 41, 42, 50, 51, 52]


def test_a_cached_block_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        blocks.window(3, 4).mask[0, 0] = False
