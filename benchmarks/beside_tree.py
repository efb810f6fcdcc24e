"""Uses of a third of a step's tokens beside a tree of drafts, simulated: tokens per step.

    python benchmarks/beside_tree.py --temperature 0 0.7
    python benchmarks/beside_tree.py --model smollm2 --data benchmarks/prompts/smollm2.jsonl --limit 8

The drafting runs in plain Python, the model's rows are jlade's. It expands the tree by probability, so its figures are
near those of jlade and not equal to them; all uses have the same tree and the same number of tokens. Texts are fixed:
greedy ones, or sampled with the noise of jlade. So a row of the model, which depends on the text and the path before
it, is computed once for all uses. The uses:

- `tree`: a larger tree (`LookaheadConfig.tree`);
- `window`: the window of the paper, whose newest row teaches the table of recycled logits (`10,5,10:tree=80`);
- `low`: the window in steps whose forecast is below the mean, the larger tree in the others;
- `n-grams`: the window, and its n-grams as drafts, with odds by the probabilities that the model gave them;
- `columns`: the most likely ends of the tree, each continued by the 5 most probable tokens that the table knows;
- `jacobi`: a chain that continues the most likely path, each token the model's prediction of the step before;
- `probes`: mask tokens behind the likely ends of the tree, as in ESP (arXiv 2603.17942), whose logits are drafts after
  the next token. A mask's embedding is the mean of the vocabulary's;
- `two probes`: half as many ends with two masks each, the second for the token after that;
- `prompt probes`: the probes with the mean embedding of the prompt, as in the paper of ESP;
- `siblings`: the larger tree, and the tokens after the best rejected sibling as drafts after the next token.
"""

import dataclasses
import heapq
import itertools
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks import report
from jlade.decoding import sampling
from jlade.drafts import recycled, suffix
from jlade.drafts.record import MEMORY, PRIOR
from jlade.drafts.source import RANKS
from jlade.drafts.sources import NOISE_REACH
from jlade.evaluation import datasets
from jlade.vocabulary import VocabularyShard

Draft = tuple[int, ...]  # tokens after the current one
Kind = tuple[Any, ...]
SIZES = (32, 64, 128)  # tokens of a pass of the model, the smallest that holds those missing
MASKS = 2  # tokens after the vocabulary: the mean embedding of the vocabulary, and that of the prompt
REACH = 6  # most tokens of a draft of recycled logits
BUCKETS = 10  # of probabilities
# Initial acceptance rates by rank, measured with SmolLM2.
RATES_AFTER_TOKENS = (0.34, 0.1, 0.06, 0.04, 0.03, 0.025, 0.02, 0.015)
RATES_AFTER_PAIRS = (0.73, 0.07, 0.04, 0.022, 0.016, 0.01, 0.007, 0.006)


class Use(NamedTuple):
    """A use of the tokens beside the tree; the head of the file has their meaning."""

    window: bool = False
    only_low: bool = False
    ngrams: bool = False
    columns: bool = False
    jacobi: bool = False
    probes: int = 0  # masks behind each end
    mask: int = 0  # of `MASKS`
    siblings: bool = False


USES = {
    "tree": Use(),
    "window": Use(window=True),
    "low": Use(window=True, only_low=True),
    "n-grams": Use(window=True, ngrams=True),
    "columns": Use(columns=True),
    "jacobi": Use(jacobi=True),
    "probes": Use(probes=1),
    "two probes": Use(probes=2),
    "prompt probes": Use(probes=1, mask=1),
    "siblings": Use(siblings=True),
}


