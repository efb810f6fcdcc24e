"""Devices, and meshes of them along the axes `data`, `lookahead` and `model`, and arrays on them.

`data` divides the sequences of a batch, `lookahead` the tokens of a step (arXiv 2402.02057, section 3.4), and `model`
the heads, the columns of the MLPs and the vocabulary. A program on a mesh is a `jax.shard_map` over all axes.
"""

import contextlib
import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jlade.errors import check_int

DATA, LOOKAHEAD, HEADS = "data", "lookahead", "model"
AXES = (DATA, LOOKAHEAD, HEADS)
# With fewer KV heads than shards of the model, each head has copies. They are a fourth axis, inside `model`.
COPIES = "copy"
MODEL = (HEADS, COPIES)

MIN_BYTES = 1024  # of `gather`, which sends this times a power of two, so that few programs are compiled
P = ParamSpec("P")
T = TypeVar("T")
Specs = Any  # a pytree of PartitionSpec, a prefix of that of the arrays
SHARED = "shared by the sequences of a batch"  # of a dataclass's field, in `typing.Annotated`


def is_shared(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has the type `Annotated[..., SHARED]`."""
    return SHARED in getattr(field.type, "__metadata__", ())


def make_mesh(
    data: int = 1, lookahead: int = 1, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh for `jlade.load` and `jlade.generate`.

    Args:
      data: number of groups of devices that decode different sequences of a batch.
      lookahead: number of devices, or groups, that compute different tokens of a step; each has all weights.
      model: number of devices that share the weights.
      devices: by default all of JAX's, on all hosts, or the first of them.

    Raises:
      TypeError, ValueError: a size is no positive integer, or there are fewer devices than their product, or some
        process would have none.
    """
    sizes = {name: check_int(name, value, 1) for name, value in zip(AXES, (data, lookahead, model), strict=True)}
    all_devices = jax.devices() if devices is None else list(devices)
    needed, shown = math.prod(sizes.values()), ", ".join(f"{name}={value}" for name, value in sizes.items())
    if needed > len(all_devices):
        raise ValueError(
            f"{shown} needs {needed} devices, and there are {len(all_devices)}: the product of the sizes must be at "
            f"most {len(all_devices)}"
        )
    used = all_devices[:needed]
    idle = {device.process_index for device in all_devices} - {device.process_index for device in used}
    if idle:
        raise ValueError(
            f"{shown} uses {needed} of {len(all_devices)} devices and leaves process {min(idle)} without any: make the "
            f"product of the sizes {len(all_devices)}"
        )
    # Not `jax.make_mesh`: it refuses the GPUs of several hosts, and on some TPUs sizes that split a physical axis.
    arranged = np.array(used).reshape(tuple(sizes.values()))
    slices = {getattr(device, "slice_index", 0) for device in used}
    if used[0].platform == "tpu" and needed == len(all_devices) and len(slices) == 1:
        arranged = mesh_utils.create_device_mesh(arranged.shape, used, allow_split_physical_axes=True)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def split(mesh: Mesh, kv_heads: int | None) -> Mesh:
    """Returns `mesh` with the axis `copy`: with fewer `kv_heads` than shards of the model, `model` is their number.

    Args:
      mesh: with some of the axes `AXES`; others have size 1.
      kv_heads: None for a model that is not divided.

    Raises:
      TypeError, ValueError: it is no mesh, or has other axes.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a mesh made by jlade.make_mesh, got {mesh!r}")
    if not set(mesh.axis_names) <= {*AXES, COPIES}:
        raise ValueError(f"mesh must have the axes {', '.join(AXES)}, got {', '.join(map(str, mesh.axis_names))}")
    order = sorted(mesh.axis_names, key=(*AXES, COPIES).index)
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in order])
    shards = size(mesh, *MODEL)
    heads = shards if kv_heads is None else math.gcd(shards, kv_heads)
    sizes = size(mesh, DATA), size(mesh, LOOKAHEAD), heads, shards // heads
    return Mesh(devices.reshape(sizes), (*AXES, COPIES), axis_types=(AxisType.Auto,) * 4)


def size(mesh: Mesh | None, *axes: str) -> int:
    """Returns the number of devices along the axes, 1 for absent ones and without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in axes)


