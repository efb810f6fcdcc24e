"""The arrays of a decode on a mesh: sequences along `data`, KV heads along `model`, and sources as they say."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jlade import mesh as mesh_lib
from jlade.decoding.state import DecodeConfig, DecodeState, Inputs, Memory, Prefix
from jlade.decoding.stopping import Stopping, StopStrings
from jlade.drafts.sources import Drafts, Sources
from jlade.mesh import DATA, HEADS, MODEL, Specs, is_shared
from jlade.models import sharding as model_sharding
from jlade.models.base import Cache, Decoder, KVCache, Params
from jlade.models.layers.recurrent import RecurrentState
from jlade.models.llama import Llama, LlamaParams

T = TypeVar("T")
BATCH = P(DATA)


def cache_specs(decoder: Decoder) -> Cache:
    """Returns the specs of a cache; that of a model that is not jlade's is divided along `data` alone."""
    if not isinstance(decoder, Llama):
        return BATCH
    recurrence = decoder.config.recurrence
    memory: Any = P(DATA, MODEL) if recurrence is not None and recurrence.has_memory else None
    state = RecurrentState(memory=memory, inputs=P(DATA, None, MODEL))  # type: ignore[arg-type]
    states = (state,) * len(decoder.config.recurrent_layers)
    of_entries = dict.fromkeys(("keys", "values", "key_scales", "value_scales", "pages"), P(DATA, HEADS))
    return _specs(KVCache, **of_entries, states=states)


def prefix_specs(decoder: Decoder, readers: Sources, prefix: Prefix | None = None) -> Prefix:
    """Returns the specs of a prefix, given the sources that read prompts; of one with all of them by default."""
    if prefix is None:
        return _specs(Prefix, cache=cache_specs(decoder), sources=readers.specs)
    sources = {name: readers.specs[name] for name in prefix.sources}
    return _specs(Prefix, cache=BATCH if prefix.cache is None else cache_specs(decoder), sources=sources)


def param_specs(params: Params, mesh: Mesh | None) -> Specs:
    """Returns the specs of the parameters; those of a model that is not jlade's are whole on each device."""
    return model_sharding.specs(params, mesh) if isinstance(params, LlamaParams) else P()


def input_specs(inputs: Inputs, config: DecodeConfig, axis: str = DATA) -> Inputs:
    """Returns the `PartitionSpec` of each array of inputs whose sequences are divided among devices.

    In a `jax.shard_map` of your own with these specs, each device decodes its own sequences. A key for each sequence
    keeps the noise of two devices apart.

    Args:
      inputs, config: results of `jlade.prepare`.
      axis: of the mesh, along which the sequences are divided.
    """
    specs_of_cache = {} if inputs.cache is None else {"cache": cache_specs(config.decoder)}
    strings = P() if inputs.stopping.strings is None else _specs(StopStrings)
    specs = _specs(
        Inputs,
        stopping=_specs(Stopping, strings=strings),
        constraint=constraint_specs(inputs.constraint),
        key=BATCH if inputs.key.ndim else P(),
        sources={name: config.sources.specs[name] for name in inputs.sources},
        **specs_of_cache,
    )
    return specs if axis == DATA else jax.tree.map(lambda spec: P(*(axis if e == DATA else e for e in spec)), specs)


def state_specs(inputs: Inputs, config: DecodeConfig) -> DecodeState:
    """Returns the specs of a state with these inputs."""
    drafts = _specs(Drafts, states=config.sources.specs)
    memory = _specs(Memory, cache=cache_specs(config.decoder), drafts=drafts)
    return _specs(DecodeState, inputs=input_specs(inputs, config), memory=memory)


def state_shapes(start: Callable[[Params], DecodeState], params: Params, config: DecodeConfig) -> DecodeState:
    """Returns the shapes of the state that `start` makes of parameters, with their shardings on a mesh."""
    state = jax.eval_shape(start, params)
    if config.mesh is None:
        return state
    placed: DecodeState = mesh_lib.shapes(state, config.mesh, state_specs(state.inputs, config))
    return placed


def constraint_specs(constraint: Any) -> Any:
    """Returns the specs of a constraint. Its fields may be static, shared, or have constraints and tuples of them."""
    if type(constraint) is tuple:
        return tuple(map(constraint_specs, constraint))
    if not dataclasses.is_dataclass(constraint):
        return BATCH
    specs = {}
    for field in dataclasses.fields(constraint):
        value = getattr(constraint, field.name)
        if not field.metadata.get("pytree_node", True):
            specs[field.name] = value
        elif not is_shared(field):
            specs[field.name] = constraint_specs(value)
    return _specs(type(constraint), **specs)


def _specs(kind: type[T], **specs: Any) -> T:
    """Returns the specs of a dataclass: along `data`, but for fields that are `SHARED` or have `specs` of their own."""
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]  # that it is a dataclass
    return kind(**({field.name: P() if is_shared(field) else BATCH for field in fields} | specs))


def batch_axes(specs: Any) -> Any:
    """Returns the arguments `in_axes` and `out_axes` of `jax.vmap` over the sequences, for specs."""
    return jax.tree.map(lambda spec: 0 if len(spec) and spec[0] == DATA else None, specs)


def put(inputs: Inputs, config: DecodeConfig) -> Inputs:
    """Returns the inputs on the mesh of `config`."""
    if config.mesh is None:
        return inputs
    placed: Inputs = mesh_lib.put(inputs, config.mesh, input_specs(inputs, config))
    return placed


def put_params(params: Params, mesh: Mesh | None) -> Params:
    """Returns the parameters on a mesh. Those that are there already are not copied."""
    return params if mesh is None else mesh_lib.put(params, mesh, param_specs(params, mesh))
