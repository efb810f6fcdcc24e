"""The arguments that the commands share, and their translation to the arguments of `jlade.generate`."""

import argparse
import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from jax.sharding import Mesh

import jlade
from jlade import mesh as mesh_lib
from jlade import storage
from jlade.config import CONTROLS, FILTERS, PRESETS, WITHOUT_FILTERS
from jlade.conversion import LoadOptions, formats, location
from jlade.errors import check_int
from jlade.generation import request as request_lib
from jlade.generation import saved_programs
from jlade.generation.options import Keywords
from jlade.generation.text import Tokenizer
from jlade.lookahead import names
from jlade.models import kernels, kv_rounding
from jlade.models.llama import LlamaParams
from jlade.models.quantization import BITS, FILE

DEMO = pathlib.Path(jlade.__file__).parent / "demo"

AUTO = "the result of `jlade tune` on this device for this model, or an estimate for the device"

# Settings that `/set` of the chat can change too: name -> type, default, placeholder and help.
SETTINGS: dict[str, tuple[type, Any, str, str]] = {
    "max_new_tokens": (int, None, "M", "most tokens to generate (default: what fits, up to 256)"),
    "min_new_tokens": (int, 0, "M", "the text does not end before M tokens (default: %(default)s)"),
    **{name: (control.number, None, *control.help) for name, control in CONTROLS.items()},
    "seed": (int, None, "S", "seed of the random numbers at a temperature above 0 (default: 0)"),
}


# Options of several commands: flag -> arguments of `add_argument`.
OPTIONS: dict[str, dict[str, Any]] = {
    "--revision": {"metavar": "REV", "help": "branch, tag or commit of an id of the Hub (default: main)"},
    "--dtype": {
        "choices": ("float32", "bfloat16", "float16"),
        "help": "type of the weights and of the computation (default: float32 on CPUs, bfloat16 elsewhere)",
    },
    "--bits": {
        "type": lambda given: int(given) if given.isdecimal() else given,
        "choices": (*BITS, FILE),
        "help": "hold the matrices in so many bits: a half or a quarter of the memory of bfloat16, and other texts; "
        "'file' keeps those that the files hold in few bits, and rounds none",
    },
    "--int8": {"action": "store_const", "const": 8, "dest": "bits", "help": "the same as --bits 8"},
    "--strict": {
        "action": "store_true",
        "help": "refuse a model of which something would be ignored, such as unknown keys in config.json, or with NaN "
        "or infinite weights (default: warn)",
    },
    "--kv-dtype": {
        "choices": kv_rounding.DTYPES,
        "help": "type of the keys and values in the cache, for half the memory of bfloat16; the text may differ "
        "(default: that of the weights)",
    },
    "--attention": {"choices": kernels.names("attention"), "help": "implementation of attention (default: auto)"},
    "--experts": {"choices": kernels.names("experts"), "help": "implementation of experts (default: auto)"},
    "--programs": {
        "metavar": "DIR",
        "help": "load the programs that `jlade compile` wrote to DIR instead of compiling, where they fit; they are "
        "machine code, so trust DIR like code (default: compile)",
    },
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, whose help ends with `examples`, and whose result has its name as `prog`."""

    def __init__(self, examples: Sequence[str] = (), **arguments: Any):
        super().__init__(**arguments)
        self.examples = tuple(examples)
        self.set_defaults(prog=self.prog)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def format_help(self) -> str:
        """Returns the help, with the examples at its end."""
        lines = ["", "examples:", *(f"  {example}" for example in self.examples)] if self.examples else []
        return super().format_help() + "".join(f"{line}\n" for line in lines)

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` shows the options)\n")


class _Model(argparse.Action):
    """Keeps a model that is given as a word, as `--model`, or as both."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, value: Any, flag: Any = None
    ) -> None:
        before = options.model
        if before not in (None, value):
            parser.error(f"the model is given twice, as {before} and as {value}")
        options.model = value


def add(parser: argparse._ActionsContainer, *flags: str) -> None:
    """Adds some of `OPTIONS`."""
    for flag in flags:
        parser.add_argument(flag, **OPTIONS[flag])


def add_integer(
    parser: argparse._ActionsContainer, flag: str, placeholder: str, explanation: str, default: int | None = None
) -> None:
    """Adds an option that takes an integer. The help tells the default, if there is one."""
    end = "" if default is None else " (default: %(default)s)"
    parser.add_argument(flag, type=int, default=default, metavar=placeholder, help=explanation + end)


