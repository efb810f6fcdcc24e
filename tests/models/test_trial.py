"""The trial that decides whether "auto" takes a kernel, with kernels for no device in particular."""

import dataclasses
import functools
import gc
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade import mesh as mesh_lib
from jlade.models import attention, trial
from jlade.models.attention import Variation, contest, tpu
from jlade.models.attention.contest import HeadShape
from jlade.models.kernels import Kernels
from jlade.models.llama import Llama
from jlade.models.trial import Outcome, TrialKey
from tests.models.devices import CPU, TPU, record_trials
from tests.tiny import tiny_llama

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=8, dtype="bfloat16")
KEY = TrialKey("attention", "tpu", "TPU v5e", "JAX 1", "abc", SHAPE)
GOOD = Outcome(True, "takes 0.50 of the time of 'plain'")
BAD = Outcome(False, "raises ValueError: no")


def prepare(kernel, plain, shape=SHAPE):
    return functools.partial(contest.prepare, kernel, plain, CPU, shape)


def compare(kernel, plain, shape=SHAPE, times=(1.0,) * 2 * trial.REPEAT):
    """Tries a kernel on a clock by which the programs take these times, plain attention and the kernel in turn."""
    readings = itertools.accumulate(reading for seconds in times for reading in (0.0, seconds))
    return trial.compare(prepare(kernel, plain, shape), CPU, functools.partial(next, readings))


def plain(operands):
    return attention.attend(operands, implementation="plain")


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    """Sizes that compile and run at once."""
    sizes = {"LENGTHS": (20, 13), "CAPACITY": 24, "RING": 16, "WINDOW": 9}
    for module, changed in ((trial, {"BLOCK": 3, "PREFILL": 5, "LAYERS": 2}), (contest, sizes)):
        for name, value in changed.items():
            monkeypatch.setattr(module, name, value)


def one_more_key(operands):
    return plain(operands._replace(cached_length=operands.cached_length + 1))


def causal(operands):
    return plain(operands._replace(block_mask=np.tri(operands.block_mask.shape[-1], dtype=bool)))


def without_prefill(operands):
    if operands.queries.shape[1] == trial.PREFILL:
        raise NotImplementedError("too many rows\nfor the memory")
    return plain(operands)


