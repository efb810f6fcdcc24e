"""The rows of an engine on the device: one decode state, into which requests are put and from which they are taken.

The shapes of all programs are fixed: B rows of C tokens, prompts that are read one by one, and all controls of sampling
as arrays. So nothing compiles once each program has run.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jlade import mesh as mesh_lib
from jlade.config import PLAIN
from jlade.constraints.grammar import RowTables, check_size, chunks
from jlade.constraints.tokens import Table
from jlade.decoding import ahead, loop, prefill, sampling, sharding
from jlade.decoding.sampling import Sampling
from jlade.decoding.state import DecodeConfig, DecodeState, Inputs, Memory, Prefix
from jlade.drafts.prediction import Reading
from jlade.drafts.sources import Drafts
from jlade.drafts.tree import NONE, Tree, TreeShape
from jlade.engine import pages
from jlade.errors import ArgumentValueError, check_int
from jlade.generation.prompts import HostArray
from jlade.generation.request import EOS_SLOTS, DecodeRequest
from jlade.mesh import DATA
from jlade.models.base import Cache, Params

CAPACITY = 4096  # tokens of a row by default, or as many as the model reads

GRAMMAR = 2**22  # entries of a grammar's table, by default


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a row."""

    capacity: int  # C, tokens of a prompt and its text
    prediction: int  # most tokens of a prediction; 0 for rows without
    grammar: int  # entries of a grammar's table; 0 for rows without
    top_logprobs: int  # K, most probable tokens that are recorded at each position
    recalled: int = 0  # most tokens of earlier answers, which take the place of a prediction; 0 for rows without

    @property
    def expected(self) -> int:
        """P, tokens that an answer is expected to resemble."""
        return max(self.prediction, self.recalled)


def check_capacity(capacity: Any, max_positions: int) -> int:
    """Returns the capacity of rows, checked, and the default one for None."""
    if capacity is None:
        return min(CAPACITY, max_positions)
    capacity = check_int("capacity", capacity, 3)  # for `warm_up`
    if capacity > max_positions:
        raise ValueError(f"capacity must be at most {max_positions}, the tokens that the model reads, got {capacity}")
    return capacity


def check(request: DecodeRequest, size: Size) -> None:
    """Raises a ValueError for options of requests that rows do not accept."""
    inputs, top_logprobs = request.inputs, request.config.top_logprobs
    for table in filter(None, request.tables or ()):
        check_size(table, size.grammar)
    if "prediction" in inputs.sources:
        number = int(np.max(np.sum(inputs.sources["prediction"].text != NONE, axis=1)))
        if number > size.prediction:
            raise ArgumentValueError(
                "prediction", f"must be of at most max_prediction={size.prediction} tokens, got {number}"
            )
    if top_logprobs > size.top_logprobs:
        raise ArgumentValueError(
            "top_logprobs", f"must be at most max_top_logprobs={size.top_logprobs}, got {top_logprobs}"
        )
    num_eos_ids = np.max(np.sum(np.asarray(inputs.stopping.eos_ids) >= 0, axis=1))
    if num_eos_ids > EOS_SLOTS:
        raise ArgumentValueError("eos_ids", f"must be at most {EOS_SLOTS} for an engine, got {num_eos_ids}")


