"""The safetensors files of checkpoints: headers and tensors, read and written without torch."""

import abc
import dataclasses
import errno
import io
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jlade.conversion.json_files import (
    MAX_BYTES,
    check_size,
    is_file_name,
    read_json,
    refuse_or_warn,
    shown,
    write_json,
)
from jlade.conversion.parts import Shape, TensorPart, runs
from jlade.conversion.tensors import first_few

SINGLE_FILE = "model.safetensors"
INDEX_FILE = f"{SINGLE_FILE}.index.json"
MAX_FILE_BYTES = 5 * 10**9
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by their name in safetensors
# Of quantized tensors too, in integers or FP8.
DTYPES = FLOATS | {"U8": "uint8", "F8_E4M3": "float8_e4m3fn", "I8": "int8", "I32": "int32", "I64": "int64"}
DTYPES |= {"F8_E8M0": "float8_e8m0fnu"}
EXPONENTS = "F8_E8M0", "U8"  # of scales that are powers of two, as numbers or as their bytes
CHUNK = 2**20  # elements converted at once; they fit the processor's cache


class Tensor(Protocol):
    """A tensor in files of any format; see `StoredTensor`. `stamps` are those of all its files."""

    @property
    def file(self) -> pathlib.Path: ...
    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> str: ...
    @property
    def value_dtype(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]: ...


