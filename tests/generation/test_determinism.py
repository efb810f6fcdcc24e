"""Equal calls give equal bits, in one process and in two, and also where a mesh divides the sequences alone."""

import json

import numpy as np
import pytest

from tests.processes import started

pytestmark = pytest.mark.slow

CALLS = """
import json
import jax, numpy as np
import jlade
from jlade import LookaheadConfig, SamplingConfig
from tests.tiny import tiny_llama

params = tiny_llama(hidden_size=64, intermediate_size=96, head_dim=16)
prompts, keys = [[5, 1, 7 + i % 5, i] for i in range(8)], jax.random.split(jax.random.key(1), 8)

def generate(first, last, setting, **mesh):
    lookahead = None if setting == "plain" else LookaheadConfig.tree(7)
    sampling = SamplingConfig(temperature=1.0)
    mesh = jlade.make_mesh(**mesh) if mesh else None
    out = jlade.generate(params, prompts[first:last], max_new_tokens=20, lookahead=lookahead, sampling=sampling,
                         key=keys[first:last], eos_ids=(), logprobs=True, mesh=mesh)
    return [(ids.tolist(), values.tobytes().hex()) for ids, values in zip(out.tokens, out.logprobs)]

def alone(setting, **mesh):
    return [row for i in range(8) for row in generate(i, i + 1, setting, **mesh)]

def in_batches(size, setting, **mesh):
    return [row for i in range(0, 8, size) for row in generate(i, min(i + size, 8), setting, **mesh)]

found = {}
for setting in "plain", "tree":
    found[setting, "alone"] = alone(setting)
    found[setting, "again"] = alone(setting)
    found[setting, "data"] = generate(0, 8, setting, data=8)
found["plain", "of 8"] = in_batches(8, "plain")
found["plain", "of 8 again"] = in_batches(8, "plain")
found["plain", "of 3"] = in_batches(3, "plain")
found["plain", "model"] = in_batches(8, "plain", model=2)
found["tree", "lookahead"] = alone("tree", lookahead=8)[:2]
print(json.dumps([[*name, rows] for name, rows in found.items()]))
"""


@pytest.fixture(scope="module")
def processes():
    """The output of two processes: (setting, call) -> tokens and bits of log-probabilities of each prompt."""
    found = []
    for _ in range(2):  # the second one loads the programs that the first one compiles
        with started([["-c", CALLS]], 8) as (process,):
            output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        found.append({(setting, call): rows for setting, call, rows in json.loads(output)})
    return found


def test_two_processes(processes):
    assert processes[0] == processes[1]


@pytest.mark.parametrize(
    ("call", "other"),
    [
        (("plain", "alone"), ("plain", "again")),
        (("tree", "alone"), ("tree", "again")),
        (("plain", "of 8"), ("plain", "of 8 again")),
        (("plain", "alone"), ("plain", "data")),
        (("tree", "alone"), ("tree", "data")),
    ],
)
def test_equal_bits(processes, call, other):
    assert processes[0][call] == processes[0][other]


@pytest.mark.parametrize("other", [("plain", "of 8"), ("plain", "of 3"), ("plain", "model"), ("tree", "alone")])
def test_equal_texts_where_products_sum_in_another_order(processes, other):
    """Their bits differ, as docs/how_it_works.md says."""
    for (tokens, bits), (same, others) in zip(processes[0]["plain", "alone"], processes[0][other], strict=True):
        assert tokens == same
        values, near = (np.frombuffer(bytes.fromhex(each), np.float32) for each in (bits, others))
        np.testing.assert_allclose(values, near, rtol=0, atol=2e-5)
