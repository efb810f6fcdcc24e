"""The tree of drafts: tokens that one step verifies, each after its parent, for one sequence.

The paper's candidates are a tree of G chains, whose form is static. Proposals of several sources are merged into a tree
that has each prefix once, and whose form differs by sequence and step.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

NONE = -1  # equals no token, so it is never accepted
NEVER = 2**24  # the cost of a draft that does not exist; more than that of any path


@jax.tree_util.register_static  # without arrays: masks made of it are constants of the compiled program
@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The static form of L tokens: each continues an earlier one, or the current token."""

    parents: tuple[int, ...]  # [L], -1 for the current token

    @property
    def lineage(self) -> np.ndarray:
        """[L, D] int32: the places of a token's predecessors and its own, by depth, then L."""
        return _lineage(self.parents)

    @property
    def depths(self) -> np.ndarray:
        """[L] int32: places after the current token, from 1."""
        return np.asarray((self.lineage < len(self.parents)).sum(axis=1), np.int32)

    @property
    def mask(self) -> np.ndarray:
        """[L, L] bool, mask[q, k]: k is q or one of its predecessors."""
        return _mask(self.parents)

    @classmethod
    def chains(cls, number: int, length: int) -> Self:
        """Returns the shape of `number` chains of `length` tokens each, one after the other."""
        return cls.join([cls(tuple(range(-1, length - 1)))] * number)

    @classmethod
    def join(cls, shapes: Sequence[Self]) -> Self:
        """Returns the shape of several parts, one after the other."""
        parents: list[int] = []
        for shape in shapes:
            parents += [parent if parent < 0 else parent + len(parents) for parent in shape.parents]
        return cls(tuple(parents))

    def first(self, size: int) -> Self:
        """Returns the shape of the first tokens."""
        return type(self)(self.parents[:size])


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


@functools.cache
def _mask(parents: tuple[int, ...]) -> np.ndarray:
    result = np.asarray((_lineage(parents)[:, :, None] == np.arange(len(parents))).any(axis=1))
    result.flags.writeable = False  # shared
    return result


@flax.struct.dataclass
class Form:
    """The form of M tokens in arrays, with the meaning of `TreeShape`; [B, ...] for a batch."""

    parents: jax.Array  # [M] int32
    depths: jax.Array  # [M] int32
    mask: jax.Array  # [M, M] bool

    def first(self, size: int) -> Self:
        """Returns the form of the first tokens."""
        return dataclasses.replace(
            self,
            parents=self.parents[..., :size],
            depths=self.depths[..., :size],
            mask=self.mask[..., :size, :size],
        )


@flax.struct.dataclass
class Tree:
    """M drafted tokens of one sequence; [B, ...] for a batch. The first ones of a tree are a tree."""

    tokens: jax.Array  # [M] int32, `NONE` where there are fewer
    form: TreeShape | Form
    sources: jax.Array  # [M] int32, of the most promising proposal of each token: a place in `sources.TABLE`
    costs: jax.Array | None  # [M] int32, of the path up to each token (`record.cost`); None for a static form
    CURRENT: ClassVar[int] = -1

    @property
    def size(self) -> jax.Array:
        """[...] int32, the number of tokens."""
        return jnp.sum(self.tokens != NONE, axis=-1, dtype=jnp.int32)

    def first(self, size: int) -> Self:
        """Returns the tree of the first tokens."""
        return dataclasses.replace(
            self,
            tokens=self.tokens[..., :size],
            form=self.form.first(size),
            sources=self.sources[..., :size],
            costs=None if self.costs is None else self.costs[..., :size],
        )

    def up_to(self, size: jax.Array) -> Self:
        """Returns the tree without the tokens after the first `size` [] ones, in arrays of the same shapes."""
        index = jnp.arange(self.tokens.shape[-1], dtype=jnp.int32)
        return dataclasses.replace(self, tokens=jnp.where(index < size, self.tokens, NONE))


