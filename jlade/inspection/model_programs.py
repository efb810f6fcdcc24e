"""The programs of a model, compiled for a device that need not be there, and timed where it is attached."""

import dataclasses
import operator
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.config import PLAIN, LookaheadConfig
from jlade.conversion import location
from jlade.conversion.formats import read_config
from jlade.conversion.tensors import check_dtype, param_shapes
from jlade.costs import estimate
from jlade.costs.estimate import Rates
from jlade.decoding import ahead, loop, prefill, sharding
from jlade.decoding.ahead import Call
from jlade.decoding.state import CHUNKS, CHUNKS_ON_CPU, DecodeConfig, DecodeState, Inputs, Prefix
from jlade.decoding.stopping import Stopping
from jlade.errors import check_int
from jlade.generation import corpus
from jlade.inspection import compiled, targets
from jlade.inspection.compiled import Loop, Sizes
from jlade.models import layers, quantization
from jlade.models import sharding as model_sharding
from jlade.models.architecture import LlamaConfig
from jlade.models.attention import plain
from jlade.models.llama import Llama, LlamaParams, init_params, quantize

Source = LlamaParams | str | os.PathLike[str]  # parameters, or what names a checkpoint, of which no weights are read

STEPS, REPEAT = 8, 5  # steps timed at once, and how often
FEW = 64  # numbers, such as the last row of recycled logits: an array of this size is no table


