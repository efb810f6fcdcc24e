import dataclasses
import json
import pathlib
import statistics

import jax.numpy as jnp
import pytest

import jlade
from benchmarks.estimate import BLOCKS, MODELS
from jlade import LookaheadConfig
from jlade.config import PLAIN
from jlade.conversion.tensors import param_shapes
from jlade.costs import plan, settings
from jlade.costs import work as work_lib
from jlade.costs.devices import DEVICES
from jlade.costs.work import Collective, MeshShape
from jlade.lookahead import names

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
SEVEN = dataclasses.replace(MODELS["7b"], max_positions=4096)
SETTING = LookaheadConfig.paper(15, 5, 15)


@pytest.mark.parametrize(("device", "bandwidth"), [("h100", 3.35), ("l40s", 0.864), ("b200", 8.0)])  # TB/s
def test_a_step_on_one_device_by_hand(device, bandwidth):
    """6.5 billion parameters of the layers in 16 bits and 4096 entries of the cache, at 0.9 of the bandwidth."""
    (option,) = jlade.plan(SEVEN, device, lookahead=None, capacity=4096).options
    matrices = 32 * 4096 * (4 * 4096 + 3 * 11008) + 32000 * 4096
    cache = 2 * 32 * 4096 * 4096
    assert option.step.floor == pytest.approx(2 * (matrices + cache) / (0.9e12 * bandwidth), rel=1e-3)
    assert option.step.total == pytest.approx(option.step.floor + 32 * 15 * 2e-6, rel=1e-3)
    assert option.memory.weights == 2 * (matrices + 32000 * 4096 + 65 * 4096)
    assert option.memory.cache == 2 * cache
    assert option.tokens_per_second == 1 / option.step.total


def ratios() -> dict[str, list[float]]:
    """Returns the planned times of the model in a step by those of compiled programs, for each device."""
    rows = json.loads((RESULTS / "estimate.json").read_text(encoding="utf-8"))["rows"]
    shards = {name: work_lib.shard(param_shapes(MODELS[name], jnp.bfloat16), 1) for name in ("1b", "7b", "8b")}
    found: dict[str, list[float]] = {}
    for row in rows:
        shard, request = shards[row["shape"]], (BLOCKS[row["block"]], row["batch"], row["capacity"])
        of_step = work_lib.work(shard, MeshShape(1, 1, 1), *request)
        step = plan.step_time(of_step, shard.config.num_layers, DEVICES[row["device"]])
        found.setdefault(row["device"], []).append(1e3 * step.total / row["ms"])
    return found


def test_estimates_are_near_those_of_compiled_programs():
    """The file has the times of programs that the devices' compilers made, from the same rates.

    The compiler for v5p reports more cycles than its data sheet implies.
    """
    medians = {device: statistics.median(found) for device, found in ratios().items()}
    assert all(0.9 < medians[device] < 1.1 for device in ("v5e", "v6e", "h100", "h200")), medians
    assert 0.5 < medians["v5p"] < 1, medians


@pytest.mark.parametrize(
    ("sizes", "compression", "speedup"),
    [
        ((1, 10, 3), 1.45, 1.36),
        ((1, 5, 10), 1.51, 1.36),
        ((1, 5, 30), 1.12, 1.04),
        ((30, 5, 1), 1.79, 1.61),
        ((15, 5, 15), 1.96, 1.78),
        ((15, 5, 15), 2.05, 1.88),
        ((15, 5, 15), 1.64, 1.46),  # the others are of Table 2
        ((15, 5, 15), 1.77, 1.60),
    ],
)
def test_estimated_speedups_are_near_those_that_the_paper_measured(sizes, compression, speedup):
    """Tables 2 and 3: LLaMA-2-7B-Chat on an A100."""
    setting = LookaheadConfig.paper(*sizes)
    (plain,) = jlade.plan(SEVEN, "a100", lookahead=None).options
    (found,) = jlade.plan(SEVEN, "a100", lookahead=setting, compression=compression).options
    assert found.step.total == pytest.approx((1 + plan.DRAFTING) * (found.step.total - found.step.drafting))
    assert found.tokens_per_second / plain.tokens_per_second == pytest.approx(speedup, rel=0.03)


def test_collectives_take_messages_and_bytes():
    small, large = Collective(8, 8, 10, 0), Collective(8, 8, 1, 10**9)
    assert plan.collective_time(small, DEVICES["v5e"]) == pytest.approx(10 * 2 * 3 * 1e-6)
    assert plan.collective_time(large, DEVICES["v5e"]) == pytest.approx(6e-6 + 2 * 7 / 8 / (0.8 * 100))
    assert plan.collective_time(large, DEVICES["h100"]) == pytest.approx(12e-6 + 2 * 7 / 8 / (0.8 * 450))
    between_machines = plan.collective_time(large._replace(span=16), DEVICES["h100"])
    assert between_machines == pytest.approx(30e-6 + 2 * 7 / 8 / (0.8 * 50))
    assert plan.collective_time(large._replace(span=16), DEVICES["v5e"]) == plan.collective_time(large, DEVICES["v5e"])


def test_a_pipeline_adds_a_message_between_stages():
    """Four A100s, linked at 0.8 of 300 GB/s; sixteen span two machines, with 50 GB/s and slower messages."""
    (option,) = jlade.plan(SEVEN, "a100", lookahead=SETTING, compression=2.0).options
    one, hidden_states = option.step.total, 120 * 4096 * 2
    assert plan.pipeline_time(option.step, hidden_states, 1, DEVICES["a100"]) == one
    four = plan.pipeline_time(option.step, hidden_states, 4, DEVICES["a100"])
    assert four - one == pytest.approx(3 * (2e-6 + hidden_states / (0.8 * 300e9)))
    sixteen = plan.pipeline_time(option.step, hidden_states, 16, DEVICES["a100"])
    assert sixteen - one == pytest.approx(15 * (5e-6 + hidden_states / (0.8 * 50e9)))


