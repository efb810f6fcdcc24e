"""The table of docs/speed.md that `gpu.sh` and `tpu.sh` fill: a column for each device that was measured.

python -m benchmarks.tables.devices DIR SHAPE SMALL_SHAPE DEVICE    # prints the results of one device
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import accelerator, attention, estimate, exactness, expert_kernel, overhead
from benchmarks.report import file_name
from benchmarks.tables import Results, Rows
from jlade.costs.devices import DEVICES
from jlade.lookahead.names import label

SHAPE, SMALL = "7b", "1b"  # of the page
BATCHES = (1, 4, 8)


class Device(NamedTuple):
    """The results of a device, in files with the names that `gpu.sh` gives them."""

    results: Results
    name: str  # in the form that file names contain
    shape: str = SHAPE  # of the large model
    small: str = SMALL

    def read(self, name: str) -> dict[str, Any]:
        """Returns a result, {} for none: "overhead" of the small shape, "accelerator" of the large one, and so on."""
        file = self.files[name]
        return self.results[file] if (self.results.directory / f"{file}.json").exists() else {}

    def parts(self, name: str) -> Callable[[str, str], Any]:
        """Returns a function from a part and a figure of a result to the figure, None if it was not measured."""
        parts = self.read(name).get("parts", {})
        return lambda part, figure: parts.get(part, {}).get(figure)

    @property
    def files(self) -> dict[str, str]:
        of_shape = ("accelerator", "estimate", "versus_transformers", "quantization")
        stems = {name: name for name in ("exactness", "attention", "experts", "meshes")}
        stems |= {name: f"{name}_{self.shape}" for name in of_shape} | {"overhead": f"overhead_{self.small}"}
        return {name: f"{stem}_{self.name}" for name, stem in stems.items()}


class Row(NamedTuple):
    """A question, the measured figure, None if there is none, and the goal."""

    question: str
    value: str | None
    goal: str = ""


def measured(results: Results) -> Rows:
    """Yields the questions that a device has answered."""
    kinds = columns(results)
    yield "", "goal", *kinds
    devices = [Device(results, file_name(kind)) for kind in kinds.values()]
    for part in PARTS:
        for rows in zip(*map(part, devices), strict=True):
            if any(row.value for row in rows):
                yield rows[0].question, rows[0].goal, *(row.value or "" for row in rows)


def columns(results: Results) -> dict[str, str]:
    """Returns JAX's `device_kind` of the devices that were measured, by their names on the page."""
    kinds = []
    for path in sorted(results.directory.glob("*.json")):
        result = results[path.stem]
        kind = result.get("device", "cpu") if isinstance(result, dict) else "cpu"
        is_attached = kind not in ("cpu", *DEVICES)  # the names of DEVICES are those of devices that were simulated
        if is_attached and path.stem in Device(results, file_name(kind)).files.values():
            kinds.append(kind)
    names = {
        sheet.kind: f"TPU {name}" if sheet.kind.startswith("TPU") else name.upper() for name, sheet in DEVICES.items()
    }
    return {names.get(kind, kind.removeprefix("NVIDIA ")): kind for kind in kinds}


def shown(form: str, *values: Any) -> str | None:
    """Returns the values in a form, None if one is None."""
    return None if any(value is None for value in values) else form.format(*values)


def texts(device: Device) -> Iterator[Row]:
    part = device.parts("exactness")
    for precision in exactness.PRECISIONS:
        is_exact = precision == exactness.EXACT
        goal = "all" if is_exact else ""
        texts_of_cpu = shown("{}", part(precision, "equal texts"))
        yield Row(f"equal texts, {precision}: plain, as transformers on a CPU", texts_of_cpu, goal)
        for lookahead in exactness.SETTINGS if is_exact else exactness.SETTINGS[:1]:
            name = exactness.greedy_part(precision, lookahead)
            yield Row(f"equal texts, {name}", shown("{}", part(name, "equal texts")), goal)
    for lookahead in exactness.SAMPLED:
        name = exactness.sampled_part(lookahead)
        yield Row(f"equal texts, {name}", shown("{}", part(name, "equal texts")), "all")


