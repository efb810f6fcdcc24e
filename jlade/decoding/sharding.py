"""The arrays of a decode on a mesh: sequences along `data`, KV heads and the pool's keys along the axes of `MODEL`."""

from typing import Any

from jax.sharding import PartitionSpec as P

from jlade import mesh as mesh_lib
from jlade.decoding.state import Constants, DecodeState, Inputs, Prefix, Program
from jlade.decoding.stopping import Stopping, StopStrings
from jlade.decoding.vocabulary import Vocabulary
from jlade.mesh import DATA, HEADS, Specs
from jlade.models import sharding as model_sharding
from jlade.models.base import KVCache, Params
from jlade.models.llama import LlamaParams

BATCH = P(DATA)
CACHE = KVCache(keys=P(DATA, HEADS), values=P(DATA, HEADS), length=BATCH)  # type: ignore[arg-type]  # specs of arrays

PREFIX = Prefix(cache=CACHE, recycled=BATCH)  # type: ignore[arg-type]


def param_specs(params: Params, program: Program) -> Specs:
    """Returns the specs of the parameters; those of a model that is not jlade's are whole on each device."""
    return model_sharding.specs(params, program.mesh) if isinstance(params, LlamaParams) else P()


def input_specs(inputs: Inputs, program: Program) -> Inputs:
    """Returns the specs of the inputs."""
    specs: Any = Inputs
    return specs(
        prompts=BATCH,
        lengths=BATCH,
        stopping=_stopping_specs(inputs.stopping),
        key=BATCH if inputs.key.ndim else P(),
        sampling=BATCH,
        step_cost=P(),
        cache=P() if inputs.cache is None else CACHE,
        pool=_pool_spec(program),
        recycled=BATCH,
        corpus=P(),
    )


def state_specs(stopping: Stopping, program: Program) -> DecodeState:
    """Returns the specs of a state."""
    specs: Any = DecodeState
    constants: Any = Constants
    return specs(
        tokens=BATCH,
        num_tokens=BATCH,
        num_steps=BATCH,
        done=BATCH,
        cache=CACHE,
        window=BATCH,
        pool=_pool_spec(program),
        candidates=BATCH,
        drafts=BATCH,
        counts=BATCH,
        stop_state=BATCH,
        pace=P(),
        constants=constants(
            prompt_lengths=BATCH,
            keys=BATCH,
            sampling=BATCH,
            stopping=_stopping_specs(stopping),
            step_cost=P(),
            corpus=P(),
        ),
        info=BATCH,
    )


def put(inputs: Inputs, program: Program) -> Inputs:
    """Returns the inputs on the program's mesh."""
    if program.mesh is None:
        return inputs
    placed: Inputs = mesh_lib.put(inputs, program.mesh, input_specs(inputs, program))
    return placed


def put_params(params: Params, program: Program) -> Params:
    """Returns the parameters on the program's mesh. Those that are there already are not copied."""
    if program.mesh is None:
        return params
    return mesh_lib.put(params, program.mesh, param_specs(params, program))


def _pool_spec(program: Program) -> P:
    axes = Vocabulary.of(program.decoder.vocab_size, program.mesh).axes
    return P(DATA, axes) if axes else BATCH


def _stopping_specs(stopping: Stopping) -> Stopping:
    specs: Any = Stopping
    tables: Any = StopStrings
    strings = P() if stopping.strings is None else tables(next_state=P(), start=BATCH)
    return specs(max_new_tokens=BATCH, eos_ids=BATCH, min_new_tokens=BATCH, strings=strings)