def raising_at_run_time(operands):
    def fail(x):
        raise RuntimeError("launch failed")

    return jax.pure_callback(fail, operands.queries, operands.queries)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (plain, None),
        (lambda operands: plain(operands) + jnp.bfloat16(2**-12), None),
        (one_more_key, "gives wrong results: an error of "),
        (causal, "gives wrong results: an error of "),
        (lambda operands: plain(operands) * jnp.bfloat16(np.nan), "gives wrong results: an error of nan"),
        (lambda operands: plain(operands)[:, :1], "raises "),
        (without_prefill, "raises NotImplementedError: too many rows$"),
        (raising_at_run_time, "raises JaxRuntimeError: .*"),
    ],
)
def test_results(kernel, reason):
    passed, found = compare(kernel, plain)
    assert passed == (reason is None)
    if reason is not None:
        with pytest.raises(AssertionError, match="^" + reason):
            raise AssertionError(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_has_a_tolerance_that_finds_a_wrong_length(dtype):
    shape = HeadShape(6, 2, 16, dtype)
    assert compare(plain, plain, shape).passed
    assert not compare(one_more_key, plain, shape).passed


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_kernel_of_tpus_passes_in_simulation(kv_dtype, monkeypatch):
    monkeypatch.setattr(tpu, "CHUNK", 8)
    monkeypatch.setattr(trial, "REPEAT", 1)
    kernel = functools.partial(tpu.attend, interpret=True)
    run = lambda operands: kernel(operands._replace(block_mask=operands.block_mask[None]))  # noqa: E731
    assert compare(run, plain, SHAPE._replace(kv_dtype=kv_dtype)).passed


def in_simulation(operands, **variations):
    mask = operands.block_mask[None]
    return tpu.attend(operands._replace(block_mask=mask), **variations, interpret=True)


def without_window(operands, window, **variations):
    """Every entry in use is seen, in the ring and in the block."""
    return in_simulation(operands, window=999, **variations)


def without_cap(operands, cap, **variations):
    return in_simulation(operands, **variations)


def without_sinks(operands, **variations):
    return in_simulation(operands._replace(sinks=None), **variations)


@pytest.mark.slow
def test_variations_are_tried(monkeypatch):
    monkeypatch.setattr(tpu, "CHUNK", 8)
    monkeypatch.setattr(trial, "REPEAT", 1)
    shape = SHAPE._replace(dtype="float32", variation=Variation(window=True, cap=True, sinks=True))
    assert str(shape) == "4 heads, 2 KV heads, head size 8, float32, window, cap, sinks"
    assert compare(in_simulation, in_simulation, shape).passed
    for wrong in (without_window, without_cap, without_sinks):
        passed, reason = compare(wrong, in_simulation, shape)
        assert not passed
        assert reason.startswith("gives wrong results: an error of ")
        assert reason.endswith(" with 1.5e-05 accepted")


@pytest.mark.parametrize(("ratio", "passed"), [(0.5, True), (1.05, True), (1.2, False)])
def test_a_slower_kernel_is_refused_within_a_margin(ratio, passed):
    """Each implementation takes much longer once, plain attention most."""
    times = itertools.chain([9.0, ratio, 1.0, 5 * ratio], itertools.cycle([1.0, ratio]))
    assert compare(plain, plain, times=times) == (passed, f"takes {ratio:.2f} of the time of 'plain'")


def test_times_are_those_of_all_layers(monkeypatch):
    calls, readings = [], []

    def counted(operands):
        return jax.pure_callback(lambda x: calls.append(1) or x, operands.queries, plain(operands))

    def clock():
        readings.append(len(calls))
        return float(len(calls))

    monkeypatch.setattr(trial, "LAYERS", 7)
    monkeypatch.setattr(trial, "REPEAT", 1)
    assert trial.compare(prepare(counted, counted), CPU, clock).passed
    assert np.diff(readings).tolist() == [7, 0, 7]  # of plain attention, between, and of the kernel


def test_one_trial_serves_all_processes(caplog):
    caplog.set_level(logging.INFO, "jlade")
    assert trial.decide(KEY, lambda: GOOD) == GOOD
    assert trial.decide(KEY, pytest.fail) == GOOD
    assert [record.message for record in caplog.records] == [
        "Trying the kernel 'tpu' for attention, once (TPU v5e; 4 heads, 2 KV heads, head size 8, bfloat16).",
        "attention='auto' is 'tpu', which takes 0.50 of the time of 'plain' "
        "(TPU v5e; 4 heads, 2 KV heads, head size 8, bfloat16).",
    ]
    trial.forget()
    assert trial.decide(KEY, pytest.fail) == GOOD


def test_a_refusal_is_warned_of_once_and_logged_by_later_processes(caplog):
    caplog.set_level(logging.INFO, "jlade")
    message = r"is 'plain', as the kernel 'tpu' raises ValueError: no \(TPU v5e; .*\)\. .* without .*\.json it tries"
    with pytest.warns(UserWarning, match=message) as warned:
        assert trial.decide(KEY, lambda: BAD) == BAD
    assert len(warned) == 1
    assert trial.decide(KEY, pytest.fail) == BAD
    caplog.clear()
    trial.forget()
    assert trial.decide(KEY, pytest.fail) == trial.decide(KEY, pytest.fail) == BAD
    assert len(caplog.records) == 1
    assert "as the kernel 'tpu' raises ValueError: no" in caplog.text
    KEY.path.unlink()
    trial.forget()
    assert trial.decide(KEY, lambda: GOOD) == GOOD


@pytest.mark.parametrize(
    "change",
    [
        {"subject": "experts"},
        {"device": "TPU v6e"},
        {"software": "JAX 2"},
        {"code": "d"},
        {"shape": SHAPE._replace(heads=8)},
        {"shape": SHAPE._replace(variation=Variation(sinks=True))},
    ],
)
def test_other_circumstances_are_tried_anew(change):
    trial.decide(KEY, lambda: GOOD)
    with pytest.warns(UserWarning, match="no"):
        assert trial.decide(dataclasses.replace(KEY, **change), lambda: BAD) == BAD


def test_the_key_names_versions(monkeypatch):
    key = TrialKey.of("attention", "tpu", CPU, SHAPE)
    assert key == TrialKey.of("attention", "tpu", CPU, SHAPE)
    assert key.code != TrialKey.of("experts", "tpu", CPU, SHAPE).code
    monkeypatch.setattr(jax, "__version__", "9.9")
    assert TrialKey.of("attention", "tpu", CPU, SHAPE).path != key.path


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_broken_file_is_ignored_with_a_warning(text):
    KEY.path.parent.mkdir(parents=True)
    KEY.path.write_text(text)
    with pytest.warns(UserWarning, match="is ignored; the kernel is tried anew"):
        assert trial.decide(KEY, lambda: GOOD) == GOOD
    assert json.loads(KEY.path.read_text())["passed"] is True


def test_a_failure_of_plain_attention_is_not_stored():
    """The device may have had no memory left."""

    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand so on")

    with pytest.warns(UserWarning, match=r"could not be tried: RuntimeError: RESOURCE_EXHAUSTED: out of memory \("):
        assert not trial.decide(KEY, fail).passed
    assert not trial.decide(KEY, pytest.fail).passed
    trial.forget()
    assert trial.decide(KEY, lambda: GOOD) == GOOD

    def broken(*arguments):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        compare(plain, broken)


def test_without_a_place_for_the_verdict_nothing_is_tried(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be tried: NotADirectoryError"):
        assert not trial.decide(KEY, pytest.fail).passed


def test_a_kernel_that_ends_its_process_is_not_tried_again():
    script = """
import os
from jlade.models.attention.contest import HeadShape
from jlade.models.trial import *
decide(TrialKey("attention", "tpu", "TPU v5e", "JAX 1", "abc", HeadShape(4, 2, 8, "bfloat16")), lambda: os._exit(3))
"""
    assert subprocess.run([sys.executable, "-c", script], env=os.environ, check=False).returncode == 3
    with pytest.warns(UserWarning, match="ended or hung the process that tried it"):
        assert not trial.decide(KEY, pytest.fail).passed
    trial.forget()
    assert not trial.decide(KEY, pytest.fail).passed


def test_an_interrupted_trial_is_taken_up_again():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.decide(KEY, interrupt)
    assert trial.decide(KEY, lambda: GOOD) == GOOD


def test_a_kernel_that_hangs_until_it_is_interrupted_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(trial, "PATIENCE", -1)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.decide(KEY, interrupt)
    with pytest.warns(UserWarning, match="ended or hung the process that tried it"):
        assert not trial.decide(KEY, pytest.fail).passed


def test_a_process_waits_for_the_trial_of_another():
    """Threads stand for processes: a lock belongs to an open file."""
    begun, end = threading.Event(), threading.Event()
    verdicts = []

    def try_kernel():
        begun.set()
        assert end.wait(60)
        return GOOD

    threads = [threading.Thread(target=lambda: verdicts.append(trial.decide(KEY, try_kernel)))]
    threads[0].start()
    assert begun.wait(60)
    threads.append(threading.Thread(target=lambda: verdicts.append(trial.decide(KEY, pytest.fail))))
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    end.set()
    for thread in threads:
        thread.join(60)
    assert verdicts == [GOOD, GOOD]


def test_a_trial_frees_its_arrays():
    def fail(*arguments):
        raise ValueError("no")

    gc.collect()
    before = len(jax.live_arrays())
    compare(fail, plain)
    assert len(jax.live_arrays()) == before


@pytest.fixture
def any_time(monkeypatch):
    """A kernel may take any time, as a machine's other work makes equal programs differ."""
    monkeypatch.setattr(trial, "MARGIN", math.inf)


def passes(kernel=plain, may_run=True):
    return trial.passes("attention", "tpu", CPU, SHAPE, prepare(kernel, plain), may_run)


@pytest.mark.usefixtures("any_time")
def test_within_a_trace_the_trial_runs_at_once():
    """The caller's program holds nothing of it, and its verdict is that of concrete arrays."""
    verdicts = []

    def program(x):
        verdicts.append(passes())
        return x + 1

    traced = jax.make_jaxpr(jax.vmap(jax.jit(program)))(jnp.ones(3))
    assert verdicts == [True]
    assert "while" not in str(traced)
    trial.forget()
    assert passes(pytest.fail)


@pytest.mark.usefixtures("any_time")
def test_without_leave_only_a_remembered_verdict_counts():
    assert not passes(may_run=False)
    assert passes()
    assert passes(may_run=False)
    trial.forget()
    assert passes(pytest.fail, may_run=False)


@pytest.mark.usefixtures("any_time")
def test_several_processes_and_absent_devices_try_nothing(monkeypatch):
    assert not trial.passes("attention", "tpu", TPU, SHAPE, pytest.fail, may_run=True)
    assert passes()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not passes(pytest.fail)


@pytest.fixture
def on_tpu(monkeypatch):
    return record_trials(monkeypatch, TPU)


def test_a_decoder_asks_for_a_trial_of_its_heads(on_tpu):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_llama())
    assert params.decoder.attention == "tpu"
    ((subject, kernel, device, shape, prepared, may_run),) = on_tpu
    assert (subject, kernel, device, shape) == ("attention", "tpu", TPU, HeadShape(4, 2, 6, "bfloat16"))
    run, run_plain, *rest = prepared.args
    assert (run.keywords, run_plain.keywords) == ({"implementation": "tpu"}, {"implementation": "plain"})
    assert (*rest, may_run) == (device, shape, True)
    assert Llama(params.config, "tpu").on(params).attention == "tpu"
    assert Llama(params.config, "plain").on(params).attention == "plain"
    assert len(on_tpu) == 1


def test_a_decoder_asks_for_a_trial_of_each_variation(on_tpu, monkeypatch):
    variations = {"attention_cap": 5.0, "attention_scale": 0.3, "sliding_windows": (3, None)}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_llama(**variations))
    assert params.decoder.attention == "tpu"
    expected = [HeadShape(4, 2, 6, "bfloat16", Variation(window, cap=True)) for window in (True, False)]
    assert [arguments[3] for arguments in on_tpu] == expected
    monkeypatch.setattr(trial, "passes", lambda *arguments: arguments[3] == expected[0])
    assert params.decoder.attention == "plain"


