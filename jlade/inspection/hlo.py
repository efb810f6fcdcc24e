"""The text of a compiled program: its computations and their instructions.

XLA prints the same language for every device (https://openxla.org/xla/operation_semantics).
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple


class ArrayShape(NamedTuple):
    """An array of the program."""

    dtype: str
    dimensions: tuple[int, ...]
    layout: str  # order of the dimensions in memory, tiles, and S(n) for a memory other than the device's main one

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, without the padding of tiles."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or "0")[0])
        return self.size * bits // 8

    @property
    def is_on_chip(self) -> bool:
        """Whether it is in the chip's own memory, which is not the device's main memory."""
        return "S(" in self.layout

    @property
    def order(self) -> str:
        """The layout without the memory's name."""
        return re.sub(r"S\(\d+\)", "", self.layout)


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]  # of the result; several for a tuple
    operands: tuple[str, ...]
    called: tuple[str, ...]  # computations: a fusion's, a loop's body and condition, ...
    attributes: str
    is_root: bool

    @property
    def size(self) -> int:
        """Number of elements of the result."""
        return sum(shape.size for shape in self.shapes)

    @property
    def estimated_cycles(self) -> int:
        """The TPU compiler's estimate, 0 where there is none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match else 0


Computation = dict[str, Instruction]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$\n((?:.*\n)*?)^\}", flags=re.MULTILINE)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|branch_computations|called_computations|true_computation|false_computation)="
    r"\{?((?:%[\w.\-]+(?:, )?)+)"
)
_NAME = re.compile(r"%([\w.\-]+)")


class Module:
    """A compiled program.

    Attributes:
      computations: instructions by name, of each computation by name.
      entry: the name of the computation that the program begins with.
      experts_read: as given.
    """

    def __init__(self, text: str, experts_read: Mapping[int, float] | None = None) -> None:
        """Parses the result of `jax.stages.Compiled.as_text`.

        Args:
          text: of the program.
          experts_read: the share of an array of experts [N, in, out] that a kernel or a loop is expected to read, by
            the array's number of elements.

        Raises:
          ValueError: the text has no entry computation.
        """
        self.computations: dict[str, Computation] = {}
        self.experts_read = experts_read or {}
        self.entry = ""
        for is_entry, name, body in _COMPUTATION.findall(text):
            instructions = (_instruction(line) for line in body.splitlines() if " = " in line)
            self.computations[name] = {instruction.name: instruction for instruction in instructions}
            if is_entry:
                self.entry = name
        if not self.entry:
            raise ValueError("the text is not that of a compiled program: it has no ENTRY")

    def loops(self, computation: str) -> list[Instruction]:
        """Returns the loops of a computation, those inside conditionals and calls included, outermost alone."""
        loops = []
        for instruction in self.computations[computation].values():
            if instruction.opcode == "while":
                loops.append(instruction)
            elif instruction.opcode in ("conditional", "call"):
                loops += [loop for called in instruction.called for loop in self.loops(called)]
        return loops

    def body(self, loop: Instruction) -> str:
        """Returns the name of a loop's body."""
        return self._part(loop, "body")

    def condition(self, loop: Instruction) -> str:
        """Returns the name of a loop's condition."""
        return self._part(loop, "condition")

    def _part(self, loop: Instruction, name: str) -> str:
        match = re.search(rf"\b{name}=%([\w.\-]+)", loop.attributes)
        assert match is not None, loop
        return match[1]

    def shape(self, computation: str, name: str) -> ArrayShape:
        """Returns the shape of a value, the first one of a tuple."""
        shapes = self.computations[computation][name].shapes
        return shapes[0] if shapes else ArrayShape("token0", (), "")


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    end = _matching(right) if right.startswith("(") else right.index(" ")
    shapes = tuple(
        ArrayShape(dtype, tuple(int(n) for n in dimensions.split(",") if n), layout)
        for dtype, dimensions, layout in _SHAPE.findall(re.sub(r"/\*.*?\*/", "", right[:end]))
    )
    rest = right[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    rest = rest[len(opcode) :]
    operands = rest[: _matching(rest)]
    attributes = rest[len(operands) :]
    return Instruction(
        name=left.removeprefix("ROOT ").removeprefix("%"),
        opcode=opcode,
        shapes=shapes,
        operands=tuple(_NAME.findall(operands)),
        called=tuple(name for group in _CALLED.findall(attributes) for name in _NAME.findall(group)),
        attributes=operands + attributes if opcode in ("parameter", "constant") else attributes,
        is_root=left.startswith("ROOT "),
    )


def _matching(text: str) -> int:
    """Returns the index after the parenthesis that closes the one at the beginning of `text`."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    return len(text)
