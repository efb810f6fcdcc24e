"""The headers of GGUF files: the metadata of a model and the places of its tensors, in one file or in several."""

import os
import pathlib
import re
import sys
from typing import Any, NamedTuple

import numpy as np

from jlade.conversion.gguf_config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from jlade.conversion.gguf_weights import GGUFTensor
from jlade.conversion.json_files import Values
from jlade.conversion.weight_files import stamp_of

# More than those of any file; each becomes an object of more than a hundred bytes.
MAX_ENTRIES, MAX_ELEMENTS = 2**14, 2**21  # keys, and tensors; elements of all arrays
MAGIC, SUFFIX = b"GGUF", ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})((?:\.gguf)?)", re.IGNORECASE)  # the names that llama-gguf-split gives


class Header(NamedTuple):
    """The headers of a model's files.

    Attributes:
      metadata: the values, in NumPy or plain Python.
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
        import gguf
    except ImportError as error:
        raise ValueError(f'{file}: GGUF files need the package gguf: pip install "jlade[gguf]"') from error

    class Reader(gguf.GGUFReader):
        """Refuses to read beyond the end of the file. Views of a plain array take a third of a memmap's time."""

        num_elements = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
            content = np.asarray(self.data)
            end = offset + np.dtype(dtype).itemsize * int(count)
            if end > content.size:
                raise ValueError(f"it has {content.size} bytes, and its header names {end}")
            array = content[offset:end].view(dtype)
            return array.view(array.dtype.newbyteorder(override_order or self.byte_order))

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            # The library makes several views for each element, which takes 40 times the time.
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            self.num_elements += int(length[0])
            if self.num_elements > MAX_ELEMENTS:
                raise ValueError(f"its arrays have more than {MAX_ELEMENTS} elements")
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind[0])]
            if types[1] == gguf.GGUFValueType.STRING:
                end, strings = orig_offs + 12, []
                content = np.asarray(self.data)
                for _ in range(length[0]):
                    begin = end + 8
                    end = begin + int.from_bytes(content[end:begin].data, sys.byteorder)
                    if end > content.size:
                        raise ValueError(f"it has {content.size} bytes, and its header names {end}")
                    strings.append(content[begin:end])
                return end - orig_offs, [kind, length, *strings], list(range(2, 2 + len(strings))), types
            if types[1] not in self.gguf_scalar_to_np:
                raise ValueError(f"it has an array of {types[1].name}")
            values = self._get(orig_offs + 12, self.gguf_scalar_to_np[types[1]], length[0])
            return 12 + values.nbytes, [kind, length, values], [2], types

        def _build_fields(self, offs: int, count: int) -> int:
            return super()._build_fields(offs, at_most(count, "keys"))

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            return super()._build_tensor_info(offs, at_most(count, "tensors"))

    def at_most(count: int, name: str) -> int:
        if count > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES} {name}")
        return count

    try:
        reader = Reader(file)
        if reader.byte_order != "I":
            raise ValueError("its byte order is not this machine's")
        metadata = {name: _plain(field.contents()) for name, field in reader.fields.items()}
        tensors = {
            tensor.name: GGUFTensor(
                file=file,
                stamp=stamp_of(file),
                offset=tensor.data_offset,
                shape=tuple(map(int, reversed(tensor.shape))),
                dtype=tensor.tensor_type.name,
                num_bytes=tensor.n_bytes,
                name=tensor.name,
            )
            for tensor in reader.tensors
        }
        names = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
        factors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors if tensor.name in names}
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file} is truncated or not a GGUF file: {error}") from error
    return Header(Values(file, metadata), tensors, factors)


def _plain(value: Any) -> Any:
    """Returns the shortest number that a float32 stands for, and any other value as it is."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
