"""`jlade.inspect`: the programs of a model as the compiler of a device makes them, and how long a step should take."""

import bisect
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jlade import mesh as mesh_lib
from jlade.config import PLAIN, LookaheadConfig
from jlade.costs import choice, devices
from jlade.costs.estimate import Rates
from jlade.errors import check_int
from jlade.inspection import sequences, targets
from jlade.inspection.compiled import Loop, Needs
from jlade.inspection.model_programs import ModelPrograms, Source, find_model, shapes_of
from jlade.inspection.sequences import Sequences
from jlade.lookahead import division, names
from jlade.mesh import DATA, LOOKAHEAD, MODEL
from jlade.models import kv_rounding, quantization, sharding
from jlade.models.llama import Llama


class ProgramMemory(NamedTuple):
    """Bytes of a device's memory.

    Attributes:
      limit: of the device.
      needed: by the program that needs most, with its arrays; None if the compiler refuses it.
      arguments, outputs, temporary: of the program that decodes. Outputs in an argument's memory are not counted.
      largest_capacity: tokens of a cache with which the programs fit, at most the model's positions. It is extrapolated
        from the capacity that was compiled, as if all but weights and cache grew with it: a lower bound, closer the
        larger that capacity is.
    """

    limit: int
    needed: int | None
    arguments: int
    outputs: int | None
    temporary: int | None
    largest_capacity: int | None


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A model's programs on a device: one reads prompts, one decodes, and one decodes plainly.

    Attributes:
      device, device_kind: the argument, and JAX's name.
      mesh: the number of devices along `data`, `lookahead` and `model`. Memory and steps are those of one device.
      attention: its implementation.
      experts: their implementation; None for models without experts.
      lookahead: the setting.
      dtype: of the computation; bits: the fewest of an element of a matrix, None for floating point.
      kv_dtype: of keys and values in 8 bits, None for those of `dtype`.
      memory: in bytes.
      sequences: that fit into an engine with rows of this capacity; an upper bound unless `engine` was given.
      compile_seconds: of the three programs, with tracing and lowering.
      chunks: a round of each loop that reads prompts.
      step, plain_step: a step with the setting and a plain one, with a full cache.
      step_seconds, plain_step_seconds: measured with random weights if the device is attached, otherwise None.
      failure: the compiler's message if it refuses a program; `step`, `plain_step` and `chunks` are then None.
    """

    device: str
    device_kind: str
    mesh: tuple[int, int, int]
    attention: str
    experts: str | None
    lookahead: LookaheadConfig
    batch_size: int
    capacity: int
    dtype: str
    bits: int | None
    kv_dtype: str | None
    memory: ProgramMemory
    sequences: Sequences
    compile_seconds: float
    chunks: tuple[Loop, ...] | None = None
    step: Loop | None = None
    plain_step: Loop | None = None
    step_seconds: float | None = None
    plain_step_seconds: float | None = None
    failure: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the device's memory holds each program with its arrays."""
        return self.memory.needed is not None and self.memory.needed <= self.memory.limit

    @property
    def copies(self) -> list[str]:
        """Instructions in a loop that only move or convert an array of the size of a weight, a cache layer or the pool.

        Empty if the compiler refused the program.
        """
        rounds = [*(self.chunks or ()), self.step, self.plain_step]
        return sorted({copy for each in rounds if each is not None for copy in each.copies})

    def facts(self) -> dict[str, Any]:
        """Returns JSON-like values; those of a program that the compiler refused are None."""
        fields = "device device_kind mesh attention experts batch_size capacity dtype bits kv_dtype fits"
        result = {name: getattr(self, name) for name in fields.split()}
        result |= {
            "lookahead": names.name(self.lookahead),
            "memory_bytes": self.memory.limit,
            "needed_bytes": self.memory.needed,
            "argument_bytes": self.memory.arguments,
            "output_bytes": self.memory.outputs,
            "temporary_bytes": self.memory.temporary,
            "largest_capacity": self.memory.largest_capacity,
            "engine": self.sequences.facts(),
            "compile_seconds": self.compile_seconds,
            "copies_in_loop": None if self.step is None else len(self.copies),
            "copies": self.copies,
            "copies_at_entry": None if self.step is None else len(self.step.copies_at_entry),
        }
        for name, step, measured in (
            ("step", self.step, self.step_seconds),
            ("plain_step", self.plain_step, self.plain_step_seconds),
        ):
            result |= {
                f"host_loops_in_{name}": step and step.host_loops,
                f"kernels_per_{name}": step and step.kernels,
                f"collectives_per_{name}": step and len(step.exchanges),
                f"exchanged_bytes_per_{name}": step and sum(step.exchanges),
                f"vector_products_in_{name}": step and len(step.vector_products),
                f"{name}_estimate_ms": step and 1e3 * step.time.total,
                f"{name}_arithmetic_ms": step and 1e3 * step.time.arithmetic,
                f"{name}_bytes_ms": step and 1e3 * step.time.memory,
                f"{name}_measured_ms": measured and 1e3 * measured,
            }
        return result | {"failure": self.failure}


