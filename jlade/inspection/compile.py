"""`jlade.compile` and `jlade.compile_engine`: programs that are compiled for a device and written to a directory."""

import collections
import dataclasses
import inspect
import os
import warnings
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jlade import mesh as mesh_lib
from jlade.config import PLAIN
from jlade.conversion import formats
from jlade.costs import choice
from jlade.decoding import ahead, loop, prefill
from jlade.decoding.ahead import Call
from jlade.decoding.state import CHUNKS, CHUNKS_ON_CPU
from jlade.engine import engine as engine_lib
from jlade.engine.engine import Engine
from jlade.errors import check_int
from jlade.generation import earlier, request, saved_programs, stop_strings, text
from jlade.generation.options import Options, unknown
from jlade.generation.prompts import NO_PROMPT
from jlade.generation.text import Tokenizer
from jlade.inspection import targets
from jlade.inspection.model_programs import Source, find_model, shapes_of
from jlade.models.llama import Llama, LlamaParams


@mesh_lib.without_ambient_mesh()
def compile(
    model: Source,
    output: str | os.PathLike[str],
    device: str = "cpu",
    *,
    dtype: jax.typing.DTypeLike | None = None,
    bits: int | None = None,
    batch_size: int = 1,
    capacity: int = 1024,
    attention: str = "auto",
    experts: str = "auto",
    turns: bool = False,
    **options: Any,
) -> None:
    """Compiles the programs of a call of `jlade.generate`, and writes them to a new directory for its `programs`.

    A process that loads them neither traces nor compiles. Weights are not read, and the device need not be there, as
    in `jlade.inspect`. The programs are for one device of that kind, for the versions that are installed here, and for
    calls with these arguments; the values of those that `jlade.generate` compiles nothing for are free. Those of "auto"
    are also the plain ones, which a first short text runs.

    Args:
      model: a directory with a `config.json`, a GGUF file, an id of the Hugging Face Hub, or parameters.
      output: the directory. It must not exist; it appears whole or not at all.
      device: "cpu" for this machine, or a name as in `jlade.plan`.
      dtype, bits, attention, experts: see `jlade.inspect`.
      batch_size: number of prompts.
      capacity: tokens of prompt and text, rounded up as `jlade.generate` does to 1024, 2048, 4096, ...
      turns: whether to compile the programs of later turns too, which begin with the state of an earlier call.
      options: others of `jlade.generate`, such as `lookahead`, `sampling`, `stop`, `kv_dtype` and `logprobs`.

    Raises:
      TypeError, ValueError: an argument is out of range, `output` exists, or the device's compiler is not installed.
      RuntimeError: the compiler cannot be used, or a program needs more memory than the device has.
    """
    _check("calls", options, {field.name for field in dataclasses.fields(Options)}, output)
    check_int("batch_size", batch_size, 1)
    source = _find(model, device, dtype, bits, capacity)
    arguments = {"tokenizer": source.tokenizer, "max_new_tokens": capacity - 1} | options
    params, target = source.params, source.target
    decoder = source.decoder(attention, experts, arguments.get("kv_dtype"))
    is_auto = arguments.get("lookahead", "auto") == "auto"
    with jax.default_device(target if source.is_attached else None):
        if not source.is_attached and is_auto:
            arguments["lookahead"] = choice.estimated(params, batch_size, None, target)
        of_call = Options(**arguments)
        setup = request.resolve(params, of_call, batch_size)
        filled = request.fill(params, setup, [NO_PROMPT] * batch_size, of_call)
    chunks = CHUNKS_ON_CPU if target.platform == "cpu" else CHUNKS
    inputs = dataclasses.replace(filled.inputs, lengths=ahead.shapes(filled.inputs.lengths))  # of prompts of any length
    config = dataclasses.replace(filled.config, decoder=decoder, chunks=chunks)

    def run() -> None:
        state = loop.decode(params, inputs, config)
        if turns:
            loop.decode(params, earlier.continued(inputs, state), config)
        if is_auto and inputs.costs is not None:  # the first call of a process may be plain
            plain = dataclasses.replace(filled, inputs=inputs, config=config).plain()
            prefix = prefill.prefill(params, plain.inputs, config)
            loop.run_steps(params, prefill.start(prefix, plain.inputs, plain.config), plain.config)

    made = targets.programs_of(run, target, anew=True)
    made.sort(key=lambda each: _rank(each.call))
    saved_programs.save(output, made, target, saved_programs.facts_of(params, inputs, config))


