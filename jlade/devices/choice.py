"""`lookahead="auto"`: the setting that `jlade.tune` stored for a device and a model, or else an estimate.

A stored setting is a JSON file for each device, model and batch size.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import warnings
from typing import Any

import jax

from jlade import files
from jlade.config import LookaheadConfig
from jlade.devices import sheet
from jlade.devices.estimate import estimate

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Key:
    """The circumstances that a setting was found for."""

    device: str  # number, kind and platform
    model: str  # a fingerprint of the decoder and of its parameters' shapes and dtypes, not of their values
    batch_size: int

    @property
    def path(self) -> pathlib.Path:
        """The file of the stored setting."""
        name = hashlib.sha256("\n".join(map(str, dataclasses.astuple(self))).encode()).hexdigest()[:16]
        return files.cache_directory() / "tuned" / f"{name}.json"


def choose(params: Any, decoder: object, batch_size: int) -> LookaheadConfig:
    """Returns the setting for B sequences at once; it may be `config.PLAIN`.

    A process reads the file once and keeps the setting until it tunes itself, so that the calls for a model share a
    program.

    Args:
      params: arrays, or their shapes alone.
      decoder: the model that `params` belong to.
      batch_size: B.
    """
    circumstances = key(params, decoder, batch_size)
    device, _ = sheet.device_of(params)
    return _choose(circumstances, circumstances.path, device)


def forget() -> None:
    """Makes the next call of `choose` read the file again."""
    _choose.cache_clear()


@functools.cache
def _choose(key: Key, path: pathlib.Path, device: jax.Device) -> LookaheadConfig:
    """The key's `path` is an argument because it depends on the environment."""
    return load(key) or estimate(device.platform, device.device_kind, key.batch_size)


def key(params: Any, decoder: object, batch_size: int) -> Key:
    """Returns the key of a model. For `params`, shapes alone (`jax.ShapeDtypeStruct`) suffice."""
    device, number = sheet.device_of(params)
    leaves = jax.tree.leaves(params)
    shapes = tuple((getattr(leaf, "dtype", type(leaf)), getattr(leaf, "shape", ())) for leaf in leaves)
    # A home directory may be shared by machines with different processors.
    kind = f"{sheet.processor()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    model = _fingerprint(f"{type(decoder).__module__}.{decoder!r}", shapes)
    return Key(f"{number} x {kind} ({device.platform})", model, batch_size)


@functools.cache
def _fingerprint(decoder: str, shapes: tuple[tuple[Any, ...], ...]) -> str:
    stable = re.sub(" at 0x[0-9a-f]+", "", decoder)  # the address in a default repr differs between processes
    return hashlib.sha256(" ".join([stable, *(f"{dtype}{shape}" for dtype, shape in shapes)]).encode()).hexdigest()


def save(key: Key, lookahead: LookaheadConfig, facts: dict[str, Any]) -> None:
    """Writes the setting for `key`, with `facts` about how it was found, in place of an earlier one.

    The file appears whole or not at all.
    """
    found = {"format": FORMAT, **dataclasses.asdict(key), "lookahead": dataclasses.asdict(lookahead)}
    text = json.dumps(found | {"jax": jax.__version__} | facts, indent=1) + "\n"
    with files.written_whole(key.path, replace=True) as file:
        file.write_text(text, encoding="utf-8")


def load(key: Key) -> LookaheadConfig | None:
    """Returns the setting stored for `key`, None when there is none. A broken file is ignored with a warning."""
    try:
        stored = json.loads(key.path.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError(f"its format is {stored['format']!r}, not {FORMAT}")
        return LookaheadConfig(**stored["lookahead"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{key.path} is ignored; `jlade tune` writes it anew: {error!r}", stacklevel=2)
        return None