def rates(device: Device) -> Iterator[Row]:
    part = device.parts("accelerator")
    yield Row("copy, GB/s", shown("{:.0f}", part("device", "copy, GB/s")))
    yield Row("read, GB/s", shown("{:.0f}", part("device", "read, GB/s")))
    yield Row("bfloat16 product, TFLOP/s", shown("{:.0f}", part("device", "bfloat16 product, TFLOP/s")))
    share = part("steps", "weights read, x rate of the copy")
    yield Row("weights read in a plain step, x rate of the copy", shown("{:.2f}", share), "0.85")
    name = "peak above weights and cache, GB"
    yield Row(name, shown("{:.2f}", part("memory", name)), "at most 1")


def steps(device: Device) -> Iterator[Row]:
    part = functools.partial(device.parts("accelerator"), "steps")
    yield Row("step: plain, ms", shown("{:.2f}", part("step of 1, ms")))
    of_blocks = {str(size): f"block of {size}" for size in accelerator.BLOCKS}
    others = {
        name: name for name, setting in accelerator.LOOKAHEAD.items() if setting not in accelerator.BLOCKS.values()
    }
    for name, question in (of_blocks | others).items():
        goal = "at most 1.2" if name == "120" else ""
        yield Row(f"step: {question}, in plain steps", shown("{:.2f}", part(f"step of {name}, x step of 1")), goal)


def speed(device: Device) -> Iterator[Row]:
    part = device.parts("accelerator")
    for batch, kind in itertools.product(BATCHES, ("code", "prose")):
        figure = functools.partial(part, f"batch {batch}")
        yield Row(f"batch {batch}, {kind}: plain, tokens/s", shown("{:.0f}", figure(f"{kind}: plain, tokens/s")))
        for name in accelerator.LOOKAHEAD:
            values = (figure(f"{kind}: {name}, {each}") for each in ("speedup", "compression"))
            yield Row(f"batch {batch}, {kind}: {name}", shown("{:.2f}x at {:.2f}", *values))
        share = figure(f"{kind}: window and tree, speedup / compression")
        yield Row(f"batch {batch}, {kind}: window and tree, speedup / tokens per step", shown("{:.2f}", share), "0.83")


def estimated(device: Device) -> Iterator[Row]:
    found = {each["block"]: each for each in device.read("estimate").get("rows", [])}
    for block in estimate.BLOCKS:
        each = found.get(block, {})
        times = shown("{:.2f}, {:.2f}", each.get("measured_ms"), each.get("ms"))
        yield Row(f"step: block of {block}, measured and estimated, ms", times)


def versus(device: Device) -> Iterator[Row]:
    part = device.parts("versus_transformers")
    for batch, (name, goal) in itertools.product(BATCHES, (("eager", "3"), ("static", "1"))):
        of_batch = f"batch {batch}" if name == "eager" else f"batch {batch}, {name}"
        for way in ("plain", "lookahead"):
            times = part(of_batch, f"{way}, x transformers {name}")
            yield Row(f"batch {batch}: {way}, x transformers {name}", shown("{:.2f}", times), goal)


def few_bits(device: Device) -> Iterator[Row]:
    found = device.read("quantization").get("speed", {})
    for kind, goal in (("int8", "1.7"), ("4 bits", "2.4")):
        yield Row(f"plain decoding in {kind}, x bfloat16", shown("{:.2f}", found.get(kind, {}).get("speed")), goal)


