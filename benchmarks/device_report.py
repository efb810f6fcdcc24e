"""The results of `gpu.sh` and `tpu.sh` as a table of one device, and as docs/device_numbers.md, the page of all.

python benchmarks/device_report.py table DIR SHAPE SMALL_SHAPE DEVICE    # the last output of the scripts
python benchmarks/device_report.py page          # writes the page of the results in benchmarks/results
python benchmarks/device_report.py page DIR      # copies those in DIR there first
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

# Import from the repository, not from this folder.
sys.path[0] = str(Path(__file__).parent.parent)

from benchmarks import accelerator, attention, estimate, exactness, expert_kernel, overhead
from benchmarks.report import file_name
from jlade.costs.devices import DEVICES
from jlade.lookahead.names import label

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "device_numbers.md"
SHAPE, SMALL = "7b", "1b"  # of the page
LISTED = ("h200", "h100", "a100", "v5e", "v5p", "v6e")  # on the page without results too
BATCHES = (1, 4, 8)


def main() -> None:
    match sys.argv[1:]:
        case ["table", directory, shape, small, device]:
            print_table(Results(Path(directory), shape, small, device))
        case ["page", *directories]:
            for directory in directories:
                take_over(Path(directory))
            PAGE.write_text(page(RESULTS), encoding="utf-8")
        case arguments:
            raise SystemExit(f"{__doc__}\ngot {arguments}")


class Results(NamedTuple):
    """The result files of a device, which are named as `gpu.sh` names them."""

    directory: Path
    shape: str  # of the large model
    small: str
    device: str  # in the form that file names contain

    def read(self, name: str) -> dict[str, Any]:
        """Returns a result, {} for none: "overhead" of the small shape, "accelerator" of the large one, and so on."""
        path = self.directory / f"{self._stems[name]}_{self.device}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def parts(self, name: str) -> Callable[[str, str], Any]:
        """Returns a function from a part and a figure of a result to the figure, None if it was not measured."""
        parts = self.read(name).get("parts", {})
        return lambda part, figure: parts.get(part, {}).get(figure)

    @property
    def _stems(self) -> dict[str, str]:
        of_shape = ("accelerator", "estimate", "versus_transformers", "quantization")
        stems = {name: name for name in ("exactness", "attention", "experts", "meshes")}
        return stems | {name: f"{name}_{self.shape}" for name in of_shape} | {"overhead": f"overhead_{self.small}"}

    @property
    def all(self) -> dict[str, dict[str, Any]]:
        """The results that there are, by the names of their files."""
        found = {f"{stem}_{self.device}.json": self.read(name) for name, stem in self._stems.items()}
        return {name: result for name, result in found.items() if result}


def print_table(results: Results) -> None:
    """Prints the sections of which anything was measured."""
    for section in SECTIONS:
        rows = list(section.rows(results))
        if any(row.value for row in rows):
            print(f"\n{section.title}: measured, and the goal")
            for row in rows:
                print(f"{row.question:<72}{row.value or '-':>16}  {row.goal}")


class Row(NamedTuple):
    """A question, the measured figure, None if there is none, and the goal."""

    question: str
    value: str | None
    goal: str = ""


class Section(NamedTuple):
    """The figures of a part of `gpu.sh`. The rows of all devices have the same questions."""

    title: str
    part: str
    about: str
    rows: Callable[[Results], Iterator[Row]]
    on: str = "gpu tpu"  # the platforms that have it


def shown(form: str, *values: Any) -> str | None:
    """Returns the values in a form, None if one is None."""
    return None if any(value is None for value in values) else form.format(*values)


def texts(results: Results) -> Iterator[Row]:
    part = results.parts("exactness")
    for precision in exactness.PRECISIONS:
        is_exact = precision == exactness.EXACT
        goal = "all" if is_exact else ""
        yield Row(f"{precision}: plain, as transformers on a CPU", shown("{}", part(precision, "equal texts")), goal)
        for lookahead in exactness.SETTINGS if is_exact else exactness.SETTINGS[:1]:
            name = exactness.greedy_part(precision, lookahead)
            yield Row(name, shown("{}", part(name, "equal texts")), goal)
    for lookahead in exactness.SAMPLED:
        name = exactness.sampled_part(lookahead)
        yield Row(name, shown("{}", part(name, "equal texts")), "all")


def rates(results: Results) -> Iterator[Row]:
    part = results.parts("accelerator")
    yield Row("copy, GB/s", shown("{:.0f}", part("device", "copy, GB/s")))
    yield Row("read, GB/s", shown("{:.0f}", part("device", "read, GB/s")))
    yield Row("bfloat16 product, TFLOP/s", shown("{:.0f}", part("device", "bfloat16 product, TFLOP/s")))
    share = part("steps", "weights read, x rate of the copy")
    yield Row("weights read in a plain step, x rate of the copy", shown("{:.2f}", share), "0.85")
    for name, goal in (("weights", ""), ("cache", ""), ("peak above weights and cache", "at most 1")):
        yield Row(f"{name}, GB", shown("{:.2f}", part("memory", f"{name}, GB")), goal)


def steps(results: Results) -> Iterator[Row]:
    part = functools.partial(results.parts("accelerator"), "steps")
    yield Row("plain, ms", shown("{:.2f}", part("step of 1, ms")))
    of_blocks = {str(size): f"block of {size}" for size in accelerator.BLOCKS}
    others = {
        name: name for name, setting in accelerator.LOOKAHEAD.items() if setting not in accelerator.BLOCKS.values()
    }
    for name, question in (of_blocks | others).items():
        goal = "at most 1.2" if name == "120" else ""
        yield Row(f"{question}, in plain steps", shown("{:.2f}", part(f"step of {name}, x step of 1")), goal)


def speed(results: Results) -> Iterator[Row]:
    part = results.parts("accelerator")
    for batch, kind in itertools.product(BATCHES, ("code", "prose")):
        figure = functools.partial(part, f"batch {batch}")
        yield Row(f"batch {batch}, {kind}: plain, tokens/s", shown("{:.0f}", figure(f"{kind}: plain, tokens/s")))
        for name in accelerator.LOOKAHEAD:
            values = (figure(f"{kind}: {name}, {each}") for each in ("speedup", "compression"))
            yield Row(f"batch {batch}, {kind}: {name}", shown("{:.2f}x at {:.2f}", *values))
        share = figure(f"{kind}: window and tree, speedup / compression")
        yield Row(f"batch {batch}, {kind}: window and tree, speedup / tokens per step", shown("{:.2f}", share), "0.83")


def estimated(results: Results) -> Iterator[Row]:
    found = {each["block"]: each for each in results.read("estimate").get("rows", [])}
    for block in estimate.BLOCKS:
        each = found.get(block, {})
        yield Row(f"block of {block}, ms", shown("{:.2f}, {:.2f}", each.get("measured_ms"), each.get("ms")))


def versus(results: Results) -> Iterator[Row]:
    part = results.parts("versus_transformers")
    for batch, (name, goal) in itertools.product(BATCHES, (("eager", "3"), ("static", "1"))):
        of_batch = f"batch {batch}" if name == "eager" else f"batch {batch}, {name}"
        for way in ("plain", "lookahead"):
            times = part(of_batch, f"{way}, x transformers {name}")
            yield Row(f"batch {batch}: {way}, x transformers {name}", shown("{:.2f}", times), goal)


def few_bits(results: Results) -> Iterator[Row]:
    found = results.read("quantization").get("speed", {})
    for kind, goal in (("int8", "1.7"), ("4 bits", "2.4")):
        yield Row(f"plain decoding in {kind}, x bfloat16", shown("{:.2f}", found.get(kind, {}).get("speed")), goal)


def attention_kernel(results: Results) -> Iterator[Row]:
    found = results.read("attention")
    layers, cases = found.get("layers", 1), by_way(found, "kv_heads", "tokens", "cached")
    sizes = [attention.FULL[name] for name in ("heads", "blocks", "lengths")]
    for (heads, kv_heads), tokens, cached in itertools.product(*sizes):
        plain, kernel = cases(kv_heads, tokens, cached)
        times = (1e6 * each["seconds"] / layers if each else None for each in (kernel, plain))
        question = f"{heads}, {kv_heads} heads, block of {tokens}, {cached} cached: µs a layer"
        yield Row(question, shown("{:.1f}, {:.1f}", *times))
    # With 32 KV heads the floor alone, the time to read keys and values, is above 5% of a step.
    rest = results.parts("accelerator")("steps", "step of 1, ms")
    for heads, kv_heads in attention.FULL["heads"]:
        _, kernel = cases(kv_heads, 1, 8192)
        above = None
        if kernel and rest is not None:
            above = 100 * (kernel["seconds"] - kernel["floor_seconds"]) / (rest / 1e3 + kernel["seconds"])
        question = f"{heads}, {kv_heads} heads: kernel above its floor at 8192 cached, % of a plain step"
        yield Row(question, shown("{:.1f}", above), "at most 5")
    yield Row("largest relative error", errors(found), "at most 0.004")


def expert_kernels(results: Results) -> Iterator[Row]:
    found = results.read("experts")
    cases = by_way(found, "shape", "tokens")
    for shape, tokens in itertools.product(expert_kernel.FULL, expert_kernel.BLOCKS):
        plain, kernel = cases(shape, tokens)
        ratios = [None, None]
        if plain and kernel:
            ratios = [kernel["seconds"] / each for each in (plain["seconds"], kernel["floor_seconds"])]
        goal = "at most 1, 1.3" if tokens <= 120 else "at most 1"
        yield Row(f"{shape}, {tokens} token{'s' * (tokens > 1)}", shown("{:.2f}, {:.2f}", *ratios), goal)
    yield Row("largest relative error", errors(found), "that of plain JAX")


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


def outside(results: Results) -> Iterator[Row]:
    part = results.parts("overhead")
    for name, setting in overhead.SETTINGS.items():
        share = part(name, "outside the model, %")
        goal = "under 3" if name in ("plain", "15,5,15") else ""
        yield Row(f"{label(setting)}, %", shown("{:.1f}", share), goal)


def on_meshes(results: Results) -> Iterator[Row]:
    found = results.read("meshes")
    for name in ("greedy", "sampled"):
        rows = [each for each in found.get("rows", []) if each["name"] == name][1:]  # the first one is of one device
        number = len(rows) * found.get("prompts", 0)
        for kind in ("texts", "steps"):
            equal = f"{sum(each[f'equal_{kind}'] for each in rows)}/{number}" if rows else None
            yield Row(f"{name}: equal {kind}", equal, "all")


SECTIONS = (
    Section(
        "Texts",
        "correctness",
        "Greedy texts that equal those of plain decoding, and sampled ones that equal those of plain sampling.",
        texts,
    ),
    Section("Memory and products", "decode", "The rates of the device, and memory in use.", rates),
    Section("Steps", "decode", "One sequence, 1024 cache entries.", steps),
    Section(
        "Whole texts", "decode", "The speedup over plain decoding with its tokens per step, prefill included.", speed
    ),
    Section(
        "Estimates", "estimate", "The measured time of a step, and the estimate by its compiled program.", estimated
    ),
    Section("transformers", "transformers", "Whole texts; lookahead is `LookaheadConfig()`.", versus, "gpu"),
    Section("Weights in few bits", "int8", "One sequence.", few_bits),
    Section(
        "Attention", "attention", "The device's kernel, and plain JAX: heads and KV heads of 128.", attention_kernel
    ),
    Section(
        "Experts",
        "experts",
        "The time of the kernel, divided by that of plain JAX, and by the time to read the weights in use.",
        expert_kernels,
        "gpu",
    ),
    Section("Outside the model", "overhead", "The share of a step, at the shape of TinyLlama.", outside),
    Section("Meshes", "meshes", "All devices of a machine, compared with one of them.", on_meshes),
)

INTRODUCTION = """\
# Numbers on a device

