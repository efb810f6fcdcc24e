"""The time that a grammar adds to a step, by the compiler of any device, and measured where it is attached.

    python benchmarks/grammar_cost.py --device h100
    python benchmarks/grammar_cost.py --device cpu --shape 135m --repeats 5

The grammar is a table of random states, of which each allows half of all tokens. The models have random weights.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks import report
from benchmarks.inflate import LLAMA_3_8B, SMOLLM2_135M
from jlade.constraints.grammar import Tables
from jlade.constraints.moves import DEAD
from jlade.constraints.tokens import Table
from jlade.decoding.state import Inputs
from jlade.generation.lookahead import with_sources
from jlade.inspection.model_programs import ModelPrograms
from jlade.models.llama import init_params

SHAPES = {"8b": LLAMA_3_8B, "135m": SMOLLM2_135M}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--device", required=True, metavar="NAME", help="as in `jlade inspect`")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="(default: %(default)s)")
    parser.add_argument("--states", type=int, default=10_000, metavar="S", help="(default: %(default)s)")
    parser.add_argument("--classes", type=int, default=255, metavar="C", help="(default: %(default)s)")
    parser.add_argument("--tree", type=int, default=63, metavar="M", help="drafts (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="the shortest counts (default: %(default)s)"
    )
    options = parser.parse_args()
    dtype = jnp.float32 if options.device == "cpu" else jnp.bfloat16
    config = SHAPES[options.shape]
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype))
    tables = random_tables(options.states, options.classes, config.vocab_size)

    inputs = ModelPrograms.inputs

    def constrained(self: ModelPrograms, *arguments: Any) -> Inputs:
        made = inputs(self, *arguments)
        return dataclasses.replace(made, constraint=jax.tree.map(jnp.asarray, tables))

    setting = jlade.LookaheadConfig.tree(options.tree)
    facts: dict[str, Any] = {"device_name": options.device, "shape": options.shape, "tree": options.tree}
    facts |= {"states": options.states, "classes": options.classes, "vocab_size": config.vocab_size}
    for name, used in options.repeats * [("without", setting), ("with", with_sources(setting, "grammar"))]:
        with mock.patch.object(ModelPrograms, "inputs", constrained if name == "with" else inputs):
            found = jlade.inspect(params, options.device, lookahead=used)
        assert found.step is not None, found.failure
        figures = found.facts()
        if figures["step_measured_ms"] and name in facts:
            figures["step_measured_ms"] = min(figures["step_measured_ms"], facts[name]["step_measured_ms"])
        facts[name] = figures
        print(name, facts[name])
    for kind in ("estimate", "measured"):
        values = [facts[name][f"step_{kind}_ms"] for name in ("with", "without")]
        if all(values):
            facts[f"added_{kind}"] = values[0] / values[1] - 1
            print(f"a grammar adds {facts[f'added_{kind}']:.1%} to the {kind} time of a step")
    report.write(options.json, facts)


def random_tables(num_states: int, num_classes: int, vocab_size: int) -> Tables:
    """Returns the tables of one sequence."""
    rng = np.random.default_rng(0)
    shape = num_states, num_classes
    after = np.where(rng.random(shape) < 0.5, rng.integers(num_states, size=shape), DEAD).astype(np.int32)
    likely = rng.integers(-2, vocab_size, num_states, dtype=np.int32)
    return Tables.of([Table(after, rng.integers(num_classes, size=vocab_size, dtype=np.int32), likely)])


if __name__ == "__main__":
    main()
