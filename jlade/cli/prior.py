"""`jlade prior`: learns what a model predicts after pairs of tokens, for better drafts."""

import argparse
import pathlib
from collections.abc import Sequence

import jlade
from jlade.cli import arguments, terminal


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade prior",
        description="Let a model read texts once, and write the most probable tokens after pairs of tokens to a file. "
        "With --prior, the other commands draft from it, so that drafts are good from the first step on; no text "
        "depends on it. Good texts are like those that the model will write, such as its answers to other prompts.",
        epilog="Some hundred thousand tokens are enough. The file has 40 bytes for each place of a pair, and 32 for "
        "each token of the vocabulary.",
        examples=[
            "jlade prior path/to/model --texts answers --output prior.safetensors",
            "jlade prior smollm2 --texts answers notes.md --output smollm2.safetensors",
        ],
    )
    arguments.add_model(result, as_word=True)
    result.add_argument(
        "--texts", nargs="+", required=True, metavar="PATH", help="files of UTF-8, or directories of these"
    )
    result.add_argument("--output", required=True, metavar="FILE", help="the prior; the file is replaced")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    target = pathlib.Path(options.output)
    if target.exists() and not target.is_file():
        raise ValueError(f"--output must be a file, got {options.output}")
    texts = [arguments.read(str(file)) for file in _files(options.texts)]
    with terminal.Status("loading") as line:
        params, tokenizer = arguments.load(options)
        line.say("reading")
        prior = jlade.prior(params, texts, tokenizer)
    jlade.save_prior(prior, target)
    print(f"{target}: {prior}")


def _files(names: Sequence[str]) -> list[pathlib.Path]:
    """Returns the files, and those of the directories."""
    paths = [pathlib.Path(name) for name in names]
    below = [sorted(path.rglob("*")) if path.is_dir() else [path] for path in paths]
    files = [file for directory in below for file in directory if not file.is_dir()]
    if not files:
        raise ValueError(f"--texts must name files, or directories with files, got {' '.join(names)}")
    return files
