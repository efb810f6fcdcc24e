"""Grammars: what a whole text may be, compiled on the host into tables that a step reads."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Annotated, Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.constraints import automaton, ebnf, json_schema, regex, tags
from jlade.constraints.automaton import DEAD, Automaton
from jlade.constraints.tags import Tags
from jlade.constraints.tokens import Table
from jlade.drafts.tree import NONE
from jlade.mesh import SHARED

ROW_CLASSES = 1024  # more than the classes of a table in a row of an engine


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The texts that a generation may have, made by `json_schema`, `json`, `regex`, `choice` or `ebnf`.

    It is compiled for a tokenizer when it is first used, and kept by its content.
    """

    kind: str
    source: str

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool | str) -> Self:
        """Returns JSON that a schema accepts; see `jlade.constraints.json_schema`.

        Properties come in the order of their declaration. Objects have no others unless `additionalProperties` says so.

        Raises:
          ValueError: the schema is wrong, or asks for what is not supported; names the path and the keyword.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls("json_schema", text)._checked()

    @classmethod
    def json(cls) -> Self:
        """Returns any JSON object, up to 3 levels deep."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Returns the texts that match a regular expression as a whole, in the syntax of Python's `re`.

        Raises:
          ValueError: the pattern is wrong, or has what is not supported: references, and assertions within it.
        """
        return cls("regex", pattern)._checked()

    @classmethod
    def choice(cls, options: Sequence[str]) -> Self:
        """Returns the texts of a list."""
        if isinstance(options, str) or not options or not all(isinstance(each, str) for each in options):
            raise ValueError(f"options must be one or more strings, got {options!r}")
        return cls("choice", json.dumps(list(options)))._checked()

    @classmethod
    def ebnf(cls, rules: str) -> Self:
        """Returns the texts of the rule "root" of a grammar in EBNF; see `jlade.constraints.ebnf`.

        Raises:
          ValueError: names the line and what is wrong.
        """
        return cls("ebnf", rules)._checked()

    @classmethod
    def tags(cls, tags: Tags) -> Self:
        """Returns texts with tagged parts in JSON; see `jlade.constraints.tags`.

        Raises:
          ValueError: a schema is wrong, or asks for what is not supported; names the tag, the path and the keyword.
        """
        return cls("tags", json.dumps(dataclasses.asdict(tags)))._checked()

    @property
    def automaton(self) -> Automaton:
        """The automaton over bytes."""
        return _automaton(self)

    def _checked(self) -> Self:
        _ = self.automaton
        return self


@functools.lru_cache(maxsize=256)
def _automaton(grammar: Grammar) -> Automaton:
    match grammar.kind:
        case "json_schema":
            return automaton.build(json_schema.parse(grammar.source))
        case "regex":
            return automaton.build(regex.parse(grammar.source))
        case "choice":
            return automaton.build(automaton.choice(*map(automaton.literal, json.loads(grammar.source))))
        case "ebnf":
            return automaton.build(ebnf.parse(grammar.source))
        case "tags":
            return automaton.build(tags.parse(Tags(**json.loads(grammar.source))))
    raise ValueError(f"kind must be json_schema, regex, choice, ebnf or tags, got {grammar.kind!r}")


@flax.struct.dataclass
class Tables:
    """The tables of the grammars of a batch: a `Constraint`. A state is the place of its first entry.

    The entries of a state are its likely token, as in `Table.likely`, and the states after tokens of each class, `DEAD`
    for none. State 0 is that of a sequence without a grammar: tokens of all classes lead from it to itself.
    """

    entries: Annotated[jax.Array, SHARED]  # [P] int32
    class_of_token: Annotated[jax.Array, SHARED]  # [K V] int32, the entry of each token in each of K tables
    first: jax.Array  # [B] int32, the first state of each sequence
    classes: jax.Array  # [B] int32, the place of its table in `class_of_token`
    num_entries: int = flax.struct.field(pytree_node=False)  # of a state that are read
    vocab_size: int = flax.struct.field(pytree_node=False)  # V

    @classmethod
    def of(cls, tables: Sequence[Table | None]) -> Self:
        """Returns the tables of B sequences, None for one without a grammar, padded so that few sizes occur."""
        different = list(dict.fromkeys(table for table in tables if table is not None))
        num_entries = _padded(1 + max(table.num_classes for table in different), 128)
        vocab_size = len(different[0].class_of_token)
        # The first entries are those of state 0, and as many come after the last state, whose row is read whole too.
        size = sum(table.num_entries for table in different)
        entries = np.zeros(_padded(size + 2 * num_entries, 2**14), np.int32)
        entries[0] = NONE
        class_of_token = np.zeros((_padded(len(different), 1), vocab_size), np.int32)
        places, begin = dict[Table | None, tuple[int, int]]({None: (0, 0)}), num_entries
        for number, table in enumerate(different):
            entries[begin : begin + table.num_entries] = table.entries(begin)
            class_of_token[number] = 1 + table.class_of_token
            places[table] = begin, number * vocab_size
            begin += table.num_entries
        first, classes = (np.array(each, np.int32) for each in zip(*(places[table] for table in tables), strict=True))
        arrays: Any = cls
        return arrays(entries, class_of_token.reshape(-1), first, classes, num_entries, vocab_size)

    def start(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return self.first

    def advance(self, state: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.maximum(self.after(state, token), 0)

    def after(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the states after tokens [...] int32, `DEAD` after those that may not come next."""
        return _read(self.entries, states + _read(self.class_of_token, self.classes + tokens))

    def likely(self, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens that are likely to come next [...] int32, `NONE` for none, and whether they are certain."""
        tokens = _read(self.entries, states)
        return jnp.where(tokens < NONE, -2 - tokens, tokens), tokens >= 0

    def allowed(self, state: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice(self.entries, (state,), (self.num_entries,))
        class_of_token = jax.lax.dynamic_slice(self.class_of_token, (self.classes,), (self.vocab_size,))
        return jax.lax.platform_dependent(row != DEAD, class_of_token, tpu=by_product, default=by_index)


@flax.struct.dataclass
class RowTables(Tables):
    """The tables of an engine's rows: each has one of its own, and all have one size, so that no grammar compiles.

    The entries of state 0 stay, so that a row has a table or none by its state alone. The table begins after them.
    """

    entries: jax.Array  # [B, P] int32
    class_of_token: jax.Array  # [B, V] int32

    @classmethod
    def empty(cls, num_rows: int, num_entries: int, vocab_size: int) -> Self:
        """Returns the tables of rows without grammars, with a place for `num_entries` entries each."""
        entries = jnp.zeros((num_rows, ROW_CLASSES + num_entries + ROW_CLASSES), jnp.int32).at[:, 0].set(NONE)
        zero = jnp.zeros(num_rows, jnp.int32)
        return cls(entries, jnp.ones((num_rows, vocab_size), jnp.int32), zero, zero, ROW_CLASSES, vocab_size)

    def of_row(self, table: Table) -> tuple[Self, np.ndarray]:
        """Returns the table of a row, with a first axis of 1, and its first state [1] int32, in NumPy."""
        entries: Any = np.zeros((1, self.entries.shape[1]), np.int32)
        entries[0, 0] = NONE
        entries[0, ROW_CLASSES : ROW_CLASSES + table.num_entries] = table.entries(ROW_CLASSES)
        class_of_token: Any = 1 + table.class_of_token[None]
        zero: Any = np.zeros(1, np.int32)
        row = dataclasses.replace(self, entries=entries, class_of_token=class_of_token, first=zero, classes=zero)
        return row, np.full(1, ROW_CLASSES, np.int32)


@jax.custom_batching.custom_vmap
def _read(array: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the elements of an array [P] at some places [...] int32 within it."""
    return array.at[places].get(mode="promise_in_bounds")


@_read.def_vmap
def _read_of_each(number: int, are_batched: list[bool], arrays: jax.Array, places: jax.Array) -> tuple[jax.Array, bool]:
    """Reads several arrays as one.

    XLA would read them by pairs of indices, and its compiler for CPUs takes twice the time for each of those reads that
    follow each other.
    """
    has_arrays, has_places = are_batched
    if not has_arrays:
        return _read(arrays, places), True
    if not has_places:
        places = jnp.broadcast_to(places, (number, *jnp.shape(places)))
    if arrays.size >= 2**31:
        return jax.vmap(lambda array, at: array[at])(arrays, places), True
    first = jnp.arange(number, dtype=jnp.int32) * arrays.shape[1]
    return _read(arrays.reshape(-1), places + first.reshape(-1, *[1] * (places.ndim - 1))), True


def by_index(is_allowed: jax.Array, class_of_token: jax.Array) -> jax.Array:
    """Returns which tokens are allowed [V], given which classes are [C], and the class of each token [V]."""
    return is_allowed[class_of_token]


def by_product(is_allowed: jax.Array, class_of_token: jax.Array) -> jax.Array:
    """The same by a product of matrices: TPUs read single elements one by one."""
    classes = jnp.arange(len(is_allowed), dtype=jnp.int32)
    one_hot = (class_of_token[None, :] == classes[:, None]).astype(jnp.bfloat16)
    return is_allowed.astype(jnp.bfloat16) @ one_hot > 0


def _padded(number: int, least: int) -> int:
    """Returns the least power of two, times `least`, that is at least `number`."""
    return least * (1 << max(0, -(-number // least) - 1).bit_length())