class ModelPrograms(NamedTuple):
    """The programs of a model for a device, a batch size and a capacity."""

    params: LlamaParams  # shapes
    decoder: Llama
    device: jax.Device
    batch_size: int
    capacity: int
    mesh: Mesh | None = None  # a result of `mesh_for`; `device` is then one of its devices
    rates: Rates | None = None  # that the device reaches; None for shares of its data sheet
    page_size: int | None = None  # of a cache in pages, as that of an engine

    def config(self, lookahead: LookaheadConfig) -> DecodeConfig:
        chunks = CHUNKS_ON_CPU if self.device.platform == "cpu" else CHUNKS
        return DecodeConfig(self.decoder, lookahead, chunks=chunks, mesh=self.mesh)

    def inputs(self, length: int, lookahead: LookaheadConfig = PLAIN) -> Inputs:
        """Returns random prompts of `length` tokens, to be continued up to the capacity."""
        shape = self.batch_size, self.capacity
        tokens = jax.random.randint(jax.random.key(0), shape, 0, self.decoder.vocab_size, jnp.int32)
        lengths = jnp.full(self.batch_size, length, jnp.int32)
        never = jnp.full((self.batch_size, 1), -1, jnp.int32)  # no token
        # The time of a search does not depend on the tokens.
        indices = corpus.of_prompts([np.zeros(length, np.int32)] * self.batch_size, self.capacity, lookahead)
        stopping = Stopping(self.capacity - lengths, never)
        return Inputs(tokens, lengths, stopping, jax.random.key(0), sources=indices)

    def arguments(self, lookahead: LookaheadConfig) -> tuple[Any, ...]:
        """Returns the shapes of the parameters, and of a state without its memory and of this, before a step."""

        def start(params: LlamaParams) -> DecodeState:
            if self.page_size is None:
                cache = self.decoder.init_cache(params, self.batch_size, self.capacity)
            else:
                number = self.batch_size * -(-self.capacity // self.page_size)
                cache = self.decoder.init_pages(params, self.batch_size, self.capacity, number + 1, self.page_size)
            return prefill.start(Prefix(cache), self.inputs(1, lookahead), self.config(lookahead))

        state = sharding.state_shapes(start, self.params, self.config(lookahead))
        rest = dataclasses.replace(state, memory=None)  # type: ignore[arg-type]
        return self.placed_params(), rest, state.memory

    def placed_params(self) -> LlamaParams:
        """Returns the shapes of the parameters, with their shardings on a mesh."""
        if self.mesh is None:
            return self.params
        placed: LlamaParams = mesh_lib.shapes(self.params, self.mesh, model_sharding.specs(self.params, self.mesh))
        return placed

    def reading(self, lookahead: LookaheadConfig) -> dict[int, Any]:
        """Returns the compiled programs that read prompts, by the sizes of their chunks, the largest first."""

        shapes = jax.eval_shape(lambda: self.inputs(1))
        if self.mesh is not None:
            shapes = mesh_lib.shapes(shapes, self.mesh, sharding.input_specs(shapes, self.config(PLAIN)))
        made = self._compiled(lambda: prefill.prefill(self.placed_params(), shapes, self.config(lookahead)))
        return {call.settings["chunk"][0]: program for call, program in made if call.program == "_read"}

    def decoding(self, lookahead: LookaheadConfig) -> Any:
        """Returns the compiled program that makes steps."""

        params, rest, memory = self.arguments(lookahead)
        state = dataclasses.replace(rest, memory=memory)
        ((_, program),) = self._compiled(lambda: loop.run_steps(params, state, self.config(lookahead)))
        return program

    def _compiled(self, run: Callable[[], Any]) -> list[targets.Made]:
        return targets.programs_of(run, self.mesh or self.device)

    def loops(self, program: Any, lookahead: LookaheadConfig, tokens: int) -> list[Loop]:
        """Returns the loops of a compiled program: over chunks of prompts, or over steps.

        Args:
          program: of `reading` or `decoding`.
          lookahead: the setting.
          tokens: of a round, of each sequence.
        """
        params, _, memory = self.arguments(lookahead)
        matrices: list[Any] = [params.embedding, params.output, params.per_layer]
        for i, layer in enumerate(params.layers):
            described = layers.arrays_of(params.config, i).items()
            matrices += [operator.attrgetter(path)(layer) for path, array in described if array.may_round]
        leaves = jax.tree.leaves(matrices, is_leaf=quantization.is_quantized)
        arrays = (leaf.weight if quantization.is_quantized(leaf) else leaf for leaf in leaves)
        weights = (mesh_lib.local_size(x) for x in arrays if x.ndim > 1)
        tables = (mesh_lib.local_size(x) for x in jax.tree.leaves(memory.drafts.states))
        in_pages = (keys for keys, *_ in memory.cache.pages)
        memories = (state.memory for state in memory.cache.states if state.memory is not None)
        sizes = Sizes(
            weights=frozenset(weights),
            cache_layers=frozenset(map(mesh_lib.local_size, [*memory.cache.keys, *in_pages, *memories])),
            tables=frozenset(size for size in tables if size > FEW),
            experts_read=self.experts_read(tokens),
        )
        entries = list(filter(None, self.decoder.config.entries_by_layer(self.capacity)))
        chunk = plain.CHUNK_ON_CPU if self.device.platform == "cpu" else plain.CHUNK
        trips = round(statistics.mean(-(-number // chunk) for number in entries))  # no loop says whose it is
        rates = self.rates or estimate.rates(self.device.platform, self.device.device_kind)
        return compiled.loops(program.as_text(), self.device.platform, sizes, rates, trips)

    def experts_read(self, tokens: int) -> dict[int, float]:
        """Returns the share of a layer's experts that `tokens` of each sequence choose, by the size of their arrays."""
        params = self.placed_params()
        experts = [x for layer in params.layers for x in jax.tree.leaves(layer.experts) if x.ndim == 3]
        sequences = self.batch_size // mesh_lib.size(self.mesh, mesh_lib.DATA)
        share = self.decoder.config.share_of_experts(sequences * tokens)
        return dict.fromkeys(map(mesh_lib.local_size, experts), share)

    def step_seconds(
        self, reading: dict[int, Any], decoding: dict[LookaheadConfig, Any]
    ) -> dict[LookaheadConfig, float]:
        """Returns the median seconds of a step of each program, with random weights and a cache that is nearly full.

        The device must be attached. The programs that read are of the first setting.
        """
        config = self.config(next(iter(decoding)))
        with jax.default_device(self.device):
            params = init_params(jax.random.key(0), self.decoder.config, self.params.norm.dtype)
            bits = quantization.fewest_bits(self.params)
            if bits is not None:
                params = quantize(params, bits, mesh_lib.size(self.mesh, *mesh_lib.MODEL))
            params = sharding.put_params(params, self.mesh)
            return {
                setting: self._step_seconds(params, reading, config, decoding[setting], setting) for setting in decoding
            }

    def _step_seconds(
        self,
        params: LlamaParams,
        reading: dict[int, Any],
        read_config: DecodeConfig,
        decode: Any,
        setting: LookaheadConfig,
    ) -> float:
        room = (REPEAT + 1) * STEPS * setting.max_accepted
        inputs = self.inputs(max(1, self.capacity - room), setting)
        inputs = sharding.put(inputs, self.config(setting)) if self.mesh else jax.device_put(inputs, self.device)
        config, seconds = self.config(setting), []

        def handler(call: Call) -> Any:
            if call.program == "_read":
                return reading[call.settings["chunk"][0]](*call.arrays)
            return decode(*call.arrays) if call.program == "_run" else call.run()

        with ahead.intercept(handler):
            state = prefill.start(prefill.prefill(params, inputs, read_config), inputs, config)
            for _ in range(REPEAT + 1):
                before = int(state.num_steps.max())
                began = time.perf_counter()
                state = jax.block_until_ready(loop.run_steps(params, state, config, STEPS))
                seconds.append((time.perf_counter() - began) / max(1, int(state.num_steps.max()) - before))
        return statistics.median(seconds[1:])  # the first call also loads the program


def find_model(model: Source, dtype: Any, bits: int | None, capacity: int) -> tuple[pathlib.Path | None, LlamaConfig]:
    """Returns the directory or GGUF file of a model, None for parameters, and its configuration.

    Raises:
      ValueError: an argument is out of range, or of no use for parameters.
    """
    if isinstance(model, LlamaParams):
        directory, config = None, model.config
        if dtype is not None or bits is not None:
            raise ValueError("dtype and bits are for a directory; parameters have their own")
    else:
        directory = location.find(model, argument="model")
        config = read_config(directory)
    if check_int("capacity", capacity, 2) > config.max_positions:
        raise ValueError(f"capacity must be at most {config.max_positions}, the model's positions, got {capacity}")
    return directory, config


def shapes_of(
    model: Source,
    directory: pathlib.Path | None,
    config: LlamaConfig,
    dtype: Any,
    bits: int | None,
    device: jax.Device,
    mesh: Mesh | None = None,
) -> LlamaParams:
    """Returns the shapes of the parameters, for the results of `find_model` and `targets.find`."""
    if isinstance(model, LlamaParams):
        params: LlamaParams = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
        return params
    assert directory is not None
    return param_shapes(
        config, check_dtype(dtype, "float32", directory, device), bits, mesh_lib.size(mesh, *mesh_lib.MODEL)
    )
