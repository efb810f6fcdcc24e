"""The whole algorithm in plain Python, for any function that maps a list of tokens to the next token.

`jacobi` is Algorithm 1 of arXiv 2402.02057, `decode` is Algorithm 2 with the verification of Algorithm 3, and
`law_of_sampling` is Algorithm 4.

Slow and obvious: every prediction is made from its full list of tokens, so there is no cache, no mask and no block.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

NextToken = Callable[[list[int]], int]
Distribution = Callable[[list[int]], Mapping[int, Fraction]]  # of the next token
Path = tuple[int, ...]
Kind = tuple[str, int]
Graded = tuple[int, int]  # a token and its grade


class Pool:
    """For every key up to `size` n-grams, the newest first."""

    def __init__(self, size: int):
        self.size = size
        self.ngrams: dict[int, list[tuple[int, ...]]] = {}

    def lookup(self, key: int) -> list[tuple[int, ...]]:
        return list(self.ngrams.get(key, []))

    def insert(self, ngram: Sequence[int]) -> None:
        key, rest = ngram[0], tuple(ngram[1:])
        entries = self.ngrams.setdefault(key, [])
        if rest in entries:
            entries.remove(rest)
        entries.insert(0, rest)
        del entries[self.size :]


END = -1  # after a text of a corpus


class Prediction:
    """A text that the answer is expected to resemble, read from the best places on: pairs of a place and its match."""

    def __init__(self, text: Sequence[int], longest: int, trusted: int, confirmed: int):
        self.text, self.longest, self.trusted, self.confirmed = list(text), longest, trusted, confirmed
        self.anchor, self.places = 0, [(0, trusted)]

    def learn(self, text: list[int], accepted: list[int]) -> None:
        """Learns from a text and the tokens accepted after it."""
        agreed = [len(_common(self.text[place:], accepted)) for place, _ in self.places] or [0]
        best = agreed.index(max(agreed))
        begin = self.places[best][0] if self.places else -1
        if agreed[best] >= self.confirmed or begin == self.anchor:
            self.anchor = begin + agreed[best]
        after = text + accepted
        found = []
        for place in range(len(self.text)):
            matched = len(_common(self.text[:place][::-1], after[::-1][: self.longest]))
            if place - self.anchor in (0, 1):
                matched = max(matched, self.trusted)
            found.append((-matched, abs(place - self.anchor), place))
        self.places = [(place, -matched) for matched, _, place in sorted(found)[:2] if matched]


def _common(a: list[int], b: list[int]) -> list[int]:
    return [x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]


class Sources:
    """A tree of drafts from several sources: the pool, matches of the text's end, recycled logits, a chain of guesses.

    Args:
      size: tokens of the tree.
      reach: most tokens of a draft, by source.
      best: maps a text to its most probable next tokens, each with a level of its probability.
      rates: initial acceptance rates of each kind: a source and a number.
      widths: how many recycled drafts there are at each depth.
      num_grades, ranks: of the tokens that the table has for each token, and for each pair of tokens.
      chances, least_sums: the probability of each level, an integer, and the least sum of two for each but the last.
      matches, longest: how many matches are read on, and the length from which on they count as equal.
      others: most tokens that are read after each match but the best one.
      slots: of the pool that are told apart.
      prior, memory: proposals that the initial rates count for, and most proposals in a record.
      corpus: other texts to search.
      noise: maps the place of a token in the text, and the token, to the noise of its draw; None for greedy decoding.
      noise_reach: places after the text whose noise counts.
      next_token: of the model, for the chain.
      guess: maps a text and a place after it to the first guess for the token there.
      prediction: a text that the answer is expected to resemble, None for none.
      spans: tokens that are read from each of its places.
      known: tokens of a prior after one token, and after two, where the table has none.
    """

    def __init__(
        self,
        size: int,
        reach: Mapping[str, int],
        best: Callable[[list[int]], list[Graded]],
        rates: Mapping[Kind, float],
        widths: Sequence[int],
        num_grades: int,
        ranks: int,
        chances: Sequence[int],
        least_sums: Sequence[int],
        matches: int,
        longest: int,
        others: int,
        slots: int,
        prior: float,
        memory: float,
        corpus: Sequence[Sequence[int]] = (),
        noise: Callable[[int, int], float] | None = None,
        noise_reach: int = 0,
        next_token: NextToken = lambda text: END,
        guess: Callable[[list[int], int], int] = lambda text, place: END,
        prediction: Prediction | None = None,
        spans: Sequence[int] = (),
        known: Mapping[tuple[int, ...], list[Graded]] | None = None,
    ):
        self.size, self.reach, self.best, self.widths, self.num_grades = size, reach, best, widths, num_grades
        self.ranks, self.chances, self.least_sums = ranks, chances, least_sums
        self.matches, self.longest, self.others = matches, longest, others
        self.slots, self.memory = slots, np.float32(memory)
        self.corpus = [token for each in corpus for token in [*each, END]]
        self.table: dict[tuple[int, ...], list[Graded]] = {}  # by one token, and by two
        self.latest: dict[int, list[Graded]] = {}  # the last row of each token
        self.last = list[Graded]()  # where the model chose the current token
        self.record = {kind: (np.float32(prior) * np.float32(each), np.float32(prior)) for kind, each in rates.items()}
        self.noise, self.noise_reach = noise, noise_reach
        self.next_token, self.guess, self.chain = next_token, guess, list[int]()
        self.prediction, self.spans, self.known = prediction, spans, known or {}
        self.proposals: list[tuple[Path, list[Kind]]] = []  # paths, with the kinds along them

    def tree(self, text: list[int], ngrams: list[tuple[int, ...]]) -> list[Path]:
        """Returns the paths to the tokens of the tree, the cheapest first, of equal ones the first proposed."""
        self.proposals = list(self._propose(text, ngrams))
        cheapest: dict[Path, int] = {}  # costs of their last tokens
        for path, kinds in self.proposals:
            cost = self._cost(text, kinds[-1], path)
            cheapest[path] = min(cheapest.get(path, cost), cost)
        costs = {path: sum(cheapest[path[:end]] for end in range(1, len(path) + 1)) for path in cheapest}
        return sorted(costs, key=lambda path: costs[path])[: self.size]

    def _cost(self, text: list[int], kind: Kind, path: Path) -> int:
        """Returns the cost of the last token of a path."""
        chance = self._chance(text, kind, len(path) - 1, path[-1])
        return int(np.clip(np.round(-256 * np.log2(max(chance, 1e-30))), 1, 4096))

    def _chance(self, text: list[int], kind: Kind, place: int, token: int) -> np.float32:
        """Returns the probability that the model draws a token at a place after the text."""
        agreed, judged = self.record[kind]
        rate = agreed / judged
        if self.noise is None or place >= self.noise_reach:
            return rate
        return np.exp(-(1 - rate) / rate * np.exp(-np.float32(self.noise(len(text) + place, token))))

    def _after(self, text: list[int], path: list[int], place: int) -> list[tuple[int, Kind]]:
        """Returns the recycled tokens after a path and their kinds."""
        pair, last = tuple(path[-2:]) if len(path) > 1 else (END, END), (path[-1],)
        of_pair = self.table.get(pair) or self.known.get(pair, [])
        of_token = self.table.get(last) or ([] if pair in self.known else self.known.get(last, []))
        numbers = {token: self._grade(level) for token, level in of_token}
        if of_pair:
            first = self.num_grades + self.ranks
            first += 0 if pair in self.table else (self.num_grades + 1) * (self.num_grades + 2)
            missing, one_row = self.num_grades, self.num_grades + 1
            grades = {
                token: (self._grade(level), one_row if of_token in ([], of_pair) else numbers.get(token, missing))
                for token, level in of_pair
            }
            grades |= {token: (missing, grade) for token, grade in numbers.items() if token not in grades}
            numbers = {
                token: first + by_pair * (self.num_grades + 2) + by_token
                for token, (by_pair, by_token) in grades.items()
            }
        after: list[tuple[int, Kind]] = [(token, ("recycled", number)) for token, number in numbers.items()]
        if place == 0:
            runners_up = [(token, ("recycled", rank + self.num_grades)) for rank, (token, _) in enumerate(self.last)]
            after += [(token, kind) for token, kind in runners_up if token != text[-1]]
        return after

    def _grade(self, level: int) -> int:
        return level * self.num_grades // len(self.chances)

    def _layers(self, text: list[int]) -> Iterator[tuple[Path, list[Kind]]]:
        """Yields the recycled drafts by their depths, the most promising after those of the depth before."""
        layer: list[tuple[int, Path, list[Kind]]] = [(0, (), [])]
        for place, width in enumerate(self.widths):
            longer = [
                (cost + self._cost(text, kind, (*path, token)), (*path, token), [*kinds, kind])
                for cost, path, kinds in layer
                for token, kind in self._after(text, [*text[-2:], *path], place)
            ]
            layer = sorted(longer, key=lambda each: each[0])[:width]
            yield from ((path, kinds) for _, path, kinds in layer)
            layer = [each for i, each in enumerate(layer) if each[1] not in [path for _, path, _ in layer[:i]]]

    def _propose(self, text: list[int], ngrams: list[tuple[int, ...]]) -> Iterator[tuple[Path, list[Kind]]]:
        if self.prediction:
            for i, ((place, matched), span) in enumerate(zip(self.prediction.places, self.spans, strict=False)):
                tokens = self.prediction.text[place : place + span]
                lengths = [min(matched + j, self.longest) for j in range(len(tokens))]
                kinds = [("prediction", (each - 1) * len(self.spans) + i) for each in lengths]
                for end in range(1, len(tokens) + 1):
                    yield tuple(tokens[:end]), kinds[:end]
        if "pool" in self.reach:
            for slot, ngram in enumerate(ngrams):
                for end in range(1, len(ngram) + 1):
                    yield ngram[:end], [("pool", min(slot, self.slots - 1))] * end
        if "suffix" in self.reach:
            for source, searched in (("suffix", text), ("corpus", self.corpus)):
                found = []
                for place in range(1, len(searched)):
                    length, most = 0, min(place, len(text), self.longest)
                    while length < most and searched[place - 1 - length] == text[-1 - length]:
                        length += 1
                    if length and searched[place] != END:
                        found.append((length, place))
                for rank, (length, place) in enumerate(sorted(found, reverse=True)[: self.matches]):
                    most = min(self.reach["suffix"], self.size)
                    span = searched[place : place + (most if rank == 0 else min(most, self.others))]
                    span = span[: [*span, END].index(END)]
                    lengths = [min(length + i, self.longest) for i in range(len(span))]
                    kinds = [(source, (each - 1) * self.matches + rank) for each in lengths]
                    for end in range(1, len(span) + 1):
                        yield tuple(span[:end]), kinds[:end]
        if "recycled" in self.reach:
            yield from self._layers(text)
        if "chain" in self.reach:
            most = max(number for name, number in self.record if name == "chain")
            for end in range(1, len(self.chain) + 1):
                yield tuple(self.chain[:end]), [("chain", min(place, most)) for place in range(end)]

    def read(self, prompt: list[int]) -> None:
        """Learns from the prompt, but for its last token, which the first step reads."""
        if "recycled" in self.reach:
            for end in range(1, len(prompt)):
                self._keep(prompt[:end])
        self.chain = [self.guess(prompt, len(prompt) + i) for i in range(self.reach.get("chain", 0))]

    def learn(self, text: list[int], accepted: list[int], tree: list[Path], window: list[list[int]]) -> None:
        """Learns from a step: every text that the model read in it is in the table, the accepted one last."""
        counts = {kind: [0, 0] for kind in self.record}
        for path, kinds in self.proposals:
            if len(path) <= len(accepted) and list(path[:-1]) == accepted[: len(path) - 1]:
                counts[kinds[-1]][0] += path[-1] == accepted[len(path) - 1]
                counts[kinds[-1]][1] += 1
        for kind, (agreed, judged) in self.record.items():
            agreed, judged = agreed + np.float32(counts[kind][0]), judged + np.float32(counts[kind][1])
            kept = min(np.float32(1), self.memory / judged)
            self.record[kind] = agreed * kept, judged * kept
        if self.prediction:
            self.prediction.learn(text, accepted)
        if "chain" in self.reach:
            after = text + accepted
            guesses = [*self.chain, self.guess(after, len(text) + len(self.chain))]
            for end in range(len(guesses)):
                if end == 0 or tuple(self.chain[:end]) in tree:
                    guesses[end] = self.next_token(text + self.chain[:end])
            guesses = guesses[len(accepted) :]
            more = range(len(guesses), len(self.chain))
            self.chain = (guesses + [self.guess(after, len(after) + i) for i in more])[: len(self.chain)]
        if "recycled" in self.reach:
            along = [accepted[:end] for end in range(len(accepted))]
            rejected = [list(path) for path in reversed(tree) if list(path) not in along]
            read = [*window, *(text + path for path in rejected + along)]
            for context in read:
                self._keep(context)

    def _keep(self, context: list[int]) -> None:
        token, new = context[-1], self.best(context)
        self.table[token,] = self._mean(self.latest.get(token, []), new)
        self.last = self.latest[token] = self.table[tuple(context[-2:])] = new

    def _mean(self, old: list[Graded], new: list[Graded]) -> list[Graded]:
        """Returns the tokens of the highest mean probabilities of two rows, of equal ones the new ones first."""
        if not old:
            return new
        totals = dict.fromkeys([token for token, _ in new + old], 0)
        for token, level in new + old:
            totals[token] += self.chances[level]
        best = sorted(totals, key=lambda token: -totals[token])[: len(new)]
        return [(token, sum(totals[token] < least for least in self.least_sums)) for token in best]


def decode(
    next_token: NextToken,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    window_size: int,
    ngram_size: int,
    guess_set_size: int,
    pool_from_prompt: bool,
    start: Sequence[Sequence[int]],
    eos_ids: Sequence[int] = (),
    sources: Sources | None = None,
    drawn_rows: Callable[[list[int], int], list[list[int]]] | None = None,
    window_token: NextToken | None = None,
    watch: Callable[[list[int], list[list[int]], list[int], Pool, list[Path]], None] = lambda *step: None,
) -> tuple[list[int], list[int]]:
    """Returns the generated tokens and how many of them each step accepted; `start` is the first window.

    The window moves on by a row for each step; with `drawn_rows`, which maps the text after a step and the number of
    tokens before it to further rows, by a row for each accepted token. Its tokens are those of `window_token`, by
    default of `next_token`. With `sources` a step verifies the paths of their tree, otherwise the n-grams of the pool.

    In each step `watch` is given the text and the window before it, the predicted row, the pool before it, and the
    drafts.
    """
    text = list(prompt)
    window = [list(row) for row in start]
    pool = Pool(guess_set_size)
    if pool_from_prompt:
        for end in range(ngram_size, len(text) + 1):
            pool.insert(text[end - ngram_size : end])
    if sources is not None:
        sources.read(text)
    accepted_per_step: list[int] = []

    while True:
        if window_size:
            window[0][0] = text[-1]
        contexts = [
            text + window[0][1 : column + 1] + [row[column] for row in window[1:]] for column in range(window_size)
        ]
        new = [(window_token or next_token)(context) for context in contexts]
        accepted: list[int] = []
        candidates = pool.lookup(text[-1])
        if sources is not None:
            candidates = sources.tree(text, candidates)
        watch(text, window, new, pool, candidates)
        for candidate in candidates:
            matching: list[int] = []
            while len(matching) < len(candidate) and next_token(text + matching) == candidate[len(matching)]:
                matching.append(candidate[len(matching)])
            if len(matching) > len(accepted):
                accepted = matching
        accepted = [*accepted, next_token(text + accepted)]

        accepted = accepted[: len(prompt) + max_new_tokens - len(text)]
        ends = [i for i, token in enumerate(accepted) if token in eos_ids]
        if ends:
            accepted = accepted[: ends[0] + 1]

        if sources is not None:
            sources.learn(text, accepted, candidates, contexts)
        if len(accepted_per_step) >= ngram_size - 2:
            for column in range(window_size):
                pool.insert([row[column] for row in window] + [new[column]])
        for token in accepted:
            text.append(token)
            if pool_from_prompt and len(text) >= ngram_size:
                pool.insert(text[-ngram_size:])
        rows = [*window[1:], new]
        window = rows
        if drawn_rows is not None:
            window = [*rows, *drawn_rows(text, len(text) - len(accepted))][len(accepted) - 1 :][: len(rows)]
        accepted_per_step.append(len(accepted))

        if ends or len(text) == len(prompt) + max_new_tokens:
            return text[len(prompt) :], accepted_per_step


def jacobi(
    next_token: NextToken, prompt: Sequence[int], guesses: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the guesses before and after each iteration, up to the last one, which changes nothing (Algorithm 1)."""
    before, after = None, list(guesses)
    while after != before:
        before = after
        after = [next_token([*prompt, *before[:i]]) for i in range(len(before))]
        yield before, after


