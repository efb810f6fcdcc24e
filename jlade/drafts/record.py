"""The record of proposals: how often the model accepted them. By their record, sources share the tree.

The proposals of a source are of kinds of its own: a rank in a table, or a match of some length. The acceptance rate of
a kind is the share of its recent proposals that the model accepted after accepting their predecessors. Proposals
without a place in the tree count too: the accepted text tells whether the model would have accepted them.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.tree import NONE, Proposals

PRIOR = 30.0  # proposals that the initial rates count for
MEMORY = 100.0  # proposals that a record holds at most
BIT = 256.0  # the cost of an acceptance rate of 1/2
HIGHEST = 4096  # cost of a token


@flax.struct.dataclass
class Record:
    """The record of K kinds of proposals, of one sequence; [B, K] for a batch."""

    accepted: jax.Array  # [K] float32
    tried: jax.Array  # [K] float32

    @property
    def rates(self) -> jax.Array:
        """[..., K] float32, acceptance rates."""
        return self.accepted / self.tried


def cost(rates: jax.Array) -> jax.Array:
    """Returns the negative logarithm of acceptance rates [...] as int32: integers have the same sum in any order."""
    return jnp.clip(jnp.round(-BIT * jnp.log2(rates)), 1, HIGHEST).astype(jnp.int32)


def given_noise(rates: jax.Array, noise: jax.Array) -> jax.Array:
    """Returns the probabilities [...] that tokens are drawn, given their Gumbel noise [...], NaN where it is unknown.

    A token is drawn if the logarithm of its probability p plus its noise exceeds the highest such sum of all others,
    which has the distribution of log(1 - p) plus Gumbel noise.
    """
    return jnp.where(jnp.isnan(noise), rates, jnp.exp(-(1 - rates) / rates * jnp.exp(-noise)))


def start(rates: np.ndarray) -> Record:
    """Returns the record before the first step, for initial rates [K]."""
    return Record(PRIOR * jnp.asarray(rates, jnp.float32), jnp.full(len(rates), PRIOR, jnp.float32))


def update(record: Record, proposals: Proposals, tokens: jax.Array, num_accepted: jax.Array) -> Record:
    """Returns the record after a step, for which the proposals were made.

    Of `tokens` [A] int32, those after the current one, `num_accepted` were accepted; 0 leaves the record as it is.
    """
    lineage, depths = proposals.lineage, proposals.depths
    place = jnp.arange(lineage.shape[1], dtype=jnp.int32)[None, :]
    along = proposals.tokens.at[lineage].get(mode="fill", fill_value=NONE)
    agrees = along == tokens.at[place].get(mode="fill", fill_value=NONE)
    reached = jnp.all(agrees | (place >= depths[:, None] - 1), axis=1)
    is_accepted = jnp.all(agrees | (place >= depths[:, None]), axis=1)
    is_tried = (depths <= jnp.minimum(num_accepted, len(tokens))) & reached & (proposals.tokens != NONE)
    kinds = proposals.kinds[:, None] == jnp.arange(len(record.tried), dtype=jnp.int32)[None, :]
    tried = record.tried + jnp.sum(kinds & is_tried[:, None], axis=0).astype(jnp.float32)
    accepted = record.accepted + jnp.sum(kinds & (is_tried & is_accepted)[:, None], axis=0).astype(jnp.float32)
    kept = jnp.minimum(1.0, MEMORY / tried)
    return Record(accepted * kept, tried * kept)