class Row(NamedTuple):
    """The result of the model after a token."""

    best: list[int]  # the most probable tokens
    logprobs: list[float]  # of these
    drawn: int  # the token that comes next


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", help="default: the demo model")
    report.add_prompts(parser)
    parser.add_argument("--longest", type=int, default=400, metavar="T", help="tokens of a prompt at most")
    parser.add_argument("--tokens", type=int, default=120, metavar="T", help="of a step")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], metavar="T")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M")
    parser.add_argument("--uses", nargs="+", default=list(USES), choices=list(USES), metavar="USE")
    options = parser.parse_args()
    params, tokenizer = report.load(options.model, "float32")
    prompts = {each: report.prompt_ids(tokenizer, each) for each in datasets.read(options.data).questions}
    questions = tuple(each for each, ids in prompts.items() if len(ids) <= options.longest)
    questions = datasets.select(questions, options.limit) if options.limit else questions
    model = Model(params)
    counts: dict[str, dict[str, list[int]]] = {}  # tokens and steps, by use and task
    for index, question in enumerate(questions):
        for temperature in options.temperature:
            rows = text_of(model, prompts[question], options.max_new_tokens, temperature, index)
            for use in options.uses:
                decoded = decode(rows, options.tokens - 1, USES[use])
                of_use = counts.setdefault(f"{use}, temperature {temperature:g}", {})
                for task in (question.task, "all"):
                    of_use[task] = [a + b for a, b in zip(of_use.get(task, [0, 0]), decoded, strict=True)]
        found = {use: {task: tokens / steps for task, (tokens, steps) in of.items()} for use, of in counts.items()}
        figures = {"model": options.model or "demo", "data": options.data, "prompts": index + 1}
        figures |= {"tokens": options.tokens, "max_new_tokens": options.max_new_tokens, "tokens_per_step": found}
        report.write(options.json, figures | {"steps": {use: of["all"][1] for use, of in counts.items()}})
        print(index + 1, {use: f"{of_use['all']:.2f}" for use, of_use in found.items()}, file=sys.stderr)
    tasks = list(next(iter(found.values())))
    lines = ([use, *(f"{rates[task]:.2f}" for task in tasks)] for use, rates in found.items())
    report.print_table(["use, temperature", *tasks], lines, "Tokens per step")


def text_of(model: "Model", prompt: list[int], new_tokens: int, temperature: float, seed: int) -> "Rows":
    """Returns the rows of a prompt and its text, which plain decoding writes."""
    key = jax.random.key(seed)
    out = jlade.generate(
        model.params,
        prompt,
        max_new_tokens=new_tokens,
        lookahead=None,
        sampling=jlade.SamplingConfig(temperature=temperature),
        key=key,
    )
    noise = None
    if temperature:
        positions = len(prompt) + jnp.arange(new_tokens + NOISE_REACH, dtype=jnp.int32)
        noise = np.asarray(sampling.noise_at(jax.random.fold_in(key, 0), positions, model.vocab_size))
    return Rows(model, [*prompt, *out.tokens[0, : out.lengths[0]].tolist()], len(prompt), temperature, noise)


class Model:
    """A model whose vocabulary has masks besides."""

    def __init__(self, params: Any):
        self.params, self.vocab_size = params, params.decoder.vocab_size
        config = dataclasses.replace(params.decoder.config, vocab_size=self.vocab_size + MASKS)
        self.decoder = dataclasses.replace(params.decoder.on(params), config=config)
        self.run = jax.jit(self._run)
        self.commit = jax.jit(self.decoder.commit, donate_argnums=0)

    def with_masks(self, prompt: list[int]) -> Any:
        """Returns the parameters with the embeddings of the masks."""
        embedding = self.params.embedding
        means = jnp.stack([jnp.mean(embedding, axis=0), jnp.mean(embedding[jnp.asarray(prompt)], axis=0)])
        output = self.params.output
        return dataclasses.replace(
            self.params,
            embedding=jnp.concatenate([embedding, means]),
            output=None if output is None else jnp.concatenate([output, means]),
        )

    def _run(
        self, params: Any, tokens: Any, positions: Any, cache: Any, mask: Any, temperature: Any, noise: Any
    ) -> Any:
        hidden, block = self.decoder.forward(params, tokens[None], positions[None], cache, mask)
        logits = self.decoder.logits(params, hidden)[0, :, : self.vocab_size]
        best, highest = VocabularyShard(self.vocab_size).top(logits, RANKS)
        logprobs = highest - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        drawn = best[:, 0] if noise is None else jnp.argmax(logits / temperature + noise, axis=-1)
        return best, logprobs, drawn, block


