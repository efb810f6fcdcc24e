"""The headers of GGUF files: the metadata of a model and the places of its tensors, in one file or in several."""

import dataclasses
import math
import mmap
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from jlade.conversion.gguf_architectures import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from jlade.conversion.gguf_weights import GGUFTensor
from jlade.conversion.json_files import Values
from jlade.conversion.parts import TensorPart
from jlade.conversion.weight_files import stamp_of

# More than those of any file; each becomes an object of more than a hundred bytes.
MAX_ENTRIES, MAX_ELEMENTS = 2**14, 2**21  # keys, and tensors; elements of all arrays
MAX_AXES = 4
MAGIC, SUFFIX, VERSIONS = b"GGUF", ".gguf", (2, 3)
ALIGNMENT = 32  # of tensors, where the key for it is missing
STRING, ARRAY = 8, 9  # numbers of types
CODES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # of `struct`, by the numbers of types
SIZES = {code: struct.calcsize(f"={code}") for code in CODES.values()}
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})((?:\.gguf)?)", re.IGNORECASE)  # the names that llama-gguf-split gives


class Header(NamedTuple):
    """The headers of a model's files.

    Attributes:
      metadata: the values.
      tensors: by their names in the files.
      factors: the tensors with divisors of rotary frequencies, by name.
    """

    metadata: Values
    tensors: dict[str, GGUFTensor]
    factors: dict[str, np.ndarray]


def is_gguf(path: pathlib.Path) -> bool:
    """Whether a path has the suffix of GGUF files, or is a file that begins as they do."""
    if path.suffix.lower() == SUFFIX or not path.is_file():  # a pipe would wait for a writer
        return path.suffix.lower() == SUFFIX
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def existing(file: pathlib.Path) -> pathlib.Path:
    """Returns the path of a GGUF file, or raises a ValueError if there is no such file."""
    if not file.is_file():
        raise ValueError(f"path must be a GGUF file, and there is no file {os.fspath(file)!r}")
    return file


