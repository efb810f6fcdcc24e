"""`jlade PROMPT`: completes a prompt with lookahead and with plain decoding, and compares their steps and speed."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

import jlade
from jlade.cli import display
from jlade.cli import options as options_lib
from jlade.cli.display import STEP_STYLES, Tally
from jlade.devices import choice
from jlade.devices.sheet import device_of
from jlade.generation import text
from jlade.generation.request import Options
from jlade.models.llama import LlamaParams


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = argparse.ArgumentParser(
        prog="jlade",
        description="Complete a prompt with a LLaMA model by exact lookahead decoding. The colours show which tokens "
        "were accepted together, in one step. The table compares with plain decoding of the same prompt.",
        epilog="Other commands, each with its own --help: `jlade generate` completes files, or the lines of files; "
        "`jlade chat` chats; `jlade convert` writes a checkpoint in another format or dtype; `jlade inspect` describes "
        "a checkpoint and the memory it needs; `jlade tune` finds the fastest W, N and G. "
        "To complete a prompt that is the name of a command: jlade -- chat. "
        "A step feeds (N-1)(W+G) tokens to the model. They are nearly free on a GPU or TPU, where 15, 5, 15 is a "
        "good start. On a CPU they cost time, and small blocks are best.",
    )
    result.add_argument("prompt", help="the text to complete")
    options_lib.add_shared(result)
    result.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    result.add_argument("--version", action="version", version=f"jlade {jlade.__version__}, JAX {jax.__version__}")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    request = options_lib.request(options)
    setting = request["lookahead"]
    params, tokenizer = options_lib.load(options)
    if setting == "auto":
        chosen = choice.choose(params, params.decoder, batch_size=1)
        setting = None if chosen.block_size == 1 else chosen
    request["tokenizer"] = tokenizer
    ids = text.encode(tokenizer, options.prompt)
    console = Console(highlight=False, soft_wrap=True)

    def show(step: int, piece: jlade.Piece) -> None:
        if options.json:
            return
        if step == 0:
            console.print(Text(options.prompt, style="bold"), end="")
        console.print(display.visible(piece.text or "", STEP_STYLES[step % len(STEP_STYLES)]), end="")

    requests: list[Options] = [request | {"lookahead": setting}]
    if setting is not None:
        requests.append(request | {"lookahead": None})
    _compile(params, ids, requests)
    shown = plain = _measure(params, ids, requests[0], show)
    if setting is not None:
        plain = _measure(params, ids, requests[1], lambda step, piece: None)

    if options.json:
        result = {"prompt": options.prompt, "device": device_of(params)[0].device_kind, **shown.figures()}
        if setting is not None:
            result |= {"lookahead": dataclasses.asdict(setting), "plain": plain.figures()}
        print(json.dumps(result))
    else:
        console.print("\n")
        runs = {"plain": plain} if setting is None else {_name(setting): shown, "plain": plain}
        console.print(display.table({name: run.tally for name, run in runs.items()}))


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


def _compile(params: LlamaParams, prompt: list[int], requests: list[Options]) -> None:
    """Compiles all programs before the first is timed: the shared prefill, then those of each request in a thread."""
    jlade.prefill(params, *jlade.prepare(params, prompt, **requests[0]))
    with futures.ThreadPoolExecutor() as threads:
        list(threads.map(lambda request: next(jlade.stream(params, prompt=prompt, **request)), requests))


def _measure(
    params: LlamaParams, prompt: list[int], request: Options, show: Callable[[int, jlade.Piece], None]
) -> _Run:
    """Streams the whole completion, shows it and times it, prefill included."""
    pieces = []
    begin = time.perf_counter()
    for step, piece in enumerate(jlade.stream(params, prompt=prompt, **request)):
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
