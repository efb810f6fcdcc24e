"""The settings of a caller: the width of a step, and how tokens are drawn."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, get_args

Verification = Literal["coupled", "rejection"]
WindowDraw = Literal["coupled", "greedy"]
Source = Literal["pool", "suffix", "recycled"]

SOURCES: tuple[Source, ...] = get_args(Source)
MAX_BLOCK_SIZE = 4096
SUFFIX_REACH, RECYCLED_REACH = 12, 6  # most tokens of a draft from these sources


def check_int(name: str, value: Any, least: int) -> int:
    """Returns `value` as an int.

    Raises:
      TypeError, ValueError: name the argument, the value and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """The width of a decoding step, and the drafts that it verifies.

    `LookaheadConfig()` has the window of arXiv 2402.02057 and verifies the most promising drafts of several sources,
    merged into a tree (`jlade.drafts`). `LookaheadConfig.tree(63)` has a tree alone. `LookaheadConfig.paper(15, 5,
    15)` is the paper's algorithm.

    Attributes:
      tree_size: M, most tokens of the tree that a step verifies; 0 or more. None verifies the G n-grams of the pool
        side by side, as in the paper.
      candidates: the sources that share the tree: "pool", its n-grams; "suffix", the text after earlier occurrences of
        its last tokens; "recycled", the most probable tokens after each token as the model last saw it. Without a tree
        there is only the pool.
      window_size: W, future positions decoded in parallel; 0 or more.
      ngram_size: N, length of an n-gram, the most tokens that one n-gram of the pool can add; 2 or more.
      guess_set_size: G, n-grams that the pool keeps for each first token; 0 or more. Without a tree, also the most
        n-grams verified in a step.
      pool_from_prompt: whether the n-grams of the prompt and of the accepted text enter the pool, in addition to those
        of the window.
      verification: how sampled candidates are accepted. Both ways have the same distribution of texts. "coupled" draws
        each token with noise that belongs to its position, so the text is that of plain sampling with the same key;
        "rejection" is the paper's Algorithm 4. For greedy decoding they are the same.
      window_draw: how the window's tokens are drawn when sampling: "coupled", with the noise of their positions, which
        finds more n-grams, or "greedy", as in the paper. It affects the number of steps, not the distribution.
      step_cost: the time of a step in plain steps, as measured by `jlade.tune`; above 0. It makes decoding adaptive:
        steps are narrower where a wide one does not pay (`jlade.lookahead.adaptive`). The sequences of a batch fall
        back together. The text is the same; with "rejection" it has the same distribution. None never falls back.

    Raises:
      TypeError, ValueError: on construction, when a value has the wrong type or is out of the range above, or when the
        block would exceed `MAX_BLOCK_SIZE` tokens.
    """

    tree_size: int | None = 80
    candidates: tuple[Source, ...] = SOURCES
    window_size: int = 10
    ngram_size: int = 5
    guess_set_size: int = 10
    pool_from_prompt: bool = True
    verification: Verification = "coupled"
    window_draw: WindowDraw = "coupled"
    step_cost: float | None = None

    @classmethod
    def tree(cls, tree_size: int, **settings: Any) -> Self:
        """Returns a setting with a tree alone, without window and pool.

        Args:
          tree_size: M. A step feeds up to M + 1 tokens to the model.
          **settings: other attributes.
        """
        return cls(**{"tree_size": tree_size, "window_size": 0, "guess_set_size": 0, **settings})

    @classmethod
    def paper(cls, window_size: int = 15, ngram_size: int = 5, guess_set_size: int = 15, **settings: Any) -> Self:
        """Returns a setting of the paper: a window and the n-grams of the pool side by side, without a tree.

        Some settings have names of their own: `ngram_size=2` is Jacobi decoding with a pool; `window_size=0` is prompt
        lookup, whose candidates come from the text alone; `guess_set_size=0` has no candidates.

        Args:
          window_size, ngram_size, guess_set_size: W, N and G. A step accepts at most N tokens.
          **settings: other attributes.
        """
        sizes = {"window_size": window_size, "ngram_size": ngram_size, "guess_set_size": guess_set_size}
        return cls(**{"tree_size": None, **sizes, **settings})

    def __post_init__(self) -> None:
        for name, least in (("window_size", 0), ("ngram_size", 2), ("guess_set_size", 0)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least))
        if not isinstance(self.pool_from_prompt, bool):
            raise TypeError(f"pool_from_prompt must be True or False, got {self.pool_from_prompt!r}")
        for name, accepted in (("verification", get_args(Verification)), ("window_draw", get_args(WindowDraw))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        if self.step_cost is not None:
            _check_number("step_cost", self.step_cost, "a number above 0, or None", lambda x: x > 0)
        object.__setattr__(self, "candidates", _check_candidates(self.candidates))
        if self.tree_size is not None:
            object.__setattr__(self, "tree_size", check_int("tree_size", self.tree_size, 0))
            if not self.reach:
                raise ValueError("candidates=('pool',) needs guess_set_size of at least 1, got 0")
        elif self.candidates in (SOURCES, ("pool",)):
            object.__setattr__(self, "candidates", ("pool",))
        else:
            raise ValueError(f"candidates={self.candidates} need tree_size, the tokens of the tree that they share")
        if self.block_size > MAX_BLOCK_SIZE:
            sizes = f"window_size={self.window_size}, ngram_size={self.ngram_size}, "
            if self.tree_size is None:
                sizes += f"guess_set_size={self.guess_set_size} make a block of (N-1)(W+G)"
            else:
                sizes += f"tree_size={self.tree_size} make a block of (N-1)W+M"
            raise ValueError(f"{sizes} = {self.block_size} tokens a step; at most {MAX_BLOCK_SIZE} are accepted")

    @property
    def block_size(self) -> int:
        """T, tokens fed to the model in one step."""
        return max(1, (self.ngram_size - 1) * self.window_size) + self.num_drafted

    @property
    def num_drafted(self) -> int:
        """Tokens verified in one step: those of the tree, or of G n-grams."""
        return self.guess_set_size * (self.ngram_size - 1) if self.tree_size is None else self.tree_size

    @property
    def reach(self) -> dict[Source, int]:
        """Most tokens of a draft, by source."""
        longest: dict[Source, int] = {"suffix": SUFFIX_REACH, "recycled": RECYCLED_REACH}
        if self.guess_set_size:
            longest["pool"] = self.ngram_size - 1
        return {source: longest[source] for source in self.candidates if source in longest}

    @property
    def max_accepted(self) -> int:
        """Most tokens that one step can accept: a whole draft and the token after it."""
        return min(max(self.reach.values(), default=0), self.num_drafted) + 1


def _check_candidates(candidates: Any) -> tuple[Source, ...]:
    """Returns the sources in the order of `SOURCES`."""
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise TypeError(f"candidates must be a tuple of {', '.join(map(repr, SOURCES))}, got {candidates!r}")
    given = tuple(candidates)
    if not given or not set(given) <= set(SOURCES) or len(set(given)) < len(given):
        raise ValueError(f"candidates must be one or more of {', '.join(map(repr, SOURCES))}, got {given}")
    return tuple(source for source in SOURCES if source in given)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn from the model's logits, with the names and the order of transformers' `generate`.

    Bias and penalties change the logits first, then the temperature, then the filters, each acting on the result of the
    one before. At every verified position they use the true history of that position. At temperature 0 the filters
    (`top_k`, `top_p`, `min_p`) change `Generation.processed_logprobs` but no text: the highest logit passes them all.

    Attributes:
      temperature: divides the logits; 0.0 takes the highest (greedy).
      top_k: keeps the k highest logits; 1 or more.
      top_p: keeps the fewest tokens whose probabilities add up to p or more; above 0, up to 1.
      min_p: keeps tokens of at least p times the highest probability; 0 to 1.
      repetition_penalty: divides positive and multiplies negative logits of the tokens of prompt and text so far
        (arXiv 1909.05858); above 0, 1.0 for none.
      presence_penalty: subtracted from the logits of tokens generated before.
      frequency_penalty: subtracted from a token's logit once for each time it was generated before.
      logit_bias: a number to add to the logit of each token id; -inf bans the token.

    Raises:
      TypeError, ValueError: on construction, when a value is not in the range above.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, "a number of at least 0", lambda x: x >= 0)
        if self.top_k is not None:
            object.__setattr__(self, "top_k", check_int("top_k", self.top_k, 1))
        for name, accepted, is_accepted in (
            ("top_p", "a number above 0, up to 1", lambda x: 0 < x <= 1),
            ("min_p", "a number from 0 to 1", lambda x: 0 <= x <= 1),
            ("repetition_penalty", "a number above 0", lambda x: x > 0),
            ("presence_penalty", "a finite number", lambda x: True),
            ("frequency_penalty", "a finite number", lambda x: True),
        ):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), accepted, is_accepted)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))


