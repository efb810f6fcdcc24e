"""From predictions to a verdict, and to the text that it makes, for one sequence."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.constraints import constraint as constraints
from jlade.decoding import predict, sampling, stopping
from jlade.decoding.block import Block
from jlade.decoding.predict import Predictions
from jlade.decoding.sampling import LogProbs
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.lookahead.adaptive import Level
from jlade.lookahead.verification import verify_by_matching, verify_by_rejection


class Verdict(NamedTuple):
    """The tokens that a step adds to the text, and whether the text ends there. Nothing after it changes either."""

    tokens: jax.Array  # [A] int32, along the best draft; the first `num_accepted` are added
    num_accepted: jax.Array  # [] int32, 0 to A
    path: jax.Array  # int32, places in the tree of `tokens` but the last accepted one; any after these
    ended: jax.Array  # [] bool, whether the text ends with them
    stop_state: jax.Array | None  # [] int32, after them; None without stop strings
    constraint_state: Any  # after them; None without a constraint
    scores: LogProbs | None  # of `tokens`, None if not asked for


def verify(state: DecodeState, block: Block, predictions: Predictions, config: DecodeConfig, level: Level) -> Verdict:
    """Returns the verdict on the drafts of a block (arXiv 2402.02057, Algorithms 3 and 4).

    The longest draft that the model agrees with is cut before the first token whose logits, after processing, are not
    finite, and where the text ends. Logits that no accepted token comes from may have any values. A text that
    needs others ends. All is of one sequence before the step; one that makes no step accepts nothing.
    """
    first_draft, max_accepted = 1 + level.setting.window_size, level.setting.max_accepted
    if predict.rejects(state, level):
        # Acceptance must be independent of the noise with which the window was drawn.
        key = sampling.key_at(state.inputs.key, sampling.REJECTION, state.num_tokens - 1)
        assert predictions.sharpened is not None
        logits = block.gather(predictions.sharpened)
        agreed = verify_by_rejection(key, block.tree, logits[0], logits[first_draft:], max_accepted)
    else:
        agreed = verify_by_matching(block.tree, predictions.tokens[0], predictions.tokens[1:], max_accepted)

    num_agreed = jnp.where(block.makes_step, agreed.num_accepted, 0)
    rows = jnp.append(0, first_draft + agreed.path)  # of the logits that the tokens come from
    are_finite = block.gather(predictions.are_finite.astype(jnp.int32), rows)
    num_finite = jnp.sum(jnp.cumprod(are_finite), dtype=jnp.int32)
    num_accepted, ended, stop_state = stopping.cut(
        state.inputs.stopping,
        state.stop_state,
        agreed.tokens,
        jnp.minimum(num_agreed, num_finite),
        state.num_tokens - state.inputs.lengths,
    )
    constraint, constraint_state = state.inputs.constraint, None
    if constraint is not None:
        constraint_state = constraints.after_accepted(
            constraint, predictions.states, agreed.path, agreed.tokens, num_accepted
        )
    scores = None
    if config.logprobs:
        assert predictions.processed is not None
        logits, processed = block.gather(predictions.logits, rows), block.gather(predictions.processed, rows)
        scores = sampling.logprobs(logits, processed, agreed.tokens, config.top_logprobs, state.inputs.has_logprobs)
    ended |= num_finite < num_agreed
    return Verdict(agreed.tokens, num_accepted, agreed.path, ended, stop_state, constraint_state, scores)
