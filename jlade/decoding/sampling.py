"""Sampling: logits to processed logits, and processed logits to tokens, with noise that belongs to a position.

Functions on arrays are for one sequence. Settings are arrays too, so that other values compile nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import CONTROLS, FILTERS, PENALTIES, LookaheadConfig, SamplingConfig
from jlade.drafts import sources
from jlade.drafts.branch import if_any
from jlade.vocabulary import VocabularyShard

NEVER = -jnp.inf  # the logit of a token that must not be drawn
THREEFRY = "threefry2x32"  # of `jax.random`
# Smaller temperatures are the limit, the highest logit. Divided by them, logits are so large that float32's rounding,
# which is not equal in all places of a compiled program, shows in their softmax.
MIN_TEMPERATURE = 1e-5
# Folded into a key for draws that are not the noise of a position.
REJECTION, WINDOW = np.uint32(2**31), np.uint32(2**31 + 1)


@flax.struct.dataclass
class Sampling:
    """`SamplingConfig` as arrays of B sequences; those of one sequence lack B.

    A control that no sequence uses is None and not in the program. A sequence without a control that another one uses
    has its neutral value; see `to_arrays`.

    Attributes:
      temperature: float32[B], below 1e-5 for greedy.
      top_k: int32[B], at most V.
      top_p: float32[B], infinity for all tokens.
      min_p: float32[B].
      repetition_penalty: float32[B].
      presence_penalty: float32[B].
      frequency_penalty: float32[B].
      logit_bias: float32[B, V].
    """

    temperature: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None
    repetition_penalty: jax.Array | None = None
    presence_penalty: jax.Array | None = None
    frequency_penalty: jax.Array | None = None
    logit_bias: jax.Array | None = None

    @property
    def filters(self) -> bool:
        """Whether a control depends on the order or the probabilities of all tokens."""
        return any(getattr(self, name) is not None for name in FILTERS)

    @property
    def counts_tokens(self) -> bool:
        """Whether a control depends on earlier tokens."""
        return any(getattr(self, name) is not None for name in PENALTIES)

    def only(self, *names: str) -> Self:
        """Returns the settings without the other controls."""
        return type(self)(**{name: getattr(self, name) for name in names})

    def uses(self, *names: str, vocab_size: int) -> jax.Array:
        """Returns whether one of these controls has another value than its neutral one, for one sequence: bool[]."""
        used, neutral = jnp.zeros((), bool), complete(Sampling(), 1, vocab_size)
        for name in names:
            if (value := getattr(self, name)) is not None:
                used |= jnp.any(value != getattr(neutral, name)[0])
        return used

    @property
    def draws(self) -> jax.Array:
        """Whether tokens are drawn, and not the most probable ones: bool[B], for one sequence bool[]."""
        return jnp.zeros((), bool) if self.temperature is None else self.temperature >= MIN_TEMPERATURE


@flax.struct.dataclass
class TokenCounts:
    """How often each token occurs in a sequence."""

    prompt: jax.Array  # [V] int32
    generated: jax.Array  # [V] int32


def complete(sampling: Sampling, batch_size: int, vocab_size: int) -> Sampling:
    """Returns the settings of B sequences with all controls, those that were None with their neutral values."""
    controls = {name: _array(name, [SamplingConfig()] * batch_size, vocab_size) for name in CONTROLS}
    controls["logit_bias"] = np.zeros((batch_size, vocab_size), np.float32)
    used = {name: value for name in controls if (value := getattr(sampling, name)) is not None}
    return Sampling(**(controls | used))


def to_arrays(configs: Sequence[SamplingConfig], vocab_size: int) -> Sampling:
    """Returns the settings of B sequences as arrays [B]."""
    default = SamplingConfig()
    used = [name for name in CONTROLS if any(getattr(config, name) != getattr(default, name) for config in configs)]
    controls = {name: _array(name, configs, vocab_size) for name in used}
    if any(config.logit_bias for config in configs):
        controls["logit_bias"] = np.zeros((len(configs), vocab_size), np.float32)
        for added, config in zip(controls["logit_bias"], configs, strict=True):
            for token, bias in dict(config.logit_bias or ()).items():
                added[token] = bias
    return Sampling(**controls)


def _array(name: str, configs: Sequence[SamplingConfig], vocab_size: int) -> Any:
    """Returns a control of B sequences [B], with its neutral value for those without it."""
    values = [CONTROLS[name].neutral if getattr(config, name) is None else getattr(config, name) for config in configs]
    if name == "top_k":
        return np.array([min(value or vocab_size, vocab_size) for value in values], np.int32)
    array = np.array(values, np.float32)
    # Rounded probabilities may add up to 1 before the last token.
    return np.where(array == 1, np.float32(np.inf), array) if name == "top_p" else array


def process(logits: jax.Array, sampling: Sampling, prompt: jax.Array | None, generated: jax.Array | None) -> jax.Array:
    """Applies penalties, bias, temperature and filters, in the order of transformers.

    Args:
      logits: [R, V] float32, of R positions of one sequence. Without filters a slice of the vocabulary will do, if the
        other arguments are for the same slice.
      sampling: the sequence's settings.
      prompt: [V] int32, how often each token is in the prompt; None when no control needs it.
      generated: [R, V] int32, how often each token was generated before each position; None when no control needs it.

    Returns:
      [R, V] logits of the distribution to draw from; -inf for tokens that are filtered out. A greedy temperature counts
      as 1 here; see `sharpen`.
    """
    s = sampling
    if s.logit_bias is not None:
        logits = logits + s.logit_bias[None, :]
    if prompt is not None and generated is not None:
        logits = _penalize(logits, s, prompt, generated)
    if s.temperature is not None:
        logits = logits / jnp.where(s.temperature < MIN_TEMPERATURE, 1.0, s.temperature)
    if not s.filters:
        return logits
    return if_any(s.uses(*FILTERS, vocab_size=logits.shape[1]), _filter, lambda logits, _: logits, logits, s)


def _filter(logits: jax.Array, sampling: Sampling) -> jax.Array:
    s, highest = sampling, logits
    if s.top_k is not None or s.top_p is not None:
        highest = -jnp.sort(-logits, axis=-1)
    if s.top_k is not None:
        kth = highest[:, s.top_k - 1][:, None]
        logits, highest = (jnp.where(each < kth, NEVER, each) for each in (logits, highest))
    if s.top_p is not None:
        probabilities = jax.nn.softmax(highest, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        is_kept = before < s.top_p
        last = jnp.min(jnp.where(is_kept, highest, highest[:, :1]), axis=-1, keepdims=True)  # the first for any p
        # Of tokens with the logit of the last one only some are kept, the first ones.
        is_tied = logits == last
        num_kept = jnp.maximum(jnp.sum(is_kept & (highest == last), axis=-1, keepdims=True), 1)
        is_late = is_tied & (jnp.cumsum(is_tied, axis=-1) > num_kept)
        logits = jnp.where((logits < last) | is_late, NEVER, logits)
    if s.min_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        too_rare = probabilities < s.min_p * jnp.max(probabilities, axis=-1, keepdims=True)
        logits = jnp.where(too_rare, NEVER, logits)
    return logits


def _penalize(logits: jax.Array, sampling: Sampling, prompt: jax.Array, generated: jax.Array) -> jax.Array:
    s = sampling
    if s.repetition_penalty is not None:
        penalized = jnp.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = jnp.where(prompt[None, :] + generated > 0, penalized, logits)
    if s.presence_penalty is not None:
        logits = logits - s.presence_penalty * (generated > 0).astype(jnp.float32)
    if s.frequency_penalty is not None:
        logits = logits - s.frequency_penalty * generated.astype(jnp.float32)
    return logits


def sharpen(logits: jax.Array, temperature: jax.Array, vocabulary: VocabularyShard) -> jax.Array:
    """Keeps only the highest of processed logits [R, V'] if `temperature` [] is greedy."""
    is_best = vocabulary.tokens()[None, :] == vocabulary.argmax(logits)[:, None]
    return jnp.where((temperature < MIN_TEMPERATURE) & ~is_best, NEVER, logits)


def ban(logits: jax.Array, token_ids: jax.Array, where: jax.Array, vocabulary: VocabularyShard) -> jax.Array:
    """Bans `token_ids` [K], -1 for none, in the logits [R, V'] of the positions `where` [R]."""
    size = vocabulary.size
    is_banned = jnp.zeros(size, bool).at[jnp.where(token_ids < 0, size, token_ids)].set(True, mode="drop")
    # A sum, in which NaN and infinity are still seen.
    return logits + jnp.where(where[:, None] & vocabulary.take(is_banned)[None, :], NEVER, 0.0)


@flax.struct.dataclass
class LogProbs:
    """Log-probabilities of the generated tokens, at their places in `DecodeState.tokens`; 0 elsewhere."""

    model: jax.Array  # [B, C] float32, under the model
    processed: jax.Array  # [B, C] float32, after `Sampling`'s processing, at temperature 1 where decoding is greedy
    top: jax.Array  # [B, C, K] float32, of the most probable tokens under the model, the highest first
    top_tokens: jax.Array  # [B, C, K] int32, these tokens; -1 for those that a small vocabulary lacks


def logprobs(
    logits: jax.Array, processed: jax.Array, tokens: jax.Array, num_top: int, are_wanted: jax.Array | None = None
) -> LogProbs:
    """Returns the log-probabilities of tokens, and of the most probable ones.

    Args:
      logits: [A, V] under the model.
      processed: [A, V] after processing.
      tokens: [A] int32.
      num_top: K, the number of the most probable tokens.
      are_wanted: [] bool, whether they are asked for; None if they are.
    """
    find = functools.partial(_logprobs, num_top=num_top)
    if are_wanted is None:
        return find(logits, processed, tokens)
    return if_any(are_wanted, find, lambda *_: no_logprobs(tokens.shape, num_top), logits, processed, tokens)


def no_logprobs(shape: tuple[int, ...], num_top: int) -> LogProbs:
    """Returns those of tokens [...] for which none are asked."""
    chosen, top = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, num_top), jnp.float32)
    return LogProbs(chosen, chosen, top, top.astype(jnp.int32))


