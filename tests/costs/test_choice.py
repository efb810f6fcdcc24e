"""`lookahead="auto"`, and the files in which it finds what was tuned."""

import dataclasses
import json
import logging
import multiprocessing
import pathlib
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.config import PLAIN, SMALL_BLOCK
from jlade.costs import choice
from jlade.costs.choice import SettingKey
from tests.texts import assert_same_texts
from tests.tiny import tiny_llama

KEY = SettingKey("1 x device (gpu)", "model", 1)
SETTING = LookaheadConfig.paper(2, 3, 2)
STORED = b'{"format": 3, "lookahead": {"drafts": {"size": 1, "ngrams": null}}, "device": "d", "model": "m"'


def key_of(params, batch_size=1):
    return choice.key(params, params.decoder, batch_size)


@pytest.mark.parametrize(
    "setting", [PLAIN, SETTING, LookaheadConfig.tree(9, verification="rejection", relative_step_time=1.5)]
)
def test_what_is_stored_is_loaded(setting, cache_directory):
    assert choice.load(KEY) is None
    choice.save(KEY, SMALL_BLOCK, {"pruned": [1]})
    choice.save(KEY, setting, {"pruned": [2]})
    assert choice.load(KEY).lookahead == setting
    (file,) = (cache_directory / "jlade" / "tuned").iterdir()
    stored = json.loads(file.read_text())
    assert (stored["device"], stored["jax"], stored["pruned"]) == (KEY.device, jax.__version__, [2])


def test_every_device_model_and_batch_size_has_its_own():
    keys = [
        KEY,
        SettingKey("2 x device (gpu)", "model", 1),
        SettingKey(KEY.device, "other", 1),
        SettingKey(KEY.device, "model", 2),
    ]
    for window, key in enumerate(keys):
        choice.save(key, LookaheadConfig.paper(window, 3, 2), {})
    assert [choice.load(key).lookahead.window_size for key in keys] == [0, 1, 2, 3]


def test_models_differ_by_shape_dtype_and_configuration_but_not_by_weights():
    keys = {
        key_of(params)
        for params in (
            tiny_llama(0),
            tiny_llama(0, num_layers=1),
            tiny_llama(0, rope_theta=500.0),
            jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_llama(0)),
        )
    }
    assert len(keys) == 4
    assert key_of(tiny_llama(1)) == key_of(tiny_llama(0))
    shapes = jax.eval_shape(lambda: tiny_llama(0))
    assert key_of(shapes) == key_of(tiny_llama(0))


@pytest.mark.slow
def test_another_process_has_the_same_key():
    code = (
        "from jlade.costs import choice; from tests.tiny import tiny_llama; "
        "params = tiny_llama(); print(choice.key(params, params.decoder, 1).path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert pathlib.Path(done.stdout.strip()) == key_of(tiny_llama()).path


class Addressed:
    """A decoder with the default repr."""


def test_the_address_of_a_decoder_is_no_part_of_the_key():
    here, there = Addressed(), Addressed()
    assert repr(here) != repr(there)
    params = {"weight": np.zeros(3)}
    assert choice.key(params, here, 1) == choice.key(params, there, 1)


@pytest.mark.parametrize("directory", ["", "relative"])
def test_without_a_cache_directory_it_is_the_homes(directory, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", directory)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KEY.path.parent == tmp_path / ".cache" / "jlade" / "tuned"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b'{"format": 0, "lookahead": {"window_size": 1}}',
        b'{"format": 2, "lookahead": {"window_size": 10, "tree_size": 80}}',  # of an earlier version
        b'{"format": 3, "lookahead": null}',
        b'{"format": 3, "lookahead": {"drafts": {"size": -1, "ngrams": null}}}',
        b'{"format": 3, "lookahead": {"drafts": {"depth": 1}}}',
        STORED + b"}",
        STORED + b', "batch_size": 1, "trials": [1]}',
        STORED + b', "batch_size": 1, "step_times": []}',
        STORED + b', "batch_size": 1, "step_times": {"1": 0}}',
        STORED + b', "batch_size": 1, "step_times": {"1": Infinity}}',
    ],
)
def test_a_broken_file_is_ignored_with_a_warning_and_written_anew(content):
    params = tiny_llama()
    key = key_of(params)
    key.path.parent.mkdir(parents=True)
    key.path.write_bytes(content)
    with pytest.warns(UserWarning, match=rf"{key.path.name} is ignored; `jlade tune` writes it anew"):
        assert choice.choose(params, params.decoder, 1) == SMALL_BLOCK
    assert choice.choose(params, params.decoder, 1) == SMALL_BLOCK  # without a second warning
    choice.save(key, SETTING, {})
    assert choice.load(key).lookahead == SETTING


