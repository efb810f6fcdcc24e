"""The first and the last output of `gpu.sh`: the installed packages, and a table of the main figures.

python benchmarks/gpu_report.py check
python benchmarks/gpu_report.py table DIR SHAPE SMALL_SHAPE DEVICE
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Import from the repository, not from this folder.
sys.path[0] = str(Path(__file__).parent.parent)

NEEDED = ["jax", "flax", "numpy", "safetensors", "huggingface_hub", "tokenizers", "rich", "lazy_loader", "filelock"]
WANTED = ["torch", "transformers"]  # for the comparison with transformers


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "check":
        check()
    else:
        directory, shape, small, device = arguments
        for row in rows(Path(directory), shape, small, device):
            print("{:<66}{:>10}  {}".format(*row))


def check() -> None:
    """Prints versions and, on the last line, the device's name in the form that file names contain.

    Raises:
      SystemExit: names the missing packages that are required.
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
    from jlade.mesh import default_device

    device = default_device()
    if device.platform == "cpu":
        print("JAX has no accelerator: everything will run on the CPU")
    elif "torch" not in missing and not importlib.import_module("torch").cuda.is_available():
        print("torch does not see the GPU: no part `transformers`")
    stats = device.memory_stats() or {}
    print(f"{device.device_kind}, {stats.get('bytes_limit', 0) / 1e9:.0f} GB for JAX")
    print("_".join(device.device_kind.lower().split()))


def rows(directory: Path, shape: str, small: str, device: str) -> Iterator[tuple[str, str, str]]:
    """Yields a line for each question: the question, the measured figure and the wanted figure."""

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
        yield row(f"texts equal to plain decoding, {name}", exact, name, "equal texts", wanted)
    speed = parts(f"accelerator_{shape}")
    figure = "weights read, x rate of the copy"
    yield row(f"plain decoding, {figure}", speed, "steps", figure, "0.85")
    yield row("step of 120 tokens, x step of 1", speed, "steps", "step of 120, x step of 1", "at most 1.2")
    for batch in (1, 4, 8):
        for kind in ("code", "prose"):
            figure = f"{kind}: window and tree, speedup / compression"
            yield row(f"speedup / compression, batch {batch}, {kind}", speed, f"batch {batch}", figure, "0.83")
    yield row("peak above weights and cache, GB", speed, "memory", "peak above weights and cache, GB", "at most 1")
    for step in parts(f"estimate_{shape}").get("rows", []):
        yield f"step of {step['block']} tokens, ms", f"{step['measured_ms']:.3f}", f"{step['ms']:.3f} estimated"
    versus = parts(f"versus_transformers_{shape}")
    for batch in (1, 4, 8):
        for name, part, wanted in (
            ("eager", f"batch {batch}", "3"),
            ("static", f"batch {batch}, static", "1"),
        ):
            for way in ("plain", "lookahead"):
                figure = f"{way}, x transformers {name}"
                yield row(f"jlade {figure}, batch {batch}", versus, part, figure, wanted)
    of_bits = parts(f"quantization_{shape}").get("speed", {})
    for kind, wanted in (("int8", "1.7"), ("4 bits", "2.4")):
        gain = of_bits.get(kind, {}).get("speed", "-")
        yield f"plain decoding in {kind}, x bfloat16", f"{gain:.3f}" if isinstance(gain, float) else gain, wanted
    yield from _attention(parts("attention"), speed)
    yield from _experts(parts("experts"))
    overhead = parts(f"overhead_{small}")
    for setting in ("plain", "15,5,15"):
        yield row(f"step outside the model, %, {setting}", overhead, setting, "outside the model, %", "under 3")


def _attention(attention: dict[str, Any], speed: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the share of attention in a step of one token with 8192 cached tokens.

    The floor is the time of reading the keys and values. With 32 KV heads it is above 5% of a step.
    """
    rest = speed.get("parts", {}).get("steps", {}).get("step of 1, ms")
    for case in attention.get("cases", []):
        if rest is None or (case["tokens"], case["cached"]) != (1, 8192):
            continue
        seconds, floor = case["seconds"], case["floor_seconds"]
        share, above = (100 * part / (rest / 1e3 + seconds) for part in (seconds, seconds - floor))
        name = f"attention ({case['implementation']}), {case['kv_heads']} KV heads"
        yield f"{name}, % of a step at 8192", f"{share:.1f}", ""
        yield f"{name}, % above its floor", f"{above:.1f}", "at most 5"
        yield f"{name}, relative error", f"{case['relative_error']:.4f}", "0.004"


def _experts(experts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the times of the kernel for experts, in those of plain JAX and of reading the weights in use."""
    cases = {(x["shape"], x["tokens"], x["implementation"]): x for x in experts.get("cases", [])}
    for (shape, tokens, implementation), case in cases.items():
        if implementation == "plain":
            continue
        plain, name = cases[shape, tokens, "plain"], f"experts ({implementation}), {shape}, {tokens} tokens"
        yield f"{name}, x plain", f"{case['seconds'] / plain['seconds']:.2f}", "at most 1"
        if tokens <= 120:
            yield f"{name}, x floor", f"{case['seconds'] / case['floor_seconds']:.2f}", "at most 1.3"
        yield f"{name}, relative error", f"{case['relative_error']:.4f}", f"{plain['relative_error']:.4f} of plain"


if __name__ == "__main__":
    main()