@flax.struct.dataclass
class Row:
    """The arrays of a request, of the same shapes for all requests."""

    inputs: Inputs  # of one sequence, with all controls; its key is a threefry key []
    place: jax.Array  # [1] int32, of the sequence in the batch whose key it shares

    @classmethod
    def of(
        cls, inputs: Inputs, place: int, vocab_size: int, size: Size, shared: dict[str, Any], logprobs: bool = False
    ) -> Self:
        """Returns the row of a request, whose key is its own or that of a batch in which it has this place.

        `shared` is `Inputs.shared` of all rows, and `logprobs` whether the request asks for log-probabilities.
        """
        length = int(inputs.lengths[0])
        prompts: HostArray = np.zeros((1, size.capacity), np.int32)
        prompts[0, :length] = inputs.prompts[0, :length]
        fewest: HostArray = inputs.stopping.min_new_tokens
        if fewest is None:
            fewest = np.zeros(1, np.int32)
        # By way of the host, from where it goes to any device, and where its shape changes without a program.
        words: HostArray = np.asarray(jax.random.key_data(inputs.key)).reshape(-1)
        key = jax.random.wrap_key_data(words, impl=jax.random.key_impl(inputs.key))
        places: HostArray = np.array([place], np.int32)
        has_drafts: HostArray = np.ones(1, bool) if inputs.has_drafts is None else inputs.has_drafts
        has_logprobs: HostArray = np.array([logprobs])
        return cls(
            Inputs(
                prompts=prompts,
                lengths=inputs.lengths,
                stopping=dataclasses.replace(
                    inputs.stopping, eos_ids=inputs.stopping.eos_ids[:, :EOS_SLOTS], min_new_tokens=fewest
                ),
                key=sampling.threefry(key),
                sampling=sampling.complete(inputs.sampling, 1, vocab_size),
                has_drafts=has_drafts,
                has_logprobs=has_logprobs,
                sources={"prediction": _predicted(inputs, size.expected)} if size.expected else {},
                shared=shared,
            ),
            places,
        )

    def repeated(self, number: int) -> Inputs:
        """Returns the inputs of `number` sequences, all of them this one."""
        return self.inputs.rows(np.zeros(number, int))


def _predicted(inputs: Inputs, size: int) -> Reading:
    """Returns the prediction of a request, an empty one if it has none."""
    text: HostArray = np.full((1, size), NONE, np.int32)
    if "prediction" not in inputs.sources:
        return Reading.begin(text)
    prediction: Reading = inputs.sources["prediction"]
    tokens = prediction.text[:, :size]  # padded
    text[:, : tokens.shape[1]] = tokens
    return dataclasses.replace(prediction, text=text)


@flax.struct.dataclass
class EngineState:
    """The state of an engine between rounds, which add the pages, and the costs and the pace of their steps."""

    rows: DecodeState  # of their requests; its inputs have no constraint, and nothing that all rows share
    tables: RowTables | None  # of the grammars of the rows; None for rows without
    shared: dict[str, Any]  # `Inputs.shared` of all rows

    def whole(self) -> DecodeState:
        """Returns the state of which steps are made."""
        inputs = dataclasses.replace(self.rows.inputs, constraint=self.tables, shared=self.shared)
        return dataclasses.replace(self.rows, inputs=inputs)

    def after(self, state: DecodeState) -> Self:
        """Returns the state after a round, given the result of its steps without pages."""
        return dataclasses.replace(self, rows=dataclasses.replace(state, inputs=self.rows.inputs, pace=None))


@ahead.jit(static_argnames=("config", "num_rows", "grammar"))
def empty(params: Params, row: Row, *, config: DecodeConfig, num_rows: int, grammar: int) -> EngineState:
    """Returns the state of rows without requests, with the shapes of `row`, and tables of `grammar` entries or none.

    It lacks what all rows share, as a program copies each argument that it returns.
    """
    inputs = row.repeated(num_rows)
    if grammar:
        tables = RowTables.empty(num_rows, grammar, config.decoder.vocab_size)
        inputs = dataclasses.replace(inputs, constraint=tables)
    prefix = _unread(params, num_rows, inputs.prompts.shape[1], config)
    state = prefill.start(prefix, inputs, config)
    inputs = dataclasses.replace(state.inputs, constraint=None, shared={})
    # Zeros in the place of drafts, which take long to compile.
    specs = sharding.state_specs(inputs, config).drafts
    zeros = mesh_lib.shard(functools.partial(jax.tree.map, jnp.zeros_like), config.mesh, (specs,), specs)
    state = state.with_drafts(zeros(state.drafts))
    rows = dataclasses.replace(state, inputs=inputs, done=jnp.ones(num_rows, bool))
    return EngineState(rows, state.inputs.constraint, shared={})  # type: ignore[arg-type]  # its tables


