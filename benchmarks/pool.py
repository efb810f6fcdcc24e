"""N-grams and tokens per step that the pool loses to its bounded memory, on long texts and large vocabularies.

    python benchmarks/pool.py

Texts of 8192 and 32 768 tokens, beginnings of modules of Python's standard library, are decoded as if a model wrote
them: a step accepts the longest candidate that agrees with the text. The pool gets the n-grams of the text, and W more
in each step: those of the W next positions, each token of which is wrong with the given probability, and then drawn by
its frequency. No model runs. The tokenizers are that of SmolLM2, with 49 152 tokens, and one with 128 256 that is
trained on the library. The pools are one with G slots for each token of the vocabulary, one of 4 MiB with G slots for
each bucket, and that of `jlade.drafts.pool`.
"""

import itertools
import random
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks import report
from jlade.drafts import pool as ngram_pool
from jlade.generation import text
from tests.reference import Pool

BEGINNING = 3000  # characters of each module


class Shape(NamedTuple):
    """Of a pool."""

    buckets: int
    slots: int


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], metavar="TOKENS")
    parser.add_argument("--sizes", type=int, nargs=3, default=[15, 5, 15], metavar=("W", "N", "G"))
    parser.add_argument("--wrong", type=float, default=0.6, metavar="P", help="probability of a wrong guess")
    options = parser.parse_args()
    window, ngram_size, guesses = options.sizes
    texts = {49_152: smollm2_text(max(options.lengths)), 128_256: trained_text(128_256, max(options.lengths))}
    columns = "vocabulary", "tokens", "pool: buckets, slots", "tokens per step", "lost", "candidates", "lost"
    rows, cells = list[dict[str, Any]](), list[list[str]]()
    for vocab_size, tokens in texts.items():
        buckets, slots, _ = ngram_pool.shape(vocab_size, ngram_size, guesses)
        shapes = {
            "whole": Shape(vocab_size, guesses),
            "4 MiB, G slots": Shape(8192, guesses),
            "jlade": Shape(buckets, slots),
        }
        for length in options.lengths:
            whole: tuple[float, float] | None = None
            for name, shape in shapes.items():
                found = replay(tokens[:length], shape, (window, ngram_size, guesses), options.wrong)
                whole = whole or found
                lost = [1 - mine / all_ for mine, all_ in zip(found, whole, strict=True)]
                row = {"vocabulary": vocab_size, "tokens": length, "pool": name} | shape._asdict()
                row |= {"tokens_per_step": found[0], "tokens_per_step_lost": lost[0]}
                rows.append(row | {"candidates": found[1], "candidates_lost": lost[1]})
                shown = f"{found[0]:.3f}", f"{lost[0]:.2%}", f"{found[1]:.2f}", f"{lost[1]:.2%}"
                cells.append([f"{vocab_size}", f"{length}", f"{name}: {shape.buckets}, {shape.slots}", *shown])
    report.print_table(columns, cells)
    report.write(options.json, {"sizes": options.sizes, "wrong": options.wrong, "rows": rows})


def library() -> list[str]:
    """Returns the beginnings of the library's modules, in random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    return [file.read_text(encoding="utf-8")[:BEGINNING] for file in files]


def smollm2_text(length: int) -> list[int]:
    """Returns so many tokens of the library by SmolLM2's tokenizer."""
    _, tokenizer = report.load("smollm2", "float32")
    return [token for each in library() for token in text.encode(tokenizer, each, parse_special=False)][:length]


def trained_text(vocab_size: int, length: int) -> list[int]:
    """Returns so many tokens of the library by a byte-level BPE that is trained on all of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=letters, show_progress=False)
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    tokenizer.train_from_iterator((file.read_text(encoding="utf-8", errors="ignore") for file in files), trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    return [token for each in library() for token in tokenizer.encode(each).ids][:length]


def replay(tokens: Sequence[int], shape: Shape, sizes: Sequence[int], wrong: float) -> tuple[float, float]:
    """Returns tokens per step and candidates per step of a text that is accepted where the candidates agree with it."""
    window, ngram_size, guesses = sizes
    pool = Pool(shape.slots)
    counts = Counter(tokens)
    kinds, frequencies = list(counts), list(itertools.accumulate(counts.values()))

    def insert(ngram: Sequence[int]) -> None:
        pool.insert([ngram[0] % shape.buckets, *ngram])  # by bucket, as if its number were the first token

    place, steps, candidates = ngram_size - 1, 0, 0
    insert(tokens[:ngram_size])
    while place + window + ngram_size < len(tokens):
        found = [list(each) for each in pool.lookup(tokens[place] % shape.buckets) if each[0] == tokens[place]][
            :guesses
        ]
        accepted = max((agreeing(each[1:], tokens[place + 1 :]) for each in found), default=0)
        rng = random.Random(place)  # the same guesses for each pool
        for ahead in range(place + 1, place + window + 1):
            right = tokens[ahead : ahead + ngram_size]
            drawn = rng.choices(kinds, cum_weights=frequencies, k=ngram_size)
            insert([other if rng.random() < wrong else token for token, other in zip(right, drawn, strict=True)])
        for end in range(place + 2, place + accepted + 3):
            insert(tokens[end - ngram_size : end])
        place, steps, candidates = place + accepted + 1, steps + 1, candidates + len(found)
    return place / steps, candidates / steps


def agreeing(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns how many tokens of a draft the text begins with."""
    pairs = zip(draft, tokens, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(draft))


if __name__ == "__main__":
    main()