def add_model_name(parser: argparse.ArgumentParser, as_word: bool = False, default: str = "the demo model") -> None:
    """Adds `--model` and `--revision`, and MODEL as a word to commands that take no prompt."""
    if as_word:
        parser.add_argument(
            "model", action=_Model, nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model"
        )
    parser.add_argument(
        "--model",
        action=_Model,
        metavar="MODEL",
        help=f"directory of a checkpoint, GGUF file, smollm2, or id of the Hugging Face Hub (default: {default})",
    )
    add(parser, "--revision")


def add_model(parser: argparse.ArgumentParser, has_batches: bool = False, **arguments: Any) -> None:
    """Adds the arguments of `load`.

    Args:
      parser: of the command.
      has_batches: whether the command decodes several prompts at once, which the axis `data` can divide.
      arguments: of `add_model_name`.
    """
    add_model_name(parser, **arguments)
    parser.add_argument(
        "--adapter", metavar="DIR", help="LoRA adapter of PEFT to merge into the model: a directory (default: none)"
    )
    add(parser, "--dtype", "--bits", "--int8", "--strict")
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="devices to use, for example lookahead=4,model=2: "
        + ("data divides the prompts of a batch, " if has_batches else "")
        + "lookahead divides the tokens of a step, model the weights (default: one device)",
    )


def add_shared(parser: argparse.ArgumentParser, lookahead: str = AUTO, **arguments: Any) -> None:
    """Adds the arguments that the commands which complete prompts share.

    Args:
      parser: of the command.
      lookahead: the default setting in words.
      arguments: of `add_model`.
    """
    add_model(parser, **arguments)
    add(parser, "--kv-dtype")
    add_lookahead(parser, lookahead)
    add_settings(parser, *SETTINGS)


def add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds some of `SETTINGS`, and the strings that end a text."""
    for name in names:
        kind, value, placeholder, explanation = SETTINGS[name]
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=value, metavar=placeholder, help=explanation)
    parser.add_argument(
        "--stop",
        action="append",
        type=_unescape,
        metavar="STRING",
        help=r"end the text before STRING, in which \n, \r and \t stand for these characters and \\ for a backslash; "
        "may be repeated",
    )


def _unescape(string: str) -> str:
    """Returns a string of the command line, where a shell passes a backslash and an n for the end of a line."""
    return re.sub(r"\\([nrt\\])", lambda match: {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}[match[1]], string)


def add_lookahead(parser: argparse.ArgumentParser, default: str = AUTO) -> None:
    """Adds the arguments of `lookahead`, whose default setting is given in words."""
    presets = ", ".join(f"{name} for {','.join(map(str, sizes))}" for name, sizes in PRESETS.items())
    group = parser.add_argument_group("lookahead")
    group.add_argument(
        "--lookahead",
        metavar="SETTING",
        help="tree=M for a tree of M drafted tokens; W,N,G for the paper's window of W future positions, n-grams of N "
        "tokens and G candidates; W,N,G:tree=M for both; jacobi=M for Jacobi decoding with M guesses; or "
        f"{presets} (default: {default})",
    )
    group.add_argument(
        "--prior",
        metavar="FILE",
        help="what the model predicts after pairs of tokens, a file of `jlade prior`: drafts are then good from the "
        "first step on",
    )
    group.add_argument("--no-lookahead", action="store_true", help="plain decoding only, one token a step")


def add_grammar(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `grammar`."""
    group = parser.add_argument_group("grammar, which the text must be one of").add_mutually_exclusive_group()
    group.add_argument("--schema", metavar="FILE", help="JSON that this JSON Schema accepts (- for standard input)")
    group.add_argument("--regex", metavar="PATTERN", help="a match of this regular expression")
    group.add_argument("--ebnf", metavar="FILE", help="a text of the rule `root` in this file of EBNF")


def grammar(options: argparse.Namespace) -> jlade.Grammar | None:
    """Returns the grammar of the options, None for none.

    Raises:
      ValueError: names the option or its file, and what is wrong.
    """
    for name, make in (("schema", jlade.Grammar.json_schema), ("ebnf", jlade.Grammar.ebnf)):
        if (file := getattr(options, name)) is not None:
            try:
                return make(read(file))
            except ValueError as error:
                raise ValueError(f"--{name} {file}: {error}") from error
    return None if options.regex is None else jlade.Grammar.regex(options.regex)


