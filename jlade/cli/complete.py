"""`jlade PROMPT`: completes a prompt with lookahead and with plain decoding, and compares texts, steps and speed."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

from rich.console import Console
from rich.text import Text

import jlade
from jlade.cli import arguments, terminal
from jlade.cli.terminal import STEP_STYLES, Tally
from jlade.config import PLAIN
from jlade.costs import choice
from jlade.generation import difference, placement, prompts, text
from jlade.generation.options import Keywords
from jlade.generation.prompts import Prompts
from jlade.generation.results import FAILURES
from jlade.lookahead.names import label
from jlade.mesh import device_of, mesh_of
from jlade.models.llama import LlamaParams


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade complete",
        description="Complete a prompt by exact lookahead decoding. The colours show which tokens "
        "were accepted together, in one step. The table compares with plain decoding of the same prompt.",
        epilog="A step feeds the tokens of a tree, or (N-1)(W+G) of the paper's block, to the model. They are nearly "
        "free on a GPU or TPU, where tree=119 is a good start. On a CPU they cost time, and small trees are best.",
        examples=[
            'jlade "def read_config(path):" --lookahead tree=63 --also 15,5,15',
            'jlade "A person in JSON: " --model path/to/model --schema person.json',
            'jlade "Once upon a time" --model path/to/model --max-new-tokens 64 --temperature 0.7',
        ],
    )
    result.add_argument("prompt", metavar="PROMPT", help="the text to complete")
    arguments.add_shared(result)
    arguments.add_grammar(result)
    arguments.add(result, "--programs")
    result.add_argument("--no-compare", action="store_true", help="decode once, without plain decoding for comparison")
    result.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="SETTING",
        help="decode with this setting too, to compare; may be repeated",
    )
    result.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command. Ctrl-C ends it with the figures so far.

    Raises:
      FloatingPointError: after the text, if it ended for one of `FAILURES`.
    """
    request = arguments.request(options) | {"grammar": arguments.grammar(options)}
    others = [arguments.setting("--also", sizes) for sizes in options.also]
    if options.no_compare and others:
        raise ValueError("--also asks for a comparison, and --no-compare for none")
    console = Console(highlight=False, soft_wrap=True)
    prompt = Text(options.prompt, style="bold")

    with terminal.Status("loading", above=prompt if console.is_terminal else None) as line:
        params, tokenizer = arguments.load(options)
        request["tokenizer"] = tokenizer
        ids = text.encode(tokenizer, options.prompt)
        shown = request["lookahead"] or PLAIN
        if shown == "auto":
            decoder, mesh = placement.check(params, None, None, request["kv_dtype"])
            shown = choice.choose(params, decoder, 1, mesh)
        others = [setting for setting in dict.fromkeys([*others, PLAIN]) if setting != shown]
        settings = [shown] if options.no_compare else [shown, *others]
        requests: list[Keywords] = [
            request | {"lookahead": setting, "prior": request["prior"] if "recycled" in setting.reach else None}
            for setting in settings
        ]
        if options.programs is not None:  # which are those of "auto", not of the setting that it chooses
            requests[0] |= {"programs": options.programs, "lookahead": request["lookahead"]}
        jlade.prepare(params, prompts.whole([ids]), **requests[0])  # checks the arguments
        if not (options.json or console.is_terminal):
            print(options.prompt, end="", flush=True)
        line.say("compiling")
        _compile(params, prompts.whole([ids]), requests)
        line.say("reading")

        def show(step: int, piece: jlade.Piece) -> None:
            if step == 0:
                line.clear()
                if console.is_terminal:
                    console.print(prompt, end="")
            console.print(terminal.visible(piece.text or "", STEP_STYLES[step % len(STEP_STYLES)]), end="")

        runs: dict[jlade.LookaheadConfig, _Run] = {}
        try:
            for setting, request in zip(settings, requests, strict=True):
                run = runs[setting] = _Run()
                pieces = jlade.stream(params, prompts.whole([ids]), **request)
                if setting == shown and not options.json:
                    run.measure(pieces, show)
                    console.print("\n")
                else:
                    line.clear()
                    with terminal.Status(f"decoding with {_name(setting)}"):
                        run.measure(pieces)
                if run.finish_reason in FAILURES:
                    raise FloatingPointError(FAILURES[run.finish_reason])
        except KeyboardInterrupt:
            line.clear()
            if not options.json:
                console.print("\n", _table(runs), soft_wrap=False)
            raise

    sampling = request["sampling"]
    assert isinstance(sampling, jlade.SamplingConfig)
    first, *rest = runs.values()
    differences = [difference.find(params, ids, first.tokens, other.tokens, request["kv_dtype"]) for other in rest]
    if options.json:
        print(json.dumps(_figures(options.prompt, params, runs, differences)))
    else:
        console.print(_table(runs), soft_wrap=False)
        has_gap = sampling.temperature == 0 and request["grammar"] is None  # of two logits that could both be chosen
        for sentence in _sentences(params, runs, differences, has_gap):
            console.print(sentence, soft_wrap=not console.is_terminal)


