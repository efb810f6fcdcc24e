"""Pages and their holders, most of it without a model."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.decoding.state import DecodeConfig
from jlade.engine.pages import Allocator, PagePool
from tests.tiny import PAPER, tiny_llama


def test_pages_are_free_when_the_last_text_has_dropped_them():
    pages = Allocator(4, 8)
    first = pages.take(3)
    assert (sorted(first), pages.num_free) == ([1, 2, 3], 1)
    assert [pages.missing(first, number) for number in (0, 24, 25, 40)] == [0, 0, 1, 2]
    pages.share(first[:2])
    assert pages.drop(first) == first[2:]
    assert pages.num_free == 2
    with pytest.raises(ValueError, match="3 pages were asked for, and 2 are free"):
        pages.take(3)
    pages.drop(first[:2])
    assert sorted(pages.take(4)) == [1, 2, 3, 4]


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 7)), max_size=60))
def test_any_order_of_events_equals_a_count_of_the_texts_of_each_page(events):
    pages, texts = Allocator(9, 8), []
    for event, choice in events:
        held = collections.Counter(page for text in texts for page in text)
        if event == "take" and choice <= 9 - len(held):
            taken = pages.take(choice)
            assert len(taken) == len(set(taken) - set(held)) == choice
            texts.append(taken)
        elif event == "share" and texts:
            shared = texts[choice % len(texts)][:choice]
            pages.share(shared)
            texts.append(shared)
        elif event == "drop" and texts:
            pages.drop(texts.pop(choice % len(texts)))
        held = {page for text in texts for page in text}
        assert held <= set(range(1, 10))
        assert pages.num_free == 9 - len(held)


def test_a_page_is_cleared_before_another_text_gets_it():
    """A text that ended with NaN has written to a page that is kept up to an earlier token."""
    params = tiny_llama()
    pool, held = PagePool(params, DecodeConfig(params.decoder, PAPER, paged=True), 1, 32, 32), list[int]()
    assert pool.grow(held, 9, 0)
    pool._layers = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), pool.layers)
    kept = pool.keep(held, 3, 0)
    pool.drop(held, 0, is_spoiled=True)
    assert all(np.isnan(pages[held[0]]).all() for pages in jax.tree.leaves(pool.layers)), "it is kept"
    shared = pool.share(kept, 3, 0)
    for pages in jax.tree.leaves(pool.layers):
        assert np.isnan(pages[shared[0], :, :3]).all()
        assert not pages[shared[0], :, 3:].any(), "the copy has nothing behind what is shared"
    pool.drop(kept, 0)
    assert not any(pages[held[0]].any() for pages in jax.tree.leaves(pool.layers))
    pool.drop(shared, 0)
    assert pool.num_free(0) == pool.num_pages
