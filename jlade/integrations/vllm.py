"""Drafts for vLLM's speculative decoding, in NumPy: a class for its `custom_class` method.

    speculative_config={
        "method": "custom_class",
        "model": "jlade.integrations.vllm.Proposer",
        "num_speculative_tokens": 8,
    }

vLLM passes the rows of its batch without the ids of requests, and moves requests between rows. `Proposer` keeps nothing
about a row. A step finds all it needs in the tokens of the row: earlier matches of its end, and the tokens that it
accepted, which become n-grams for all requests. So there is no request to recognize, and none to mistake.

vLLM's process must not claim a device for JAX: this module imports neither JAX nor vLLM.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

LONGEST = 8  # tokens of a match, as in `jlade.drafts.suffix`; longer ones count as this long
NONE = -1  # no token
BASE = np.uint64(0xD6E8FEB86659FD93)  # of the polynomial that a context is hashed to
LEAST = 2**20  # slots for the corpus, since `learn` may add to it
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # distributes the hashes over a table


class Proposer:
    """Proposes a chain of drafts for each row: the text after the longest match of its last tokens.

    Up to `LONGEST` tokens match, in the row's own text, in the corpus, or in the answers of all requests so far. Of
    equally long matches one in the own text comes first, then one in the corpus, and within each the latest, as in
    jlade's `suffix` and `corpus` drafts. A subclass sets the attributes below.

    Attributes:
      corpus: texts, each a sequence of token ids, such as answers of an earlier run. `learn` adds more. A prediction
        is a text too: the prompt's last tokens, followed by the expected answer.
      memory: n-grams kept of the answers of all requests, a power of two or 0 for none. A token of a text takes
        `LONGEST` of them, and one takes 12 bytes. Newer ones replace older ones.
      shortest: least number of tokens of a match. A longer one drafts less often, and more of it is accepted.
    """

    corpus: ClassVar[Sequence[Sequence[int]]] = ()
    memory: ClassVar[int] = 2**20
    shortest: ClassVar[int] = 1

    def __init__(self, vllm_config: Any):
        """Makes the tables.

        Args:
          vllm_config: vLLM's, of which `speculative_config.num_speculative_tokens` is read.

        Raises:
          ValueError: the number of tokens is missing or not positive, or an attribute or a text is unusable.
        """
        num_tokens = getattr(vllm_config.speculative_config, "num_speculative_tokens", None)
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be a positive number, got {num_tokens!r}")
        if not 1 <= self.shortest <= LONGEST:
            raise ValueError(f"shortest must be from 1 to {LONGEST}, got {self.shortest!r}")
        if self.memory < 0 or self.memory & (self.memory - 1):
            raise ValueError(f"memory must be 0 or a power of two, got {self.memory!r}")
        self.num_tokens = num_tokens
        num_known = LONGEST * sum(map(len, self.corpus))
        self.known: NGrams = NGrams(max(LEAST, 1 << (2 * num_known).bit_length()))  # sparse, so that few are replaced
        self.answers: NGrams = NGrams(self.memory)
        self.learn(self.corpus)

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Adds texts, each a sequence of token ids, to the corpus. Newer texts replace older ones in a full table.

        Raises:
          ValueError: names the text and what is accepted.
        """
        for i, text in enumerate(texts):
            tokens = np.asarray(text)
            if tokens.ndim != 1 or (tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0)):
                raise ValueError(f"text {i} of the corpus must be a sequence of token ids, got {text!r:.60}")
            row = tokens.astype(np.int32)[None, :]
            place = np.arange(row.shape[1])
            self.known.insert(contexts(row, np.zeros_like(place), place), row[0])

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is no model to load. vLLM calls it."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns the drafts of each row, at most `num_speculative_tokens`, within the length of a row.

        Args:
          sampled_token_ids: B lists of the tokens that the last step accepted, which the rows already hold; an empty
            one for a row that gets no drafts.
          num_tokens_no_spec: [at least B] int32, lengths of the rows.
          token_ids_cpu: [at least B, max_model_len] int32; beyond its length a row may hold anything.
          slot_mappings: ignored.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        counts = np.array([len(sampled) for sampled in sampled_token_ids], np.int64)
        rows = np.flatnonzero(counts)
        if not len(rows):
            return drafts
        lengths = num_tokens_no_spec[rows].astype(np.int64)
        self._remember(token_ids_cpu, rows, lengths, np.minimum(counts[rows], lengths))

        last = contexts(token_ids_cpu, rows, lengths)
        own = [longest_match(token_ids_cpu[row], length) for row, length in zip(rows, lengths.tolist(), strict=True)]
        matched = np.array([of_row for _, of_row in own])
        others, matched_others = self._continue(last, np.maximum(matched + 1, self.shortest))
        room = np.minimum(self.num_tokens, token_ids_cpu.shape[1] - lengths - 1)
        for i, row in enumerate(rows):
            if matched_others[i]:
                drafts[row] = others[i, : max(room[i], 0)].tolist()
                drafts[row] = drafts[row][: drafts[row].index(NONE)] if NONE in drafts[row] else drafts[row]
            elif matched[i] >= self.shortest:
                # Past the end of the text the drafts themselves go on, so that a repetition goes on too.
                place, length = own[i][0], lengths[i]
                at = place + np.arange(max(room[i], 0)) % (length - place)
                drafts[row] = token_ids_cpu[row, at].tolist()
        return drafts

    def _remember(self, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Adds the last `counts` tokens of some rows to the answers."""
        row = np.repeat(rows, counts)
        ends = np.cumsum(counts)
        place = np.arange(ends[-1]) + np.repeat(lengths - ends, counts)
        self.answers.insert(contexts(tokens, row, place), tokens[row, place])

    def _continue(self, last: np.ndarray, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns drafts [R, k] after the matches of the last tokens [R, K] in the corpus and the answers.

        The first one has a match of at least `least` [R] tokens. Also returns the lengths of these matches, 0 for none.
        """
        drafts = np.full((len(last), self.num_tokens), NONE, np.int32)
        first = np.zeros(len(last), np.int64)
        rows = np.arange(len(last))
        for i in range(self.num_tokens):
            known, matched_known = self.known.find(last)
            answers, matched_answers = self.answers.find(last)
            matched = np.maximum(matched_known, matched_answers)
            found = matched >= (least if i == 0 else self.shortest)
            tokens = np.where(matched_known >= matched_answers, known, answers)[found]
            rows, last = rows[found], last[found]
            if not len(rows):
                break
            if i == 0:
                first[rows] = matched[found]
            drafts[rows, i] = tokens
            last = np.concatenate([tokens[:, None], last[:, :-1]], axis=1)
        return drafts, first


class NGrams:
    """The latest token after each context of 1 to `LONGEST` tokens, in a hash table of bounded size.

    A context is a row of tokens, the last one first, with `NONE` before the beginning of its text. A newer context
    replaces an older one in the same slot.
    """

    def __init__(self, size: int):
        """Makes an empty table of `size` slots, a power of two, or 0."""
        self.hashes: np.ndarray = np.zeros(size, np.uint64)  # 0 in empty slots
        self.tokens: np.ndarray = np.zeros(size, np.int32)
        self.is_empty: bool = True
        self.shift: np.uint64 = np.uint64(64 - max(size.bit_length() - 1, 1))

    def insert(self, contexts: np.ndarray, tokens: np.ndarray) -> None:
        """Adds tokens [P] int32 after their contexts [P, K], in this order."""
        if not len(self.hashes):
            return
        hashes = hashes_of(contexts).reshape(-1)
        is_context = hashes != 0
        hashes = hashes[is_context]
        slots = self._slots(hashes)
        self.is_empty = False
        self.hashes[slots] = hashes
        self.tokens[slots] = np.repeat(tokens, LONGEST)[is_context]

    def find(self, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [R] after the longest known contexts, and the lengths of these [R], 0 for none."""
        if self.is_empty:
            return np.full(len(contexts), NONE, np.int32), np.zeros(len(contexts), np.int64)
        hashes = hashes_of(contexts)
        slots = self._slots(hashes)
        is_known = (self.hashes[slots] == hashes) & (hashes != 0)
        lengths = np.max(np.where(is_known, np.arange(1, LONGEST + 1), 0), axis=1)
        of_longest = np.take_along_axis(slots, np.maximum(lengths, 1)[:, None] - 1, axis=1)[:, 0]
        return self.tokens[of_longest], lengths

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        return ((hashes * SPREAD) >> self.shift).astype(np.int64)


def contexts(tokens: np.ndarray, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the tokens before places [P] in rows [P] of tokens [B, L], from the last one on: [P, K] int32."""
    at = places[:, None] - np.arange(1, LONGEST + 1)
    return np.where(at >= 0, tokens[rows[:, None], np.maximum(at, 0)], NONE)


def hashes_of(contexts: np.ndarray) -> np.ndarray:
    """Returns the hashes of the first 1 to K tokens of contexts [P, K]: [P, K] uint64, 0 where there are fewer."""
    hashes = np.zeros(contexts.shape, np.uint64)
    digits = (contexts + 1).astype(np.uint64)
    hashes[:, 0] = digits[:, 0]
    for i in range(1, contexts.shape[1]):
        hashes[:, i] = hashes[:, i - 1] * BASE + digits[:, i]
    return np.where(contexts == NONE, np.uint64(0), hashes)


def longest_match(text: np.ndarray, length: int) -> tuple[int, int]:
    """Returns the place after the longest earlier match of the last tokens, and its length; of equal ones the latest.

    Args:
      text: [C] int32.
      length: tokens of the text.

    Returns:
      A place in the text, and a length up to `LONGEST`, 0 for no match.
    """
    at = np.flatnonzero(text[: length - 1] == text[length - 1])  # the last tokens of matches
    if not len(at):
        return 0, 0
    matched = 1
    while matched < LONGEST:
        longer = at[int(at[0] < matched) :]  # without the match that begins with the text
        longer = longer[text[longer - matched] == text[length - 1 - matched]]
        if not len(longer):
            break
        at, matched = longer, matched + 1
    return int(at[-1]) + 1, matched
