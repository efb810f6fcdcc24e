"""Texts under a constraint equal those of plain constrained decoding, which Python makes token by token."""

import dataclasses

import numpy as np
import pytest

import jlade
from jlade.config import PLAIN
from tests.constraints.grammars import TREE
from tests.constraints.walk import Walk, automaton
from tests.decoding.observed import logits_of
from tests.tiny import PAPER, tiny_llama


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
