"""`jlade compile`: compiles the programs of a model ahead, for `--programs` and `jlade.generate(..., programs=)`."""

import argparse

import jlade
from jlade.cli import options as options_lib
from jlade.cli import programs, status
from jlade.config import CONTROLS
from jlade.costs.devices import DEVICES


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = options_lib.Parser(
        prog="jlade compile",
        description="Compile the programs that complete prompts, for a device that need not be there, and write them "
        "to a directory. `jlade`, `jlade chat` and jlade.generate load them with --programs or programs=, and then "
        "neither trace nor compile. Weights are not read. The options are those of the calls to come: the same "
        "controls of sampling, with any values.",
        epilog="The programs are for this version of jlade, JAX and the compiler, and for one device of this kind.",
        examples=[
            "jlade compile path/to/model --output programs",
            "jlade compile smollm2 --turns --output chat",
            "jlade compile path/to/model --device v5e --batch-size 4 --temperature 0.7 --output programs",
        ],
    )
    options_lib.add_model_name(result, as_word=True)
    result.add_argument("--output", required=True, metavar="DIR", help="directory to write, which must not exist")
    result.add_argument(
        "--device",
        choices=("cpu", *DEVICES),
        type=str.lower,
        default="cpu",
        help="the device; cpu is this machine (default: %(default)s)",
    )
    result.add_argument(
        "--batch-size", type=int, default=1, metavar="B", help="prompts of a call (default: %(default)s)"
    )
    result.add_argument(
        "--length",
        type=int,
        default=1024,
        metavar="L",
        help="tokens of prompt and text; a call rounds up to 1024, 2048, 4096, ... (default: %(default)s)",
    )
    result.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights and of the computation (default: float32 on CPUs, bfloat16 elsewhere)",
    )
    result.add_argument("--turns", action="store_true", help="also those of the later turns of a chat")
    options_lib.add_bits(result)
    options_lib.add_kv_dtype(result)
    programs.add_implementations(result)
    options_lib.add_lookahead(result)
    options_lib.add_settings(result, "min_new_tokens", *CONTROLS)
    options_lib.add_grammar(result)
    result.set_defaults(max_new_tokens=None, seed=None)
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    programs.look_for_no_driver()
    request = options_lib.request(options) | {"grammar": options_lib.grammar(options)}
    for name in ("max_new_tokens", "key"):
        del request[name]
    with status.show("compiling"):
        jlade.compile(
            options_lib.find(options),
            options.output,
            options.device,
            dtype=options.dtype,
            bits=options.bits,
            batch_size=options.batch_size,
            capacity=options.length,
            attention=options.attention or "auto",
            experts=options.experts or "auto",
            turns=options.turns,
            **request,
        )
    print(f"{options.output}: programs for {options.device}")
