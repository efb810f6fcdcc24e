"""From the logits of a block to a verdict, for one sequence: predictions, and the drafts that agree with them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import LookaheadConfig
from jlade.decoding import sampling as sampling_lib
from jlade.decoding import shares
from jlade.decoding.sampling import LogProbs
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts.tree import Tree
from jlade.lookahead import block as blocks
from jlade.lookahead.division import Share
from jlade.lookahead.verification import Verdict, verify_by_matching, verify_by_rejection
from jlade.vocabulary import VocabularyShard

NO_POSITION = np.uint32(2**31)  # folded into a key for noise that belongs to no position


class Predictions(NamedTuple):
    """Predictions after R tokens of a block. Logits have all tokens of the vocabulary where it says V."""

    drawn: jax.Array  # [R] int32, drawn with the noise of their positions; greedy at temperature 0
    greedy: jax.Array  # [R] int32
    logits: jax.Array  # [R, V or V'] float32, the model's
    processed: jax.Array  # [R, V or V'] float32, after penalties, temperature and filters
    sharpened: jax.Array  # [R, V or V'] float32, of the distribution to draw from; -inf for all others when greedy
    are_finite: jax.Array  # [R] bool, whether `processed` have no NaN, no infinity and a token above -inf


def verify(
    state: DecodeState,
    tree: Tree,
    logits: jax.Array,
    share: Share | None,
    config: DecodeConfig,
    level: LookaheadConfig,
) -> tuple[jax.Array, jax.Array, Verdict, jax.Array, LogProbs | None]:
    """Returns predictions, the verdict on the tree, whether the text cannot go on after it, and its tokens' scores.

    The predictions are those of the newest window row [W], and those after the current token and the drafts [1 + M].
    The verdict accepts tokens up to the first one whose logits, after processing, are not finite: none if these are the
    logits after the current token. Logits that no accepted token comes from may have any values.

    Args:
      state: of one sequence, before the step.
      tree: M drafts.
      logits: [R, V] of the current token, the newest window row and the drafts; of a share [R', V'].
      share: the part of the block that this device computed; None for all of it.
      config, level: those of `step`.
    """
    constants = state.constants
    block = blocks.build(level.window_size, level.ngram_size, tree.form)
    positions, _, outputs = (block if share is None else share)[:3]
    window_end = 1 + level.window_size
    before = None
    if state.counts is not None:
        before = _tokens_before(tree, level.window_size, config.vocabulary.size)
        before = before if share is None else before[share.rows]
    rejects = constants.sampling.temperature is not None and level.verification == "rejection" and level.num_drafted > 0
    # The last offset is that of the window's last token, or of the end of the longest draft.
    of_window = level.window_size + level.ngram_size - 3 if level.window_size else 0
    found = _predict(
        state,
        logits,
        jnp.asarray(positions)[outputs],
        before,
        reach=max(of_window, level.max_accepted - 1),
        vocabulary=config.vocabulary,
        whole=rejects or config.logprobs,
    )

    drawn, greedy = shares.of_block(found.drawn, share), shares.of_block(found.greedy, share)
    new = (greedy if level.window_draw == "greedy" else drawn)[1:window_end]
    predictions = jnp.append(drawn[:1], drawn[window_end:])
    if rejects:
        # Acceptance must be independent of the noise with which the window was drawn.
        key = jax.random.fold_in(jax.random.fold_in(constants.keys, NO_POSITION), state.num_tokens - 1)
        sharpened = shares.of_block(found.sharpened, share)
        verdict = verify_by_rejection(key, tree, sharpened[0], sharpened[window_end:], level.max_accepted)
    else:
        verdict = verify_by_matching(tree, predictions[0], predictions[1:], level.max_accepted)
    chosen = jnp.append(0, window_end + verdict.path)  # the rows of the logits of the verdict's tokens
    are_finite = shares.of_block(found.are_finite.astype(jnp.int32), share, chosen)
    num_finite = jnp.sum(jnp.cumprod(are_finite), dtype=jnp.int32)
    failed = num_finite < verdict.num_accepted
    verdict = verdict._replace(num_accepted=jnp.minimum(verdict.num_accepted, num_finite))
    if not config.logprobs:
        return new, predictions, verdict, failed, None
    model, processed = (shares.of_block(x, share, chosen) for x in (found.logits, found.processed))
    scores = sampling_lib.logprobs(model, processed, verdict.tokens, config.top_logprobs)
    return new, predictions, verdict, failed, scores


def _predict(
    state: DecodeState,
    logits: jax.Array,
    offsets: jax.Array,
    before: jax.Array | None,
    reach: int,
    vocabulary: VocabularyShard,
    whole: bool,
) -> Predictions:
    """Returns the predictions after R tokens.

    Args:
      state: of the sequence.
      logits: [R, V'] of these tokens.
      offsets: [R] of the tokens, relative to the position of the current one.
      before: [R, V] int32, how often each token is among a draft's earlier ones; None when no control counts tokens.
      reach: the largest offset.
      vocabulary: V', the tokens that this device has.
      whole: whether the logits of all tokens are needed.
    """
    constants, sampling, vocab_size = state.constants, state.constants.sampling, vocabulary.size
    if whole or sampling.filters:
        logits, vocabulary = vocabulary.whole(logits), VocabularyShard(vocab_size)
    if sampling.logit_bias is not None:
        sampling = dataclasses.replace(sampling, logit_bias=vocabulary.take(sampling.logit_bias))
    processed = logits
    stopping, num_generated = constants.stopping, state.num_tokens - constants.prompt_lengths
    if stopping.min_new_tokens is not None:
        too_early = num_generated + offsets < stopping.min_new_tokens
        processed = sampling_lib.ban(processed, stopping.eos_ids, too_early, vocabulary)
    if state.counts is None or before is None:
        processed = sampling_lib.process(processed, sampling, None, None)
    else:
        generated = state.counts.generated[None, :] + before
        prompt, generated = vocabulary.take(state.counts.prompt), vocabulary.take(generated)
        processed = sampling_lib.process(processed, sampling, prompt, generated)

    highest, greedy = vocabulary.highest(processed)
    are_finite = jnp.isfinite(highest)
    if sampling.temperature is None:
        return Predictions(greedy, greedy, logits, processed, processed, are_finite)
    sharpened = sampling_lib.sharpen(processed, sampling.temperature, vocabulary)
    positions = state.num_tokens + jnp.arange(reach + 1, dtype=jnp.int32)  # of the predicted tokens
    noise = vocabulary.take(sampling_lib.noise_at(constants.keys, positions, vocab_size))
    drawn = vocabulary.argmax(sharpened + noise[offsets])
    return Predictions(drawn, greedy, logits, processed, sharpened, are_finite)


def _tokens_before(tree: Tree, window_size: int, vocab_size: int) -> jax.Array:
    """Returns how often each token is among the earlier tokens of a draft, and it itself [1 + W + M, V] int32.

    The current token has none, and the window's tokens, which are guesses, do not count.
    """
    one_hot = jax.nn.one_hot(tree.tokens, vocab_size, dtype=jnp.int32)
    before = jnp.asarray(tree.form.mask).astype(jnp.int32) @ one_hot
    return jnp.pad(before, ((1 + window_size, 0), (0, 0)))
