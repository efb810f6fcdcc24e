"""Files: where jlade caches results, and writers whose files and directories appear whole or not at all."""

import contextlib
import errno
import glob
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


def cache_directory() -> pathlib.Path:
    """Returns the directory for files that can be made again: `jlade` in XDG_CACHE_HOME, by default `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification says to ignore a relative one
        cache = os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "jlade"


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str], *, replace: bool = False, sync: bool = True) -> Iterator[pathlib.Path]:
    """Yields a path for the caller to write a file or a directory to, then moves it to `path`.

    The yielded path does not exist yet. It lies in a temporary directory of its own next to `path`, so concurrent
    writers never meet and the move is one `os.replace`. An error in the body leaves no trace of it. A process that is
    killed leaves the temporary directory, which the next writer of `path` removes.

    Args:
      path: the target; missing parent directories are created.
      replace: whether to replace a file at `path`.
      sync: whether the disk has all of it before the move. Without, it takes 10 ms less, and a power failure may leave
        an empty file.

    Raises:
      ValueError: if `path` exists, before or after the body, and `replace` is False.
      OSError: of the body or of the move; names `path` if it names no other file.
    """
    target = pathlib.Path(path)

    def check_target() -> None:
        if not replace and os.path.lexists(target):
            raise ValueError(f"path must not exist yet, got {os.fspath(path)!r}")

    check_target()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(target) as scratch, _errors_of(target, scratch):
        partial = scratch / target.name
        yield partial
        check_target()
        if sync:
            _sync(partial)
        os.replace(partial, target)
        if sync:
            _sync_directory(target.parent)


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Appends a line to a file. After an error, such as a full disk, the file ends as before.

    Raises:
      OSError: names the file.
    """
    with _errors_of(pathlib.Path(path)), open(path, "ab", buffering=0) as file:
        length, left = file.seek(0, os.SEEK_END), f"{line}\n".encode()
        try:
            while left:
                left = left[file.write(left) :]  # a disk that is almost full takes a part
        except OSError:
            file.truncate(length)
            raise


@contextlib.contextmanager
def _scratch(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new directory next to `target`, after removing those of writers that were killed.

    A writer holds a lock on its directory until its process ends.
    """
    prefix = f".{target.name}.jlade-"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        with _lock(left, wait=False) as is_held:
            if is_held:
                shutil.rmtree(left, ignore_errors=True)
    exists = False
    while not exists:  # another writer may remove the directory before it is locked
        scratch = tempfile.mkdtemp(dir=target.parent, prefix=prefix)
        with _lock(scratch, wait=True):
            if exists := os.path.isdir(scratch):
                try:
                    yield pathlib.Path(scratch)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _lock(directory: str | os.PathLike[str], wait: bool) -> Iterator[bool]:
    """Yields whether this process holds the lock of a directory. Windows and some network drives have no locks."""
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_held = True
        except (ImportError, OSError):
            is_held = False
        yield is_held


@contextlib.contextmanager
def _errors_of(target: pathlib.Path, scratch: pathlib.Path | None = None) -> Iterator[None]:
    """Gives errors of the system the name of `target`, unless they name a file outside `scratch`."""
    try:
        yield
    except OSError as error:
        named = [pathlib.Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if name is not None]
        if named and not any(scratch in file.parents for file in named):
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), os.fspath(target)) from error


def _sync(path: pathlib.Path) -> None:
    """Waits until the disk has a file, or a directory with all that it holds."""
    for part in (path, *path.rglob("*")):
        if part.is_dir():
            _sync_directory(part)
        else:
            with part.open("rb+") as file:
                os.fsync(file.fileno())


def _sync_directory(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # Windows and some network drives refuse
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)
