"""The `jlade` command: complete a prompt, show the text as it comes and what lookahead saved."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

import jlade
from jlade import text
from jlade.config import SMALL_BLOCK

STEP_STYLES = ("bright_cyan", "bright_magenta", "bright_yellow", "bright_green")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    default = _default_lookahead()
    parser = argparse.ArgumentParser(
        prog="jlade",
        description="Complete a prompt with a LLaMA model by exact lookahead decoding. Each colour is what one step "
        "accepted; the table compares with plain decoding of the same prompt.",
        epilog="A step feeds (N-1)(W+G) tokens to the model. That is nearly free on a GPU or TPU, where 15, 5, 15 is a "
        "good start, and costs time on a CPU, where small blocks are best.",
    )
    parser.add_argument("prompt", help="the text to complete")
    parser.add_argument("--model", metavar="DIR", help="Hugging Face LLaMA directory (default: the demo model)")
    parser.add_argument(
        "--window",
        type=int,
        default=default.window_size,
        metavar="W",
        help="future positions decoded in parallel; 0 for prompt lookup (default on this device: %(default)s)",
    )
    parser.add_argument(
        "--ngram",
        type=int,
        default=default.ngram_size,
        metavar="N",
        help="most tokens accepted in a step; 2 for Jacobi decoding (default: %(default)s)",
    )
    parser.add_argument(
        "--guesses",
        type=int,
        default=default.guess_set_size,
        metavar="G",
        help="candidates verified in a step (default: %(default)s)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="default: %(default)s")
    parser.add_argument("--no-lookahead", action="store_true", help="plain decoding only, one token a step")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    parser.add_argument("--version", action="version", version=f"jlade {jlade.__version__}, JAX {jax.__version__}")
    return parser


def _default_lookahead() -> jlade.LookaheadConfig:
    return SMALL_BLOCK if jax.default_backend() == "cpu" else jlade.LookaheadConfig()


def _run(options: argparse.Namespace) -> int:
    config = jlade.LookaheadConfig(window_size=options.window, ngram_size=options.ngram, guess_set_size=options.guesses)
    params, tokenizer = jlade.demo() if options.model is None else jlade.load(options.model)
    if tokenizer is None:
        raise ValueError(f"--model {options.model} has no tokenizer.json, which the prompt needs")
    console = Console(highlight=False, soft_wrap=True)
    request = {"prompt": text.encode(tokenizer, options.prompt), "max_new_tokens": options.max_new_tokens}

    def show(step: int, piece: jlade.Piece) -> None:
        if options.json:
            return
        if step == 0:
            console.print(Text(options.prompt, style="bold"), end="")
        console.print(Text(piece.text or "", style=STEP_STYLES[step % len(STEP_STYLES)]), end="")

    setting = None if options.no_lookahead else config
    shown = _measure(params, tokenizer, request, setting, show)
    plain = shown if setting is None else _measure(params, tokenizer, request, None, lambda step, piece: None)

    if options.json:
        result = {"prompt": options.prompt, "device": jax.devices()[0].device_kind, **shown.figures()}
        if setting is not None:
            result |= {"lookahead": dataclasses.asdict(setting), "plain": plain.figures()}
        print(json.dumps(result))
    else:
        console.print("\n")
        rows = {"plain": plain} if setting is None else {_name(setting): shown, "plain": plain}
        console.print(_table(rows))
    return 0


@dataclasses.dataclass(frozen=True)
class _Run:
    text: str
    tokens: int
    steps: int
    seconds: float

    @property
    def compression(self) -> float:
        return self.tokens / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        derived = {"compression": self.compression, "tokens_per_second": self.tokens_per_second}
        return dataclasses.asdict(self) | derived


def _measure(
    params: Any,
    tokenizer: Any,
    request: dict[str, Any],
    lookahead: jlade.LookaheadConfig | None,
    show: Callable[[int, jlade.Piece], None],
) -> _Run:
    """Streams the completion once to compile it, one step long, and once to show and time it, prefill included."""

    def stream():
        return jlade.stream(params, tokenizer=tokenizer, lookahead=lookahead, **request)

    next(stream())
    pieces = []
    begin = time.perf_counter()
    for step, piece in enumerate(stream()):
        pieces.append(piece)
        show(step, piece)
    seconds = time.perf_counter() - begin
    return _Run(
        text="".join(piece.text or "" for piece in pieces),
        tokens=sum(len(piece.tokens) for piece in pieces),
        steps=len(pieces),
        seconds=seconds,
    )


def _name(config: jlade.LookaheadConfig) -> str:
    kind = "prompt lookup" if config.window_size == 0 else "Jacobi" if config.ngram_size == 2 else "lookahead"
    return f"{kind} W={config.window_size} N={config.ngram_size} G={config.guess_set_size}"


def _table(runs: dict[str, _Run]) -> Table:
    table = Table("", "tokens", "steps", "tokens/step", "tokens/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, run in runs.items():
        figures = (str(run.tokens), str(run.steps), f"{run.compression:.2f}", f"{run.tokens_per_second:.0f}")
        table.add_row(name, *figures)
    return table


if __name__ == "__main__":
    sys.exit(main())
