import dataclasses

import jax.numpy as jnp
import pytest

from jlade import LookaheadConfig
from jlade.config import MAX_BLOCK_SIZE, PLAIN, SMALL_BLOCK
from jlade.conversion.tensors import param_shapes
from jlade.costs import devices, estimate
from jlade.costs.devices import DEVICES
from jlade.costs.estimate import Operation, Rates
from jlade.models.llama import LlamaConfig

TREE = LookaheadConfig.tree(119)


@pytest.mark.parametrize(
    ("platform", "device_kind", "setting"),
    [
        ("cpu", "cpu", SMALL_BLOCK),
        ("gpu", "NVIDIA A100-SXM4-80GB", TREE),  # the paper found a block of this size best on it
        ("gpu", "NVIDIA A100-SXM4-40GB", TREE),
        ("gpu", "NVIDIA H100 80GB HBM3", TREE),
        ("gpu", "NVIDIA H200", TREE),
        ("gpu", "NVIDIA L4", TREE),
        ("gpu", "NVIDIA GeForce RTX 4090", TREE),
        ("gpu", "NVIDIA GeForce RTX 3090", LookaheadConfig.tree(63)),
        ("tpu", "TPU v4", TREE),
        ("tpu", "TPU v5 lite", TREE),
        ("tpu", "TPU v5p", TREE),
        ("tpu", "TPU v6 lite", TREE),
        ("gpu", "one of tomorrow's", LookaheadConfig.tree(63)),
    ],
)
def test_estimates(platform, device_kind, setting):
    assert estimate.estimate(platform, device_kind) == setting


@pytest.mark.parametrize(
    ("device_kind", "rate", "bandwidth"),  # TFLOP/s and GB/s
    [
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA L4", 121, 300),
        ("TPU v5 lite", 197, 819),
        ("TPU v5", 459, 2765),
    ],
)
@pytest.mark.parametrize("weight_bytes", [1, 2])
def test_at_the_widest_free_block_arithmetic_takes_what_reading_does(device_kind, rate, bandwidth, weight_bytes):
    """The shares of the peak rates, 0.8 and 0.9, are written out here: they decide which settings are free."""
    num_parameters = 7e9
    block_size = weight_bytes * (0.8 * rate * 1e12) / (2 * 0.9 * bandwidth * 1e9)
    expected = weight_bytes * num_parameters / (0.9 * bandwidth * 1e9)
    rates = estimate.rates("tpu" if "TPU" in device_kind else "gpu", device_kind)
    got = estimate.step_time(rates, block_size, weights=estimate.Weights(weight_bytes))
    assert (num_parameters * got.arithmetic, num_parameters * got.memory) == pytest.approx((expected, expected))
    twice = estimate.step_time(rates, 2 * block_size, weights=estimate.Weights(weight_bytes))
    assert twice.total == pytest.approx(2 * got.total)


def test_texts_decoded_at_once_share_the_room():
    """262 tokens are free on an H100 in bfloat16, 131 in int8."""
    h100 = "NVIDIA H100 80GB HBM3"

    def sizes(weight_bytes):
        batches = (1, 2, 4, 32, 256)
        return [estimate.estimate("gpu", h100, batch, estimate.Weights(weight_bytes)).block_size for batch in batches]

    assert sizes(2) == sizes(4) == [120, 120, 64, 8, 1]
    assert sizes(1) == [120, 64, 32, 4, 1]
    assert estimate.estimate("gpu", h100, 256) == PLAIN


def test_a_device_is_known_by_its_kind_and_its_relatives_by_a_part_of_it():
    assert all(devices.of_kind(device.kind) is device for device in DEVICES.values())
    relatives = {"NVIDIA H100 80GB HBM2e": "h100", "NVIDIA A100-SXM-64GB": "a100", "TPU v5p": "v5p"}
    assert all(devices.of_kind(kind) is DEVICES[name] for kind, name in relatives.items())


def test_an_unknown_device_is_taken_for_the_one_with_the_least_room():
    times = [estimate.step_times("gpu", device.kind) for device in DEVICES.values()]
    unknown = estimate.step_times("gpu", "unknown")
    assert unknown[MAX_BLOCK_SIZE] / unknown[1] == max(each[MAX_BLOCK_SIZE] / each[1] for each in times)


@pytest.mark.parametrize("batch_size", [1, 32, 1024])
def test_step_times_grow_from_the_free_tokens_on(batch_size):
    times = estimate.step_times("gpu", "NVIDIA H100 80GB HBM3", batch_size)
    room = 0.8 * 989 / (0.9 * 3.35) / batch_size
    relative = {size: times[size] * 0.9 * 3.35e12 / 2 for size in times}
    assert relative == pytest.approx({size: max(1.0, size / room) for size in times})
    assert list(times) == [1, 4, 8, 16, 32, 64, 120, MAX_BLOCK_SIZE]


def test_arithmetic_and_reading_add_up_on_a_cpu():
    """As measured: a step of 120 tokens takes 10.5 times a plain one (docs/speed.md)."""
    times = estimate.step_times("cpu", "cpu", weights=estimate.Weights(4))
    assert times[120] / times[1] == pytest.approx(10.5, rel=0.25)
    time = estimate.time(estimate.CPU, [Operation(3e9, 7e9)])
    assert time.total == time.arithmetic + time.memory == pytest.approx(3 / 180 + 7 / 35)


def test_operations_run_one_after_the_other_but_for_asynchronous_ones():
    rates = Rates(flops=1e9, bytes=1e9, cycles=2e9, kernel=0.1)
    product, short, slow = (
        Operation(1e9, 5e8, kernels=1),
        Operation(0, 1e6, kernels=1, times=3),
        Operation(0, 0, cycles=10**9),
    )
    assert estimate.time(rates, [product, short, slow]) == pytest.approx((1 + 3 * 0.1 + 0.5, 1.5, 0.503))
    copy = Operation(0, 1e9, kernels=1, is_asynchronous=True)
    assert estimate.time(rates, [product, copy]).total == pytest.approx(1.5)  # the bandwidth is the limit
    assert estimate.time(rates, [product, product, copy]).total == pytest.approx(2)


def test_the_estimate_is_never_taken_for_slower_than_plain_decoding():
    for platform, kind in (("cpu", "cpu"), *(("gpu", device.kind) for device in DEVICES.values())):
        for batch_size in (1, 2, 4, 8, 64):
            setting = estimate.estimate(platform, kind, batch_size)
            assert estimate.speed_limit(setting, estimate.step_times(platform, kind, batch_size)) >= 1
    assert (
        estimate.speed_limit(LookaheadConfig.paper(15, 5, 15), estimate.step_times("gpu", "NVIDIA A100-SXM4-80GB", 32))
        < 1
    )


@pytest.mark.parametrize(("bits", "expected"), [(None, 2.0), (8, 1.0), (4, 0.5625)])
def test_weights_are_the_bytes_of_a_parameter(bits, expected):
    """Of a model whose matrices of layers are nearly all of it, also in experts."""
    config = LlamaConfig(13, 512, 1024, 2, 4, 2, 128, 64)
    for each in (config, dataclasses.replace(config, num_experts=4, expert_size=512, experts_per_token=2)):
        weights = estimate.weights_of(param_shapes(each, jnp.bfloat16, bits))
        assert weights.num_bytes == pytest.approx(expected, rel=0.03)
        assert weights.in_experts == (pytest.approx(4 * 3 / 21, rel=0.02) if each.num_experts else 0)
