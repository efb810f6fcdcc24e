"""Quality of keys and values in 8 bits.

    python benchmarks/kv_dtype.py

The demo model in float32 continues every prompt greedily. Each kind of cache then reads prompt and text in one pass,
and its predictions are compared with those of the cache in float32, as `quantization.py` compares kinds of weights.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

# Import from the repository, not from this folder.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import jlade
from benchmarks import report
from benchmarks.accelerator import PROMPTS
from benchmarks.quantization import compare, table
from jlade.mesh import num_bytes
from jlade.models.base import cache_shapes
from jlade.models.kv_rounding import DTYPES
from jlade.models.llama import LlamaParams


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="tokens of each text")
    options = parser.parse_args()
    prompts = [json.loads(line)["ids"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    quality = _quality(prompts, options.max_new_tokens)
    Console().print(table("quality, demo model", quality))
    report.write(options.json, {"prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "quality": quality})


def _quality(prompts: Sequence[list[int]], max_new_tokens: int) -> dict[str, dict[str, float]]:
    """Returns the figures of each kind of cache, means over the tokens of all texts."""
    reference, _ = jlade.demo("float32")
    half, _ = jlade.demo("bfloat16")
    kinds: dict[str, tuple[LlamaParams, str | None]] = {
        "float32": (reference, None),
        **{f"{kv_dtype}, float32": (reference, kv_dtype) for kv_dtype in DTYPES},
        "bfloat16": (half, None),
        **{f"{kv_dtype}, bfloat16": (half, kv_dtype) for kv_dtype in DTYPES},
    }
    rows: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in kinds}
    size = max(map(len, prompts)) + max_new_tokens
    for prompt in track(prompts, "quality"):
        out = jlade.generate(reference, prompt, max_new_tokens=max_new_tokens, lookahead=None, eos_ids=())
        tokens = np.array([*prompt, *out.tokens[0]], np.int32)
        padded = np.pad(tokens, (0, size - len(tokens)))  # no token sees the padding; one program serves all texts
        expected = None
        for name, (params, kv_dtype) in kinds.items():
            logprobs = np.asarray(_logprobs(params, padded, kv_dtype))[: len(tokens) - 1]
            expected = logprobs if expected is None else expected
            rows[name].append(compare(logprobs, expected, tokens[1:], len(prompt) - 1))
    result = {}
    for name, (params, kv_dtype) in kinds.items():
        figures = {key: np.concatenate([row[key] for row in rows[name]]) for key in rows[name][0]}
        decoder = dataclasses.replace(params.decoder, kv_dtype=kv_dtype)
        result[name] = {
            "cache of 2048 tokens, MB": num_bytes(cache_shapes(decoder, params, 1, 2048)) / 1e6,
            "relative error of the logits": float(np.sqrt(figures["error"].sum() / figures["size"].sum())),
            "KL divergence, nats a token": float(figures["kl"].mean()),
            "same most likely token": float(figures["same"].mean()),
            "perplexity of the prompts": float(np.exp(figures["prompt"].mean())),
            "perplexity of the texts": float(np.exp(figures["text"].mean())),
        }
    return result


@functools.partial(jax.jit, static_argnames="kv_dtype")
def _logprobs(params: LlamaParams, tokens: jax.Array, kv_dtype: str | None) -> jax.Array:
    """Returns the log-probabilities [L, V] after each of `tokens` [L]."""
    length = len(tokens)
    decoder = dataclasses.replace(params.decoder, kv_dtype=kv_dtype)
    cache = decoder.init_cache(params, 1, length)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    hidden, _ = decoder.forward(params, tokens[None], positions, cache, np.tri(length, dtype=bool))
    return jax.nn.log_softmax(decoder.logits(params, hidden)[0])


if __name__ == "__main__":
    main()