class Rows:
    """The rows of a model in a fixed text, computed when they are asked for."""

    def __init__(self, model: Model, text: list[int], prompt_length: int, temperature: float, noise: Any):
        self.model, self.text, self.prompt_length, self.temperature = model, text, prompt_length, temperature
        self.params, self.noise = model.with_masks(text[:prompt_length]), noise  # [M, V] of the tokens after the prompt
        self.known: dict[tuple[int, Draft], Row] = {}
        self.cache = model.decoder.init_cache(self.params, 1, -(-len(text) // 256) * 256)
        for begin in range(0, len(text), 32):
            chunk = text[begin : begin + 32]
            tokens = np.array(chunk + [0] * (32 - len(chunk)), np.int32)
            rows, block = self._run(tokens, begin + np.arange(32, dtype=np.int32), np.tri(32, dtype=bool))
            for place, row in enumerate(rows[: len(chunk)]):
                self.known[begin + place + 1, ()] = row
            number = np.array([len(chunk)], np.int32)
            self.cache = model.commit(self.cache, block, np.arange(32, dtype=np.int32)[None], number)
        for place in range(prompt_length, len(text)):
            assert self.known[place, ()].drawn == text[place], f"token {place} of the text is not the model's"

    def after(self, length: int, drafts: list[Draft]) -> dict[Draft, Row]:
        """Returns the rows after drafts that continue the first tokens of the text."""
        missing = {draft[:end] for draft in drafts for end in range(1, len(draft) + 1)}
        missing = {draft for draft in missing if self._place(length, draft) not in self.known}
        needed = sorted({draft[:end] for draft in missing for end in range(1, len(draft) + 1)}, key=len)
        if needed:
            size = next(size for size in SIZES if size >= len(needed))
            index = {draft: i for i, draft in enumerate(needed)}
            tokens, positions = np.zeros(size, np.int32), np.full(size, length, np.int32)
            mask = np.eye(size, dtype=bool)
            for draft, i in index.items():
                tokens[i], positions[i] = draft[-1], length + len(draft) - 1
                mask[i, [index[draft[:end]] for end in range(1, len(draft))]] = True
            self.cache = dataclasses.replace(self.cache, length=jnp.array([length], jnp.int32))
            for draft, row in zip(needed, self._run(tokens, positions, mask)[0], strict=False):
                self.known[self._place(length, draft)] = row
        return {draft: self.known[self._place(length, draft)] for draft in drafts}

    def _place(self, length: int, draft: Draft) -> tuple[int, Draft]:
        """Returns the tokens of the text that a draft continues, and the rest of it, which leaves the text."""
        same = 0
        while same < len(draft) and self.text[length + same : length + same + 1] == [draft[same]]:
            same += 1
        return length + same, draft[same:]

    def _run(self, tokens: Any, positions: Any, mask: Any) -> tuple[list[Row], Any]:
        noise = self.noise
        if noise is not None:
            noise = noise[np.clip(positions + 1 - self.prompt_length, 0, len(noise) - 1)]
        arguments = self.params, tokens, positions, self.cache, mask, np.float32(self.temperature), noise
        *results, block = self.model.run(*arguments)
        return [Row(*row) for row in zip(*(np.asarray(x).tolist() for x in results), strict=True)], block


class Record:
    """The acceptance rates of kinds of drafts, as `jlade.drafts.record` keeps them."""

    def __init__(self) -> None:
        self.counts: dict[Kind, list[float]] = {}

    def rate(self, kind: Kind, initial: float) -> float:
        accepted, tried = self.counts.get(kind, (initial, 1.0))
        return accepted / tried

    def add(self, seen: Iterable[tuple[Kind, float, float]]) -> None:
        seen = list(seen)
        for kind, initial, accepted in seen:
            count = self.counts.setdefault(kind, [PRIOR * initial, PRIOR])
            count[0], count[1] = count[0] + accepted, count[1] + 1
        for kind in {kind for kind, _, _ in seen}:
            accepted, tried = self.counts[kind]
            kept = min(1.0, MEMORY / tried)
            self.counts[kind] = [kept * accepted, kept * tried]


def decode(rows: Rows, size: int, use: Use) -> tuple[int, int]:
    """Returns the tokens that steps accept up to the end of a text, and the number of steps."""
    drafting, steps = Drafting(rows, size, use), 0
    end = len(rows.text) - REACH
    while len(drafting.text) < end:
        drafting.step()
        steps += 1
    known = min(len(drafting.text), len(rows.text))
    assert drafting.text[:known] == rows.text[:known]
    return len(drafting.text) - rows.prompt_length, steps


class Drafting:
    """A text so far, and the knowledge of the sources of drafts.

    Drafts are those of suffix matches, of recycled logits and of their runners-up, and those of the use.
    """

    def __init__(self, rows: Rows, size: int, use: Use):
        self.rows, self.size, self.third, self.use = rows, size, size // 3, use
        self.mask = rows.model.vocab_size + use.mask
        self.text, self.record = rows.text[: rows.prompt_length], Record()
        self.after_token: dict[int, Row] = {}
        self.after_pair: dict[Draft, Row] = {}
        for place in range(1, len(self.text)):
            self._learn(self.text[max(0, place - 2) : place], rows.known[place, ()])
        self.last = rows.known[len(self.text) - 1, ()]
        self.ahead: dict[tuple[str, int], Row] = {}  # guesses of the next tokens, by kind and place
        self.forecasts: list[float] = []
        self.guesses: list[int] = []
        self.ngrams: dict[int, list[tuple[Draft, list[float]]]] = {}
        self.window: list[list[tuple[int, float]]] = []  # rows of tokens and of their log-probabilities
        if use.window:
            draw = np.random.default_rng(0).choice
            width = (self.third + 1) // 4
            self.window = [[(int(draw(self.text)), -9.0) for _ in range(width)] for _ in range(4)]

    def step(self) -> None:
        """Adds the tokens that the model accepts of this step's drafts to the text, and learns."""
        small = self.size - self.third if self.window or self.use.columns or self.use.jacobi else self.size
        if self.use.probes:
            small = self.size - self.third // 2
        tree = self._tree(self.size)
        forecast = 1 + sum(tree.values())
        self.forecasts.append(forecast)
        is_low = forecast < sum(self.forecasts) / len(self.forecasts)
        has_window = bool(self.window) and (is_low or not self.use.only_low)
        if not self.window or has_window:
            tree = dict(itertools.islice(tree.items(), small))
        beside = self._window_paths() if has_window else []
        beside += self._columns(tree) if self.use.columns else []
        beside += self._chain(tree) if self.use.jacobi else []
        masks = (self.mask,) * self.use.probes
        probed = self._ends(tree)[: (self.size - small) // max(1, self.use.probes)] if self.use.probes else []
        masked = [end + masks[: i + 1] for end in probed for i in range(self.use.probes)]
        found = self.rows.after(len(self.text), [(), *tree, *beside, *masked])

        drafts = {*tree, *beside}
        path: Draft = ()
        while (longer := (*path, found[path].drawn)) in drafts:
            path = longer
        accepted = (*path, found[path].drawn)
        self.record.add(
            (kind, initial, token == accepted[place])
            for place in range(len(accepted))
            for token, kinds in self._candidates(accepted[:place]).items()
            for kind, initial in kinds
        )

        # Of several rows after a token the last one counts: window, drafts from the last on, text.
        text_rows = [accepted[:place] for place in range(len(accepted))]
        newest = beside[3::4] if has_window else beside
        for draft in [*newest, *reversed(tree), *text_rows]:
            self._learn([*self.text[-2:], *draft][-2:], found[draft])
        if has_window:
            self._advance(found)
        chain = self._main_chain(tree) if self.use.jacobi else ()
        predicted = [found[chain[:i]].drawn for i in range(len(chain) + 1) if chain[:i] in found]
        self.guesses = predicted[len(accepted) :]
        probes = {("probe", i): path + masks[: i + 1] for i in range(self.use.probes)}
        self.ahead = {place: found[draft] for place, draft in probes.items() if draft in found}
        if self.use.siblings:
            rejected = (draft for draft in tree if draft[:-1] == path and len(draft) == len(path) + 1)
            best = next(rejected, None)
            self.ahead = {} if best is None else {("sibling", 0): found[best]}
        self.last = found[path]
        self.text += accepted

    def _tree(self, size: int) -> dict[Draft, float]:
        """Returns the drafts that are most likely to be accepted, with their probabilities, the best first."""
        self.matches = self._matches()
        tree: dict[Draft, float] = {}
        heap: list[tuple[float, Draft]] = [(-1.0, ())]
        while heap and len(tree) <= size:
            negative, draft = heapq.heappop(heap)
            tree[draft] = -negative
            for token, kinds in self._candidates(draft).items():
                rate = max(self.record.rate(*kind) for kind in kinds)
                heapq.heappush(heap, (negative * self._given_noise(rate, len(draft), token), (*draft, token)))
        del tree[()]
        return tree

    def _candidates(self, draft: Draft) -> dict[int, list[tuple[Kind, float]]]:
        """Returns the tokens proposed after a draft, with the kind and the initial acceptance rate of each proposal."""
        found: dict[int, list[tuple[Kind, float]]] = {}

        def propose(token: int, kind: Kind, initial: float) -> None:
            found.setdefault(token, []).append((kind, initial))

        for rank, (place, length) in enumerate(self.matches):
            at = place + len(draft)
            if len(draft) < (24 if rank == 0 else suffix.OTHERS) and tuple(self.text[place:at]) == draft:
                matched = min(length + len(draft), suffix.LONGEST)
                if at < len(self.text):
                    rate = suffix.RATES[(matched - 1) * suffix.MATCHES + rank]
                    propose(self.text[at], ("suffix", matched, rank), float(rate))
        if len(draft) >= REACH:
            return found
        pair = tuple([*self.text[-2:], *draft][-2:])
        of_pair, of_token = self.after_pair.get(pair), self.after_token.get(pair[1])
        rates = RATES_AFTER_TOKENS if of_pair is None else RATES_AFTER_PAIRS
        for rank, token in enumerate((of_pair or of_token or Row([], [], 0)).best):
            propose(token, ("token" if of_pair is None else "pair", rank), rates[rank])
        if not draft:
            for rank, token in enumerate(self.last.best):
                if token != self.text[-1]:
                    propose(token, ("runner-up", rank), recycled.RATES_OF_RUNNERS_UP[rank])
        for (name, place), row in self.ahead.items():
            if place == len(draft):
                for token, logprob in zip(row.best, row.logprobs, strict=True):
                    known = of_pair is not None
                    propose(token, (name, place, known, bucket(logprob)), rate_of(logprob) * (0.1 if known else 0.3))
        for ngram, logprobs in self.ngrams.get(self.text[-1], []) if self.use.ngrams else []:
            if len(draft) < len(ngram) and ngram[: len(draft)] == draft:
                logprob = logprobs[len(draft)]
                propose(ngram[len(draft)], ("n-gram", bucket(logprob)), 0.5 * rate_of(logprob))
        return found

    def _given_noise(self, rate: float, place: int, token: int) -> float:
        """Returns the probability that a token is drawn; see `jlade.drafts.record.given_noise`."""
        at = len(self.text) - self.rows.prompt_length + place
        if self.rows.noise is None or place >= NOISE_REACH or at >= len(self.rows.noise):
            return rate
        return math.exp(-(1 - rate) / rate * math.exp(-float(self.rows.noise[at, token])))

    def _matches(self) -> list[tuple[int, int]]:
        text, length = np.array(self.text, np.int32), len(self.text)
        last = np.append(text[::-1][: suffix.LONGEST], [-1] * max(0, suffix.LONGEST - length)).astype(np.int32)
        matched, alive = np.zeros(length, int), np.ones(length, bool)
        for back, token in enumerate(last[: min(suffix.LONGEST, length)]):
            alive &= np.append(np.zeros(back + 1, bool), text[: length - back - 1] == token)[:length]
            matched += alive
        best = np.argsort(-(matched * length + np.arange(length)), kind="stable")[: suffix.MATCHES]
        return [(int(place), int(matched[place])) for place in best if matched[place]]

    def _learn(self, tokens: list[int], row: Row) -> None:
        self.after_token[tokens[-1]] = row
        if len(tokens) == 2:
            self.after_pair[tuple(tokens)] = row

    def _ends(self, tree: dict[Draft, float]) -> list[Draft]:
        """Returns the drafts, the empty one included, by the probability that they are accepted and none after them."""
        ends = {(): 1.0} | tree
        for draft, chance in tree.items():
            ends[draft[:-1]] -= chance
        return sorted(ends, key=lambda draft: -ends[draft])

    def _window_paths(self) -> list[Draft]:
        """Returns the tokens of the window with those that they attend to, four of each column, the newest last."""
        tokens = [[token for token, _ in row] for row in self.window]
        first, columns = tuple(tokens[0][1:]), zip(*tokens, strict=True)
        return [(*first[:i], *column[1 : row + 1]) for i, column in enumerate(columns) for row in range(4)]

    def _advance(self, found: dict[Draft, Row]) -> None:
        """Moves the window on by a row, and keeps the n-grams that its columns make with the new one."""
        newest = [found[draft] for draft in self._window_paths()[3::4]]
        new = [(row.drawn, dict(zip(row.best, row.logprobs, strict=True)).get(row.drawn, -9.0)) for row in newest]
        current = [(self.text[-1], 0.0), *self.window[0][1:]]
        for column in zip(current, *self.window[1:], new, strict=True):
            (first, _), *rest = column
            others = self.ngrams.setdefault(first, [])
            ngram = tuple(token for token, _ in rest), [logprob for _, logprob in rest]
            others[:] = [ngram, *(other for other in others if other[0] != ngram[0])][:10]
        self.window = [*self.window[1:], new]

    def _continued(self, draft: Draft, number: int) -> Draft:
        """Returns a draft with the most probable tokens that the table knows after it."""
        for _ in range(number):
            pair = tuple([*self.text[-2:], *draft][-2:])
            row = self.after_pair.get(pair) or self.after_token.get(pair[1])
            if row is None:
                break
            draft = (*draft, row.best[0])
        return draft

    def _columns(self, tree: dict[Draft, float]) -> list[Draft]:
        parents = {draft[:-1] for draft in tree}
        beside: list[Draft] = []
        for end in (draft for draft in tree if draft not in parents):
            column = self._continued(end, 5)
            beside += [column[:i] for i in range(len(end) + 1, len(column) + 1)]
        return beside[: self.third]

    def _main_chain(self, tree: dict[Draft, float]) -> Draft:
        """Returns the first path of the tree, continued by guesses and, after these, by the table."""
        draft: Draft = ()
        while (longer := next((each for each in tree if each[:-1] == draft and each), None)) is not None:
            draft = longer
        draft = (*draft, *self.guesses[len(draft) :])
        return self._continued(draft, self.third)[: len(draft) + self.third]

    def _chain(self, tree: dict[Draft, float]) -> list[Draft]:
        chain = self._main_chain(tree)
        return [chain[:i] for i in range(1, len(chain) + 1) if chain[:i] not in tree][: self.third]


def bucket(logprob: float) -> int:
    """Returns the kind of a probability."""
    return min(int(-1.5 * logprob), BUCKETS - 1)


def rate_of(logprob: float) -> float:
    """Returns a probability of the kind, at most a half."""
    return min(0.5, math.exp(-(bucket(logprob) + 0.5) / 1.5))


if __name__ == "__main__":
    main()
