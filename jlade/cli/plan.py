"""`jlade plan`: estimates decoding on many devices, and recommends a mesh with a setting."""

import argparse
import json
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

import jlade
from jlade.cli import arguments
from jlade.costs.devices import DEVICES
from jlade.costs.plan import DTYPES, Option, Plan
from jlade.costs.settings import SOURCES
from jlade.lookahead.names import label

ROWS = 12  # of the table


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade plan",
        description="Estimate memory and speed of decoding on many devices, for every mesh that the model can be "
        "divided among, and recommend one with a setting. The estimates come from shapes and data sheets: nothing is "
        "compiled; weights are not read, and those of the Hub not fetched.",
        examples=[
            "jlade plan path/to/model --device rtx4090 --length 4096",
            "jlade plan owner/name --device v5e --count 8 --batch-size 32",
        ],
    )
    arguments.add_model_name(result, as_word=True)
    kind = "the kind of the devices (default: %(default)s)"
    result.add_argument("--device", default="h100", choices=tuple(DEVICES), type=str.lower, help=kind)
    arguments.add_integer(result, "--count", "D", "number of devices", 1)
    arguments.add_integer(result, "--batch-size", "B", "number of texts", 1)
    arguments.add_integer(result, "--length", "L", "tokens of prompt and text", 1024)
    result.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (default: bfloat16)")
    arguments.add(result, "--bits", "--int8", "--kv-dtype")
    result.add_argument(
        "--lookahead", metavar="SETTING", help="plan for this setting, like 15,5,15 (default: the fastest)"
    )
    result.add_argument(
        "--compression",
        default="smollm2",
        metavar="X",
        help="tokens per step: smollm2, measured with that model; paper, a formula fitted to LLaMA-2-7B-Chat, "
        "without trees; or a number, for --lookahead (default: %(default)s)",
    )
    result.add_argument("--json", action="store_true", help="print one JSON object, with all meshes, instead of tables")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    lookahead: Any = "auto" if options.lookahead is None else arguments.setting("--lookahead", options.lookahead)
    plan = jlade.plan(
        arguments.find(options),
        options.device,
        options.count,
        dtype=options.dtype,
        bits=options.bits,
        kv_dtype=options.kv_dtype,
        lookahead=lookahead,
        batch_size=options.batch_size,
        capacity=options.length,
        compression=_compression(options.compression),
    )
    if options.json:
        print(json.dumps(plan.facts()))
    else:
        Console(highlight=False).print(Group(_table(plan), Text(_recommendation(plan))))


def _compression(text: str) -> Any:
    if text in SOURCES:
        return text
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"--compression must be {', '.join(SOURCES)} or a number, got {text!r}") from error


def _table(plan: Plan) -> Table:
    """Returns the fastest meshes."""
    result = Table(title=f"Estimates for up to {plan.count} {plan.device}, {decimal(plan.memory)} each")
    for name in ("data, lookahead, model", "setting", "tokens per step", "memory", "floor", "step", "tokens/s"):
        result.add_column(name, justify="left" if name in ("data, lookahead, model", "setting") else "right")
    for option in plan.options[:ROWS]:
        result.add_row(
            ", ".join(map(str, option.layout)),
            label(option.lookahead),
            f"{option.compression:.2f}",
            decimal(option.memory.total),
            _milliseconds(option.step.floor),
            _milliseconds(option.step.total),
            f"{option.tokens_per_second:,.0f}" if option.fits else "does not fit",
        )
    return result


def _recommendation(plan: Plan) -> str:
    """Returns the recommended mesh in words, or the remedies if none fits."""
    best, hidden = plan.recommended, len(plan.options) - ROWS
    more = f"\n--json has {hidden} more meshes." if hidden > 0 else ""
    if best is None:
        least = min(option.memory.total for option in plan.options)
        return (
            f"No mesh fits: a device needs at least {decimal(least)} and has {decimal(plan.memory)}. Take more "
            f"devices, --bits 8 or 4, --kv-dtype, a shorter --length or fewer texts.{more}"
        )
    sizes = ", ".join(f"{name}={size}" for name, size in best.layout._asdict().items())
    setting = "plain decoding" if best.lookahead.block_size == 1 else label(best.lookahead)
    return f"Recommended: jlade.make_mesh({sizes}), {setting}.\n{_parts(best)}{more}"


def _parts(option: Option) -> str:
    """Returns the memory and the time of a step."""
    memory, step = option.memory, option.step
    collectives = sum(each.times for each in option.collectives)
    return (
        f"Memory of a device: {decimal(memory.weights)} of weights, {decimal(memory.cache)} of cache, "
        f"{decimal(memory.pool)} of pool, about {decimal(memory.temporary)} temporary.\n"
        f"Step: arithmetic {_milliseconds(step.arithmetic)}, memory {_milliseconds(step.memory)}, small operations "
        f"{_milliseconds(step.small)}, {collectives} collectives {_milliseconds(step.collective)}, window and drafts "
        f"{_milliseconds(step.drafting)}."
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