def test_a_directory_in_its_place_is_ignored_with_a_warning():
    KEY.path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert choice.load(KEY) is None


def test_a_file_appears_whole_or_not_at_all(monkeypatch):
    choice.save(KEY, SETTING, {})
    with pytest.raises(TypeError):
        choice.save(KEY, PLAIN, {"trials": object()})

    def refuse(source, target):
        raise OSError("no")

    monkeypatch.setattr("jlade.files.os.replace", refuse)
    with pytest.raises(OSError, match="no"):
        choice.save(KEY, PLAIN, {})
    assert choice.load(KEY).lookahead == SETTING
    assert list(KEY.path.parent.iterdir()) == [KEY.path]


def write_often(batch_size):
    for window in range(50):
        choice.save(SettingKey(KEY.device, "model", 1), LookaheadConfig.paper(window, 3, 2), {})
        choice.save(SettingKey(KEY.device, "model", batch_size), LookaheadConfig.paper(batch_size, 3, 2), {})


@pytest.mark.slow
def test_writers_at_once_lose_nothing():
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        writing = pool.map_async(write_often, [2, 3, 4])
        while not writing.ready():
            found = choice.load(KEY)  # would warn of a part of a file
            assert found is None or found.lookahead.window_size < 50
        writing.get()
    assert [choice.load(SettingKey(KEY.device, "model", size)).lookahead.window_size for size in (1, 2, 3, 4)] == [
        49,
        2,
        3,
        4,
    ]
    assert len(list(KEY.path.parent.iterdir())) == 4


@pytest.mark.slow
def test_auto_gives_the_text_of_plain_decoding_and_compiles_once():
    params = tiny_llama(3, num_layers=1)  # a shape of its own, so that nothing is compiled before
    expected = jlade.generate(params, [1, 2, 3], max_new_tokens=12, lookahead=None)
    traced = chex.assert_max_traces(
        type(params.decoder).forward, n=5
    )  # once for prefill, once for each width of a step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(params.decoder), "forward", traced)
        for prompt in ([1, 2, 3], [4, 5]):
            out = jlade.generate(params, prompt, max_new_tokens=12, lookahead="auto", keep_state=True)
            if prompt == [1, 2, 3]:
                assert_same_texts(out, expected)
            assert out.state.drafts.tree.tokens.shape[1:] == (SMALL_BLOCK.num_drafted,)


@pytest.mark.slow
def test_auto_is_what_is_stored_for_as_many_prompts():
    params = tiny_llama(3, num_layers=1)  # as above, for the same program
    choice.save(key_of(params, 2), SETTING, {})
    for prompts, setting in (([[1, 2]], SMALL_BLOCK), ([[1, 2], [3]], SETTING)):
        out = jlade.generate(params, prompts, max_new_tokens=4, lookahead="auto", keep_state=True)
        assert out.state.drafts.tree.tokens.shape[1:] == (setting.num_drafted,)
    *_, last = jlade.stream(params, [1, 2], max_new_tokens=4, lookahead="auto", keep_state=True)
    assert last.generation.state.drafts.tree.tokens.shape[1:] == (SMALL_BLOCK.num_drafted,)


