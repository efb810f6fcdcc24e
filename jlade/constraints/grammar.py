"""Grammars: what a whole text may be, compiled on the host into tables that a step reads."""

import dataclasses
import functools
import json
import os
import zipfile
from collections.abc import Sequence
from typing import Annotated, Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.constraints import automaton, ebnf, json_schema, moves, regex, tags
from jlade.constraints.automaton import Automaton, Expression, Repeat
from jlade.constraints.moves import DEAD
from jlade.constraints.tags import MAX_BREAKS, Tags
from jlade.constraints.tokens import Table
from jlade.drafts.tree import NONE
from jlade.errors import ArgumentValueError
from jlade.files import written_whole
from jlade.mesh import SHARED

LANES = 128  # the entries of a state are a multiple of these, so that TPUs read them whole
HEADER = 3  # of a state: its likely token, and the least and most iterations of its loop
ROW_CLASSES = 1024 - HEADER  # most classes of a table in a row of an engine


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The texts that a generation may have, made by `json_schema`, `json`, `regex`, `choice` or `ebnf`.

    It is compiled for a tokenizer when it is first used, and kept by its content. `save` writes it to a file.
    """

    kind: str
    source: str
    saved: Automaton | None = dataclasses.field(default=None, compare=False, repr=False)  # of the file it was read from

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
        """Returns the texts that match a regular expression as a whole, as `re.fullmatch` with `re.ASCII` finds them.

        Raises:
          ValueError: the pattern is wrong, or has what is not supported: references to groups, look-ahead, look-behind,
            atomic groups and possessive quantifiers.
        """
        return cls("regex", pattern)._checked()

    @classmethod
    def choice(cls, options: Sequence[str]) -> Self:
        """Returns the texts of a list."""
        if isinstance(options, str) or not options or not all(isinstance(option, str) for option in options):
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
        """Returns texts with tagged parts; see `jlade.constraints.tags`.

        Raises:
          ValueError: a schema is wrong, or asks for what is not supported; names the tag, the path and the keyword.
        """
        return cls("tags", json.dumps(dataclasses.asdict(tags)))._checked()

    def after(self, end: str) -> Self:
        """Returns the texts of this grammar after any text up to its first `end`, and up to two line breaks."""
        return type(self)("after", json.dumps([end, self.kind, self.source]))._checked()

    @property
    def is_tagged(self) -> bool:
        """Whether the texts have tagged parts."""
        return self.kind == "tags" or (self.kind == "after" and json.loads(self.source)[1] == "tags")

    @property
    def automaton(self) -> Automaton:
        """The automaton over bytes, which may count."""
        return self.saved or _automaton(self, counts=True)

    @property
    def unrolled(self) -> Automaton:
        """The automaton that does not count."""
        return _automaton(self, counts=False)

    def accepts(self, text: str) -> bool:
        """Returns whether a whole text is one of the grammar.

        No text has the special tokens of tags, which have no characters, or half of a surrogate pair.
        """
        try:
            return self.automaton.accepts(text.encode())
        except UnicodeEncodeError:
            return False

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the grammar with its automaton, of which its table for a tokenizer is made.

        Raises:
          ValueError: there is a file at `path`.
        """
        content = np.frombuffer(json.dumps([self.kind, self.source]).encode(), np.uint8)
        arrays = {name: array for name, array in vars(self.automaton).items() if array is not None}
        with written_whole(path) as partial, open(partial, "wb") as file:
            np.savez_compressed(file, grammar=content, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Returns a grammar that `save` wrote, whose automaton is not made again.

        Raises:
          ValueError: the file has no grammar; names it.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            kind, source = json.loads(arrays.pop("grammar").tobytes())
            return cls(str(kind), str(source), Automaton(**arrays).checked())
        except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"path must be a file of jlade.Grammar.save, got {os.fspath(path)!r}: {error}") from error

    def _checked(self) -> Self:
        _ = self.automaton
        return self


