"""The whole algorithm in plain Python, for any function that maps a list of tokens to the next token.

Slow and obvious: every prediction is made from its full list of tokens, so there is no cache, no mask and no block.
"""

from collections.abc import Callable, Sequence

NextToken = Callable[[list[int]], int]


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
    watch: Callable[[list[int], list[list[int]], list[int], Pool], None] = lambda *step: None,
) -> tuple[list[int], list[int]]:
    """Returns the generated tokens and how many of them each step accepted; `start` is the first window.

    In each step `watch` is given the text and the window before it, the predicted row, and the pool before it.
    """
    text = list(prompt)
    window = [list(row) for row in start]
    pool = Pool(guess_set_size)
    if pool_from_prompt:
        for end in range(ngram_size, len(text) + 1):
            pool.insert(text[end - ngram_size : end])
    accepted_per_step: list[int] = []

    while True:
        if window_size:
            window[0][0] = text[-1]
        new = [
            next_token(text + window[0][1 : column + 1] + [row[column] for row in window[1:]])
            for column in range(window_size)
        ]
        watch(text, window, new, pool)

        accepted: list[int] = []
        for candidate in pool.lookup(text[-1]):
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

        if len(accepted_per_step) >= ngram_size - 2:
            for column in range(window_size):
                pool.insert([row[column] for row in window] + [new[column]])
        for token in accepted:
            text.append(token)
            if pool_from_prompt and len(text) >= ngram_size:
                pool.insert(text[-ngram_size:])
        window = [*window[1:], new]
        accepted_per_step.append(len(accepted))

        if ends or len(text) == len(prompt) + max_new_tokens:
            return text[len(prompt) :], accepted_per_step


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
