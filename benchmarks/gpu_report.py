"""The first and the last word of `gpu.sh`: what Python has, and a short table of what was asked and what came out.

python benchmarks/gpu_report.py check
python benchmarks/gpu_report.py table DIR SHAPE SMALL_SHAPE DEVICE
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The script's own folder is no place for imports: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

NEEDED = ["jax", "flax", "numpy", "safetensors", "orbax.checkpoint", "huggingface_hub", "tokenizers", "rich"]
WANTED = ["torch", "transformers"]  # for the comparison alone


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "check":
        check()
    else:
        directory, shape, small, device = arguments
        for row in rows(Path(directory), shape, small, device):
            print("{:<66}{:>10}  {}".format(*row))


def check() -> None:
    """Prints versions and, on the last line, the device's name as it is part of file names.

    Raises:
      SystemExit: names the packages that are missing and needed.
    """
    missing = {}
    for name in NEEDED + WANTED:
        try:
            module = importlib.import_module(name)
            print(f"{name} {getattr(module, '__version__', '')}")
        except ImportError as error:
            missing[name] = error
            print(f"{name} is missing: {error}")
    if absent := [name for name in NEEDED if name in missing]:
        raise SystemExit(f"cannot run without {', '.join(absent)}")
    if absent := [name for name in WANTED if name in missing]:
        print(f"no part `transformers` without {', '.join(absent)}")
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        print("JAX has no accelerator: everything will run on the CPU")
    elif "torch" not in missing and not importlib.import_module("torch").cuda.is_available():
        print("torch does not see the GPU: no part `transformers`")
    stats = device.memory_stats() or {}
    print(f"{device.device_kind}, {stats.get('bytes_limit', 0) / 1e9:.0f} GB for JAX")
    print("_".join(device.device_kind.lower().split()))


def rows(directory: Path, shape: str, small: str, device: str) -> Iterator[tuple[str, str, str]]:
    """Yields a line for each question: what is asked, the figure, and what it should be."""

    def parts(file: str) -> dict[str, Any]:
        path = directory / f"{file}_{device}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def row(question: str, result: dict[str, Any], part: str, figure: str, wanted: str) -> tuple[str, str, str]:
        value = result.get("parts", {}).get(part, {}).get(figure, "-")
        return question, f"{value:.3f}" if isinstance(value, float) else str(value), wanted

    yield "", "measured", "wanted"
    exact = parts("exactness")
    for precision in ("float32, exact products", "float32", "bfloat16"):
        wanted = "all" if "exact" in precision else ""
        name = f"{precision}: 15, 5, 15"
        yield row(f"texts equal to plain decoding's, {name}", exact, name, "equal texts", wanted)
    speed = parts(f"accelerator_{shape}")
    yield row("plain decoding, weights read, of the copy's rate", speed, "steps", "weights, of the copy's rate", "0.85")
    yield row("step of 120 tokens by one of 1", speed, "steps", "step of 120 by one of 1", "at most 1.2")
    for batch in (1, 4, 8):
        for kind in ("code", "prose"):
            figure = f"{kind}: speedup / compression"
            yield row(f"speedup / compression, batch {batch}, {kind}", speed, f"batch {batch}", figure, "0.83")
    yield row("peak above weights and cache, GB", speed, "memory", "peak above weights and cache, GB", "at most 1")
    versus = parts(f"versus_transformers_{shape}")
    for batch in (1, 4, 8):
        for name, part, wanted in (
            ("eager", f"batch {batch}", "3"),
            ("static", f"batch {batch}, static", "1"),
        ):
            for way in ("plain", "lookahead"):
                figure = f"{way} of transformers {name}"
                yield row(f"jlade {way} of transformers {name}, batch {batch}", versus, part, figure, wanted)
    int8 = parts(f"quantization_{shape}").get("speed", {}).get("int8", {}).get("speed", "-")
    yield "int8 of bfloat16, plain decoding", f"{int8:.3f}" if isinstance(int8, float) else int8, "1.7"
    yield from _attention(parts("attention"), speed)
    overhead = parts(f"step_overhead_{small}")
    for setting in ("plain", "15,5,15"):
        yield row(f"step beside the model, %, {setting}", overhead, setting, "beside the model, %", "under 3")


def _attention(attention: dict[str, Any], speed: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields what the attention of one token to 8192 cached ones takes, of a step with it.

    Reading as many keys and values takes a time of its own, the floor: with 32 KV heads it is above 5 % of a step.
    """
    rest = speed.get("parts", {}).get("steps", {}).get("step of 1, ms")
    for case in attention.get("cases", []):
        if rest is None or (case["tokens"], case["cached"]) != (1, 8192):
            continue
        seconds, floor = case["seconds"], case["floor_seconds"]
        share, above = (100 * part / (rest / 1e3 + seconds) for part in (seconds, seconds - floor))
        name = f"attention by {case['implementation']}, {case['kv_heads']} KV heads"
        yield f"{name}, % of a step at 8192", f"{share:.1f}", ""
        yield f"{name}, the same above its floor", f"{above:.1f}", "at most 5"
        yield f"{name}, relative error", f"{case['relative_error']:.4f}", "0.004"


if __name__ == "__main__":
    main()