def test_a_decoder_of_shapes_asks_for_no_trial(on_tpu):
    params = tiny_llama()
    assert jax.eval_shape(lambda: params).decoder.attention == "tpu"
    assert jax.device_get(params).decoder.attention == "tpu"
    assert [arguments[-1] for arguments in on_tpu] == [False, True]


def test_a_decoder_of_tracers_or_on_several_devices_is_plain(on_tpu, monkeypatch):
    params, chosen = tiny_llama(), []
    jax.jit(lambda params: chosen.append(params.decoder.attention))(params)
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [TPU, TPU])
    assert [*chosen, params.decoder.attention] == ["plain", "plain"]
    assert not on_tpu


def test_a_decoder_for_an_absent_device_has_its_kernel_without_a_trial(monkeypatch):
    monkeypatch.setattr(trial, "passes", pytest.fail)
    params = tiny_llama()
    for shapes in (params, jax.eval_shape(lambda: params)):
        assert Llama(params.config).on(shapes, absent=TPU) == Llama(params.config, "tpu")


def test_nothing_happens_on_a_cpu(monkeypatch, cache_directory):
    monkeypatch.setattr(Kernels, "resolve", pytest.fail)
    monkeypatch.setattr(jax, "eval_shape", pytest.fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny_llama().decoder.attention == "plain"
    assert not list(cache_directory.iterdir())
