"""Engines of a tiny model, and the texts that each request has alone."""

import concurrent.futures
import random
import time

import jax
import numpy as np

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.engine import rows
from tests.texts import assert_same_texts
from tests.tiny import LIKE_DEEPSEEK, PAPER, tiny_llama, tiny_tokenizer

SETTINGS = {
    "plain": None,
    "tree": LookaheadConfig.tree(7),
    "adaptive": LookaheadConfig.tree(3, relative_step_time=1.5),
    "paper": PAPER,
    "windows": PAPER,
    "latent": PAPER,
}
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=0.5, top_p=0.8, top_k=9),
    SamplingConfig(presence_penalty=0.5, frequency_penalty=0.2, logit_bias={3: 1.0, 5: -float("inf")}),
    SamplingConfig(temperature=1.0, repetition_penalty=1.3, min_p=0.05),
]
GRAMMARS = [jlade.Grammar.regex("(ab|ba)*c|(é|aab)+b{3,}c{2}"), jlade.Grammar.choice(["abc", "cab", "aéb"])]
PARAMS, TOKENIZER = tiny_llama(3), tiny_tokenizer()


def params_of(setting):
    """Returns a model; for "windows" one with a ring of 8 tokens for a cache in a layer."""
    if setting == "latent":
        return tiny_llama(3, **LIKE_DEEPSEEK)
    return tiny_llama(3, sliding_windows=(5, None)) if setting == "windows" else PARAMS


SHARED = random.Random(0).choices(range(13), k=33)  # with which some prompts begin


def engine(setting="paper", tokenizer=TOKENIZER, **changes):
    return jlade.Engine(
        params_of(setting),
        tokenizer,
        **{"max_sequences": 3, "max_grammar": 4096, "max_top_logprobs": 2, "lookahead": SETTINGS[setting]} | changes,
    )


def draw(chance):
    """Returns a random prompt and options."""
    options = {
        "max_new_tokens": chance.randint(1, 24),
        "sampling": chance.choice(SAMPLINGS),
        "key": jax.random.key(chance.randrange(2**31)),
        "eos_ids": chance.choice([(), (4,), (2, 7)]),
        "stop": chance.choice([(), (), ("c",), ("ab", "éa"), ("bbb",)]),
    }
    if chance.random() < 0.3:
        options |= {"logprobs": True, "top_logprobs": chance.randint(0, 2)}
    if chance.random() < 0.3:
        return prompt_of(chance), options | {"grammar": chance.choice(GRAMMARS), "eos_ids": (12,)}
    options["min_new_tokens"] = chance.choice([0, 0, chance.randint(0, options["max_new_tokens"])])
    return prompt_of(chance), options


def prompt_of(chance):
    prompt = SHARED[: chance.choice([0, 20, 33])] + chance.choices(range(13), k=chance.choice([1, 2, 5, 17, 39]))
    return prompt[:39]


def alone(prompt, options, setting="paper"):
    """Returns the result of plain decoding, whose programs compile in the least time."""
    options = options | {"lookahead": None, "tokenizer": TOKENIZER, "logprobs": True, "top_logprobs": 2}
    return jlade.generate(params_of(setting), prompt, **options)


def assert_equal(got, expected):
    assert_same_texts(got, expected)
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
    np.testing.assert_array_equal(got.lengths, expected.lengths)
    assert got.accepted.sum() == got.lengths.sum()
    assert got.accepted.shape[1] == got.steps[0] == np.count_nonzero(got.accepted)
    if got.logprobs is not None:
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
        np.testing.assert_allclose(got.processed_logprobs, expected.processed_logprobs, atol=1e-5)
    if got.top_tokens is not None:
        number = got.top_tokens.shape[-1]
        np.testing.assert_array_equal(got.top_tokens, expected.top_tokens[..., :number])
        np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs[..., :number], atol=1e-5)


def assert_equal_alone(requests, setting="paper"):
    """Asserts that requests, each after its prompt and options, have the results of each alone; returns their number.

    Those that were cancelled do not count.
    """
    number = 0
    for prompt, options, request in requests:
        try:
            got = request.result(timeout=300)
        except concurrent.futures.CancelledError:
            continue
        assert (got.logprobs is not None) == ("logprobs" in options)
        assert_equal(got, alone(prompt, options, setting))
        number += 1
    return number


def watched(monkeypatch, name, note):
    """Returns a list that gains `note` of the arguments of each call of a function of `rows`."""
    seen, function = [], getattr(rows, name)
    monkeypatch.setattr(rows, name, lambda *arguments: seen.append(note(*arguments)) or function(*arguments))
    return seen


def failing(monkeypatch, name, fails, error=None):
    """Makes a function of `rows` raise an error for arguments of which `fails` is true."""
    function = getattr(rows, name)

    def fail(*arguments):
        if fails(*arguments):
            raise error or RuntimeError("a fault")
        return function(*arguments)

    monkeypatch.setattr(rows, name, fail)


def submit_at_random(running, num_clients, number):
    """Returns the random requests that threads submit at random times: prompt, options and request of each.

    A fifth of them is cancelled at once, and a fifth of the others after the first piece.
    """

    def client(seed):
        chance, made = random.Random(seed), []
        for _ in range(number):
            prompt, options = draw(chance)
            request = running.submit(prompt, priority=chance.randint(0, 2), **options)
            if chance.random() < 0.2:
                request.cancel()
            elif chance.random() < 0.2:
                next(iter(request))
                request.cancel()
            made.append((prompt, options, request))
            time.sleep(chance.choice([0, 0, 0.01]))
        return made

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [each for made in pool.map(client, range(num_clients)) for each in made]
