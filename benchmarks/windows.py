"""Ways to move the window after a step, and to fill the first one: tokens per step, greedy.

    python benchmarks/windows.py
    python benchmarks/windows.py --model smollm2 --data benchmarks/prompts/smollm2.jsonl --limit 8

The algorithm runs step by step in Python, with the model's block of jlade, as each way needs another step. A step that
accepts k tokens moves the window by

- `row`: a row (jlade, and the authors' code by default);
- `columns`: a row and k-1 columns, the last columns drawn from the text (the authors' other branch);
- `token`: k rows, the last k-1 drawn from the text (the paper's Algorithm 2, and `window_advance="token"`);
- `copies`: k rows, the last k-1 copies of the oldest (llama.cpp).

The first window has

- `drawn`: rows drawn from the prompt, whose n-grams are kept after N-2 steps (jlade);
- `levels`: one drawn row, and a row more after each step (the authors' code);
- `pool`: rows that continue the prompt by the newest n-grams of the pool.
"""

import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from jlade.drafts.tree import TreeShape
from jlade.lookahead import block as blocks
from tests.reference import Pool

Rows = list[list[int]]
WAYS = [
    ("row", "drawn"),
    ("columns", "drawn"),
    ("token", "drawn"),
    ("copies", "drawn"),
    ("row", "levels"),
    ("row", "pool"),
]


