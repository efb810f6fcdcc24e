"""Tokens per step of the paper's settings: the paper's formula, and measurements with the demo model."""

from typing import Literal

from jlade.config import LookaheadConfig
from jlade.lookahead import names

Source = Literal["paper", "demo"]

# Fitted to LLaMA-2-7B-Chat on MT-Bench (arXiv 2402.02057, section 4.1): the probability that a guess is right, and the
# number of steps of which one finds good candidates.
ACCEPTANCE = 0.425
STEPS = 3.106

# Means over 26 prompts, 256 greedy tokens each, with n-grams of the prompt: benchmarks/results/compression_grid.json,
# and wide_blocks.json for the largest three.
# The demo model falls into loops, which are easy to guess.
DEMO = {
    (4, 3, 2): 2.53,
    (5, 4, 5): 3.30,
    (7, 5, 7): 3.88,
    (7, 7, 7): 4.84,
    (15, 5, 15): 3.99,
    (20, 7, 20): 4.96,
    (30, 5, 30): 4.10,
    (60, 5, 60): 4.17,
    (120, 5, 120): 4.23,
}


def paper(setting: LookaheadConfig) -> float:
    """Returns the tokens per step that the paper's formula predicts.

    One step in `STEPS` accepts N - sum((1 - ACCEPTANCE**i)**b for i in 1..N-1) tokens, with b candidates; the others
    accept one. The formula is for W = G = b. Otherwise b is the smaller of both, so prompt lookup, W = 0, counts as
    plain decoding.

    Raises:
      ValueError: the setting has a tree.
    """
    if setting.tree_size is not None:
        raise ValueError(f"compression must be a number for a setting with a tree, got {names.name(setting)}")
    guesses, length = min(setting.window_size, setting.guess_set_size), setting.ngram_size - 1
    missed = sum((1 - ACCEPTANCE**i) ** guesses for i in range(1, length + 1))
    return (STEPS + length - missed) / STEPS


def demo(setting: LookaheadConfig) -> float:
    """Returns the measured tokens per step of the demo model.

    Raises:
      ValueError: the setting was not measured.
    """
    sizes = setting.window_size, setting.ngram_size, setting.guess_set_size
    if setting.block_size == 1:
        return 1.0
    if setting.tree_size is not None or sizes not in DEMO:
        known = "; ".join(", ".join(map(str, sizes)) for sizes in DEMO)
        raise ValueError(f'compression="demo" was measured at {known}; got {names.label(setting)}')
    return DEMO[sizes]