@ahead.jit(static_argnames=("config", "capacity"))
def unread(params: Params, *, config: DecodeConfig, capacity: int) -> Prefix:
    """Returns the prefix of a prompt before it is read.

    Each group of devices along `data` reads every prompt: the others would idle, and the row may belong to any of them.
    """
    return _unread(params, mesh_lib.size(config.mesh, DATA), capacity, config)


def _unread(params: Params, num_rows: int, capacity: int, config: DecodeConfig) -> Prefix:
    readers = config.sources.readers

    def of_device(params: Params) -> Prefix:
        num_here = num_rows // mesh_lib.size(config.mesh, DATA)
        states = prefill.for_each(readers.empty(), num_here)
        return Prefix(pages.init_rest(params, config, num_here, capacity), states)

    specs = sharding.prefix_specs(config.decoder, readers)
    return mesh_lib.shard(of_device, config.mesh, (sharding.param_specs(params, config.mesh),), specs)(params)


def read(
    params: Params, prefix: Prefix, row: Row, num_read: int, until: int, config: DecodeConfig
) -> tuple[Prefix, int]:
    """Reads a chunk of a prompt, up to its token `until` at most.

    Returns:
      The prefix, which takes over the buffers of the one before, and the number of tokens that it has read.
    """
    chunk = prefill.fitting(config.chunks, row.inputs.prompts.shape[1])[0][0]
    num_read = min(num_read + chunk, until)
    return _read(params, prefix, row, np.array([num_read + 1], np.int32), config=config), num_read


@ahead.jit(static_argnames="config", donate_argnames="prefix")
def _read(params: Params, prefix: Prefix, row: Row, lengths: jax.Array, *, config: DecodeConfig) -> Prefix:
    row = dataclasses.replace(row, inputs=dataclasses.replace(row.inputs, lengths=lengths))
    inputs = row.repeated(mesh_lib.size(config.mesh, DATA))
    return prefill.prefill(params, dataclasses.replace(inputs, cache=prefix.cache, sources=prefix.sources), config)


def insert(state: EngineState, prefix: Prefix, row: Row, index: int, config: DecodeConfig) -> EngineState:
    """Puts a request into a row with what has been read of its prompt, at most all tokens but the last.

    What is large in the state is written in place.
    """
    rest = dataclasses.replace(state.rows, memory=None)  # type: ignore[arg-type]  # an argument of its own
    new = _begin(prefix, row, config=config)
    rows = _insert(rest, state.rows.memory, new, prefix.cache, np.int32(index), config=config)
    return dataclasses.replace(state, rows=rows)


@ahead.jit(static_argnames="config")
def _begin(prefix: Prefix, row: Row, *, config: DecodeConfig) -> DecodeState:
    """Returns the state of a request for each device group, without its cache; the same program for any rows."""
    groups = mesh_lib.size(config.mesh, DATA)
    new = prefill.unread(prefill.start(prefix, row.repeated(groups), config, jnp.repeat(row.place, groups)))
    return dataclasses.replace(new.with_cache(None), inputs=dataclasses.replace(new.inputs, shared={}))


@ahead.jit(static_argnames="config", donate_argnames="memory")
def _insert(
    rest: DecodeState, memory: Memory, new: DecodeState, cache: Cache, index: jax.Array, *, config: DecodeConfig
) -> DecodeState:
    state, groups = dataclasses.replace(rest, memory=memory), mesh_lib.size(config.mesh, DATA)
    new = new.with_cache(cache)
    if state.constraint_state is not None:
        new = dataclasses.replace(new, constraint_state=jnp.zeros(groups, jnp.int32))  # that of no grammar
    written: DecodeState = _write(state, new, index, sharding.state_specs(state.inputs, config), config)
    return written


def take_out(state: EngineState, index: int, config: DecodeConfig) -> DecodeState:
    """Returns the state [1, ...] of a row in NumPy, without its pages and the table of its grammar; see `put_in`."""
    return mesh_lib.fetch(_take_out(state.rows, np.int32(index), config=config))