@dataclasses.dataclass
class _Run:
    """One decode of the prompt: its tokens, its text, and the time for each step until it arrives."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    steps: int = 0
    seconds: float = 0.0
    finish_reason: str | None = None  # once it has ended

    def measure(
        self, pieces: Iterable[jlade.Piece], show: Callable[[int, jlade.Piece], None] = lambda step, piece: None
    ) -> None:
        """Takes and shows the pieces; the time includes prefill and leaves out `show`."""
        begin = time.perf_counter()
        for piece in pieces:
            self.seconds += time.perf_counter() - begin
            self.tokens += piece.tokens.tolist()
            self.text += piece.text or ""
            show(self.steps, piece)
            self.steps += 1
            if piece.generation is not None:
                self.finish_reason = piece.generation.finish_reason[0]
            begin = time.perf_counter()

    @property
    def tally(self) -> Tally:
        return Tally(len(self.tokens), self.steps, timed_tokens=len(self.tokens), seconds=self.seconds)

    def figures(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": len(self.tokens),
            "steps": self.steps,
            "seconds": self.seconds,
            "compression": self.tally.compression,
            "tokens_per_second": self.tally.tokens_per_second,
            "finish_reason": self.finish_reason,
        }


_Runs = dict[jlade.LookaheadConfig, _Run]


def _compile(params: LlamaParams, prompt: Prompts, requests: list[Keywords]) -> None:
    """Compiles all programs before the first is timed: the shared prefill, then those of each request in a thread.

    Those of the first request may come from a directory. On a mesh there is one thread: devices that wait for each
    other must run programs in the same order.
    """
    others = requests[1:] if "programs" in requests[0] else requests
    for request in others[:1]:
        jlade.prefill(params, *jlade.prepare(params, prompt, **request))
    with futures.ThreadPoolExecutor(None if mesh_of(params) is None else 1) as threads:
        list(threads.map(lambda request: next(jlade.stream(params, prompt, **request)), requests))


def _figures(
    prompt: str, params: LlamaParams, runs: _Runs, differences: list[difference.Difference | None]
) -> dict[str, Any]:
    """Returns the object of --json: the figures of the first run, then those of the others."""
    (setting, first), *rest = runs.items()
    figures = {"prompt": prompt, "device": device_of(params).device_kind, "dtype": str(params.norm.dtype)}
    figures |= first.figures()
    if setting != PLAIN:
        figures["lookahead"] = dataclasses.asdict(setting)
    for (other, run), found in zip(rest, differences, strict=True):
        compared = run.figures() | {
            "identical": found is None,
            "first_difference": None if found is None else found._asdict(),
        }
        if other == PLAIN:
            figures["plain"] = compared
        else:
            figures.setdefault("also", []).append({"lookahead": dataclasses.asdict(other), **compared})
    return figures


def _table(runs: _Runs) -> terminal.Tallies:
    """Returns the table of the runs, with their speed relative to plain decoding if both are there."""
    tallies = {_name(setting): run.tally for setting, run in runs.items()}
    return terminal.Tallies(tallies, baseline=runs[PLAIN].tally if PLAIN in runs and len(runs) > 1 else None)


def _sentences(
    params: LlamaParams, runs: _Runs, differences: list[difference.Difference | None], has_gap: bool
) -> Iterator[str]:
    """Yields whether the texts are identical, and what a CPU takes for the tokens of wide blocks."""
    (_, first), *rest = runs.items()
    if rest and not any(differences):
        number = "both" if len(rest) == 1 else f"all {len(runs)}"
        yield f"identical: {number} texts have the same {len(first.tokens)} tokens"
    for (setting, _), found in zip(rest, differences, strict=True):
        if found is not None:
            gap = f", where the two largest logits are {found.logit_gap:.2g} apart" if has_gap else ""
            dtype = params.norm.dtype
            yield f"not identical, in {dtype}: {_name(setting)} differs from token {found.position + 1} on{gap}"
    plain = runs.get(PLAIN, _Run()).tally.tokens_per_second
    for setting, run in runs.items() if device_of(params).platform == "cpu" else ():
        speed, compression = run.tally.tokens_per_second, run.tally.compression
        if plain and speed and compression and speed < plain:
            block, step_time = setting.block_size, compression * plain / speed
            yield (
                f"{_name(setting)}: a step accepts {compression:.2f} tokens and feeds {block} to the model. This CPU "
                f"takes {step_time:.1f} plain steps for it; a GPU or TPU has arithmetic to spare."
            )


def _name(setting: jlade.LookaheadConfig) -> str:
    if setting == PLAIN:
        return "plain"
    if setting.has_tree:
        return label(setting)
    kind = "prompt lookup" if setting.window_size == 0 else "lookahead"
    return f"{kind} W={setting.window_size} N={setting.ngram_size} G={setting.ngrams.guess_set_size}"
