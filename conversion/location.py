"""Where a checkpoint lies: a directory, a GGUF file, or the Hugging Face Hub."""

import os
import pathlib

from jlade.conversion import gguf, hub

ACCEPTED = "a directory with a checkpoint or a GGUF file"


def find(path: str | os.PathLike[str], revision: str | None = None) -> pathlib.Path:
    """Returns the directory of a checkpoint: `path` itself, that of a GGUF file, or of an id like "owner/name".

    Missing files of the Hub are downloaded; see `hub.download`.

    Raises:
      ValueError: there is no such checkpoint, or the GGUF file is broken or not supported.
    """
    directory = _find(path)
    if directory is None:
        return hub.download(os.fspath(path), revision)
    if revision is not None:
        raise ValueError(f"revision={revision!r} is for ids of the Hub; {os.fspath(path)!r} is {ACCEPTED}")
    return directory


def find_local(name: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns what `find` returns, but for ids of the Hub; errors call the argument `name`."""
    directory = _find(path)
    if directory is None:
        raise ValueError(f"{name} must be {ACCEPTED}, got {os.fspath(path)!r}")
    return directory


def _find(path: str | os.PathLike[str]) -> pathlib.Path | None:
    path = pathlib.Path(path)
    if path.suffix == ".gguf" and not path.is_dir():
        return gguf.unfold(path)
    return path if path.is_dir() else None