def _rank(call: Call) -> tuple[bool, bool]:
    """Returns the place of a program in the order of loading: those of a short prompt and of plain steps are first."""
    config = call.settings.get("config")
    return "chunk" in call.settings and call.settings["chunk"][1] > 0, config is not None and config.lookahead != PLAIN


@mesh_lib.without_ambient_mesh()
def compile_engine(
    model: Source,
    output: str | os.PathLike[str],
    device: str = "cpu",
    *,
    dtype: jax.typing.DTypeLike | None = None,
    bits: int | None = None,
    attention: str = "auto",
    experts: str = "auto",
    **options: Any,
) -> None:
    """Compiles all programs of a `jlade.Engine`, and writes them to a new directory for its `programs`.

    It does for an engine what `jlade.compile` does for a call.

    Args:
      model, output, device, dtype, bits, attention, experts: of `jlade.compile`.
      options: others of `jlade.Engine`, such as `max_sequences`, `capacity`, `lookahead`, `kv_dtype`, `remember`,
        `max_prediction` and `max_top_logprobs`.

    Raises:
      TypeError, ValueError: an argument is out of range, `output` exists, or the device's compiler is not installed.
      RuntimeError: the compiler cannot be used, or a program needs more memory than the device has.
    """
    _check("engines", options, set(inspect.signature(Engine).parameters) - {"params"}, output)
    source = _find(model, device, dtype, bits)
    arguments = {"tokenizer": source.tokenizer, "decoder": source.decoder(attention, experts, options.get("kv_dtype"))}
    params, place = source.params, jax.default_device(source.target if source.is_attached else None)
    if not source.is_attached:  # an engine asks its parameters for their device
        there = SingleDeviceSharding(source.target)
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), params)
    with place, Engine(params, **(arguments | options)) as engine:
        made = targets.programs_of(lambda: collections.deque(engine.compile(), maxlen=0), source.target, anew=True)
        saved_programs.save(output, made, source.target, engine_lib.facts_of(engine))


class _Found(NamedTuple):
    """A model, and the device that its programs are for."""

    params: LlamaParams  # shapes
    tokenizer: Tokenizer | None
    target: jax.Device
    is_attached: bool

    def decoder(self, attention: str, experts: str, kv_dtype: Any) -> Llama:
        """Returns the decoder with its implementations for the device."""
        decoder = Llama(self.params.config, attention, experts, kv_dtype=kv_dtype)
        with jax.default_device(self.target if self.is_attached else None):
            return decoder.on(self.params, absent=None if self.is_attached else self.target)


def _check(users: str, options: dict[str, Any], accepted: set[str], output: str | os.PathLike[str]) -> None:
    """Raises an error for an option that is not accepted, or an output that exists."""
    accepted = accepted - {"attention_mask", "decoder", "mesh", "programs"}
    for name in options.keys() - accepted:
        raise unknown(name, f"an option of {users} that are compiled ahead", accepted)
    if os.path.lexists(output):
        raise ValueError(f"output must not exist yet, got {os.fspath(output)!r}")


def _find(model: Source, device: str, dtype: Any, bits: int | None, capacity: int = 2) -> _Found:
    directory, config = find_model(model, dtype, bits, capacity)
    if directory is None:
        tokenizer = text.tokenizer_of(model)
    elif (tokenizer := formats.find(directory).tokenizer()) is not None:
        config = stop_strings.end_tokens(config, tokenizer)
    (target, *_), is_attached = targets.find(device)
    if target.platform == "gpu" and not is_attached:
        warnings.warn(
            f"products for {device} are in tiles that were not timed, as it is not attached: programs that the device "
            "itself compiles may be faster",
            stacklevel=3,
        )
    return _Found(shapes_of(model, directory, config, dtype, bits, target), tokenizer, target, is_attached)
