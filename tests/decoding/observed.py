"""What tests read of a decoder and of a state."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from jlade.decoding import prefill
from jlade.drafts import chain, graded, pool, prediction, record, sources, suffix
from jlade.drafts import recycled as recycling
from jlade.generation.lookahead import with_sources
from jlade.lookahead import window
from jlade.vocabulary import VocabularyShard
from tests import plain_llama, reference
from tests.tiny import tiny_llama

RIGHT = 1e-4  # a right sampler's p-value falls below this once in 10,000 runs


@functools.cache
def logits_of(seed):
    """Returns a function from a text to the logits of its next token."""
    params = tiny_llama(seed)
    logits = functools.cache(lambda text: plain_llama.logits(params, text)[-1])
    return lambda text: logits(tuple(text))


def graded_after(seed, text):
    """The most probable tokens after a text, and the levels of their probabilities among themselves."""
    logits = np.asarray(logits_of(seed)(text))
    best = np.argsort(-logits, kind="stable")[: recycling.RANKS]
    chances = np.exp(logits[best] - logits[best].max())
    return [(int(token), level(chance)) for token, chance in zip(best, chances / chances.sum(), strict=True)]


def level(chance):
    log_odds = math.log(chance / (1 - chance)) if chance < 1 else math.inf
    place = (graded.HIGHEST - log_odds) / (2 * graded.HIGHEST) * graded.LEVELS
    return math.floor(min(max(place, 0), graded.LEVELS - 1))


def next_token_of(seed):
    return lambda text: int(np.argmax(logits_of(seed)(text)))


def first_guess(text, place):
    return text[chain.DRAWS[place % len(chain.DRAWS)] % len(text)]


def sources_of(seed, lookahead, corpus=(), noise=None, next_token=None, predicted=(), known=None):
    """Returns the sources of the reference with jlade's constants, None without a tree."""
    if not lookahead.has_tree:
        return None
    with_corpus = with_sources(lookahead, "corpus")
    of_setting = sources.Sources.of(with_corpus, VocabularyShard(13))
    recycled = dict(of_setting.sources).get("recycled")
    rates = {
        (name, kind): rate for name, source in of_setting.sources for kind, rate in enumerate(source.rates.tolist())
    }
    return reference.Sources(
        lookahead.num_drafted,
        lookahead.reach,
        functools.partial(graded_after, seed),
        rates,
        recycling.widths(recycled.size, recycled.depth) if recycled else (),
        graded.GRADES,
        recycling.RANKS,
        graded.CHANCES.tolist(),
        graded.LEAST_SUMS.tolist(),
        suffix.MATCHES,
        suffix.LONGEST,
        suffix.OTHERS,
        pool.SLOTS,
        record.PRIOR,
        record.MEMORY,
        corpus,
        noise,
        sources.NOISE_REACH,
        next_token or next_token_of(seed),
        first_guess,
        predicted and reference.Prediction(predicted, suffix.LONGEST, prediction.TRUSTED, prediction.CONFIRMED),
        [min(lookahead.num_drafted, most) for most in (prediction.MAX_LENGTH, prediction.SECOND)],
        known,
    )


def first_window(key, prompt, lookahead):
    """The window that jlade draws for a prompt."""
    drawn = window.draw(key, jnp.array(prompt), jnp.int32(len(prompt)), prefill.DRAWN)
    return window.start(drawn, lookahead.window_size, lookahead.ngram_size).tolist()
