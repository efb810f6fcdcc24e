"""The settings of a caller: the drafts that a step verifies, and how tokens are drawn."""

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

POOL = "pool"  # the source of the n-grams of an `NGramConfig`
SOURCES = ("suffix", "recycled")  # of a tree by default
PRESETS = {"code": (8, 6, 15), "prose": (7, 5, 10), "creative": (5, 4, 8)}  # W, N and G
MAX_BLOCK_SIZE = 4096
MAX_NUMBER: Any = 1e4  # of a control: beside larger ones float32 rounds the model's logits away


@dataclasses.dataclass(frozen=True)
class NGramConfig:
    """The n-grams of arXiv 2402.02057: a window generates them, and a pool keeps them as drafts.

    Attributes:
      window_size: the window's W, future positions decoded in parallel; 0 or more. Without a window, n-grams come from
        the text alone.
      ngram_size: N, the length of an n-gram; 2 or more. The window has N-1 rows, and drafts have N-1 tokens.
      guess_set_size: the pool's G, n-grams kept for each first token; 0 or more.
      pool_from_prompt: whether the n-grams of the prompt and of the accepted text enter the pool, in addition to those
        of the window.
      window_draw: how the window's tokens are drawn when sampling: "coupled", with the noise of their positions, which
        finds more n-grams, or "greedy", as in the paper. It affects the number of steps, not the distribution.
      window_advance: the rows by which the window moves on: "step", one for each step, whatever it accepted, as in the
        authors' code; or "token", one for each accepted token, drawn from the text where no step was made, as in lines
        7 to 9 of the paper's Algorithm 2. The rows of "step" accept more.

    Raises:
      TypeError, ValueError: on construction, when a value has the wrong type or is out of the range above.
    """

    window_size: int = 15
    ngram_size: int = 5
    guess_set_size: int = 15
    _: dataclasses.KW_ONLY
    pool_from_prompt: bool = True
    window_draw: WindowDraw = "coupled"
    window_advance: WindowAdvance = "step"

    def __post_init__(self) -> None:
        for name, minimum in (("window_size", 0), ("ngram_size", 2), ("guess_set_size", 0)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), minimum))
        if not isinstance(self.pool_from_prompt, bool):
            raise ArgumentTypeError("pool_from_prompt", f"must be True or False, got {self.pool_from_prompt!r}")
        _check_way("window_draw", self.window_draw, get_args(WindowDraw))
        _check_way("window_advance", self.window_advance, get_args(WindowAdvance))

    @property
    def size(self) -> int:
        """Tokens of G drafts."""
        return self.guess_set_size * (self.ngram_size - 1)


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """A tree of the most promising drafts of several sources (`jlade.drafts`).

    Attributes:
      size: M, most tokens of the tree; 1 or more.
      sources: where drafts come from: "suffix", the text after earlier occurrences of its last tokens; "recycled", the
        most probable tokens after each token as the model last saw it; "chain", the guesses of Jacobi decoding;
        "prediction", "corpus" and "grammar", the text that a call expects, other texts and a grammar. A call that has
        one of these adds its source by itself.
      ngrams: a window and a pool, which is one more source; None for neither.

    Raises:
      TypeError, ValueError: on construction, when a value has the wrong type or is out of the range above, or when
        there is no source.
    """

    size: int = 119
    sources: tuple[str, ...] = SOURCES
    ngrams: NGramConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_int("size", self.size, 1))
        if not isinstance(self.ngrams, NGramConfig | None):
            raise ArgumentTypeError("ngrams", f"must be an NGramConfig or None, got {self.ngrams!r}")
        has_pool = self.ngrams is not None and self.ngrams.guess_set_size > 0
        object.__setattr__(self, "sources", _check_sources(self.sources, 0 if has_pool else 1))
        if self.ngrams is not None and not (self.ngrams.window_size or has_pool):
            object.__setattr__(self, "ngrams", None)  # so that settings of the same steps are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """The drafts that a decoding step verifies: a tree, or the n-grams of the paper side by side.

    `LookaheadConfig()` is `LookaheadConfig.tree(119)`. `LookaheadConfig.paper(15, 5, 15)`, the algorithm of arXiv
    2402.02057, has a window and a pool of n-grams instead, and a block of as many tokens. The tree accepts more.

    Attributes:
      drafts: the tree, or the n-grams.
      verification: how sampled drafts are accepted. Both ways have the same distribution of texts. "coupled" draws each
        token with noise that belongs to its position, so the text is that of plain sampling with the same key;
        "rejection" is the paper's Algorithm 4. For greedy decoding they are the same.
      relative_step_time: the time of a step divided by that of a plain one, as `jlade.tune` measures it; above 0. It
        makes decoding adaptive: steps are narrower where a wide one does not pay (`jlade.lookahead.adaptive`). The
        sequences of a batch fall back together. The text is the same; with "rejection" it has the same distribution.
        None never falls back. Only a tree without a window takes it: its drafts forecast what a step accepts.

    Raises:
      TypeError, ValueError: on construction, when a value has the wrong type or is out of the range above, when the
        block would exceed `MAX_BLOCK_SIZE` tokens, or when `relative_step_time` does not fit the drafts.
    """

    drafts: TreeConfig | NGramConfig = dataclasses.field(default_factory=TreeConfig)
    verification: Verification = "coupled"
    relative_step_time: float | None = None  # here, so that what `jlade.tune` found and stored is one value

    @classmethod
    def tree(
        cls,
        size: int,
        *,
        sources: tuple[str, ...] = SOURCES,
        ngrams: NGramConfig | None = None,
        verification: Verification = "coupled",
        relative_step_time: float | None = None,
    ) -> Self:
        """Returns a setting with a tree. Without `ngrams`, a step feeds up to M + 1 tokens to the model.

        Args:
          size: M.
          sources, ngrams: see `TreeConfig`.
          verification, relative_step_time: see `LookaheadConfig`.
        """
        drafts = TreeConfig(size, sources, ngrams)
        return cls(drafts=drafts, verification=verification, relative_step_time=relative_step_time)

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
    ) -> Self:
        """Returns a setting of the paper: a window, and the n-grams of its pool side by side.

        `window_size=0` is prompt lookup, whose n-grams come from the text alone; `guess_set_size=0` verifies nothing.

        Args:
          window_size, ngram_size, guess_set_size: W, N and G. A step accepts at most N tokens.
          pool_from_prompt, window_draw, window_advance: see `NGramConfig`.
          verification: see `LookaheadConfig`.
        """
        drafts = NGramConfig(
            window_size,
            ngram_size,
            guess_set_size,
            pool_from_prompt=pool_from_prompt,
            window_draw=window_draw,
            window_advance=window_advance,
        )
        return cls(drafts=drafts, verification=verification)

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

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the setting that `dataclasses.asdict` made a dictionary of, also after JSON.

        A `relative_step_time` of drafts that do not take it, as earlier versions stored it, is left out.
        """
        drafts: Any = fields["drafts"]
        if "ngram_size" in drafts:
            drafts = NGramConfig(**drafts)
        else:
            ngrams = None if drafts["ngrams"] is None else NGramConfig(**drafts["ngrams"])
            drafts = TreeConfig(**{**drafts, "ngrams": ngrams})
        if not _has_forecast(drafts):
            fields = {**fields, "relative_step_time": None}
        return cls(**{**fields, "drafts": drafts})

    def __post_init__(self) -> None:
        if not isinstance(self.drafts, TreeConfig | NGramConfig):
            raise ArgumentTypeError("drafts", f"must be a TreeConfig or an NGramConfig, got {self.drafts!r}")
        _check_way("verification", self.verification, get_args(Verification))
        if self.relative_step_time is not None:
            accepted_cost = "a number above 0, or None"
            _check_number("relative_step_time", self.relative_step_time, accepted_cost, lambda x: x > 0)
            if not self.has_forecast:
                raise ArgumentValueError(
                    "relative_step_time",
                    "must be None without a tree or with a window, which have no forecast of the tokens that a step "
                    f"accepts, got {self.relative_step_time}",
                )
        if self.block_size > MAX_BLOCK_SIZE:
            sizes = f"window_size={self.window_size}, ngram_size={self.ngram_size}, "
            if self.has_tree:
                sizes += f"size={self.num_drafted} make a block of (N-1)W+M"
            else:
                sizes += f"guess_set_size={self.ngrams.guess_set_size} make a block of (N-1)(W+G)"
            raise ValueError(f"{sizes} = {self.block_size} tokens a step; at most {MAX_BLOCK_SIZE} are accepted")

    @property
    def has_tree(self) -> bool:
        """Whether the drafts are a tree. Otherwise they are n-grams side by side."""
        return isinstance(self.drafts, TreeConfig)

    @property
    def has_forecast(self) -> bool:
        """Whether the drafts of a step tell its worth. Those beside a window do not, as it pays in later steps."""
        return _has_forecast(self.drafts)

    @property
    def ngrams(self) -> NGramConfig:
        """The window and the pool, `NO_NGRAMS` for neither."""
        drafts = self.drafts.ngrams if isinstance(self.drafts, TreeConfig) else self.drafts
        return NO_NGRAMS if drafts is None else drafts

    @property
    def window_size(self) -> int:
        """W; 0 without a window."""
        return self.ngrams.window_size

    @property
    def ngram_size(self) -> int:
        """N."""
        return self.ngrams.ngram_size

    @property
    def block_size(self) -> int:
        """T, tokens fed to the model in one step."""
        return max(1, (self.ngram_size - 1) * self.window_size) + self.num_drafted

    @property
    def num_drafted(self) -> int:
        """Tokens verified in one step: those of the tree, or of G n-grams."""
        return self.drafts.size

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of drafts, "pool" for n-grams, in the order of `TABLE`."""
        named = {*self.drafts.sources} if isinstance(self.drafts, TreeConfig) else set()
        pool = {POOL} if self.ngrams.guess_set_size else set()
        return tuple(source for source in TABLE if source in named | pool)

    @property
    def reach(self) -> dict[str, int]:
        """Most tokens of a draft, by source."""
        return {source: TABLE[source].max_length(self) for source in self.sources}

    @property
    def max_accepted(self) -> int:
        """Most tokens that one step can accept: a whole draft and the token after it."""
        return min(max(self.reach.values(), default=0), self.num_drafted) + 1


def _has_forecast(drafts: TreeConfig | NGramConfig) -> bool:
    return isinstance(drafts, TreeConfig) and (drafts.ngrams is None or drafts.ngrams.window_size == 0)


def _check_way(name: str, way: Any, accepted: tuple[str, ...]) -> None:
    if way not in accepted:
        raise ArgumentValueError(name, f"must be one of {', '.join(accepted)}, got {way!r}")


def _check_sources(sources: Any, min_number: int) -> tuple[str, ...]:
    """Returns the sources in the order of `TABLE`."""
    known = tuple(source for source in TABLE if source != POOL)
    if isinstance(sources, str) or not isinstance(sources, Iterable):
        raise ArgumentTypeError("sources", f"must be a tuple of {', '.join(map(repr, known))}, got {sources!r}")
    given = tuple(sources)
    if len(given) < min_number or not set(given) <= set(known) or len(set(given)) < len(given):
        of_pool = f"; {POOL!r} comes with ngrams" if POOL in given else ""
        accepted = f"must be one or more of {', '.join(map(repr, known))}"
        raise ArgumentValueError("sources", f"{accepted}, got {given}{of_pool}")
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
    """What is known about one number of `SamplingConfig`, for all code that reads, checks or explains it.

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
      top_k: keeps the k highest logits, and those equal to the last of them; 1 or more.
      top_p: keeps the fewest tokens whose probabilities add up to p or more, the first of equal ones; above 0, up to 1.
      min_p: keeps tokens of at least p times the highest probability; 0 to 1.
      repetition_penalty: divides positive and multiplies negative logits of the tokens of prompt and text so far
        (arXiv 1909.05858); 1e-4 or more, 1.0 for none.
      presence_penalty: subtracted from the logits of tokens generated before.
      frequency_penalty: subtracted from a token's logit once for each time it was generated before.
      logit_bias: a number to add to the logit of each token id; -inf, or any number below -1e4, bans the token.

    Raises:
      TypeError, ValueError: on construction, when a value is out of the range above, or above 1e4 in size, but for
        `top_k`.
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


NO_NGRAMS = NGramConfig(window_size=0, guess_set_size=0)
"""Neither a window nor a pool."""

PLAIN = LookaheadConfig.paper(window_size=0, ngram_size=2, guess_set_size=0, pool_from_prompt=False)
"""Plain decoding, one token a step; the meaning of `lookahead=None`."""

SMALL_BLOCK = LookaheadConfig.tree(7)
"""A block of 8 tokens, for CPUs, where the cost of a step grows with its block."""
