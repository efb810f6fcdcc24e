"""States with a count, and the moves between them: one int32 each, in NumPy and on a device.

A state of an automaton may be in a loop, such as the characters of a string that has a `maxLength`. A text in such a
state has a count as well: of the iterations that it has begun. So the loop takes the states of one iteration, not of
all. A move is what a byte or a token does: the state after it, the iterations that it begins, and whether it leaves the
loop of its first state. Outside of loops the count is 0, and a move is the number of the state after it.

    bits of a state:   0 to 14 its number, 15 to 30 the count
    bits of a move:    0 to 14 the number after it, 15 to 22 iterations that it begins in the loop after it,
                       23 to 29 those that it begins before it leaves its first loop, 30 whether it leaves that one
"""

from typing import Any

import numpy as np

DEAD = -1  # no move, and the state after it
_COUNT, _BEFORE, _LEAVES = 15, 23, 30  # first bits
STATE = 2**_COUNT - 1
MAX_COUNT = 2**16 - 1
UNBOUNDED = 2**17  # most iterations of states outside of loops, more than any count
LONGEST = 2 ** (_LEAVES - _BEFORE)  # bytes of a token, so that the iterations that it begins have a place
Array = Any  # int32, of NumPy or JAX, or an int


def move(state: Array, begun: Array = 0, leaves: bool = False) -> Array:
    """Returns the move of a byte, which begins some iterations after it has left a loop or none."""
    return state | begun << _COUNT | leaves << _LEAVES


def without_bounds(number: int) -> np.ndarray:
    """Returns the bounds of some states outside of loops [number, 2]."""
    return np.tile(np.array([0, UNBOUNDED], np.int32), (number, 1))


def state_after(moves: np.ndarray) -> np.ndarray:
    """Returns the numbers of the states after moves, `DEAD` after none."""
    return np.where(moves == DEAD, DEAD, moves & STATE)


def count(state: Array) -> Array:
    """Returns the count of a state."""
    return state >> _COUNT


def after(state: Array, move: Array) -> Array:
    """Returns the state after a move that is allowed; after another one the count may be any."""
    kept = (state & ~STATE) * (1 - _leaves(move))
    return (move & 2**_BEFORE - 1) + kept & 2**31 - 1


def is_allowed(state: Array, move: Array, minimum: Array, maximum: Array) -> Array:
    """Whether a text may go on by a move from its state, whose loop has `minimum` to `maximum` iterations."""
    leaves = _leaves(move)
    number = count(state) + leaves * _before(move) + (1 - leaves) * begun(move)
    return (move != DEAD) & (number <= maximum) & ((leaves == 0) | (number >= minimum))


def composed(first: np.ndarray, second: np.ndarray, counts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Returns pairs of moves as one, `DEAD` where the second one may never follow.

    Args:
      first: moves [n].
      second: moves of single bytes from the states after them [..., n].
      counts: whether the state before each pair is in a loop [n] bool.
      bounds: the least and most iterations of the loop of the state between [n, 2].
    """
    minimum, maximum = bounds.T
    has_left, leaves = _leaves(first), _leaves(second)
    number = begun(first) + (1 - leaves) * begun(second)  # in the loop between
    is_known = (has_left == 1) | ~counts  # all iterations of that loop are those of the pair
    is_possible = (second != DEAD) & (number <= maximum) & ((leaves == 0) | ~is_known | (begun(first) >= minimum))
    before = np.where(has_left == 1, _before(first), number)
    of_first_loop = np.where(counts & (has_left | leaves == 1), before << _BEFORE | 1 << _LEAVES, 0)
    pair = second & STATE | np.where(leaves == 1, begun(second), number) << _COUNT | of_first_loop
    return np.where(is_possible, pair, DEAD)


def begun(move: Array) -> Array:
    """Returns the iterations that a move begins in the loop after it."""
    return move >> _COUNT & 2 ** (_BEFORE - _COUNT) - 1


def _before(move: Array) -> Array:
    """Returns the iterations that a move begins before it leaves its first loop."""
    return move >> _BEFORE & 2 ** (_LEAVES - _BEFORE) - 1


def _leaves(move: Array) -> Array:
    """Returns 1 for a move that leaves its first loop, else 0."""
    return move >> _LEAVES & 1
