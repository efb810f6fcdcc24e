"""What `jlade.tune` found, on disk: one JSON file for each device, model and batch size."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import warnings
from typing import Any

import jax

from jlade.config import LookaheadConfig
from jlade.conversion.whole import written_whole
from jlade.models.base import Decoder, Params

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Key:
    """What a setting was found for."""

    device: str  # what computes: kind, number, backend
    model: str  # a fingerprint of what the decoder is and of its parameters' shapes and dtypes, not of their values
    batch_size: int

    @property
    def path(self) -> pathlib.Path:
        """Where the result is stored."""
        name = hashlib.sha256("\n".join(map(str, dataclasses.astuple(self))).encode()).hexdigest()[:16]
        return cache_directory() / "tuned" / f"{name}.json"


def cache_directory() -> pathlib.Path:
    """Returns where jlade keeps files that can be made again: `jlade` in XDG_CACHE_HOME, by default `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification has such ones ignored
        cache = os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "jlade"


def device_of(params: Params) -> tuple[jax.Device, int]:
    """Returns a device that holds the parameters, and how many do; JAX's default for those on none."""
    devices = next((leaf.devices() for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)), set())
    return min(devices, key=lambda device: device.id, default=jax.devices()[0]), max(1, len(devices))


def key(params: Params, decoder: Decoder, batch_size: int) -> Key:
    """Returns the key of a model; for `params`, arrays of shapes alone (`jax.ShapeDtypeStruct`) do as well."""
    device, number = device_of(params)
    leaves = jax.tree.leaves(params)
    shapes = tuple((getattr(leaf, "dtype", type(leaf)), getattr(leaf, "shape", ())) for leaf in leaves)
    kind = f"{processor()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    model = _fingerprint(f"{type(decoder).__module__}.{decoder!r}", shapes)
    return Key(f"{number} x {kind} ({device.platform})", model, batch_size)


@functools.cache
def _fingerprint(decoder: str, shapes: tuple[tuple[Any, ...], ...]) -> str:
    stable = re.sub(" at 0x[0-9a-f]+", "", decoder)  # a default repr's address is another in each process
    return hashlib.sha256(" ".join([stable, *(f"{dtype}{shape}" for dtype, shape in shapes)]).encode()).hexdigest()


@functools.cache
def processor() -> str:
    """Returns the processor's name; JAX calls every one "cpu", and a home directory may be shared by different ones."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def save(key: Key, lookahead: LookaheadConfig, facts: dict[str, Any]) -> None:
    """Stores the setting found for `key`, with further facts; the file is replaced whole or not at all."""
    found = {"format": FORMAT, **dataclasses.asdict(key), "lookahead": dataclasses.asdict(lookahead)}
    content = json.dumps(found | {"jax": jax.__version__} | facts, indent=1) + "\n"
    with written_whole(key.path, replace=True) as file:
        file.write_text(content, encoding="utf-8")


def load(key: Key) -> LookaheadConfig | None:
    """Returns the setting that is stored for `key`; None when none is. A broken file is ignored with a warning."""
    try:
        stored = json.loads(key.path.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError(f"its format is {stored['format']!r}, not {FORMAT}")
        return LookaheadConfig(**stored["lookahead"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{key.path} is ignored, `jlade tune` writes it anew: {error!r}", stacklevel=2)
        return None
