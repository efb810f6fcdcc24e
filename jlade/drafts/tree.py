"""The tree of drafts: proposals of several sources, each prefix once, the most promising ones."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

NONE = -1  # equals no token, so it is never accepted
NEVER = 2**24  # the cost of a draft that does not exist; more than that of any path


class Shape(NamedTuple):
    """The shape of L proposals, which is static: each continues an earlier one, or the current token."""

    parents: tuple[int, ...]  # [L], -1 for the current token

    @property
    def lineage(self) -> np.ndarray:
        """[L, D] int32: the places of a proposal's predecessors and its own, by depth, then L."""
        return _lineage(self.parents)

    @property
    def depths(self) -> np.ndarray:
        """[L] int32: places after the current token, from 1."""
        return np.asarray((self.lineage < len(self.parents)).sum(axis=1), np.int32)

    @classmethod
    def join(cls, shapes: Sequence[Self]) -> Self:
        """Returns the shape of the proposals of several sources, one after the other."""
        parents: list[int] = []
        for shape in shapes:
            parents += [parent if parent < 0 else parent + len(parents) for parent in shape.parents]
        return cls(tuple(parents))


@functools.cache
def _lineage(parents: tuple[int, ...]) -> np.ndarray:
    lines: list[list[int]] = []
    for place, parent in enumerate(parents):
        lines.append([*(lines[parent] if parent >= 0 else []), place])
    result = np.full((len(lines), max(map(len, lines), default=0)), len(lines), np.int32)
    for row, line in zip(result, lines, strict=True):
        row[: len(line)] = line
    result.flags.writeable = False  # shared
    return result


@flax.struct.dataclass
class Proposals:
    """What the sources propose, for one sequence; [B, L] for a batch."""

    tokens: jax.Array  # [L] int32, `NONE` where a source has nothing
    kinds: jax.Array  # [L] int32, of `record.Record`
    shape: Shape = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Tree:
    """M drafted tokens of one sequence, the most promising first, each after its parent; [B, ...] for a batch.

    The first ones of a tree are a tree.
    """

    tokens: jax.Array  # [M] int32, `NONE` where there are fewer
    parents: jax.Array  # [M] int32, -1 for the current token
    depths: jax.Array  # [M] int32, places after the current token, from 1
    mask: jax.Array  # [M, M] bool, mask[q, k]: k is q or before it on its path
    kinds: jax.Array  # [M] int32, of the most promising proposal
    costs: jax.Array  # [M] int32, of the path; see `record.Record.costs`
    CURRENT: ClassVar[int] = -1

    @property
    def size(self) -> jax.Array:
        """[...] int32, the number of tokens."""
        return jnp.sum(self.tokens != NONE, axis=-1, dtype=jnp.int32)

    def first(self, size: int) -> Self:
        """Returns the tree [..., size, ...] of the first tokens."""
        cut = {name: getattr(self, name)[..., :size] for name in ("tokens", "parents", "depths", "kinds", "costs")}
        return dataclasses.replace(self, mask=self.mask[..., :size, :size], **cut)


def merge(proposals: Proposals, costs: jax.Array, size: int) -> Tree:
    """Returns the tree of the `size` most promising tokens. Proposals that agree up to a token share it.

    A proposal costs the sum along its path. A shared token has the lowest cost of its proposals.

    Args:
      proposals: L of them.
      costs: [L] int32, of each token alone, 1 or more: the less probable it is, the higher.
      size: M, at most L.
    """
    number = len(proposals.shape.parents)
    lineage, depths = jnp.asarray(proposals.shape.lineage), jnp.asarray(proposals.shape.depths)
    index = jnp.arange(number, dtype=jnp.int32)
    paths = proposals.tokens.at[lineage].get(mode="fill", fill_value=0)
    exists = jnp.all(paths >= 0, axis=1)
    of_path = jnp.sum(costs.at[lineage].get(mode="fill", fill_value=0), axis=1, dtype=jnp.int32)
    cost = jnp.where(exists, of_path, NEVER)

    same = jnp.all(paths[:, None] == paths[None, :], axis=-1) & (depths[:, None] == depths[None, :])
    same &= exists[:, None] & exists[None, :]
    first = jnp.min(jnp.where(same, index[None, :], number), axis=1)  # the proposal that stands for all equal ones
    best = jnp.argmin(jnp.where(same, cost[None, :], NEVER), axis=1).astype(jnp.int32)

    # Predecessors cost less than their successors, so they are chosen before them.
    of_chosen, chosen = jax.lax.top_k(-jnp.where(first == index, cost[best], NEVER), size)
    is_drafted = of_chosen > -NEVER
    before = first.at[lineage[chosen]].get(mode="fill", fill_value=number)  # [M, D]
    mask = jnp.any(before[:, :, None] == chosen[None, None, :], axis=1) & is_drafted[:, None]
    place = jnp.arange(size, dtype=jnp.int32)
    depth = jnp.where(is_drafted, depths[chosen], 1)
    is_parent = mask & (depth[None, :] == depth[:, None] - 1)
    return Tree(
        tokens=jnp.where(is_drafted, proposals.tokens[chosen], NONE),
        parents=jnp.max(jnp.where(is_parent, place[None, :], Tree.CURRENT), axis=1),
        depths=depth,
        mask=mask | (place[:, None] == place[None, :]),
        kinds=proposals.kinds[best[chosen]],
        costs=-of_chosen,
    )
