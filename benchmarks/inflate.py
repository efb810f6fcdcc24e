"""Checkpoints with the shapes of large models and the function of the demo model, to measure speed on real text.

    python benchmarks/inflate.py 134m DIR                    # 536 MB in float32
    python benchmarks/inflate.py 1b DIR --dtype bfloat16     # 2.2 GB
    python benchmarks/inflate.py 7b DIR --dtype bfloat16     # 13.5 GB

DIR is a new directory in Hugging Face format, with the demo's tokenizer. `inflate` makes the same parameters on the
default device, without files:

    params = inflate(jlade.demo("bfloat16")[0], SHAPES["7b"], jax.random.key(0))

In float32 the logits differ from the demo's by at most 3e-5. In bfloat16 they differ by 0.1 to 0.2, because sums and
scaled weights round differently; the weights of 7b do not, since its scales are powers of two.
"""

import argparse
import dataclasses
import math
import operator
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from jlade.conversion import save_hf
from jlade.mesh import num_bytes
from jlade.models.layers import Layer, build
from jlade.models.layers.arrays import Array
from jlade.models.llama import LlamaConfig, LlamaParams

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "max_positions"),
)


def _shape(*sizes: int) -> LlamaConfig:
    """Returns the configuration with these `SIZES`."""
    fields: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
    return LlamaConfig(**fields)


SHAPES = {
    # 134 105 856 parameters, of which the untied embedding and output matrix are 49 million
    "134m": _shape(32000, 768, 2048, 12, 12, 12, 64, 2048),
    "1b": _shape(32000, 2048, 5632, 22, 32, 4, 64, 2048),  # TinyLlama
    "7b": _shape(32000, 4096, 11008, 32, 32, 32, 128, 4096),  # Llama 2
}
LLAMA_3_8B = _shape(128256, 4096, 14336, 32, 32, 8, 128, 4096)

# Replace the index into the source for added elements. Elements without effect are noise, because arithmetic on zeros
# may be faster. ZERO is the smaller one: it wins if row and column differ.
NOISE, ZERO = -1, -2


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path, help="a new directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if options.directory.exists():
        parser.error(f"{options.directory} exists; DIR must be a new directory")
    params = inflate(jlade.demo(options.dtype)[0], SHAPES[options.shape], jax.random.key(0))
    save_hf(params, options.directory)
    demo = pathlib.Path(jlade.__file__).parent / "demo"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, options.directory)
    print(f"{options.directory}: {num_bytes(params) / 1e9:.2f} GB of {options.dtype}")


