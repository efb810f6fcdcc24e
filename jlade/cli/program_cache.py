"""JAX's persistent compilation cache: the command keeps its compiled programs from one run to the next."""

import contextlib
import hashlib
import pathlib

import filelock
import jax

from jlade import files
from jlade.costs import devices

MAX_BYTES = 2**30  # of all programs; the least recently used ones are deleted first


def enable() -> None:
    """Enables the cache, unless the user has chosen its directory or the directory cannot be made.

    The directory is `jlade/compiled` in XDG_CACHE_HOME, by default `~/.cache`, with one subdirectory for each kind of
    processor: machines with different processors may share a home, and a CPU's programs use its own instructions.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    processor = hashlib.sha256(devices.processor().encode()).hexdigest()[:16]
    directory = files.cache_directory() / "compiled" / processor
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    _remove_torn(directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _remove_torn(directory: pathlib.Path) -> None:
    """Removes programs that a killed process left half-written, as JAX would warn of them in every later run.

    JAX writes a program, then the time of its last use beside it, while it holds a lock.
    """

    def torn() -> list[pathlib.Path]:
        programs = directory.glob("*-cache")
        return [each for each in programs if not each.with_name(each.name.removesuffix("cache") + "atime").exists()]

    if torn():
        with contextlib.suppress(OSError), filelock.FileLock(directory / ".lockfile", timeout=10):
            for program in torn():
                program.unlink()
