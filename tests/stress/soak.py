"""A soak: many generations in one process, of all kinds, against recorded texts; the memory of the process meanwhile.

    python -m tests.stress.soak --json benchmarks/results/soak.json

The kinds are single prompts, batches, sampled texts, stop strings, turns from an earlier state, streams that are left,
interrupted calls, wrong arguments, and requests of an engine, a part of them cancelled. Prompts, lengths and settings
are drawn at random. Greedy texts have to be those that transformers wrote (tests/golden/README.md), sampled ones those
of plain decoding with their keys.
"""

import collections
import contextlib
import dataclasses
import gc
import itertools
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jlade
from benchmarks import measure, report
from jlade import LookaheadConfig, SamplingConfig
from jlade.generation import memory

ADAPTIVE = LookaheadConfig.tree(7, relative_step_time=1.5)
SETTINGS = "auto", None, LookaheadConfig.paper(4, 3, 2), ADAPTIVE
SAMPLINGS = SamplingConfig(temperature=0.8), SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.1)
MOST, FEWEST = 48, 4  # new tokens
BATCH = 3
SEEDS = 4
PARTS = 20  # measurements of memory


@dataclasses.dataclass(frozen=True)
class Soak:
    """The model, its texts, and an engine that stays open."""

    params: Any
    tokenizer: Any
    golden: list[tuple[list[int], list[int]]]  # prompts, each with its greedy text, in tokens
    sampled: dict[tuple[int, int, int], list[int]]  # texts of plain decoding, by prompt, sampling and seed
    settings: Sequence[Any]  # of generations; the last one is that of streams and stop strings
    engine: jlade.Engine

    def generate(self, prompt: Any, **options: Any) -> jlade.Generation:
        return jlade.generate(self.params, prompt, eos_ids=(), learn=False, **options)

    def _stream(self, prompt: list[int]) -> Iterator[jlade.Piece]:
        options: Any = {"max_new_tokens": MOST, "lookahead": self.settings[-1], "eos_ids": (), "learn": False}
        return jlade.stream(self.params, prompt, **options)

    def single(self, draw: random.Random) -> None:
        (prompt, text), number = draw.choice(self.golden), draw.randint(FEWEST, MOST)
        out = self.generate(prompt, max_new_tokens=number, lookahead=draw.choice(self.settings))
        check(out.tokens[0], text[:number])

    def batch(self, draw: random.Random) -> None:
        chosen, numbers = draw.sample(self.golden, BATCH), [draw.randint(FEWEST, MOST) for _ in range(BATCH)]
        prompts = [prompt for prompt, _ in chosen]
        out = self.generate(prompts, max_new_tokens=numbers, lookahead=draw.choice(self.settings))
        for tokens, (_, text), number in zip(out.tokens, chosen, numbers, strict=True):
            check(tokens[:number], text[:number])

    def sample(self, draw: random.Random) -> None:
        index, sampling, seed = draw.randrange(len(self.golden)), draw.randrange(len(SAMPLINGS)), draw.randrange(SEEDS)
        number = draw.randint(FEWEST, MOST)
        request: Any = {"lookahead": draw.choice(self.settings), "sampling": SAMPLINGS[sampling]}
        key = jax.random.key(seed)
        out = self.generate(self.golden[index][0], max_new_tokens=number, key=key, **request)
        check(out.tokens[0], self.sampled[index, sampling, seed][:number])

    def stop(self, draw: random.Random) -> None:
        prompt, text = draw.choice(self.golden)
        whole = self.tokenizer.decode(text[:MOST])
        pairs = (whole[begin : begin + 2] for begin in range(len(whole) - 1))
        stop = draw.choice([pair for pair in pairs if pair.isascii()])
        options: Any = {"lookahead": self.settings[-1], "stop": stop, "tokenizer": self.tokenizer}
        out = self.generate(prompt, max_new_tokens=MOST, **options)
        assert out.text[0] == whole.partition(stop)[0], (out.text[0], whole, stop)

    def turns(self, draw: random.Random) -> None:
        (prompt, text), lookahead = draw.choice(self.golden), draw.choice(self.settings)
        numbers, done, state = [draw.randint(FEWEST, MOST) for _ in range(3)], 0, None
        for number in numbers:
            out = self.generate(
                prompt + text[:done], max_new_tokens=number, lookahead=lookahead, state=state, keep_state=True
            )
            check(out.tokens[0], text[done : done + number])
            done, state = done + number, out.state

    def stream(self, draw: random.Random) -> None:
        """Leaves the stream after some pieces."""
        (prompt, text), pieces = draw.choice(self.golden), draw.randint(1, 12)
        found: list[int] = []
        for piece in itertools.islice(self._stream(prompt), pieces):
            found += piece.tokens.tolist()
        check(np.array(found), text[: len(found)])

    def interrupt(self, draw: random.Random) -> None:
        """Presses Ctrl-C during the stream."""
        (prompt, text), after = draw.choice(self.golden), draw.random() * 0.03
        found: list[int] = []
        with interrupted(after):
            for piece in self._stream(prompt):
                found += piece.tokens.tolist()
        check(np.array(found), text[: len(found)])

    def refuse(self, draw: random.Random) -> None:
        wrong: Any = draw.choice(
            [{"max_new_tokens": 0}, {"lookahead": 3}, {"stop": "x"}, {"sampling": "hot"}, {"max_new_tokens": 10**6}]
        )
        try:
            self.generate(self.golden[0][0], **wrong)
        except (TypeError, ValueError):
            return
        raise AssertionError(f"{wrong} were accepted")

    def requests(self, draw: random.Random) -> None:
        """Submits requests to the engine, cancels a third of them, and waits for the others."""
        submitted = []
        for prompt, text in draw.choices(self.golden, k=draw.randint(1, 6)):
            number = draw.randint(FEWEST, MOST)
            request = self.engine.submit(prompt, max_new_tokens=number, eos_ids=(), priority=draw.randrange(3))
            submitted.append((request, text[:number]))
        for request, text in submitted:
            if draw.random() < 1 / 3:
                request.cancel()
            else:
                check(request.result(timeout=600).tokens[0], text)


