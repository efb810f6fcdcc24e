"""Facts about a compiled program: its memory, and of its loops copies, kernels, host loops and the time of a round.

On the text of any device's program, which `jlade.inspection.targets` compiles without the device.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jlade.costs.estimate import Rates, Time, time
from jlade.inspection.hlo import Instruction, Module
from jlade.inspection.launches import PRODUCTS, STARTS, VIEWS, Launch, launches

# A fusion of these alone computes nothing: it copies.
MOVES = frozenset(
    [
        *("parameter", "bitcast", "constant", "tuple", "get-tuple-element", "copy", "copy-start", "transpose"),
        *("reshape", "convert", "broadcast", "concatenate", "pad", "reverse", "slice", "dynamic-slice"),
    ]
)
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


class Needs(NamedTuple):
    """Bytes that a compiled program needs. Outputs in an argument's memory are not counted."""

    arguments: int
    outputs: int
    temporary: int

    @classmethod
    def of(cls, program: Any) -> "Needs":
        """Returns those of a `jax.stages.Compiled`."""
        stats = program.memory_analysis()
        outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return cls(stats.argument_size_in_bytes, outputs, stats.temp_size_in_bytes)


class Sizes(NamedTuple):
    """Elements of the arrays that no step may copy. Of weights multiples count too, as compilers join them."""

    weights: frozenset[int]  # of each matrix
    cache_layers: frozenset[int] = frozenset()  # of the keys of each layer
    tables: frozenset[int] = frozenset()  # of the sources of drafts, all of int32
    experts_read: Mapping[int, float] = {}  # see `jlade.inspection.hlo.Module`


class Loop(NamedTuple):
    """A round of a loop: a step of decoding, or a chunk of a prompt.

    Attributes:
      kernels: instructions that run on their own: kernels of a GPU, operations of a TPU.
      host_loops: loops and conditionals whose condition the host reads in every round; 0 on TPUs and CPUs.
      exchanges: bytes that each collective takes from a device.
      copies: instructions that only move or convert an array of the size of a weight, a cache layer or a table.
      copies_at_entry: arrays of these sizes that the loop holds in another layout than the program's arguments: they
        are copied before the first round, and take their memory twice.
      vector_products: products with a weight matrix on a TPU's vector unit, which is many times slower than its matrix
        unit.
      time: estimated.
    """

    kernels: int
    host_loops: int
    exchanges: tuple[int, ...]
    copies: tuple[str, ...]
    copies_at_entry: tuple[str, ...]
    vector_products: tuple[str, ...]
    time: Time


def loops(program: str, platform: str, sizes: Sizes, rates: Rates, trips: int) -> list[Loop]:
    """Returns the outermost loops of a program, in order.

    Args:
      program: the text of the compiled program.
      platform: "cpu", "gpu" or "tpu".
      sizes: of the arrays to look for.
      rates: of the device.
      trips: rounds of the loops inside, where the program does not say it: attention's chunks of the cache.
    """
    module, found = Module(program, sizes.experts_read), []
    for loop in module.loops(module.entry):
        body = module.body(loop)
        launched = list(launches(module, body, trips))
        slow = [launch for launch in launched if platform == "tpu" and _is_vector_product(launch, sizes)]
        round_of_loop = Loop(
            kernels=sum(launch.times for launch in launched),
            host_loops=_branches(module, body) if platform == "gpu" else 0,
            exchanges=tuple(num_bytes for launch in launched for num_bytes in _exchanged(launch)),
            copies=tuple(_name(launch) for launch in launched if _is_copy(launch, sizes)),
            copies_at_entry=tuple(_copied_at_entry(module, loop, sizes)),
            vector_products=tuple(map(_name, slow)),
            time=time(rates, (launch.work for launch in launched)),
        )
        found.append(round_of_loop)
    return found


