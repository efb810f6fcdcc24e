"""Recurrent layers in one pass over a tree against the delta rule, token by token along each path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.drafts.tree import TreeShape
from jlade.lookahead import block as blocks
from jlade.models import channel_delta_rule as channel_rules
from jlade.models import delta_rule as rules
from jlade.models.layers import recurrent
from jlade.models.layers.recurrent import RecurrentBlock, RecurrentState
from tests.tiny import slow

GROUPS, HEADS, KEY_SIZE, VALUE_SIZE, TAPS = 2, 4, 8, 6, 4
delta_rule = jax.jit(rules.delta_rule)
channel_delta_rule = jax.jit(channel_rules.channel_delta_rule, static_argnames="is_chain")


def random_mask(rng, size):
    """Returns the mask of a random tree, each of whose tokens continues an earlier one or the text."""
    mask = np.eye(size, dtype=bool)
    for token in range(1, size):
        if (parent := int(rng.integers(-1, token))) >= 0:
            mask[token] |= mask[parent]
    return mask


def arrays(rng, batch_size, size, slowest=0.0):
    """Returns random arguments of `delta_rule` but for the mask, with decays that may all be near `slowest`."""
    queries, keys = rng.normal(size=(2, batch_size, size, GROUPS, KEY_SIZE))
    values = rng.normal(size=(batch_size, size, HEADS, VALUE_SIZE))
    beta = rng.uniform(size=(batch_size, size, HEADS))
    decay = slowest - 0.3 * rng.exponential(size=(batch_size, size, HEADS))
    memory = rng.normal(size=(batch_size, GROUPS, KEY_SIZE, HEADS // GROUPS * VALUE_SIZE))
    return queries, keys / np.linalg.norm(keys, axis=-1, keepdims=True), values, beta, decay, memory


def one_by_one(queries, keys, values, beta, decay, memory, path):
    """Returns output and state of one sequence after the tokens of a path, with `beta` None for Mamba-2."""
    memory = np.moveaxis(memory.reshape(GROUPS, KEY_SIZE, -1, VALUE_SIZE), 2, 1).reshape(HEADS, KEY_SIZE, -1).copy()
    output, groups = None, np.arange(HEADS) * GROUPS // HEADS
    for t in path:
        memory *= np.exp(decay[t])[:, None, None]
        update = values[t]
        if beta is not None:
            update = beta[t][:, None] * (update - np.einsum("hd,hdv->hv", keys[t, groups], memory))
        memory += np.einsum("hd,hv->hdv", keys[t, groups], update)
        output = np.einsum("hd,hdv->hv", queries[t, groups], memory)
    by_group = np.moveaxis(memory.reshape(GROUPS, -1, KEY_SIZE, VALUE_SIZE), 1, 2)
    return output, by_group.reshape(GROUPS, KEY_SIZE, -1)


def channel_arrays(rng, size):
    """Returns random arguments of `channel_delta_rule` for two sequences, of whose channels some fade at once."""
    queries, _, values, beta, _, memory = arrays(rng, 2, size)
    keys = rng.normal(size=(2, size, HEADS, KEY_SIZE))
    decay = -rng.exponential(0.3, size=keys.shape) * np.where(rng.uniform(size=keys.shape) < 0.2, 100, 1)
    memory = np.moveaxis(memory.reshape(2, GROUPS, KEY_SIZE, -1, VALUE_SIZE), 2, 3).reshape(2, HEADS, KEY_SIZE, -1)
    return (
        np.repeat(queries, 2, axis=2),
        keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        values,
        beta,
        decay,
        memory,
    )


def one_by_one_of_channels(queries, keys, values, beta, decay, memory, path):
    """Returns `one_by_one` for decays of channels."""
    memory = memory.copy()
    for t in path:
        memory *= np.exp(decay[t])[..., None]
        update = beta[t][:, None] * (values[t] - np.einsum("hd,hdv->hv", keys[t], memory))
        memory += np.einsum("hd,hv->hdv", keys[t], update)
        output = np.einsum("hd,hdv->hv", queries[t], memory)
    return output, memory


def float32(values):
    return [None if x is None else jnp.asarray(x, jnp.float32) for x in values]


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "state_space"])
@pytest.mark.parametrize("size", [1, 2, 31, 40, 70])
def test_every_token_of_a_random_tree(size, corrects):
    rng = np.random.default_rng(size)
    given, masks = list(arrays(rng, 2, size)), np.stack([random_mask(rng, size) for _ in range(2)])
    given[3] = given[3] if corrects else None
    outputs, updates, decays = delta_rule(*float32(given), masks)
    for i in range(2):
        own = [None if x is None else x[i] for x in given]
        for token in range(size):
            path = np.flatnonzero(masks[i, token])
            expected, memory = one_by_one(*own, path)
            np.testing.assert_allclose(outputs[i, token], expected, atol=2e-5)
            if token % 7 == 0:
                _check_commit(given, updates, decays, i, path, memory)


@pytest.mark.parametrize(("size", "is_chain"), [(1, False), (40, False), (1, True), (40, True), slow(64, True)])
def test_every_token_of_a_random_tree_with_decays_of_channels(size, is_chain):
    rng = np.random.default_rng(size)
    given = channel_arrays(rng, size)
    masks = np.stack([np.tri(size, dtype=bool) if is_chain else random_mask(rng, size) for _ in range(2)])
    outputs, updates = channel_delta_rule(*float32(given), masks, is_chain=is_chain)
    decays = jnp.asarray(given[4], jnp.float32)
    for i in range(2):
        for token in range(size):
            path = np.flatnonzero(masks[i, token])
            expected, memory = one_by_one_of_channels(*(x[i] for x in given), path)
            np.testing.assert_allclose(outputs[i, token], expected, atol=1e-5 if is_chain else 2e-4)
            if token % 20 == 0:
                _check_commit(given, updates, decays, i, path, memory)


def _check_commit(given, updates, decays, sequence, path, expected):
    """Checks the state after a path of one of two sequences, of which the other accepts nothing."""
    keys, memory = float32([given[1], given[5]])
    rng = np.random.default_rng(len(path))
    before, inputs = rng.normal(size=(2, TAPS - 1, 5)), rng.normal(size=(2, keys.shape[1], 5))
    indices = np.zeros((2, len(path) + 2), np.int32)
    indices[sequence, : len(path)] = path
    number = np.zeros(2, np.int32)
    number[sequence] = len(path)
    state = RecurrentState(memory, jnp.asarray(before, jnp.float32))
    kept = RecurrentBlock(jnp.asarray(inputs, jnp.float32), keys, updates, decays)
    after = recurrent.commit(state, kept, indices, number)
    np.testing.assert_allclose(after.memory[sequence], expected, atol=2e-5)
    last = np.concatenate([before[sequence], inputs[sequence, path]])[1 - TAPS :]
    np.testing.assert_allclose(after.inputs[sequence], last, rtol=1e-6)
    np.testing.assert_array_equal(after.memory[1 - sequence], memory[1 - sequence])
    np.testing.assert_array_equal(after.inputs[1 - sequence], state.inputs[1 - sequence])


def test_the_block_of_a_step():
    """The window is a tree as well: a column hangs on row 0."""
    layout, rng = blocks.build(4, 4, TreeShape.chains(3, 3)), np.random.default_rng(0)
    given = arrays(rng, 1, len(layout.positions))
    outputs, *_ = delta_rule(*float32(given), layout.mask[None])
    own = [x[0] for x in given]
    for token, sees in enumerate(layout.mask):
        expected, _ = one_by_one(*own, np.flatnonzero(sees))
        np.testing.assert_allclose(outputs[0, token], expected, atol=2e-5)


def test_a_text_that_repeats_one_token_without_decay():
    """Keys are equal, and nothing fades: a sum of powers of the keys' products would lose all digits."""
    size, rng = 120, np.random.default_rng(0)
    queries, keys, values, beta, _, memory = arrays(rng, 1, size)
    keys[:], beta[:], decay = keys[:, :1], 0.999, np.full((1, size, HEADS), -1e-4)
    given = queries, keys, values, beta, decay, memory
    outputs, *_ = delta_rule(*float32(given), np.tri(size, dtype=bool)[None])
    own = [x[0] for x in given]
    for token in (0, 30, 63, size - 1):
        expected, _ = one_by_one(*own, range(token + 1))
        np.testing.assert_allclose(outputs[0, token], expected, atol=2e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_the_taps_of_a_token_are_its_own_last_tokens(batched):
    rng = np.random.default_rng(3)
    masks = np.stack([random_mask(rng, 12) for _ in range(2)])
    tree = recurrent.ancestry(masks if batched else masks[0], TAPS)
    for sees, taps in zip(masks, tree.taps, strict=False):
        for token in range(12):
            text = [*range(TAPS - 1), *(TAPS - 1 + np.flatnonzero(sees[token]))]
            assert taps[token].tolist() == text[-TAPS:]


def test_a_state_without_memory_is_the_last_inputs():
    rng = np.random.default_rng(0)
    before, inputs = (jnp.asarray(rng.normal(size=(2, size, 5)), jnp.float32) for size in (TAPS - 1, 6))
    indices, number = np.array([[0, 2, 5], [1, 1, 1]]), np.array([3, 0])
    after = recurrent.commit(RecurrentState(None, before), RecurrentBlock(inputs), indices, number)
    assert after.memory is None
    np.testing.assert_array_equal(after.inputs, np.stack([inputs[0, [0, 2, 5]], before[1]]))


def test_a_rejected_token_that_is_not_finite_does_not_reach_the_state():
    given = arrays(np.random.default_rng(0), 1, 4)
    keys, memory = float32([given[1], given[5]])
    _, updates, decays = delta_rule(*float32(given), np.tri(4, dtype=bool)[None])
    state, inputs = RecurrentState(memory, jnp.zeros((1, TAPS - 1, 5))), jnp.ones((1, 4, 5))
    indices, number = np.arange(4)[None], np.array([2])
    expected = recurrent.commit(state, RecurrentBlock(inputs, keys, updates, decays), indices, number)
    broken = (x.at[:, 2:].set(jnp.nan) for x in (inputs, keys, updates, decays))
    found = recurrent.commit(state, RecurrentBlock(*broken), indices, number)
    np.testing.assert_array_equal(found.memory, expected.memory)
