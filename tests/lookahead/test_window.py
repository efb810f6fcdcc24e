import jax
import jax.numpy as jnp
import pytest

from jlade.lookahead import window


@pytest.mark.parametrize(("window_size", "ngram_size"), [(0, 5), (1, 4), (5, 2), (6, 5)])
def test_start_draws_from_the_prompt_alone(window_size, ngram_size):
    tokens = jnp.array([3, 1, 4, 1, 5, -1, -1, -1])
    drawn = window.start(window.draw(jax.random.key(0), tokens, jnp.int32(5), 64), window_size, ngram_size)
    assert drawn.shape == (ngram_size - 1, window_size)
    assert set(drawn.reshape(-1).tolist()) <= {3, 1, 4, 5}


def test_start_depends_on_the_key():
    tokens = jnp.arange(100)
    first, second = (window.draw(jax.random.key(i), tokens, jnp.int32(100), 60).tolist() for i in range(2))
    assert first != second


def test_windows_of_all_sizes_are_the_beginning_of_one_draw():
    """The tokens are those of a draw of the window's own size, as long as the generator draws element by element."""
    tokens, key = jnp.arange(100), jax.random.key(3)
    drawn = window.draw(key, tokens, jnp.int32(100), 4096)
    for window_size, ngram_size in ((15, 5), (1, 4), (512, 9)):
        own = jax.random.randint(key, (ngram_size - 1, window_size), 0, 100, jnp.int32)
        assert window.start(drawn, window_size, ngram_size).tolist() == own.tolist()


def test_ngrams_are_columns_closed_by_the_new_tokens():
    grid = jnp.array([[-9, 11, 12], [20, 21, 22], [30, 31, 32]])
    found = window.ngrams(grid, jnp.int32(7), jnp.array([40, 41, 42]))
    assert found.tolist() == [[7, 20, 30, 40], [11, 21, 31, 41], [12, 22, 32, 42]]
    pairs = window.ngrams(grid[:1], jnp.int32(7), jnp.array([40, 41, 42]))
    assert pairs.tolist() == [[7, 40], [11, 41], [12, 42]]


def test_advance_drops_the_oldest_row():
    grid = jnp.array([[1, 2], [3, 4], [5, 6]])
    assert window.advance(grid, jnp.array([7, 8])).tolist() == [[3, 4], [5, 6], [7, 8]]
