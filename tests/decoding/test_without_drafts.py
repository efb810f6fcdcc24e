"""Sequences for which steps verify no drafts, beside others."""

import dataclasses

import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig
from tests.tiny import PAPER, slow, tiny_llama

PARAMS = tiny_llama(3)
PROMPTS = [[0], [1], [2]]
SETTINGS = {
    "paper": PAPER,
    "tree": LookaheadConfig.tree(7),
    "adaptive": LookaheadConfig.tree(7, relative_step_time=1.1),
}


def decode(lookahead, has_drafts, num_steps):
    options = {"max_new_tokens": 24, "eos_ids": ()}
    inputs, config = jlade.prepare(PARAMS, PROMPTS, lookahead=lookahead, **options)
    inputs = dataclasses.replace(inputs, has_drafts=np.array(has_drafts))
    before = jlade.start(jlade.prefill(PARAMS, inputs, config), inputs, config)
    first = np.array(before.window), None if before.pace is None else np.array(before.pace.level)
    return (
        first,
        jlade.run_steps(PARAMS, before, config, num_steps),
        jlade.generate(PARAMS, PROMPTS, lookahead=None, **options),
    )


@pytest.mark.parametrize("setting", ["paper", "adaptive", slow("tree")])
def test_texts_are_the_same_and_others_keep_their_drafts(setting):
    _, after, expected = decode(SETTINGS[setting], [False, True, False], 24)
    np.testing.assert_array_equal(after.tokens[:, 1:25], expected.tokens)
    drafted = np.sum(after.info.num_drafted, axis=1)
    assert drafted[1] > 0 == drafted[0] == drafted[2]
    steps = np.array(after.num_steps)
    assert steps[1] < 24 == steps[0] == steps[2]


@pytest.mark.parametrize("setting", ["paper", "adaptive"])
def test_steps_are_plain_where_no_sequence_has_drafts(setting):
    (window, level), after, expected = decode(SETTINGS[setting], [False] * 3, 24)
    np.testing.assert_array_equal(after.tokens[:, 1:25], expected.tokens)
    np.testing.assert_array_equal(after.window, window, "wider steps move the window on")
    if after.pace is not None:
        assert after.pace.num_steps.tolist() == [*[0] * (len(after.pace.num_steps) - 1), 24]
        assert after.pace.level == level, "they say nothing about the steps of others"
