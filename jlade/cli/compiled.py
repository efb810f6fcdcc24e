"""Keeping compiled programs from one run of the command to the next."""

import hashlib

import jax

from jlade import files
from jlade.devices import sheet

MOST_BYTES = 2**30  # of all programs; the ones used longest ago go first


def keep() -> None:
    """Turns on JAX's persistent compilation cache, unless the user has placed it elsewhere or there is no room for it.

    It lies in `jlade/compiled` of XDG_CACHE_HOME, by default `~/.cache`, apart for each kind of processor: a home may
    be shared by different ones, and programs for CPUs use what their processor has.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    processor = hashlib.sha256(sheet.processor().encode()).hexdigest()[:16]
    directory = files.cache_directory() / "compiled" / processor
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