@mesh_lib.without_ambient_mesh()
def inspect(
    model: Source,
    device: str,
    *,
    dtype: Any = None,
    bits: int | None = None,
    lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
    batch_size: int = 1,
    capacity: int = 1024,
    attention: str = "auto",
    experts: str = "auto",
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
    mesh: Mapping[str, int] | None = None,
    engine: bool = False,
    rates: Rates | None = None,
) -> Inspection:
    """Compiles a model's programs for a device, which need not be there, and returns facts about them.

    Weights are not read. The compilers of TPUs and GPUs are in the extras `tpu-compiler` and `gpu-compiler`. Compiling
    a 7B model took half a minute for a GPU and for a TPU.

    Args:
      model: a directory with a `config.json`, a GGUF file, an id of the Hugging Face Hub, of which no weights are
        fetched, or parameters, of which the shapes suffice.
      device: "cpu" for this machine, or a name as in `jlade.plan`. A device that JAX uses here is measured too.
      dtype: of weights and computation; float32 on a CPU and bfloat16 elsewhere by default. Not for parameters.
      bits: 8 or 4 for matrices of so many bits. Not for parameters.
      lookahead: a setting, "auto" or None, as in `jlade.generate`.
      batch_size: number of sequences B.
      capacity: tokens of prompt and text; `jlade.generate` rounds up to 1024, 2048, 4096, ...
      attention, experts: as in `jlade.models.llama.Llama`; for a device that is not attached, "auto" is its kernel
        if it has one for the model.
      kv_dtype: of the cache, as in `jlade.generate`.
      mesh: the number of devices along some of the axes "data", "lookahead" and "model"; see `jlade.make_mesh`.
      engine: whether to compile the programs of an engine too, which takes about as long as the others, and to count
        their temporary memory in `sequences`.
      rates: that the device reaches; by default shares of its data sheet.

    Raises:
      ValueError: an argument is out of range, or the device's compiler is not installed; the message names the remedy.
      RuntimeError: the compiler cannot be used; the message names the remedy.
    """
    check_int("batch_size", batch_size, 1)
    kv_rounding.check(kv_dtype)
    directory, config = find_model(model, dtype, bits, capacity)
    sizes = {} if mesh is None else mesh
    for name, size in sizes.items():
        if name not in mesh_lib.AXES:
            raise ValueError(f"mesh must have the names {', '.join(mesh_lib.AXES)}, got {name!r}")
        check_int(f"mesh[{name!r}]", size, 1)
    if batch_size % sizes.get(DATA, 1):
        raise ValueError(f"batch_size must be a multiple of data={sizes[DATA]} in mesh, got {batch_size}")
    all_devices, is_attached = targets.find(device, math.prod(sizes.values()))
    target = all_devices[0]
    divided = None if mesh is None else sharding.mesh_for(config, mesh_lib.make_mesh(**sizes, devices=all_devices))
    params = shapes_of(model, directory, config, dtype, bits, target, divided)
    decoder = Llama(config, attention, experts, kv_dtype=kv_dtype)
    decoder = decoder.on(params, divided, None if is_attached else target)
    if lookahead == "auto":
        stored = choice.find(params, decoder, batch_size, divided) if is_attached else None
        lookahead = stored.lookahead if stored else choice.estimated(params, batch_size, divided, target)
    setting = dataclasses.replace(lookahead or PLAIN, relative_step_time=None)
    programs = ModelPrograms(params, decoder, target, batch_size, capacity, divided, rates)
    limit = devices.memory_of(device)
    inspection = Inspection(
        device=device,
        device_kind=target.device_kind,
        mesh=(mesh_lib.size(divided, DATA), mesh_lib.size(divided, LOOKAHEAD), mesh_lib.size(divided, *MODEL)),
        attention=decoder.attention,
        experts=decoder.experts if config.num_experts else None,
        lookahead=setting,
        batch_size=batch_size,
        capacity=capacity,
        dtype=params.norm.dtype.name,
        bits=quantization.fewest_bits(params),
        kv_dtype=kv_dtype,
        memory=ProgramMemory(limit, None, mesh_lib.num_bytes(programs.arguments(setting)), None, None, None),
        sequences=(sequences.compiled if engine else sequences.from_shapes)(programs, setting, limit),
        compile_seconds=0.0,
    )
    return _described(inspection, programs, is_attached)


