"""The instructions of a compiled program that run on their own, and their work: arithmetic and memory traffic."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jlade.costs.estimate import Operation
from jlade.inspection.hlo import ArrayShape, Computation, Instruction, Module

# Opcodes that move no data and launch nothing.
VIEWS = frozenset(
    [
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id"),
        *("copy-done", "slice-done", "async-done", "async-update", "all-reduce-done", "all-gather-done"),
        "collective-permute-done",
    ]
)
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # index of the operand with the new elements
STARTS = {"copy-start": 0, "slice-start": 1}  # of asynchronous copies, with the result's index in their tuple
PRODUCTS = ("dot", "convolution")  # compilers for TPUs write products as convolutions


class Launch(NamedTuple):
    """An instruction that runs as a kernel.

    Attributes:
      times: how often it runs each time that the outermost computation runs.
    """

    module: Module
    computation: str
    instruction: Instruction
    times: int

    @property
    def work(self) -> Operation:
        """Its arithmetic and memory traffic."""
        cycles, is_asynchronous = self.instruction.estimated_cycles, self.instruction.opcode in STARTS
        return Operation(self.flops, self.traffic, 1, cycles, self.times, is_asynchronous)

    @property
    def operands(self) -> list[ArrayShape]:
        return [self.module.shape(self.computation, name) for name in self.instruction.operands]

    @property
    def inner(self) -> list["Launch"]:
        """The instructions of a fusion, those of fusions inside it included; otherwise the instruction itself."""
        if self.instruction.opcode != "fusion":
            return [self]
        called = [(name, i) for name in self.instruction.called for i in self.module.computations[name].values()]
        return [launch for name, i in called for launch in self._replace(computation=name, instruction=i).inner]

    @property
    def opcodes(self) -> set[str]:
        """The opcodes of all that it computes."""
        return {launch.instruction.opcode for launch in self.inner}

    @property
    def flops(self) -> int:
        """Multiplications and additions of its matrix products, for a kernel of `jlade.models.products` too."""
        if self.instruction.opcode == "custom-call":
            pairs = itertools.pairwise(self.operands)  # tokens and codes are side by side
            return sum(2 * x.size * packed.dimensions[-1] for x, packed in pairs if packed.dtype == "u8")
        products = [launch for launch in self.inner if launch.instruction.opcode in PRODUCTS]
        return sum(2 * each.instruction.size * _contracted(each.instruction, each.operands) for each in products)

    @property
    def traffic(self) -> int:
        """The bytes of main memory that it reads and writes.

        A slice reads its result, an update in place writes the updated part, and on-chip memory counts for nothing.
        Caches are not considered.
        """
        instruction, operands = self.instruction, self.operands
        if instruction.opcode in STARTS:
            return self.result.num_bytes * ((not operands[0].is_on_chip) + (not self.result.is_on_chip))
        if instruction.opcode in UPDATES:
            return 2 * operands[UPDATES[instruction.opcode]].num_bytes
        read = [n * x.num_bytes // max(1, x.size) for n, x in zip(self.elements_read, operands, strict=True)]
        arrays = zip((*self._written(), *read), (*instruction.shapes, *operands), strict=True)
        return sum(number for number, x in arrays if not x.is_on_chip)

    @property
    def elements_read(self) -> list[int]:
        """The elements that it reads of each operand, in whatever memory; of experts, those that a kernel needs."""
        instruction, sizes = self.instruction, [operand.size for operand in self.operands]
        if instruction.opcode == "custom-call":
            return [round(size * self.module.experts_read.get(size, 1)) for size in sizes]
        if instruction.opcode in SLICES:
            return [instruction.size, *sizes[1:]]
        if instruction.opcode != "fusion":
            return sizes
        body = self.module.computations[instruction.called[0]]
        read = [sum(_elements_read(body, name)) for name in _parameters(body)]
        return [min(pair) for pair in zip(sizes, read, strict=True)]

    @property
    def result(self) -> ArrayShape:
        """The result, the last of several."""
        return self.instruction.shapes[STARTS.get(self.instruction.opcode, -1)]

    def _written(self) -> list[int]:
        """Returns the bytes that it writes of each result."""
        shapes = self.instruction.shapes
        if self.instruction.opcode == "fusion":
            body = self.module.computations[self.instruction.called[0]]
            root = next(i for i in body.values() if i.is_root)
            results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
            if len(results) == len(shapes):  # otherwise the root has several results
                return [_bytes_written(body, result) for result in results]
        return [shape.num_bytes for shape in shapes]


def launches(module: Module, computation: str, trips: int = 1, times: int = 1) -> Iterator[Launch]:
    """Yields the instructions of a computation that run as kernels, given how often it runs.

    The body of an inner loop runs `trips` times where the program does not say it.
    """
    for instruction in module.computations[computation].values():
        if instruction.opcode == "while":
            count = _trips(module, instruction) or _experts(module, instruction) or trips
            yield from launches(module, module.body(instruction), trips, times * count)
        elif instruction.opcode in ("conditional", "call"):
            for called in instruction.called:
                yield from launches(module, called, trips, times)
        elif instruction.opcode not in VIEWS:
            yield Launch(module, computation, instruction, times)


def _trips(module: Module, loop: Instruction) -> int | None:
    """Returns how often a loop's body runs, None where it depends on values: counting loops begin at 0."""
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(match[1])
    condition = module.computations[module.condition(loop)]
    end = next(i for i in condition.values() if i.is_root)
    if end.opcode != "compare" or "direction=LT" not in end.attributes:
        return None
    bounds = (condition[name] for name in end.operands if condition[name].opcode == "constant")
    return next((int(match[1]) for i in bounds if (match := re.match(r"\((\d+)\)", i.attributes))), None)


