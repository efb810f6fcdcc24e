"""GGUF files: their metadata as a Hugging Face directory, made once, whose weights stay in the file."""

import atexit
import functools
import hashlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jlade.conversion.gguf_config import generation_config, read_config, unknown_keys
from jlade.conversion.gguf_header import parts_of, read_header
from jlade.conversion.gguf_tokenizer import BOS, read_tokenizer, tokenizer_config
from jlade.conversion.gguf_weights import check_tensors, unfolded, write_index
from jlade.conversion.hf_config import to_hf
from jlade.conversion.huggingface import load_hf
from jlade.conversion.json_files import write_json
from jlade.conversion.tensors import Sharding
from jlade.conversion.weight_files import stamp_of
from jlade.files import cache_directory, written_whole
from jlade.models.llama import LlamaParams

FORMAT = 3  # of the directories; another one makes them again


def load_gguf(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    bits: int | None = None,
    strict: bool = False,
    mesh: Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LlamaParams:
    """Returns the parameters of a GGUF file, whose tensors are dequantized one at a time.

    The arguments are those of `load_hf`, except that:

    * `dtype="auto"` is float32, which holds the values of every type.
    * A function `sharding` is called with the names of tensors in Hugging Face's format.

    Raises:
      ValueError, warns: as `load_hf` does; the package gguf is not installed.
    """
    return load_hf(unfold(path), dtype, sharding, progress, bits, strict, mesh, adapter)


def unfold(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a Hugging Face directory with the metadata of a GGUF file. Its weights are read from the file.

    Of a model in several files any one can be named. The directory is kept in `jlade/gguf` of the cache, since reading
    a vocabulary takes seconds. A change of any of the files gives another one. Where the cache cannot be written, the
    directory lasts as long as the process.

    Raises:
      ValueError: see `load_gguf`. Names, shapes and types of all tensors are checked.
    """
    file = pathlib.Path(os.path.abspath(path))
    if not file.is_file():
        raise ValueError(f"path must be a GGUF file, and there is no file {os.fspath(path)!r}")
    stamps = tuple(map(stamp_of, parts_of(file)))
    directory = _unfold(file, stamps, cache_directory() / "gguf")
    unfolded.add(directory)
    return directory


@functools.cache
def _unfold(file: pathlib.Path, stamps: tuple[tuple[int, ...], ...], parent: pathlib.Path) -> pathlib.Path:
    key = hashlib.sha256(repr((FORMAT, os.fspath(file), stamps)).encode()).hexdigest()[:16]
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
    values, tensors, factors = read_header(file)
    config = read_config(values, {name: tensor.shape for name, tensor in tensors.items()}, factors)
    own = {name: tensor for name, tensor in tensors.items() if name not in factors}
    index = check_tensors(own, config, values)
    tokenizer = read_tokenizer(values, config.vocab_size)
    # `read_config` of the directory warns of unknown keys, or refuses them.
    content = to_hf(config, "float32") | {"bos_token_id": values.get(BOS)} | unknown_keys(values)
    generation = {"eos_token_id": content["eos_token_id"]} | generation_config(values, config)

    def write(directory: pathlib.Path) -> None:
        directory.mkdir()
        write_json(directory / "config.json", content)
        write_json(directory / "generation_config.json", generation)
        write_index(index, directory)
        if tokenizer is not None:
            tokenizer.save(os.fspath(directory / "tokenizer.json"))
            write_json(directory / "tokenizer_config.json", tokenizer_config(values))

    return write
