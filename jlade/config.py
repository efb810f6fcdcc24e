"""What a caller chooses: how wide a step is, and how tokens are drawn."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

Verification = Literal["coupled", "rejection"]
WindowDraw = Literal["coupled", "greedy"]

MAX_BLOCK_SIZE = 4096


def check_int(name: str, value, least: int) -> int:
    """Returns `value` as an int, or raises an error that names the argument, the value and what is accepted."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


@dataclasses.dataclass(frozen=True)
class LookaheadConfig:
    """How wide a decoding step is (arXiv 2402.02057, section 3).

    Some settings have names of their own: `ngram_size=2` is Jacobi decoding with a pool, `window_size=0` is prompt
    lookup (no guessed future, candidates come from the text alone), `guess_set_size=0` verifies nothing.

    Attributes:
      window_size: W, future positions decoded in parallel; 0 or more.
      ngram_size: N, length of an n-gram and most tokens a step can accept; 2 or more.
      guess_set_size: G, n-grams kept per first token and most candidates verified in a step; 0 or more.
      pool_from_prompt: whether the n-grams of the prompt and of the accepted text enter the pool, beside those the
        window yields.
      verification: how sampled candidates are accepted, with the same distribution of texts either way. "coupled" draws
        each token with noise that belongs to its position, so the text is that of plain sampling with the same key;
        "rejection" is the paper's Algorithm 4. Greedy decoding is the same under both.
      window_draw: how the window's tokens are drawn when sampling: "coupled" with the noise of their positions, which
        finds more n-grams, or "greedy" as in the paper. It changes the number of steps, not the distribution.
      step_cost: what a step takes of the time of a plain one, as `jlade.tune` measures it; above 0. With it decoding is
        adaptive: while the text gives fewer tokens per step than that, steps are narrower (see `levels`), and the full
        width is tried again from time to time. The rows of a batch fall back together. The text is the same; with
        "rejection" it has the same distribution. None never falls back.

    Raises:
      TypeError, ValueError: on construction, when a value is not of the kind or in the range above, or when the block
        would exceed `MAX_BLOCK_SIZE` tokens.
    """

    window_size: int = 15
    ngram_size: int = 5
    guess_set_size: int = 15
    pool_from_prompt: bool = True
    verification: Verification = "coupled"
    window_draw: WindowDraw = "coupled"
    step_cost: float | None = None

    def __post_init__(self):
        for name, least in (("window_size", 0), ("ngram_size", 2), ("guess_set_size", 0)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least))
        if not isinstance(self.pool_from_prompt, bool):
            raise TypeError(f"pool_from_prompt must be True or False, got {self.pool_from_prompt!r}")
        for name, accepted in (("verification", get_args(Verification)), ("window_draw", get_args(WindowDraw))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        if self.step_cost is not None:
            _check_number("step_cost", self.step_cost, "a number above 0, or None", lambda x: x > 0)
        if self.block_size > MAX_BLOCK_SIZE:
            raise ValueError(
                f"window_size={self.window_size}, ngram_size={self.ngram_size}, guess_set_size={self.guess_set_size} "
                f"make a block of (N-1)(W+G) = {self.block_size} tokens a step; at most {MAX_BLOCK_SIZE} are accepted"
            )

    @property
    def block_size(self) -> int:
        """T, tokens fed to the model in one step."""
        return max(1, (self.ngram_size - 1) * self.window_size) + self.guess_set_size * (self.ngram_size - 1)

    @property
    def max_accepted(self) -> int:
        """Most tokens one step can accept: a whole candidate and the token that follows it."""
        return self.ngram_size if self.guess_set_size else 1

    @property
    def levels(self) -> tuple["LookaheadConfig", ...]:
        """The settings that an adaptive decode moves between: this one, a single candidate without a window, plain."""
        if self.step_cost is None:
            return (self,)
        narrower = ((self.window_size, self.guess_set_size), (0, min(1, self.guess_set_size)), (0, 0))
        return tuple(
            dataclasses.replace(self, window_size=window_size, guess_set_size=guess_set_size)
            for window_size, guess_set_size in dict.fromkeys(narrower)
        )

    @property
    def level_costs(self) -> tuple[float, ...]:
        """What a step of each level takes of the time of a plain one, taken to grow evenly with the block."""
        if self.step_cost is None:
            return (1.0,)
        slope = (self.step_cost - 1) / max(1, self.block_size - 1)
        return tuple(1 + slope * (level.block_size - 1) for level in self.levels)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn from the model's logits; the names and order of transformers' `generate`.

    Bias and penalties change the logits first, then temperature, then the filters, each what the one before left. All
    act on every verified position with the history that position really has.

    Attributes:
      temperature: divides the logits; 0.0 takes the highest (greedy).
      top_k: keeps the k highest logits; 1 or more.
      top_p: keeps the fewest tokens whose probabilities add up to p or more; above 0, up to 1.
      min_p: keeps tokens of at least p times the highest probability; 0 to 1.
      repetition_penalty: divides positive and multiplies negative logits of tokens that were in prompt or text before
        (arXiv 1909.05858); above 0, 1.0 for none.
      presence_penalty: subtracted from the logits of tokens generated before.
      frequency_penalty: subtracted from a token's logit for each time it was generated before.
      logit_bias: token id -> what is added to its logit; -inf bans it.

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

    def __post_init__(self):
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
    """Returns the bias as sorted pairs, so that the configuration stays hashable."""
    try:
        pairs = {check_int("logit_bias", token, 0): float(value) for token, value in dict(bias).items()}
    except (TypeError, ValueError) as error:
        raise type(error)(f"logit_bias must map token ids to numbers, got {bias!r}") from error
    if any(math.isnan(value) or value == math.inf for value in pairs.values()):
        raise ValueError(f"logit_bias must map token ids to numbers below inf, got {bias!r}")
    return tuple(sorted(pairs.items()))


PLAIN = LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=0, pool_from_prompt=False)
"""Plain decoding, one token a step: what `lookahead=None` stands for."""

SMALL_BLOCK = LookaheadConfig(window_size=0, ngram_size=4, guess_set_size=1)
"""For CPUs, where a step's cost grows with its block from a few tokens on: 4 tokens, the fastest setting measured."""