def _check_number(name: str, value: Any, accepted: str, is_accepted: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {accepted}, got {value!r}")
    if not math.isfinite(value) or not is_accepted(value):
        raise ValueError(f"{name} must be {accepted}, got {value}")


def _check_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns the bias as sorted pairs, which are hashable."""
    try:
        pairs = {check_int("logit_bias", token, 0): float(value) for token, value in dict(bias).items()}
    except (TypeError, ValueError) as error:
        raise type(error)(f"logit_bias must map token ids to numbers, got {bias!r}") from error
    if any(math.isnan(value) or value == math.inf for value in pairs.values()):
        raise ValueError(f"logit_bias must map token ids to numbers below inf, got {bias!r}")
    return tuple(sorted(pairs.items()))


PLAIN = LookaheadConfig.paper(window_size=0, ngram_size=2, guess_set_size=0, pool_from_prompt=False)
"""Plain decoding, one token a step; the meaning of `lookahead=None`."""

RECYCLING = LookaheadConfig.tree(0, pool_from_prompt=False, candidates=("recycled",))
"""Plain decoding that keeps a table of recycled logits, as prompts are read for settings with that source."""

SMALL_BLOCK = LookaheadConfig.tree(3)
"""A block of 4 tokens, for CPUs, where the cost of a step grows with its block."""
