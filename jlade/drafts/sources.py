"""The sources of drafts together: their proposals for a text, and the tree made of these, for one sequence.

A source is a class and an entry of `TABLE`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import record as record_lib
from jlade.drafts import tree as tree_lib
from jlade.drafts.chain import Chain
from jlade.drafts.grammar import Grammar
from jlade.drafts.pool import Pool
from jlade.drafts.prediction import Prediction
from jlade.drafts.record import Record
from jlade.drafts.recycled import Recycled
from jlade.drafts.source import Passage, Prompt, Setting, Source, State, Step, Text
from jlade.drafts.suffix import Corpus, Suffix
from jlade.drafts.tree import NONE, Proposals, Tree, TreeShape
from jlade.vocabulary import VocabularyShard

# By the names of `LookaheadConfig.sources`. Of proposals with equal costs, those of an earlier source come first.
TABLE: dict[str, type[Source]] = {
    "prediction": Prediction,
    "pool": Pool,
    "suffix": Suffix,
    "corpus": Corpus,
    "recycled": Recycled,
    "chain": Chain,
    "grammar": Grammar,
}
NOISE_REACH = 6  # positions whose noise of sampling drafts use


@flax.struct.dataclass
class Drafts:
    """The tree for the next step, and the state of the sources, of one sequence; [B, ...] for a batch."""

    tree: Tree
    proposals: Proposals | None  # of all sources, of which the tree was made; None for a static form
    record: Record | None  # of the kinds of all sources; None for a static form
    states: dict[str, State]  # by source

    def none(self, where: jax.Array | bool = True) -> Self:
        """Returns drafts without tokens, for a text that went on without them; only `where` [] it did."""

        def clear(tokens: jax.Array) -> jax.Array:
            return jnp.where(where, NONE, tokens)

        proposals = self.proposals
        if proposals is not None:
            proposals = dataclasses.replace(proposals, tokens=clear(proposals.tokens))
        return dataclasses.replace(
            self, tree=dataclasses.replace(self.tree, tokens=clear(self.tree.tokens)), proposals=proposals
        )


@dataclasses.dataclass(frozen=True)
class Sources:
    """The sources of a setting, and the size M of the tree that they share.

    Without a size there is one source, and its proposals are the tree, whose form is static.
    """

    sources: tuple[tuple[str, Source], ...]
    tree_size: int | None

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        """Returns the sources of a setting."""
        sources = ((name, TABLE[name].of(lookahead, vocabulary)) for name in lookahead.reach)
        return cls(tuple(sources), lookahead.num_drafted if lookahead.has_tree else None)

    @property
    def readers(self) -> "Sources":
        """The sources that read prompts, equal for all settings that read alike."""
        readers = ((name, source.reader) for name, source in self.sources)
        return Sources(tuple((name, reader) for name, reader in readers if reader is not None), None)

    @property
    def specs(self) -> dict[str, Any]:
        """The `PartitionSpec` of each source's state."""
        return {name: source.spec for name, source in self.sources}

    def empty(self) -> dict[str, State]:
        """Returns the states that know nothing."""
        return {name: source.empty() for name, source in self.sources}

    def read(self, states: Mapping[str, State], passage: Passage) -> dict[str, State]:
        """Returns the states after a part of the prompt."""
        return {name: source.read(states[name], passage) for name, source in self.sources}

    def start(self, states: Mapping[str, State], prompt: Prompt) -> dict[str, State]:
        """Returns the states before the first step; see `Source.start`."""
        return {name: source.start(states[name], prompt) for name, source in self.sources}

    def propose(self, text: Text, rates: jax.Array) -> tuple[Proposals, np.ndarray]:
        """Returns L proposals of all sources, and the place of each one's source in `TABLE` [L] int32.

        The kinds of a source follow those of the sources before it.
        """
        parts, numbers, first = [], [np.zeros(0, np.int32)], 0
        for name, source in self.sources:
            proposed = source.propose(text.states[name], text, rates[first : first + len(source.rates)])
            parts.append(dataclasses.replace(proposed, kinds=first + proposed.kinds))
            numbers.append(np.full(len(proposed.tokens), list(TABLE).index(name), np.int32))
            first += len(source.rates)
        return Proposals.join(parts), np.concatenate(numbers)

    def draft(self, record: Record | None, text: Text, has_drafts: jax.Array | None) -> Drafts:
        """Returns the drafts for the step after a text, with the states of `text`.

        The record is None before the first step, and always for a static form. `has_drafts` [] bool says whether drafts
        are made for the text; None if they are for all texts.
        """
        if record is None:
            record = record_lib.start(np.concatenate([np.zeros(0), *(source.rates for _, source in self.sources)]))
        proposals, numbers = self.propose(text, record.rates)
        if has_drafts is not None:
            tokens = jnp.where(has_drafts, proposals.tokens, NONE)
            proposals = dataclasses.replace(proposals, tokens=tokens)
        if self.tree_size is None:
            shape = TreeShape.join([source.shape for _, source in self.sources if source.shape is not None])
            return Drafts(Tree(proposals.tokens, shape, jnp.asarray(numbers), None), None, None, text.states)
        chances = record.rates[proposals.kinds]
        if text.noise is not None:
            at = proposals.depths - 1, jnp.maximum(proposals.tokens, 0)
            chances = record_lib.given_noise(chances, text.noise.at[at].get(mode="fill", fill_value=jnp.nan))
        size = min(self.tree_size, len(proposals.tokens))
        tree = tree_lib.merge(proposals, numbers, record_lib.cost(chances), size)
        return Drafts(tree, proposals, record, text.states)

    def learn(self, drafts: Drafts, tokens: jax.Array, num_accepted: jax.Array, step: Step) -> Drafts:
        """Returns the drafts of a step with the states and the record after it; their tree stays that of the step.

        Of `tokens` [A] int32, those after the current one, `num_accepted` were accepted.
        """
        record = drafts.record
        if record is not None and drafts.proposals is not None:
            record = record_lib.update(record, drafts.proposals, tokens, num_accepted)
        states = {name: source.learn(drafts.states[name], step) for name, source in self.sources}
        if step.passage is not None:
            states |= self.readers.read(states, step.passage)
        return dataclasses.replace(drafts, states=states, record=record)
