"""Time and error of a layer's experts: plain JAX and the kernel for Hopper GPUs.

    python benchmarks/expert_kernel.py           # on a GPU: the shapes of Qwen3-30B-A3B, GPT-OSS-20B and Mixtral-8x7B
    python benchmarks/expert_kernel.py --tiny    # on a CPU

A measurement runs some layers in sequence. Each has its own weights, so that they are read from memory as in a model,
and each token has random experts, evenly spread. The floor is the time to read the weights of the experts in use, at
the rate at which a copy reads and writes. The error is ||x - y|| / ||y|| of the first layer, where y is plain JAX in
float32 on the same numbers. The kernel is measured for one token too, which `jlade.models.experts.mix` leaves to plain
JAX.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from benchmarks import report
from benchmarks.attention import copy_rate, float32, print_cases, relative_error
from benchmarks.measure import seconds
from jlade.mesh import default_device
from jlade.models import kernels
from jlade.models.experts import Experts, hopper, mix, ways
from jlade.models.kernels import ExpertShape

# Experts, those of a token, and sizes
FULL = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
TINY = {"tiny": (8, 2, 128, 64)}
BLOCKS = (1, 8, 32, 120, 512)  # tokens
LAYERS = 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes: seconds on a CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--shapes", nargs="+", choices=list(FULL), help="of these models alone")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="T", help="tokens, instead of 1, 8, 32, 120 and 512")
    parser.add_argument("--repeat", type=int, default=5, metavar="R", help="measurements; the median is reported")
    parser.add_argument("--calls", type=int, default=10, metavar="C", help="consecutive calls per measurement")
    options = parser.parse_args(argv)
    measure = functools.partial(seconds, repeat=options.repeat, calls=options.calls)
    rate = copy_rate(2**26 if options.tiny else 2**30, measure)
    figures: list[dict[str, Any]] = []
    shapes, blocks = (TINY, (1, 8)) if options.tiny else (FULL, BLOCKS)
    shapes = {name: sizes for name, sizes in shapes.items() if name in (options.shapes or shapes)}
    blocks = options.blocks or blocks
    facts = {"copy_bytes_per_second": rate, "dtype": options.dtype, "layers": LAYERS}
    for name, sizes in shapes.items():
        shape = ExpertShape(*sizes, options.dtype)
        implementations = _implementations(shape)
        layers = [_random_experts(jax.random.key(i), shape) for i in range(LAYERS)]
        for num_tokens in track(blocks, name):
            x, routes = _random_tokens(num_tokens, shape)
            with jax.default_matmul_precision("highest"):
                exact = _layers(*float32((x, layers[:1])), routes[:1], "plain")
            used = sum(len(np.unique(chosen)) for chosen, _ in routes) / LAYERS
            floor = used * 3 * shape.size * shape.width * x.itemsize / rate
            for implementation in implementations:
                error = relative_error(_layers(x, layers[:1], routes[:1], implementation), exact)
                run = functools.partial(_layers, implementation=implementation)
                time = measure(run, x, layers, routes) / LAYERS
                figures.append({"shape": name, "tokens": num_tokens, "implementation": implementation})
                figures[-1] |= {"seconds": time, "floor_seconds": floor, "relative_error": error}
            report.write(options.json, facts | {"cases": figures})  # after each case, in case the time runs out
        del layers
    print_cases(["shape", "tokens"], figures)


def _implementations(shape: ExpertShape) -> list[str]:
    """Returns the implementations that run on the default device, and prints the reason against the kernel."""
    try:
        return ["plain", kernels.choose("experts", "gpu", [shape], default_device())]
    except ValueError as error:
        print(f"left out: {error}")
        return ["plain"]


@functools.partial(jax.jit, static_argnames="shape")
def _random_experts(key: jax.Array, shape: ExpertShape) -> Experts:
    """Returns experts without biases. They are drawn one at a time, which takes less memory."""
    inner = shape.size, shape.width

    def draw(key: jax.Array, sizes: tuple[int, int]) -> jax.Array:
        one = functools.partial(jax.random.normal, shape=sizes, dtype=shape.dtype)
        return jax.lax.map(lambda key: one(key) * sizes[0] ** -0.5, jax.random.split(key, shape.number))

    return Experts(*map(draw, jax.random.split(key, 3), (inner, inner, inner[::-1])))


def _random_tokens(num_tokens: int, shape: ExpertShape) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Returns tokens [T, E], and their experts and weights [T, K] in each layer."""
    rng = np.random.default_rng(num_tokens)

    def route() -> tuple[jax.Array, jax.Array]:
        order = rng.permuted(np.tile(np.arange(shape.number, dtype=np.int32), (num_tokens, 1)), axis=1)
        weights = rng.dirichlet(np.ones(shape.per_token), num_tokens)
        return jnp.asarray(order[:, : shape.per_token]), jnp.asarray(weights, jnp.float32)

    x = jnp.asarray(rng.standard_normal((num_tokens, shape.size), np.float32), shape.dtype)
    return x, [route() for _ in range(LAYERS)]


@functools.partial(jax.jit, static_argnames="implementation")
def _layers(x: jax.Array, layers: list[Experts], routes: Any, implementation: str) -> jax.Array:
    """Returns the result of the last layer. Each result is added to the tokens of the next layer."""
    for experts, (chosen, weights) in zip(layers, routes, strict=True):
        if implementation == "gpu":
            rows = ways.rows_of_tile(chosen.size / experts.number, hopper.ROWS)
            mixed = ways.tiled(x, chosen, weights, experts, "silu", rows, hopper.multiply)
        else:
            mixed = mix(x, chosen, weights, experts, "silu", implementation=implementation)
        x += mixed
    return mixed


if __name__ == "__main__":
    main()
