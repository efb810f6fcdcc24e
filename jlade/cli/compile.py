"""`jlade compile`: compiles the programs of a model ahead, for `--programs` and `jlade.generate(..., programs=)`."""

import argparse

import jlade
from jlade.cli import arguments, inspect_device, limits, terminal
from jlade.cli.generate import size_of_engine
from jlade.config import CONTROLS
from jlade.conversion.formats import read_config
from jlade.costs.devices import DEVICES
from jlade.errors import check_int
from jlade.generation.options import Keywords

ENGINES = "serve", "generate"  # of these commands


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade compile",
        description="Compile the programs that complete prompts, for a device that need not be there, and write them "
        "to a directory. `jlade`, `jlade chat` and jlade.generate load them with --programs or programs=, and then "
        "neither trace nor compile. Weights are not read. The options are those of the calls to come: the same "
        "controls of sampling, with any values. With --engine they are all programs of the engine of `jlade serve` or "
        "`jlade generate`, for any controls.",
        epilog="The programs are for this version of jlade, JAX and the compiler, and for one device of this kind.",
        examples=[
            "jlade compile path/to/model --output programs",
            "jlade compile smollm2 --turns --output chat",
            "jlade compile path/to/model --device v5e --batch-size 4 --temperature 0.7 --output programs",
            "jlade compile path/to/model --engine serve --max-sequences 16 --capacity 8192 --output server",
        ],
    )
    arguments.add_model_name(result, as_word=True)
    result.add_argument("--output", required=True, metavar="DIR", help="directory to write, which must not exist")
    result.add_argument(
        "--device",
        choices=("cpu", *DEVICES),
        type=str.lower,
        default="cpu",
        help="the device; cpu is this machine (default: %(default)s)",
    )
    arguments.add_integer(result, "--batch-size", "B", "prompts of a call", 1)
    length = "tokens of prompt and text; a call rounds up to 1024, 2048, 4096, ..."
    arguments.add_integer(result, "--length", "L", length, 1024)
    arguments.add(result, "--dtype")
    result.add_argument(
        "--engine",
        choices=ENGINES,
        help="the engine of a command, with the options of a server below, or for --batch-size prompts of --length",
    )
    result.add_argument("--turns", action="store_true", help="also those of the later turns of a chat")
    arguments.add(result, "--bits", "--int8", "--kv-dtype", "--attention", "--experts")
    arguments.add_lookahead(result)
    arguments.add_settings(result, "min_new_tokens", *CONTROLS)
    arguments.add_grammar(result)
    limits.add(result.add_argument_group("options of a server, with --engine serve"))
    result.set_defaults(max_new_tokens=None, seed=None)
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    inspect_device.look_for_no_driver()
    _check(options)
    given = {
        "dtype": options.dtype,
        "bits": options.bits,
        "attention": options.attention or "auto",
        "experts": options.experts or "auto",
    }
    if options.engine is None:
        request = arguments.request(options) | {"grammar": arguments.grammar(options)}
        for name in ("max_new_tokens", "key"):
            del request[name]
        given |= request | {"batch_size": options.batch_size, "capacity": options.length, "turns": options.turns}
        make = jlade.compile
    else:
        given |= _of_engine(options)
        make = jlade.compile_engine
    with terminal.Status("compiling"):
        make(arguments.find(options), options.output, options.device, **given)
    print(f"{options.output}: programs for {options.device}")


def _of_engine(options: argparse.Namespace) -> Keywords:
    """Returns the arguments of `jlade.Engine`."""
    lookahead = arguments.lookahead(options)
    given = {"lookahead": lookahead, "prior": arguments.prior(options), "kv_dtype": options.kv_dtype}
    if options.engine == "serve":
        return given | {"corpus": limits.corpus(options)} | limits.read(options).of_engine(lookahead)
    longest = check_int("--length", options.length, 2)
    batch_size = check_int("--batch-size", options.batch_size, 2)  # one prompt at once is a call
    return given | size_of_engine(batch_size, longest, read_config(arguments.find(options)).max_positions)


def _check(options: argparse.Namespace) -> None:
    """Raises a ValueError that names an option without effect."""
    size, of_call = {"batch_size", "length"}, {"turns", "min_new_tokens", "stop", "schema", "regex", "ebnf", *CONTROLS}
    of_server = {*limits.NAMES}
    default = parser().get_default
    used = {None: size | of_call, "serve": of_server, "generate": size}
    for name in sorted((size | of_call | of_server) - used[options.engine]):
        if getattr(options, name) != default(name):
            place = "without --engine serve" if options.engine is None else f"with --engine {options.engine}"
            raise ValueError(f"--{name.replace('_', '-')} has no effect {place}: leave it out")
