"""Accelerators that need not be there: their compilers run on any machine."""

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jlade.costs import devices as devices_lib
from jlade.costs.devices import ARCHITECTURES, Device, Gpu, Tpu
from jlade.decoding import ahead
from jlade.decoding.ahead import Call
from jlade.mesh import default_device

GPU_COMPILER, TPU_COMPILER = "gpu-compiler", "tpu-compiler"  # extras of the package


_DESCRIPTION = """gpu_device_info {{ threads_per_block_limit:1024 threads_per_warp:32 shared_memory_per_block:49152
shared_memory_per_core:{shared_memory} shared_memory_per_block_optin:{optin} threads_per_core_limit:2048
core_count:{gpu.multiprocessors} fpus_per_core:{lanes} clock_rate_ghz:{gpu.gigahertz}
block_dim_limit_x:2147483647 block_dim_limit_y:65535 block_dim_limit_z:65535 registers_per_core_limit:65536
registers_per_block_limit:65536 memory_bandwidth:{bandwidth} l2_cache_size:{cache} device_memory_size:{device.memory}
cuda_compute_capability {{ major:{gpu.capability[0]} minor:{gpu.capability[1]} }} }} platform_name:"CUDA"
dnn_version_info {{ major:9 minor:10 patch:2 }} runtime_version {{ major:12 minor:9 }}
device_description_str:"{device.kind}" """


def find(name: str, number: int = 1) -> tuple[list[jax.Device], bool]:
    """Returns devices that programs are compiled for, and whether they are attached to this machine.

    They are attached ones if there are enough of this kind, or else described ones.

    Args:
      name: "cpu", or a key of `jlade.costs.devices.DEVICES`.
      number: of devices.

    Raises:
      ValueError: `name` is unknown, its compiler is not installed, or JAX makes fewer devices of the CPU.
      RuntimeError: the compiler cannot be used; the message names the remedy.
    """
    if name == "cpu":
        devices = jax.local_devices(backend="cpu")
        if len(devices) < number:
            raise ValueError(
                f"mesh needs {number} devices, and JAX makes {len(devices)} of this CPU: "
                f'set jax.config.update("jax_num_cpu_devices", {number}) before JAX starts'
            )
        return devices[:number], True
    target, default = devices_lib.named(name, "cpu"), default_device()
    if default.device_kind == target.kind:
        others = (device for device in jax.local_devices(backend=default.platform) if device != default)
        attached = [default, *(device for device in others if device.device_kind == target.kind)]
        if len(attached) >= number:
            return attached[:number], True
    described = _gpu(target, target.target, number) if isinstance(target.target, Gpu) else _tpu(target.target, number)
    return described[:number], False


def _tpu(tpu: Tpu, number: int) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f'the compiler for TPUs is not installed: pip install "jlade[{TPU_COMPILER}]"')
    # libtpu otherwise looks for a TPU machine, complains that there is none, and lets one process use it at a time.
    settings = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    settings |= {"TPU_LOG_DIR": "disabled"}
    for name, value in (settings | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}).items():
        os.environ.setdefault(name, value)
    generation, _, sizes = tpu.topology.partition(":")
    grid = [int(size) for size in sizes.split("x")]
    while math.prod(grid) < number:
        shortest = min(range(len(grid)), key=lambda axis: (grid[axis], -axis))
        grid[shortest] *= 2
    return _described("tpu", topology_name=f"{generation}:{'x'.join(map(str, grid))}")


def _gpu(device: Device, gpu: Gpu, number: int) -> list[jax.Device]:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ValueError(f'the compiler for NVIDIA GPUs is not installed: pip install "jlade[{GPU_COMPILER}]"')
    lanes, shared_memory = ARCHITECTURES[gpu.capability]
    description = _DESCRIPTION.format(
        device=device,
        gpu=gpu,
        lanes=lanes,
        shared_memory=shared_memory,
        optin=shared_memory - 1024,
        bandwidth=round(1e12 * device.terabytes),
        cache=round(2**20 * gpu.cache),
    )
    return _described("cuda", topology_name="", topology=f"1x1x{number}", target_config=description)


