"""What a caller chooses: the lookahead setting W, N and G."""

import dataclasses
import numbers

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

    Raises:
      TypeError, ValueError: on construction, when a value is not of the kind or in the range above, or when the block
        would exceed `MAX_BLOCK_SIZE` tokens.
    """

    window_size: int = 15
    ngram_size: int = 5
    guess_set_size: int = 15
    pool_from_prompt: bool = True

    def __post_init__(self):
        for name, least in (("window_size", 0), ("ngram_size", 2), ("guess_set_size", 0)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least))
        if not isinstance(self.pool_from_prompt, bool):
            raise TypeError(f"pool_from_prompt must be True or False, got {self.pool_from_prompt!r}")
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


PLAIN = LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=0, pool_from_prompt=False)
"""Plain decoding, one token a step: what `lookahead=None` stands for."""

SMALL_BLOCK = LookaheadConfig(window_size=0, ngram_size=4, guess_set_size=1)
"""For CPUs, where a step's cost grows with its block from a few tokens on: 4 tokens, the fastest setting measured."""
