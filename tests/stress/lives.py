"""Long lives of processes: hundreds of settings one after another, and an engine of a model with many layers.

    python -m tests.stress.lives --settings 300 --layers 48
    python -m tests.stress.lives --settings 12 --layers 4 --taken 54000

All programs of one process would exceed the memory maps that Linux allows it (`jlade/decoding/room.py`). The texts must
be those of plain decoding, and the process must not fail. With `--taken` it has other maps besides, so that fewer
settings reach the limit. Programs compile without XLA's optimizations, in a part of the time, and have as many maps.
"""

import json
import mmap
import random
import time
from collections.abc import Iterator

import jax

import jlade
from benchmarks import report
from jlade.decoding import room
from tests.tiny import tiny_llama

PROMPT, NUM_TOKENS, CAPACITY = [1, 2, 3, 1, 2], 12, 32


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--settings", type=int, default=300, metavar="S", help="settings, of which few are used again")
    parser.add_argument("--layers", type=int, default=48, metavar="L", help="layers of the engine's model")
    parser.add_argument("--taken", type=int, default=0, metavar="M", help="maps that are taken from the beginning")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    taken = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(options.taken)]
    figures = {"settings": of_settings(options.settings, options.seed), "engine": of_engine(options.layers)}
    print(json.dumps(figures))
    report.write(options.json, {"taken": len(taken)} | figures)


def of_settings(number: int, seed: int) -> dict[str, float]:
    """Decodes with so many settings, each followed by one of three that are used again and again."""
    params, draw, begin = tiny_llama(), random.Random(seed), time.perf_counter()
    drawn = settings(draw)
    usual = [next(drawn) for _ in range(3)]
    expected = text(params, None)
    most = 0
    for count in range(number):
        for setting in next(drawn), draw.choice(usual):
            assert text(params, setting) == expected, setting
        most = max(most, measured())
        print(json.dumps({"settings": count + 1, "maps": room.measure().number, "most": most}), flush=True)
    return {"number": number, "most_maps": most, "seconds": round(time.perf_counter() - begin)}


def settings(draw: random.Random) -> Iterator[jlade.LookaheadConfig]:
    """Yields settings of which no two share the program of their steps."""
    seen = set[jlade.LookaheadConfig]()
    while True:
        tree = jlade.LookaheadConfig.tree(draw.randrange(1, 60), relative_step_time=draw.choice([None, 1.5]))
        paper = jlade.LookaheadConfig.paper(draw.randrange(1, 16), draw.randrange(2, 6), draw.randrange(1, 12))
        setting = draw.choice([tree, paper])
        if setting not in seen:
            seen.add(setting)
            yield setting


def text(params: jlade.LlamaParams, setting: jlade.LookaheadConfig | None) -> list[int]:
    out = jlade.generate(params, PROMPT, lookahead=setting, max_new_tokens=NUM_TOKENS, eos_ids=(), learn=False)
    tokens: list[int] = out.tokens[0].tolist()
    return tokens


def of_engine(num_layers: int) -> dict[str, float]:
    """Compiles all programs of an engine, and compares its texts with those of plain decoding."""
    params, begin = tiny_llama(num_layers=num_layers), time.perf_counter()
    expected = text(params, None)
    with jlade.Engine(params, max_sequences=2, capacity=CAPACITY) as engine:
        engine.warm_up()
        warm = measured()
        for out in engine.generate([PROMPT] * 4, max_new_tokens=NUM_TOKENS, eos_ids=()):
            assert not isinstance(out, Exception), out
            assert out.tokens[0].tolist() == expected
    return {"layers": num_layers, "maps": warm, "seconds": round(time.perf_counter() - begin)}


def measured() -> int:
    """Returns the number of maps, which must leave some of those that the process may have."""
    usage = room.measure()
    assert usage.number < usage.limit, usage
    return usage.number


if __name__ == "__main__":
    main()