class Sizes(NamedTuple):
    """W, N and G."""

    window: int
    ngram: int
    guesses: int


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", help="default: the demo model")
    report.add_prompts(parser)
    parser.add_argument("--sizes", type=int, nargs=3, default=[15, 5, 15], metavar=("W", "N", "G"))
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M")
    options = parser.parse_args()
    sizes = Sizes(*options.sizes)
    params, tokenizer = report.load(options.model, "float32")
    prompts = [report.prompt_ids(tokenizer, question) for question in report.questions(options)]
    longest = max(map(len, prompts)) + options.max_new_tokens
    model = Model(params, -(-longest // 256) * 256)
    results: list[dict[str, Any]] = []
    answers: list[list[int]] = [[] for _ in prompts]
    for move, first in WAYS:
        for from_text in (True, False):
            steps = tokens = 0
            for index, prompt in enumerate(prompts):
                number, answer = decode(model, prompt, options.max_new_tokens, sizes, move, first, from_text)
                answers[index] = answers[index] or answer[: options.max_new_tokens]
                assert answer[: options.max_new_tokens] == answers[index], "the text depends on the window"
                steps, tokens = steps + number, tokens + len(answer)
            results.append(
                {"move": move, "first": first, "ngrams_of_text": from_text, "tokens_per_step": tokens / steps}
            )
            print(results[-1], file=sys.stderr)
    *names, last = ("move", "first", "ngrams_of_text", "tokens_per_step")
    rows = ([*(str(result[name]) for name in names), f"{result[last]:.3f}"] for result in results)
    report.print_table(["window moves by", "first window", "n-grams of the text", "tokens per step"], rows)
    figures = {"model": options.model or "demo", "data": options.data, "prompts": len(prompts), "sizes": options.sizes}
    report.write(options.json, figures | {"max_new_tokens": options.max_new_tokens, "rows": results})


class Model:
    """A model with the cache of one text."""

    def __init__(self, params: Any, capacity: int):
        self.params, self.decoder, self.capacity = params, params.decoder, capacity
        self.cache = self.decoder.init_cache(params, 1, capacity)
        self._forward = jax.jit(self._run)
        self._commit = jax.jit(self.decoder.commit, donate_argnums=0)

    def _run(self, params: Any, tokens: Any, positions: Any, cache: Any, mask: Any, outputs: Any) -> Any:
        hidden, block = self.decoder.forward(params, tokens, positions, cache, mask)
        return jnp.argmax(self.decoder.logits(params, hidden[:, outputs])[0], axis=-1), block

    def start(self, prompt: list[int]) -> None:
        """Reads all tokens of a prompt but the last."""
        self.cache = self.decoder.init_cache(self.params, 1, self.capacity)
        for begin in range(0, len(prompt) - 1, 64):
            chunk = prompt[begin : min(begin + 64, len(prompt) - 1)]
            tokens = np.array([chunk + [0] * (64 - len(chunk))], np.int32)
            positions, mask = begin + np.arange(64, dtype=np.int32)[None], np.tri(64, dtype=bool)
            _, block = self._forward(self.params, tokens, positions, self.cache, mask, np.zeros(1, np.int32))
            self.commit(block, list(range(64)), len(chunk))

    def predict(self, tokens: list[int], block: blocks.Layout) -> tuple[list[int], Any]:
        """Returns the most likely tokens at the outputs of a block, and what `commit` needs."""
        positions = self.cache.length[:, None] + block.positions[None]
        arguments = np.array([tokens], np.int32), positions, self.cache, block.mask, block.outputs
        best, kept = self._forward(self.params, *arguments)
        return best.tolist(), kept

    def commit(self, block: Any, indices: list[int], number: int) -> None:
        """Appends the first `number` of the tokens of a block to the cache."""
        self.cache = self._commit(self.cache, block, np.array([indices], np.int32), np.array([number], np.int32))


def decode(
    model: Model, prompt: list[int], new_tokens: int, sizes: Sizes, move: str, first: str, from_text: bool
) -> tuple[int, list[int]]:
    """Returns the number of steps and the text, which the last step may make longer than was asked for."""
    window_size, ngram_size, guesses = sizes
    rng, text, pool = random.Random(0), list(prompt), Pool(guesses)
    draw = functools.partial(rng.choice, text)
    if from_text:
        for end in range(ngram_size, len(text) + 1):
            pool.insert(text[end - ngram_size : end])
    window = first_window(first, sizes, text, pool, draw)
    model.start(text)
    length, steps = ngram_size - 1, 0
    while len(text) < len(prompt) + new_tokens:
        window[0][0] = text[-1]
        found = pool.lookup(text[-1])
        drafts = [token for each in found for token in each] + [0] * (length * (guesses - len(found)))
        block = blocks.build(window_size, len(window) + 1, TreeShape.chains(guesses, length))
        best, kept = model.predict([token for row in window for token in row] + drafts, block)
        new, after = best[1 : 1 + window_size], best[1 + window_size :]
        accepted, path = [best[0]], [0]
        for number, draft in enumerate(found):
            begin, walked, indices = number * length, [best[0]], [0]
            for i, token in enumerate(draft):
                if token != walked[-1]:
                    break
                walked.append(after[begin + i])
                indices.append(block.first_draft + begin + i)
            if len(walked) > len(accepted):
                accepted, path = walked, indices
        model.commit(kept, path + [0] * (ngram_size - len(path)), len(path))
        if steps >= ngram_size - 2:
            for column in range(window_size):
                pool.insert([row[column] for row in window] + [new[column]])
        for token in accepted:
            text.append(token)
            if from_text:
                pool.insert(text[-ngram_size:])
        window = [*window, new] if len(window) < length else moved(move, window, new, len(accepted), draw)
        steps += 1
    return steps, text[len(prompt) :]


def first_window(first: str, sizes: Sizes, text: list[int], pool: Pool, draw: Callable[[], int]) -> Rows:
    """Returns the rows before the first step."""
    rows = 1 if first == "levels" else sizes.ngram - 1
    if first != "pool":
        return [[draw() for _ in range(sizes.window)] for _ in range(rows)]
    ahead = [text[-1]]
    while len(ahead) < sizes.window + rows:
        found = pool.lookup(ahead[-1])
        ahead += list(found[0]) if found else [draw()]
    return [ahead[row : row + sizes.window] for row in range(rows)]


def moved(move: str, window: Rows, new: list[int], accepted: int, draw: Callable[[], int]) -> Rows:
    """Returns the window after a step that accepted so many tokens."""
    rows, more = [*window[1:], new], accepted - 1
    if move == "columns":
        return [row[more:] + [draw() for _ in range(len(row[:more]))] for row in rows]
    for _ in range(more if move in ("token", "copies") else 0):
        rows = [*rows[1:], [draw() for _ in new] if move == "token" else list(rows[0])]
    return rows


if __name__ == "__main__":
    main()
