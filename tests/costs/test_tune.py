"""How `jlade.tune` chooses, with a clock of the test's own, and what it reports."""

import dataclasses
import functools
import itertools
import json
import sys
import types
import warnings

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade import LookaheadConfig, Trial
from jlade.config import PLAIN
from jlade.costs import choice, measurement, search
from jlade.decoding import loop, prefill
from tests.tiny import slow, tiny_llama

SMALL, LONG, WIDE = LookaheadConfig.tree(3), LookaheadConfig.paper(0, 8, 1), LookaheadConfig.paper(15, 5, 15)
ADAPTIVE = dataclasses.replace(SMALL, relative_step_time=1.6)  # by the clock below
STEP_TIMES = {1: 2.0, 4: 2.5, 8: 4.0, 16: 8.0, 128: 40.0}


def trial(setting, speed):
    return Trial(
        setting, tokens_per_step=2.0, seconds_per_step=1.0, tokens_per_second=speed, speed=speed, relative_step_time=1.0
    )


@pytest.fixture(autouse=True)
def estimate(monkeypatch):
    monkeypatch.setattr(choice.estimate, "SMALL_BLOCK", SMALL)


class Measured:
    """Speeds against plain decoding, of the first pass and of the final one, and what was asked for."""

    def __init__(self, first, final=None):
        self.speeds = {False: first, True: first if final is None else final}
        self.asked = {False: [], True: []}

    def __call__(self, settings, is_final):
        self.asked[is_final] += settings
        return [trial(PLAIN, 1.0), *(trial(setting, self.speeds[is_final][setting]) for setting in settings)]


def test_a_block_that_no_number_of_tokens_makes_up_for_is_not_tried():
    measure = Measured({SMALL: 1.5, LONG: 1.2})  # would raise a KeyError for WIDE
    best, trials, pruned = search.search([WIDE, SMALL, LONG], STEP_TIMES, measure)
    assert best == trial(SMALL, 1.5)
    assert [t.lookahead for t in trials] == [PLAIN, SMALL, LONG]
    assert pruned == [WIDE]


def test_what_cannot_beat_the_best_is_not_tried():
    slow = LookaheadConfig.paper(0, 2, 1)  # at most 2 tokens a step
    _, _, pruned = search.search([slow, LONG], STEP_TIMES, Measured({LONG: 3.0}))
    assert pruned == [slow]
    _, _, pruned = search.search([slow, LONG], STEP_TIMES, Measured({LONG: 1.1, slow: 1.0}))
    assert pruned == []


def test_the_best_are_measured_again_and_that_decides():
    far = LookaheadConfig.paper(0, 5, 1)
    measure = Measured({SMALL: 1.5, LONG: 1.6, far: 1.0}, {SMALL: 1.7, LONG: 1.4})
    best, trials, _ = search.search([SMALL, LONG, far], STEP_TIMES, measure)
    assert sorted(t.block_size for t in measure.asked[True]) == [4, 8]
    assert best == trial(SMALL, 1.7)
    assert [t.speed for t in trials] == [1.0, 1.7, 1.4, 1.0]


def test_of_equally_fast_settings_the_smaller_block_wins():
    assert search.pick([trial(PLAIN, 1.0), trial(LONG, 1.52), trial(SMALL, 1.5)]) == trial(SMALL, 1.5)
    assert search.pick([trial(PLAIN, 1.0), trial(LONG, 1.6), trial(SMALL, 1.5)]) == trial(LONG, 1.6)
    assert search.pick([trial(PLAIN, 1.0), trial(LONG, 1.02)]) == trial(PLAIN, 1.0)


def test_plain_decoding_wins_when_nothing_else_is_faster():
    best, trials, pruned = search.search([SMALL, WIDE], STEP_TIMES, Measured({SMALL: 0.8}))
    assert best == trials[0] == trial(PLAIN, 1.0)
    assert pruned == [WIDE]
    best, trials, pruned = search.search([], STEP_TIMES, Measured({}))
    assert (best, trials, pruned) == (trial(PLAIN, 1.0), [trial(PLAIN, 1.0)], [])


