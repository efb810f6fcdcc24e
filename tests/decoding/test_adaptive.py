"""Decodes of adaptive width: the text of plain decoding, in steps of several widths."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig
from tests.texts import assert_same_texts
from tests.tiny import PAPER, tiny_llama


def test_costs_need_a_forecast():
    inputs, config = jlade.prepare(tiny_llama(2), [1, 2, 3], lookahead=PAPER, max_new_tokens=4)
    inputs = dataclasses.replace(inputs, costs=np.array([2.0, 1.5, 1.0], np.float32))
    with pytest.raises(ValueError, match=r"Inputs\.costs must be None for a lookahead without a tree or with a window"):
        jlade.start(jlade.prefill(tiny_llama(2), inputs, config), inputs, config)


def test_steps_keep_the_types_of_the_state():
    """With others the second piece of a stream would compile the program of the first one again."""
    params, lookahead = tiny_llama(2), LookaheadConfig.tree(7, relative_step_time=1.4)
    inputs, config = jlade.prepare(params, [1, 2, 3], lookahead=lookahead, max_new_tokens=4)
    before = jax.eval_shape(lambda: jlade.start(jlade.prefill(params, inputs, config), inputs, config))
    after = jax.eval_shape(lambda state: jlade.run_steps(params, state, config), before)
    types = functools.partial(jax.tree.map, lambda shape: (shape.shape, shape.dtype, shape.weak_type))
    assert types(after) == types(before)


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
