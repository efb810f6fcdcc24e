"""How many sequences of an engine fit into the memory of a device."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding import sharding
from jlade.decoding.state import DecodeConfig, DecodeState, Inputs, Memory, Prefix
from jlade.decoding.stopping import Stopping
from jlade.engine import pages, rows
from jlade.engine.pages import PagePool
from jlade.generation.prompts import HostArray
from jlade.generation.request import EOS_SLOTS
from jlade.inspection import targets
from jlade.inspection.compiled import Needs
from jlade.inspection.model_programs import ModelPrograms
from jlade.mesh import DATA

MAX_ROWS = 1024  # rows to compile for: with more, the temporary memory of a row hardly changes


class Sequences(NamedTuple):
    """The rows of an engine that fit into the memory of a device, and their parts of it in bytes.

    Attributes:
      number: of rows, on all devices together; 0 if not even one for each group along `data` fits.
      weights: of the model.
      row: of a row's state, with pages for as many tokens as it may have.
      prompt: of a prompt that is being read, before it has a row; its pages are those of the row.
      temporary: of a row, in the program that makes steps; 0 where no program was compiled.
    """

    number: int
    weights: int
    row: int
    prompt: int
    temporary: int

    def facts(self) -> dict[str, int]:
        """Returns JSON-like values."""
        return {"sequences": self.number} | {f"{name}_bytes": getattr(self, name) for name in self._fields[1:]}


def from_shapes(programs: ModelPrograms, lookahead: LookaheadConfig, limit: int) -> Sequences:
    """Returns the rows that fit, without the temporary memory of programs: an upper bound.

    Args:
      programs: with the model, its devices and the capacity of a row. The batch size does not matter.
      lookahead: the setting.
      limit: bytes of a device's memory.
    """
    groups = mesh_lib.size(programs.mesh, DATA)
    one, two = (mesh_lib.num_bytes(_state(programs, lookahead, number * groups)) for number in (1, 2))
    weights, prompt = mesh_lib.num_bytes(programs.placed_params()), mesh_lib.num_bytes(_prompt(programs, lookahead))
    row = two - one  # not all of the state: arrays for all rows together are small
    return Sequences(groups * max(0, (limit - weights - prompt) // row), weights, row, prompt, 0)


def compiled(programs: ModelPrograms, lookahead: LookaheadConfig, limit: int) -> Sequences:
    """Returns the rows that fit with the temporary memory of the programs that read prompts and make steps.

    It is a lower bound: the program of steps is compiled for half of the rows, and the more rows there are, the less
    temporary memory each of them takes. Arguments are those of `from_shapes`.
    """
    groups, sequences = mesh_lib.size(programs.mesh, DATA), from_shapes(programs, lookahead, limit)
    free = limit - sequences.weights - sequences.prompt
    num_rows = min(sequences.number // groups // 2, MAX_ROWS) or 1  # rows of a group
    while sequences.number:
        try:
            reading, making = map(Needs.of, (read(programs, lookahead), steps(programs, lookahead, groups * num_rows)))
        except RuntimeError:  # XLA's, when a program needs more memory than the device has
            sequences, num_rows = sequences._replace(number=sequences.number * (num_rows > 1)), num_rows // 2
            continue
        row = -(-(making.arguments - sequences.weights) // num_rows)
        temporary = -(-(making.outputs + making.temporary) // num_rows)
        fitting = max(0, min(free // (row + temporary), (free - reading.outputs - reading.temporary) // row))
        sequences = sequences._replace(number=groups * fitting, row=row, temporary=temporary)
        if fitting >= num_rows:
            break
        num_rows = fitting
    return sequences


def read(programs: ModelPrograms, lookahead: LookaheadConfig) -> Any:
    """Returns the compiled program of an engine that reads a chunk of a prompt."""

    row, config = _row(programs), _config(programs, lookahead)

    def run(params: Any, prefix: Prefix) -> Prefix:
        return rows.read(params, prefix, row, 0, 1, config)[0]

    shapes = programs.placed_params(), _prompt(programs, lookahead, with_pages=True)
    return targets.compile_for(programs.mesh or programs.device, run, *shapes, donate=(1,))


def steps(programs: ModelPrograms, lookahead: LookaheadConfig, number: int) -> Any:
    """Returns the compiled program of an engine that makes steps of `number` rows."""

    def run(params: Any, rest: DecodeState, memory: Memory) -> DecodeState:
        state = dataclasses.replace(rest, memory=memory)
        return rows.run(params, state, _config(programs, lookahead), 1, 0)

    state = _state(programs, lookahead, number)
    rest = dataclasses.replace(state, memory=None)  # type: ignore[arg-type]
    shapes = programs.placed_params(), rest, state.memory
    return targets.compile_for(programs.mesh or programs.device, run, *shapes, donate=(2,))


def _config(programs: ModelPrograms, lookahead: LookaheadConfig) -> DecodeConfig:
    """Returns the settings of an engine, which records log-probabilities for the requests that ask for them."""
    decoder = programs.decoder
    paged = pages.is_paged(programs.params, decoder, programs.device, None)
    return dataclasses.replace(programs.config(lookahead), logprobs=True, paged=paged)


def _row(programs: ModelPrograms) -> rows.Row:
    """Returns the arrays of the shortest request."""
    one: HostArray = np.ones(1, np.int32)
    no_eos_ids: HostArray = np.full((1, EOS_SLOTS), -1, np.int32)
    inputs = Inputs(one[None], one, Stopping(one, no_eos_ids), jax.random.key(0))
    size = rows.Size(programs.capacity, prediction=0, grammar=rows.GRAMMAR, top_logprobs=0)
    return rows.Row.of(inputs, 0, programs.decoder.vocab_size, size, shared={})


def _state(programs: ModelPrograms, lookahead: LookaheadConfig, number: int) -> DecodeState:
    """Returns the shapes of the state of `number` rows, with their pages."""
    config, row = _config(programs, lookahead), _row(programs)

    def start(params: Any) -> DecodeState:
        pool = PagePool(params, config, number, programs.capacity, number * programs.capacity)
        state = rows.empty(params, row, config=config, num_rows=number, grammar=rows.GRAMMAR)
        return pool.attach_to(state.whole(), {})

    return sharding.state_shapes(start, programs.params, config)


def _prompt(programs: ModelPrograms, lookahead: LookaheadConfig, with_pages: bool = False) -> Prefix:
    """Returns the shapes of a prompt that is being read, without its pages or with those of one row."""
    config = _config(programs, lookahead)

    def start(params: Any) -> Prefix:
        prefix = rows.unread(params, config=config, capacity=programs.capacity)
        if not with_pages:
            return prefix
        groups = mesh_lib.size(programs.mesh, DATA)
        pool = PagePool(params, config, groups, programs.capacity, groups * programs.capacity)
        return dataclasses.replace(prefix, cache=pool.attach(prefix.cache, {}))

    prefix = jax.eval_shape(start, programs.params)
    if programs.mesh is None:
        return prefix
    specs = sharding.prefix_specs(config.decoder, config.sources.readers, prefix)
    placed: Prefix = mesh_lib.shapes(prefix, programs.mesh, specs)
    return placed