def attention_kernel(device: Device) -> Iterator[Row]:
    found = device.read("attention")
    layers, cases = found.get("layers", 1), by_way(found, "kv_heads", "tokens", "cached")
    sizes = [attention.FULL[name] for name in ("heads", "blocks", "lengths")]
    for (heads, kv_heads), tokens, cached in itertools.product(*sizes):
        plain, kernel = cases(kv_heads, tokens, cached)
        times = (1e6 * each["seconds"] / layers if each else None for each in (kernel, plain))
        question = f"attention, {heads}, {kv_heads} heads, block of {tokens}, {cached} cached: µs a layer"
        yield Row(question, shown("{:.1f}, {:.1f}", *times))
    # With 32 KV heads the floor alone, the time to read keys and values, is above 5% of a step.
    rest = device.parts("accelerator")("steps", "step of 1, ms")
    for heads, kv_heads in attention.FULL["heads"]:
        _, kernel = cases(kv_heads, 1, 8192)
        above = None
        if kernel and rest is not None:
            above = 100 * (kernel["seconds"] - kernel["floor_seconds"]) / (rest / 1e3 + kernel["seconds"])
        question = f"attention, {heads}, {kv_heads} heads: kernel above its floor at 8192 cached, % of a plain step"
        yield Row(question, shown("{:.1f}", above), "at most 5")
    yield Row("attention: largest relative error", errors(found), "at most 0.004")


def expert_kernels(device: Device) -> Iterator[Row]:
    found = device.read("experts")
    cases = by_way(found, "shape", "tokens")
    for shape, tokens in itertools.product(expert_kernel.FULL, expert_kernel.BLOCKS):
        plain, kernel = cases(shape, tokens)
        ratios = [None, None]
        if plain and kernel:
            ratios = [kernel["seconds"] / each for each in (plain["seconds"], kernel["floor_seconds"])]
        goal = "at most 1, 1.3" if tokens <= 120 else "at most 1"
        yield Row(f"experts, {shape}, {tokens} token{'s' * (tokens > 1)}", shown("{:.2f}, {:.2f}", *ratios), goal)
    yield Row("experts: largest relative error", errors(found), "that of plain JAX")


def by_way(found: dict[str, Any], *names: str) -> Callable[..., tuple[Any, Any]]:
    """Returns a function from the sizes of a case to its figures in plain JAX and with a kernel, None for none."""
    cases = {
        (*(each[name] for name in names), each["implementation"] == "plain"): each for each in found.get("cases", [])
    }
    return lambda *sizes: (cases.get((*sizes, True)), cases.get((*sizes, False)))


def errors(found: dict[str, Any]) -> str | None:
    """Returns the largest relative errors of a kernel and of plain JAX."""
    cases = found.get("cases", [])
    kernel, plain = (
        max((each["relative_error"] for each in cases if (each["implementation"] == "plain") == is_plain), default=None)
        for is_plain in (False, True)
    )
    return shown("{:.4f}, {:.4f}", kernel, plain)


def outside(device: Device) -> Iterator[Row]:
    part = device.parts("overhead")
    for name, setting in overhead.SETTINGS.items():
        share = part(name, "outside the model, %")
        goal = "under 3" if name in ("plain", "15,5,15") else ""
        yield Row(f"outside the model, {label(setting)}, %", shown("{:.1f}", share), goal)


def on_meshes(device: Device) -> Iterator[Row]:
    found = device.read("meshes")
    for name in ("greedy", "sampled"):
        rows = [each for each in found.get("rows", []) if each["name"] == name][1:]  # the first one is of one device
        number = len(rows) * found.get("prompts", 0)
        for kind in ("texts", "steps"):
            equal = f"{sum(each[f'equal_{kind}'] for each in rows)}/{number}" if rows else None
            yield Row(f"meshes, {name}: equal {kind}", equal, "all")


PARTS = (texts, rates, steps, speed, estimated, versus, few_bits, attention_kernel, expert_kernels, outside, on_meshes)


def print_device(device: Device) -> None:
    """Prints what was measured."""
    print("\nmeasured, and the goal")
    for part in PARTS:
        for row in part(device):
            if row.value:
                print(f"{row.question:<80}{row.value:>16}  {row.goal}")


if __name__ == "__main__":
    directory, shape, small, name = sys.argv[1:]
    print_device(Device(Results(Path(directory)), name, shape, small))