def test_the_default_is_tried_first_and_in_any_case():
    measure = Measured({SMALL: 1.5, WIDE: 0.2})
    best, _, pruned = search.search([SMALL, LONG, WIDE], STEP_TIMES | {8: 20.0}, measure, default=WIDE)
    assert measure.asked[False] == [WIDE, SMALL]
    assert (best, pruned) == (trial(SMALL, 1.5), [LONG])


def test_the_settings_that_can_still_win_are_announced():
    slow, announced = LookaheadConfig.paper(0, 2, 1), []
    measure = Measured({LONG: 1.0, SMALL: 2.5, slow: 1.0})
    search.search([slow, SMALL, LONG], STEP_TIMES, measure, announce=lambda *what: announced.append(what))
    assert announced == [("0, 8, 1", 4), ("tree of 3", 3), ("tree of 3 once more", 1)]


@given(st.data())
def test_pruning_never_costs_the_fastest_setting(data):
    growth = data.draw(st.lists(st.floats(0, 3), min_size=9, max_size=9))
    times = dict(zip((2**i for i in range(9)), np.cumsum(growth) + 1, strict=True))
    speeds = {}
    for setting in search.USUAL:
        relative_step_time = np.interp(setting.block_size, list(times), list(times.values())) / times[1]
        speeds[setting] = data.draw(st.floats(1, setting.max_accepted)) / relative_step_time
    best, _, pruned = search.search(search.USUAL, times, Measured(speeds))
    assert best.speed >= (1 - search.TIE) * max(1.0, *speeds.values())
    assert best.lookahead not in pruned


def test_steps_are_timed_up_to_the_block_that_no_wider_setting_pays_for():
    def times(settings, cost):
        result = {}
        search.time_blocks(settings, lambda timed: [cost(s.block_size) for s in timed], result, lambda *what: None, 0)
        assert list(result.items()) == [(size, cost(size)) for size in result]
        return list(result)

    assert times(search.USUAL, lambda size: 1.0) == [1, 3, 6, 16, 32, 64, 240]
    assert times([WIDE, SMALL, LONG], lambda size: 1.0) == [1, 4, 8, 120]
    assert times([WIDE, SMALL, LONG], lambda size: float(size)) == [1, 4, 8]  # 5.75 tokens at most
    assert times([], lambda size: 1.0) == [1]


def test_disturbed_times_of_steps_do_not_count():
    disturbed = iter([[5.0], [1.0, 9.0], [3.0, 2.0], [2.0, 4.0]])  # plain, and blocks of 4, 8 and 120 tokens
    times = {}
    search.time_blocks([SMALL, LONG, WIDE], lambda timed: next(disturbed), times, lambda *what: None, 0)
    assert times == {1: 1.0, 4: 2.0, 8: 2.0, 120: 4.0}


@pytest.fixture
def clock(monkeypatch):
    """A clock on which prefill takes 10 s and a step of T tokens 1 + T / 4 s, and nothing else any time.

    Each decode takes the next of `slower` times as long.
    """
    now, clock = 0.0, types.SimpleNamespace(slower=itertools.repeat(1))

    def prefill_later(params, inputs, config):
        nonlocal now
        now += 10
        return real_prefill(params, inputs, config)

    def run_later(params, state, config):
        nonlocal now
        before = int(np.max(state.num_steps))
        state = real_run(params, state, config)
        steps = int(np.max(state.num_steps)) - before
        now += steps * (1 + config.lookahead.block_size / 4) * next(clock.slower)
        return state

    real_prefill, real_run = prefill.prefill, loop.run_steps
    monkeypatch.setattr(prefill, "prefill", prefill_later)
    monkeypatch.setattr(loop, "run_steps", run_later)
    monkeypatch.setattr(measurement, "time", types.SimpleNamespace(perf_counter=lambda: now))
    return clock


