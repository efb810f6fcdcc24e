"""Tokens per step of settings: measured with SmolLM2, and the formula of the paper."""

from typing import Literal, get_args

from jlade.config import LookaheadConfig
from jlade.lookahead import names

Source = Literal["smollm2", "paper"]
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
    "10,5,10:tree=80": 3.02,
    "tree=7": 1.89,
    "tree=15": 2.16,
    "tree=31": 2.45,
    "tree=63": 2.81,
    "tree=119": 3.04,
    "tree=239": 3.41,
    "tree=479": 3.69,
    "tree=959": 4.04,
}


def measured() -> dict[LookaheadConfig, float]:
    """Returns the tokens per step of the settings that were measured with SmolLM2."""
    return {names.parse(name): tokens for name, tokens in SMOLLM2.items()}


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
      ValueError: the setting was not measured, or the formula has no place for its tree.
    """
    if setting.block_size == 1:
        return 1.0
    if source == "paper":
        return paper(setting)
    known = measured()
    if setting not in known:
        shown = "; ".join(map(names.label, known))
        raise ValueError(f'compression="{source}" was measured at {shown}; got {names.label(setting)}: give a number')
    return known[setting]
