"""The record of what the model agreed with, by which sources share the tree.

Proposals are of kinds: a rank in the table of recycled logits, or a match of some length. Each kind has the share of
its proposals that the model agreed with of late, where it agreed with their predecessors. Proposals that had no place
in the tree are judged too, as the accepted text decides.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.tree import NONE, Proposals

PRIOR = 10.0  # judgements that the initial odds count for
MEMORY = 60.0  # judgements that a record holds at most
BIT = 256.0  # the cost of odds of 1/2
HIGHEST = 4096  # cost of a token


@flax.struct.dataclass
class Record:
    """The record of K kinds, of one sequence; [B, K] for a batch."""

    agreed: jax.Array  # [K] float32
    judged: jax.Array  # [K] float32

    @property
    def odds(self) -> jax.Array:
        """[..., K] float32, the probability that the model agrees with a token."""
        return self.agreed / self.judged


def cost(odds: jax.Array) -> jax.Array:
    """Returns the negative logarithm of probabilities [...] as int32: whole numbers have the same sum in any order."""
    return jnp.clip(jnp.round(-BIT * jnp.log2(odds)), 1, HIGHEST).astype(jnp.int32)


def given_noise(odds: jax.Array, noise: jax.Array) -> jax.Array:
    """Returns the probabilities [...] that tokens are drawn, given their Gumbel noise [...], NaN where it is unknown.

    A token is drawn if the logarithm of its probability p plus its noise exceeds the highest such sum of all others,
    which has the distribution of log(1 - p) plus Gumbel noise.
    """
    return jnp.where(jnp.isnan(noise), odds, jnp.exp(-(1 - odds) / odds * jnp.exp(-noise)))


def start(odds: np.ndarray) -> Record:
    """Returns the record before the first step, for initial odds [K]."""
    return Record(PRIOR * jnp.asarray(odds, jnp.float32), jnp.full(len(odds), PRIOR, jnp.float32))


def update(record: Record, proposals: Proposals, accepted: jax.Array, num_accepted: jax.Array) -> Record:
    """Returns the record after a step.

    Args:
      record: before.
      proposals: L, made for the step.
      accepted: [A] int32, the tokens after the current one.
      num_accepted: [] int32, how many of these were accepted; 0 judges nothing.
    """
    depths, lineage = proposals.shape.depths, proposals.shape.lineage
    within = jnp.asarray(depths) <= jnp.minimum(num_accepted, len(accepted))
    agrees = proposals.tokens == accepted.at[depths - 1].get(mode="clip")
    earlier = np.where(lineage == np.arange(len(depths))[:, None], len(depths), lineage)
    reached = jnp.all(agrees.at[earlier].get(mode="fill", fill_value=True), axis=1)
    is_judged = within & reached & (proposals.tokens != NONE)
    kinds = proposals.kinds[:, None] == jnp.arange(len(record.judged), dtype=jnp.int32)[None, :]
    judged = record.judged + jnp.sum(kinds & is_judged[:, None], axis=0).astype(jnp.float32)
    agreed = record.agreed + jnp.sum(kinds & (is_judged & agrees)[:, None], axis=0).astype(jnp.float32)
    kept = jnp.minimum(1.0, MEMORY / judged)
    return Record(agreed * kept, judged * kept)
