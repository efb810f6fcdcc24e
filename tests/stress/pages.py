"""Requests of mixed lengths to an engine whose pages are too few for them, against recorded texts.

    python -m tests.stress.pages --json benchmarks/results/pages.json

Prompts are recorded ones, with a part of their text; limits, priorities and sampling are drawn at random, and a tenth
of the requests is cancelled. Greedy texts have to be those that transformers wrote (tests/golden/README.md), sampled
ones those of plain decoding with their keys. In the end no page may be held.
"""

import collections
import random
import time
from typing import Any

import jax

import jlade
from benchmarks import report
from jlade import LookaheadConfig, SamplingConfig
from jlade.engine.running import Running
from tests.stress.soak import golden_texts, held, sampled_text

MOST = 256  # tokens of a recorded text
SAMPLED = 64  # of a sampled one
SAMPLING, SEEDS = SamplingConfig(temperature=0.8), 2
IN_FLIGHT = 48
PARTS = 10  # measurements of memory


class Draw:
    """Draws requests, with the texts that they must have.

    Args:
      params: of the demo model.
      seed: of the choices.
    """

    def __init__(self, params: Any, seed: int = 0):
        self._random = random.Random(seed)
        self._golden = golden_texts()
        self._sampled = {
            (index, seed): sampled_text(params, prompt, SAMPLING, seed, SAMPLED)
            for seed in range(SEEDS)
            for index, (prompt, _) in enumerate(self._golden)
        }

    def submit(self, engine: jlade.Engine) -> tuple[jlade.Request, list[int]]:
        """Submits a request, and returns it with its text."""
        draw = self._random
        index, priority = draw.randrange(len(self._golden)), draw.randrange(3)
        prompt, text = self._golden[index]
        if draw.random() < 0.3:
            seed, number = draw.randrange(SEEDS), draw.randint(1, SAMPLED)
            sampled: Any = {"sampling": SAMPLING, "key": jax.random.key(seed)}
            expected = self._sampled[index, seed][:number]
            return engine.submit(prompt, max_new_tokens=number, eos_ids=(), priority=priority, **sampled), expected
        given = draw.choice([0, 0, draw.randrange(MOST)])
        number = draw.choice([draw.randint(1, 32), draw.randint(1, MOST)])
        expected = text[given : given + number]
        request = engine.submit(prompt + text[:given], max_new_tokens=len(expected), eos_ids=(), priority=priority)
        return request, expected

    def is_cancelled(self) -> bool:
        """Returns whether a request is to be cancelled."""
        return self._random.random() < 0.1


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--number", type=int, default=2000, metavar="N", help="requests (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, metavar="B")
    parser.add_argument("--capacity", type=int, default=1024, metavar="C")
    parser.add_argument("--cache-tokens", type=int, default=1536, metavar="N")
    options = parser.parse_args()
    params, tokenizer = jlade.demo()
    counts, measured = collections.Counter[str](), {}
    take_out = Running.take_out

    def counted(self: Running, job: Any) -> None:
        counts["taken out of their rows"] += 1
        take_out(self, job)

    Running.take_out = counted  # type: ignore[method-assign]
    draw, waiting = Draw(params), collections.deque[tuple[jlade.Request, list[int], bool]]()
    with jlade.Engine(
        params,
        tokenizer,
        max_sequences=options.rows,
        capacity=options.capacity,
        cache_tokens=options.cache_tokens,
        lookahead=LookaheadConfig.tree(7, relative_step_time=1.5),
    ) as engine:
        engine.warm_up()
        begin = time.perf_counter()

        def finish() -> None:
            request, expected, is_cancelled = waiting.popleft()
            if is_cancelled:
                request.cancel()
                counts["cancelled"] += 1
                return
            try:
                tokens = request.result(timeout=600).tokens[0].tolist()
            except TimeoutError:
                counts["lost"] += 1
                return
            counts["right" if tokens == expected else "wrong"] += 1
            counts["tokens"] += len(tokens)
            counts["with a kept beginning"] += request.num_cached > 0

        for number in range(1, options.number + 1):
            waiting.append((*draw.submit(engine), draw.is_cancelled()))
            while len(waiting) > (IN_FLIGHT if number < options.number else 0):
                finish()
            if number % (options.number // PARTS) == 0:
                measured[number] = held()
                print(f"{number} requests, {dict(counts)}, {measured[number]}", flush=True)
        seconds = time.perf_counter() - begin
        while engine.num_running:
            time.sleep(0.01)
        engine._reader.clear()
        (allocator,) = engine._running._pool._allocators
        counts["pages"], counts["pages still held"] = allocator.number, allocator.number - allocator.num_free
    report.write(options.json, vars(options) | {"seconds": seconds, "counts": counts, "memory": measured})


if __name__ == "__main__":
    main()
