"""Tables of small blocks against those of one block, and those on a device against those on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.constraints import automaton, blocks, moves, regex
from jlade.constraints.grammar import Tables
from jlade.constraints.tokens import Table
from tests.constraints.expressions import COUNTED, EOS, PATTERNS, TOKENS, TRIE


def table_of(pattern):
    found = automaton.build(regex.parse(pattern), counts=True)
    return Table.of(found, TRIE, [EOS], len(TOKENS), lambda texts: [text[0] for text in texts])


def moves_of(table):
    """Returns the moves of each token in each state [S, V]."""
    return table.blocks.of_states(np.arange(table.num_states))[:, table.class_of_token]


@pytest.mark.parametrize("pattern", [*PATTERNS, *COUNTED])
def test_tables_of_small_blocks_have_the_same_moves(pattern, monkeypatch):
    whole = table_of(pattern)
    monkeypatch.setattr(blocks, "STATES", 2)
    table = table_of(pattern)
    assert len(table.blocks.columns) == -(-table.num_states // 2)
    np.testing.assert_array_equal(moves_of(table), moves_of(whole))
    assert table.num_classes == whole.num_classes
    assert table.shortest() == whole.shortest()


def test_a_device_reads_what_the_host_does(monkeypatch):
    """In all states that a few tokens reach; as one of several tables, whose states begin at 1 there."""
    monkeypatch.setattr(blocks, "STATES", 2)
    table = table_of("([ab]{1,9}c){0,20}d|co+m")
    tables = jax.tree.map(jnp.asarray, Tables.of([table_of("a*b"), table, None]))
    of_table, without = (
        tables.replace(**{name: getattr(tables, name)[i] for name in ("first", "begin", "classes")}) for i in (1, 2)
    )
    states, tokens = np.array([0]), np.arange(len(TOKENS))
    for _ in range(4):
        after = np.array([[table.advance(state, token) for token in tokens] for state in states.tolist()])
        here = jnp.asarray(1 + states, jnp.int32)
        np.testing.assert_array_equal(jax.vmap(of_table.allowed)(here), after >= 0)
        found = of_table.after(here[:, None], jnp.asarray(tokens)[None])
        np.testing.assert_array_equal(found, np.where(after >= 0, 1 + after, -1))
        token, is_certain = of_table.likely(here)
        likely = table.likely[states & moves.STATE]
        np.testing.assert_array_equal(jnp.where(is_certain | (token < 0), token, -2 - token), likely)
        states = np.unique(after[after >= 0])
    assert len(states) > 8
    assert without.allowed(without.start(None, None)).all()
    assert (without.after(jnp.zeros(len(tokens), jnp.int32), jnp.asarray(tokens)) == 0).all()