@pytest.mark.slow
def test_what_is_measured(clock):
    params, doing, other = tiny_llama(3), [], LookaheadConfig.paper(3, 3, 2)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    result = jlade.tune(
        params,
        prompts,
        settings=[PLAIN, other, WIDE],  # and SMALL, the estimate
        max_new_tokens=24,
        batch_size=2,
        repeat=1,
        adaptive=False,
        progress=lambda *what: doing.append(what),
    )
    assert result.step_times == pytest.approx({1: 1.25, 4: 2.0, 10: 3.5, 120: 31.0})
    assert result.pruned == (WIDE,)  # 5 tokens for 31 s
    assert result.batch_size == 2
    assert doing[:5] == [
        ("a step of 1 token", 0, 8),  # three steps more, SMALL, `other` and WIDE, and the last comparison
        ("a step of 4 tokens", 1, 8),
        ("a step of 10 tokens", 2, 8),
        ("a step of 120 tokens", 3, 8),
        ("tree of 3", 4, 7),  # without WIDE
    ]
    assert doing[-2][0].endswith("once more")
    assert doing[-1] == ("done", len(doing) - 1, len(doing) - 1)
    assert [done for _, done, _ in doing] == list(range(len(doing)))
    totals = [total for *_, total in doing]
    assert totals == sorted(totals, reverse=True)

    # The same from `generate`, one batch after the other.
    batches = [prompts[:2], [prompts[2], prompts[0]]]
    rates = {}
    for found in result.trials:
        outs = [jlade.generate(params, batch, max_new_tokens=24, lookahead=found.lookahead) for batch in batches]
        tokens, steps = (sum(int(getattr(out, name).sum()) for out in outs) for name in ("lengths", "steps"))
        cost = 1 + found.lookahead.block_size / 4
        seconds = sum(10 + int(out.steps.max()) * cost for out in outs)
        rates[found.lookahead] = tokens / seconds
        assert found.tokens_per_step == pytest.approx(tokens / steps)
        assert found.seconds_per_step == pytest.approx(cost)
        assert found.relative_step_time == pytest.approx(cost / 1.25)
        assert found.tokens_per_second == pytest.approx(rates[found.lookahead])
        assert found.speed == pytest.approx(rates[found.lookahead] / rates[PLAIN])
        assert found.spread == 0
    assert result.best.lookahead == max(rates, key=rates.get)
    assert set(rates) == {PLAIN, SMALL, other}


@pytest.mark.parametrize(
    ("number", "sizes", "settings"),
    [
        (0, [], []),
        slow(2, [1, 4], []),
        slow(4, [1, 4, 10], [PLAIN, ADAPTIVE]),
        slow(5, None, None),
    ],
)
def test_ctrl_c_gives_what_was_measured_and_stores_nothing(number, sizes, settings, clock):
    other = LookaheadConfig.paper(3, 3, 2)

    def interrupt(doing, done, total):
        if done == number:
            raise KeyboardInterrupt

    params = tiny_llama(3)
    arguments = {"settings": [other], "max_new_tokens": 24, "repeat": 1, "progress": interrupt}
    with pytest.raises(KeyboardInterrupt) as caught:
        jlade.tune(params, [1, 2, 3], **arguments)
    interrupted = caught.value
    if number == 5:
        sizes, settings = [1, 4, 10], [PLAIN, ADAPTIVE, other]
    assert list(interrupted.step_times) == sizes
    assert [trial.lookahead for trial in interrupted.trials] == settings
    assert choice.load(choice.key(params, params.decoder, 1)) is None


@pytest.mark.slow
def test_the_result_is_stored_for_auto(clock):
    params = tiny_llama(3)
    arguments = {"settings": [SMALL], "max_new_tokens": 24}
    before = choice.choose(params, params.decoder, 1)
    assert jlade.tune(params, [1, 2, 3], store=False, **arguments).path is None
    assert choice.choose(params, params.decoder, 1) == before
    result = jlade.tune(params, [1, 2, 3], **arguments)
    assert result.path == choice.key(params, params.decoder, 1).path
    assert choice.choose(params, params.decoder, 1) == result.lookahead
    stored = json.loads(result.path.read_text())
    assert stored["trials"] == json.loads(json.dumps(result.figures()["trials"]))


@pytest.mark.slow
def test_a_result_of_less_text_does_not_replace_one_of_more(clock):
    params = tiny_llama(3)
    tune = functools.partial(jlade.tune, params, [[1, 2, 3], [4]], settings=[], max_new_tokens=24)

    def stored():
        return choice.load(choice.key(params, params.decoder, 1))

    choice.save(choice.key(params, params.decoder, 1), WIDE, {})  # without the amount
    assert tune(repeat=2).path is not None
    first = stored()
    assert first.lookahead != WIDE
    assert (first.prompts, first.tokens, first.repeat) == (2, 24, 2)
    with pytest.warns(
        UserWarning,
        match="not be stored: .* timed 2 prompts x 24 tokens x 2 repeats, this one times 2 x 24 x 1. force=True",
    ):
        assert tune(repeat=1).path is None
    assert stored().repeat == 2
    assert tune(repeat=1, force=True).path is not None
    assert stored().repeat == 1
    assert tune(repeat=1).path is not None