def default_device() -> jax.Device:
    """Returns the device of arrays without a sharding."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform's name, or None
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def devices_of(params: Any) -> list[jax.Device]:
    """Returns the devices that hold a pytree, by their numbers.

    Arrays on no device (NumPy, `jax.ShapeDtypeStruct` without a sharding, tracers) get JAX's default device.
    """
    arrays = (x for x in jax.tree.leaves(params) if not isinstance(x, jax.core.Tracer))
    places = (getattr(array, "sharding", None) for array in arrays)
    devices = next((place.device_set for place in places if place is not None), None) or {default_device()}
    return sorted(devices, key=lambda device: device.id)


def device_of(params: Any, mesh: Mesh | None = None) -> jax.Device:
    """Returns a device of `mesh`; without one, the first device that holds `params`."""
    return devices_of(params)[0] if mesh is None else mesh.devices.flat[0]


def label(mesh: Mesh) -> str:
    """Returns the sizes for people: "data 1, lookahead 4, model 2"."""
    return f"data {size(mesh, DATA)}, lookahead {size(mesh, LOOKAHEAD)}, model {size(mesh, *MODEL)}"


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh that `put` placed a pytree on, None if it did not."""
    leaf = next((x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)), None)
    if leaf is None or isinstance(leaf, jax.core.Tracer) or not isinstance(leaf.sharding, NamedSharding):
        return None
    mesh = leaf.sharding.mesh
    return mesh if isinstance(mesh, Mesh) and COPIES in mesh.axis_names else None


def shard(function: Callable[..., Any], mesh: Mesh | None, in_specs: Specs, out_specs: Specs) -> Callable[..., Any]:
    """Returns `function` as a program for the devices of a mesh, each with its parts of the arrays.

    Without a mesh it is `function` itself.
    """
    if mesh is None:
        return function
    of_caller = jax.sharding.get_abstract_mesh()
    if not of_caller.empty and of_caller != mesh.abstract_mesh:
        raise ValueError(
            f"config has a mesh of {label(mesh)}, and the program that it is used in runs on one with the axes "
            f"{', '.join(map(str, of_caller.axis_names))}: leave out mesh=, and the parameters on this mesh"
        )
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def put(tree: Any, mesh: Mesh, specs: Specs) -> Any:
    """Returns the arrays of a pytree on the devices of a mesh; those of several processes must have equal values."""
    specs = jax.tree.broadcast(specs, tree)

    def place(array: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct) or (
            isinstance(array, jax.Array) and array.sharding == sharding
        ):
            return array
        if jax.process_count() == 1 or (isinstance(array, jax.Array) and not array.is_fully_addressable):
            return jax.device_put(array, sharding)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = place(jax.random.key_data(array), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, specs)


def shapes(tree: Any, mesh: Mesh, specs: Specs) -> Any:
    """Returns shapes (`jax.ShapeDtypeStruct`) of the arrays of a pytree on the devices of a mesh."""

    def shape(array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree, jax.tree.broadcast(specs, tree))


def local_size(array: Any) -> int:
    """Returns the number of elements of an array, or of its shape, on one device."""
    sharding = getattr(array, "sharding", None)
    return math.prod(array.shape if sharding is None else sharding.shard_shape(array.shape))


