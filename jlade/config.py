"""The settings of a caller: the width of a step, and how tokens are drawn."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, get_args

from jlade.drafts.sources import TABLE
from jlade.errors import ArgumentTypeError, ArgumentValueError, check_int

Verification = Literal["coupled", "rejection"]
WindowDraw = Literal["coupled", "greedy"]
WindowAdvance = Literal["step", "token"]

SOURCES = ("pool", "suffix", "recycled")  # of a tree by default
PRESETS = {"code": (8, 6, 15), "prose": (7, 5, 10), "creative": (5, 4, 8)}  # W, N and G
MAX_BLOCK_SIZE = 4096
MAX_NUMBER: Any = 1e4  # of a control: beside larger ones float32 rounds the model's logits away


class _Unset(int):
    """A default that differs from the same value given by a caller."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """The tokens of a decoding step: a window, which guesses future ones, and drafts to verify.

    `LookaheadConfig.tree(119)` has a tree of the most promising drafts of several sources (`jlade.drafts`), and
    `LookaheadConfig()` the window of arXiv 2402.02057 and a tree, of as many tokens. The tree alone accepts more.
    `LookaheadConfig.paper(15, 5, 15)` is the algorithm of the paper. Sizes of a window or a pool come with `tree_size`:
    without it, the same call could mean the paper's setting or one with a tree.

    Attributes:
      window_size: the window's W, future positions decoded in parallel; 0 or more.
      ngram_size: N, the length of an n-gram; 2 or more. The window has N-1 rows, and drafts of the pool N-1 tokens.
      window_draw: how the window's tokens are drawn when sampling: "coupled", with the noise of their positions, which
        finds more n-grams, or "greedy", as in the paper. It affects the number of steps, not the distribution.
      window_advance: the rows by which the window moves on: "step", one for each step, whatever it accepted, as in the
        authors' code; or "token", one for each accepted token, drawn from the text where no step was made, as in lines
        7 to 9 of the paper's Algorithm 2. The rows of "step" accept more.
      tree_size: the drafts' M, most tokens of the tree that a step verifies; 0 or more. None verifies the G n-grams of
        the pool side by side, as in the paper.
      sources: where drafts come from: "pool", n-grams; "suffix", the text after earlier occurrences of its last tokens;
        "recycled", the most probable tokens after each token as the model last saw it; "chain", the guesses of Jacobi
        decoding; "prediction", the text that a call expects, "corpus", other texts that it brings, and "grammar", its
        grammar, which add these sources by themselves. Without a tree there is only the pool.
      guess_set_size: the pool's G, n-grams kept for each first token; 0 or more. Without a tree, also the most n-grams
        verified in a step.
      pool_from_prompt: whether the n-grams of the prompt and of the accepted text enter the pool, in addition to those
        of the window.
      verification: how sampled drafts are accepted. Both ways have the same distribution of texts. "coupled" draws each
        token with noise that belongs to its position, so the text is that of plain sampling with the same key;
        "rejection" is the paper's Algorithm 4. For greedy decoding they are the same.
      relative_step_time: the time of a step divided by that of a plain one, as `jlade.tune` measures it; above 0. It
        makes decoding adaptive: steps are narrower where a wide one does not pay (`jlade.lookahead.adaptive`). The
        sequences of a batch fall back together. The text is the same; with "rejection" it has the same distribution.
        None never falls back.

    Raises:
      TypeError, ValueError: on construction, when a value has the wrong type or is out of the range above, when sizes
        come without `tree_size`, or when the block would exceed `MAX_BLOCK_SIZE` tokens.
    """

    window_size: int = _Unset(10)
    ngram_size: int = _Unset(5)
    window_draw: WindowDraw = "coupled"
    window_advance: WindowAdvance = "step"
    tree_size: int | None = _Unset(80)
    sources: tuple[str, ...] = SOURCES
    guess_set_size: int = _Unset(10)
    pool_from_prompt: bool = True
    verification: Verification = "coupled"
    relative_step_time: float | None = None

    @classmethod
    def tree(
        cls,
        tree_size: int,
        *,
        sources: tuple[str, ...] = SOURCES,
        verification: Verification = "coupled",
        relative_step_time: float | None = None,
    ) -> Self:
        """Returns a setting with a tree alone, without window and pool.

        Args:
          tree_size: M. A step feeds up to M + 1 tokens to the model.
          sources, verification, relative_step_time: see `LookaheadConfig`.
        """
        return cls(
            window_size=0,
            ngram_size=5,
            tree_size=tree_size,
            sources=sources,
            guess_set_size=0,
            verification=verification,
            relative_step_time=relative_step_time,
        )

    @classmethod
    def jacobi(
        cls, chain_size: int = 16, *, verification: Verification = "coupled", relative_step_time: float | None = None
    ) -> Self:
        """Returns Jacobi decoding, Algorithm 1 of the paper: guesses for the next tokens, all updated in each step.

        The paper reports that it hardly reduces the number of steps. It is there to compare with.

        Args:
          chain_size: m, guesses. A step feeds m + 1 tokens to the model.
          verification, relative_step_time: see `LookaheadConfig`.
        """
        return cls.tree(
            check_int("chain_size", chain_size, 1),
            sources=("chain",),
            verification=verification,
            relative_step_time=relative_step_time,
        )

    @classmethod
    def paper(
        cls,
        window_size: int = 15,
        ngram_size: int = 5,
        guess_set_size: int = 15,
        *,
        pool_from_prompt: bool = True,
        window_draw: WindowDraw = "coupled",
        window_advance: WindowAdvance = "step",
        verification: Verification = "coupled",
        relative_step_time: float | None = None,
    ) -> Self:
        """Returns a setting of the paper: a window and the n-grams of the pool side by side, without a tree.

        `window_size=0` is prompt lookup, whose n-grams come from the text alone; `guess_set_size=0` verifies nothing.

        Args:
          window_size, ngram_size, guess_set_size: W, N and G. A step accepts at most N tokens.
          pool_from_prompt, window_draw, window_advance, verification, relative_step_time: see `LookaheadConfig`.
        """
        return cls(
            window_size=window_size,
            ngram_size=ngram_size,
            window_draw=window_draw,
            window_advance=window_advance,
            tree_size=None,
            guess_set_size=guess_set_size,
            pool_from_prompt=pool_from_prompt,
            verification=verification,
            relative_step_time=relative_step_time,
        )

    @classmethod
    def preset(cls, kind: Literal["code", "prose", "creative"]) -> Self:
        """Returns a setting of the paper with the sizes that a guide to lookahead decoding names for a kind of text.

        `LookaheadConfig()` accepts more: the sources of its tree follow the text.

        Raises:
          ValueError: `kind` is another one.
        """
        if kind not in PRESETS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, PRESETS))}, got {kind!r}")
        return cls.paper(*PRESETS[kind])

    def __post_init__(self) -> None:
        self._check_tree_is_meant()
        for name, minimum in (("window_size", 0), ("ngram_size", 2), ("guess_set_size", 0)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), minimum))
        if not isinstance(self.pool_from_prompt, bool):
            raise ArgumentTypeError("pool_from_prompt", f"must be True or False, got {self.pool_from_prompt!r}")
        ways = {"verification": Verification, "window_draw": WindowDraw, "window_advance": WindowAdvance}
        for name, way in ways.items():
            if getattr(self, name) not in get_args(way):
                raise ArgumentValueError(
                    name, f"must be one of {', '.join(get_args(way))}, got {getattr(self, name)!r}"
                )
        if self.relative_step_time is not None:
            accepted_cost = "a number above 0, or None"
            _check_number("relative_step_time", self.relative_step_time, accepted_cost, lambda x: x > 0)
        object.__setattr__(self, "sources", _check_sources(self.sources))
        if self.tree_size is not None:
            object.__setattr__(self, "tree_size", check_int("tree_size", self.tree_size, 0))
            if not self.reach:
                needed = "guess_set_size" if self.sources == ("pool",) else "tree_size"
                raise ValueError(f"sources={self.sources} needs {needed} of at least 1, got 0")
        elif self.sources in (SOURCES, ("pool",)):
            object.__setattr__(self, "sources", ("pool",))
        else:
            raise ValueError(f"sources={self.sources} need tree_size, the tokens of the tree that they share")
        if self.block_size > MAX_BLOCK_SIZE:
            sizes = f"window_size={self.window_size}, ngram_size={self.ngram_size}, "
            if self.tree_size is None:
                sizes += f"guess_set_size={self.guess_set_size} make a block of (N-1)(W+G)"
            else:
                sizes += f"tree_size={self.tree_size} make a block of (N-1)W+M"
            raise ValueError(f"{sizes} = {self.block_size} tokens a step; at most {MAX_BLOCK_SIZE} are accepted")

    def _check_tree_is_meant(self) -> None:
        """Raises a TypeError for sizes of the paper beside a tree that nobody asked for."""
        sizes = ("window_size", "ngram_size", "guess_set_size")
        given = [f"{name}={getattr(self, name)!r}" for name in sizes if not isinstance(getattr(self, name), _Unset)]
        if given and isinstance(self.tree_size, _Unset):
            raise TypeError(
                f"{', '.join(given)} came without tree_size: use LookaheadConfig.paper(...) for the setting of the "
                f"paper, or add tree_size={int(self.tree_size)} for a tree of drafts beside the window"
            )

    @property
    def block_size(self) -> int:
        """T, tokens fed to the model in one step."""
        return max(1, (self.ngram_size - 1) * self.window_size) + self.num_drafted

    @property
    def num_drafted(self) -> int:
        """Tokens verified in one step: those of the tree, or of G n-grams."""
        return self.guess_set_size * (self.ngram_size - 1) if self.tree_size is None else self.tree_size

    @property
    def reach(self) -> dict[str, int]:
        """Most tokens of a draft, by source."""
        longest = {source: TABLE[source].max_length(self) for source in self.sources}
        return {source: length for source, length in longest.items() if length}

    @property
    def max_accepted(self) -> int:
        """Most tokens that one step can accept: a whole draft and the token after it."""
        return min(max(self.reach.values(), default=0), self.num_drafted) + 1


def _check_sources(sources: Any) -> tuple[str, ...]:
    """Returns the sources in the order of `TABLE`."""
    known = tuple(TABLE)
    if isinstance(sources, str) or not isinstance(sources, Iterable):
        raise ArgumentTypeError("sources", f"must be a tuple of {', '.join(map(repr, known))}, got {sources!r}")
    given = tuple(sources)
    if not given or not set(given) <= set(known) or len(set(given)) < len(given):
        raise ArgumentValueError("sources", f"must be one or more of {', '.join(map(repr, known))}, got {given}")
    return tuple(source for source in known if source in given)


def _check_number(name: str, value: Any, accepted: str, is_accepted: Callable[[Any], bool]) -> Any:
    """Returns a number of a range, given the range in words too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, f"must be {accepted}, got {value!r}")
    if not is_accepted(value):
        raise ArgumentValueError(name, f"must be {accepted}, got {value}")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ArgumentValueError(name, f"must be at most {MAX_NUMBER:g} in size, got {value}")
    return value