def parts_of(file: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a model by the name of one of them, in order; some may be missing."""
    if match := PART.fullmatch(file.name):
        stem, _, count, suffix = match.groups()
        parts = [file.with_name(f"{stem}-{i:05}-of-{count}{suffix}") for i in range(1, int(count) + 1)]
        if file in parts:
            return parts
    return [file]


def read_header(file: pathlib.Path) -> Header:
    """Returns the headers of the model that a file holds, or a part of it; the other parts lie beside the file."""
    named = _parse(file)
    count = _number_of_parts(named)
    if count == 1:
        return named
    parts = parts_of(file)
    if len(parts) != count:
        raise ValueError(
            f"{file} is one of {count} files of a model, by its split.count. The others are found by their names, "
            f"which must end with -00001-of-{count:05}{SUFFIX} and so on"
        )
    if missing := [part for part in parts if not part.is_file()]:
        raise ValueError(f"{missing[0]} is missing: {file.name} is one of {count} files of a model, all of them needed")
    headers = [named if part == file else _parse(part) for part in parts]
    tensors: dict[str, GGUFTensor] = {}
    for i, (part, header) in enumerate(zip(parts, headers, strict=True)):
        number = header.metadata.get("split.no")
        if (number, _number_of_parts(header)) != (i, count):
            raise ValueError(
                f"{part}: split.no is {number} and split.count is {header.metadata.get('split.count')}; its name "
                f"implies {i} and {count}"
            )
        if twice := sorted(header.tensors.keys() & tensors.keys()):
            raise ValueError(f"{part} and {tensors[twice[0]].file} both have the tensor {twice[0]}")
        tensors |= header.tensors
    metadata = headers[0].metadata
    if (expected := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ValueError(f"{parts[0]}: split.tensors.count is {expected}, and its {count} files have {len(tensors)}")
    factors = {name: factor for header in headers for name, factor in header.factors.items()}
    return Header(metadata, tensors, factors)


def _number_of_parts(header: Header) -> int:
    """Returns how many files a model has, by the header of one of them."""
    return header.metadata.size("split.count", 1) if header.metadata.get("split.count") else 1


def _parse(file: pathlib.Path) -> Header:
    """Returns the header of one file."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ValueError(f'{file}: GGUF files need the package gguf: pip install "jlade[gguf]"') from error
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    try:
        content = _Content(file)
        if content.take(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := content.number("I")) not in VERSIONS:
            raise ValueError(f"its version is {version}, or its byte order is not this machine's")
        num_tensors, num_keys = content.count("tensors"), content.count("keys")
        for _ in range(num_keys):
            metadata.setdefault(content.value(STRING), _plain(content.value(content.number("I"))))
        places: dict[str, int] = {}
        for _ in range(num_tensors):
            name, num_axes = content.value(STRING), content.number("I")
            if name in places or num_axes > MAX_AXES:
                raise ValueError(f"it has the tensor {name} twice, or with more than {MAX_AXES} axes")
            shape = tuple(reversed([content.number("Q") for _ in range(num_axes)]))
            kind, places[name] = GGMLQuantizationType(content.number("I")), content.number("Q")
            block, size = GGML_QUANT_SIZES[kind]
            if shape and shape[-1] % block:
                raise ValueError(f"{name} has rows of {shape[-1]}, and {kind.name} has blocks of {block}")
            num_bytes = math.prod(shape) // block * size
            tensors[name] = GGUFTensor(file, content.stamp, 0, shape, kind.name, num_bytes, name)
        alignment = Values(file, metadata).size("general.alignment", ALIGNMENT)
        begin = -(-content.place // alignment) * alignment
        for name, tensor in tensors.items():
            tensors[name] = dataclasses.replace(tensor, offset=begin + places[name])
            content.check(tensors[name].offset + tensor.num_bytes)
        factors = {
            name: tensors[name].read(name, np.dtype(np.float32), [TensorPart.of(None, tensors[name].shape)])[0][0]
            for name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
            if name in tensors
        }
    except Exception as error:  # of bytes that are none of the format
        raise ValueError(f"{file} is truncated or not a GGUF file: {error}") from error
    return Header(Values(file, metadata), tensors, factors)


class _Content:
    """The bytes of a file, from which values are taken one after the other, and none beyond the end.

    Attributes:
      stamp: changes with the file.
      place: of the next value.
    """

    def __init__(self, file: pathlib.Path):
        self.stamp, self.place, self._num_elements = stamp_of(file), 0, 0
        with file.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def check(self, end: int) -> None:
        """Raises a ValueError if the file ends before."""
        if end > len(self._bytes):
            raise ValueError(f"it has {len(self._bytes)} bytes, and its header names {end}")

    def take(self, size: int) -> bytes:
        """Returns the next bytes."""
        begin, self.place = self.place, self.place + size
        self.check(self.place)
        return self._bytes[begin : self.place]

    def number(self, code: str) -> Any:
        """Returns the next number, given its type as `struct` names it."""
        return struct.unpack(f"={code}", self.take(SIZES[code]))[0]

    def count(self, name: str) -> int:
        """Returns the number of keys or tensors."""
        if (count := self.number("Q")) > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES} {name}")
        return int(count)

    def value(self, kind: int) -> Any:
        """Returns the next value, given the number of its type."""
        if kind == STRING:
            return self.take(self.number("Q")).decode()
        if kind != ARRAY:
            return self.number(CODES[kind])
        kind, length = self.number("I"), self.number("Q")
        self._num_elements += length
        if self._num_elements > MAX_ELEMENTS:
            raise ValueError(f"its arrays have more than {MAX_ELEMENTS} elements")
        if kind == STRING:
            return self._strings(length)
        return list(struct.unpack(f"={length}{CODES[kind]}", self.take(length * SIZES[CODES[kind]])))

    def _strings(self, length: int) -> list[str]:
        """Returns the next strings, without calls for each of them: a vocabulary has a hundred thousand."""
        content, end, size_of, strings = self._bytes, self.place, struct.Struct("=Q").unpack_from, list[str]()
        for _ in range(length):
            begin = end + SIZES["Q"]
            self.check(begin)
            end = begin + size_of(content, end)[0]
            strings.append(content[begin:end].decode())
        self.place = end
        self.check(end)
        return strings


def _plain(value: Any) -> Any:
    """Returns the shortest number that a float32 stands for, and any other value as it is."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
