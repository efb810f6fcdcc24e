"""The arguments of a decode, arrays and static settings, and the state that a step takes to the next one."""

import dataclasses
from typing import Annotated, Any, Self

import flax.struct
import jax
import numpy as np
from jax.sharding import Mesh

from jlade.config import LookaheadConfig
from jlade.constraints.constraint import Constraint
from jlade.decoding.sampling import LogProbs, Sampling, TokenCounts
from jlade.decoding.stopping import Stopping
from jlade.drafts.source import State
from jlade.drafts.sources import Drafts, Sources
from jlade.lookahead.adaptive import Pace
from jlade.mesh import COPIES, SHARED, is_shared
from jlade.models.base import Cache, Decoder
from jlade.vocabulary import VocabularyShard

# Tokens of the prompt in one forward pass, as pairs (chunk, threshold): a chunk is read while more than `threshold`
# tokens are left. An accelerator's pass takes the time of reading the weights; a CPU's grows with its tokens, padding
# included. Each size compiles a forward pass.
Chunks = tuple[tuple[int, int], ...]
CHUNKS: Chunks = ((512, 64), (64, 0))
CHUNKS_ON_CPU: Chunks = ((64, 32), (16, 0))


@flax.struct.dataclass
class Inputs:
    """The arrays of a request: B sequences of up to C tokens each.

    Attributes:
      prompts: int32[B, C]. C, the capacity, covers each prompt and the tokens generated after it.
      lengths: int32[B], tokens of each prompt, at least 1.
      stopping: limits, end tokens and stop strings.
      key: key[] for all sequences, or key[B] with one for each. It decides the noise of sampled tokens, which is
        independent between sequences, and the first window, which affects the number of steps but not the text.
        Sequence b draws its noise with `fold_in(key, b)`, or with `fold_in(key[b], 0)` as if it were alone. From a key
        of another implementation than threefry2x32 one of that is derived first.
      sampling: how tokens are drawn; greedy by default.
      costs: float32[L], the time of a step with each of `lookahead.adaptive.settings`, in plain steps. Decoding is then
        adaptive: steps are narrower where a wide one does not pay, by the forecast of a tree without a window.
        None keeps every step at full width.
      cache: in the shape of `Decoder.init_cache` for C tokens. It holds the first `cache.length` tokens of each prompt,
        which are not computed again; at most all but the last. None for an empty cache.
      sources: the initial states of sources of drafts, array[B, ...] in each array, by their names, such as the n-grams
        of "pool"; with `cache`, those that were made with it. Absent ones are empty.
      shared: what sources of drafts read for all sequences, by their names: for "corpus" the index of other texts, for
        "recycled" the prior that it falls back on, or none.
      has_drafts: bool[B], whether steps verify drafts for a sequence; None for all sequences. Where no sequence that
        runs has any, steps are plain.
      has_logprobs: bool[B], whether log-probabilities are recorded for a sequence where `DecodeConfig.logprobs`; None
        for all sequences.
      constraint: the tokens that the texts may have; None for any.
    """

    prompts: jax.Array
    lengths: jax.Array
    stopping: Stopping
    key: jax.Array
    sampling: Sampling = Sampling()
    costs: Annotated[jax.Array | None, SHARED] = None
    cache: Cache | None = None
    sources: dict[str, State] = flax.struct.field(default_factory=dict)
    shared: Annotated[dict[str, Any], SHARED] = flax.struct.field(default_factory=dict)
    has_drafts: jax.Array | None = None
    has_logprobs: jax.Array | None = None
    constraint: Constraint | None = None

    def rows(self, indices: np.ndarray) -> Self:
        """Returns the inputs of the sequences with these indices, int[n]. What all share stays as it is.

        A sequence whose key is of its own keeps its noise; one that shares a key draws that of its new place.
        """

        def take(arrays: Any) -> Any:
            if type(arrays) is tuple:  # of constraints
                return tuple(map(take, arrays))
            if not dataclasses.is_dataclass(arrays) or isinstance(arrays, type):
                return jax.tree.map(lambda array: array[indices], arrays)
            fields = (field for field in dataclasses.fields(arrays) if field.metadata.get("pytree_node", True))
            names = (field.name for field in fields if not is_shared(field))
            return dataclasses.replace(arrays, **{name: take(getattr(arrays, name)) for name in names})

        key = self.key
        if key.ndim:
            data = np.asarray(jax.random.key_data(key))  # on the host: to index on the device compiles a program
            key = jax.random.wrap_key_data(data[indices], impl=jax.random.key_impl(key))
        without: Any = dataclasses.replace(self, key=None)  # type: ignore[arg-type]  # which may be shared
        return dataclasses.replace(take(without), key=key)