class ComposedTensor(abc.ABC):
    """A `Tensor` made of others in files, of which the first tells what all have in common."""

    shape: Shape

    @property
    @abc.abstractmethod
    def sources(self) -> Sequence[Tensor]:
        """The tensors that it is made of."""

    @property
    def file(self) -> pathlib.Path:
        return self.sources[0].file

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return {file: stamp for tensor in self.sources for file, stamp in tensor.stamps.items()}

    @property
    def dtype(self) -> str:
        return self.sources[0].dtype

    @property
    def value_dtype(self) -> str:
        return self.sources[0].value_dtype

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.sources)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as described by the file's header.

    Attributes:
      stamp: changes with the file.
      offset: of the first byte.
      dtype: in safetensors' spelling.
    """

    file: pathlib.Path
    stamp: tuple[int, ...]
    offset: int
    shape: Shape
    dtype: str

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return {self.file: self.stamp}

    @property
    def value_dtype(self) -> str:
        """The dtype of the values."""
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.value_dtype).itemsize

    def divide(self, shapes: Iterable[Shape]) -> list["StoredTensor"]:
        """Returns the parts of the tensor that have these shapes, one after the other."""
        parts, offset = [], self.offset
        for shape in shapes:
            parts.append(dataclasses.replace(self, offset=offset, shape=shape))
            offset += parts[-1].num_bytes
        return parts

    def rows(self) -> list["StoredTensor"]:
        """Returns the parts of the tensor for each index of its first dimension."""
        return self.divide([self.shape[1:]] * self.shape[0])

    def read_bytes(self, name: str) -> np.ndarray:
        """Returns the whole tensor in its own dtype."""
        array = aligned(self.shape, np.dtype(self.value_dtype))
        try:
            with open(self.file, "rb", buffering=0) as stream:
                if not _fill(stream, self.offset, array):
                    raise ValueError(f"{self.file} changed while it was read: {name} is cut short")
        except OSError as error:
            raise ValueError(f"{self.file}: {name} cannot be read: {error}") from error
        return array

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        """Returns distinct parts of the tensor as `dtype`, and its rows in which they have NaN or infinite elements.

        Only the bytes of the parts are read, each once. The elements are converted in chunks into the memory that the
        parameters keep: no second large buffer is needed.
        """
        arrays = {part: aligned((len(part.rows), len(part.columns)), dtype) for part in parts}
        broken: set[int] = set()
        try:
            with open(self.file, "rb", buffering=0) as stream:  # a buffer would read more than a narrow row
                for run in runs(parts):
                    broken |= self._read_run(stream, name, {part: arrays[part] for part in run})
        except OSError as error:
            raise ValueError(f"{self.file}: {name} cannot be read: {error}") from error
        return [array if len(self.shape) == 2 else array[:, 0] for array in arrays.values()], broken

    def _read_run(self, stream: io.FileIO, name: str, arrays: Mapping[TensorPart, np.ndarray]) -> set[int]:
        """Fills the arrays of parts with equal rows and adjacent columns; returns the broken rows of the tensor."""
        parts, stored = list(arrays), np.dtype(self.value_dtype)
        rows, first, end = parts[0].rows, parts[0].columns.start, parts[-1].columns.stop
        width, height = math.prod(self.shape[1:]), max(1, CHUNK // (end - first))
        in_place = len(parts) == 1 and arrays[parts[0]].dtype == stored
        buffer = np.empty((0 if in_place else min(height, len(rows)), end - first), stored)
        broken: set[int] = set()
        for begin in range(0, len(rows), height):
            chunks = [array[begin : begin + height] for array in arrays.values()]
            read = chunks[0] if in_place else buffer[: len(chunks[0])]
            pieces = [read] if end - first == width else read  # whole rows are contiguous in the file
            for i, piece in enumerate(pieces):
                offset = (rows.start + begin + i) * width + first
                if not _fill(stream, self.offset + offset * stored.itemsize, piece):
                    raise ValueError(f"{self.file} changed while it was read: {name} is cut short")
            for part, chunk in zip(parts, chunks, strict=True):
                source = read[:, part.columns.start - first : part.columns.stop - first]
                if not in_place:
                    with np.errstate(over="ignore"):  # the broken rows tell of it
                        chunk[:] = source
                broken |= broken_rows(source, chunk, rows.start + begin)
        return broken


@dataclasses.dataclass(frozen=True)
class ConstantTensor(StoredTensor):
    """A tensor that files leave out, as all its elements are `value`. `file` is for messages."""

    value: float

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return {}

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        arrays = [aligned((len(part.rows), len(part.columns))[: len(self.shape)], dtype) for part in parts]
        for array in arrays:
            array.fill(self.value)
        return arrays, set()


def stored_tensors(directory: pathlib.Path, strict: bool = False, single: str = SINGLE_FILE) -> dict[str, StoredTensor]:
    """Returns the tensors of the weight files by name, of the file `single` or of those in its index.

    Only headers are read.

    Raises:
      ValueError: names the file that is missing or broken, or the tensor that is stored twice; there are two
        checkpoints, or with `strict` an index of files that are not there.

    Warns:
      UserWarning: names the index of files that are not there.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(directory / single, strict):
        if not file.exists():
            raise ValueError(f"{file} is missing, though {single}.index.json names it")
        in_file = read_header(file)
        if twice := sorted(in_file.keys() & tensors.keys()):
            raise ValueError(f"{file} and {tensors[twice[0]].file} both have the tensor {twice[0]}")
        tensors |= in_file
    return tensors


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name."""
    check_size(file)
    try:
        stamp = stamp_of(file)
        with safe_open(file, framework="numpy"):  # checks the header, but hides the offsets
            pass
        with open(file, "rb") as stream:
            begin = 8 + int.from_bytes(stream.read(8), "little")
            if begin > MAX_BYTES:
                raise ValueError(f"{file} has a header of {begin} bytes; accepted are {MAX_BYTES}")
            header = json.loads(stream.read(begin - 8))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, stamp, begin + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors with rows are equal, bit for bit. They are read in chunks, until a chunk differs."""
    if (first.shape, first.dtype) != (second.shape, second.dtype) or first.dtype not in DTYPES:
        return False
    rows, *inner = first.shape
    height = max(1, CHUNK // math.prod(inner))
    chunks = [(min(height, rows - begin), *inner) for begin in range(0, rows, height)]
    return all(
        a.read_bytes("").tobytes() == b.read_bytes("").tobytes()
        for a, b in zip(first.divide(chunks), second.divide(chunks), strict=True)
    )


def check_kind(name: str, stored: StoredTensor, shape: Shape, accepted: Collection[str]) -> None:
    """Raises a ValueError unless a tensor has this shape and one of the accepted dtypes."""
    if stored.shape != shape:
        raise ValueError(f"{stored.file}: {name} has shape {stored.shape}; config.json implies {shape}")
    if stored.dtype not in accepted:
        raise ValueError(f"{stored.file}: {name} is of type {stored.dtype}; accepted are {', '.join(accepted)}")


def check_unchanged(tensors: Iterable[Tensor]) -> None:
    """Raises a ValueError if a file was written to or replaced since its header was read."""
    for file, stamp in {file: stamp for stored in tensors for file, stamp in stored.stamps.items()}.items():
        if stamp_of(file) != stamp:
            raise ValueError(f"{file} changed while it was read")


def write_tensors(
    tensors: Iterable[tuple[str, jax.Array]],
    directory: pathlib.Path,
    single: str = SINGLE_FILE,
    progress: Callable[[int], None] | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes tensors to the file `single` of a directory, or several files and an index. The host holds one file.

    The directory has a config.json, whose permissions the files get.

    Args:
      progress: called with the bytes of each tensor when its file is written.

    Raises:
      ValueError: if tensors are divided among processes.
      OSError: such as for a full disk.
    """
    parts = list(_parts(tensors))
    if not all(array.is_fully_addressable for part in parts for array in part.values()):
        raise ValueError("params are divided among processes, which cannot be written: load them in one process")
    names = [single]
    if len(parts) > 1:
        stem, suffix = single.split(".")
        names = [f"{stem}-{i + 1:05}-of-{len(parts):05}.{suffix}" for i in range(len(parts))]
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(array.nbytes for part in parts for array in part.values())
        write_json(directory / f"{single}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    for name, part in zip(names, parts, strict=True):
        arrays = {tensor: np.asarray(jax.device_get(array), order="C") for tensor, array in part.items()}
        try:
            save_file(arrays, directory / name, metadata=metadata)
        except SafetensorError as error:  # such as for a full disk
            raise OSError(errno.EIO, str(error)) from error
        shutil.copymode(directory / "config.json", directory / name)  # safetensors lets the owner alone read it
        if progress is not None:
            for array in arrays.values():
                progress(array.nbytes)


def _parts(tensors: Iterable[tuple[str, jax.Array]]) -> Iterator[dict[str, jax.Array]]:
    """Yields the named tensors of each file; a file holds up to `MAX_FILE_BYTES`, or one larger tensor."""
    part: dict[str, jax.Array] = {}
    for name, array in tensors:
        if part and sum(a.nbytes for a in part.values()) + array.nbytes > MAX_FILE_BYTES:
            yield part
            part = {}
        part[name] = array
    yield part


def _weight_files(single: pathlib.Path, strict: bool) -> list[pathlib.Path]:
    """Returns the weight files: as in transformers `single` if there is one, else those that its index names."""
    directory, index = single.parent, single.with_name(f"{single.name}.index.json")
    if index.exists():
        files = _files_of(index)
        if not single.exists():
            return files
        others = [file.name for file in files if file != single]
        if present := [name for name in others if (directory / name).exists()]:
            raise ValueError(
                f"{directory} has two checkpoints, {single.name} and that of {index.name}, with {first_few(present)}: "
                f"remove one of them"
            )
        if others:
            said = f"{index.name}, whose files are not there: {first_few(others)}"
            refuse_or_warn(strict, directory, said, f"{directory}: {single.name} is read; ignored is {said}")
    if single.exists():
        return [single]
    if pickled := [file.name for file in directory.glob("*.bin")]:
        raise ValueError(
            f"{directory} has weights only in {pickled[0]}, a format that can run code when read. Only safetensors "
            f"files are read. If you trust the file, convert it where transformers and torch are installed: "
            f'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}', dtype='auto').save_pretrained('NEW_DIR')\""
        )
    if in_gguf := sorted(file.name for file in directory.glob("*.gguf")):
        raise ValueError(f"{directory} has weights only in {in_gguf[0]}: give the path of that file")
    raise ValueError(
        f"{directory} has no weights: neither {single.name} nor {index.name}. Only safetensors files are read; "
        f"transformers' `save_pretrained` writes them"
    )


def _files_of(index: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that an index names. The names of their tensors are those in the files."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must map tensor names to files, got {shown(weight_map)}")
    for name in weight_map.values():
        if not is_file_name(name):
            raise ValueError(f"{index}: weight_map names {shown(name)}; accepted are files in the same directory")
    return [index.parent / name for name in sorted(set(weight_map.values()))]


def stamp_of(file: pathlib.Path) -> tuple[int, ...]:
    """Returns numbers that change when a file is written to or replaced."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _fill(stream: io.FileIO, offset: int, array: np.ndarray) -> bool:
    """Reads a contiguous array; returns whether the file is long enough."""
    stream.seek(offset)
    view = array.reshape(-1).view(np.uint8).data
    while count := stream.readinto(view):
        view = view[count:]
    return not view


def aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array that starts at a multiple of 64 bytes, as JAX on CPUs requires to share it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size].view(dtype).reshape(shape)


def broken_rows(source: np.ndarray, converted: np.ndarray, first: int) -> set[int]:
    """Returns the rows of a tensor with NaN or infinite elements, whose exponent bits are all set.

    The source [rows, columns] is the tensor as it is stored, from the row `first` on; `converted` in another dtype.
    """
    # One has the infinities of both, in fewer bytes; FP8 has none, and another code for NaN.
    array = min(source, converted, key=lambda array: (array.itemsize == 1, array.itemsize))
    if array.itemsize == 1:
        return set()
    info = ml_dtypes.finfo(array.dtype)
    bits = array.view(f"u{array.itemsize}")
    exponent = bits.dtype.type(((1 << info.nexp) - 1) << info.nmant)
    is_broken = (bits & exponent) == exponent
    return {first + int(row) for row in np.flatnonzero(is_broken.any(axis=1))} if is_broken.any() else set()