def request(options: argparse.Namespace, are_defaults: bool = False) -> Keywords:
    """Returns the keyword arguments for `jlade.generate` and `jlade.stream`.

    `are_defaults` tells that prompts may have others: an option without effect beside these is then no error.

    Raises:
      ValueError: names the argument that is out of range.
    """
    sampling = _sampling(options)
    seed = 0 if options.seed is None else check_int("seed", options.seed, 0)
    if seed >= 2**32:
        raise ValueError(f"seed must be below 2**32, got {seed}")
    if options.max_new_tokens is not None:
        check_int("max_new_tokens", options.max_new_tokens, 1)
    if not are_defaults:
        check_together(options, sampling.temperature)
    return {
        "max_new_tokens": options.max_new_tokens,
        "min_new_tokens": check_int("min_new_tokens", options.min_new_tokens, 0),
        "lookahead": lookahead(options),
        "prior": prior(options),
        "sampling": sampling,
        "stop": options.stop,
        "kv_dtype": options.kv_dtype,
        "key": request_lib.make_key(seed),
        "constraint": _recommended(options.model or DEMO, options.revision)[1],
    }


def check_together(options: argparse.Namespace, temperature: float) -> None:
    """Raises a ValueError that names an option without effect beside the others, given the temperature in use."""
    if temperature == 0:
        for name in (*FILTERS, "seed"):
            if getattr(options, name) is not None:
                raise ValueError(f"{name} has no effect at temperature 0: set a temperature above 0, or leave it out")


def _sampling(options: argparse.Namespace) -> jlade.SamplingConfig:
    """Returns the sampling that the checkpoint recommends, with the given values in place of its own."""
    given = {name: value for name in CONTROLS if (value := getattr(options, name)) is not None}
    jlade.SamplingConfig(**given)  # checks the arguments before a checkpoint is looked for
    recommended, _ = _recommended(options.model or DEMO, options.revision)
    if given.get("temperature") == 0:
        recommended = dataclasses.replace(recommended, **WITHOUT_FILTERS)
    return dataclasses.replace(recommended, **given)


@functools.cache
def _recommended(
    model: str | pathlib.Path, revision: str | None
) -> tuple[jlade.SamplingConfig, tuple[jlade.Constraint, ...]]:
    """Reads the file once: `model` may be an id of the Hub, and a chat asks for each answer."""
    return jlade.load_sampling(model, revision=revision), tuple(jlade.load_constraints(model, revision=revision))


def find(options: argparse.Namespace) -> pathlib.Path:
    """Returns the directory of the model's configuration, tokenizer and templates. Of the Hub it fetches no weights.

    Raises:
      ValueError: when there is no such model.
    """
    return location.find(options.model or DEMO, options.revision, argument="--model")


def lookahead(options: argparse.Namespace) -> jlade.LookaheadConfig | Literal["auto"] | None:
    """Returns the setting of `--lookahead` and `--no-lookahead`.

    Raises:
      ValueError: names the flag and the values that it takes.
    """
    if options.no_lookahead and options.lookahead is not None:
        raise ValueError("--lookahead has no effect with --no-lookahead: leave one of them out")
    if options.lookahead is None:
        return None if options.no_lookahead else "auto"
    return setting("--lookahead", options.lookahead)


def prior(options: argparse.Namespace) -> jlade.Prior | None:
    """Returns the prior of the options, None for none.

    Raises:
      ValueError: names the file that holds none.
    """
    return None if options.prior is None else _prior(options.prior)


@functools.cache  # each line of a chat asks for it
def _prior(path: str) -> jlade.Prior:
    return jlade.load_prior(path)


def setting(flag: str, name: str) -> jlade.LookaheadConfig:
    """Returns the setting of a name that `names.parse` reads.

    Raises:
      ValueError: names the flag and the values that it takes.
    """
    try:
        return names.parse(name)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def change(options: argparse.Namespace, setting: str) -> argparse.Namespace:
    """Returns the options after the setting `name=value`; the value none stands for the default.

    Raises:
      ValueError: names the accepted settings or values.
    """
    name, _, value = (part.strip() for part in setting.partition("="))
    if name not in SETTINGS:
        raise ValueError(f"a setting is name=value, with one of the names {', '.join(SETTINGS)}; got {setting!r}")
    kind, default, *_ = SETTINGS[name]
    try:
        parsed = default if value.lower() == "none" else kind(value)
    except ValueError as error:
        accepted = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} must be {accepted}, or none for its default, got {value!r}") from error
    changed = argparse.Namespace(**{**vars(options), name: parsed})
    request(changed)
    return changed