The shape of LLaMA 2 7B in bfloat16, unless a section says otherwise. [speed.md](speed.md#one-nvidia-h200) explains the
measurements. An empty cell has not been measured. On a machine with the device, one command measures a whole column and
writes this page; with the names of parts, such as `correctness decode`, it measures these. Commit the page and the new
files in `benchmarks/results`.

```sh
benchmarks/gpu.sh
benchmarks/tpu.sh
```

With `OUT=build/device` the results are written to that directory. This command copies them to `benchmarks/results` and
writes the page:

```sh
python benchmarks/device_report.py page build/device
```
"""


class Column(NamedTuple):
    """A device of the page."""

    name: str
    platform: str  # JAX's
    results: Results

    @classmethod
    def of(cls, kind: str, directory: Path) -> Self:
        """Returns the column of JAX's `device_kind`, of any device."""
        platform = "tpu" if kind.startswith("TPU") else "gpu"
        names = {each.kind: f"TPU {name}" if platform == "tpu" else name.upper() for name, each in DEVICES.items()}
        name = names.get(kind, kind.removeprefix("NVIDIA "))
        return cls(name, platform, Results(directory, SHAPE, SMALL, file_name(kind)))


def page(directory: Path) -> str:
    """Returns the page of the results in a directory."""
    listed = (DEVICES[name].kind for name in LISTED)
    columns = [Column.of(kind, directory) for kind in dict.fromkeys((*listed, *measured(directory)))]
    lines = [INTRODUCTION]
    for section in SECTIONS:
        there = [column for column in columns if column.platform in section.on.split()]
        lines += [f"## {section.title}", "", f"{section.about} Part `{section.part}`.", ""]
        lines += [line("", "goal", *(column.name for column in there)), "|---" * (2 + len(there)) + "|"]
        for rows in zip(*(section.rows(column.results) for column in there), strict=True):
            lines.append(line(rows[0].question, rows[0].goal, *(row.value or "" for row in rows)))
        lines.append("")
    lines += [
        "## Sources",
        "",
        "Each file has its command, which may have shortened the run, its machine and versions.",
        "",
    ]
    for column in columns:
        for file, result in column.results.all.items():
            lines.append(f"- {column.name}: `benchmarks/results/{file}`, {result['date']}, JAX {result['jax']}")
    return "\n".join(lines) + "\n"


def line(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def measured(directory: Path) -> Iterator[str]:
    """Yields the `device_kind` of the accelerators that have results in a directory, some more than once."""
    for path in sorted(directory.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        kind = result.get("device", "cpu") if isinstance(result, dict) else "cpu"
        is_attached = kind not in ("cpu", *DEVICES)  # the names of DEVICES are those of devices that were simulated
        if is_attached and path.name in Results(directory, SHAPE, SMALL, file_name(kind)).all:
            yield kind


def take_over(directory: Path) -> None:
    """Copies the results of accelerators to `RESULTS`.

    Raises:
      SystemExit: there are none.
    """
    kinds = set(measured(directory))
    if not kinds:
        raise SystemExit(f"{directory} has no results of an accelerator at the shapes {SHAPE} and {SMALL}")
    for kind in kinds:
        for name in Results(directory, SHAPE, SMALL, file_name(kind)).all:
            (RESULTS / name).write_bytes((directory / name).read_bytes())


if __name__ == "__main__":
    main()
