"""Times to the first token of prompts that begin as earlier texts, in engines that keep those texts or do not.

    python benchmarks/prefixes.py --json results.json

There are three cases, each with other tokens in every repeat. The second turn of a chat follows a prompt of --prompt
tokens and an answer. Continuations of one prompt are submitted at once, and the last one's first token counts. The
total time of a list of prompts that share nothing shows the cost of keeping. The engines take turns, and their texts
have to be the same. Ratios are medians over the repeats.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np

import jlade
from benchmarks import report
from jlade.lookahead import names

Tokens = list[list[int]]  # of all texts


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lookahead", default="auto", metavar="SETTING")
    parser.add_argument("--rows", type=int, default=8, metavar="B")
    parser.add_argument("--prompt", type=int, default=512, metavar="T", help="tokens of a prompt")
    parser.add_argument("--turn", type=int, default=32, metavar="T", help="tokens of the second turn")
    parser.add_argument("--new", type=int, default=32, metavar="M", help="tokens of a text")
    parser.add_argument("--repeats", type=int, default=15, metavar="R")
    options = parser.parse_args()

    params, _ = report.load(options.model)
    lookahead: Any = "auto" if options.lookahead == "auto" else names.parse(options.lookahead)
    of_engine: Any = {"max_sequences": options.rows, "capacity": 1024, "lookahead": lookahead}
    of_request: Any = {"max_new_tokens": options.new, "eos_ids": ()}

    def draw(number: int, seed: int) -> list[int]:
        drawn: list[int] = np.random.default_rng(seed).integers(params.config.vocab_size, size=number).tolist()
        return drawn

    def turns(engine: jlade.Engine, seed: int) -> tuple[float, Tokens]:
        prompt = draw(options.prompt, seed)
        answer = engine.submit(prompt, **of_request).result().tokens[0].tolist()
        begin = time.perf_counter()
        request = engine.submit(prompt + answer + draw(options.turn, seed + 1), **of_request)
        next(iter(request))
        seconds = time.perf_counter() - begin
        return seconds, [answer, request.result().tokens[0].tolist()]

    def continuations(engine: jlade.Engine, seed: int) -> tuple[float, Tokens]:
        prompt, sampling = draw(options.prompt, seed), jlade.SamplingConfig(temperature=1.0)
        begin = time.perf_counter()
        requests = [
            engine.submit(prompt, sampling=sampling, key=jax.random.key(number), **of_request)
            for number in range(options.rows)
        ]
        for request in requests:
            next(iter(request))
        seconds = time.perf_counter() - begin
        return seconds, [request.result().tokens[0].tolist() for request in requests]

    def others(engine: jlade.Engine, seed: int) -> tuple[float, Tokens]:
        prompts = [draw(options.prompt // 4, seed + number) for number in range(3 * options.rows)]
        begin = time.perf_counter()
        results = engine.generate(prompts, **of_request)
        return time.perf_counter() - begin, [
            result.tokens[0].tolist() for result in results if isinstance(result, jlade.Generation)
        ]

    cases: dict[str, Callable[[jlade.Engine, int], tuple[float, Tokens]]] = {
        "second turn": turns,
        "continuations": continuations,
        "prompts that share nothing": others,
    }
    figures: dict[str, Any] = dict(vars(options))
    with jlade.Engine(params, **of_engine) as keeping, jlade.Engine(params, prefix_memory=0, **of_engine) as reading:
        for engine in (keeping, reading):
            engine.warm_up()
        for name, case in cases.items():
            seconds: dict[str, list[float]] = {"kept": [], "read": []}
            for repeat in range(options.repeats):
                kept, read = case(keeping, 1000 * repeat), case(reading, 1000 * repeat)
                assert kept[1] == read[1], "the texts differ"
                seconds["kept"].append(kept[0])
                seconds["read"].append(read[0])
            ratio = float(np.median(np.divide(seconds["read"], seconds["kept"])))
            print(f"{name}: {ratio:.2f} times as fast with prefixes, {np.median(seconds['kept']):.3f} s")
            figures[name] = {"seconds": seconds, "ratio": ratio}
    report.write(options.json, figures)


if __name__ == "__main__":
    main()