@ahead.jit(static_argnames="config")
def _take_out(state: DecodeState, index: jax.Array, *, config: DecodeConfig) -> DecodeState:
    def of_array(spec: PartitionSpec, rows: jax.Array) -> jax.Array:
        if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
            rows = jax.random.key_data(rows)
        return jax.lax.dynamic_slice_in_dim(rows, index, 1) if len(spec) and spec[0] == DATA else rows

    specs = sharding.state_specs(state.inputs, config)
    taken: DecodeState = jax.tree.map(of_array, jax.tree.broadcast(specs, state), state)
    return taken


def put_in(state: EngineState, taken: DecodeState, index: int, config: DecodeConfig) -> EngineState:
    """Puts what `take_out` has returned into a row, which has the table of its grammar. It is written in place."""
    rest = dataclasses.replace(state.rows, memory=None)  # type: ignore[arg-type]
    rows = _put_in(rest, state.rows.memory, taken, np.int32(index), config=config)
    return dataclasses.replace(state, rows=rows)


@ahead.jit(static_argnames="config", donate_argnames="memory")
def _put_in(
    rest: DecodeState, memory: Memory, taken: DecodeState, index: jax.Array, *, config: DecodeConfig
) -> DecodeState:
    state, groups = dataclasses.replace(rest, memory=memory), mesh_lib.size(config.mesh, DATA)
    key = jax.random.wrap_key_data(taken.inputs.key, impl=jax.random.key_impl(state.inputs.key))
    taken = dataclasses.replace(taken, inputs=dataclasses.replace(taken.inputs, key=key))
    specs = sharding.state_specs(state.inputs, config)

    def of_array(spec: PartitionSpec, rows: jax.Array) -> jax.Array:
        return jnp.repeat(rows, groups, axis=0) if groups > 1 and len(spec) and spec[0] == DATA else rows

    taken = jax.tree.map(of_array, jax.tree.broadcast(specs, taken), taken)
    written: DecodeState = _write(state, taken, index, specs, config)
    return written


def put_table(
    state: EngineState, table: Table, index: int, config: DecodeConfig, is_there: bool = False
) -> EngineState:
    """Gives the request that was inserted into a row the table of its grammar.

    The table is written in place, but if `is_there`: the row has it from an earlier request.
    """
    assert state.tables is not None
    tables = state.tables
    for begin, chunk in () if is_there else chunks(table):
        new = chunk[None], table.class_of_token[None]
        tables = _put_chunk(tables, new, np.int32(index), np.int32(begin), config=config)
    states = _begin_grammar(state.rows.constraint_state, np.int32(index), config=config)
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, constraint_state=states), tables=tables)


@ahead.jit(static_argnames="config", donate_argnames="tables")
def _put_chunk(tables: RowTables, new: Any, index: jax.Array, begin: jax.Array, *, config: DecodeConfig) -> RowTables:
    """Writes a chunk of a table into a row, in which it begins at `begin`, with the classes of tokens."""
    groups = mesh_lib.size(config.mesh, DATA)
    chunk, class_of_token = jax.tree.map(lambda array: jnp.repeat(array, groups, axis=0), new)
    return dataclasses.replace(
        tables,
        entries=_write(tables.entries, chunk, index, sharding.BATCH, config, begin),
        class_of_token=_write(tables.class_of_token, class_of_token, index, sharding.BATCH, config),
    )


@ahead.jit(static_argnames="config")
def _begin_grammar(states: jax.Array, index: jax.Array, *, config: DecodeConfig) -> jax.Array:
    """Returns the states of the rows' grammars, that of a row being the first of its table."""
    first = jnp.ones(mesh_lib.size(config.mesh, DATA), jnp.int32)
    written: jax.Array = _write(states, first, index, sharding.BATCH, config)
    return written


