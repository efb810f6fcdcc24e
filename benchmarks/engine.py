"""Throughput of an engine beside static batches: prompts whose texts differ in length, on the same rows.

    python benchmarks/engine.py --json results.json
    python benchmarks/engine.py --load --temperature 2 --json results.json
    python benchmarks/engine.py --long 4000 --json results.json

The limits of the texts are spread between --shortest and --longest, evenly or, with --spread geometric, by equal
factors, in random order; end tokens are ignored. Both ways run once to compile and are then timed in turns. The texts
have to be the same. Programs that compile after the engine's `warm_up` are counted.

With --load it is the throughput of 1, 2, 4, ... clients, each of which submits a prompt as soon as its last text has
ended, beside that of an engine that makes plain steps. Both are timed in turns.

With --long it is the time between the pieces of --clients texts, alone and while prompts of so many tokens arrive, one
as soon as the text of the last has its first tokens. The prompts begin differently, so that all of them are read.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np

import jlade
from benchmarks import report
from jlade.evaluation import datasets
from jlade.generation import text
from jlade.lookahead import names

COMPILED = "/jax/core/compile/backend_compile_duration"  # the event of a compilation


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lookahead", default="auto", metavar="SETTING")
    parser.add_argument("--prompts", type=int, default=64, metavar="N")
    parser.add_argument("--rows", type=int, default=8, metavar="B")
    parser.add_argument("--shortest", type=int, default=8, metavar="M")
    parser.add_argument("--longest", type=int, default=256, metavar="M")
    parser.add_argument("--spread", choices=["even", "geometric"], default="even")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--long", type=int, metavar="N")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="with --long (default: 4)")
    parser.add_argument("--seconds", type=float, default=10, help="of each number of clients, with --load and --long")
    parser.add_argument("--temperature", type=float, default=0, help="of the texts of clients (default: 0)")
    parser.add_argument("--repeats", type=int, default=3, metavar="R")
    options = parser.parse_args(argv)

    params, tokenizer = report.load(options.model)
    lookahead: Any = "auto" if options.lookahead == "auto" else names.parse(options.lookahead)
    questions = [question.turns[0] for each in datasets.samples() for question in each.questions]
    prompts = [text.encode(tokenizer, question)[-256:] for question in questions]
    prompts = (prompts * -(-options.prompts // len(prompts)))[: options.prompts]
    measure = _gaps if options.long else _load if options.load else _list
    report.write(options.json, vars(options) | measure(params, prompts, lookahead, options))


def _distinct(prompts: list[list[int]], repeat: int) -> list[list[int]]:
    """Returns as many parts of all prompts in a row, as long as they are, each from an index that no other has."""
    stream = [token for prompt in dict.fromkeys(map(tuple, prompts)) for token in prompt]
    ring = np.array(stream + stream)
    begins = np.random.default_rng(0).permutation(len(stream))[repeat * len(prompts) :]
    return [ring[begin : begin + len(prompt)].tolist() for begin, prompt in zip(begins, prompts, strict=False)]


def _list(params: Any, prompts: list[list[int]], lookahead: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a list of prompts."""
    space = np.geomspace if options.spread == "geometric" else np.linspace
    limits = np.round(space(options.shortest, options.longest, options.prompts)).astype(int)
    limits = np.random.default_rng(0).permutation(limits).tolist()
    same: Any = {"eos_ids": (), "key": jax.random.key(0)}
    compiled = collections.Counter[str]()
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.update([event]))

    def static(prompts: list[list[int]]) -> list[list[int]]:
        texts = []
        for begin in range(0, len(prompts), options.rows):
            batch, longest = prompts[begin : begin + options.rows], limits[begin : begin + options.rows]
            out = jlade.generate(params, batch, max_new_tokens=longest, lookahead=lookahead, **same)
            texts += [tokens[:length].tolist() for tokens, length in zip(out.tokens, out.lengths, strict=True)]
        return texts

    seconds: dict[str, list[float]] = {"static": [], "engine": []}
    compilations = 0
    with jlade.Engine(params, max_sequences=options.rows, capacity=1024, lookahead=lookahead) as engine:
        engine.warm_up()
        for repeat in range(1 + options.repeats):
            # No prompt begins as an earlier one, or the engine would not read it.
            new, begin = _distinct(prompts, repeat), time.perf_counter()
            expected = static(new)
            middle, before = time.perf_counter(), compiled[COMPILED]
            results = engine.generate(new, max_new_tokens=limits, **same)
            end = time.perf_counter()
            compilations += compiled[COMPILED] - before
            texts = [result.tokens[0].tolist() for result in results if isinstance(result, jlade.Generation)]
            assert texts == expected, "the texts differ"
            if repeat:  # the first one compiles
                seconds["static"].append(middle - begin)
                seconds["engine"].append(end - middle)
    rates = {name: sum(limits) / float(np.median(each)) for name, each in seconds.items()}
    for name, rate in rates.items():
        print(f"{name}: {rate:.0f} tokens/s, {min(seconds[name]):.2f} to {max(seconds[name]):.2f} s")
    ratio = rates["engine"] / rates["static"]
    print(f"ratio: {ratio:.2f}; compilations after the warm-up: {compilations}")
    return {"seconds": seconds, "tokens_per_second": rates, "ratio": ratio, "compilations": compilations}