def _copied_at_entry(module: Module, loop: Instruction, sizes: Sizes) -> Iterator[str]:
    """Yields the arrays that a loop carries in a layout that no argument of the program with their shape has."""
    arguments = [i.shapes[0] for i in module.computations[module.entry].values() if i.opcode == "parameter"]
    orders = collections.defaultdict(set)
    for argument in arguments:
        orders[argument.dtype, argument.dimensions].add(argument.order)
    for array in loop.shapes:
        known = orders[array.dtype, array.dimensions]
        if array.size in sizes.weights | sizes.cache_layers and known and array.order not in known:
            yield f"{array.dtype}[{','.join(map(str, array.dimensions))}]{array.order}"


def _exchanged(launch: Launch) -> list[int]:
    """Returns the bytes that a collective takes, once for each time that it runs; nothing for other instructions."""
    if not launch.instruction.opcode.startswith(COLLECTIVES):
        return []
    return [sum(operand.num_bytes for operand in launch.operands)] * launch.times


def _branches(module: Module, computation: str) -> int:
    """Returns the number of loops and conditionals in a computation, inner ones included."""
    count = 0
    for instruction in module.computations[computation].values():
        if instruction.opcode in ("while", "conditional", "call"):
            count += instruction.opcode != "call"
            count += sum(_branches(module, called) for called in instruction.called)
    return count


def _is_copy(launch: Launch, sizes: Sizes) -> bool:
    """Whether an instruction only moves, or converts, an array whose size is a multiple of one of `sizes`.

    The array is one that the loop carries: others, such as the tokens of a layer's experts, may have such a size too.
    Logits have multiples of the size of a table, but are no integers. Parts of a text may fill an array of that size.
    """
    if not launch.operands or not launch.opcodes <= MOVES:
        return False
    operand, result = launch.operands[0], launch.result
    if operand.is_on_chip != result.is_on_chip and operand.order == result.order:
        return False  # a TPU fetches what it reads next into on-chip memory, or writes it back
    arrays = launch.operands if "pad" in launch.opcodes else [result]  # padding changes the size
    read = {operand.size for operand in launch.operands}
    if any(array.size in sizes.tables & read and array.dtype == "s32" for array in arrays):
        return True
    array_sizes = {array.size for array in arrays} - {0}
    if array_sizes.isdisjoint(sizes.cache_layers) and not any(
        n % size == 0 for n in array_sizes for size in sizes.weights - {0}
    ):
        return False
    return any(_is_carried(launch, name) for name in launch.instruction.operands)


def _is_carried(launch: Launch, name: str) -> bool:
    """Whether a value is an array that the loop carries, or one that was updated, moved or converted.

    A product is neither, though it may have the size of an operand.
    """
    computation, left, seen = launch.module.computations[launch.computation], [name], set()
    while left:
        value = computation[left.pop()]
        if value.opcode in ("parameter", "while", "conditional", "call"):
            return True
        seen.add(value.name)
        if _is_product(launch.module, value):
            continue
        moves = value.opcode in VIEWS or value.opcode in STARTS
        same = (each for each in value.operands if moves or computation[each].size == value.size)
        left += [each for each in same if each not in seen]
    return False


def _is_product(module: Module, value: Instruction) -> bool:
    """Whether an instruction, or the last one of a fusion, is a product."""
    while value.opcode == "fusion":
        inner = module.computations[value.called[0]]
        value = next(each for each in inner.values() if each.is_root)
        while value.opcode in (*VIEWS, "reshape", "transpose", "convert") and value.operands:
            value = inner[value.operands[0]]
    return value.opcode in PRODUCTS


def _is_vector_product(launch: Launch, sizes: Sizes) -> bool:
    opcodes = launch.opcodes
    return (
        {"multiply", "reduce"} <= opcodes
        and opcodes.isdisjoint(PRODUCTS)
        and not sizes.weights.isdisjoint(launch.elements_read)
    )


def _name(launch: Launch) -> str:
    """Returns a description of an instruction for people."""
    shape = launch.result
    return f"{launch.instruction.name}: {shape.dtype}[{','.join(map(str, shape.dimensions))}]"
