"""Commit, in its forms for TPUs, GPUs and other devices, against a loop over single entries."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.models import base
from tests.models.pages import in_pages

WAYS = {"tpu": base.write_slices, "gpu": base.scatter_several, "default": base.scatter}
FORMS = {name: jax.jit(form, static_argnames="kinds") for name, form in WAYS.items()}
KV_HEADS, HEAD_DIM, BLOCK = 2, 3, 6
CASES = {  # entries, lengths, indices, num_accepted
    "one sequence": (9, [4], [[0, 3, 5]], [2]),
    "nothing accepted": (9, [4], [[0, 3, 5]], [0]),
    "different lengths": (9, [0, 7, 3], [[0, 4, 5], [0, 1, 2], [5, 5, 0]], [3, 2, 0]),
    "a single token": (9, [4, 8, 9], [[3], [2], [5]], [1, 1, 0]),
    "the last entries": (9, [6], [[0, 3, 5]], [3]),
    "fewer entries left than chosen": (9, [8, 9, 7], [[0, 3, 5, 1], [0, 2, 4, 1], [0, 1, 2, 3]], [1, 0, 2]),
    "fewer entries than chosen": (3, [0, 2], [[0, 3, 5, 1], [4, 3, 5, 1]], [3, 1]),
}


OF_RINGS = {
    "a ring that is not full": (9, [4], [[0, 3, 5]], [2]),
    "round the end": (4, [3, 6, 8, 29], [[0, 3, 5], [1, 2, 3], [4, 0, 1], [2, 2, 1]], [3, 2, 0, 3]),
    "as many tokens as entries": (3, [0, 7, 8], [[0, 3, 5], [5, 2, 3], [4, 0, 1]], [3, 3, 2]),
    "more tokens than entries": (
        2,
        [0, 5, 6, 1],
        [[0, 3, 5, 1], [5, 2, 3, 4], [4, 0, 1, 2], [1, 2, 3, 4]],
        [4, 3, 0, 1],
    ),
    "a single entry": (1, [0, 5], [[0, 3, 5], [5, 2, 3]], [3, 0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [*CASES, *OF_RINGS])
def test_commit_writes_the_accepted_tokens_and_nothing_else(case, form):
    kinds, *arguments = make(*(CASES | OF_RINGS)[case], is_ring=case in OF_RINGS)
    assert_equal(FORMS[form](*arguments, kinds=kinds), plain_commit(*arguments))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [2, 4, 12])
@pytest.mark.parametrize("case", CASES)
def test_commit_to_pages(case, size, form):
    """Pages that lie anywhere hold what the entries of each sequence do; pages of no sequence stay as they are."""
    entries, lengths, *rest = CASES[case]
    number = -(-entries // size)
    kinds, layers, blocks, *arguments = make(number * size, lengths, *rest, is_ring=False)
    table = 1 + np.random.default_rng(1).permutation(len(lengths) * number).reshape(len(lengths), number)
    table = table.astype(np.int32)
    pages = jax.tree.map(lambda layer: in_pages(layer, table, size), layers)
    expected = plain_commit(layers, blocks, *arguments)
    kinds = tuple(kind._replace(size=size, is_paged=True) for kind in kinds)
    written = FORMS[form](pages, blocks, *arguments, table, kinds=kinds)
    for got, before, wanted in zip(*map(jax.tree.leaves, (written, pages, expected)), strict=True):
        np.testing.assert_array_equal(of_rows(got, table), wanted)
        np.testing.assert_array_equal(got[0], before[0])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["fewer entries left than chosen", "round the end"])
def test_commit_under_vmap(form, case):
    kinds, *arguments = make(*(CASES | OF_RINGS)[case], is_ring=case in OF_RINGS)
    run = jax.vmap(functools.partial(FORMS[form], kinds=kinds))
    in_ones = run(*jax.tree.map(lambda x: x[:, None], arguments))
    assert_equal(jax.tree.map(lambda x: x[:, 0], in_ones), plain_commit(*arguments))


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_different_sizes(form):
    """A ring of 4 entries, and a layer with room for all tokens."""
    ring, whole = (make(size, [7, 2], [[0, 3, 5], [1, 2, 4]], [3, 1], size == 4) for size in (4, 12))
    kinds, layers, blocks, *rest = ring
    together = ((layers[0][0], whole[1][0][0]), (layers[1][0], whole[1][1][0]))
    written = FORMS[form](together, blocks, *rest, kinds=(kinds[0], whole[0][0]))
    assert_equal(written, plain_commit(together, blocks, *rest))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entries", [8, 10])
@pytest.mark.parametrize("is_ring", [False, True])
def test_bytes_and_their_scales(form, entries, is_ring, monkeypatch):
    """In tiles of 4 entries where there are whole ones."""
    monkeypatch.setattr(base, "TILE", 4)
    lengths = [0, 3, 5, 6 if not is_ring else 29]
    indices = [[0, 3, 5], [1, 2, 3], [4, 0, 1], [5, 5, 2]]
    kinds, layers, blocks, *rest = make(entries, lengths, indices, [3, 3, 3, 2], is_ring)

    def with_scales(arrays):
        """Returns keys and values as bytes, and scales for both."""
        return (*jax.tree.map(lambda x: (99 * x).astype(jnp.int8), arrays), *jax.tree.map(lambda x: x[..., 0], arrays))

    layers, blocks = with_scales(layers), with_scales(blocks)
    run = WAYS[form]
    if entries == 8 and not is_ring:  # in pages, the same
        table = np.arange(1, 9, dtype=np.int32).reshape(4, 2)[:, ::-1]
        paged = tuple(kind._replace(size=4, is_paged=True) for kind in kinds)
        pages = jax.tree.map(lambda layer: in_pages(layer, table, 4), layers)
        written = jax.jit(functools.partial(run, kinds=paged))(pages, blocks, *rest, table)
        assert_equal([of_rows(x, table) for x in jax.tree.leaves(written)], plain_commit(layers, blocks, *rest))
    written = jax.jit(functools.partial(run, kinds=kinds))(layers, blocks, *rest)
    assert_equal(written, plain_commit(layers, blocks, *rest))


@hypothesis.given(st.data())
def test_all_forms_agree_on_rings(data):
    size, num_chosen = data.draw(st.sampled_from([(1, 3), (3, 7), (5, 5), (9, 2)]))  # few programs
    lengths, accepted = (data.draw(st.lists(st.integers(0, most), min_size=3, max_size=3)) for most in (40, num_chosen))
    indices = [data.draw(st.permutations(range(BLOCK + 1)))[:num_chosen] for _ in lengths]
    kinds, *arguments = make(size, lengths, np.minimum(indices, BLOCK - 1), accepted, is_ring=True)
    expected = plain_commit(*arguments)
    for form in FORMS.values():
        assert_equal(form(*arguments, kinds=kinds), expected)


def test_a_ring_has_the_entries_that_its_window_needs(monkeypatch):
    monkeypatch.setattr(base, "MULTIPLE", 128)
    expected = {None: 4096, 1: 128, 128: 128, 129: 256, 2047: 2048, 5000: 4096}
    assert {window: base.num_entries(window, 4096) for window in expected} == expected
    assert base.num_entries(1024, 100) == 100


def make(entries, lengths, indices, num_accepted, is_ring):
    """Returns the arguments of a form, for two layers of keys and values that hold different numbers everywhere."""
    rng, batch_size = np.random.default_rng(0), len(lengths)

    def arrays(*shape):
        return tuple(tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)) for _ in range(2))

    layers = arrays(batch_size, KV_HEADS, entries, HEAD_DIM)
    blocks = arrays(batch_size, BLOCK, KV_HEADS, HEAD_DIM)
    kinds = 2 * (base.CacheKind(entries, is_ring),)
    return kinds, layers, blocks, *(jnp.asarray(x, jnp.int32) for x in (lengths, indices, num_accepted))


def of_rows(pages, table):
    """Returns the layer [B, KH, S, ...] whose pages a table names."""
    return np.stack([np.concatenate([pages[number] for number in row], axis=1) for row in table])


def assert_equal(written, expected):
    for got, wanted in zip(jax.tree.leaves(written), expected, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def plain_commit(layers, blocks, lengths, indices, num_accepted):
    """Returns the new layers as a list of NumPy arrays, written entry by entry."""
    result = []
    for layer, block in zip(jax.tree.leaves(layers), jax.tree.leaves(blocks), strict=True):
        written = np.array(layer)
        for i, length in enumerate(lengths):
            for j in range(num_accepted[i]):
                written[i, :, (length + j) % written.shape[2]] = block[i, indices[i, j]]
        result.append(written)
    return result
