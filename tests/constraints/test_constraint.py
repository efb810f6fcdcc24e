"""Texts under a constraint equal those of plain constrained decoding, which Python makes token by token."""

import dataclasses
from typing import Annotated

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade.config import PLAIN
from jlade.mesh import SHARED
from tests.constraints.test_grammar import TREE
from tests.decoding.test_decoding import logits_of
from tests.tiny import PAPER, tiny_llama

V = 13


@flax.struct.dataclass
class Walk:
    """An automaton over the tokens: each sequence begins in a state of its own."""

    next_state: Annotated[jax.Array, SHARED]  # [S, V] int32, -1 for tokens that are not allowed
    first: jax.Array  # [B] int32

    def start(self, tokens, length):
        return self.first

    def advance(self, state, token):
        return jnp.maximum(self.next_state[state, token], 0)

    def allowed(self, state):
        return self.next_state[state] >= 0


def automaton(seed, states=5, share=0.4):
    """Some transitions between states; each allows three tokens at least."""
    rng = np.random.default_rng(seed)
    table = np.where(rng.random((states, V)) < share, rng.integers(states, size=(states, V)), -1)
    for row in table:
        row[rng.choice(V, 3, replace=False)] = rng.integers(states, size=3)
    return table.astype(np.int32)


def plainly(seed, prompt, number, table, state):
    """The greedy text in which every token is allowed, without arrays of a step."""
    text = list(prompt)
    for _ in range(number):
        logits = np.where(table[state] >= 0, logits_of(seed)(text), -np.inf)
        text.append(int(np.argmax(logits)))
        state = table[state, text[-1]]
    return text[len(prompt) :]


@pytest.mark.parametrize("lookahead", [PAPER, TREE, PLAIN])
def test_greedy_texts_are_those_of_plain_constrained_decoding(lookahead):
    prompts, number, table = [[1, 2, 3, 1, 2], [5, 4], [7]], 24, automaton(0)
    first = np.array([0, 3, 1], np.int32)
    inputs, config = jlade.prepare(tiny_llama(2), prompts, lookahead=lookahead, max_new_tokens=number, eos_ids=())
    state = jlade.decode(tiny_llama(2), dataclasses.replace(inputs, constraint=Walk(table, first)), config)
    for row, (prompt, begin) in enumerate(zip(prompts, first, strict=True)):
        text = state.tokens[row, len(prompt) : state.num_tokens[row]].tolist()
        assert text == plainly(2, prompt, number, table, begin)
    if lookahead is not PLAIN:
        assert state.num_steps.max() < number, "drafts are accepted"