@contextlib.contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Raises a KeyboardInterrupt in the block after some time, as Ctrl-C does, and suppresses it.

    JAX turns one that meets a comparison of its own into a ValueError.
    """
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-4))
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt) and "KeyboardInterrupt" not in str(error):
            raise
    finally:
        signal.signal(signal.SIGALRM, before)


def check(tokens: Any, expected: list[int]) -> None:
    """Raises an AssertionError unless the tokens are the expected ones."""
    assert tokens.tolist() == expected, (tokens.tolist(), expected)


def kinds() -> dict[str, tuple[Callable[[Soak, random.Random], None], int]]:
    """Returns the kinds of generations, each with its weight."""
    weights = {"single": 8, "batch": 3, "sample": 4, "stop": 2, "turns": 1, "stream": 2, "interrupt": 2, "refuse": 1}
    return {name: (getattr(Soak, name), weight) for name, weight in (weights | {"requests": 4}).items()}


@contextlib.contextmanager
def opened(
    params: Any, tokenizer: Any, golden: list[tuple[list[int], list[int]]], settings: Sequence[Any], **engine: Any
) -> Iterator[Soak]:
    """Yields a soak with an engine of these options."""
    sampled = {
        (index, sampling, seed): sampled_text(params, golden[index][0], SAMPLINGS[sampling], seed, MOST)
        for index, sampling, seed in itertools.product(range(len(golden)), range(len(SAMPLINGS)), range(SEEDS))
    }
    with jlade.Engine(params, **engine) as running:
        yield Soak(params, tokenizer, golden, sampled, settings, running)


def golden_texts() -> list[tuple[list[int], list[int]]]:
    """Returns the recorded prompts for the demo model, each with the greedy text that transformers wrote."""
    greedy = json.loads(report.DEMO_PROMPTS.with_name("greedy.json").read_text(encoding="utf-8"))
    return [(prompt["ids"], greedy[prompt["id"]]) for prompt in report.read_lines(report.DEMO_PROMPTS)]


def sampled_text(params: Any, prompt: list[int], sampling: SamplingConfig, seed: int, number: int) -> list[int]:
    """Returns a number of tokens that plain decoding samples."""
    options: Any = {"sampling": sampling, "key": jax.random.key(seed), "eos_ids": ()}
    tokens: list[int] = (
        jlade.generate(params, prompt, max_new_tokens=number, lookahead=None, **options).tokens[0].tolist()
    )
    return tokens


def demo(cache_tokens: int | None) -> contextlib.AbstractContextManager[Soak]:
    """Returns the soak of the demo model, with the texts that transformers wrote."""
    engine: Any = {"max_sequences": 4, "capacity": 1024, "prefix_memory": 1 << 25, "cache_tokens": cache_tokens}
    return opened(*jlade.demo(), golden_texts(), SETTINGS, **engine)


def run(soak: Soak, number: int, seed: int = 0) -> collections.Counter[str]:
    """Makes a number of generations, and returns how many of each kind."""
    draw, counts = random.Random(seed), collections.Counter[str]()
    functions = kinds()
    names, weights = list(functions), [weight for _, weight in functions.values()]
    for name in draw.choices(names, weights, k=number):
        functions[name][0](soak, draw)
        counts[name] += 1
    return counts


def held() -> dict[str, int]:
    """Returns the resident memory of the process and the arrays of JAX in bytes, and the threads.

    Free memory that glibc keeps is given back first.
    """
    gc.collect()
    memory.trim()
    return {
        "resident": measure.status_bytes("VmRSS"),
        "arrays": sum(array.nbytes for array in jax.live_arrays()),
        "threads": threading.active_count(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--number", type=int, default=10_000, metavar="N", help="generations (default: %(default)s)")
    parser.add_argument("--first", type=int, default=100, metavar="N", help="generations before the first measurement")
    parser.add_argument("--cache-tokens", type=int, metavar="N", help="of the engine, whose pages may then be too few")
    options = parser.parse_args(argv)
    begin, counts = time.perf_counter(), collections.Counter[str]()
    measured = {}
    with demo(options.cache_tokens) as soak:
        soak.engine.warm_up()
        ends = np.linspace(options.first, options.number, PARTS + 1).astype(int).tolist()
        for seed, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            counts += run(soak, end - start, seed)
            measured[end] = held()
            print(f"{end} generations, {measured[end]}", flush=True)
            seconds = time.perf_counter() - begin
            report.write(options.json, {"number": end, "seconds": seconds, "kinds": counts, "memory": measured})


if __name__ == "__main__":
    main()
