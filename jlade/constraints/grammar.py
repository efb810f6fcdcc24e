"""Grammars: what a whole text may be, compiled on the host into tables that a step reads."""

import dataclasses
import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.constraints import automaton, ebnf, json_schema, lark, moves, regex, tags
from jlade.constraints.automaton import Automaton, Expression, TooLargeError
from jlade.constraints.blocks import LANES, padded
from jlade.constraints.moves import DEAD
from jlade.constraints.tags import Tags
from jlade.constraints.tokens import Table
from jlade.drafts.tree import NONE
from jlade.errors import ArgumentValueError
from jlade.files import written_whole
from jlade.mesh import SHARED

HEADER = 8  # entries of the header of a state, which begins with these
LIKELY, LEAST, MOST, COLUMNS, ROW = range(5)
ROW_CLASSES = 2048  # most classes of a table in a row of an engine
ROW_COLUMNS = 1024  # most columns of its blocks
CHUNK = 2**16  # entries that are written into a row at once
WORD = 16  # bits
# Grammars of rules, whose automata may count.
RULES: dict[str, Callable[..., Automaton]] = {
    "ebnf": ebnf.parse,
    "lark": functools.partial(lark.parse, of_json=json_schema.parse),
}


class TableSizeError(ArgumentValueError):
    """The table of a grammar is too large for a row of an engine."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The texts that a generation may have, made by `json_schema`, `json`, `regex`, `choice`, `ebnf` or `lark`.

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
    def lark(cls, rules: str) -> Self:
        """Returns the texts of the rule "start" of a grammar of Lark or llguidance; see `jlade.constraints.lark`.

        Raises:
          ValueError: names the line and what is wrong or not supported.
        """
        return cls("lark", rules)._checked()

    @classmethod
    def tags(cls, tags: Tags, is_checked: bool = True) -> Self:
        """Returns texts with tagged parts; see `jlade.constraints.tags`.

        Args:
          tags: the parts.
          is_checked: whether errors come at once; else when the grammar is first used, and not if its table is known.

        Raises:
          ValueError: a schema is wrong, or asks for what is not supported; names the tag, the path and the keyword.
        """
        grammar = cls("tags", json.dumps(tags, default=vars))
        return grammar._checked() if is_checked else grammar

    def after(self, thoughts: Sequence[tuple[str, str]], content: tuple[str, str] = ("", "")) -> Self:
        """Returns the texts of this grammar after thoughts, which may be missing unless the prompt has begun them.

        Args:
          thoughts: the texts around them, special tokens written by `special`; the first one is empty if the prompt has
            begun them. Up to two line breaks may follow.
          content: texts that may be around one of this grammar, such as special tokens.
        """
        if not thoughts and not any(content):
            return self
        return type(self)("after", json.dumps([thoughts, content, self.kind, self.source]))._checked()

    @property
    def is_tagged(self) -> bool:
        """Whether the texts have tagged parts."""
        return self.kind == "tags" or (self.kind == "after" and json.loads(self.source)[2] == "tags")

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


def _automaton(grammar: Grammar, counts: bool) -> Automaton:
    found = _built(grammar, counts)
    if isinstance(found, Automaton):
        return found
    raise TooLargeError(found.name)


@functools.lru_cache(maxsize=1024)
def _built(grammar: Grammar, counts: bool) -> Automaton | TooLargeError:
    """Returns an automaton, or the error that it is too large, which may take as long to find."""
    try:
        return _new_automaton(grammar, counts)
    except TooLargeError as error:
        return error.with_traceback(None)


def _new_automaton(grammar: Grammar, counts: bool) -> Automaton:
    if grammar.kind in RULES:
        return RULES[grammar.kind](grammar.source, counts=counts)
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
        case "ebnf" | "lark":
            return RULES[kind](source)
        case "tags":
            spec = Tags(**json.loads(source))
            return tags.parse(spec, spec.other and _expression(*spec.other))
        case "after":
            thoughts, content, kind, source = json.loads(source)
            answer = _expression(kind, source)
            if kind != "tags":  # whose blocks begin otherwise, and whose other text may have thoughts too
                answer = tags.unlike(answer, [begin for begin, _ in thoughts])
            return tags.after_thoughts(thoughts, content, answer)
    raise ValueError(f"kind must be json_schema, regex, choice, ebnf, lark, tags or after, got {kind!r}")


class _Layout(NamedTuple):
    """The places of the parts of a table among its entries: its header begins at 0."""

    nothing: int  # zeros: the row and the columns of the state of no grammar
    columns: int
    rows: int
    end: int

    @classmethod
    def of(cls, table: Table) -> Self:
        columns = padded(table.num_classes)
        nothing = padded(HEADER * (1 + table.num_states))
        rows = nothing + columns * (1 + len(table.blocks.columns))
        return cls(nothing, nothing + columns, rows, rows + len(table.blocks.moves))


def num_entries(table: Table) -> int:
    """Returns the number of entries of a table on a device, with those of the state of no grammar."""
    return _Layout.of(table).end


def check_size(table: Table, max_grammar: int) -> None:
    """Raises a TableSizeError for a table that is too large for a row of an engine, of `max_grammar` entries."""
    number, columns = num_entries(table), table.blocks.num_columns
    if number > max_grammar or table.num_classes > ROW_CLASSES or columns > ROW_COLUMNS:
        raise TableSizeError(
            "grammar",
            f"must have a table of at most max_grammar={max_grammar} entries, {ROW_CLASSES} classes of tokens and "
            f"{ROW_COLUMNS} columns of a block, got {number} entries of {table.num_states} states, "
            f"{table.num_classes} classes and {columns} columns",
        )


def _entries(table: Table, begin: int) -> np.ndarray:
    """Returns the entries [P / LANES, LANES] of a table that begin at some place. Numbers of states begin at 1."""
    layout, blocks = _Layout.of(table), table.blocks
    entries: np.ndarray = np.zeros(layout.end, np.int32)
    header = entries[: HEADER * (1 + table.num_states)].reshape(-1, HEADER)
    header[0, LIKELY], header[0, COLUMNS:] = NONE, begin + layout.nothing
    header[1:, LIKELY] = table.likely
    header[1:, LEAST : MOST + 1] = (0, moves.UNBOUNDED) if table.bounds is None else table.bounds
    header[1:, COLUMNS] = begin + layout.columns + padded(table.num_classes) * blocks.block
    header[1:, ROW] = begin + layout.rows + blocks.begin
    entries[layout.columns : layout.rows].reshape(len(blocks.columns), -1)[:, : table.num_classes] = blocks.columns
    entries[layout.rows :] = np.where(blocks.moves == DEAD, DEAD, 1 + blocks.moves)
    return entries.reshape(-1, LANES)


@flax.struct.dataclass
class Tables:
    """The tables of the grammars of a batch: a `Constraint`, whose state is that of a table with its count.

    State 0 is that of a sequence without a grammar: tokens of all classes lead from it to itself. The grammar begins in
    state 1. A table has a header of each state, the columns of all classes in each block, and the rows of moves
    (`jlade.constraints.blocks`). A header has the likely token, as in `Table.likely`, the least and most iterations of
    the loop, and the places of the state's columns and row.
    """

    entries: Annotated[jax.Array, SHARED]  # [P / LANES, LANES] int32
    class_of_token: Annotated[jax.Array, SHARED]  # [K V] int32, in each of K tables
    first: jax.Array  # [B] int32, the first state of each sequence
    begin: jax.Array  # [B] int32, the place of its table
    classes: jax.Array  # [B] int32, the place of its table in `class_of_token`
    num_classes: int = flax.struct.field(pytree_node=False)  # that are read, at least those of each table
    num_columns: int = flax.struct.field(pytree_node=False)  # of a row that are read, at least those of each block
    vocab_size: int = flax.struct.field(pytree_node=False)  # V

    @classmethod
    def of(cls, tables: Sequence[Table | None]) -> Self:
        """Returns the tables of B sequences, None for one without a grammar, padded so that few sizes occur."""
        different = list(dict.fromkeys(table for table in tables if table is not None))
        num_classes = _power(max(table.num_classes for table in different), LANES)
        num_columns = _power(max(table.blocks.num_columns for table in different), LANES)
        vocab_size = len(different[0].class_of_token)
        # As many entries as are read come after the last row.
        size = sum(map(num_entries, different)) + max(num_classes, num_columns)
        entries = np.zeros((_power(size, 2**14) // LANES, LANES), np.int32)
        class_of_token = np.zeros((_power(len(different), 1), vocab_size), np.int32)
        places = dict[Table | None, tuple[int, int, int]]({None: (0, 0, 0)})  # in state 0 of the first table
        begin = 0
        for number, table in enumerate(different):
            entries[begin // LANES :][: num_entries(table) // LANES] = _entries(table, begin)
            class_of_token[number] = table.class_of_token
            places[table] = 1, begin, number * vocab_size
            begin += num_entries(table)
        of_batch = (np.array(column, np.int32) for column in zip(*(places[table] for table in tables), strict=True))
        arrays: Any = cls
        return arrays(entries, class_of_token.reshape(-1), *of_batch, num_classes, num_columns, vocab_size)

    def start(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return self.first

    def advance(self, state: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.maximum(self.after(state, token), 0)

    def restricts(self, state: jax.Array) -> jax.Array:
        """Returns whether the sequence has a grammar, [] bool."""
        return state != 0

    def after(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the states after tokens [...] int32, `DEAD` where the state does not allow them; counts may."""
        column = self._read(self._header(states, COLUMNS) + _read(self.class_of_token, self.classes + tokens))
        move = self._read(self._header(states, ROW) + column)
        return jnp.where(move == DEAD, DEAD, moves.after(states, move))

    def likely(self, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens that are likely to come next [...] int32, `NONE` for none, and whether they are certain."""
        tokens = self._header(states, LIKELY)
        return jnp.where(tokens < NONE, -2 - tokens, tokens), tokens >= 0

    def allowed(self, state: jax.Array) -> jax.Array:
        row = self._slice(self._header(state, ROW), self.num_columns)
        columns = self._slice(self._header(state, COLUMNS), self.num_classes)
        is_allowed = moves.is_allowed(state, row, self._header(state, LEAST), self._header(state, MOST))
        class_of_token = jax.lax.dynamic_slice(self.class_of_token, (self.classes,), (self.vocab_size,))
        of_class = jax.lax.platform_dependent(is_allowed, columns, tpu=by_comparison, default=by_index)
        return jax.lax.platform_dependent(of_class, class_of_token, tpu=by_product, default=by_bits)

    def _header(self, states: jax.Array, entry: int) -> jax.Array:
        """Returns an entry of the header of each of some states."""
        return self._read(self.begin + (states & moves.STATE) * HEADER + entry)

    def _read(self, places: jax.Array) -> jax.Array:
        """Returns the entries at some places."""
        return _read(self.entries.reshape(-1), places)

    def _slice(self, place: jax.Array, number: int) -> jax.Array:
        """Returns entries one after the other."""
        first = (place // LANES, 0)
        return jax.lax.dynamic_slice(self.entries, first, (number // LANES, LANES)).reshape(-1)


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
        chunks = -(-(num_entries + ROW_CLASSES) // CHUNK)
        entries = jnp.zeros((num_rows, chunks * CHUNK // LANES, LANES), jnp.int32)
        entries = entries.at[:, 0, :HEADER].set(np.array([NONE, 0, 0, LANES, LANES, 0, 0, 0], np.int32))
        zero = jnp.zeros(num_rows, jnp.int32)
        class_of_token = jnp.zeros((num_rows, vocab_size), jnp.int32)
        return cls(entries, class_of_token, zero, zero, zero, ROW_CLASSES, ROW_COLUMNS, vocab_size)


def chunks(table: Table) -> Iterator[tuple[int, np.ndarray]]:
    """Yields what a row of `RowTables` gets for a table: chunks [CHUNK / LANES, LANES], and where each begins.

    They have one shape, and no more of them are moved to the device than the table fills.
    """
    entries = _entries(table, 0)
    size = CHUNK // LANES
    for begin in range(0, len(entries), size):
        part = entries[begin : begin + size]
        yield begin, np.pad(part, ((0, size - len(part)), (0, 0)))


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


def by_index(is_allowed: jax.Array, places: jax.Array) -> jax.Array:
    """Returns what is allowed [N] bool, given which columns or classes are [C], and the place of each among them."""
    return is_allowed[places]


def by_bits(is_allowed: jax.Array, places: jax.Array) -> jax.Array:
    """The same by words of bits, for C in multiples of `WORD`.

    They are a product of matrices, as XLA would do anything else for each token that is done for each class.
    """
    bits = is_allowed.reshape(-1, WORD).astype(jnp.float32)
    words = (bits @ (2.0 ** np.arange(WORD, dtype=np.float32))).astype(jnp.int32)
    places = places.astype(jnp.uint32)
    return (words[places // WORD] >> (places % WORD).astype(jnp.int32) & 1).astype(bool)


def by_comparison(is_allowed: jax.Array, places: jax.Array) -> jax.Array:
    """The same by comparing all: TPUs read single elements one by one."""
    is_at = places[None, :] == jnp.arange(len(is_allowed), dtype=jnp.int32)[:, None]
    return jnp.any(is_at & is_allowed[:, None], axis=0)


def by_product(is_allowed: jax.Array, places: jax.Array) -> jax.Array:
    """The same by a product of matrices, for many places that are those of all sequences."""
    classes = jnp.arange(len(is_allowed), dtype=jnp.int32)
    one_hot = (places[None, :] == classes[:, None]).astype(jnp.bfloat16)
    return is_allowed.astype(jnp.bfloat16) @ one_hot > 0


def _power(number: int, minimum: int) -> int:
    """Returns the least power of two, times `minimum`, that is at least `number`."""
    return minimum * (1 << max(0, -(-number // minimum) - 1).bit_length())
