import dataclasses
import functools
import json

import numpy as np
import pytest

from jlade import LookaheadConfig, NGramConfig, SamplingConfig, TreeConfig
from jlade.config import MAX_BLOCK_SIZE, MAX_NUMBER, PLAIN, SMALL_BLOCK, SOURCES


def test_the_default_is_a_tree_in_a_block_of_the_papers_size():
    assert LookaheadConfig() == LookaheadConfig.tree(119) == LookaheadConfig(drafts=TreeConfig())
    assert set(LookaheadConfig().reach) == set(SOURCES)
    assert LookaheadConfig().block_size == LookaheadConfig.paper().block_size == 120


def test_defaults_of_the_paper_are_its_setting_for_a_7b_model():
    config = LookaheadConfig.paper()
    assert (config.window_size, config.ngram_size, config.ngrams.guess_set_size) == (15, 5, 15)
    assert config.block_size == 120
    assert config.max_accepted == 5


GIVEN = {
    "verification": "rejection",
    "relative_step_time": 1.5,
    "sources": ("suffix",),
    "ngrams": NGramConfig(0, 4, 5),
    "pool_from_prompt": False,
    "window_draw": "greedy",
    "window_advance": "token",
}


@pytest.mark.parametrize(
    ("make", "of_setting", "of_drafts"),
    [
        (LookaheadConfig.paper, [*GIVEN][:1], [*GIVEN][4:]),
        (functools.partial(LookaheadConfig.tree, 7), [*GIVEN][:2], [*GIVEN][2:4]),
        (LookaheadConfig.jacobi, [*GIVEN][:2], []),
    ],
    ids=["paper", "tree", "jacobi"],
)
def test_every_argument_has_its_place_in_the_setting(make, of_setting, of_drafts):
    usual, setting = make(), make(**{name: GIVEN[name] for name in [*of_setting, *of_drafts]})
    for names, before, after in ((of_setting, usual, setting), (of_drafts, usual.drafts, setting.drafts)):
        assert {name: getattr(after, name) for name in names} == {name: GIVEN[name] for name in names}
        assert all(getattr(before, name) != GIVEN[name] for name in names)


@pytest.mark.parametrize(
    "setting",
    [
        LookaheadConfig(),
        LookaheadConfig.paper(7, 3, 7, window_draw="greedy", verification="rejection"),
        LookaheadConfig.tree(9, sources=("suffix", "chain"), ngrams=NGramConfig(2, 3, 4, pool_from_prompt=False)),
        LookaheadConfig.tree(9, ngrams=NGramConfig(0, 3, 4), relative_step_time=1.5),
    ],
    ids=["tree", "paper", "both", "adaptive"],
)
def test_settings_go_through_json(setting):
    assert LookaheadConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(setting)))) == setting


@pytest.mark.parametrize(
    "setting",
    [PLAIN, LookaheadConfig.paper(0, 3, 1), LookaheadConfig.tree(9, ngrams=NGramConfig(2, 3, 4))],
    ids=["plain", "prompt lookup", "both"],
)
def test_only_a_tree_without_a_window_is_adaptive(setting):
    with pytest.raises(ValueError, match=r"relative_step_time must be None without a tree or with a window.*got 1\.5"):
        dataclasses.replace(setting, relative_step_time=1.5)
    stored = dataclasses.asdict(setting) | {"relative_step_time": 1.5}
    assert LookaheadConfig.from_dict(stored) == setting, "as earlier versions stored it"


def test_a_tree_has_no_ngrams_without_window_and_pool():
    assert LookaheadConfig.tree(9, ngrams=NGramConfig(0, 3, 0)) == LookaheadConfig.tree(9)
    assert LookaheadConfig.tree(9, ngrams=NGramConfig(0, 3, 1)).sources == ("pool", *SOURCES)


def test_named_settings():
    assert (PLAIN.block_size, PLAIN.max_accepted) == (1, 1)
    assert SMALL_BLOCK.block_size < 32


def test_equal_settings_hash_alike_so_that_they_share_a_program():
    assert hash(LookaheadConfig.paper(np.int64(7), 5, 7)) == hash(LookaheadConfig.paper(7, 5, 7))


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
        ({"verification": "typical"}, ValueError, "verification must be one of coupled, rejection, got 'typical'"),
        ({"window_draw": None}, ValueError, "window_draw must be one of coupled, greedy, got None"),
        ({"window_size": 2000}, ValueError, f"window_size=2000.*8060 tokens a step; at most {MAX_BLOCK_SIZE}"),
    ],
)
def test_bad_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LookaheadConfig.paper(**arguments)


def test_sizes_without_their_names_are_refused():
    with pytest.raises(TypeError, match="positional"):
        LookaheadConfig(15, 5, 15)
    with pytest.raises(TypeError, match="drafts must be a TreeConfig or an NGramConfig, got 119"):
        LookaheadConfig(drafts=119)


def test_sampling_settings_hash_by_value():
    assert hash(SamplingConfig(logit_bias={3: 1, 1: 2.0})) == hash(SamplingConfig(logit_bias=((1, 2.0), (3, 1.0))))


def test_a_bias_below_the_least_number_bans_the_token():
    bias = {1: -MAX_NUMBER, 2: -MAX_NUMBER - 1, 3: -1e300}
    assert SamplingConfig(logit_bias=bias).logit_bias == ((1, -1e4), (2, -np.inf), (3, -np.inf))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature must be a number of at least 0, got -0.1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be a number of at least 0, got nan"),
        ({"temperature": None}, TypeError, "temperature must be a number of at least 0, got None"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 2.5}, TypeError, "top_k must be an integer of at least 1, got 2.5"),
        ({"top_p": 0.0}, ValueError, "top_p must be a number above 0, up to 1, got 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p must be a number above 0, up to 1, got 1.1"),
        ({"top_p": "0.9"}, TypeError, "top_p must be a number above 0, up to 1, got '0.9'"),
        ({"min_p": 1.5}, ValueError, "min_p must be a number from 0 to 1, got 1.5"),
        ({"temperature": 1e20}, ValueError, r"temperature must be at most 10000 in size, got 1e"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be a number of at least 1e-4, got 0"),
        ({"repetition_penalty": 1e-38}, ValueError, "repetition_penalty must be a number of at least 1e-4, got 1e-38"),
        ({"presence_penalty": -3e38}, ValueError, r"presence_penalty must be at most 10000 in size, got -3e"),
        ({"presence_penalty": float("inf")}, ValueError, "presence_penalty must be a finite number, got inf"),
        ({"frequency_penalty": True}, TypeError, "frequency_penalty must be a finite number, got True"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "logit_bias must map token ids to numbers, got {-1: 1.0}"),
        ({"logit_bias": {"a": 1.0}}, TypeError, "logit_bias must map token ids to numbers, got {'a': 1.0}"),
        ({"logit_bias": {1: float("inf")}}, ValueError, r"logit_bias must map token ids to numbers up to 10000"),
        ({"logit_bias": {1: float("nan")}}, ValueError, r"logit_bias must map token ids to numbers up to 10000"),
        ({"logit_bias": {1: 10**400}}, ValueError, "logit_bias must map token ids to numbers, got"),
        ({"logit_bias": 5}, TypeError, "logit_bias must map token ids to numbers, got 5"),
    ],
)
def test_bad_sampling_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        SamplingConfig(**arguments)
