"""The protocol of a source of drafts: pure functions over a state of its own, for one sequence.

A source is static: a frozen class, so that equal settings have equal sources, which compile once. Its state is any
pytree, None by default. Decoding calls `start` before the first step, then `learn` and `propose` after each step, as
proposals are made one step ahead: a program that reads a table and writes to it in one step would copy it.
"""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade.drafts.tree import Proposals, Tree, TreeShape
from jlade.mesh import DATA
from jlade.vocabulary import VocabularyShard

if TYPE_CHECKING:
    from jlade.config import LookaheadConfig

Setting: TypeAlias = "LookaheadConfig"  # whose module imports the sources
State = Any
RANKS = 8  # k, most probable tokens after each token that sources see


class Prompt(NamedTuple):
    """The prompt of a sequence."""

    tokens: jax.Array  # [C] int32
    length: jax.Array  # [] int32
    known: jax.Array  # [] int32, tokens of it that the state of an earlier call knows
    longest: jax.Array  # [] int32, most unknown tokens of a sequence of the batch, the same number for all: for loops


class Text(NamedTuple):
    """The text that drafts continue, and what else is known when they are proposed."""

    tokens: jax.Array  # [C] int32
    length: jax.Array  # [] int32; the last of these tokens is the current one
    noise: jax.Array | None  # [D, V] float32, of the next positions, NaN for greedy decoding; None if it is not known
    guide: "Guide | None"  # None for any text
    shared: dict[str, Any]  # arrays for all sequences, such as other texts, by the sources that read them
    states: dict[str, State]  # of all sources, for one that reads the state of another


class Guide(NamedTuple):
    """A constraint that guides drafts, and its state after the current token; see `jlade.constraints.grammar`.

    Its `after(states, tokens)` returns the state after each token, -1 for one that may not come next; `likely(states)`
    the tokens that are likely to, `tree.NONE` for none, and whether they are certain. All are [...] int32 and bool.
    """

    constraint: Any
    state: Any

    @property
    def restricts(self) -> jax.Array:
        """Whether some text may not follow, [] bool."""
        restricts = getattr(self.constraint, "restricts", None)
        answer: jax.Array = jnp.ones((), bool) if restricts is None else restricts(self.state)
        return answer


class Passage(NamedTuple):
    """Tokens of the prompt that the model read at once."""

    tokens: jax.Array  # [T] int32
    previous: jax.Array  # [T] int32, the token before each, `tree.NONE` for none
    best: jax.Array  # [T, k] int32, the most probable tokens after each, graded: see `jlade.drafts.graded`
    length: jax.Array  # [] int32, how many of them are of the prompt


class Step(NamedTuple):
    """The observations of a step, from which sources learn."""

    text: jax.Array  # [C] int32, with the accepted tokens
    before: jax.Array  # [] int32, tokens of the text before the step
    length: jax.Array  # [] int32, `before` and the accepted tokens
    max_accepted: int  # A, most tokens that the step could accept
    window: jax.Array  # [N-1, W] int32, which the model read, but for column 0 of row 0
    ngrams: tuple[jax.Array, jax.Array]  # of the window [W, N] int32, and which of them to learn [W] bool
    tree: Tree  # M drafts that the model read
    path: jax.Array  # int32, places in the tree of the accepted drafts, but for the last accepted token
    predictions: jax.Array  # [1 + M] int32, the model's tokens after the current one and after each draft
    # [1 + W + M, k] int32, graded: the most probable tokens after the current one, the newest window row, the drafts;
    # None if no source reads prompts.
    best: jax.Array | None
    passage: Passage | None  # the prompt tokens that the sequence read in the place of the step; None if it cannot


class Source(Protocol):
    """A source of drafts. The methods with a body here need no override where a source has no such part."""

    about: ClassVar[str]  # its proposals, in a few words
    rates: ClassVar[np.ndarray]  # [K] initial acceptance rates of the kinds of proposals

    @classmethod
    def max_length(cls, lookahead: Setting) -> int:
        """Returns the most tokens of a draft; 0 for a setting with which there are none."""

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        """Returns the source of a setting."""

    @property
    def shape(self) -> TreeShape | None:
        """The form of the proposals; None if it depends on the text. A setting without a tree needs one."""
        return None

    @property
    def reader(self) -> "Source | None":
        """The source as it reads prompts, equal for all settings that read alike; None if it reads none."""
        return None

    @property
    def spec(self) -> PartitionSpec:
        """The arrays of the state, of a batch, on a mesh."""
        return PartitionSpec(DATA)

    def empty(self) -> State:
        """Returns the state that knows nothing."""
        return None

    def read(self, state: State, passage: Passage) -> State:
        """Returns the state after a part of the prompt."""
        return state

    def start(self, state: State, prompt: Prompt) -> State:
        """Returns the state before the first step, given an empty one, one of an earlier call, or one after `read`."""
        return state

    def propose(self, state: State, text: Text, rates: jax.Array) -> Proposals:
        """Returns L proposals, with kinds of the source's own.

        Args:
          state: the source's.
          text: to continue.
          rates: [K] float32, acceptance rates of the kinds.
        """

    def learn(self, state: State, step: Step) -> State:
        """Returns the state after a step. A sequence that is done adds no token to its text."""
        return state
