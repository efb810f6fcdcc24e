"""Lookahead parallelism: the tokens of a block, divided among devices (arXiv 2402.02057, section 3.4 and Figure 3).

A device computes some columns of the window and a part of the tree, and besides them the tokens that these attend to:
the current token, row 0 of the window up to its last column, and the predecessors of the part's first draft. So no
device needs another one within a forward pass. Later columns attend to more of row 0: devices with them get fewer
columns and drafts, so that the largest share is small. In depth-first order, every contiguous part of a tree attends to
itself and to the predecessors of its first token alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import LookaheadConfig
from jlade.drafts.tree import Form, TreeShape
from jlade.lookahead import block as blocks


class Range(NamedTuple):
    """The columns and the drafts, in depth-first order, that a device delivers."""

    first_column: int
    end_column: int
    first_draft: int
    end_draft: int


class Tables(NamedTuple):
    """The shares of L devices, as far as they do not depend on the form of the tree: T' tokens and R' outputs of each.

    The window's tokens come first, then the predecessors of the first draft, then the drafts. -1 stands for no token.
    """

    members: np.ndarray  # [L, T'] int32, indices in the window's block
    positions: np.ndarray  # [L, T'] int32, of the window's tokens, relative to the position of the current token
    mask: np.ndarray  # [L, T', T'] bool, of the window's tokens, and of each token to itself and to the current one
    depths: np.ndarray  # [L, T'] int32, of predecessors, from 1
    ranks: np.ndarray  # [L, T'] int32, of drafts, in depth-first order
    first_rank: np.ndarray  # [L] int32, of the drafts
    outputs: np.ndarray  # [L, R'] int32, indices among the members, of the tokens whose logits are used
    rows: np.ndarray  # [L, R'] int32, indices of the window's among the block's outputs
    # Each token and each output of the window, and each draft by its rank: its index on the device that delivers it.
    delivered_tokens: np.ndarray  # [L, tokens of the window] int32, T' on the other devices
    delivered_outputs: np.ndarray  # [L, outputs of the window] int32, R' on the other devices
    delivered_drafts: np.ndarray  # [L, M] int32, T' on the other devices
    delivered_logits: np.ndarray  # [L, M] int32, R' on the other devices


class Share(NamedTuple):
    """The tokens of a block that a device computes: T' tokens, the current one first, and R' outputs."""

    positions: jax.Array  # [T'] int32, relative to the position of the current token
    mask: jax.Array  # [T', T'] bool
    outputs: jax.Array  # [R'] int32, indices among the members, of the tokens whose logits are used
    members: jax.Array  # [T'] int32, indices in the block
    rows: jax.Array  # [R'] int32, indices of the outputs among the block's outputs
    # One device delivers each token and each output of the block: its index there, T' or R' on the other devices.
    delivered_tokens: jax.Array  # [T] int32
    delivered_outputs: jax.Array  # [1 + W + M] int32


_axes: Any = Share
BATCH_AXES: Share = _axes(0, 0, None, 0, 0, 0, 0)  # of `jax.vmap` over sequences, whose outputs have the same indices


def share(setting: LookaheadConfig, form: TreeShape | Form, number: int, device: jax.Array) -> Share:
    """Returns the share of one of several devices, of the block of a setting with a tree.

    Args:
      setting: the sizes of the window and of the tree.
      form: of the tree, for one sequence.
      number: devices, L.
      device: [] int32, 0 to L-1.
    """
    by_device: Any = tables(setting, number)
    own = jax.tree.map(lambda x: jnp.asarray(x)[device], by_device)
    num_drafts, window = len(form.depths), blocks.window(setting.window_size, setting.ngram_size)
    if not num_drafts:
        members = jnp.maximum(own.members, 0)
        delivered = own.delivered_tokens, own.delivered_outputs
        return Share(own.positions, own.mask, own.outputs, members, own.rows, *delivered)
    depths, seen = jnp.asarray(form.depths), jnp.asarray(form.mask)
    rank = _depth_first(form)

    # The places of the members in the tree, `num_drafts` for those of the window and for none.
    order = jnp.zeros(num_drafts, jnp.int32).at[rank].set(jnp.arange(num_drafts, dtype=jnp.int32))

    def placed(ranks: jax.Array) -> jax.Array:
        at = jnp.where(ranks < 0, num_drafts, ranks)
        return order.at[at].get(mode="fill", fill_value=num_drafts)

    precedes = seen.at[placed(own.first_rank)].get(mode="fill", fill_value=False)
    is_member = precedes[None, :] & (depths[None, :] == own.depths[:, None]) & (rank[None, :] < own.first_rank)
    predecessors = jnp.where(jnp.any(is_member, axis=1), jnp.argmax(is_member, axis=1).astype(jnp.int32), num_drafts)
    places = jnp.where(own.depths > 0, predecessors, placed(own.ranks))
    in_tree = places < num_drafts
    # Rows, then columns: XLA's compiler for v6e fails on one gather of both from a constant mask.
    seen_rows = seen.at[places].get(mode="fill", fill_value=False)
    sees = seen_rows.at[:, places].get(mode="fill", fill_value=False)

    drafted = jnp.where(own.rows < 0, places[own.outputs], 0)
    in_outputs = jnp.where(drafted < num_drafts, len(window.outputs) + drafted, 0)
    return Share(
        positions=jnp.where(in_tree, depths.at[places].get(mode="fill", fill_value=0), own.positions),
        mask=own.mask | sees,
        outputs=own.outputs,
        members=jnp.where(in_tree, window.first_draft + places, jnp.maximum(own.members, 0)),
        rows=jnp.where(own.rows < 0, in_outputs, own.rows),
        delivered_tokens=jnp.append(own.delivered_tokens, own.delivered_drafts[rank]),
        delivered_outputs=jnp.append(own.delivered_outputs, own.delivered_logits[rank]),
    )


def _depth_first(form: TreeShape | Form) -> jax.Array:
    """Returns the places [M] of a tree's tokens in depth-first order, with siblings in the order of the tree."""
    parents, mask = jnp.asarray(form.parents), jnp.asarray(form.mask)
    index = jnp.arange(len(parents), dtype=jnp.int32)
    descendants = jnp.sum(mask, axis=0, dtype=jnp.int32)  # with the token itself
    is_earlier = (parents[:, None] == parents[None, :]) & (index[None, :] < index[:, None])
    # A token comes after its predecessors, and after the descendants of their earlier siblings and its own.
    before = 1 + jnp.sum(jnp.where(is_earlier, descendants[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(mask, before[None, :], 0), axis=1, dtype=jnp.int32) - 1


def share_size(setting: LookaheadConfig, number: int) -> tuple[int, int]:
    """Returns T' and R', the tokens and outputs of each share; of the whole block on one device."""
    if number == 1:
        return setting.block_size, 1 + setting.window_size + setting.num_drafted
    by_device = tables(setting, number)
    return by_device.members.shape[1], by_device.outputs.shape[1]


@functools.cache
def tables(setting: LookaheadConfig, number: int) -> Tables:
    """Returns the tables of the shares of a setting on `number` devices L."""
    block = blocks.window(setting.window_size, setting.ngram_size)
    columns = np.arange((setting.ngram_size - 1) * setting.window_size).reshape(setting.ngram_size - 1, -1)
    members, delivered, ranges = [], [], balance(setting, number)
    for device, (first, end, _, _) in enumerate(ranges):
        own = columns[:, first:end].reshape(-1)
        delivered.append(np.append(own[own > 0], [0] if device == 0 else []).astype(int))
        members.append(np.union1d(np.append(own, 0), columns[0, :end]).astype(int))  # sorted: the current token first
    rows = [np.flatnonzero(np.isin(block.outputs, tokens)) for tokens in delivered]
    before = [_num_predecessors(setting, each.first_draft) if _num_drafts(each) else 0 for each in ranges]
    first_drafts = [len(own) + missing for own, missing in zip(members, before, strict=True)]
    size = max(first + _num_drafts(each) for first, each in zip(first_drafts, ranges, strict=True))
    most = max(len(own) + _num_drafts(each) for own, each in zip(rows, ranges, strict=True))

    def full(*shape: int, value: int = -1) -> np.ndarray:
        return np.full((number, *shape), value, np.int32)

    found = Tables(
        members=full(size),
        positions=full(size, value=0),
        mask=np.repeat(np.eye(size, dtype=bool)[None], number, axis=0),
        depths=full(size),
        ranks=full(size),
        first_rank=np.array([each.first_draft for each in ranges], np.int32),
        outputs=full(most, value=0),
        rows=full(most, value=0),
        delivered_tokens=full(len(block.positions), value=size),
        delivered_outputs=full(len(block.outputs), value=most),
        delivered_drafts=full(setting.num_drafted, value=size),
        delivered_logits=full(setting.num_drafted, value=most),
    )
    for device, (own, first, each) in enumerate(zip(members, first_drafts, ranges, strict=True)):
        end, drafts = first + _num_drafts(each), slice(each.first_draft, each.end_draft)
        found.members[device, : len(own)] = own
        found.positions[device, : len(own)] = block.positions[own]
        found.mask[device, : len(own), : len(own)] = block.mask[np.ix_(own, own)]
        found.mask[device, len(own) :, 0] = True
        found.depths[device, len(own) : first] = np.arange(1, first - len(own) + 1)
        found.ranks[device, first:end] = np.arange(each.first_draft, each.end_draft)
        place = np.zeros(len(block.positions), int)
        place[own] = np.arange(len(own))
        num_rows = len(rows[device])
        found.outputs[device, :num_rows] = place[block.outputs[rows[device]]]
        found.outputs[device, num_rows : num_rows + _num_drafts(each)] = np.arange(first, end)
        found.rows[device, :num_rows] = rows[device]
        found.rows[device, num_rows : num_rows + _num_drafts(each)] = -1
        found.delivered_tokens[device, delivered[device]] = place[delivered[device]]
        found.delivered_outputs[device, rows[device]] = np.arange(num_rows)
        found.delivered_drafts[device, drafts] = np.arange(first, end)
        found.delivered_logits[device, drafts] = num_rows + np.arange(_num_drafts(each))
    return found


@functools.cache
def balance(setting: LookaheadConfig, number: int) -> list[Range]:
    """Returns the ranges of each device, so that the largest share is small."""
    rows, unit = setting.ngram_size - 1, 1 if setting.tree_size is not None else setting.ngram_size - 1
    for most in range(1, setting.block_size + 2):
        columns, drafts, found = setting.window_size, setting.num_drafted, list[Range]()
        for _ in range(number):
            # `columns` tokens of row 0, and the other rows of the last of them.
            taken = columns if rows == 1 else min(columns, max(0, most - columns) // (rows - 1))
            used = max(1, columns + (rows - 1) * taken) if taken else 1
            if used > most:
                break
            tried = min(drafts, most - used) // unit * unit
            if tried < drafts:  # the part does not begin with the first draft
                room = most - used - _num_predecessors(setting, drafts)
                tried = max(0, room) // unit * unit
            own = (columns - taken, columns) if taken else (0, 0)
            found.append(Range(*own, drafts - tried, drafts))
            columns, drafts = columns - taken, drafts - tried
        else:
            if columns == drafts == 0:
                return found[::-1]
    raise AssertionError("one device can compute the whole block")


def _num_predecessors(setting: LookaheadConfig, first_draft: int) -> int:
    """Returns the most predecessors of the first draft of a part: parts of chains begin with a chain."""
    return 0 if setting.tree_size is None else min(setting.max_accepted - 2, first_draft)


def _num_drafts(each: Range) -> int:
    return each.end_draft - each.first_draft