def _experts(module: Module, loop: Instruction) -> int:
    """Returns how many experts a loop over them is expected to read, 0 for other loops."""
    arrays = (shape for shape in loop.shapes if shape.size in module.experts_read)
    return next((math.ceil(shape.dimensions[0] * module.experts_read[shape.size]) for shape in arrays), 0)


def _parameters(body: Computation) -> list[str]:
    """Returns the names of a computation's parameters in their order."""
    parameters = [(re.findall(r"\d+", i.attributes), i.name) for i in body.values() if i.opcode == "parameter"]
    return [name for _, name in sorted((int(numbers[0]), name) for numbers, name in parameters)]


def _elements_read(body: Computation, name: str) -> Iterator[int]:
    """Yields the elements that each use of a value reads."""
    for user in (i for i in body.values() if name in i.operands):
        if user.opcode in ("bitcast", "get-tuple-element"):
            yield from _elements_read(body, user.name)
        elif user.opcode in SLICES and user.operands[0] == name:
            yield user.size
        elif user.opcode not in UPDATES or user.operands[0] != name:  # an update changes its operand in place
            yield body[name].size


def _bytes_written(body: Computation, result: Instruction) -> int:
    while result.opcode == "bitcast":
        result = body[result.operands[0]]
    if result.opcode in UPDATES:
        return body[result.operands[UPDATES[result.opcode]]].shapes[0].num_bytes
    return sum(shape.num_bytes for shape in result.shapes)


def _contracted(product: Instruction, operands: list[ArrayShape]) -> int:
    """Returns the number of terms in each sum of a product."""
    if match := re.search(r"lhs_contracting_dims=\{([\d,]+)\}", product.attributes):
        return math.prod(operands[0].dimensions[int(axis)] for axis in match[1].split(","))
    # A convolution. Its windows number the matrices of a batch, each with its own right operand.
    labels = re.search(r"dim_labels=\w+_(\w+)->", product.attributes)
    return operands[1].dimensions[labels[1].index("i")] if labels else 1
