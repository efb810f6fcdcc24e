"""`jlade tune`: finds the fastest setting on this device, for a model and for texts like the given prompts."""

import argparse
import json
import sys

from rich.console import Console

import jlade
from jlade.cli import arguments, terminal
from jlade.costs import tuning as tuning_lib
from jlade.costs.search import Interrupted
from jlade.costs.settings import USUAL
from jlade.generation import text

PROMPTS = (  # code and prose, when no prompts are given
    'def read_config(path):\n    """Reads name=value lines and returns them as a dictionary."""\n    config = {}\n',
    "import argparse\nimport json\nimport pathlib\n\n\nclass Inventory:\n    def __init__(self, items=()):\n"
    "        self.items = dict(items)\n\n    def add(self, name, count=1):\n",
    "The library reads files of several formats. To open one, give its name:\n\n",
    "A queue keeps what is put into it in order, so that what came first is taken out first. A stack, by contrast,",
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade tune",
        description="Find the setting that decodes prompts like these fastest on this device. First, steps of "
        "several block sizes are timed. Then the settings that can still win are tried, plain decoding included. The "
        'other commands and lookahead="auto" use the result; the exit status is 1 if it cannot be stored.',
        examples=[
            "jlade tune --model path/to/model",
            "jlade tune prompts.txt --lines --model path/to/model --batch-size 4",
        ],
    )
    result.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="file with a prompt; - for standard input (default: short pieces of code and prose)",
    )
    result.add_argument("--lines", action="store_true", help="each non-blank line is a prompt")
    arguments.add_model(result, has_batches=True)
    arguments.add(result, "--kv-dtype")
    arguments.add_integer(result, "--batch-size", "B", "prompts to decode at once", 1)
    arguments.add_integer(result, "--max-new-tokens", "M", "most tokens to generate", 128)
    result.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="temperature of the texts to come (default: 0)"
    )
    result.add_argument(
        "--settings",
        nargs="+",
        metavar="SETTING",
        help="settings to try besides plain decoding and the device's estimate, like tree=7 (default: "
        f"{len(USUAL)} trees and settings of the paper)",
    )
    result.add_argument(
        "--no-fallback", action="store_true", help="find a setting that never falls back to narrower steps"
    )
    result.add_argument("--plot", metavar="IMAGE", help="plot the result too, as .png or .svg; needs matplotlib")
    result.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    result.add_argument("--no-store", action="store_true", help="do not store the result for the other commands")
    result.add_argument(
        "--force", action="store_true", help="store the result even in place of one that was measured with more tokens"
    )
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    settings = (
        USUAL if options.settings is None else [arguments.setting("--settings", sizes) for sizes in options.settings]
    )
    sampling = jlade.SamplingConfig(temperature=options.temperature)
    if options.plot is not None:
        tuning_lib.check_image(options.plot)
    prompts = [p for name in options.files for p in arguments.read_prompts(name, options.lines)]
    prompts = prompts or [arguments.FilePrompt("the prompt", prompt) for prompt in PROMPTS]
    params, tokenizer = arguments.load(options)
    ids = [text.encode(tokenizer, prompt.text) for prompt in prompts]
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        arguments.check_positions(params, prompt.source, prompt_ids, options.max_new_tokens)

    try:
        with terminal.changing_bar("measurements") as show:
            tuning = jlade.tune(
                params,
                ids,
                settings=settings,
                batch_size=options.batch_size,
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                kv_dtype=options.kv_dtype,
                adaptive=not options.no_fallback,
                store=not options.no_store,
                force=options.force,
                progress=show,
            )
    except Interrupted as interrupt:
        if not options.json:
            for table in tuning_lib.measurements(interrupt.step_times, interrupt.trials):
                Console(highlight=False, soft_wrap=True).print(table)
        raise
    if options.plot is not None:
        tuning.plot(options.plot)
    if options.json:
        print(json.dumps(tuning.figures()))
    else:
        Console(highlight=False, soft_wrap=True).print(tuning)
    if tuning.path is None and not options.no_store:
        sys.exit(1)  # a warning has said why it is not stored