def mesh_sizes(sizes: str) -> dict[str, int]:
    """Returns the sizes of a mesh that are written as data=2,lookahead=4.

    Raises:
      ValueError: names what is accepted.
    """
    parts = [part.partition("=") for part in sizes.split(",")]
    axes = {name.strip(): size.strip() for name, _, size in parts}
    if len(axes) < len(parts) or not all(name in mesh_lib.AXES and size.isdecimal() for name, size in axes.items()):
        raise ValueError(
            f"--mesh must be like data=2,lookahead=4, with the names {', '.join(mesh_lib.AXES)}, each at most once, "
            f"got {sizes!r}"
        )
    return {name: int(size) for name, size in axes.items()}


def make_mesh(options: argparse.Namespace) -> Mesh | None:
    """Returns the mesh of `--mesh`, None without it.

    Raises:
      ValueError: it is not made of names and sizes, there are fewer devices, or `data` does not divide the batches.
    """
    if options.mesh is None:
        return None
    mesh = jlade.make_mesh(**mesh_sizes(options.mesh), devices=None)
    groups, batch_size = mesh_lib.size(mesh, mesh_lib.DATA), getattr(options, "batch_size", None)
    if groups > 1 and batch_size is None:
        raise ValueError(
            f"--mesh has data={groups}, but this command decodes one prompt at a time: use the devices for lookahead "
            "or model"
        )
    if batch_size is not None and batch_size % groups:
        raise ValueError(f"--batch-size must be a multiple of {groups}, the size of data in --mesh, got {batch_size}")
    return mesh


def load(options: argparse.Namespace) -> tuple[LlamaParams, Tokenizer]:
    """Loads the model's parameters, onto the devices of `--mesh` if it is given, and its tokenizer.

    Raises:
      ValueError: when there is no such model or adapter, it has no tokenizer, or `make_mesh` refuses `--mesh`.
    """
    if options.adapter is not None and options.model is None:
        raise ValueError(f"--adapter {options.adapter} needs --model, the model that it was trained on")
    if getattr(options, "programs", None) is not None:
        saved_programs.find(options.programs, mesh_lib.default_device())  # which load while the weights do
    load_options = LoadOptions(
        options.dtype, bits=options.bits, strict=options.strict, mesh=make_mesh(options), adapter=options.adapter
    )
    place = location.find(options.model or DEMO, options.revision, weights=True)
    params, tokenizer = storage.read(formats.find(place), load_options)
    if tokenizer is None:
        raise ValueError(f"--model {options.model} has no tokenizer, which prompts need")
    return params, tokenizer


def read(name: str) -> str:
    """Returns the text of a file, or of standard input for `-`, without the byte-order mark of UTF-8.

    Raises:
      ValueError: names the file, when it cannot be read or is not UTF-8.
    """
    if name == "-" and sys.stdin is None:
        raise ValueError("standard input is closed")
    try:
        return (sys.stdin.buffer.read() if name == "-" else pathlib.Path(name).read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error


class FilePrompt(NamedTuple):
    """A prompt and its origin."""

    source: str  # the file, and the line
    text: str


def read_prompts(name: str, lines: bool) -> list[FilePrompt]:
    """Returns the text of a file, or of standard input for `-`, as one prompt or as one for each non-blank line.

    Raises:
      ValueError: names the file, when it cannot be read, is not UTF-8 or is empty.
    """
    whole = read(name)
    if not whole.strip():
        raise ValueError(f"{name} is empty; a prompt needs some text")
    if not lines:
        return [FilePrompt(name, whole)]
    numbered = enumerate(re.split(r"\r?\n", whole), start=1)
    return [FilePrompt(f"{name}:{number}", line) for number, line in numbered if line.strip()]


def check_positions(params: LlamaParams, name: str, ids: Sequence[int], max_new_tokens: int | None) -> None:
    """Raises a ValueError that names the prompt when it and the new tokens, by default one, exceed the positions."""
    if len(ids) + (max_new_tokens or 1) > params.decoder.max_positions:
        new = "a new one" if max_new_tokens is None else f"max_new_tokens={max_new_tokens}"
        raise ValueError(
            f"{name} has {len(ids)} tokens; with {new} they exceed the model's {params.decoder.max_positions} positions"
        )
