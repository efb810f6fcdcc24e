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


class Part(NamedTuple):
    """The columns and the drafts, in depth-first order, that a device delivers."""

    first_column: int
    end_column: int
    first_draft: int
    end_draft: int

    @property
    def num_drafts(self) -> int:
        """How many drafts the device delivers."""
        return self.end_draft - self.first_draft


class ShareTables(NamedTuple):
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


# Of `jax.vmap` over sequences, whose outputs have the same indices.
BATCH_AXES = Share(0, 0, None, 0, 0, 0, 0)  # type: ignore[arg-type]  # axes, not arrays


def share(setting: LookaheadConfig, form: TreeShape | Form, num_devices: int, device: jax.Array) -> Share:
    """Returns the share of one of several devices, of the block of a setting with a tree.

    Args:
      setting: the sizes of the window and of the tree.
      form: of the tree, for one sequence.
      num_devices: L.
      device: [] int32, 0 to L-1.
    """
    of_devices: Any = tables(setting, num_devices)
    of_window = jax.tree.map(lambda table: jnp.asarray(table)[device], of_devices)
    num_drafts, window = len(form.depths), blocks.window(setting.window_size, setting.ngram_size)
    if not num_drafts:
        return Share(
            positions=of_window.positions,
            mask=of_window.mask,
            outputs=of_window.outputs,
            members=jnp.maximum(of_window.members, 0),
            rows=of_window.rows,
            delivered_tokens=of_window.delivered_tokens,
            delivered_outputs=of_window.delivered_outputs,
        )
    depths, seen = jnp.asarray(form.depths), jnp.asarray(form.mask)
    rank = _depth_first(form)

    # The index of each member in the tree, `num_drafts` for the window's tokens and for none.
    draft_at = jnp.zeros(num_drafts, jnp.int32).at[rank].set(jnp.arange(num_drafts, dtype=jnp.int32))

    def drafts_of(ranks: jax.Array) -> jax.Array:
        ranks = jnp.where(ranks < 0, num_drafts, ranks)
        return draft_at.at[ranks].get(mode="fill", fill_value=num_drafts)

    first_rank = of_window.first_rank
    precedes = seen.at[drafts_of(first_rank)].get(mode="fill", fill_value=False)
    is_member = precedes[None, :] & (depths[None, :] == of_window.depths[:, None]) & (rank[None, :] < first_rank)
    predecessors = jnp.where(jnp.any(is_member, axis=1), jnp.argmax(is_member, axis=1).astype(jnp.int32), num_drafts)
    drafts = jnp.where(of_window.depths > 0, predecessors, drafts_of(of_window.ranks))
    in_tree = drafts < num_drafts
    # Rows, then columns: XLA's compiler for v6e fails on one gather of both from a constant mask.
    seen_rows = seen.at[drafts].get(mode="fill", fill_value=False)
    sees = seen_rows.at[:, drafts].get(mode="fill", fill_value=False)

    output_drafts = jnp.where(of_window.rows < 0, drafts[of_window.outputs], 0)
    draft_rows = jnp.where(output_drafts < num_drafts, len(window.outputs) + output_drafts, 0)
    return Share(
        positions=jnp.where(in_tree, depths.at[drafts].get(mode="fill", fill_value=0), of_window.positions),
        mask=of_window.mask | sees,
        outputs=of_window.outputs,
        members=jnp.where(in_tree, window.first_draft + drafts, jnp.maximum(of_window.members, 0)),
        rows=jnp.where(of_window.rows < 0, draft_rows, of_window.rows),
        delivered_tokens=jnp.append(of_window.delivered_tokens, of_window.delivered_drafts[rank]),
        delivered_outputs=jnp.append(of_window.delivered_outputs, of_window.delivered_logits[rank]),
    )