def law_of_sampling(distribution: Distribution, candidates: Sequence[Path]) -> dict[Path, Fraction]:
    """Returns the probability of each result of verification by sampling: 1 to N tokens (Algorithm 4, by its lines).

    Each comparison with a random number continues both ways, with their probabilities. Candidates may have different
    lengths, as the paths of a tree have. jlade tries the equal beginnings of candidates once. Here a later one is tried
    again, with no probability left: the law is the same.

    Args:
      distribution: maps the tokens accepted so far to the probabilities of the next one.
      candidates: n-grams without their first token, which ends the text.
    """
    law: dict[Path, Fraction] = defaultdict(Fraction)
    ahead: list[tuple[Path, list[Path], Fraction]] = [((), list(candidates), Fraction(1))]
    while ahead:
        accepted, survivors, probability = ahead.pop()  # o, V and the probability of these
        left = dict(distribution([*accepted]))  # line 13
        for j, candidate in enumerate(survivors):  # line 14
            token = candidate[len(accepted)]  # line 15
            agreeing = [each for each in survivors[j:] if each[len(accepted)] == token]  # lines 20 to 26
            unfinished = [each for each in agreeing if len(each) > len(accepted) + 1]
            ahead.append(((*accepted, token), unfinished, probability * left[token]))  # lines 16 to 19
            probability *= 1 - left[token]  # line 31
            if not probability:
                break
            left[token] = Fraction(0)  # line 32
            total = sum(left.values())
            left = {other: of_other / total for other, of_other in left.items()}  # line 33
        for token, of_token in left.items():  # lines 41 and 47
            law[*accepted, token] += probability * of_token
    return {tokens: probability for tokens, probability in law.items() if probability}


def end(
    tokens: list[int],
    token_bytes: Sequence[bytes],
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> tuple[list[int], str, str]:
    """Reads generated tokens byte by byte; returns those up to the end of the text, the text, and why it ends."""
    text = b""
    for count, token in enumerate(tokens, 1):
        for byte in token_bytes[token]:
            text += bytes([byte])
            found = [string.encode() for string in stop if text.endswith(string.encode())]
            if found and count >= min_new_tokens:
                stopped = text.removesuffix(max(found, key=len))
                break
        else:
            if token in eos_ids:
                return tokens[:count], text.decode(errors="replace"), "eos"
            continue
        return tokens[:count], stopped.decode(errors="replace"), "stop"
    return tokens, text.decode(errors="replace"), "length"