def _logprobs(logits: jax.Array, processed: jax.Array, tokens: jax.Array, num_top: int) -> LogProbs:
    if num_top:
        top, _ = VocabularyShard(logits.shape[-1]).top(logits, num_top)
    else:
        top = jnp.zeros((len(tokens), 0), jnp.int32)

    def at(tokens: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), jnp.maximum(tokens, 0), axis=-1)

    chosen = tokens[:, None]
    return LogProbs(
        model=at(chosen, logits)[:, 0],
        processed=at(chosen, processed)[:, 0],
        top=at(top, logits),
        top_tokens=top,
    )


def threefry(key: jax.Array) -> jax.Array:
    """Returns keys [...] of the implementation "threefry2x32", derived from those of any implementation.

    Noise must be a function of key and position alone. Other implementations do not promise that: `jax.vmap` draws the
    bits of all "rbg" keys with the first of them. A threefry key stays as it is.
    """
    if jax.random.key_impl(key) == THREEFRY:
        return key
    words = jax.random.key_data(key)
    derived = jax.random.wrap_key_data(words[..., :2], impl=THREEFRY)
    for index in range(2, words.shape[-1]):
        derived = jnp.vectorize(jax.random.fold_in)(derived, words[..., index])
    return derived


def key_at(key: jax.Array, purpose: np.uint32, position: jax.Array) -> jax.Array:
    """Returns the key of a draw for another purpose than the token at a position: `REJECTION` or `WINDOW`."""
    return jax.random.fold_in(jax.random.fold_in(key, purpose), position)


