"""Four bits that are rounded for the inputs of some text."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade.cli import main
from jlade.conversion.calibration import mean_squares
from jlade.models import nn
from jlade.models.grouped import quantize_in_groups
from jlade.models.llama import quantize
from tests.conversion.hf_files import DEMO, assert_equal
from tests.tiny import tiny_llama

MATRICES = {f"attention.{name}" for name in ("query", "key", "value", "output")} | {"mlp.gate", "mlp.up", "mlp.down"}


def test_the_mean_squares_are_those_of_every_product(monkeypatch):
    params = tiny_llama(max_positions=8)
    tokens = np.random.default_rng(0).integers(0, 13, 21).tolist()  # two windows of 8; the rest is left out
    found = mean_squares(params, tokens)
    expected = {}
    multiply = nn._multiply

    def record(x, weight):
        expected.setdefault(id(weight), []).append(np.square(np.asarray(x)).reshape(-1, x.shape[-1]))
        return multiply(x, weight)

    monkeypatch.setattr(nn, "_multiply", record)
    with jax.disable_jit():
        for begin in (0, 8):
            window = jnp.asarray(tokens[begin : begin + 8])[None]
            cache = params.decoder.init_cache(params, 1, 8)
            params.decoder.forward(params, window, jnp.arange(8)[None], cache, np.tri(8, dtype=bool))
    assert len(found) == len(params.layers)
    for layer, of_layer in zip(params.layers, found, strict=True):
        assert of_layer.keys() == MATRICES
        for field, squares in of_layer.items():
            rows = np.concatenate(expected[id(operator.attrgetter(field)(layer))])
            assert len(rows) == 16
            np.testing.assert_allclose(squares, rows.mean(axis=0), rtol=1e-4)


def test_errors_of_important_inputs_get_smaller():
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(rng.normal(size=(128, 40)), jnp.float32)
    importance = np.exp(2 * rng.normal(size=128)).astype(np.float32)
    error, of_equal = (
        (importance[:, None] * np.square(quantize_in_groups(matrix, 64, each).values() - matrix)).sum()
        for each in (importance, None)
    )
    assert error < 0.9 * of_equal
    for extreme in (np.zeros(128), np.eye(128)[3] * 1e30, np.full(128, 1e-30)):
        assert np.isfinite(quantize_in_groups(matrix, 64, extreme).values()).all()
    equal = quantize_in_groups(matrix, 64, np.full(128, 5.0))
    np.testing.assert_array_equal(equal.weight, quantize_in_groups(matrix, 64).weight)
    assert quantize_in_groups(jnp.stack([matrix] * 3), 64, importance).weight.shape == (3, 64, 40)


@pytest.mark.slow
def test_the_command_calibrates(demo, tmp_path, capsys):
    text = "def read_config(path):\n    return json.loads(path.read_text())\n" * 40
    (tmp_path / "text.txt").write_text(text)
    run = ["convert", str(DEMO), str(tmp_path / "small"), "--dtype", "float32"]
    calibrated = ["--calibrate", str(tmp_path / "text.txt")]
    assert main([*run, "--bits", "4", *calibrated]) == 0
    params, tokenizer = demo
    importance = mean_squares(params, tokenizer.encode(text).ids)
    assert_equal(jlade.load(tmp_path / "small")[0], quantize(params, 4, importance=importance))
    (tmp_path / "empty.txt").write_text("")
    run[2] = str(tmp_path / "new")
    for arguments, message in (
        (calibrated, "--calibrate needs --bits 4"),
        (["--bits", "4", "--calibrate", str(tmp_path / "empty.txt")], "empty.txt has no text to calibrate with"),
        (["--bits", "4", "--calibrate", str(tmp_path / "nowhere.txt")], "nowhere.txt"),
    ):
        with pytest.raises(SystemExit):
            main([*run, *arguments])
        assert message in capsys.readouterr().err
