"""Tables of grammars in files, so that those that take long to make are there when a process begins again.

They lie in `tables` of the directory of `jlade.files.cache_directory`.
"""

import functools
import hashlib
import logging
import pathlib
import time
import zipfile
from collections.abc import Callable

import numpy as np

from jlade import constraints, files
from jlade.constraints.blocks import Blocks
from jlade.constraints.tokens import Table

SLOW = 0.2  # seconds to make a table that is saved
MOST = 64  # files
log = logging.getLogger(__name__)


def saved(source: str, make: Callable[[], Table]) -> Table:
    """Returns the table that `make` makes, from its file if there is one. It is written if that took long.

    Args:
      source: all that the table is made of, but for the code.
      make: makes it.
    """
    name = hashlib.sha256((source + _code()).encode()).hexdigest()[:32]
    path = files.cache_directory() / "tables" / f"{name}.npz"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("the table in %s is made again: %s", path, error)
    begin = time.perf_counter()
    table = make()
    if time.perf_counter() - begin > SLOW:
        try:
            _write(table, path)
        except OSError as error:
            log.warning("the table of a grammar is not saved: %s", error)
    return table


def _write(table: Table, path: pathlib.Path) -> None:
    arrays = table.blocks._asdict() | {"class_of_token": table.class_of_token, "likely": table.likely}
    if table.bounds is not None:
        arrays["bounds"] = table.bounds
    with files.written_whole(path, replace=True, sync=False) as partial, open(partial, "wb") as file:
        np.savez(file, **arrays)
    by_age = sorted(path.parent.glob("*.npz"), key=lambda other: other.stat().st_mtime)
    for oldest in by_age[:-MOST]:
        oldest.unlink(missing_ok=True)


def _read(path: pathlib.Path) -> Table:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
        arrays = dict(content)
    path.touch()  # it has been used
    return Table(Blocks(*(arrays.pop(name) for name in Blocks._fields)), **arrays)


@functools.cache
def _code() -> str:
    """Returns a fingerprint of the code that makes tables."""
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(constraints.__path__[0]).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
