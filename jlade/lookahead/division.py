"""Lookahead parallelism: the tokens of a block, divided among devices (arXiv 2402.02057, section 3.4 and Figure 3).

A device computes some columns of the window and a part of the tree, and besides them the tokens that these attend to:
the current token, row 0 of the window up to its last column, and the predecessors of the part's first draft. So no
device needs another one within a forward pass. Later columns attend to more of row 0: devices with them get fewer
columns, so that the largest share is small. In depth-first order, every contiguous part of a tree attends to itself and
to the predecessors of its first token alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import LookaheadConfig
from jlade.drafts.tree import Form, Shape
from jlade.lookahead import block as blocks
from jlade.lookahead.block import Array


class Columns(NamedTuple):
    """The window's tokens that a device computes: T' of T tokens, R' of R outputs. [L, ...] for L devices.

    These numbers are equal on all devices: some compute the current token several times, unseen by the other tokens.
    """

    members: Array  # [T'] int32, indices in the window's block; the first is the current token
    positions: Array  # [T'] int32, relative to the position of the current token
    mask: Array  # [T', T'] bool
    outputs: Array  # [R'] int32, indices among the members, of the tokens whose logits are used
    rows: Array  # [R'] int32, indices of the same tokens in the block's outputs
    # One device delivers each token and each output of the block: its index there, -1 on the other devices.
    delivered_tokens: Array  # [T] int32
    delivered_outputs: Array  # [R] int32


class Part(NamedTuple):
    """The sizes of the parts of a tree: part i has the drafts from i `size` to (i+1) `size` in depth-first order."""

    size: int
    predecessors: int  # most of the first draft of a part


class Share(NamedTuple):
    """The tokens of a block that a device computes: T' tokens, the window's first, and R' outputs."""

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


def share(setting: LookaheadConfig, form: Shape | Form, number: int, device: jax.Array) -> Share:
    """Returns the share of one of several devices, of the block of a setting with a tree.

    Args:
      setting: the sizes of the window.
      form: of the tree, for one sequence.
      number: devices, L.
      device: [] int32, 0 to L-1.
    """
    of_devices = columns(setting.window_size, setting.ngram_size, number)
    window = jax.tree.map(lambda x: jnp.asarray(x)[device], of_devices)
    size, num_predecessors = part(setting, number)
    num_drafts, first_draft = len(form.depths), len(window.delivered_tokens)
    num_tokens, num_outputs = len(window.members), len(window.outputs)
    depths, mask = jnp.asarray(form.depths), jnp.asarray(form.mask)

    # Of the tree: the predecessors of the part's first draft, then the part. A place of `num_drafts` stands for none.
    rank = _depth_first(form)
    order = jnp.zeros(num_drafts, jnp.int32).at[rank].set(jnp.arange(num_drafts, dtype=jnp.int32))
    own = order.at[device * size + jnp.arange(size, dtype=jnp.int32)].get(mode="fill", fill_value=num_drafts)
    places = own
    if num_predecessors:
        depth = jnp.arange(1, num_predecessors + 1, dtype=jnp.int32)
        precedes = mask.at[own[0]].get(mode="fill", fill_value=False) & (rank < device * size)
        is_at = precedes[None, :] & (depths[None, :] == depth[:, None])
        before = jnp.where(jnp.any(is_at, axis=1), jnp.argmax(is_at, axis=1).astype(jnp.int32), num_drafts)
        places = jnp.concatenate([before, own])
    seen = mask.at[places[:, None], places[None, :]].get(mode="fill", fill_value=False)
    seen |= np.eye(len(places), dtype=bool)
    to_window = np.zeros((len(places), num_tokens), bool)
    to_window[:, 0] = True  # all attend to the current token

    in_part = rank - device * size
    is_own = (in_part >= 0) & (in_part < size)
    all_tokens, all_outputs = num_tokens + len(places), num_outputs + size
    return Share(
        members=jnp.append(window.members, jnp.where(places < num_drafts, first_draft + places, 0)),
        positions=jnp.append(window.positions, depths.at[places].get(mode="fill", fill_value=0)),
        mask=jnp.concatenate(
            [
                jnp.pad(window.mask, ((0, 0), (0, len(places)))),
                jnp.concatenate([to_window, seen], axis=1),
            ]
        ),
        outputs=jnp.append(window.outputs, num_tokens + num_predecessors + np.arange(size, dtype=np.int32)),
        rows=jnp.append(window.rows, jnp.where(own < num_drafts, len(window.delivered_outputs) + own, 0)),
        delivered_tokens=jnp.append(
            jnp.where(window.delivered_tokens < 0, all_tokens, window.delivered_tokens),
            jnp.where(is_own, num_tokens + num_predecessors + in_part, all_tokens),
        ),
        delivered_outputs=jnp.append(
            jnp.where(window.delivered_outputs < 0, all_outputs, window.delivered_outputs),
            jnp.where(is_own, num_outputs + in_part, all_outputs),
        ),
    )


