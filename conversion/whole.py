"""Directories that appear whole or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives a directory to write to, which takes the place of `path` once everything is written without an error.

    Raises:
      ValueError: when `path` exists.
    """
    target = pathlib.Path(path)
    if target.exists():
        raise ValueError(f"path must not exist yet, got {os.fspath(path)!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True
    ) as scratch:
        partial = pathlib.Path(scratch) / target.name
        partial.mkdir()
        yield partial
        if target.exists():
            raise ValueError(f"path must not exist yet, got {os.fspath(path)!r}")
        shutil.move(partial, target)
