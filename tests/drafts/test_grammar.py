"""Drafts along a grammar, against a walk over its table and the recycled logits in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade.constraints.automaton import build, literal, sequence
from jlade.constraints.constraint import guide
from jlade.constraints.grammar import Tables
from jlade.constraints.regex import parse
from jlade.drafts import graded, recycled
from jlade.drafts.grammar import AFTER_PAIR, AFTER_TOKEN, CERTAIN, LIKELY, Grammar
from jlade.drafts.source import Text
from jlade.drafts.tree import NONE
from jlade.generation import constraining, text
from tests.server.json_chat import EOS, TOKENIZER

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
}
VOCAB_SIZE = TOKENIZER.get_vocab_size()


def table_of(grammar):
    return constraining.table_of(grammar, text.token_bytes(TOKENIZER), [EOS], VOCAB_SIZE)


def constraint_of(table):
    """Returns the constraint of one sequence."""
    tables = jax.tree.map(jnp.asarray, Tables.of([table]))
    return tables.replace(**{name: getattr(tables, name)[0] for name in ("first", "begin", "classes")})


def text_of(tokens, guide, table):
    """Returns a text and the state of its recycled logits, None for none."""
    return Text(jnp.asarray(tokens, jnp.int32), jnp.int32(len(tokens)), None, guide, {}, {"recycled": table})


def test_the_shortest_end_is_likely_and_a_single_byte_certain():
    found = build(sequence(literal("ab"), parse("(x{3}|y)z*")))
    texts, num_certain = found.likely(8)
    likely = [(bytes(line[line >= 0].tolist()), number) for line, number in zip(texts, num_certain, strict=True)]
    assert likely[0] == (b"aby", 2)
    assert likely[found.run(b"abx")] == (b"xx", 2)
    assert likely[found.run(b"aby")] == (b"", 0), "it may end here"


def test_tokens_of_likely_texts_are_those_of_the_tokenizer():
    table = table_of(jlade.Grammar.json_schema(SCHEMA))

    def likely_after(begin):
        state = 0
        for token in TOKENIZER.encode(begin).ids:
            state = table.advance(state, token)
        token = int(table.likely[state])
        return (TOKENIZER.decode([token if token >= 0 else -2 - token]), token >= 0) if token != NONE else None

    assert likely_after('{"') == ("name", True)
    assert likely_after('{"na') == ("me", True)
    assert likely_after('{"name') == ('": ', False), "a space may stand after the colon, or none"
    assert likely_after('{"name":') == ('"', False)
    assert likely_after('{"name": "x') == ('"', False)
    assert likely_after('{"name": "x", "size": "s') == ("m", True)
    assert likely_after('{"name": "x", "size": "small"}') is None


def known_after(best):
    """A table with these tokens [V, k] after each token."""
    rows = graded.of(best.astype(np.int32), np.full(best.shape, 0.4))
    return recycled.empty(VOCAB_SIZE).replace(after_token=jnp.tile(rows, (1, 2)))


@pytest.mark.parametrize("seed", range(3))
def test_chains_follow_the_grammar_and_the_recycled_logits(seed):
    rng, table = np.random.default_rng(seed), table_of(jlade.Grammar.json_schema(SCHEMA))
    constraint = constraint_of(table)
    begin = TOKENIZER.encode('{"name').ids
    best = rng.integers(-1, VOCAB_SIZE, (VOCAB_SIZE, recycled.RANKS))
    (best[begin[-1], 0],) = TOKENIZER.encode('"').ids  # accepted, and not the likely token
    known = known_after(best)
    state, at = constraint.first, 0
    for token in begin:
        state, at = constraint.advance(state, token), table.advance(at, token)
    source = Grammar(6)
    shown = text_of(begin, guide(constraint, state), known)
    proposals = source.propose(None, shown, jnp.asarray(source.rates))
    tokens, kinds = proposals.tokens, proposals.kinds
    for chain in range(2):
        here, last, expected = at, begin[-1], []
        for place in range(6):
            likely = int(table.likely[here])
            accepted = [each for each in best[last] if each >= 0 and table.advance(here, each) >= 0]
            if likely < 0 and accepted and not (chain == 1 and place == 0):
                expected.append((accepted[0], AFTER_TOKEN))
            elif likely == NONE:
                break
            else:
                expected.append((likely, CERTAIN) if likely >= 0 else (-2 - likely, LIKELY))
            last = expected[-1][0]
            here = table.advance(here, last)
        got = zip(tokens[6 * chain :].tolist(), kinds[6 * chain :].tolist(), strict=True)
        assert list(got)[: len(expected)] == expected
        assert (tokens[6 * chain + len(expected) : 6 * (chain + 1)] == NONE).all()


def test_pairs_that_are_known_come_before_tokens():
    table = table_of(jlade.Grammar.regex("a[bc]"))
    constraint = constraint_of(table)
    x, a, b, c = (TOKENIZER.encode(each).ids[0] for each in "xabc")
    best = jnp.full((2, recycled.RANKS), NONE).at[:, 0].set(graded.of(jnp.array([c, b]), 0.9))
    known = recycled.update(recycled.empty(VOCAB_SIZE), jnp.array([[x, a], [b, a]]), best, jnp.array([0, 1]))
    state = constraint.advance(constraint.first, a)
    shown = text_of([x, a], guide(constraint, state), known)
    proposals = Grammar(2).propose(None, shown, jnp.zeros(4))
    assert (proposals.tokens[0], proposals.kinds[0]) == (c, AFTER_PAIR)


def test_recycled_logits_are_those_that_the_grammar_accepts():
    rng, table = np.random.default_rng(1), table_of(jlade.Grammar.regex("[a-f]*x|g{5}"))
    constraint = constraint_of(table)
    best = rng.permuted(np.tile(np.arange(VOCAB_SIZE), (VOCAB_SIZE, 1)), axis=1)[:, : recycled.RANKS]
    (g,) = TOKENIZER.encode("g").ids
    best[g] = rng.choice([TOKENIZER.encode(each).ids[0] for each in "abcdefgh"], recycled.RANKS, replace=False)
    known = known_after(best)
    source = recycled.Recycled(VOCAB_SIZE, 40, 4)
    shown = text_of([g], guide(constraint, constraint.first), known)
    proposals = source.propose(known, shown, jnp.asarray(source.rates))
    tokens, lineage = np.asarray(proposals.tokens), np.asarray(proposals.lineage)
    drafted = np.flatnonzero(tokens != NONE)
    for line in lineage[drafted]:
        state = 0
        for token in tokens[line[line < len(tokens)]]:
            state = table.advance(state, int(token))
            assert state >= 0
    assert len(drafted) > recycled.RANKS


def test_without_a_grammar_there_are_no_drafts():
    text = text_of([0, 0], None, None)
    assert (Grammar(3).propose(None, text, jnp.zeros(4)).tokens == NONE).all()