@flax.struct.dataclass
class Proposals:
    """The drafts that sources propose for one sequence; [B, ...] for a batch."""

    tokens: jax.Array  # [L] int32, `NONE` where a source has nothing
    kinds: jax.Array  # [L] int32, kinds of the `record.Record`
    lineage: jax.Array  # [L, D] int32, as that of a `TreeShape`

    @property
    def depths(self) -> jax.Array:
        """[..., L] int32: places after the current token, from 1."""
        return jnp.sum(self.lineage < self.tokens.shape[-1], axis=-1, dtype=jnp.int32)

    @classmethod
    def of(cls, shape: TreeShape, tokens: jax.Array, kinds: jax.Array) -> Self:
        """Returns proposals of a static form."""
        return cls(tokens, kinds, jnp.asarray(shape.lineage))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Returns the proposals of several parts, one after the other."""
        total, first, lineage = sum(len(part.tokens) for part in parts), 0, []
        longest = max((part.lineage.shape[1] for part in parts), default=0)
        for part in parts:
            line = jnp.where(part.lineage < len(part.tokens), first + part.lineage, total)
            lineage.append(jnp.pad(line, ((0, 0), (0, longest - line.shape[1])), constant_values=total))
            first += len(part.tokens)
        none = jnp.zeros(0, jnp.int32)
        return cls(
            tokens=jnp.concatenate([none, *(part.tokens for part in parts)]),
            kinds=jnp.concatenate([none, *(part.kinds for part in parts)]),
            lineage=jnp.concatenate([jnp.zeros((0, longest), jnp.int32), *lineage]),
        )


def merge(proposals: Proposals, sources: np.ndarray, costs: jax.Array, size: int) -> Tree:
    """Returns the tree of the `size` most promising tokens, which come first. Proposals with equal prefixes share them.

    A shared token has the lowest cost of its proposals, and a path the sum of those along it.

    Args:
      proposals: L, of all sources.
      sources: [L] int32, the source of each.
      costs: [L] int32, of each token alone, 1 or more: the less probable it is, the higher.
      size: M, at most L.
    """
    tokens, lineage, depths, number = proposals.tokens, proposals.lineage, proposals.depths, len(sources)
    index = jnp.arange(number, dtype=jnp.int32)
    paths = tokens.at[lineage].get(mode="fill", fill_value=0)
    exists = jnp.all(paths >= 0, axis=1)

    same = jnp.all(paths[:, None] == paths[None, :], axis=-1) & (depths[:, None] == depths[None, :])
    same &= exists[:, None] & exists[None, :]
    first = jnp.min(jnp.where(same, index[None, :], number), axis=1)  # the proposal that stands for all equal ones
    best = jnp.argmin(jnp.where(same, costs[None, :], NEVER), axis=1).astype(jnp.int32)
    path_costs = jnp.sum(costs[best].at[lineage].get(mode="fill", fill_value=0), axis=1, dtype=jnp.int32)

    # Predecessors cost less than their successors, so they are chosen before them.
    negative, chosen = jax.lax.top_k(-jnp.where(exists & (first == index), path_costs, NEVER), size)
    is_drafted = negative > -NEVER
    before = first.at[lineage[chosen]].get(mode="fill", fill_value=number)  # [M, D]
    mask = jnp.any(before[:, :, None] == chosen[None, None, :], axis=1) & is_drafted[:, None]
    place = jnp.arange(size, dtype=jnp.int32)
    depth = jnp.where(is_drafted, depths[chosen], 1)
    is_parent = mask & (depth[None, :] == depth[:, None] - 1)
    return Tree(
        tokens=jnp.where(is_drafted, tokens[chosen], NONE),
        form=Form(
            parents=jnp.max(jnp.where(is_parent, place[None, :], Tree.CURRENT), axis=1),
            depths=depth,
            mask=mask | (place[:, None] == place[None, :]),
        ),
        sources=jnp.asarray(sources)[best[chosen]],
        costs=-negative,
    )