@functools.lru_cache(maxsize=256)
def _automaton(grammar: Grammar, counts: bool) -> Automaton:
    if grammar.kind == "ebnf":
        return ebnf.parse(grammar.source, counts=counts)
    whole = automaton.build(_expression(grammar.kind, grammar.source), counts)
    if not whole.is_final.any():
        raise ValueError(f"the grammar of {grammar.kind} has no text")
    return whole


def _expression(kind: str, source: str) -> Expression:
    match kind:
        case "json_schema":
            return json_schema.parse(source)
        case "regex":
            return regex.parse(source)
        case "choice":
            return automaton.choice(*map(automaton.literal, json.loads(source)))
        case "ebnf":
            return ebnf.parse(source)
        case "tags":
            spec = Tags(**json.loads(source))
            return tags.parse(spec, spec.other and _expression(*spec.other))
        case "after":
            end, *rest = json.loads(source)
            breaks = Repeat(automaton.literal("\n"), 0, MAX_BREAKS)
            return automaton.sequence(tags.through(end), breaks, _expression(*rest))
    raise ValueError(f"kind must be json_schema, regex, choice, ebnf, tags or after, got {kind!r}")


def num_entries(table: Table) -> int:
    """Returns the number of entries of a table on a device, with those of the state of no grammar."""
    return _stride(table) * (1 + len(table.moves))


def check_size(table: Table, max_grammar: int) -> None:
    """Raises a ValueError for a table that is too large for a row of an engine, which has `max_grammar` entries."""
    number = num_entries(table)
    if number > max_grammar or table.num_classes > ROW_CLASSES:
        states, classes = table.moves.shape
        raise ArgumentValueError(
            "grammar",
            f"must have a table of at most max_grammar={max_grammar} entries and {ROW_CLASSES} classes of tokens, got "
            f"{number} entries of {states} states and {classes} classes",
        )


