"""The choice of the implementation of experts, and the trial of their kernel."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade import mesh as mesh_lib
from jlade.models import experts as experts_lib
from jlade.models import trial
from jlade.models.experts import KERNELS, Experts, ExpertShape, hopper, mix, ways
from jlade.models.experts.contest import prepare
from jlade.models.llama import Llama, init_params, quantize
from tests.models.devices import AMPERE, CPU, HOPPER, TPU, hopper_kernels, record_trials
from tests.tiny import slow, tiny_llama

SHAPE = ExpertShape(number=6, per_token=2, size=64, width=128, dtype="bfloat16")


def plain(x, chosen, weights, matrices):
    return mix(x, chosen, weights, Experts(*matrices), "silu")


def simulated(x, chosen, weights, matrices):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from JAX 0.11.2 on

    multiply = functools.partial(hopper.multiply, interpret=InterpretGPUParams())
    return ways.tiled(x, chosen, weights, Experts(*matrices), "silu", ways.rows_of_tile(3, hopper.ROWS), multiply)


def other_expert(x, chosen, weights, matrices):
    """In the last row alone."""
    return plain(x, chosen.at[-1, 0].set((chosen[-1, 0] + 1) % SHAPE.number), weights, matrices)


def equal_weights(x, chosen, weights, matrices):
    return plain(x, chosen, jnp.full_like(weights, 1 / SHAPE.per_token), matrices)


def without_prefill(x, *rest):
    if len(x) == trial.PREFILL:
        raise NotImplementedError("too many rows")
    return plain(x, *rest)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    for name, value in {"BLOCK": 3, "PREFILL": 9, "LAYERS": 2, "REPEAT": 1}.items():
        monkeypatch.setattr(trial, name, value)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (plain, None),
        pytest.param(simulated, None, marks=hopper_kernels),
        (other_expert, "gives wrong results: an error of "),
        (equal_weights, "gives wrong results: an error of "),
        (lambda x, *rest: plain(x, *rest) * jnp.nan, "gives wrong results: an error of nan"),
        (without_prefill, "raises NotImplementedError: too many rows"),
    ],
)
def test_results(kernel, reason):
    seconds = itertools.count()  # each program takes one
    passed, found = trial.compare(functools.partial(prepare, kernel, plain, CPU, SHAPE), CPU, lambda: next(seconds))
    assert passed == (reason is None)
    assert found.startswith(reason or "takes 1.00 of the time of 'plain'")


@pytest.mark.parametrize("has_gates", [True, slow(False)])
def test_a_program_has_all_layers_with_changing_experts(has_gates):
    seen = []

    def counted(x, chosen, weights, matrices):
        jax.debug.callback(lambda chosen: seen.append(np.array(chosen)), chosen)
        return plain(x, chosen, weights, matrices)

    contest = prepare(counted, plain, CPU, SHAPE._replace(has_gates=has_gates))
    contest.run(contest.step.arguments, jnp.int32(7))
    jax.effects_barrier()
    first, *rest = sorted(seen, key=lambda chosen: (chosen - seen[0])[0, 0] % SHAPE.number)
    assert len(seen) == 7
    assert all(any((chosen == (first + i) % SHAPE.number).all() for chosen in rest) for i in range(1, SHAPE.number))


@pytest.mark.parametrize(
    ("device", "changes", "chosen"),
    [
        pytest.param(HOPPER, {}, "gpu", marks=hopper_kernels),
        pytest.param(HOPPER, {"dtype": "float16"}, "gpu", marks=hopper_kernels),
        (HOPPER, {"dtype": "int8"}, "plain"),
        (HOPPER, {"dtype": "float32"}, "plain"),
        (HOPPER, {"width": 96}, "plain"),
        (AMPERE, {}, "plain"),
        (TPU, {}, "plain"),
        (CPU, {}, "plain"),
    ],
)
def test_auto_takes_the_kernel_where_it_runs_and_passes(device, changes, chosen, monkeypatch):
    shape = SHAPE._replace(**changes)
    assert KERNELS.resolve("auto", device, [shape], is_attached=False) == chosen
    for passes in (True, False):
        monkeypatch.setattr(trial, "passes", lambda *arguments, passes=passes: passes)
        assert KERNELS.resolve("auto", device, [shape]) == (chosen if passes else "plain")
    assert KERNELS.resolve("plain", device, [shape]) == "plain"
    if chosen == "gpu":
        assert KERNELS.resolve("gpu", device, [shape]) == "gpu"


@pytest.mark.parametrize(
    ("device", "changes", "version", "message"),
    [
        (CPU, {}, (0, 11, 2), "'gpu' needs an NVIDIA GPU .* is cpu; choose 'auto' or 'plain'"),
        (HOPPER, {}, (0, 11, 1), "'gpu' needs JAX 0.11.2 or newer"),
        pytest.param(
            HOPPER, {"dtype": "int8"}, (0, 11, 2), "needs 16-bit floats, and these are int8", marks=hopper_kernels
        ),
        pytest.param(
            HOPPER, {"size": 80}, (0, 11, 2), "multiples of 64, and these are 80 x 128; choose", marks=hopper_kernels
        ),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(device, changes, version, message, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    for is_attached in (True, False):
        with pytest.raises(ValueError, match=message):
            KERNELS.resolve("gpu", device, [SHAPE._replace(**changes)], is_attached=is_attached)


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match=r"experts must be one of 'auto', 'plain', 'gpu'; got 'tpu'"):
        Llama(tiny_llama().config, experts="tpu")


@functools.cache
def mixture():
    changes = {"num_experts": 8, "experts_per_token": 3, "expert_size": 64, "hidden_size": 128, "intermediate_size": 0}
    config = dataclasses.replace(tiny_llama().config, **changes)
    return init_params(jax.random.key(0), config, jnp.bfloat16)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(experts_lib, "hopper_obstacle", lambda device: None)
    return record_trials(monkeypatch, HOPPER)


@hopper_kernels
def test_a_decoder_asks_for_a_trial_of_its_experts(on_hopper):
    params = mixture()
    assert params.decoder.experts == "gpu"
    ((subject, kernel, device, shape, prepared, may_run),) = on_hopper  # heads of 6 have no kernel
    assert (subject, kernel, device, may_run) == ("experts", "gpu", HOPPER, True)
    assert shape == ExpertShape(8, 3, 128, 64, "bfloat16")
    assert str(shape) == "8 experts of 128 x 64, 3 for a token, bfloat16"
    assert [run.keywords["implementation"] for run in prepared.args[:2]] == ["gpu", "plain"]
    assert jax.eval_shape(lambda: params).decoder.experts == "gpu"
    assert on_hopper[-1][-1] is False
    assert Llama(params.config, experts="plain").on(params).experts == "plain"
    assert Llama(params.config, experts="gpu").on(params).experts == "gpu"
    assert len(on_hopper) == 2


@hopper_kernels
def test_experts_of_a_latent_without_gates_are_tried_as_such(on_hopper):
    config = dataclasses.replace(mixture().config, gated_mlp=False, activation="relu2", expert_latent=64)
    params = init_params(jax.random.key(0), config, jnp.bfloat16)
    assert params.decoder.experts == "gpu"
    assert str(on_hopper[0][3]) == "8 experts of 64 x 64 without gates, 3 for a token, bfloat16"


@hopper_kernels
def test_experts_are_tried_as_devices_divide_them(on_hopper):
    mesh = types.SimpleNamespace(devices=np.array([HOPPER]), shape={"model": 2, "copy": 1})
    assert Llama(mixture().config).on(mixture(), mesh).experts == "gpu"
    assert on_hopper[0][3] == ExpertShape(4, 2, 128, 64, "bfloat16")


@hopper_kernels
def test_experts_in_int8_and_absent_ones_have_no_trial(on_hopper):
    quantized = quantize(mixture())
    assert quantized.decoder.experts == "plain"
    with pytest.raises(ValueError, match="experts 'gpu' needs 16-bit floats, and these are int8"):
        Llama(quantized.config, experts="gpu").on(quantized)
    assert tiny_llama().decoder == Llama(tiny_llama().config, "plain")
    assert not on_hopper


@pytest.mark.slow
def test_tracers_and_several_devices_have_plain_experts(on_hopper, monkeypatch):
    params, chosen = mixture(), []
    jax.jit(lambda params: chosen.append(params.decoder.experts))(params)
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [HOPPER, HOPPER])
    assert [*chosen, params.decoder.experts] == ["plain", "plain"]
    assert not on_hopper


def test_settings_are_stored_for_an_implementation_of_experts():
    """And for models without experts under the same name as ever."""
    config = tiny_llama().config
    assert repr(Llama(config, "plain", "gpu", pads=True)) == f"Llama(config={config!r}, attention='plain')"
    names = {repr(Llama(mixture().config, "plain", name)) for name in ("plain", "gpu")}
    assert len(names) == 2
    assert f"Llama(config={mixture().config!r}, attention='plain', experts='gpu')" in names


@pytest.mark.slow
def test_mix_takes_the_kernel_for_several_tokens(monkeypatch):
    calls = []
    monkeypatch.setattr(ways, "tiled", lambda x, *rest: calls.append(rest[-2:]) or x)
    contest = prepare(plain, plain, CPU, SHAPE)
    (x, chosen, weights), matrices = contest.step.arguments
    for num_tokens in (1, 3):
        arguments = x[:num_tokens], chosen[:num_tokens], weights[:num_tokens], Experts(*matrices), "silu"
        for name in ("auto", "plain", "gpu"):
            mix(*arguments, implementation=name)
    assert calls == [(ways.rows_of_tile(3 * SHAPE.per_token / SHAPE.number, hopper.ROWS), hopper.multiply)]