def _depth_first(form: Shape | Form) -> jax.Array:
    """Returns the places [M] of a tree's tokens in depth-first order, with siblings in the order of the tree."""
    parents, mask = jnp.asarray(form.parents), jnp.asarray(form.mask)
    index = jnp.arange(len(parents), dtype=jnp.int32)
    descendants = jnp.sum(mask, axis=0, dtype=jnp.int32)  # with the token itself
    is_earlier = (parents[:, None] == parents[None, :]) & (index[None, :] < index[:, None])
    # A token comes after its predecessors, and after the descendants of their earlier siblings and its own.
    before = 1 + jnp.sum(jnp.where(is_earlier, descendants[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(mask, before[None, :], 0), axis=1, dtype=jnp.int32) - 1


def part(setting: LookaheadConfig, number: int) -> Part:
    """Returns the sizes of the parts of the drafts of a setting on `number` devices."""
    size = -(-setting.num_drafted // number)
    if setting.tree_size is not None or not size:
        return Part(size, max(0, min(setting.max_accepted - 2, setting.num_drafted - size)))
    length = setting.ngram_size - 1  # of a chain: parts that begin with a chain have no predecessors
    whole = -(-size // length) * length
    within = max((first % length for first in range(size, setting.num_drafted, size)), default=0)
    return min(Part(whole, 0), Part(size, within), key=sum)


def share_size(setting: LookaheadConfig, number: int) -> tuple[int, int]:
    """Returns T' and R', the tokens and outputs of each share; of the whole block on one device."""
    if number == 1:
        return setting.block_size, 1 + setting.window_size + setting.num_drafted
    of_devices, of_tree = columns(setting.window_size, setting.ngram_size, number), part(setting, number)
    return of_devices.members.shape[1] + sum(of_tree), of_devices.outputs.shape[1] + of_tree.size


@functools.cache
def columns(window_size: int, ngram_size: int, number: int) -> Columns:
    """Returns the shares [L, ...] of the window of W and N on `number` devices L."""
    block = blocks.window(window_size, ngram_size)
    window = np.arange((ngram_size - 1) * window_size).reshape(ngram_size - 1, window_size)
    members, delivered = [], []
    for begin, end in balance(window_size, ngram_size, number):
        own = window[:, begin:end].reshape(-1)
        delivered.append(own[own > 0])
        members.append(np.union1d(np.append(own, 0), window[0, :end]))
    delivered[0] = np.append(delivered[0], 0)
    rows = [np.flatnonzero(np.isin(block.outputs, tokens)) for tokens in delivered]
    size, most = max(map(len, members)), max(map(len, rows))
    shares = [_columns(block, *each, size, most) for each in zip(members, delivered, rows, strict=True)]
    return Columns(*(np.stack(arrays) for arrays in zip(*shares, strict=True)))


@functools.cache
def balance(window_size: int, ngram_size: int, number: int) -> list[tuple[int, int]]:
    """Returns the columns of each device, (first, end), so that the largest share is small."""
    rows = ngram_size - 1
    tokens = rows * window_size
    for most in range(max(1, tokens // number), tokens + 2):
        left, found = window_size, []
        for _ in range(number):
            # `left` tokens of row 0, and the other rows of the last columns.
            taken = left if rows == 1 else min(left, max(0, most - left) // (rows - 1))
            used = max(1, left + (rows - 1) * taken) if taken else 1
            found.append((left - taken, left) if taken else (0, 0))
            left -= taken
            if used > most:
                break
        else:
            if left == 0:
                return found[::-1]
    raise AssertionError("one device can compute the whole window")


def _columns(
    block: blocks.Block, members: np.ndarray, delivered: np.ndarray, rows: np.ndarray, size: int, most: int
) -> Columns:
    """Returns the columns of a device, with `size` members and `most` outputs."""
    mask = np.eye(size, dtype=bool)
    mask[: len(members), : len(members)] = block.mask[np.ix_(members, members)]
    place = np.full(len(block.positions), -1)
    place[members] = np.arange(len(members))  # sorted, so the current token is the first
    delivered_tokens, delivered_outputs = np.full(len(place), -1), np.full(len(block.outputs), -1)
    delivered_tokens[delivered] = place[delivered]
    delivered_outputs[rows] = np.arange(len(rows))
    members = np.pad(members, (0, size - len(members)))
    rows = np.pad(rows, (0, most - len(rows)))  # the first output is the current token
    found = Columns(
        members, block.positions[members], mask, place[block.outputs[rows]], rows, delivered_tokens, delivered_outputs
    )
    return Columns(*(x if x.dtype == bool else x.astype(np.int32) for x in found))