def test_a_busy_machine_is_told_by_the_spread_of_repeated_timings(clock):
    tune = functools.partial(jlade.tune, tiny_llama(3), [1, 2, 3], settings=[], max_new_tokens=24, repeat=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tune().spread == 0
    clock.slower = itertools.cycle([1, 1, 1, 1, 2])
    with pytest.warns(UserWarning, match=r"the machine was busy: repeated timings of the same texts differ by \d\d%"):
        assert tune().spread > search.BUSY


def test_a_result_that_cannot_be_stored_is_returned_with_a_warning(clock, cache_directory):
    (cache_directory / "jlade").write_text("in the way")
    with pytest.warns(UserWarning, match='not stored, so lookahead="auto" will not find it'):
        result = jlade.tune(tiny_llama(3), [1, 2, 3], settings=[SMALL], max_new_tokens=24)
    assert result.path is None
    assert len(result.trials) == 2


TUNING = jlade.Tuning(
    best=trial(SMALL, 1.5),
    trials=(trial(PLAIN, 1.0), trial(SMALL, 1.5), trial(WIDE, 0.25)),
    pruned=(LONG,),
    step_times=STEP_TIMES,
    device="1 x device (gpu)",
    batch_size=2,
)


def test_it_prints_as_tables():
    printed = str(TUNING)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    assert ["4", "2500.00", "1.25"] in rows
    assert ["15, 5, 15", "120", "2.00", "1000.00", "1.00", "0", "0.25x"] in rows
    assert "1 x device (gpu), batch size 2" in printed
    assert "too few: 1 settings" in printed
    assert "fastest: tree of 3, 1.50x plain decoding" in printed
    assert "fastest: plain decoding" in str(dataclasses.replace(TUNING, best=TUNING.trials[0]))


def test_figures_are_json():
    figures = json.loads(json.dumps(TUNING.figures()))
    assert LookaheadConfig.from_dict(figures["best"]["lookahead"]) == SMALL
    assert LookaheadConfig.from_dict(figures["lookahead"]) == SMALL
    assert figures["step_times"] == {str(size): seconds for size, seconds in STEP_TIMES.items()}


@pytest.mark.slow
def test_the_plot_shows_every_setting(tmp_path):
    TUNING.plot(tmp_path / "tuning.png")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        TUNING.plot(tmp_path / "tuning.svg")
    drawn = (tmp_path / "tuning.svg").read_text()
    assert all(f">{label}<" in drawn for label in ("plain (1)", "tree of 3 (4)", "15, 5, 15 (120)", "tokens/s"))


@pytest.mark.parametrize(
    ("file", "message"),
    [("tuning.gold", r"must end in one of .*\.png.*, got"), ("nowhere/a.png", "directory that exists, got")],
)
def test_where_no_plot_can_be_written(file, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TUNING.plot(tmp_path / file)


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(ValueError, match=r'pip install "jlade\[plot\]"'):
        TUNING.plot("tuning.png")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_new_tokens": 7, "settings": [SMALL]}, ValueError, "max_new_tokens must be at least 8, got 7"),
        ({"max_new_tokens": 49}, ValueError, "max_new_tokens must be at least 50, got 49"),  # of 25, by a tree
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"repeat": 0}, ValueError, "repeat must be at least 1, got 0"),
        ({"settings": [(15, 5, 15)]}, TypeError, r"settings must hold LookaheadConfigs, got \(15, 5, 15\)"),
        ({"prompts": [[1], [99]]}, ValueError, r"prompt\[1\] holds token id 99"),
        ({"prompts": "text"}, TypeError, "pass tokenizer="),
        ({"max_new_tokens": 64}, ValueError, "the model reads at most 64 positions"),
        ({"sampling": 1, "max_new_tokens": 24}, TypeError, "sampling must be a SamplingConfig"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        jlade.tune(tiny_llama(3), **({"prompts": [1, 2, 3]} | arguments))
