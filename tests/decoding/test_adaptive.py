"""Decodes of adaptive width: the text of plain decoding, in steps of several widths."""

import dataclasses
import functools

import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig
from jlade.lookahead import adaptive
from tests.lookahead.test_adaptive import levels_of
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow, tiny_llama


@pytest.mark.parametrize("lookahead", [PAPER, slow(LookaheadConfig.paper(0, 3, 1))], ids=str)
def test_an_adaptive_decode_gives_the_same_text_in_steps_of_several_widths(lookahead):
    """A step that costs 9 plain ones never pays, so it is tried, left for the narrower ones, and tried again."""
    generate = functools.partial(jlade.generate, tiny_llama(2, max_positions=300), [1, 2, 3], max_new_tokens=200)
    plain, wide = generate(lookahead=None), generate(lookahead=lookahead)
    never_pays, always_pays = (
        generate(lookahead=dataclasses.replace(lookahead, relative_step_time=cost)) for cost in (9.0, 0.1)
    )
    for out in (wide, never_pays, always_pays):
        assert_same_texts(out, plain)
    np.testing.assert_array_equal(always_pays.accepted, wide.accepted)

    accepted = never_pays.accepted[0]
    levels = levels_of(
        accepted.tolist(), adaptive.costs(dataclasses.replace(lookahead, relative_step_time=9.0)).tolist()
    )
    assert levels.count(0) > adaptive.TRIAL, "the full width should be tried again"
    assert all(accepted[np.array(levels) == max(levels)] == 1), "the narrowest level is plain decoding"
    np.testing.assert_array_equal(accepted[: adaptive.TRIAL], wide.accepted[0, : adaptive.TRIAL])


@pytest.mark.slow
def test_an_adaptive_decode_with_a_tree_falls_back_to_plain_steps_that_learn():
    generate = functools.partial(jlade.generate, tiny_llama(2, max_positions=300), [1, 2, 3], max_new_tokens=200)
    lookahead = LookaheadConfig.tree(20, ngrams=NGramConfig(2, 3, 3))
    plain, wide = generate(lookahead=None), generate(lookahead=lookahead)
    slow, free = (generate(lookahead=dataclasses.replace(lookahead, relative_step_time=cost)) for cost in (40.0, 0.1))
    for out in (wide, slow, free):
        assert_same_texts(out, plain)
    np.testing.assert_array_equal(free.accepted, wide.accepted)
    of_narrow = 2 * adaptive.TRIAL  # steps at full width and with the narrow tree
    np.testing.assert_array_equal(slow.accepted[0, : adaptive.TRIAL], wide.accepted[0, : adaptive.TRIAL])
    assert all(slow.accepted[0, of_narrow : of_narrow + adaptive.FIRST_WAIT] == 1), "then plain decoding"
    assert slow.steps > wide.steps


@pytest.mark.slow
def test_a_tree_without_a_window_is_as_wide_as_its_forecast_says():
    batch = [[1, 2, 3], [5], [4, 4, 4, 4]]
    generate = functools.partial(jlade.generate, tiny_llama(2, max_positions=300), batch, max_new_tokens=150)
    lookahead = LookaheadConfig.tree(7, sources=("suffix", "recycled"))
    plain, wide = generate(lookahead=None), generate(lookahead=lookahead, with_statistics=True)
    free, fair, slow = (
        generate(lookahead=dataclasses.replace(lookahead, relative_step_time=cost), with_statistics=True)
        for cost in (0.1, 3.0, 100.0)
    )
    for out in (wide, free, fair, slow):
        assert_same_texts(out, plain)
    np.testing.assert_array_equal(free.accepted, wide.accepted)
    drafted = [set(out.statistics.num_drafted[0, 1 : out.steps[0]].tolist()) for out in (free, fair, slow)]
    assert max(drafted[0]) == 7
    assert drafted[1] & {1, 3}, "steps of several widths"
    assert drafted[2] == {0}
    assert all(wide.steps <= fair.steps)
