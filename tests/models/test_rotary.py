import numpy as np

from jlade.models.rotary import LinearScaling, Llama3Scaling, YarnScaling, inverse_frequencies

THETA = 500000.0


def test_llama3_scaling_keeps_fast_rotations_and_slows_slow_ones():
    plain = inverse_frequencies(128, THETA)
    ratio = inverse_frequencies(128, THETA, Llama3Scaling(8.0, 1.0, 4.0, 8192)) / plain
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 4], 1.0)
    np.testing.assert_allclose(ratio[turns < 1], 1 / 8, rtol=1e-6)
    between = ratio[(turns >= 1) & (turns <= 4)]
    assert len(between) > 0
    assert np.all((between > 1 / 8) & (between < 1))


def test_yarn_keeps_fast_rotations_and_slows_slow_ones():
    plain = inverse_frequencies(128, THETA)
    ratio = inverse_frequencies(128, THETA, YarnScaling(4.0, 32.0, 1.0, 1.1, 8192)) / plain
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.8], 1 / 4, rtol=1e-6)
    assert np.all(np.diff(ratio) <= 1e-6)


def test_linear_scaling_slows_every_rotation():
    np.testing.assert_allclose(
        inverse_frequencies(8, THETA, LinearScaling(4.0)), inverse_frequencies(8, THETA) / 4, rtol=1e-6
    )