def _write(state: Any, new: Any, index: jax.Array, specs: Any, config: DecodeConfig, begin: Any = 0) -> Any:
    """Returns the rows of a state with the row `new` of each device group in the place of row `index` of all.

    Arrays of `new` that are shorter along axis 1 are written from `begin` on.
    """
    groups = mesh_lib.size(config.mesh, DATA)
    of_device = functools.partial(_write_of_device, specs=specs, groups=groups)
    in_specs = specs, specs, PartitionSpec(), PartitionSpec()
    return mesh_lib.shard(of_device, config.mesh, in_specs, specs)(state, new, index, begin)


def _write_of_device(state: Any, new: Any, index: jax.Array, begin: jax.Array, specs: Any, groups: int) -> Any:
    """Returns the rows of a device with the row `new` at `index` of all rows, if that is one of them."""

    def put(spec: Any, rows: jax.Array, row: jax.Array) -> jax.Array:
        if not (len(spec) and spec[0] == DATA):
            return rows
        is_here, at = place(index, len(rows), groups)
        starts: Any = (at, begin, *[0] * rows.ndim)[: rows.ndim]
        if groups > 1:
            row = jnp.where(is_here, row, jax.lax.dynamic_slice(rows, starts, row.shape))
        return jax.lax.dynamic_update_slice(rows, row, starts)

    return jax.tree.map(put, jax.tree.broadcast(specs, state), state, new)


def place(index: jax.Array, number: int, groups: int) -> tuple[jax.Array, jax.Array]:
    """Returns whether the row `index` of all rows is one of the `number` of this device, and its place among these."""
    if groups > 1:
        index -= jax.lax.axis_index(DATA) * number
    return (index >= 0) & (index < number), jnp.clip(index, 0, number - 1)


run = loop.run_steps  # of all rows, by the program for all controls


def rest(params: Params, state: DecodeState, config: DecodeConfig, max_steps: int, stop_at: int) -> DecodeState:
    """Makes plain steps, with the program of an engine without lookahead, while the state has no drafts.

    The program has few arguments: to start that of all widths takes a part of the time of a plain step.
    """
    none: HostArray = np.zeros((len(state.done), 0), np.int32)
    drafts, window, info = state.drafts, state.window, state.info
    plain = dataclasses.replace(
        state.with_drafts(Drafts(Tree(none, TreeShape(()), none, None), None, None, {})),
        window=none[:, None],
        info=dataclasses.replace(info, contributed=None),
    )
    after = run(params, plain, dataclasses.replace(config, lookahead=PLAIN), max_steps, stop_at)
    after_info = dataclasses.replace(after.info, contributed=info.contributed)
    return dataclasses.replace(after.with_drafts(drafts), window=window, info=after_info)


class RowView(NamedTuple):
    """The part of a state that the host reads after steps, in NumPy: fields of `DecodeState` and its `Info`."""

    tokens: HostArray  # [B, C]
    num_tokens: HostArray  # [B]
    num_steps: HostArray  # [B]
    done: HostArray  # [B]
    accepted: HostArray  # [B, C]
    num_drafted: HostArray  # [B, C]
    logprobs: Any  # fields [B, C, ...], None if they were not asked for

    def row(self, index: int) -> "RowView":
        """Returns a row [1, ...]."""
        shown: RowView = jax.tree.map(lambda array: array[index : index + 1], self)
        return shown


def show(state: DecodeState, logprobs: bool) -> RowView:
    """Fetches a state for the host, with log-probabilities if asked."""
    info = state.info
    recorded = info.logprobs if logprobs else None
    shown: RowView = mesh_lib.fetch(
        RowView(state.tokens, state.num_tokens, state.num_steps, state.done, info.accepted, info.num_drafted, recorded)
    )
    return shown


def take(state: DecodeState, index: int) -> DecodeState:
    """Returns the state of a row [1, ...], with the part alone that statistics need."""
    pool = {name: source for name, source in state.sources.items() if name == "pool"}
    num_steps, info, pool = _take((state.num_steps, state.info, pool), np.int32(index))
    state = state.with_drafts(dataclasses.replace(state.drafts, states=pool))
    return dataclasses.replace(state, num_steps=num_steps, info=info)


