"""Time and error of attention in a step: plain JAX and the kernel of the device.

    python benchmarks/attention.py           # on a GPU or TPU: the shape of LLaMA-2-7B, and with grouped heads
    python benchmarks/attention.py --tiny    # on a CPU

A step is the attention of all layers in sequence. Each layer has its own cache, so that caches are read from memory as
in a model. The floor is the time of a copy of as many bytes as the keys and values in use. The error is
||x - y|| / ||y|| of the first layer, where y is plain attention in float32 on the same numbers. Rounding the result to
bfloat16 alone gives about 0.002.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from benchmarks import report
from benchmarks.measure import seconds
from jlade.mesh import default_device
from jlade.models import kernels
from jlade.models.attention import Operands, attend

FULL: dict[str, Any] = {"layers": 32, "head_dim": 128, "heads": ((32, 32), (32, 8)), "blocks": (1, 8, 120)}
FULL |= {"lengths": (512, 2048, 8192), "copied_bytes": 2**30}
TINY: dict[str, Any] = {"layers": 2, "head_dim": 64, "heads": ((4, 4), (4, 2)), "blocks": (1, 8)}
TINY |= {"lengths": (64, 512), "copied_bytes": 2**26}


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes: seconds on a CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--head-dim", type=int, metavar="D", help="instead of 128, or of 64 with --tiny")
    parser.add_argument("--layers", type=int, metavar="N", help="instead of 32, or of 2 with --tiny")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="T", help="tokens of a step, instead of 1, 8 and 120")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="L", help="cached, instead of 512, 2048 and 8192")
    parser.add_argument("--repeat", type=int, default=5, metavar="R", help="measurements; the median is reported")
    parser.add_argument("--calls", type=int, default=10, metavar="C", help="consecutive steps per measurement")
    options = parser.parse_args(argv)
    sizes = TINY if options.tiny else FULL
    sizes = sizes | {name: value for name, value in vars(options).items() if name in sizes and value is not None}
    measure = functools.partial(seconds, repeat=options.repeat, calls=options.calls)

    bandwidth = copy_rate(sizes["copied_bytes"], measure)
    layers, head_dim, capacity = sizes["layers"], sizes["head_dim"], max(sizes["lengths"])
    implementations = _implementations(options.dtype, sizes["heads"][0], head_dim)
    figures: list[dict[str, Any]] = []
    facts = {"copy_bytes_per_second": bandwidth, "dtype": options.dtype, "layers": layers}
    facts |= {"head_dim": head_dim, "capacity": capacity}
    cases = list(itertools.product(sizes["heads"], sizes["blocks"], sizes["lengths"]))
    for (heads, kv_heads), block_size, length in track(cases, "cases"):
        block, caches = _arguments(layers, block_size, heads, kv_heads, head_dim, capacity, options.dtype)
        lengths = jnp.array([length], jnp.int32)
        with jax.default_matmul_precision("highest"):
            exact = _step(*float32((block, caches[:1])), lengths, "plain")
        floor = 2 * layers * kv_heads * length * head_dim * block[0].itemsize / bandwidth
        for implementation in implementations:
            error = relative_error(_step(block, caches[:1], lengths, implementation), exact)
            taken = measure(functools.partial(_step, implementation=implementation), block, caches, lengths)
            figures.append({"heads": heads, "kv_heads": kv_heads, "tokens": block_size, "cached": length})
            figures[-1] |= {"implementation": implementation, "seconds": taken, "floor_seconds": floor}
            figures[-1] |= {"relative_error": error}
        report.write(options.json, facts | {"cases": figures})  # after each case, in case the time runs out
    print_cases(["heads", "kv_heads", "tokens", "cached"], figures)


def _arguments(
    layers: int, block_size: int, heads: int, kv_heads: int, head_dim: int, capacity: int, dtype: str
) -> tuple[tuple[jax.Array, ...], list[tuple[jax.Array, jax.Array]]]:
    """Returns queries, keys and values of a block, and the cached keys and values of each layer."""
    random_keys = iter(jax.random.split(jax.random.key(0), 3 + 2 * layers))

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(random_keys), shape, dtype)

    block = tuple(draw(1, block_size, count, head_dim) for count in (heads, kv_heads, kv_heads))
    cache = (1, kv_heads, capacity, head_dim)
    return block, [(draw(*cache), draw(*cache)) for _ in range(layers)]


@functools.partial(jax.jit, static_argnames="implementation")
def _step(block: tuple[jax.Array, ...], caches: Any, lengths: jax.Array, implementation: str) -> jax.Array:
    """Returns the result of the last layer. Each result is the queries of the next layer, so they run in order."""
    queries, keys, values = block
    mask = np.tri(queries.shape[1], dtype=bool)
    for cached_keys, cached_values in caches:
        operands = Operands(queries, keys, values, cached_keys, cached_values, lengths, mask)
        queries = attend(operands, implementation=implementation)
    return queries


def float32(arrays: Any) -> Any:
    """Returns a pytree of arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), arrays)


def relative_error(got: jax.Array, exact: jax.Array) -> float:
    return float(jnp.linalg.norm(got.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))


def print_cases(names: Sequence[str], figures: Iterable[dict[str, Any]]) -> None:
    """Prints the times and errors of cases, each after the values of these names."""
    columns = *names, "floor, ms", "implementation", "ms", "x floor", "error"
    rows = []
    for case in figures:
        seconds, floor = case["seconds"], case["floor_seconds"]
        times = f"{1e3 * floor:.3f}", case["implementation"], f"{1e3 * seconds:.3f}", f"{seconds / floor:.2f}"
        rows.append([*(str(case[name]) for name in names), *times, f"{case['relative_error']:.5f}"])
    report.print_table(columns, rows)


def _implementations(dtype: str, heads: tuple[int, int], head_dim: int) -> list[str]:
    """Returns the implementations that run on the default device, and prints the reasons against the others."""
    running, shapes = [], [kernels.HeadShape(*heads, head_dim, dtype)]
    for implementation in ("plain", "gpu", "tpu"):
        try:
            running.append(kernels.choose("attention", implementation, shapes, default_device()))
        except ValueError as error:
            print(f"left out: {error}")
    return running


def copy_rate(num_bytes: int, measure: Callable[..., float]) -> float:
    """Returns and prints the bytes that copies of so many bytes read and write in a second."""
    copied = jnp.ones(num_bytes // 4, jnp.float32)
    passes = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, x: x + 1, x))
    rate = 10 * 2 * copied.nbytes / measure(passes, copied)
    print(f"{default_device().device_kind}, JAX {jax.__version__}: copies {rate / 1e9:.0f} GB/s")
    return rate


if __name__ == "__main__":
    main()