def test_meshes_are_those_that_work():
    found = jlade.plan(SEVEN, "v5e", 12, batch_size=6, capacity=512)
    layouts = {option.layout for option in found.options}
    expected = {
        MeshShape(data, lookahead, model)
        for data in (1, 2, 3, 6)
        for lookahead in (1, 2, 3, 4, 6, 12)
        for model in (1, 2, 4)  # 32 heads
        if 12 % (data * lookahead * model) == 0
    }
    assert layouts == expected


def test_devices_divide_memory_and_work():
    request = {"lookahead": SETTING, "batch_size": 4, "capacity": 2048}
    options = {x.layout: x for x in jlade.plan(SEVEN, "v5p", 8, **request).options}
    one, data, lookahead, model = (options[x] for x in ((1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4)))
    assert data.memory.weights == lookahead.memory.weights == one.memory.weights
    assert model.memory.weights == pytest.approx(one.memory.weights / 4, rel=0.001)
    assert data.memory.cache == model.memory.cache == one.memory.cache / 4
    assert data.memory.pool == one.memory.pool / 4
    assert model.memory.pool == one.memory.pool
    assert lookahead.memory[:3] == one.memory[:3]
    assert one.step.arithmetic / 4 < lookahead.step.arithmetic < one.step.arithmetic / 2
    assert lookahead.step.floor == one.step.floor
    assert model.step.floor == pytest.approx(one.step.floor / 4, rel=0.001)
    assert one.collectives == ()
    sums = {option.layout: sum(x.times for x in option.collectives) for option in (data, lookahead, model)}
    assert sums == {(4, 1, 1): 1, (1, 4, 1): 3, (1, 1, 4): 2 * 32 + 3}


def test_the_recommended_mesh_fits_and_is_among_the_fastest():
    found = jlade.plan(SEVEN, "v5e", 4, capacity=4096)
    best = found.recommended
    fitting = [option for option in found.options if option.fits]
    assert best in fitting
    assert best.memory.total <= found.memory == DEVICES["v5e"].memory
    assert best.tokens_per_second >= 0.98 * max(option.tokens_per_second for option in fitting)
    assert best.compression == settings.tokens_per_step(best.lookahead, "smollm2")
    assert found.options[-1].fits is False or len(fitting) == len(found.options)


def test_nothing_fits():
    found = jlade.plan(SEVEN, "v5e", 1, batch_size=8, capacity=4096)
    assert found.recommended is None
    assert [option.lookahead for option in found.options] == [PLAIN]  # it needs least
    assert json.loads(json.dumps(found.facts()))["recommended"] is None
    assert jlade.plan(SEVEN, "v5e", 1, batch_size=8, capacity=512, bits=8).recommended


def test_more_devices_are_taken_for_a_gain_only():
    """Beyond some number, collectives take longer than what another division saves."""
    found = jlade.plan(MODELS["1b"], "h100", 64, lookahead=None)
    assert found.recommended.layout.num_devices < 64
    assert found.recommended.layout == found.options[0].layout or found.recommended.layout.num_devices < 32


def test_compressions():
    """The paper reports 1.96 tokens per step, and a formula; in the limit of many guesses all N are accepted."""
    assert settings.paper(SETTING) == pytest.approx(1.96, abs=0.03)
    assert settings.paper(LookaheadConfig.paper(400, 3, 400)) == pytest.approx((3.106 - 1 + 3) / 3.106, rel=1e-6)
    one_guess = sum(0.425**i for i in range(5))  # E of one candidate: a geometric series
    assert settings.paper(LookaheadConfig.paper(1, 5, 1)) == pytest.approx((2.106 + one_guess) / 3.106)
    assert all(settings.tokens_per_step(PLAIN, source) == 1 for source in settings.SOURCES)
    sizes = json.loads((RESULTS / "bench_smollm2_sizes.json").read_text("utf-8"))
    found = {row["tokens/step"]: round(row["all"], 2) for row in sizes["tasks"]["rows"]}
    assert {names.label(x): y for x, y in settings.measured().items()} | {"plain": 1.0} == found
    best = jlade.plan(SEVEN, "h100", 8).recommended
    assert settings.tokens_per_step(best.lookahead, "smollm2") == best.compression
    (given,) = jlade.plan(SEVEN, "h100", lookahead=SETTING, compression=2.5).options
    assert given.compression == 2.5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be at least 1, got 0"),
        ({"count": 2.0}, TypeError, "count must be an integer"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"device": "cpu"}, ValueError, "device must be one of 'v4', .*; got 'cpu'"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of 'bfloat16', 'float16', 'float32'; got 'int8'"),
        ({"capacity": 4097}, ValueError, "capacity must be at most 4096, the model's positions, got 4097"),
        ({"compression": 2.0}, ValueError, "compression=2.0 is that of one setting: name it with lookahead"),
        ({"compression": "best"}, TypeError, 'must be "smollm2", "paper" or a number, got \'best\''),
        ({"compression": 5.5, "lookahead": SETTING}, ValueError, "compression must be 1 to 5 .*, got 5.5"),
        (
            {"lookahead": LookaheadConfig.paper(9, 3, 9)},
            ValueError,
            "was measured at 15, 5, 15; .*9, 3",
        ),
        (
            {"compression": "paper", "lookahead": LookaheadConfig.tree(7)},
            ValueError,
            "no formula for a tree, got tree=7",
        ),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        jlade.plan(SEVEN, **({"device": "v5e", "count": 2} | arguments))
