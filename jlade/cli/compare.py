"""`jlade PROMPT`: complete a prompt, show the text as it comes and what lookahead saved."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

import jlade
from jlade.cli import display
from jlade.cli import options as options_lib
from jlade.cli.display import STEP_STYLES, Tally
from jlade.devices import choice
from jlade.generation import text


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = argparse.ArgumentParser(
        prog="jlade",
        description="Complete a prompt with a LLaMA model by exact lookahead decoding. Each colour is what one step "
        "accepted; the table compares with plain decoding of the same prompt.",
        epilog="Other commands, each with its own --help: `jlade generate` completes files, or the lines of files, "
        "without comparing; `jlade chat` chats; `jlade convert` writes a checkpoint in another format or dtype; "
        "`jlade inspect` shows what a checkpoint is and takes; `jlade tune` finds the fastest W, N and G. "
        "To complete one of these words itself: jlade -- chat. "
        "A step feeds (N-1)(W+G) tokens to the model. That is nearly free on a GPU or TPU, where 15, 5, 15 is a "
        "good start, and costs time on a CPU, where small blocks are best.",
    )
    result.add_argument("prompt", help="the text to complete")
    options_lib.add_shared(result)
    result.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    result.add_argument("--version", action="version", version=f"jlade {jlade.__version__}, JAX {jax.__version__}")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    request = options_lib.request(options)
    setting = request.pop("lookahead")
    params, tokenizer = options_lib.load(options)
    if setting == "auto":
        chosen = choice.choose(params, params.decoder, batch_size=1)
        setting = None if chosen.block_size == 1 else chosen
    request |= {"prompt": text.encode(tokenizer, options.prompt), "tokenizer": tokenizer}
    console = Console(highlight=False, soft_wrap=True)

    def show(step: int, piece: jlade.Piece) -> None:
        if options.json:
            return
        if step == 0:
            console.print(Text(options.prompt, style="bold"), end="")
        console.print(display.visible(piece.text or "", STEP_STYLES[step % len(STEP_STYLES)]), end="")

    shown = _measure(params, request, setting, show)
    plain = shown if setting is None else _measure(params, request, None, lambda step, piece: None)

    if options.json:
        result = {"prompt": options.prompt, "device": jax.devices()[0].device_kind, **shown.figures()}
        if setting is not None:
            result |= {"lookahead": dataclasses.asdict(setting), "plain": plain.figures()}
        print(json.dumps(result))
    else:
        console.print("\n")
        rows = {"plain": plain} if setting is None else {_name(setting): shown, "plain": plain}
        console.print(display.table({name: run.tally for name, run in rows.items()}))


@dataclasses.dataclass(frozen=True)
class _Run:
    text: str
    tally: Tally

    def figures(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tally.tokens,
            "steps": self.tally.steps,
            "seconds": self.tally.seconds,
            "compression": self.tally.compression,
            "tokens_per_second": self.tally.tokens_per_second,
        }


def _measure(
    params: Any,
    request: dict[str, Any],
    lookahead: jlade.LookaheadConfig | None,
    show: Callable[[int, jlade.Piece], None],
) -> _Run:
    """Streams the completion once to compile it, one step long, and once to show and time it, prefill included."""
    next(jlade.stream(params, lookahead=lookahead, **request))
    pieces = []
    begin = time.perf_counter()
    for step, piece in enumerate(jlade.stream(params, lookahead=lookahead, **request)):
        pieces.append(piece)
        show(step, piece)
    seconds = time.perf_counter() - begin
    tokens = sum(len(piece.tokens) for piece in pieces)
    return _Run(
        text="".join(piece.text or "" for piece in pieces),
        tally=Tally(tokens, len(pieces), timed_tokens=tokens, seconds=seconds),
    )


def _name(config: jlade.LookaheadConfig) -> str:
    kind = "prompt lookup" if config.window_size == 0 else "Jacobi" if config.ngram_size == 2 else "lookahead"
    return f"{kind} W={config.window_size} N={config.ngram_size} G={config.guess_set_size}"
