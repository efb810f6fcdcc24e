"""`jlade convert`: a checkpoint in the other format or another dtype, with its tokenizer."""

import argparse
import contextlib
import logging
import math
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich import progress
from rich.console import Console
from rich.filesize import decimal
from safetensors import SafetensorError

from jlade import conversion
from jlade.cli.inspection import DTYPE_CHOICES, read_headers
from jlade.conversion import hub
from jlade.conversion.checkpoint import floating_dtypes
from jlade.conversion.huggingface import check_dtype
from jlade.conversion.whole import written_whole
from jlade.models.llama import LlamaParams

TEXT_FILES = (  # of the tokenizer and the chat template
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = argparse.ArgumentParser(
        prog="jlade convert",
        description="Write a checkpoint anew, in jlade's own format or as Hugging Face's safetensors, with the files "
        "of its tokenizer. The new directory appears whole or not at all.",
        epilog="It is done on the CPU, so a model need not fit the accelerator, but it must fit the memory.",
    )
    result.add_argument(
        "source", metavar="SRC", help="Hugging Face directory, id of the Hub, or jlade's own checkpoint"
    )
    result.add_argument("target", metavar="DST", help="the new directory")
    result.add_argument(
        "--dtype", choices=DTYPE_CHOICES, default="auto", help="of the new weights (default: auto, what they have)"
    )
    result.add_argument("--int8", action="store_true", help="write the matrices in int8; jlade's own format alone")
    result.add_argument(
        "--to",
        choices=("jlade", "hf"),
        default="jlade",
        help="jlade: Orbax's format, which many devices restore at once; hf: safetensors (default: %(default)s)",
    )
    result.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub id")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command; everything that can be checked is checked before the first weight is read."""
    target = pathlib.Path(options.target)
    if target.exists():
        raise ValueError(f"{target} exists; DST must be a new directory")
    source = hub.find(options.source, options.revision)
    headers = read_headers(source)
    dtype = check_dtype(options.dtype, floating_dtypes(headers.dtypes), source)
    int8 = options.int8 or headers.is_int8
    if int8 and options.to == "hf":
        raise ValueError(f"--to hf writes floating point alone, and {'--int8' if options.int8 else source} is int8")
    num_bytes = headers.bytes_in_memory(dtype, int8)
    _check_space(target, num_bytes)

    load = conversion.load if headers.format == "jlade" else conversion.load_hf
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    with _bars() as bar:
        params = load(source, dtype, cpu, bar("reading", sum(headers.bytes_by_dtype.values())), options.int8)
        try:
            _write(params, source, target, options.to, bar("writing", num_bytes))
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{target} was not written: {error}") from error
    kinds = f"int8 and {dtype}" if int8 else dtype
    print(f"{target}: {headers.num_parameters:,} parameters, {decimal(num_bytes)} of {kinds}")


def _check_space(target: pathlib.Path, num_bytes: int) -> None:
    existing = next(directory for directory in target.absolute().parents if directory.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise ValueError(f"{target} would take {decimal(num_bytes)}, and {existing} has {decimal(free)} free")


def _write(
    params: LlamaParams, source: pathlib.Path, target: pathlib.Path, to: str, advance: Callable[[int], None]
) -> None:
    with written_whole(target) as directory:
        if to == "hf":
            conversion.save_hf(params, directory, advance)
        else:
            with _orbax():
                conversion.save(params, directory, advance)
        for name in TEXT_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, directory / name)


@contextlib.contextmanager
def _orbax() -> Iterator[None]:
    """Lets Orbax finish in peace: interrupted it would write on in its threads, so that nothing could be cleaned up.

    Ctrl-C counts once it is done, a second one at once. What fails is raised, not logged by each thread besides.
    """
    is_interrupted = False

    def interrupt(*signal_and_frame: Any) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, before)

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        logger.setLevel(level)
    if is_interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Gives what starts a bar of so many bytes and returns what advances it; bars show on a terminal alone."""
    console = Console(stderr=True)
    columns = (
        progress.SpinnerColumn(),  # Orbax tells of all bytes at once, in the end
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with progress.Progress(*columns, console=console, disable=hidden, speed_estimate_period=math.inf) as bars:

        def start(description: str, num_bytes: int) -> Callable[[int], None]:
            task = bars.add_task(description, total=num_bytes)
            bars.advance(task, 0)  # from where on the speed is measured
            return lambda advance: bars.advance(task, advance)

        yield start