def _depth_first(form: TreeShape | Form) -> jax.Array:
    """Returns the rank [M] of each token of a tree in depth-first order, with siblings in the order of the tree."""
    parents, mask = jnp.asarray(form.parents), jnp.asarray(form.mask)
    index = jnp.arange(len(parents), dtype=jnp.int32)
    descendants = jnp.sum(mask, axis=0, dtype=jnp.int32)  # with the token itself
    is_earlier = (parents[:, None] == parents[None, :]) & (index[None, :] < index[:, None])
    # A token comes after its predecessors, and after the descendants of their earlier siblings and its own.
    before = 1 + jnp.sum(jnp.where(is_earlier, descendants[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(mask, before[None, :], 0), axis=1, dtype=jnp.int32) - 1


def share_size(setting: LookaheadConfig, num_devices: int) -> tuple[int, int]:
    """Returns T' and R', the tokens and outputs of each share; of the whole block on one device."""
    if num_devices == 1:
        return setting.block_size, 1 + setting.window_size + setting.num_drafted
    of_devices = tables(setting, num_devices)
    return of_devices.members.shape[1], of_devices.outputs.shape[1]


@functools.cache
def tables(setting: LookaheadConfig, num_devices: int) -> ShareTables:
    """Returns the tables of the shares of a setting on L devices."""
    block = blocks.window(setting.window_size, setting.ngram_size)
    columns = np.arange((setting.ngram_size - 1) * setting.window_size).reshape(setting.ngram_size - 1, -1)
    members, delivered, parts = [], [], balance(setting, num_devices)
    for device, part in enumerate(parts):
        tokens = columns[:, part.first_column : part.end_column].reshape(-1)
        delivered.append(np.append(tokens[tokens > 0], [0] if device == 0 else []).astype(int))
        # Sorted: the current token first.
        members.append(np.union1d(np.append(tokens, 0), columns[0, : part.end_column]).astype(int))
    rows = [np.flatnonzero(np.isin(block.outputs, tokens)) for tokens in delivered]
    predecessors = [_max_predecessors(setting, part.first_draft) if part.num_drafts else 0 for part in parts]
    first_drafts = [len(tokens) + missing for tokens, missing in zip(members, predecessors, strict=True)]
    size = max(first + part.num_drafts for first, part in zip(first_drafts, parts, strict=True))
    num_outputs = max(len(of_window) + part.num_drafts for of_window, part in zip(rows, parts, strict=True))

    def full(*shape: int, value: int = -1) -> np.ndarray:
        return np.full((num_devices, *shape), value, np.int32)

    result = ShareTables(
        members=full(size),
        positions=full(size, value=0),
        mask=np.repeat(np.eye(size, dtype=bool)[None], num_devices, axis=0),
        depths=full(size),
        ranks=full(size),
        first_rank=np.array([part.first_draft for part in parts], np.int32),
        outputs=full(num_outputs, value=0),
        rows=full(num_outputs, value=0),
        delivered_tokens=full(len(block.positions), value=size),
        delivered_outputs=full(len(block.outputs), value=num_outputs),
        delivered_drafts=full(setting.num_drafted, value=size),
        delivered_logits=full(setting.num_drafted, value=num_outputs),
    )
    for device, (tokens, first, part) in enumerate(zip(members, first_drafts, parts, strict=True)):
        num_tokens, num_rows, end = len(tokens), len(rows[device]), first + part.num_drafts
        drafts = slice(part.first_draft, part.end_draft)
        result.members[device, :num_tokens] = tokens
        result.positions[device, :num_tokens] = block.positions[tokens]
        result.mask[device, :num_tokens, :num_tokens] = block.mask[np.ix_(tokens, tokens)]
        result.mask[device, num_tokens:, 0] = True
        result.depths[device, num_tokens:first] = np.arange(1, first - num_tokens + 1)
        result.ranks[device, first:end] = np.arange(part.first_draft, part.end_draft)
        member_at = np.zeros(len(block.positions), int)
        member_at[tokens] = np.arange(num_tokens)
        result.outputs[device, :num_rows] = member_at[block.outputs[rows[device]]]
        result.outputs[device, num_rows : num_rows + part.num_drafts] = np.arange(first, end)
        result.rows[device, :num_rows] = rows[device]
        result.rows[device, num_rows : num_rows + part.num_drafts] = -1
        result.delivered_tokens[device, delivered[device]] = member_at[delivered[device]]
        result.delivered_outputs[device, rows[device]] = np.arange(num_rows)
        result.delivered_drafts[device, drafts] = np.arange(first, end)
        result.delivered_logits[device, drafts] = num_rows + np.arange(part.num_drafts)
    return result


@functools.cache
def balance(setting: LookaheadConfig, num_devices: int) -> list[Part]:
    """Returns the part of each device, so that the largest share is small."""
    rows, unit = setting.ngram_size - 1, 1 if setting.has_tree else setting.ngram_size - 1
    for max_size in range(1, setting.block_size + 2):
        columns, drafts, parts = setting.window_size, setting.num_drafted, list[Part]()  # left, and from the last on
        for _ in range(num_devices):
            # `columns` tokens of row 0, and the other rows of the last of them.
            num_columns = columns if rows == 1 else min(columns, max(0, max_size - columns) // (rows - 1))
            size = max(1, columns + (rows - 1) * num_columns) if num_columns else 1
            if size > max_size:
                break
            num_drafts = min(drafts, max_size - size) // unit * unit
            if num_drafts < drafts:  # the part does not begin with the first draft
                room = max_size - size - _max_predecessors(setting, drafts)
                num_drafts = max(0, room) // unit * unit
            own_columns = (columns - num_columns, columns) if num_columns else (0, 0)
            parts.append(Part(*own_columns, drafts - num_drafts, drafts))
            columns, drafts = columns - num_columns, drafts - num_drafts
        else:
            if columns == drafts == 0:
                return parts[::-1]
    raise AssertionError("one device can compute the whole block")


def _max_predecessors(setting: LookaheadConfig, first_draft: int) -> int:
    """Returns the most predecessors of the first draft of a part: parts of chains begin with a chain."""
    return min(setting.max_accepted - 2, first_draft) if setting.has_tree else 0
