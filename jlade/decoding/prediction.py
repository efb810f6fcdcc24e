"""From the logits of a block to tokens: the model's own choice after each of the block's tokens, for one sequence."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlade.decoding import sampling as sampling_lib
from jlade.decoding.sampling import Sampling, TokenCounts
from jlade.decoding.stopping import Stopping
from jlade.drafts.tree import Tree
from jlade.vocabulary import VocabularyShard


class Situation(NamedTuple):
    """What predictions depend on besides the logits."""

    position: jax.Array  # [] int32, of the current token
    num_generated: jax.Array  # [] int32, tokens of the text so far
    key: jax.Array  # of the sequence's noise
    sampling: Sampling
    stopping: Stopping
    counts: TokenCounts | None


class Predictions(NamedTuple):
    """Predictions after R tokens of a block. Logits have all tokens of the vocabulary where it says V."""

    drawn: jax.Array  # [R] int32, drawn with the noise of their positions; greedy at temperature 0
    greedy: jax.Array  # [R] int32
    logits: jax.Array  # [R, V or V'] float32, the model's
    processed: jax.Array  # [R, V or V'] float32, after penalties, temperature and filters
    sharpened: jax.Array  # [R, V or V'] float32, of the distribution to draw from; -inf for all others when greedy


def predict(
    logits: jax.Array,
    offsets: jax.Array,
    before: jax.Array | None,
    situation: Situation,
    reach: int,
    vocabulary: VocabularyShard,
    whole: bool,
) -> Predictions:
    """Returns the predictions after R tokens.

    Args:
      logits: [R, V'] of these tokens.
      offsets: [R] of the tokens, relative to the position of the current one.
      before: [R, V] int32, how often each token is among a draft's earlier ones; None when no control counts tokens.
      situation: of the sequence.
      reach: the largest offset.
      vocabulary: V', the tokens that this device has.
      whole: whether the logits of all tokens are needed.
    """
    sampling, vocab_size = situation.sampling, vocabulary.size
    if whole or sampling.filters:
        logits, vocabulary = vocabulary.whole(logits), VocabularyShard(vocab_size)
    if sampling.logit_bias is not None:
        sampling = dataclasses.replace(sampling, logit_bias=vocabulary.take(sampling.logit_bias))
    processed = logits
    if situation.stopping.min_new_tokens is not None:
        too_early = situation.num_generated + offsets < situation.stopping.min_new_tokens
        processed = sampling_lib.ban(processed, situation.stopping.eos_ids, too_early, vocabulary)
    if situation.counts is None or before is None:
        processed = sampling_lib.process(processed, sampling, None, None)
    else:
        generated = situation.counts.generated[None, :] + before
        prompt, generated = vocabulary.take(situation.counts.prompt), vocabulary.take(generated)
        processed = sampling_lib.process(processed, sampling, prompt, generated)

    greedy = vocabulary.argmax(processed)
    if sampling.temperature is None:
        return Predictions(greedy, greedy, logits, processed, processed)
    sharpened = sampling_lib.sharpen(processed, sampling.temperature, vocabulary)
    positions = situation.position + 1 + jnp.arange(reach + 1, dtype=jnp.int32)  # of the predicted tokens
    noise = vocabulary.take(sampling_lib.noise_at(situation.key, positions, vocab_size))
    return Predictions(vocabulary.argmax(sharpened + noise[offsets]), greedy, logits, processed, sharpened)


def tokens_before(tree: Tree, window_size: int, vocab_size: int) -> jax.Array:
    """Returns how often each token is among the earlier tokens of a draft, and it itself [1 + W + M, V] int32.

    The current token has none, and the window's tokens, which are guesses, do not count.
    """
    one_hot = jax.nn.one_hot(tree.tokens, vocab_size, dtype=jnp.int32)
    before = jnp.asarray(tree.form.mask).astype(jnp.int32) @ one_hot
    return jnp.pad(before, ((1 + window_size, 0), (0, 0)))