def inflate(params: LlamaParams, config: LlamaConfig, key: jax.Array) -> LlamaParams:
    """Returns a larger model with the function of `params`.

    The logit of an added token is the mean of the source's logits: greedy text is the same, sampled text may contain
    added tokens. Matrices are made one at a time, in the dtype of `params`, on the default device.

    Args:
      params: a LLaMA model without biases and other additions.
      config: the sizes, none smaller than in `params`, and whether the embeddings are tied, which they may be if those
        of `params` are. `head_dim` is a multiple of the source's. Constants and end tokens are those of `params`.
      key: for the noise in weights without effect.

    Raises:
      ValueError: if `config` has too few KV heads for those of the source.
    """
    source = params.config
    # Padding x [d] with zeros to [D] makes its mean square m into m·d/D, so w·x / sqrt(m + eps) needs w·sqrt(d/D) and
    # eps·d/D.
    padding = source.hidden_size / config.hidden_size
    target = dataclasses.replace(
        source,
        **{size: getattr(config, size) for size in SIZES},
        tie_embeddings=config.tie_embeddings,
        norm_eps=source.norm_eps * padding,
    )
    query_scale = math.sqrt(target.head_dim / source.head_dim)  # attention divides scores by the root of head_dim
    # A mean is never the largest logit. A copy might be: rows of a product may round differently, which breaks ties.
    vocabulary = np.minimum(np.arange(target.vocab_size), source.vocab_size)
    # Nothing writes to the padding of the hidden state, so it stays zero, and its weights in readers have no effect.
    read, written = (_extend(source.hidden_size, target.hidden_size, fill) for fill in (NOISE, ZERO))
    queries, keys = _heads(source, target)
    inner = _extend(source.intermediate_size, target.intermediate_size, NOISE)
    places = {  # rows and columns
        "attention.query": (queries, read),
        "attention.key": (keys, read),
        "attention.value": (keys, read),
        "attention.output": (written, np.where(queries < 0, ZERO, queries)),
        "mlp.gate": (inner, read),
        "mlp.up": (inner, read),
        "mlp.down": (written, np.where(inner < 0, ZERO, inner)),
    }

    def matrix(weight: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
        nonlocal key
        key, use = jax.random.split(key)
        placed: jax.Array = _place(weight, rows, columns, use)
        return placed

    def norm(weight: Any) -> jax.Array:
        added = target.hidden_size - source.hidden_size
        padded: jax.Array = jnp.pad(weight, (0, added), constant_values=1) * math.sqrt(padding)
        return padded

    def layer(i: int) -> Layer:
        like = params.layers[min(i, source.num_layers - 1)]

        def array(path: str, _: Array) -> jax.Array:
            weight = operator.attrgetter(path)(like)
            if path not in places:
                return norm(weight)
            rows, columns = places[path]
            if i >= source.num_layers:
                rows = np.full_like(rows, ZERO if path in ("attention.output", "mlp.down") else NOISE)
            return matrix(weight * query_scale if path == "attention.query" else weight, rows, columns)

        return build(target, i, array)

    def with_mean(weight: jax.Array) -> jax.Array:
        return jnp.concatenate([weight, jnp.mean(weight, axis=0, keepdims=True)])

    output = params.embedding if params.output is None else params.output
    return LlamaParams(
        embedding=matrix(with_mean(params.embedding), vocabulary, written),
        layers=tuple(layer(i) for i in range(target.num_layers)),
        norm=norm(params.norm),
        output=None if target.tie_embeddings else matrix(with_mean(output), vocabulary, read),
        config=target,
    )


@jax.jit
def _place(weight: jax.Array, rows: jax.Array, columns: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the rows [R] and columns [C] of `weight` as [R, C], with noise and zeros for `NOISE` and `ZERO`.

    Inputs of order one times the noise give outputs of order one.
    """
    noise = jax.random.normal(key, (len(rows), len(columns)), weight.dtype) * len(columns) ** -0.5
    index = jnp.minimum(rows[:, None], columns[None, :])
    filling = jnp.where(index == ZERO, jnp.zeros_like(noise), noise)
    return jnp.where(index >= 0, weight[rows][:, columns], filling)


def _extend(size: int, target: int, fill: int) -> np.ndarray:
    """Returns the indices below `size`, padded with `fill` to length `target`."""
    return np.pad(np.arange(size), (0, target - size), constant_values=fill)


def _heads(source: LlamaConfig, target: LlamaConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source's row for each row of the target's queries, and for each row of its keys and values.

    If a KV head of the source serves more queries than one of the target, it is copied to several.

    Raises:
      ValueError: if the target has too few KV heads for the copies.
    """
    of_source, of_target = (c.num_heads // c.num_kv_heads for c in (source, target))  # query heads per KV head
    copies = math.ceil(of_source / of_target)
    if target.num_kv_heads < (needed := source.num_kv_heads * copies):
        raise ValueError(
            f"num_kv_heads must be at least {needed} if {of_target} heads share one, got {target.num_kv_heads}"
        )
    kv_heads, copy = np.divmod(np.arange(target.num_kv_heads), copies)
    kv_heads[kv_heads >= source.num_kv_heads] = NOISE
    rank = copy[:, None] * of_target + np.arange(of_target)  # index among the source's query heads of this KV head
    is_query = (kv_heads[:, None] >= 0) & (rank < of_source)
    query_heads = np.where(is_query, kv_heads[:, None] * of_source + rank, NOISE).ravel()

    # The frequency of pair i is theta^(-2i/h) in the source and theta^(-2i/H) in the target.
    pairs = np.full((2, target.head_dim // 2), NOISE)
    pairs[:, :: target.head_dim // source.head_dim] = np.arange(source.head_dim).reshape(2, -1)
    dims = pairs.ravel()

    def rows(heads: np.ndarray, fill: int) -> np.ndarray:
        inside = np.where(dims < 0, fill, heads[:, None] * source.head_dim + dims)
        return np.where(heads[:, None] < 0, NOISE, inside).ravel()

    return rows(query_heads, ZERO), rows(kv_heads, NOISE)  # zeros in the queries hide the noise in the keys


if __name__ == "__main__":
    main()