def _load(params: Any, prompts: list[list[int]], lookahead: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of clients."""
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, setting in (("engine", lookahead), ("plain", None)):
            engine = jlade.Engine(params, max_sequences=options.rows, capacity=1024, lookahead=setting)
            engines[name] = stack.enter_context(engine)
            engine.warm_up()
        rates: dict[int, dict[str, list[float]]] = {}
        for number in (2**power for power in range(options.rows.bit_length())):
            rates[number] = {name: [] for name in engines}
            for _, (name, engine) in itertools.product(range(options.repeats), engines.items()):
                texts = _texts_of_clients(engine, prompts, number, time.perf_counter() + options.seconds, options)
                num_tokens = sum(num_tokens for pieces in texts for _, num_tokens in pieces)
                rates[number][name].append(num_tokens / options.seconds)
            medians = {name: float(np.median(each)) for name, each in rates[number].items()}
            shown = ", ".join(f"{name}: {rate:.0f} tokens/s" for name, rate in medians.items())
            print(f"{number} clients: {shown}, ratio: {medians['engine'] / medians['plain']:.2f}", flush=True)
    return {"tokens_per_second": rates}


def _gaps(params: Any, prompts: list[list[int]], lookahead: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of clients while long prompts arrive."""
    stream = np.array([token for prompt in prompts for token in prompt])
    firsts = []  # seconds to the first tokens of long prompts
    capacity = options.long + options.longest
    with jlade.Engine(params, max_sequences=options.rows, capacity=capacity, lookahead=lookahead) as engine:
        engine.warm_up()

        def reader(end: float) -> None:
            chance = np.random.default_rng(0)
            while (begin := time.perf_counter()) < end:
                request = engine.submit(chance.choice(stream, options.long).tolist(), max_new_tokens=1, eos_ids=())
                request.result()
                firsts.append(time.perf_counter() - begin)

        figures: dict[str, Any] = {}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for name in ("alone", "with long prompts"):
                end = time.perf_counter() + options.seconds
                readers = [] if name == "alone" else [pool.submit(reader, end)]
                texts = _texts_of_clients(engine, prompts, options.clients, end, options)
                gaps = np.concatenate([np.diff([seconds for seconds, _ in pieces]) for pieces in texts])
                for each in readers:
                    each.result()
                median, late = np.median(gaps), np.quantile(gaps, 0.99)
                figures[name] = {"median": float(median), "p99": float(late), "gaps": len(gaps)}
                shown = f"{1e3 * median:.1f} ms between pieces, {1e3 * late:.1f} ms at most for 99% of them"
                print(f"{name}: {shown}, ratio: {late / median:.2f}", flush=True)
    print(f"{len(firsts)} long prompts, {np.median(firsts):.2f} s to the first token")
    return {"between_pieces": figures, "first_tokens": firsts}


def _texts_of_clients(
    engine: jlade.Engine, prompts: list[list[int]], number: int, end: float, options: argparse.Namespace
) -> list[list[tuple[float, int]]]:
    """Returns the pieces of the texts that clients get up to a time, each with its time and its number of tokens."""
    sampling = jlade.SamplingConfig(temperature=options.temperature)

    def client(first: int) -> list[list[tuple[float, int]]]:
        texts: list[list[tuple[float, int]]] = []
        for index in itertools.count(first, number):
            prompt, key = prompts[index % len(prompts)], jax.random.key(index)
            request = engine.submit(prompt, max_new_tokens=options.longest, eos_ids=(), sampling=sampling, key=key)
            texts.append([])
            for piece in request:
                if (now := time.perf_counter()) > end:
                    request.cancel()
                    return texts
                texts[-1].append((now, len(piece.tokens)))
        raise AssertionError("the count has no end")

    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        return list(itertools.chain.from_iterable(pool.map(client, range(number))))


if __name__ == "__main__":
    main()