@dataclasses.dataclass(frozen=True)
class Control:
    """The facts about a number of `SamplingConfig`, for all that read, check or explain it.

    Attributes:
      kind: a "filter" depends on the order or the probabilities of all tokens, and has no effect on greedy text; a
        "penalty" depends on earlier tokens.
      check: takes the name and a value, which it returns or refuses.
      served: the least and the greatest value in a request to the server.
      help: of the commands: the placeholder of the value, and an explanation.
      neutral: the value that changes nothing, which programs do not compute; None for the temperature, which is always
        there.
      of_transformers: the value where generation_config.json has none; None for a control that transformers lacks.
      number: the type of the value.
    """

    kind: Literal["temperature", "filter", "penalty"]
    check: Callable[[str, Any], Any]
    served: tuple[float, float]
    help: tuple[str, str]
    neutral: float | None
    of_transformers: float | None = None
    number: type[int] | type[float] = float


def _number(accepted: str, is_accepted: Callable[[Any], bool]) -> Callable[[str, Any], Any]:
    return functools.partial(_check_number, accepted=accepted, is_accepted=is_accepted)


CONTROLS = {
    "temperature": Control(
        "temperature",
        _number("a number of at least 0", lambda x: x >= 0),
        (0, 100),
        ("T", "divides the logits; 0 takes the most likely token (default: the model's, or 0)"),
        neutral=None,
        of_transformers=1.0,
    ),
    "top_k": Control(
        "filter",
        functools.partial(check_int, min_value=1),
        (-1, 2**31 - 1),
        ("K", "keep the K most likely tokens"),
        neutral=0,
        of_transformers=50,
        number=int,
    ),
    "top_p": Control(
        "filter",
        _number("a number above 0, up to 1", lambda x: 0 < x <= 1),
        (0, 1),
        ("P", "keep the fewest tokens whose probabilities add up to P"),
        neutral=1.0,
        of_transformers=1.0,
    ),
    "min_p": Control(
        "filter",
        _number("a number from 0 to 1", lambda x: 0 <= x <= 1),
        (0, 1),
        ("P", "keep tokens of at least P times the highest probability"),
        neutral=0.0,
        of_transformers=0.0,
    ),
    "repetition_penalty": Control(
        "penalty",
        _number("a number of at least 1e-4", lambda x: x >= 1 / MAX_NUMBER),
        (0, 100),
        ("X", "above 1, make tokens of prompt and text less likely"),
        neutral=1.0,
        of_transformers=1.0,
    ),
    "presence_penalty": Control(
        "penalty",
        _number("a finite number", lambda x: abs(x) < math.inf),
        (-2, 2),
        ("X", "subtracted from the logits of tokens generated before"),
        neutral=0.0,
    ),
    "frequency_penalty": Control(
        "penalty",
        _number("a finite number", lambda x: abs(x) < math.inf),
        (-2, 2),
        ("X", "subtracted from a token's logit once for each time it was generated before"),
        neutral=0.0,
    ),
}
FILTERS = tuple(name for name, control in CONTROLS.items() if control.kind == "filter")
PENALTIES = tuple(name for name, control in CONTROLS.items() if control.kind == "penalty")
WITHOUT_FILTERS: dict[str, Any] = dict.fromkeys(FILTERS)  # for greedy text, which they delay and do not change


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn from the model's logits, with the names and the order of transformers' `generate`.

    Bias and penalties change the logits first, then the temperature, then the filters, each acting on the result of the
    one before. At every verified position they use the true history of that position. At temperature 0 the filters
    (`top_k`, `top_p`, `min_p`) change `Generation.processed_logprobs` but no text: the highest logit passes them all.

    Attributes:
      temperature: divides the logits; 0.0 takes the highest (greedy), as do numbers below 1e-5.
      top_k: keeps the k highest logits; 1 or more.
      top_p: keeps the fewest tokens whose probabilities add up to p or more, the first of equal ones; above 0, up to 1.
      min_p: keeps tokens of at least p times the highest probability; 0 to 1.
      repetition_penalty: divides positive and multiplies negative logits of the tokens of prompt and text so far
        (arXiv 1909.05858); 1e-4 or more, 1.0 for none.
      presence_penalty: subtracted from the logits of tokens generated before.
      frequency_penalty: subtracted from a token's logit once for each time it was generated before.
      logit_bias: a number to add to the logit of each token id; -inf, or any number below -1e4, bans the token.

    Raises:
      TypeError, ValueError: on construction, when a value is not in the range above, or above 1e4.
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
        for name, control in CONTROLS.items():
            value = getattr(self, name)
            if value is not None or control.neutral is None:
                object.__setattr__(self, name, control.check(name, value))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))


def _check_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns the bias as sorted pairs, which are hashable."""
    try:
        pairs = {check_int("logit_bias", token, 0): float(value) for token, value in dict(bias).items()}
    except (TypeError, ValueError, OverflowError) as error:
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        raise kind("logit_bias", f"must map token ids to numbers, got {bias!r}") from error
    if not all(value <= MAX_NUMBER for value in pairs.values()):
        raise ArgumentValueError("logit_bias", f"must map token ids to numbers up to {MAX_NUMBER:g}, got {bias!r}")
    return tuple((token, value if value >= -MAX_NUMBER else -math.inf) for token, value in sorted(pairs.items()))


PLAIN = LookaheadConfig.paper(window_size=0, ngram_size=2, guess_set_size=0, pool_from_prompt=False)
"""Plain decoding, one token a step; the meaning of `lookahead=None`."""

SMALL_BLOCK = LookaheadConfig.tree(7)
"""A block of 8 tokens, for CPUs, where the cost of a step grows with its block."""
