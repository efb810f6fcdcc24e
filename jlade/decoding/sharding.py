"""The arrays of a decode on a mesh: sequences along `data`, KV heads along `model`, and sources as they say."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jlade import mesh as mesh_lib
from jlade.decoding.state import Constants, DecodeConfig, DecodeState, Inputs, Memory, Prefix
from jlade.decoding.stopping import Stopping, StopStrings
from jlade.drafts.sources import Drafts, Sources
from jlade.mesh import DATA, HEADS, Specs
from jlade.models import sharding as model_sharding
from jlade.models.base import Cache, Decoder, KVCache, Params
from jlade.models.llama import Llama, LlamaParams

BATCH = P(DATA)


def cache_specs(decoder: Decoder) -> Cache:
    """Returns the specs of a cache; that of a model that is not jlade's is divided along `data` alone."""
    specs: Any = KVCache
    return specs(keys=P(DATA, HEADS), values=P(DATA, HEADS), length=BATCH) if isinstance(decoder, Llama) else BATCH


def prefix_specs(decoder: Decoder, readers: Sources, names: Iterable[str]) -> Prefix:
    """Returns the specs of a prefix with the states of sources of these names, given those that read prompts."""
    return Prefix(cache=cache_specs(decoder), sources={name: readers.specs[name] for name in names})


def param_specs(params: Params, mesh: Mesh | None) -> Specs:
    """Returns the specs of the parameters; those of a model that is not jlade's are whole on each device."""
    return model_sharding.specs(params, mesh) if isinstance(params, LlamaParams) else P()


def input_specs(inputs: Inputs, config: DecodeConfig) -> Inputs:
    """Returns the specs of the inputs."""
    specs: Any = Inputs
    return specs(
        prompts=BATCH,
        lengths=BATCH,
        stopping=_stopping_specs(inputs.stopping),
        key=BATCH if inputs.key.ndim else P(),
        sampling=BATCH,
        costs=P(),
        cache=P() if inputs.cache is None else cache_specs(config.decoder),
        sources={name: config.sources().specs[name] for name in inputs.sources},
        corpus=P(),
    )


def state_specs(constants: Constants, config: DecodeConfig) -> DecodeState:
    """Returns the specs of a state with these constants."""
    specs: Any = DecodeState
    of_constants: Any = Constants
    memory: Any = Memory
    drafts: Any = Drafts
    return specs(
        tokens=BATCH,
        num_tokens=BATCH,
        num_steps=BATCH,
        done=BATCH,
        memory=memory(
            cache=cache_specs(config.decoder),
            drafts=drafts(
                tree=BATCH,
                proposals=BATCH,
                record=BATCH,
                states=config.sources(constants.corpus is not None).specs,
            ),
        ),
        window=BATCH,
        counts=BATCH,
        stop_state=BATCH,
        pace=P(),
        constants=of_constants(
            prompt_lengths=BATCH,
            keys=BATCH,
            sampling=BATCH,
            stopping=_stopping_specs(constants.stopping),
            costs=P(),
            corpus=P(),
        ),
        info=BATCH,
    )


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


def _stopping_specs(stopping: Stopping) -> Stopping:
    specs: Any = Stopping
    tables: Any = StopStrings
    strings = P() if stopping.strings is None else tables(next_state=P(), start=BATCH)
    return specs(max_new_tokens=BATCH, eos_ids=BATCH, min_new_tokens=BATCH, strings=strings)