def _stride(table: Table) -> int:
    """Returns the number of entries of a state."""
    return LANES * -(-(HEADER + table.num_classes) // LANES)


def _entries(table: Table) -> np.ndarray:
    """Returns a table as entries: `HEADER` and the moves of each state, whose numbers begin at 1."""
    entries: np.ndarray = np.zeros((1 + len(table.moves), _stride(table)), np.int32)
    entries[0, 0] = NONE
    entries[1:, 0] = table.likely
    entries[1:, 1:HEADER] = (0, moves.UNBOUNDED) if table.bounds is None else table.bounds
    entries[1:, HEADER:] = DEAD
    entries[1:, HEADER : HEADER + table.num_classes] = np.where(table.moves == DEAD, DEAD, 1 + table.moves)
    return entries.reshape(-1, LANES)


@flax.struct.dataclass
class Tables:
    """The tables of the grammars of a batch: a `Constraint`, whose state is that of a table with its count.

    State 0 is that of a sequence without a grammar: tokens of all classes lead from it to itself. The grammar begins in
    state 1. The entries of a state are its likely token, as in `Table.likely`, the least and most iterations of its
    loop, and the moves of each class (`jlade.constraints.moves`).
    """

    entries: Annotated[jax.Array, SHARED]  # [P / LANES, LANES] int32
    class_of_token: Annotated[jax.Array, SHARED]  # [K V] int32, the place among its entries, in each of K tables
    first: jax.Array  # [B] int32, the first state of each sequence
    begin: jax.Array  # [B] int32, the place of its first entry
    stride: jax.Array  # [B] int32, the entries of a state
    classes: jax.Array  # [B] int32, the place of its table in `class_of_token`
    num_entries: int = flax.struct.field(pytree_node=False)  # of a state that are read, at least `stride`
    vocab_size: int = flax.struct.field(pytree_node=False)  # V

    @classmethod
    def of(cls, tables: Sequence[Table | None]) -> Self:
        """Returns the tables of B sequences, None for one without a grammar, padded so that few sizes occur."""
        different = list(dict.fromkeys(table for table in tables if table is not None))
        maximum = _padded(max(map(_stride, different)), LANES)
        vocab_size = len(different[0].class_of_token)
        # As many entries as are read come after the last state. The first ones are those of no grammar.
        size = sum(map(num_entries, different)) + maximum
        entries = np.zeros((_padded(size, 2**14) // LANES, LANES), np.int32)
        entries[0, 0] = NONE
        class_of_token = np.zeros((_padded(len(different), 1), vocab_size), np.int32)
        places = dict[Table | None, tuple[int, int, int, int]]({None: (0, 0, LANES, 0)})
        begin = 0
        for number, table in enumerate(different):
            entries[begin // LANES :][: num_entries(table) // LANES] = _entries(table)
            class_of_token[number] = HEADER + table.class_of_token
            places[table] = 1, begin, _stride(table), number * vocab_size
            begin += num_entries(table)
        of_batch = (np.array(column, np.int32) for column in zip(*(places[table] for table in tables), strict=True))
        arrays: Any = cls
        return arrays(entries, class_of_token.reshape(-1), *of_batch, maximum, vocab_size)

    def start(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return self.first

    def advance(self, state: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.maximum(self.after(state, token), 0)

    def restricts(self, state: jax.Array) -> jax.Array:
        """Returns whether the sequence has a grammar, [] bool."""
        return state != 0

    def after(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the states after tokens [...] int32, `DEAD` where the state does not allow them; counts may."""
        move = self._read(states, _read(self.class_of_token, self.classes + tokens))
        return jnp.where(move == DEAD, DEAD, moves.after(states, move))

    def likely(self, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens that are likely to come next [...] int32, `NONE` for none, and whether they are certain."""
        tokens = self._read(states, 0)
        return jnp.where(tokens < NONE, -2 - tokens, tokens), tokens >= 0

    def allowed(self, state: jax.Array) -> jax.Array:
        first = (self.begin + (state & moves.STATE) * self.stride) // LANES
        entries = jax.lax.dynamic_slice(self.entries, (first, 0), (self.num_entries // LANES, LANES)).reshape(-1)
        is_allowed = moves.is_allowed(state, entries, entries[1], entries[2])
        class_of_token = jax.lax.dynamic_slice(self.class_of_token, (self.classes,), (self.vocab_size,))
        return jax.lax.platform_dependent(is_allowed, class_of_token, tpu=by_product, default=by_index)

    def _read(self, states: jax.Array, entry: jax.Array | int) -> jax.Array:
        """Returns an entry of each of some states."""
        return _read(self.entries.reshape(-1), self.begin + (states & moves.STATE) * self.stride + entry)


@flax.struct.dataclass
class RowTables(Tables):
    """The tables of an engine's rows: each has one of its own, and all have one size, so that no grammar compiles.

    A row has a table or none by its state alone.
    """

    entries: jax.Array  # [B, P / LANES, LANES] int32
    class_of_token: jax.Array  # [B, V] int32

    @classmethod
    def empty(cls, num_rows: int, num_entries: int, vocab_size: int) -> Self:
        """Returns the tables of rows without grammars, with a place for `num_entries` entries each."""
        maximum = HEADER + ROW_CLASSES
        places = -(-num_entries // LANES) + maximum // LANES
        entries = jnp.zeros((num_rows, places, LANES), jnp.int32).at[:, 0, 0].set(NONE)
        zero = jnp.zeros(num_rows, jnp.int32)
        class_of_token = jnp.full((num_rows, vocab_size), HEADER, jnp.int32)
        return cls(entries, class_of_token, zero, zero, zero + LANES, zero, maximum, vocab_size)

    def of_row(self, table: Table) -> tuple[Self, np.ndarray]:
        """Returns the table of a row, with a first axis of 1, and its first state [1] int32, in NumPy."""
        entries: Any = np.zeros((1, *self.entries.shape[1:]), np.int32)
        entries[0, : num_entries(table) // LANES] = _entries(table)
        class_of_token: Any = HEADER + table.class_of_token[None]
        zero: Any = np.zeros(1, np.int32)
        stride = zero + _stride(table)
        row = dataclasses.replace(
            self, entries=entries, class_of_token=class_of_token, first=zero, begin=zero, stride=stride, classes=zero
        )
        return row, zero + 1


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


def _padded(number: int, minimum: int) -> int:
    """Returns the least power of two, times `minimum`, that is at least `number`."""
    return minimum * (1 << max(0, -(-number // minimum) - 1).bit_length())
