"""The settings that "auto", `jlade.tune` and `jlade.plan` choose among, and their tokens per step, as far as known."""

from typing import Literal, get_args

from jlade.config import MAX_BLOCK_SIZE, LookaheadConfig
from jlade.lookahead import names

TREES = tuple(map(LookaheadConfig.tree, (959, 479, 239, 119, 63, 31, 15, 7, 3)))

# Of "auto", widest first, on one device; on several that share the tokens of a step it has all of them. A tree accepts
# more than a window and a tree of as many tokens (docs/choosing.md), and its drafts forecast the best width.
AUTO = TREES[3:]

# Of `jlade.tune`: trees, prompt lookup in small and in wide blocks, then settings with a window, among them those of
# Table 4 of arXiv 2402.02057.
USUAL = (
    *TREES[:2:-1],
    *(LookaheadConfig.paper(*sizes) for sizes in ((0, 3, 1), (0, 4, 1), (0, 6, 1), (0, 8, 1), (0, 6, 2), (0, 5, 10))),
    *(LookaheadConfig.paper(*sizes) for sizes in ((5, 4, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15), (20, 7, 20))),
)

# Of `jlade.plan` by the paper's formula, W = G; by the tokens measured with SmolLM2 it is `measured`.
OF_PAPER = tuple(
    LookaheadConfig.paper(w, n, w)
    for w in (3, 5, 7, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240)
    for n in (3, 4, 5, 6, 7)
    if 2 * w * (n - 1) <= MAX_BLOCK_SIZE
)

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
    if setting.has_tree:
        raise ValueError(f'compression="paper" has no formula for a tree, got {names.name(setting)}: give a number')
    guesses, length = min(setting.window_size, setting.ngrams.guess_set_size), setting.ngram_size - 1
    missed = sum((1 - ACCEPTANCE**i) ** guesses for i in range(1, length + 1))
    return (STEPS + length - missed) / STEPS


def tokens_per_step(setting: LookaheadConfig, source: Source) -> float:
    """Returns the tokens per step of a setting.

    Raises:
      ValueError: the setting was not measured, or the formula has no place for its tree.
    """
    if setting.block_size == 1:
        return 1.0
    if source == "paper":
        return paper(setting)
    tokens = measured()
    if setting not in tokens:
        shown = "; ".join(map(names.label, tokens))
        raise ValueError(f'compression="{source}" was measured at {shown}; got {names.label(setting)}: give a number')
    return tokens[setting]
