"""Tokens per step of settings: measured with two models, and the formula of the paper."""

from typing import Literal, get_args

from jlade.config import LookaheadConfig
from jlade.lookahead import names

Source = Literal["smollm2", "demo", "paper"]
SOURCES: tuple[Source, ...] = get_args(Source)

# Fitted to LLaMA-2-7B-Chat on MT-Bench (arXiv 2402.02057, section 4.1): the probability that a guess is right, and the
# number of steps of which one finds good candidates.
ACCEPTANCE = 0.425
STEPS = 3.106

# Means over 12 prompts of five tasks with SmolLM2-135M-Instruct, 64 greedy tokens each:
# benchmarks/results/bench_smollm2_sizes.json.
SMOLLM2 = {
    "15,5,15": 1.82,
    "30,5,30": 1.88,
    "60,5,60": 1.92,
    "10,5,10:tree=80": 2.77,
    "tree=7": 1.70,
    "tree=15": 1.92,
    "tree=31": 2.14,
    "tree=63": 2.49,
    "tree=119": 2.69,
    "tree=239": 2.93,
    "tree=479": 3.17,
    "tree=959": 3.35,
}

# Means over 26 prompts, 256 greedy tokens each, with n-grams of the prompt: benchmarks/results/compression_grid.json,
# and wide_blocks.json for the largest three.
# The demo model falls into loops, which are easy to guess.
DEMO = {
    "4,3,2": 2.53,
    "5,4,5": 3.30,
    "7,5,7": 3.88,
    "7,7,7": 4.84,
    "15,5,15": 3.99,
    "20,7,20": 4.96,
    "30,5,30": 4.10,
    "60,5,60": 4.17,
    "120,5,120": 4.23,
}
MEASURED = {"smollm2": SMOLLM2, "demo": DEMO}


def measured(source: Source) -> dict[LookaheadConfig, float]:
    """Returns the tokens per step of the settings that were measured with a model."""
    return {names.parse(name): tokens for name, tokens in MEASURED[source].items()}


def paper(setting: LookaheadConfig) -> float:
    """Returns the tokens per step that the paper's formula predicts.

    One step in `STEPS` accepts N - sum((1 - ACCEPTANCE**i)**b for i in 1..N-1) tokens, with b candidates; the others
    accept one. The formula is for W = G = b. Otherwise b is the smaller of both, so prompt lookup, W = 0, counts as
    plain decoding.

    Raises:
      ValueError: the setting has a tree.
    """
    if setting.tree_size is not None:
        raise ValueError(f'compression="paper" has no formula for a tree, got {names.name(setting)}: give a number')
    guesses, length = min(setting.window_size, setting.guess_set_size), setting.ngram_size - 1
    missed = sum((1 - ACCEPTANCE**i) ** guesses for i in range(1, length + 1))
    return (STEPS + length - missed) / STEPS


def of(setting: LookaheadConfig, source: Source) -> float:
    """Returns the tokens per step of a setting.

    Raises:
      ValueError: the setting was not measured with this model, or the formula has no place for its tree.
    """
    if setting.block_size == 1:
        return 1.0
    if source == "paper":
        return paper(setting)
    known = measured(source)
    if setting not in known:
        shown = "; ".join(map(names.label, known))
        raise ValueError(f'compression="{source}" was measured at {shown}; got {names.label(setting)}: give a number')
    return known[setting]
