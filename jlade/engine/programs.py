"""The programs of an engine: which of them are there while the others compile, those that requests wait for first.

A request waits for programs of its own alone. It runs by the fastest steps that are there and suffice: more controls or
more rows than it needs give the same text.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jlade.constraints.tokens import Table
from jlade.decoding import ahead
from jlade.decoding.state import DecodeConfig, Prefix
from jlade.engine import copies, rows, scoring
from jlade.engine.pages import PagePool
from jlade.engine.rows import EngineState, Row, StepProgram
from jlade.engine.width import Width
from jlade.generation.prompts import HostArray
from jlade.generation.saved_programs import Facts, described
from jlade.models.base import Params

# All widths; with rows that read; plain, without drafts
Kind = Literal["steps", "reading", "rest"]


class Steps(NamedTuple):
    """The program that makes steps of a number of rows with some controls, and those that lead to as many rows."""

    num_rows: int
    controls: StepProgram
    kind: Kind = "steps"


class Others(NamedTuple):
    """The programs that keep prefixes from a number of rows, or that of log-probabilities of prompts."""

    num_rows: int
    kind: Literal["prefixes", "scores"]


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
        # Steps that record log-probabilities without alternatives take hardly longer than those with all controls.
        is_used = {StepProgram.GRAMMAR: bool(size.grammar), StepProgram.ALL: bool(size.top_logprobs)}
        self._kinds = [program for program in StepProgram if is_used.get(program, True)]
        # Rounds of these kinds are few, or are made without them too.
        reading, rest = [StepProgram.SAMPLED, self._kinds[-1]], [StepProgram.GREEDY, StepProgram.SAMPLED]
        self._controls: dict[Kind, list[StepProgram]] = {"steps": self._kinds, "reading": reading, "rest": rest}
        self._left: tuple[Steps | Others, ...] = ()  # to compile, the likeliest first
        self._wanted: set[Steps | Others] = set()  # by requests
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

    def fastest(self, num_rows: int, controls: StepProgram, kind: Kind = "steps") -> Steps:
        """Returns the fastest steps of a kind, of at least so many rows with these controls."""
        return next(self._fitting(num_rows, controls, kind))

    def find(self, num_rows: int, controls: StepProgram, kind: Kind = "steps") -> Steps | None:
        """Returns the fastest ones of these that are there. If there are none, `fastest` is compiled next."""
        left = self._left
        ready = next((steps for steps in self._fitting(num_rows, controls, kind) if steps not in left), None)
        if ready is None:
            self._wanted.update(itertools.islice(self._fitting(num_rows, controls, kind), 1))
        return ready

    def get(self, num_rows: int, controls: StepProgram, kind: Kind = "steps") -> Steps:
        """Returns those of `find`, or `fastest` if there are none, which compiles when it runs."""
        return self.find(num_rows, controls, kind) or self.fastest(num_rows, controls, kind)

    def to_rest(self, num_rows: int, controls: StepProgram) -> Steps | None:
        """Returns the steps without drafts of so many rows with these controls, if they are there."""
        fitting = (Steps(num_rows, program, "rest") for program in self._controls["rest"] if program >= controls)
        return next((steps for steps in fitting if steps not in self._left), None)

    def may_score(self) -> bool:
        """Returns whether the log-probabilities of prompts are there. If they are not, they are compiled next."""
        scores = Others(self._sizes[0], "scores")
        self._wanted.add(scores)
        return scores not in self._left

    def may_keep(self, num_rows: int) -> bool:
        """Returns whether the prefixes of so many rows can be kept."""
        return Others(num_rows, "prefixes") not in self._left

    def begin(self, row: Row, first: StepProgram) -> None:
        """Makes requests wait for the programs that `compile_next` compiles, those with the controls `first` first.

        `row` is that of any request.
        """
        self._row = ahead.shapes(row)
        usual, least = (first, StepProgram.GREEDY, StepProgram.SAMPLED), self._sizes[:1]
        order: list[Steps | Others] = []
        for sizes, kinds in ((least, usual), (self._sizes, usual), (self._sizes, self._kinds)):
            order += [Steps(size, self.fastest(size, kind).controls) for size in sizes for kind in kinds]
            if self._beside:
                order += [self.fastest(size, kind, "reading") for size in sizes for kind in kinds]
            if self._config.lookahead.has_forecast:
                order += [Steps(size, kind, "rest") for size in sizes for kind in self._controls["rest"]]
            order += [Others(size, "prefixes") for size in sizes]
        self._left = tuple(dict.fromkeys([*order, Others(least[0], "scores")]))

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

    def _fitting(self, num_rows: int, controls: StepProgram, kind: Kind) -> Iterator[Steps]:
        """Yields the steps of a kind of at least so many rows with these controls or more, the fastest first."""
        for size in self._sizes:
            for program in self._controls[kind]:
                if size >= num_rows and program >= controls:
                    yield Steps(size, program, kind)

    def compile(self, part: Steps | Others) -> None:
        """Compiles a part, and what it needs."""
        state, config, capacity = self._state(part.num_rows), self._config, self._size.capacity
        match part:
            case Steps(num_rows, controls, "rest"):
                rows.rest(self._params, self._pool.attach_to(state.whole(), {}), config, controls, 1, 0)
            case Steps(num_rows, controls, kind):
                until: HostArray | None = np.zeros(num_rows, np.int32) if kind == "reading" else None
                before = self._widths[num_rows].put(self._pool.attach_to(state.whole(), {}))
                after = self._pool.detach_from(rows.run(self._params, before, config, controls, 1, 0, until))
                # On several devices another program than for arrays that were placed by `_insert` itself.
                rows.insert(state.after(after), self._prefix, self._row, 0, config)
            case Others(_, "scores"):
                cache = self._pool.attach(self._prefix.cache, {})
                scoring.of_chunk(self._params, cache, self._row.inputs.prompts, config=self._config)
            case Others(num_rows, _):
                for size in copies.sizes(capacity):
                    kept = copies.keep(self._params, copies.prefix_of(state.rows, config), 0, size, config)
                    if num_rows == self._sizes[0]:
                        copies.keep(self._params, self._prefix, 0, size, config)
                        copies.restore(self._params, kept, 0, config, capacity)

    def empty(self, params: Params, row: Row) -> EngineState:
        """Returns the state of as few rows as there may be, without requests."""
        size = self._size
        state = rows.empty(params, row, config=self._config, num_rows=self._sizes[0], grammar=size.grammar)
        return dataclasses.replace(state, shared=row.inputs.shared)

    @functools.cached_property
    def _table(self) -> Table:
        """A table with the shapes of any in a row."""
        class_of_token: HostArray = np.zeros(self._config.decoder.vocab_size, np.int32)
        return Table(class_of_token[:1, None], class_of_token, class_of_token[:1])

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
