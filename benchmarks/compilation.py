"""Times of tracing, lowering and compiling `jlade.decode`, by shape and setting.

    python benchmarks/compilation.py
    python benchmarks/compilation.py --shapes 134m --only "134m plain"

The program is that of one prompt in a capacity of 1024 tokens, at the shapes of `inflate.py`; it needs no weights.
Adaptive decoding is one program with steps of three widths. `programs.py` has the times to the first token of whole
processes.
"""

import functools
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp

import jlade
from benchmarks import report
from benchmarks.inflate import SHAPES
from benchmarks.report import Figures
from jlade.config import PLAIN, LookaheadConfig
from jlade.mesh import default_device
from jlade.models.llama import init_params

SETTINGS = {
    "plain": PLAIN,
    "0,8,1": LookaheadConfig.paper(0, 8, 1),
    "15,5,15": LookaheadConfig.paper(15, 5, 15),
    "tree=7 adaptive": LookaheadConfig.tree(7, relative_step_time=1.4),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__, parts=True)
    parser.add_argument("--shapes", nargs="+", default=["134m", "7b"], choices=SHAPES, help="to compile")
    options = parser.parse_args(argv)
    parts = report.Parts(options, (), capacity=1024)
    for shape, setting in itertools.product(options.shapes, SETTINGS):
        parts.run(f"{shape} {setting}", functools.partial(_compile, shape, SETTINGS[setting]))
    parts.finish()


def _compile(shape: str, lookahead: LookaheadConfig) -> Figures:
    """Times the three stages of the compilation of `jlade.decode`."""
    dtype = jnp.float32 if default_device().platform == "cpu" else jnp.bfloat16
    params = jax.eval_shape(lambda key: init_params(key, SHAPES[shape], dtype), jax.random.key(0))
    inputs, config = jlade.prepare(params, [0], lookahead=lookahead, eos_ids=())
    times = [time.perf_counter()]
    traced = jax.jit(jlade.decode, static_argnames="config").trace(params, inputs, config)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    stages = zip(("tracing", "lowering", "compiling"), itertools.pairwise(times), strict=True)
    figures = {f"{stage}, s": end - begin for stage, (begin, end) in stages}
    return {"layers": SHAPES[shape].num_layers} | figures | {"together, s": times[-1] - times[0]}


if __name__ == "__main__":
    main()