def num_bytes(tree: Any) -> int:
    """Returns the bytes of arrays, or of their shapes, on one device."""
    return sum(local_size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def without_ambient_mesh() -> Iterator[None]:
    """Leaves the mesh of `jax.set_mesh`, and lets arrays come from the host and return under a `jax.transfer_guard`."""
    leaves = not jax.sharding.get_abstract_mesh().empty
    with jax.transfer_guard("allow"), jax.set_mesh(None) if leaves else contextlib.nullcontext():
        yield


def with_auto_axes(tree: Any) -> Any:
    """Returns the arrays of a pytree, those on a mesh with Explicit axes on the same mesh with Auto ones, uncopied."""

    def types(mesh: Mesh) -> tuple[AxisType, ...]:
        is_explicit = AxisType.Explicit in mesh.axis_types
        return (AxisType.Auto,) * len(mesh.axis_names) if is_explicit else mesh.axis_types

    return _retyped(tree, types)


def _retyped(tree: Any, types: Callable[[Any], tuple[AxisType, ...]]) -> Any:
    """Returns the arrays of a pytree on their meshes, whose axes have other types."""
    leaves, structure = jax.tree.flatten(tree)
    places: dict[int, NamedSharding] = {}
    for i, leaf in enumerate(leaves):
        is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        sharding: Any = leaf.sharding if is_concrete else None
        if isinstance(sharding, NamedSharding) and types(mesh := sharding.mesh) != mesh.axis_types:
            other = Mesh(mesh.devices, mesh.axis_names, axis_types=types(mesh))
            places[i] = NamedSharding(other, sharding.spec, memory_kind=sharding.memory_kind)
    if not places:
        return tree
    with without_ambient_mesh():
        placed = jax.device_put([leaves[i] for i in places], list(places.values()))
    for i, array in zip(places, placed, strict=True):
        leaves[i] = array
    return jax.tree.unflatten(structure, leaves)


def mesh_agnostic(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a function of pytrees that runs under `jax.set_mesh`, and on meshes with Explicit axes.

    Called eagerly, it runs without the caller's mesh: arrays keep their places, and results on a mesh have axes of
    the caller's types. In a program of the caller the axes are Auto for it, and its results are whole on each device.

    Each public function of arrays needs it: `jlade.prepare` sees neither the parameters of a later `jlade.decode` nor
    the program of the caller in which it is traced.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        of_caller = jax.sharding.get_abstract_mesh()
        if of_caller.empty:
            first = _first(args or tuple(kwargs.values()))
            if not _is_explicit(first):
                return function(*args, **kwargs)
            of_caller = jax.typeof(first).sharding.mesh
        if _is_traced():
            return _in_program(function, *args, **kwargs)

        def types(mesh: Mesh) -> tuple[AxisType, ...]:
            return of_caller.axis_types if mesh.axis_names == of_caller.axis_names else mesh.axis_types

        with without_ambient_mesh():
            args, kwargs = with_auto_axes((args, kwargs))
            return _retyped(function(*args, **kwargs), types)

    return call


def _in_program(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of a function in a program that is being traced."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    set_by_caller = jax.sharding.get_abstract_mesh()
    if varying := {axis for array in arrays.values() for axis in jax.typeof(array).mat.varying}:
        raise ValueError(
            f"jlade.{function.__name__} needs check_vma=False of the jax.shard_map in which it is called: its loops "
            f"begin with values that are equal on all devices, and its arguments vary along {', '.join(varying)}"
        )
    meshes = [set_by_caller, *(jax.typeof(array).sharding.mesh for array in arrays.values())]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(*args, **kwargs)

    def run(*arrays_in_auto: jax.Array) -> T:
        replaced = dict(zip(arrays, arrays_in_auto, strict=True))
        args, kwargs = jax.tree.unflatten(structure, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    whole = NamedSharding(mesh, PartitionSpec())
    result: T = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=whole)(*arrays.values())
    return result


def _is_traced() -> bool:
    """Whether a program is being traced, in which no mesh can be set."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def _first(tree: Any) -> Any:
    """Returns the first leaf of a pytree, or None, without a look at the others."""
    while tree is not None and not isinstance(tree, jax.Array):
        children = jax.tree_util.default_registry.flatten_one_level(tree)
        tree = next(iter(children[0]), None) if children else None
    return tree


def _is_explicit(array: Any) -> bool:
    """Whether an array, or one of a program that is being traced, is on a mesh with Explicit axes."""
    return isinstance(array, jax.Array) and AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def fetch(tree: Any) -> Any:
    """Returns the arrays of a pytree in NumPy, whole. All processes must call it if arrays are divided among them."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    divided = next((x for x in arrays if not (x.is_fully_addressable or x.is_fully_replicated)), None)
    if divided is not None:
        assert isinstance(divided.sharding, NamedSharding)
        tree = _whole(NamedSharding(divided.sharding.mesh, PartitionSpec()))(tree)
    return jax.device_get(tree)


def gather(value: Any) -> list[Any]:
    """Returns the values of all processes (`jax.distributed`), in their order. Every process must make the call.

    Args:
      value: anything that `pickle` writes.
    """
    if jax.process_count() == 1:
        return [value]
    data = pickle.dumps(value)
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(data)))))
    padded = np.zeros(MIN_BYTES << max(0, (longest - 1) // MIN_BYTES).bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [pickle.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]


@functools.cache
def _whole(everywhere: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=everywhere)
