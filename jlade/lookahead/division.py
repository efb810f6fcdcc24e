"""Lookahead parallelism: the tokens of a block, divided among devices (arXiv 2402.02057, section 3.4 and Figure 3).

A device computes some columns of the window and some candidates, and besides them the tokens that these see: the
current token, and row 0 of the window up to its last column. So no device needs another one within a forward pass.
Later columns need more of row 0: devices with them get fewer columns, so that the largest share is small.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from jlade.config import LookaheadConfig
from jlade.lookahead import block as blocks

Array = np.ndarray | jax.Array


class Share(NamedTuple):
    """The tokens of a block that a device computes: T' tokens and R' outputs. [L, ...] for L devices.

    These numbers are equal on all devices: some compute the current token several times, unseen by the other tokens.
    """

    members: Array  # [T'] int32, indices in the block
    positions: Array  # [T'] int32, relative to the position of the current token
    mask: Array  # [T', T'] bool
    outputs: Array  # [R'] int32, indices among the members, of the tokens whose logits are used
    rows: Array  # [R'] int32, indices of the same tokens in the block's outputs
    # One device delivers each token and each output of the block: its index there, T' or R' on the other devices.
    delivered_tokens: Array  # [T] int32
    delivered_outputs: Array  # [R] int32


@functools.cache
def divide(window_size: int, ngram_size: int, guess_set_size: int, number: int) -> Share:
    """Returns the shares [L, ...] of the block of W, N, G on `number` devices L."""
    block = blocks.build(window_size, ngram_size, guess_set_size)
    window = np.arange((ngram_size - 1) * window_size).reshape(ngram_size - 1, window_size)
    members, delivered = [], []
    for begin, end, first, last in balance(window_size, ngram_size, guess_set_size, number):
        own = np.concatenate([window[:, begin:end].reshape(-1), block.candidates[first:last].reshape(-1)])
        delivered.append(own[own > 0])
        members.append(np.union1d(np.append(own, 0), window[0, :end]))
    delivered[0] = np.append(delivered[0], 0)
    rows = [np.flatnonzero(np.isin(block.outputs, tokens)) for tokens in delivered]
    size, most = max(map(len, members)), max(map(len, rows))
    shares = [_share(block, *each, size, most) for each in zip(members, delivered, rows, strict=True)]
    return Share(*(np.stack(arrays) for arrays in zip(*shares, strict=True)))


def share_size(setting: LookaheadConfig, number: int) -> tuple[int, int]:
    """Returns T' and R', the tokens and outputs of each share of `divide`; of the whole block on one device."""
    if number == 1:
        return setting.block_size, 1 + setting.window_size + setting.num_drafted
    window_size, rows, tokens, outputs = setting.window_size, setting.ngram_size - 1, list[int](), list[int]()
    ranges = balance(window_size, setting.ngram_size, setting.guess_set_size, number)
    for index, (begin, end, first, last) in enumerate(ranges):
        columns, tried = end - begin, rows * (last - first)
        tokens.append(max(1, end) + (rows - 1) * columns + tried)
        outputs.append(columns + tried + (index == 0))
        if rows == 1 and window_size:  # the first device delivers the current token, and it is the first column's too
            outputs[-1] += (index == 0) - (begin == 0 < end)
    return max(tokens), max(outputs)


@functools.cache
def balance(window_size: int, ngram_size: int, guess_set_size: int, number: int) -> list[tuple[int, int, int, int]]:
    """Returns columns and candidates of each device, (first, end, first, end), so that the largest share is small."""
    rows = ngram_size - 1
    tokens = rows * (window_size + guess_set_size)
    for most in range(max(1, tokens // number), tokens + 2):
        columns, guesses, found = window_size, guess_set_size, []
        for _ in range(number):
            # `columns` of row 0, and the other rows of the last of them.
            taken = columns if rows == 1 else min(columns, max(0, most - columns) // (rows - 1))
            used = max(1, columns + (rows - 1) * taken) if taken else 1
            tried = min(guesses, (most - used) // rows) if most >= used else 0
            begin, end = (columns - taken, columns) if taken else (0, 0)
            found.append((begin, end, guesses - tried, guesses))
            columns, guesses = columns - taken, guesses - tried
            if used > most:
                break
        else:
            if columns == guesses == 0:
                return found[::-1]
    raise AssertionError("one device can compute the whole block")


def _share(
    block: blocks.Block, members: np.ndarray, delivered: np.ndarray, rows: np.ndarray, size: int, most: int
) -> Share:
    """Returns the share of a device, with `size` members and `most` outputs."""
    mask = np.eye(size, dtype=bool)
    mask[: len(members), : len(members)] = block.mask[np.ix_(members, members)]
    place = np.full(len(block.positions), size)
    place[members] = np.arange(len(members))  # sorted, so the current token is the first
    delivered_tokens, delivered_outputs = np.full(len(place), size), np.full(len(block.outputs), most)
    delivered_tokens[delivered] = place[delivered]
    delivered_outputs[rows] = np.arange(len(rows))
    members = np.pad(members, (0, size - len(members)))
    rows = np.pad(rows, (0, most - len(rows)))  # the first output is the current token
    share = Share(
        members, block.positions[members], mask, place[block.outputs[rows]], rows, delivered_tokens, delivered_outputs
    )
    return Share(*(x if x.dtype == bool else x.astype(np.int32) for x in share))