def test_a_process_stays_with_what_it_found_until_told_to_look_again():
    params = tiny_llama(3)
    assert choice.choose(params, params.decoder, 1) == SMALL_BLOCK
    choice.save(key_of(params), SETTING, {})
    assert choice.choose(params, params.decoder, 1) == SMALL_BLOCK
    choice.forget()
    assert choice.choose(params, params.decoder, 1) == SETTING


def test_auto_is_the_default_and_reads_the_file_once(monkeypatch):
    params, reads = tiny_llama(3), []
    choice.save(key_of(params), SETTING, {})
    read = choice.Stored.read
    monkeypatch.setattr(choice.Stored, "read", lambda path: reads.append(path) or read(path))
    configs = [
        jlade.prepare(params, [1, 2], max_new_tokens=4, **options)[1] for options in ({}, {"lookahead": "auto"}, {})
    ]
    assert {config.lookahead for config in configs} == {SETTING}
    assert reads == [key_of(params).path]
    assert jlade.prepare(params, [[1], [2]], max_new_tokens=4)[1].lookahead == SMALL_BLOCK


@pytest.mark.slow
def test_auto_continues_with_the_setting_of_a_state_of_one_sequence():
    params = tiny_llama(3, num_layers=1)
    choice.save(key_of(params, 2), LookaheadConfig.paper(5, 4, 3), {})
    first = jlade.generate(params, [1, 2], max_new_tokens=4, keep_state=True)
    prompts = [[*row, token] for row in np.asarray(first.state.tokens)[:, :6].tolist() for token in (1, 2)]
    assert jlade.prepare(params, prompts, max_new_tokens=4, state=first.state)[1].lookahead == SMALL_BLOCK
    assert jlade.prepare(params, prompts, max_new_tokens=4)[1].lookahead == LookaheadConfig.paper(5, 4, 3)


WIDE = LookaheadConfig.paper(15, 5, 15)


def trials(**speeds):
    """Returns the facts of trials with the speeds of SETTING and WIDE."""
    settings = {"narrow": SETTING, "wide": WIDE}
    return {
        "trials": [{"lookahead": dataclasses.asdict(settings[name]), "speed": speed} for name, speed in speeds.items()]
    }


@pytest.mark.parametrize(
    ("lookahead", "facts", "message"),
    [
        (
            WIDE,
            None,
            r"15, 5, 15 is slower than plain decoding on cpu, batch size 1: 0\.49x its speed, at most, by an es",
        ),
        (SETTING, None, None),
        (WIDE, trials(wide=1.5), None),  # though an estimate takes it for slow
        (SETTING, trials(narrow=0.75), r"2, 3, 2 is slower .*: 0\.75x its speed, as measured by tuning"),
        # N = 3 tokens for a step of 8 that takes 4 plain ones
        (SETTING, {"step_times": {1: 1.0, 8: 4.0}}, r"0\.86x its speed, at most, by the step times of tuning"),
        (SETTING, {"step_times": {1: 1.0, 8: 3.0}}, None),
        (LookaheadConfig.tree(959, relative_step_time=9.0), None, None),  # falls back to plain steps
        (PLAIN, trials(narrow=2.0), None),
        (None, None, None),
        ("auto", None, None),
    ],
)
def test_a_setting_that_is_known_to_be_slow_is_logged_once(lookahead, facts, message, caplog):
    choice.forget()
    caplog.set_level(logging.INFO, "jlade")
    params = tiny_llama(3)
    if facts is not None:
        choice.save(key_of(params), SMALL_BLOCK, facts)
    for prompt in ([1, 2], [3]):
        jlade.prepare(params, prompt, max_new_tokens=4, lookahead=lookahead)
    assert len(caplog.records) == (message is not None)
    for record in caplog.records:
        assert (record.name, record.levelno) == ("jlade", logging.INFO)
        assert re.search(message, record.message)


@pytest.mark.parametrize("lookahead", ["Auto", "", 5, np.array([1, 2])])
def test_other_values_are_refused(lookahead):
    with pytest.raises(TypeError, match='lookahead must be a LookaheadConfig, "auto", or None for plain decoding, got'):
        jlade.generate(tiny_llama(3), [1], lookahead=lookahead)