def noise_at(key: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Returns the Gumbel noise [M, V] of the tokens at absolute `positions` [M] of the sequence with `key`.

    The argmax of processed logits plus Gumbel noise is a draw from their softmax. As the noise belongs to the position,
    the same text before a position leads to the same token there: in the window, in a draft, or one by one.
    """
    return jax.vmap(lambda position: jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32))(
        positions
    )


def noise_ahead(
    key: jax.Array, num_tokens: jax.Array, sampling: Sampling, lookahead: LookaheadConfig, vocab_size: int
) -> jax.Array | None:
    """Returns the noise of the positions after a text, for drafts: [D, V], or None without use for it.

    Args:
      key: of the sequence.
      num_tokens: [] int32, of the text.
      sampling: of the sequence. The noise is NaN for a greedy temperature.
      lookahead: the setting. Rejection sampling draws with other noise, and a static tree needs no costs.
      vocab_size: V.
    """
    if sampling.temperature is None or not lookahead.has_tree or lookahead.verification == "rejection":
        return None
    positions = num_tokens + jnp.arange(sources.NOISE_REACH, dtype=jnp.int32)

    def draw(key: jax.Array, positions: jax.Array, draws: jax.Array) -> jax.Array:
        return jnp.where(draws, noise_at(key, positions, vocab_size), jnp.nan)

    def unknown(key: jax.Array, positions: jax.Array, draws: jax.Array) -> jax.Array:
        return jnp.full((sources.NOISE_REACH, vocab_size), jnp.nan, jnp.float32)

    return if_any(sampling.draws, draw, unknown, key, positions, sampling.draws)


def count_prompt(tokens: jax.Array, length: jax.Array, vocab_size: int) -> TokenCounts:
    """Counts the first `length` of `tokens` [C]."""
    none = jnp.zeros(vocab_size, jnp.int32)
    return TokenCounts(prompt=_count(none, tokens, length), generated=none)


def count_accepted(counts: TokenCounts, tokens: jax.Array, num_accepted: jax.Array) -> TokenCounts:
    """Adds the first `num_accepted` of `tokens` [A] to the generated ones."""
    return TokenCounts(prompt=counts.prompt, generated=_count(counts.generated, tokens, num_accepted))


def _count(counts: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    is_counted = jnp.arange(len(tokens), dtype=jnp.int32) < length
    return counts.at[jnp.where(is_counted, tokens, len(counts))].add(1, mode="drop")