@ahead.jit()
def _take(arrays: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda rows: jax.lax.dynamic_slice_in_dim(rows, index, 1), arrays)


def end(state: EngineState, indices: set[int]) -> EngineState:
    """Ends the texts of the rows with these indices."""
    rows = state.rows
    ended = np.isin(np.arange(len(rows.done)), list(indices))
    done, inputs, states = _end(rows.done, rows.inputs, rows.constraint_state, ended)
    return dataclasses.replace(state, rows=dataclasses.replace(rows, done=done, inputs=inputs, constraint_state=states))


@ahead.jit()
def _end(
    done: jax.Array, inputs: Inputs, constraint_state: jax.Array | None, ended: jax.Array
) -> tuple[jax.Array, Inputs, jax.Array | None]:
    """Returns rows some of which have ended, without the controls of these, which steps would compute."""

    def reset(value: Any, neutral: Any) -> jax.Array:
        return jnp.where(ended.reshape(-1, *[1] * (value.ndim - 1)), neutral, value)

    assert inputs.sampling.logit_bias is not None
    neutral = sampling.complete(Sampling(), 1, inputs.sampling.logit_bias.shape[1])
    inputs = dataclasses.replace(
        inputs,
        sampling=jax.tree.map(reset, inputs.sampling, neutral),
        stopping=dataclasses.replace(inputs.stopping, min_new_tokens=reset(inputs.stopping.min_new_tokens, 0)),
        has_logprobs=reset(inputs.has_logprobs, False),
    )
    return done | ended, inputs, None if constraint_state is None else reset(constraint_state, 0)


def resize(state: EngineState, places: Sequence[int], config: DecodeConfig) -> EngineState:
    """Returns a state of other rows, on devices that `data` does not divide, and frees the memory of the given one.

    `places` has for each of the other rows the place of the one that it takes over, -1 for one without a request. Both
    caches are never there as a whole: each layer is copied and freed before the next one.
    """
    chosen = np.array(places, np.int32)

    def copy(layer: jax.Array, spec: PartitionSpec) -> jax.Array:
        copied = _copy_rows(layer, chosen, spec=spec, mesh=config.mesh)
        if isinstance(layer, jax.Array):  # not the shape of one
            layer.delete()
        return copied

    cache = state.rows.cache
    rows, tables = _copy_rest(state.rows.with_cache(None), state.tables, chosen, config=config)
    cache = jax.tree.map(copy, cache, jax.tree.broadcast(sharding.cache_specs(config.decoder), cache))
    return dataclasses.replace(state, rows=rows.with_cache(cache), tables=tables)


@ahead.jit(static_argnames=("spec", "mesh"))
def _copy_rows(rows: jax.Array, places: jax.Array, *, spec: PartitionSpec, mesh: Mesh | None) -> jax.Array:
    copy = mesh_lib.shard(lambda rows, places: rows[places], mesh, (spec, PartitionSpec()), spec)
    copied: jax.Array = copy(rows, jnp.maximum(places, 0))
    return copied


@ahead.jit(static_argnames="config")
def _copy_rest(
    rest: DecodeState, tables: RowTables | None, places: jax.Array, *, config: DecodeConfig
) -> tuple[DecodeState, RowTables | None]:
    def copy(spec: PartitionSpec, rows: jax.Array) -> jax.Array:
        is_of_rows = len(spec) and spec[0] == DATA
        return _copy_rows(rows, places, spec=spec, mesh=config.mesh) if is_of_rows else rows

    arrays = rest, tables
    specs = sharding.state_specs(rest.inputs, config).with_cache(None), sharding.constraint_specs(tables)
    copied, copied_tables = jax.tree.map(copy, jax.tree.broadcast(specs, arrays), arrays)
    done, inputs, states = _end(copied.done, copied.inputs, copied.constraint_state, places < 0)
    return dataclasses.replace(copied, done=done, inputs=inputs, constraint_state=states), copied_tables
