"""Matrices in the formats of other quantizers that their packages wrote, against the values that these decode."""

import json

import numpy as np
import pytest
import safetensors

from jlade.conversion.weight_files import read_header
from tests.conversion.packed_files import GOLDEN
from tests.stress import checkpoints

with safetensors.safe_open(GOLDEN, "numpy") as stored:
    CONFIGS = {name: json.loads(value) for name, value in stored.metadata().items() if value.startswith("{")}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_values_are_those_of_the_package(name, tmp_path):
    tensors = {
        key.removeprefix(f"{name}/"): each.read_bytes(key)
        for key, each in read_header(GOLDEN).items()
        if key.startswith(f"{name}/")
    }
    expected = tensors.pop("values")
    found = checkpoints.read(tmp_path, tensors, CONFIGS[name])
    codes = next(tensors[key] for key in ("weight", "weight_packed", "_weight_qdata") if key in tensors)
    assert len(found) == (1 if codes.dtype == "float8_e4m3fn" else 2)  # as read, and as kept
    for values in found:
        np.testing.assert_array_equal(values, expected)
