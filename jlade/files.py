"""Files: where jlade caches results, and a writer whose files and directories appear whole or not at all."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator


def cache_directory() -> pathlib.Path:
    """Returns the directory for files that can be made again: `jlade` in XDG_CACHE_HOME, by default `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification says to ignore a relative one
        cache = os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "jlade"


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[pathlib.Path]:
    """Yields a path for the caller to write a file or a directory to, then moves it to `path`.

    The yielded path does not exist yet. It lies in a temporary directory of its own next to `path`, so concurrent
    writers never meet and the move is one `os.replace`. An error in the body leaves no trace of it.

    Args:
      path: the target; missing parent directories are created.
      replace: whether to replace a file at `path`.

    Raises:
      ValueError: if `path` exists, before or after the body, and `replace` is False.
    """
    target = pathlib.Path(path)

    def check_target() -> None:
        if not replace and os.path.lexists(target):
            raise ValueError(f"path must not exist yet, got {os.fspath(path)!r}")

    check_target()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True
    ) as scratch:
        partial = pathlib.Path(scratch) / target.name
        yield partial
        check_target()
        os.replace(partial, target)