def _described(inspection: Inspection, programs: ModelPrograms, is_attached: bool) -> Inspection:
    """Returns `found` with the facts of the compiled programs."""
    setting, began = inspection.lookahead, time.perf_counter()
    try:
        reading = programs.reading(setting)
        decoding = {lookahead: programs.decoding(lookahead) for lookahead in (setting, PLAIN)}
    except RuntimeError as error:  # XLA's, when a program needs more memory than the device has
        failure = str(error).strip() or repr(error)
        return dataclasses.replace(inspection, failure=failure, compile_seconds=time.perf_counter() - began)
    tokens, _ = division.share_size(setting, mesh_lib.size(programs.mesh, LOOKAHEAD))
    inspection = dataclasses.replace(
        inspection,
        memory=_memory(inspection.memory.limit, programs, (*reading.values(), decoding[setting])),
        compile_seconds=time.perf_counter() - began,
        chunks=tuple(loop for size, program in reading.items() for loop in programs.loops(program, setting, size)),
        step=programs.loops(decoding[setting], setting, tokens)[-1],
        plain_step=programs.loops(decoding[PLAIN], PLAIN, 1)[-1],
    )
    if not is_attached or not inspection.fits:
        return inspection
    seconds = programs.step_seconds(reading, decoding)
    return dataclasses.replace(inspection, step_seconds=seconds[setting], plain_step_seconds=seconds[PLAIN])


def _memory(limit: int, programs: ModelPrograms, compiled: Sequence[Any]) -> ProgramMemory:
    """Returns the memory that compiled programs need; the last of them decodes."""
    needs = [Needs.of(program) for program in compiled]
    needed, weights = max(map(sum, needs)), mesh_lib.num_bytes(programs.placed_params())
    cache = mesh_lib.num_bytes(programs.arguments(PLAIN)[2].cache)
    per_token = (needed - weights - cache) / programs.capacity

    def needed_for(capacity: int) -> int:
        entries, now = (sum(programs.decoder.config.entries_by_layer(x)) for x in (capacity, programs.capacity))
        return int(weights + cache * entries / now + per_token * capacity)

    capacities = range(1, programs.decoder.max_positions + 1)
    return ProgramMemory(limit, needed, *needs[-1], bisect.bisect_right(capacities, limit, key=needed_for))
