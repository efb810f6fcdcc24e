"""`jlade convert`: writes a checkpoint in another format or dtype, with all of its metadata."""

import argparse
import pathlib
import shutil
from collections.abc import Callable

import jax
import rich.progress
from rich.filesize import decimal

from jlade import conversion, mesh
from jlade.cli import arguments, terminal
from jlade.cli.inspection import DTYPE_CHOICES, read_headers
from jlade.conversion import LoadOptions, formats, location
from jlade.conversion.calibration import mean_squares
from jlade.conversion.checkpoint import Checkpoint
from jlade.files import written_whole
from jlade.models import quantization
from jlade.models.llama import LlamaParams, quantize


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade convert",
        description="Convert a checkpoint to jlade's own format or to Hugging Face's, with its configuration, "
        "tokenizer and chat templates. The new directory appears whole or not at all.",
        epilog="Conversion runs on the CPU: the model must fit the host's memory, not the accelerator's.",
        examples=[
            "jlade convert path/to/model smaller --bits 8",
            "jlade convert owner/name merged --adapter path/to/adapter --to hf",
        ],
    )
    result.add_argument(
        "source", metavar="SRC", help="directory of a checkpoint, GGUF file, smollm2, or id of the Hugging Face Hub"
    )
    result.add_argument("target", metavar="DST", help="the new directory")
    result.add_argument("--adapter", metavar="DIR", help="LoRA adapter of PEFT to merge into the model: a directory")
    result.add_argument(
        "--dtype",
        choices=DTYPE_CHOICES,
        default="auto",
        help="dtype of the new weights (default: auto, as in config.json, else that of the files; float32 for a GGUF "
        "file)",
    )
    arguments.add(result, "--bits", "--int8")
    result.add_argument(
        "--calibrate",
        metavar="FILE",
        help="round to 4 bits so that errors of the weights of large inputs are small: a text like those that the "
        "model will read, some thousand words; the host then holds the model in floating point",
    )
    result.add_argument(
        "--to",
        choices=("jlade", "hf"),
        default="jlade",
        help="jlade: safetensors with jlade's names; hf: safetensors for transformers (default: %(default)s)",
    )
    arguments.add(result, "--revision", "--strict")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command. All checks come before the first weight is read."""
    target = pathlib.Path(options.target)
    if target.exists():
        raise ValueError(f"{target} exists; DST must be a new directory")
    source = formats.find(location.find(options.source, options.revision, weights=True))
    headers = read_headers(source, options.strict, options.adapter)
    cpu = jax.devices("cpu")[0]
    dtype = source.dtype(options.dtype, headers.tensors, cpu)
    shapes = headers.shapes(dtype, options.bits)
    kinds = quantization.kinds(shapes)
    if kinds and options.to == "hf":
        asked = f"--bits {options.bits}" if options.bits else str(source.path)
        raise ValueError(f"--to hf writes floating point alone, and {asked} has matrices in {' and '.join(kinds)}")
    tokens = _calibration(options, source)
    num_bytes = mesh.num_bytes(shapes)
    _check_space(target, num_bytes)

    place = jax.sharding.SingleDeviceSharding(cpu)
    columns = rich.progress.DownloadColumn(), rich.progress.TextColumn("{task.description}")
    with terminal.Bars(*columns, last=(rich.progress.TransferSpeedColumn(),)) as bars:
        advance = bars.begin("reading", sum(headers.bytes_by_dtype.values()))
        bits = options.bits if tokens is None else None
        params = source.load(LoadOptions(dtype, place, advance, bits, options.strict, adapter=options.adapter))
        if tokens is not None:
            params = quantize(params, options.bits, importance=mean_squares(params, tokens))
        try:
            _write(params, source, target, options.to, bars.begin("writing", num_bytes))
        except ValueError as error:
            raise ValueError(f"{target} was not written: {error}") from error
    stored = " and ".join([*kinds, str(dtype)])
    print(f"{target}: {headers.num_parameters:,} parameters, {decimal(num_bytes)} of {stored}")


def _calibration(options: argparse.Namespace, source: Checkpoint) -> list[int] | None:
    """Returns the tokens to calibrate with, None for none."""
    if options.calibrate is None:
        return None
    if options.bits != 4:
        raise ValueError("--calibrate needs --bits 4")
    tokenizer = source.tokenizer(options.strict)
    if tokenizer is None:
        raise ValueError(f"{source.path} has no tokenizer.json, which --calibrate needs")
    text = pathlib.Path(options.calibrate).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{options.calibrate} has no text to calibrate with")
    tokens: list[int] = tokenizer.encode(text).ids
    return tokens


def _check_space(target: pathlib.Path, num_bytes: int) -> None:
    """Raises a ValueError if the disk of `target` has no room for the weights."""
    existing = next(directory for directory in target.absolute().parents if directory.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise ValueError(f"{target} would take {decimal(num_bytes)}, and {existing} has {decimal(free)} free")


def _write(
    params: LlamaParams, source: Checkpoint, target: pathlib.Path, to: str, advance: Callable[[int], None]
) -> None:
    """Writes the weights and the metadata."""
    with written_whole(target) as directory:
        (conversion.save_hf if to == "hf" else conversion.save)(params, directory, advance)
        source.copy_metadata(directory)
