import numpy as np
import pytest

from jlade import LookaheadConfig
from jlade.config import MAX_BLOCK_SIZE, PLAIN, SMALL_BLOCK


def test_defaults_are_the_papers_setting_for_a_7b_model():
    config = LookaheadConfig()
    assert (config.window_size, config.ngram_size, config.guess_set_size) == (15, 5, 15)
    assert config.block_size == 120
    assert config.max_accepted == 5


def test_named_settings():
    assert (PLAIN.block_size, PLAIN.max_accepted) == (1, 1)
    assert SMALL_BLOCK.block_size < 32


def test_equal_settings_hash_alike_so_that_they_share_a_program():
    assert hash(LookaheadConfig(np.int64(7), 5, 7)) == hash(LookaheadConfig(7, 5, 7))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window_size": -1}, ValueError, "window_size must be at least 0, got -1"),
        ({"ngram_size": 1}, ValueError, "ngram_size must be at least 2, got 1"),
        ({"guess_set_size": -3}, ValueError, "guess_set_size must be at least 0, got -3"),
        ({"window_size": 1.5}, TypeError, "window_size must be an integer of at least 0, got 1.5"),
        ({"ngram_size": True}, TypeError, "ngram_size must be an integer of at least 2, got True"),
        ({"guess_set_size": None}, TypeError, "guess_set_size must be an integer of at least 0, got None"),
        ({"pool_from_prompt": 1}, TypeError, "pool_from_prompt must be True or False, got 1"),
        ({"window_size": 2000}, ValueError, f"window_size=2000.*8060 tokens a step; at most {MAX_BLOCK_SIZE}"),
    ],
)
def test_bad_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LookaheadConfig(**arguments)
