"""Prompts that rows read in the steps of the others leave the state of `prefill`, and the texts of `generate`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.decoding import prefill
from tests import own_caches
from tests.decoding.copies import copies_in_loops
from tests.tiny import PAPER, RECURRENT, slow, tiny_llama

CHANCE = np.random.default_rng(0)
PROMPTS = [CHANCE.integers(13, size=size).tolist() for size in (40, 3, 1, 23)]
SETTINGS = {
    "plain": None,
    "paper": PAPER,
    "from prompt": LookaheadConfig.paper(4, 4, 3, pool_from_prompt=True),
    "tree": LookaheadConfig.tree(7),
    "adaptive": LookaheadConfig.tree(7, relative_step_time=1.5),
    "chain": LookaheadConfig.jacobi(5),
}
MODELS = {
    "full": tiny_llama(3),
    "window": tiny_llama(3, sliding_windows=(5, None)),  # a ring of 8 tokens
    "recurrent": tiny_llama(2, **RECURRENT | {"num_layers": 3}),
    "own cache": own_caches.params(),
}
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.9),
    SamplingConfig(repetition_penalty=1.4),
    SamplingConfig(),
]


def prepare(model, setting, prompts=PROMPTS, **options):
    decoder = own_caches.Recurrent() if model == "own cache" else None
    options = {"max_new_tokens": 9, "eos_ids": (), "decoder": decoder, "sampling": SAMPLINGS[: len(prompts)]} | options
    return jlade.prepare(MODELS[model], prompts, lookahead=SETTINGS[setting], **options)


def unread(params, inputs, config):
    """Returns the state of rows that have read nothing."""
    number, capacity = inputs.prompts.shape
    states = prefill.for_each(config.sources.readers.empty(), number)
    prefix = jlade.Prefix(config.decoder.init_cache(params, number, capacity), states)
    return prefill.unread(jlade.start(prefix, inputs, config))


def rows_of(state, index):
    """Returns the arrays of a row that later steps depend on."""
    arrays = state.tokens, state.num_tokens, state.num_steps, state.done, state.memory, state.window, state.counts
    return [np.asarray(array)[index] for array in jax.tree.leaves(arrays)]


def equal_rows(state, other, index):
    for got, expected in zip(rows_of(state, index), rows_of(other, index), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        slow("full", "paper"),
        ("full", "adaptive"),
        slow("window", "tree"),
        ("recurrent", "paper"),
        slow("full", "plain"),
        slow("full", "from prompt"),
        slow("full", "chain"),
        slow("own cache", "paper"),
        slow("window", "adaptive"),
        slow("recurrent", "adaptive"),
    ],
)
def test_a_row_that_has_read_is_that_of_prefill(model, setting):
    """Whatever the other rows do meanwhile; and the texts of all are those of `generate`."""
    params, (inputs, config) = MODELS[model], prepare(model, setting)
    expected = jlade.start(jlade.prefill(params, inputs, config), inputs, config)
    state, left = unread(params, inputs, config), dict(enumerate(inputs.lengths.tolist()))
    seen = 0
    while np.any(state.num_tokens < inputs.lengths):
        state = jlade.run_steps(params, state, config, until=inputs.lengths)
        for index, length in list(left.items()):
            if state.num_tokens[index] == length and state.num_steps[index] == 0:
                equal_rows(state, expected, index)
                del left[index]
                seen += 1
    assert seen >= len(PROMPTS) - 1, "but for a prompt of one token, which has read it before"
    state = jlade.run_steps(params, state, config)
    alone = jlade.decode(params, inputs, config)
    for index, length in enumerate(alone.num_tokens.tolist()):
        assert state.tokens[index, :length].tolist() == alone.tokens[index, :length].tolist()
        assert state.num_tokens[index] == length
        assert np.sum(state.info.accepted[index]) == length - inputs.lengths[index]


def test_reading_stops_where_it_is_told_to():
    """The row stays as it is until it may go on; the others make their steps."""
    params, (inputs, config) = MODELS["full"], prepare("full", "paper", PROMPTS[:2])
    until = jnp.array([20, 3], jnp.int32)
    state = unread(params, inputs, config)
    while state.num_tokens[0] < 20:
        state = jlade.run_steps(params, state, config, until=until)
    for _ in range(2):
        before = state.num_steps[1]
        state = jlade.run_steps(params, state, config, 2, until=until)
        assert (state.num_tokens[0], state.num_steps[0]) == (20, 0)
        assert state.num_steps[1] == before + 2
    while not np.all(state.done):
        state = jlade.run_steps(params, state, config, until=inputs.lengths)
    alone = jlade.decode(params, inputs, config)
    for index, length in enumerate(alone.num_tokens.tolist()):
        assert state.tokens[index, :length].tolist() == alone.tokens[index, :length].tolist()


def test_a_row_that_is_done_reads_nothing():
    params, (inputs, config) = MODELS["full"], prepare("full", "paper", PROMPTS[:2])
    state = dataclasses.replace(unread(params, inputs, config), done=jnp.array([True, False]))
    state = jlade.run_steps(params, state, config, 1, until=inputs.lengths)
    assert state.num_tokens.tolist() == [1, 3]
    assert state.cache.length.tolist() == [0, 2]


@pytest.mark.slow
def test_a_mesh_divides_rows_that_read_and_heads():
    params, (inputs, config) = MODELS["full"], prepare("full", "tree", mesh=jlade.make_mesh(data=2, model=2))
    alone = jlade.decode(params, *prepare("full", "tree"))
    params = jax.device_put(params)
    read = jlade.prefill(params, dataclasses.replace(inputs, lengths=np.ones_like(inputs.lengths)), config)
    state = prefill.unread(jlade.start(read, inputs, config))
    while not np.all(state.done):
        state = jlade.run_steps(params, state, config, until=inputs.lengths)
    for index, length in enumerate(alone.num_tokens.tolist()):
        assert state.tokens[index, :length].tolist() == alone.tokens[index, :length].tolist()


def test_devices_that_divide_a_block_read_no_prompts():
    inputs, config = prepare("full", "paper", PROMPTS[:1], mesh=jlade.make_mesh(lookahead=2))
    state = jlade.start(jlade.prefill(MODELS["full"], inputs, config), inputs, config)
    with pytest.raises(ValueError, match="until must be None on a mesh with an axis lookahead"):
        jlade.run_steps(MODELS["full"], state, config, until=inputs.lengths)


def test_no_loop_copies_the_cache():
    params = tiny_llama(3, max_positions=512)
    inputs, config = jlade.prepare(params, [[1]] * 3, lookahead=SETTINGS["adaptive"], max_new_tokens=500)
    cache = params.decoder.init_cache(params, 3, 512)

    def decode(params, cache, inputs):
        prefix = jlade.Prefix(cache, prefill.for_each(config.sources.readers.empty(), 3))
        state = prefill.unread(jlade.start(prefix, inputs, config))
        return jlade.run_steps(params, state, config, until=inputs.lengths)

    text = jax.jit(decode).lower(params, cache, inputs).compile().as_text()
    assert copies_in_loops(text, frozenset({cache.keys[0].size})) == []
