import pytest

from jlade import LookaheadConfig
from jlade.config import MAX_BLOCK_SIZE, PLAIN, SMALL_BLOCK
from jlade.devices import estimate, sheet

PAPERS = {size: LookaheadConfig(size, 5, size) for size in (15, 10, 7)}


@pytest.mark.parametrize(
    ("platform", "device_kind", "setting"),
    [
        ("cpu", "cpu", SMALL_BLOCK),
        ("gpu", "NVIDIA A100-SXM4-80GB", PAPERS[15]),  # as the paper found on it
        ("gpu", "NVIDIA A100-SXM4-40GB", PAPERS[15]),
        ("gpu", "NVIDIA H100 80GB HBM3", PAPERS[15]),
        ("gpu", "NVIDIA H200", PAPERS[15]),
        ("gpu", "NVIDIA L4", PAPERS[15]),
        ("gpu", "NVIDIA GeForce RTX 4090", PAPERS[15]),
        ("gpu", "NVIDIA GeForce RTX 3090", PAPERS[7]),
        ("tpu", "TPU v4", PAPERS[15]),
        ("tpu", "TPU v5 lite", PAPERS[15]),
        ("tpu", "TPU v5p", PAPERS[15]),
        ("tpu", "TPU v6 lite", PAPERS[15]),
        ("gpu", "one of tomorrow's", PAPERS[7]),
    ],
)
def test_estimates(platform, device_kind, setting):
    assert estimate.estimate(platform, device_kind) == setting


@pytest.mark.parametrize(
    ("device_kind", "rate", "bandwidth"),  # TFLOP/s and GB/s
    [
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA L4", 121, 300),
        ("TPU v5 lite", 197, 819),
        ("TPU v5", 459, 2765),
    ],
)
@pytest.mark.parametrize("num_parameters", [1e6, 7e9])
def test_at_the_widest_block_arithmetic_takes_what_reading_does(device_kind, rate, bandwidth, num_parameters):
    block_size = estimate.free_tokens(device_kind)
    arithmetic = 2 * num_parameters * block_size / (rate * 1e12)
    reading = 2 * num_parameters / (bandwidth * 1e9)
    assert arithmetic == pytest.approx(estimate.MARGIN * reading)


def test_texts_decoded_at_once_share_the_room():
    h100 = "NVIDIA H100 80GB HBM3"
    sizes = [estimate.estimate("gpu", h100, batch_size).block_size for batch_size in (1, 2, 4, 32, 256)]
    assert sizes == [120, 80, 56, 4, 1]
    for batch_size, size in zip((1, 2, 4, 32), sizes, strict=False):
        assert batch_size * size <= estimate.free_tokens(h100)
    assert estimate.estimate("gpu", h100, 256) == PLAIN


def test_an_unknown_device_is_taken_for_the_one_with_the_least_room():
    assert estimate.free_tokens("unknown") == min(map(estimate.free_tokens, sheet.SHEETS))


@pytest.mark.parametrize("batch_size", [1, 32, 1024])
def test_step_times_grow_from_the_free_tokens_on(batch_size):
    h100 = "NVIDIA H100 80GB HBM3"
    times = estimate.step_times("gpu", h100, batch_size)
    room = estimate.free_tokens(h100) / batch_size
    assert times == pytest.approx({size: max(1.0, size / room) for size in times})
    assert list(times) == sorted({1, max(1, int(room)), MAX_BLOCK_SIZE})


def test_the_estimate_is_never_taken_for_slower_than_plain_decoding():
    for platform, kind in (("cpu", "cpu"), *(("gpu", name) for name in sheet.SHEETS)):
        for batch_size in (1, 2, 4, 8, 64):
            setting = estimate.estimate(platform, kind, batch_size)
            assert estimate.speed_limit(setting, estimate.step_times(platform, kind, batch_size)) >= 1
    assert estimate.speed_limit(PAPERS[15], estimate.step_times("gpu", "NVIDIA A100-SXM4-80GB", 32)) < 1
