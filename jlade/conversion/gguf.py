"""GGUF files: their metadata as a Hugging Face directory, made once, whose weights stay in the file."""

import atexit
import functools
import hashlib
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jlade.conversion.gguf_architectures import architecture_of
from jlade.conversion.gguf_config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, read_config, unknown_keys
from jlade.conversion.gguf_tokenizer import BOS, read_tokenizer, tokenizer_config
from jlade.conversion.gguf_weights import GGUFTensor, check_tensors, unfolded, write_index
from jlade.conversion.hf_config import to_hf
from jlade.conversion.huggingface import load_hf
from jlade.conversion.json_files import Values, write_json
from jlade.conversion.tensors import Sharding
from jlade.conversion.weight_files import stamp_of
from jlade.files import cache_directory, written_whole
from jlade.models.llama import LlamaParams

# More than those of any file; each becomes an object of more than a hundred bytes.
MOST_ENTRIES, MOST_ELEMENTS = 2**14, 2**21  # keys, and tensors; elements of all arrays
FORMAT = 1  # of the directories; another one makes them again


def load_gguf(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    int8: bool = False,
    strict: bool = False,
    mesh: Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LlamaParams:
    """Returns the parameters of a GGUF file, whose tensors are dequantized one at a time.

    The arguments are those of `load_hf`, except that:

    * `dtype="auto"` is float32, which holds the values of every type.
    * A function `sharding` is called with the names of tensors in Hugging Face's format.

    Raises:
      ValueError: names the file, and the key or the tensor, that is missing, broken or not supported; the package gguf
        is missing; the model cannot be divided among the devices of `mesh`; both `sharding` and `mesh` are given.

    Warns:
      UserWarning: names the unknown keys; names the tensors with NaN or infinite values, and their rows.
    """
    return load_hf(unfold(path), dtype, sharding, progress, int8, strict, mesh, adapter)


def unfold(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a Hugging Face directory with the metadata of a GGUF file. Its weights are read from the file.

    The directory is kept in `jlade/gguf` of the cache, since reading a vocabulary takes seconds. A file that has
    changed gets another one. Where the cache cannot be written, the directory lasts as long as the process.

    Raises:
      ValueError: see `load_gguf`. Names, shapes and types of all tensors are checked.
    """
    file = pathlib.Path(os.path.abspath(path))
    if not file.is_file():
        raise ValueError(f"path must be a GGUF file, and there is no file {os.fspath(path)!r}")
    directory = _unfold(file, stamp_of(file), cache_directory() / "gguf")
    unfolded.add(directory)
    return directory


@functools.cache
def _unfold(file: pathlib.Path, stamp: tuple[int, ...], parent: pathlib.Path) -> pathlib.Path:
    key = hashlib.sha256(repr((FORMAT, os.fspath(file), stamp)).encode()).hexdigest()[:16]
    directory = parent / f"{file.stem}-{key}"
    if directory.is_dir():
        return directory
    write = _read(file)
    try:
        with written_whole(directory) as partial:
            write(partial)
    except ValueError:  # another process was faster
        if not directory.is_dir():
            raise
    except OSError:
        directory = pathlib.Path(tempfile.mkdtemp(prefix="jlade-")) / directory.name
        atexit.register(shutil.rmtree, directory.parent, ignore_errors=True)
        write(directory)
    return directory


def _read(file: pathlib.Path) -> Callable[[pathlib.Path], None]:
    """Reads and checks everything but the weights, and returns a function that writes the directory."""
    metadata, tensors, factors = _parse(file)
    values = Values(file, metadata)
    config = read_config(values, {name: tensor.shape for name, tensor in tensors.items()}, factors)
    own = {name: tensor for name, tensor in tensors.items() if name not in factors}
    index = check_tensors(own, config, metadata["general.architecture"], architecture_of(values))
    tokenizer = read_tokenizer(values, config.vocab_size)
    # `read_config` of the directory warns of unknown keys, or refuses them.
    content = to_hf(config, "float32") | {"bos_token_id": values.get(BOS)} | unknown_keys(values)

    def write(directory: pathlib.Path) -> None:
        directory.mkdir()
        write_json(directory / "config.json", content)
        write_json(directory / "generation_config.json", {"eos_token_id": content["eos_token_id"]})
        write_index(index, directory)
        if tokenizer is not None:
            tokenizer.save(os.fspath(directory / "tokenizer.json"))
            write_json(directory / "tokenizer_config.json", tokenizer_config(values))

    return write


def _parse(file: pathlib.Path) -> tuple[dict[str, Any], dict[str, GGUFTensor], dict[str, np.ndarray]]:
    """Returns the metadata, the tensors by their names in the file, and those with divisors of rotary frequencies."""
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
            if self.num_elements > MOST_ELEMENTS:
                raise ValueError(f"its arrays have more than {MOST_ELEMENTS} elements")
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
        if count > MOST_ENTRIES:
            raise ValueError(f"it has more than {MOST_ENTRIES} {name}")
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
    return metadata, tensors, factors


def _plain(value: Any) -> Any:
    """Returns the shortest number that a float32 stands for, and any other value as it is."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
