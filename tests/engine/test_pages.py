"""Pages and their holders, without a model."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.engine.pages import Allocator


def test_pages_are_free_when_the_last_text_has_dropped_them():
    pages = Allocator(4, 8)
    first = pages.take(3)
    assert (sorted(first), pages.num_free) == ([1, 2, 3], 1)
    assert [pages.missing(first, number) for number in (0, 24, 25, 40)] == [0, 0, 1, 2]
    pages.share(first[:2])
    pages.drop(first)
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
