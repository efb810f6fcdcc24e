"""The programs of an engine: which of them are there while the others compile, those that requests wait for first.

A request waits for programs of its own alone. It runs by the steps of the fewest rows that are there and suffice: more
rows than it needs give the same text. Steps without drafts compile in a part of the time, so they come first, and stand
in for the steps of all widths until those are there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jlade.constraints.blocks import Blocks
from jlade.constraints.tokens import Table
from jlade.decoding import ahead
from jlade.decoding.state import DecodeConfig, Prefix
from jlade.engine import copies, rows, scoring
from jlade.engine.pages import PagePool
from jlade.engine.rows import EngineState, Row
from jlade.engine.width import Width
from jlade.generation.prompts import HostArray
from jlade.generation.saved_programs import Facts, described
from jlade.models.base import Params

# Steps of all widths; those in which rows read; plain ones without drafts; what keeps prefixes; what scores prompts
Kind = Literal["steps", "reading", "rest", "prefixes", "scores"]


class Part(NamedTuple):
    """The programs of a kind for a number of rows, and those that lead to as many rows."""

    num_rows: int
    kind: Kind


class Programs:
    """The programs that an engine may run: all before `begin`, as one that is not there compiles when it first runs.

    Args:
      widths: of the steps of a state, by its number of rows.
      pool: of the pages, for shapes of parameters.
      beside: whether rows read their prompts in the steps of the others.
    """

    def __init__(
        self,
        params: Params,
        config: DecodeConfig,
        widths: Mapping[int, Width],
        size: rows.Size,
        pool: PagePool,
        beside: bool,
    ):
        self._pool = pool
        self._params, self._config, self._widths, self._size = ahead.shapes(params), config, widths, size
        self._sizes, self._beside = sorted(widths), beside
        self._has_rests = config.lookahead.has_forecast
        self._left: tuple[Part, ...] = ()  # to compile, the likeliest first
        self._wanted: set[Part] = set()  # by requests
        self._states: dict[int, EngineState] = {}  # shapes, by the number of rows

    def facts(self, shared: dict[str, Any]) -> Facts:
        """Returns the facts that decide the programs, those that people name first; `shared` is of all rows."""
        named = {"use": "engine", "max_sequences": str(self._sizes[-1]), "capacity": str(self._size.capacity)}
        named |= {"pages": str(self._pool.num_pages)} if self._pool.is_used else {}
        more = {"rows": self._size, "costs": self._widths[self._sizes[-1]].costs, "shared": shared}
        return described(named, self._params, self._config, **more)

    @property
    def num_left(self) -> int:
        """Number of parts that are to be compiled."""
        return len(self._left)

    def find(self, num_rows: int, kind: Kind = "steps") -> int | None:
        """Returns the fewest rows, at least so many, whose steps are there; if none are, the next to compile are."""
        parts = [Part(size, kind) for size in self._sizes if size >= num_rows]
        ready = next((part.num_rows for part in parts if part not in self._left), None)
        if ready is None:
            self._wanted.update(parts[:1])
        return ready

    def get(self, num_rows: int, kind: Kind = "steps") -> int:
        """Returns the rows of `find`, or the fewest if there are none, whose steps compile when they run."""
        return self.find(num_rows, kind) or next(size for size in self._sizes if size >= num_rows)

    def may_score(self) -> bool:
        """Returns whether the log-probabilities of prompts are there. If they are not, they are compiled next."""
        scores = Part(self._sizes[0], "scores")
        self._wanted.add(scores)
        return scores not in self._left

    def may_keep(self, num_rows: int) -> bool:
        """Returns whether the prefixes of so many rows can be kept."""
        return Part(num_rows, "prefixes") not in self._left

    def may_rest(self, num_rows: int) -> bool:
        """Returns whether the steps without drafts of so many rows are there: of the fewest, whose steps are short."""
        return self._has_rests and num_rows == self._sizes[0] and Part(num_rows, "rest") not in self._left

    def stands_in(self, num_rows: int) -> bool:
        """Returns whether steps without drafts take the place of those of all widths, which are not there yet."""
        return self.find(num_rows) is None and num_rows <= self._sizes[0] and self.may_rest(self._sizes[0])

    def may_step(self, num_rows: int) -> bool:
        """Returns whether steps of so many rows are there, of whatever widths."""
        return self.find(num_rows) is not None or self.stands_in(num_rows)

    def begin(self, row: Row) -> None:
        """Makes requests wait for the programs that `compile_next` compiles. `row` is that of any request."""
        self._row = ahead.shapes(row)
        fewest, *more = self._sizes
        kinds: list[Kind] = ["steps", "reading", "prefixes"] if self._beside else ["steps", "prefixes"]
        # All rows before a part of them, whose place they can take.
        parts = [Part(size, kind) for size in (fewest, *reversed(more)) for kind in kinds]
        if self._has_rests:
            parts.insert(0, Part(fewest, "rest"))
        self._left = (*parts, Part(fewest, "scores"))

    def want_nothing(self) -> None:
        """Forgets what requests wait for, as they may run meanwhile, or have gone."""
        self._wanted.clear()

    def compile_next(self) -> None:
        """Compiles what a request waits for, otherwise the likeliest. After an error requests meet it themselves."""
        part = next((part for part in self._left if part in self._wanted), self._left[0])
        try:
            self.compile(part)
        finally:
            self._left = tuple(other for other in self._left if other != part)

    def end(self) -> None:
        """Lets programs that are not there compile when they first run."""
        self._left = ()

    def compile(self, part: Part) -> None:
        """Compiles a part, and what it needs."""
        state, config, capacity = self._state(part.num_rows), self._config, self._size.capacity
        match part:
            case Part(_, "rest"):
                rows.rest(self._params, self._pool.attach_to(state.whole(), {}), config, 1, 0)
            case Part(_, "scores"):
                cache = self._pool.attach(self._prefix.cache, {})
                scoring.of_chunk(self._params, cache, self._row.inputs.prompts, config=self._config)
            case Part(num_rows, "prefixes"):
                for size in copies.sizes(capacity):
                    kept = copies.keep(self._params, copies.prefix_of(state.rows, config), 0, size, config)
                    if num_rows == self._sizes[0]:
                        copies.keep(self._params, self._prefix, 0, size, config)
                        copies.restore(self._params, kept, 0, config, capacity)
            case Part(num_rows, kind):
                until: HostArray | None = np.zeros(num_rows, np.int32) if kind == "reading" else None
                before = self._widths[num_rows].put(self._pool.attach_to(state.whole(), {}))
                after = self._pool.detach_from(rows.run(self._params, before, config, 1, 0, until))
                # On several devices another program than for arrays that were placed by `_insert` itself.
                rows.insert(state.after(after), self._prefix, self._row, 0, config)

    def empty(self, params: Params, row: Row) -> EngineState:
        """Returns the state of as few rows as there may be, without requests."""
        size = self._size
        state = rows.empty(params, row, config=self._config, num_rows=self._sizes[0], grammar=size.grammar)
        return dataclasses.replace(state, shared=row.inputs.shared)

    @functools.cached_property
    def _table(self) -> Table:
        """A table with the shapes of any in a row."""
        class_of_token: HostArray = np.zeros(self._config.decoder.vocab_size, np.int32)
        none: HostArray = np.zeros(0, np.int32)
        blocks, _ = Blocks.of(none, none, none, num_states=1, num_classes=2)
        return Table(blocks, class_of_token, class_of_token[:1])

    @functools.cached_property
    def _prefix(self) -> Prefix:
        """The shapes of a prompt that has been read."""
        pool, prefix = self._pool, rows.unread(self._params, config=self._config, capacity=self._size.capacity)
        prefix = dataclasses.replace(prefix, cache=pool.attach(prefix.cache, {}))
        prefix = rows.read(self._params, prefix, self._row, 0, 1, self._config)[0]
        pool.compile()
        return dataclasses.replace(prefix, cache=pool.detach(prefix.cache))

    def _state(self, num_rows: int) -> EngineState:
        """Returns the shapes of the state of so many rows. The programs that lead there and back are compiled."""
        if num_rows not in self._states:
            place, config = self._sizes.index(num_rows), self._config
            if place == 0:
                state = self.empty(self._params, self._row)
            else:
                fewer = self._sizes[place - 1]
                state = rows.resize(self._state(fewer), [-1] * num_rows, config)
                rows.resize(state, [-1] * fewer, config)
            state = rows.insert(state, self._prefix, self._row, 0, config)
            if self._size.grammar:
                state = rows.put_table(state, self._table, 0, config)
            rows.take(state.rows, 0)
            self._states[num_rows] = rows.end(state, set())
            if self._pool.is_used:
                rows.put_in(state, rows.take_out(state, 0, config), 0, config)
        return self._states[num_rows]