@flax.struct.dataclass
class Prefix:
    """The result of reading prompts, all but their last tokens.

    Attributes:
      cache: in the shape of `Decoder.init_cache` for C tokens; None before the first token is read.
      sources: the states of sources that read prompts, by their names, array[B, ...] in each array.
    """

    cache: Cache
    sources: dict[str, State] = flax.struct.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static settings that programs are compiled for, besides the shapes of `Inputs`.

    Attributes:
      decoder: the model.
      lookahead: the window, and the drafts with the way to verify them. Its `relative_step_time` must be None: the
        costs of steps are an array, `Inputs.costs`, so that other values compile nothing.
      logprobs: whether to record the log-probabilities of the generated tokens.
      top_logprobs: K, the number of the most probable tokens to record with `logprobs`.
      chunks: sizes of the forward passes that read prompts; see `CHUNKS`.
      paged: whether an engine holds the layers of a `KVCache` that have no window in pages, apart from its rows.
      mesh: the devices that the programs run on, a result of `jlade.mesh.split`; None for those of the arrays.

    Raises:
      ValueError: when `lookahead.relative_step_time` is set, or `mesh` has not the axes of `split`.
    """

    decoder: Decoder
    lookahead: LookaheadConfig
    logprobs: bool = False
    top_logprobs: int = 0
    chunks: Chunks = CHUNKS
    paged: bool = False
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if self.lookahead.relative_step_time is not None:
            raise ValueError(
                "lookahead.relative_step_time must be None in a DecodeConfig, got "
                f"{self.lookahead.relative_step_time}: pass Inputs.costs"
            )
        if self.mesh is not None and COPIES not in self.mesh.axis_names:
            raise ValueError("mesh must be that of a DecodeConfig made by jlade.prepare(..., mesh=...)")

    @property
    def vocabulary(self) -> VocabularyShard:
        """The tokens whose logits a device has."""
        return VocabularyShard.of(self.decoder.vocab_size, self.mesh)

    @property
    def sources(self) -> Sources:
        """The sources of drafts."""
        return Sources.of(self.lookahead, self.vocabulary)


@flax.struct.dataclass
class Info:
    """The part of the state that is only recorded: no step depends on it."""

    accepted: jax.Array  # [B, C] int32, tokens accepted in each step
    num_drafted: jax.Array  # [B, C] int32, tokens that each step verified
    contributed: jax.Array | None  # [B, S] int32, accepted tokens of each source of `TABLE`; None for the pool alone
    logprobs: LogProbs | None  # None when not asked for


@flax.struct.dataclass
class Memory:
    """The large part of the state. Programs that make steps in place take over its buffers."""

    cache: Cache  # for C tokens
    drafts: Drafts  # for the next step, with the states of their sources


@flax.struct.dataclass
class DecodeState:
    """The state between two steps, for B sequences of up to C tokens each.

    The current token is the last of `num_tokens`. The model has not read it yet, so the cache holds one entry less.

    Attributes:
      tokens: int32[B, C], prompt and accepted tokens.
      num_tokens: int32[B], of prompt and text.
      num_steps: int32[B], forward passes made; prefill is not counted.
      done: bool[B], whether the text has ended.
      inputs: the request without prompts, cache and sources; its key is the threefry key of each sequence, key[B].
      memory: the cache, and the drafts for the next step with the states of their sources.
      window: int32[B, N - 1, W].
      counts: how often each token occurs in prompt and text, int32[B, V] each; None when no control counts tokens.
      stop_state: int32[B], of `StopStrings`; None without stop strings.
      constraint_state: array[B, ...] in each array; None without a constraint.
      pace: of adaptive steps; None when every step has the full width.
      info: what steps record: no step depends on it.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    num_steps: jax.Array
    done: jax.Array
    inputs: Inputs
    memory: Memory
    window: jax.Array
    counts: TokenCounts | None
    stop_state: jax.Array | None
    constraint_state: Any
    pace: Annotated[Pace | None, SHARED]
    info: Info

    @property
    def sources(self) -> dict[str, State]:
        """The states of the sources of drafts, by their names, array[B, ...] in each array."""
        return self.memory.drafts.states

    @property
    def cache(self) -> Cache:
        """The cache, of C tokens for each sequence."""
        return self.memory.cache

    @property
    def drafts(self) -> Drafts:
        """The drafts for the next step, with the states of their sources."""
        return self.memory.drafts

    def with_cache(self, cache: Cache) -> Self:
        """Returns the state with another cache, None for none."""
        return dataclasses.replace(self, memory=dataclasses.replace(self.memory, cache=cache))

    def with_drafts(self, drafts: Drafts) -> Self:
        """Returns the state with other drafts."""
        return dataclasses.replace(self, memory=dataclasses.replace(self.memory, drafts=drafts))
