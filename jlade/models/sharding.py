"""The parts of a LLaMA model on the devices of a mesh: tensor parallelism over heads, MLPs and vocabulary.

The columns of an MLP are divided, and experts are whole, each on one device.

Each layer needs two sums over the devices of `MODEL`, after attention and after the MLP (arXiv 1909.08053, section 3).
"""

from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jlade import mesh as mesh_lib
from jlade.mesh import MODEL, Specs
from jlade.models import layers
from jlade.models.grouped import is_grouped
from jlade.models.layers import Layer
from jlade.models.llama import LlamaConfig, LlamaParams
from jlade.models.quantization import Int8Matrix, is_int8


def mesh_for(config: LlamaConfig, mesh: Mesh) -> Mesh:
    """Returns the mesh with the axes of `MODEL` for the heads of a model.

    Raises:
      TypeError, ValueError: it is no mesh, or the model cannot be divided among its devices; the message names sizes
        that work.
    """
    shards = mesh_lib.size(mesh_lib.split(mesh, None), *MODEL)
    if not can_divide(config, shards):
        accepted = [n for n in range(1, config.num_heads + 1) if can_divide(config, n)]
        kv_heads = " or ".join(map(str, dict.fromkeys(heads.number for heads in config.heads_by_layer)))
        others = " and ".join(f"{number} {name}" for number, name in _divided(config))
        raise ValueError(
            f"mesh has model={shards}, but the model has {config.num_heads} heads, {kv_heads} KV heads and {others}, "
            f"which divide among {', '.join(map(str, accepted))} devices: choose one of these, and use the other "
            "devices for data or lookahead"
        )
    return mesh_lib.split(mesh, config.num_kv_heads)


def can_divide(config: LlamaConfig, shards: int) -> bool:
    """Whether heads, MLP columns and experts divide among the shards, and each has heads of whole groups or of one.

    Where layers have different KV heads, those of each must divide: no mesh has different copies of them.
    """
    numbers = {heads.number for heads in config.heads_by_layer}
    groups = all(number % shards == 0 or (len(numbers) == 1 and shards % number == 0) for number in numbers)
    others = [config.num_heads, *config.query_heads, *(number for number, _ in _divided(config))]
    return groups and not any(number % shards for number in others)


def _divided(config: LlamaConfig) -> list[tuple[int, str]]:
    """Returns the numbers that devices divide, besides those of heads of attention, and what they count."""
    numbers = [
        (config.dense_size, "MLP columns"),
        (config.intermediate_size, "MLP columns"),
        (config.num_experts, "experts"),
    ]
    if config.recurrence is not None:
        is_remembered = config.recurrence.has_memory
        numbers.append(
            (config.recurrence.key_heads, "recurrent heads" if is_remembered else "channels of convolutions")
        )
    return [(number, name) for number, name in numbers if number]


def specs(params: LlamaParams, mesh: Mesh | None) -> LlamaParams:
    """Returns the `PartitionSpec` of each array, for arrays or their shapes and a result of `mesh_for` or None.

    A vocabulary that does not divide among the devices is whole on each of them.
    """
    divides = params.config.vocab_size % mesh_lib.size(mesh, *MODEL) == 0
    vocabulary = P(MODEL) if divides else P()

    def layer_specs(number: int, layer: Layer) -> Layer:
        return layers.changed(
            params.config, number, layer, lambda _, array, value: matrix_spec(value, array.spec, mesh)
        )

    of_layers: Any = params.per_layer
    if of_layers is not None:
        is_divided = params.config.per_layer_vocab_size % mesh_lib.size(mesh, *MODEL) == 0
        of_layers = of_layers.replace(embedding=P(MODEL) if is_divided else P(), projection=P(), norm=P())
    tree: Any = LlamaParams
    specs: LlamaParams = tree(
        embedding=matrix_spec(params.embedding, vocabulary, mesh),
        layers=tuple(layer_specs(i, layer) for i, layer in enumerate(params.layers)),
        norm=P(),
        output=None if params.output is None else matrix_spec(params.output, vocabulary, mesh),
        config=params.config,
        norm_bias=None if params.norm_bias is None else P(),
        output_bias=None if params.output_bias is None else vocabulary,
        per_layer=of_layers,
        positions=None if params.positions is None else P(),
    )
    return specs


def matrix_spec(leaf: Any, spec: P, mesh: Mesh | None) -> Specs:
    """Returns the specs of the arrays of a matrix, given that of the matrix in floating point.

    Raises:
      ValueError: its groups do not divide among the devices.
    """
    if is_int8(leaf):
        matrix: Any = Int8Matrix
        return matrix(weight=spec, scale=P(*spec[:1]))
    if not is_grouped(leaf):
        return spec
    shards, groups = shards_of_inputs(leaf, spec, mesh), leaf.scale.shape[-2]
    if groups % shards:
        raise ValueError(
            f"mesh divides {leaf.shape[-2]} inputs of a matrix among {shards} devices, and not its {groups} groups of "
            f"{leaf.group}: load the model in floating point with bits=4 and this mesh, or use fewer devices"
        )
    if len(leaf.shape) == 2:  # [in, out]
        spec = P(*reversed((*spec, None, None)[:2]))
    arrays: Any = leaf.mapped(lambda _: spec)
    return arrays.replace(levels=None if leaf.levels is None else P())


def shards_of_inputs(matrix: Any, spec: P, mesh: Mesh | None) -> int:
    """Returns the number of devices that divide the inputs of a matrix [out, in]; experts are whole."""
    entry = (*spec, None, None)[1] if len(matrix.shape) == 2 else None
    return mesh_lib.size(mesh, *((entry,) if isinstance(entry, str) else entry or ()))


def put(params: LlamaParams, mesh: Mesh) -> LlamaParams:
    """Returns the parameters on a mesh, a result of `mesh_for`. Those that are there already are not copied."""
    placed: LlamaParams = mesh_lib.put(params, mesh, specs(params, mesh))
    return placed
