import logging
import re

import jax
import pytest

import jlade
from jlade.costs import devices
from tests.tiny import tiny_llama


@pytest.fixture
def chosen(monkeypatch):
    """Sets the platforms that the user chose."""

    def choose(platforms):
        monkeypatch.setattr(type(jax.config), "jax_platforms", platforms)

    return choose


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], None),
        (["dev/nvidiactl", "dev/vfio/vfio"], None),  # without a device
        (["dev/nvidia0"], 'an NVIDIA GPU, .*pip install "jlade\\[cuda12\\]" or pip install "jlade\\[cuda13\\]"'),
        (["dev/accel0"], 'a TPU, .*pip install "jlade\\[tpu\\]"'),
        (["dev/vfio/0"], "a TPU, but JAX runs on the CPU"),
    ],
)
def test_a_device_that_jax_does_not_see(files, message, tmp_path, chosen):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert devices.unseen(tmp_path) is None, "the suite chose the CPU"
    chosen(None)
    found = devices.unseen(tmp_path)
    if message is None:
        assert found is None
    else:
        assert re.search(message, found), found


def test_it_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(devices, "unseen", lambda: "a device")
    devices.log_unseen.cache_clear()
    with caplog.at_level(logging.WARNING, "jlade"):
        for _ in range(2):
            jlade.prepare(tiny_llama(), [1, 2], lookahead=None)
    assert [record.message for record in caplog.records] == ["a device"]
    devices.log_unseen.cache_clear()
