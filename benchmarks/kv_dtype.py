"""Quality of keys and values in 8 bits.

    python benchmarks/kv_dtype.py

The demo model in float32 continues every prompt greedily. Each kind of cache then reads prompt and text in one pass,
and its predictions are compared with those of the cache in float32, as `quantization.py` compares kinds of weights.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder


import jlade
from benchmarks import report
from benchmarks.quantization import figures_of_texts, print_figures
from jlade.mesh import num_bytes
from jlade.models.base import cache_shapes
from jlade.models.kv_rounding import DTYPES
from jlade.models.llama import LlamaParams


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="tokens of each text")
    options = parser.parse_args()
    prompts = [line["ids"] for line in report.read_lines(report.DEMO_PROMPTS)]
    quality = _quality(prompts, options.max_new_tokens)
    print_figures("quality, demo model", quality)
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
    found = figures_of_texts(reference, prompts, max_new_tokens, kinds)
    return {name: _size(*kinds[name]) | figures for name, figures in found.items()}


def _size(params: LlamaParams, kv_dtype: str | None) -> dict[str, float]:
    """Returns the megabytes of a cache, as a figure."""
    decoder = dataclasses.replace(params.decoder, kv_dtype=kv_dtype)
    return {"cache of 2048 tokens, MB": num_bytes(cache_shapes(decoder, params, 1, 2048)) / 1e6}


if __name__ == "__main__":
    main()
