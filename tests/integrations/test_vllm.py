"""Drafts for vLLM, given by a runner that fills, moves and reuses rows as vLLM's does."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jlade.drafts import suffix
from jlade.integrations.vllm import LONGEST, NONE, NGrams, Proposer, contexts, longest_match
from tests.tiny import slow

VOCAB = 7
MAX_LEN = 96  # tokens of a row


def config(num_tokens):
    return SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens))


def next_token(text):
    """Returns the token after a text: the target model. Its texts repeat themselves, but not forever."""
    return (3 * text[-1] + text[-2] ** 2 + (len(text) % 11 == 0) + len(text) // 40) % VOCAB


def decoded_alone(prompt, num_tokens):
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        text.append(next_token(text))
    return text


class Reference:
    """The rules in plain Python, for requests that are known by their ids."""

    def __init__(self, num_tokens, corpus=(), shortest=1, has_memory=True):
        self.num_tokens, self.shortest, self.has_memory = num_tokens, shortest, has_memory
        self.known, self.answers = {}, {}
        for text in corpus:
            for place in range(len(text)):
                self.insert(self.known, text, place)

    @staticmethod
    def insert(table, text, place):
        for length in range(1, min(place, LONGEST) + 1):
            table[tuple(text[place - length : place])] = text[place]

    def remember(self, text, num_sampled):
        for place in range(len(text) - num_sampled, len(text)) if self.has_memory else ():
            self.insert(self.answers, text, place)

    def of_others(self, text, least):
        """Returns the token after the longest match in the corpus or the answers, and its length; None for none."""
        for length in range(min(len(text), LONGEST), least - 1, -1):
            for table in (self.known, self.answers):
                if (context := tuple(text[-length:])) in table:
                    return table[context], length
        return None

    def drafts(self, text):
        room = min(self.num_tokens, MAX_LEN - len(text) - 1)
        matches = [(matched(text, place), place) for place in range(1, len(text))]
        length, place = max(matches, default=(0, 0))
        whole = list(text)
        if self.of_others(text, max(length + 1, self.shortest)):
            while (found := self.of_others(whole, self.shortest)) and len(whole) < len(text) + room:
                whole.append(found[0])
        elif length >= self.shortest:
            for i in range(room):
                whole.append(whole[place + i])
        return whole[len(text) :]


def matched(text, place):
    """Returns how many tokens before a place are the last ones of the text."""
    length = 0
    while length < min(place, LONGEST) and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


class Runner:
    """Requests in the rows of a batch: they arrive, are prefilled in chunks, swapped, preempted, and end."""

    def __init__(self, proposer, reference, requests, num_rows, seed):
        self.proposer, self.reference = proposer, reference
        self.random = np.random.default_rng(seed)
        self.waiting = [[list(prompt), len(prompt) + num_tokens] for prompt, num_tokens in requests]
        self.requests = list(self.waiting)  # of a text and its final length; the list object is the id
        self.tokens = self.random.integers(VOCAB, size=(num_rows, MAX_LEN), dtype=np.int32)
        self.lengths = np.zeros(num_rows, np.int32)
        self.rows = []  # of a request, the drafts to verify, and the number of chunks of its prompt that are left
        self.seen = dict.fromkeys(["drafted", "accepted", "swapped", "preempted", "reused", "unsampled", "full"], 0)

    def run(self):
        while self.waiting or self.rows:
            self.step()
        return [text for text, _ in self.requests]

    def step(self):
        while self.waiting and len(self.rows) < len(self.tokens) and self.random.random() < 0.8:
            self.enter(self.waiting.pop(0))
        sampled = [self.verify(i) for i in range(len(self.rows))]
        self.seen["unsampled"] += sampled.count([])
        drafts = self.proposer.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        self.check(sampled, drafts)
        for row, of_row in zip(self.rows, drafts, strict=True):
            row[1] = of_row
        self.move()

    def enter(self, request):
        row, text = len(self.rows), request[0]
        self.seen["reused"] += self.lengths[row] == len(text)
        self.tokens[row, : len(text)] = text  # the tokens of the request before it stay behind its end
        self.lengths[row] = len(text)
        self.rows.append([request, [], int(self.random.integers(3))])

    def verify(self, row):
        """Returns the tokens that a step of the target adds to a row: accepted drafts and one more."""
        (text, limit), drafts, chunks = self.rows[row]
        if chunks:
            self.rows[row][2] -= 1
            return []
        self.tokens[row, len(text) : len(text) + len(drafts)] = drafts
        sampled = []
        while not sampled or (len(text) < limit and len(sampled) <= len(drafts) and sampled == drafts[: len(sampled)]):
            sampled.append(next_token(text))
            text.append(sampled[-1])
        self.seen["drafted"] += len(drafts)
        self.seen["accepted"] += len(sampled) - 1
        self.tokens[row, len(text) - len(sampled) : len(text)] = sampled
        self.lengths[row] = len(text)
        return sampled

    def check(self, sampled, drafts):
        texts = [text for (text, _), _, _ in self.rows]
        for text, of_row in zip(texts, sampled, strict=True):
            self.reference.remember(text, len(of_row))
        expected = [self.reference.drafts(text) if of_row else [] for text, of_row in zip(texts, sampled, strict=True)]
        assert drafts == expected
        assert all(type(token) is int for of_row in drafts for token in of_row)
        self.seen["full"] += sum(len(text) + self.proposer.num_tokens >= MAX_LEN for text in texts)

    def move(self):
        for row in reversed(range(len(self.rows))):
            (text, limit), *_ = self.rows[row]
            is_preempted = self.random.random() < 0.05
            if len(text) < limit and not is_preempted:
                continue
            if len(text) < limit:
                self.waiting.insert(0, self.rows[row][0])
                self.seen["preempted"] += 1
            self.swap(row, len(self.rows) - 1)  # the last row fills the gap
            self.rows.pop()
        if len(self.rows) > 1 and self.random.random() < 0.3:
            self.swap(*self.random.choice(len(self.rows), 2, replace=False))
            self.seen["swapped"] += 1

    def swap(self, a, b):
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        self.tokens[[a, b]] = self.tokens[[b, a]]
        self.lengths[[a, b]] = self.lengths[[b, a]]


def some_requests(seed, number):
    """Returns prompts, many of which begin alike or have the same length, and numbers of new tokens."""
    random = np.random.default_rng(seed)
    begin = random.integers(VOCAB, size=6).tolist()
    prompts = [begin + random.integers(VOCAB, size=random.choice([2, 2, 5, 30])).tolist() for _ in range(number)]
    return [(prompt, int(random.integers(1, MAX_LEN - len(prompt) + 1))) for prompt in prompts]


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 4))])
@pytest.mark.parametrize("settings", [{}, {"shortest": 3}, {"corpus": True}, {"memory": 0}], ids=str)
def test_texts_are_those_of_plain_decoding_and_drafts_those_of_known_requests(seed, settings):
    requests = some_requests(seed, 40)
    corpus = [decoded_alone(prompt, 30) for prompt, _ in requests[::8]] if "corpus" in settings else []
    shortest, memory = settings.get("shortest", 1), settings.get("memory", 2**22)
    attributes = {"corpus": corpus, "memory": memory, "shortest": shortest}
    proposer = type("Mine", (Proposer,), attributes)(config(4))
    reference = Reference(4, corpus, shortest, memory > 0)
    runner = Runner(proposer, reference, requests, num_rows=5, seed=seed)
    assert runner.run() == [decoded_alone(*request) for request in requests]
    assert np.count_nonzero(proposer.answers.hashes) == len(reference.answers)  # none was replaced
    assert all(runner.seen.values()), runner.seen


@pytest.mark.slow
def test_memory_is_bounded_and_texts_stay_exact_while_n_grams_are_replaced():
    class Small(Proposer):
        memory = 2**6

    proposer = Small(config(4))
    requests = some_requests(9, 2000)
    runner = Runner(proposer, Reference(4), requests, num_rows=16, seed=9)
    runner.check = lambda sampled, drafts: None  # the reference keeps all
    assert runner.run() == [decoded_alone(*request) for request in requests]
    assert np.count_nonzero(proposer.answers.hashes) > 2**5
    assert set(vars(proposer)) == {"num_tokens", "known", "answers"}, "it keeps nothing about requests"
    assert set(vars(proposer.answers)) == {"hashes", "tokens", "is_empty", "shift"}
    assert proposer.answers.hashes.nbytes + proposer.answers.tokens.nbytes == 12 * 2**6


def test_matches_are_those_of_jlade_s_drafts():
    random = np.random.default_rng(0)
    for length in [1, 2, 3, 9, *random.integers(10, 200, size=40)]:
        text = np.pad(random.integers(random.choice([2, 5]), size=length), (0, 220 - length)).astype(np.int32)
        last = suffix.last(jnp.asarray(text), jnp.int32(length))
        places, lengths = suffix.find(jnp.asarray(text), jnp.int32(length), last, 1)
        place, number = longest_match(text, int(length))
        assert number == int(lengths[0])
        assert number == 0 or place == int(places[0])
        # The first token from a table, which knows a text of its own.
        corpus = random.integers(4, size=100).astype(np.int32)
        table = NGrams(2**20)
        table.insert(contexts(corpus[None], np.zeros(100, int), np.arange(100)), corpus)
        found, in_table = table.find(contexts(text[None], np.array([0]), np.array([length])))
        places, lengths = suffix.find(jnp.asarray(corpus), jnp.int32(100), last, 1)
        assert in_table[0] == int(lengths[0])
        assert in_table[0] == 0 or found[0] == corpus[int(places[0])]


def propose(proposer, *texts, max_len=64):
    """Returns the drafts after texts whose last token was sampled."""
    rows = np.full((len(texts) + 1, max_len), 3, np.int32)
    for row, text in zip(rows, texts, strict=False):
        row[: len(text)] = text
    lengths = np.array([*map(len, texts), 9], np.int32)
    return proposer.propose([[text[-1]] for text in texts], lengths, rows, slot_mappings=None)


def test_a_repetition_goes_on_past_the_end_of_the_text():
    assert propose(Proposer(config(5)), [9, 7, 8, 7, 8], [6, 5, 5]) == [[7, 8, 7, 8, 7], [5, 5, 5, 5, 5]]


def test_a_corpus_is_drafted_and_the_longer_match_wins():
    class Mine(Proposer):
        corpus = ([10, 11, 12, 13, 14, 15], [20, 12, 13, 40])

    proposer = Mine(config(3))
    assert propose(proposer, [1, 11, 12], [2, 12]) == [[13, 14, 15], [13, 40]]
    assert propose(proposer, [13, 50, 51, 11, 12, 13]) == [[14, 15]], "three tokens match there, one in the own text"
    assert propose(proposer, [13, 60, 61, 62, 13]) == [[60, 61, 62]], "one token matches in both"


def test_a_prediction_is_learned_as_the_end_of_the_prompt_and_the_expected_answer():
    proposer = Proposer(config(4))
    prompt, expected = [30, 31, 32, 33], [40, 41, 42, 43, 44, 45]
    assert propose(proposer, [*prompt, 40]) == [[]]
    proposer = Proposer(config(4))
    proposer.learn([prompt + expected])
    assert propose(proposer, [*prompt, 40], [*prompt, 40, 49, 42]) == [[41, 42, 43, 44], [43, 44, 45]]


def test_rows_of_other_texts_and_a_full_row_get_nothing():
    proposer = Proposer(config(4))
    assert proposer.propose([], np.zeros(2, np.int32), np.zeros((2, 8), np.int32)) == []
    assert proposer.propose([[], []], np.zeros(2, np.int32), np.zeros((2, 8), np.int32)) == [[], []]
    assert propose(proposer, [1, 1, 1, 1, 1], max_len=8) == [[1, 1]], "one place is left for the next token"
    assert propose(proposer, [1] * 7, [1] * 8, max_len=8) == [[], []]


def test_vllm_finds_the_class_by_its_path():
    module, _, name = "jlade.integrations.vllm.Proposer".rpartition(".")
    proposer = getattr(importlib.import_module(module), name)(config(2))
    assert proposer.load_model(object(), target=None) is None
    assert callable(proposer.propose)


def test_vllm_makes_it():
    created = pytest.importorskip("vllm.v1.spec_decode.custom_class_proposer", reason="vLLM is not installed")
    speculative = SimpleNamespace(model="jlade.integrations.vllm.Proposer", num_speculative_tokens=2)
    assert isinstance(created.create_custom_proposer(SimpleNamespace(speculative_config=speculative)), Proposer)


@pytest.mark.parametrize("value", [None, 0, -1, 2.5])
def test_the_number_of_tokens_must_be_positive(value):
    with pytest.raises(ValueError, match=f"num_speculative_tokens must be a positive number, got {value}"):
        Proposer(config(value))
    with pytest.raises(ValueError, match="got None"):
        Proposer(SimpleNamespace(speculative_config=SimpleNamespace()))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"memory": 3}, "memory must be 0 or a power of two, got 3"),
        ({"memory": -1}, "memory must be 0 or a power of two, got -1"),
        ({"shortest": 0}, "shortest must be from 1 to 8, got 0"),
        ({"shortest": 9}, "shortest must be from 1 to 8, got 9"),
        ({"corpus": ["text"]}, "text 0 of the corpus must be a sequence of token ids, got 'text'"),
        ({"corpus": [[1], [2, NONE]]}, "text 1 of the corpus must be a sequence of token ids"),
        ({"corpus": [[1.5]]}, "text 0 of the corpus must be a sequence of token ids"),
    ],
)
def test_attributes_are_checked(attributes, message):
    with pytest.raises(ValueError, match=message):
        type("Mine", (Proposer,), attributes)(config(2))


def test_the_module_imports_neither_jax_nor_vllm():
    program = "import sys, jlade.integrations.vllm; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "jlade.integrations.vllm" in found
    assert not {"jax", "jaxlib", "flax", "torch", "vllm"} & set(found)