def _described(platform: str, **description: str) -> list[jax.Device]:
    try:
        devices = list(topologies.get_topology_desc(platform=platform, **description).devices)
    except Exception as error:  # of several types: the plugin's, JAX's, and XLA's
        remedy = "set JAX_PLATFORMS=cpu before JAX starts, and use the versions of JAX and its plugin that fit"
        raise RuntimeError(f"the compiler for {platform} cannot be used: {error}; {remedy}") from error
    return devices


class Made(NamedTuple):
    """A program that was compiled for a call."""

    call: Call
    compiled: Any  # jax.stages.Compiled


def programs_of(run: Callable[[], Any], place: jax.Device | Mesh, anew: bool = False) -> list[Made]:
    """Returns the programs that `run` runs, each once, compiled for devices that need not be there.

    Args:
      run: calls functions of `jlade.decoding`, with shapes or arrays. They return shapes.
      place: a result of `find`, or a mesh of them, on which shapes have their shardings, and other arrays are whole.
      anew: whether to compile what JAX has already, in memory or in its persistent cache: of a program from the cache,
        JAX serializes a part alone.
    """
    made = dict[Any, Made]()
    everywhere = NamedSharding(place, PartitionSpec()) if isinstance(place, Mesh) else SingleDeviceSharding(place)

    def shape(array: Any) -> jax.ShapeDtypeStruct:
        of_array = getattr(array, "sharding", None) if isinstance(place, Mesh) else None
        return jax.ShapeDtypeStruct(np.shape(array), array.dtype, sharding=of_array or everywhere)

    def handler(call: Call) -> Any:
        call = call._replace(arrays=jax.tree.map(shape, call.arrays))
        call = call.apart() if anew else call
        leaves, structure = jax.tree.flatten(call.arrays)
        key = call.program, *call.settings.values(), *leaves, structure
        if key not in made:
            made[key] = Made(call, compiled(call.programs.jitted, call.arrays, call.settings, place))
        return ahead.results_of(made[key].compiled)

    with ahead.intercept(handler), without_cache() if anew else contextlib.nullcontext():
        run()
    return [*made.values()]


def compiled(jitted: Any, arguments: Iterable[Any], settings: Mapping[str, Any], place: jax.Device | Mesh) -> Any:
    """Returns a program, compiled for devices that need not be there, a `jax.stages.Compiled`.

    Args:
      jitted: a result of `jax.jit`.
      arguments: pytrees of shapes, with shardings on these devices.
      settings: static arguments by their names.
      place: a result of `find`, or a mesh of them.
    """
    # Pallas asks for the device in the mesh: kernels differ between generations of TPUs.
    mesh = place if isinstance(place, Mesh) else Mesh(np.array([place]), ("one",))
    device = mesh.devices.flat[0]
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jitted.trace(*arguments, **settings).lower(lowering_platforms=(platform,))
    # JAX would keep the program, but cannot load it again without the device.
    with contextlib.nullcontext() if device in jax.local_devices() else without_cache():
        try:
            return lowered.compile(ahead.COMPILER_OPTIONS.get(device.platform))
        except jax.errors.JaxRuntimeError as error:
            if not ahead.refuses_options(error):
                raise
            return lowered.compile()  # it uses none of its arguments, and so is for the CPU here


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Keeps the programs of the block out of JAX's persistent cache, and those of the cache out of the block."""
    before = jax.config.values["jax_enable_compilation_cache"]

    def enable(value: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", value)
        compilation_cache.reset_cache()  # otherwise JAX goes on as it began

    enable(False)
    try:
        yield
    finally:
        enable(before)


def compile_for(
    place: jax.Device | Mesh, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> Any:
    """Returns `function` compiled for devices that need not be there, a `jax.stages.Compiled`.

    Args:
      place: a result of `find`, or a mesh of them.
      function: traceable.
      arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`; for a mesh, with their shardings.
      donate: indices of the arguments whose memory the results take over.
    """
    options: dict[str, Any] = {"donate_argnums": donate}
    if not isinstance(place, Mesh):
        options |= dict.fromkeys(("in_shardings", "out_shardings"), SingleDeviceSharding(place))
    return compiled(jax.jit(function, **options), arguments, {}, place)
