"""`lookahead="auto"`: the setting that `jlade.tune` stored for a device and a model, or else an estimate.

A stored setting is a JSON file for each device, model and batch size.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import warnings
from typing import Any

import jax
from jax.sharding import Mesh

from jlade import files
from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.costs import devices, estimate
from jlade.lookahead import names
from jlade.mesh import DATA, LOOKAHEAD

FORMAT = 3

logger = logging.getLogger("jlade")


@dataclasses.dataclass(frozen=True)
class SettingKey:
    """The circumstances that a setting was found for."""

    device: str  # number or mesh, kind and platform
    model: str  # a fingerprint of the decoder and of its parameters' shapes and dtypes, not of their values
    batch_size: int

    @property
    def devices(self) -> str:
        """Their number, or the sizes of their mesh."""
        return self.device.partition(" x ")[0]

    @property
    def kind(self) -> str:
        """Their kind and platform."""
        return self.device.partition(" x ")[2]

    @property
    def path(self) -> pathlib.Path:
        """The file of the stored setting."""
        return files.cache_directory() / "tuned" / self.name()

    def name(self, *others: object) -> str:
        """Returns a name for the file of something about these circumstances and others."""
        facts = "\n".join(map(str, (*dataclasses.astuple(self), *others)))
        return f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """A setting that was found by measuring. What files of earlier versions lack is empty or 0.

    Attributes:
      key: the circumstances.
      lookahead: the setting.
      date: when it was stored, in ISO 8601.
      prompts, tokens, repeat: each setting was timed `repeat` times on this many prompts with up to `tokens` new tokens
        each.
      speeds: of the settings that were tried, relative to plain decoding.
      step_times: seconds of a step by block size.
    """

    key: SettingKey
    lookahead: LookaheadConfig
    date: str
    prompts: int
    tokens: int
    repeat: int
    speeds: dict[LookaheadConfig, float]
    step_times: dict[int, float]

    @property
    def effort(self) -> int:
        """Tokens that were timed for each setting, at most."""
        return self.prompts * self.tokens * self.repeat

    @classmethod
    def read(cls, path: pathlib.Path) -> "Stored":
        """Returns the contents of a file."""
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise ValueError(f"its format is {facts['format']!r}, not {FORMAT}")
        return cls(
            key=SettingKey(str(facts["device"]), str(facts["model"]), int(facts["batch_size"])),
            lookahead=LookaheadConfig.from_dict(facts["lookahead"]),
            date=str(facts.get("date", "")),
            **{name: int(facts.get(name, 0)) for name in ("prompts", "tokens", "repeat")},
            speeds={
                LookaheadConfig.from_dict(trial["lookahead"]): positive(trial["speed"])
                for trial in facts.get("trials", ())
            },
            step_times={int(size): positive(seconds) for size, seconds in facts.get("step_times", {}).items()},
        )


def positive(value: Any) -> float:
    """Returns a positive, finite number from a file, and raises a ValueError for another value."""
    if not 0 < float(value) < math.inf:
        raise ValueError(f"a number must be positive, got {value!r}")
    return float(value)


def choose(params: Any, decoder: object, batch_size: int, mesh: Mesh | None = None) -> LookaheadConfig:
    """Returns the setting for B sequences at once; it may be `config.PLAIN`.

    A process reads the file once and keeps the setting until it tunes itself, so that the calls for a model share a
    program. Nothing is compiled, and nothing runs on the device.

    Args:
      params: arrays, or their shapes alone.
      decoder: the model that `params` belong to.
      batch_size: B.
      mesh: the devices, if they are not those of `params`.
    """
    stored = find(params, decoder, batch_size, mesh)
    if stored is not None:
        return stored.lookahead
    return estimated(params, batch_size, mesh)


def estimated(
    params: Any, batch_size: int, mesh: Mesh | None = None, device: jax.Device | None = None
) -> LookaheadConfig:
    """Returns the estimate for the devices. Arguments are those of `choose`; `device`, if given, need not be there."""
    device = device or mesh_lib.device_of(params, mesh)
    each, lookahead = batch_size // mesh_lib.size(mesh, DATA), mesh_lib.size(mesh, LOOKAHEAD)
    return estimate.estimate(device.platform, device.device_kind, each, estimate.weights_of(params), lookahead)


def find(params: Any, decoder: object, batch_size: int, mesh: Mesh | None = None) -> Stored | None:
    """Returns the stored setting of a model, None if there is none. Arguments and caching are those of `choose`.

    On a mesh of several processes, which must run the same programs, it is that of process 0.
    """
    circumstances = key(params, decoder, batch_size, mesh)
    mesh = mesh_lib.mesh_of(params) if mesh is None else mesh
    return _find(circumstances, circumstances.path, mesh is not None and mesh.is_multi_process)


def find_all(params: Any, decoder: object) -> list[Stored]:
    """Returns what is stored for a model on devices of this kind, by number or mesh, then batch size."""
    here = key(params, decoder, 1)
    stored = [found for path in here.path.parent.glob("*.json") if (found := _load(path)) is not None]
    of_model = [found for found in stored if (found.key.kind, found.key.model) == (here.kind, here.model)]
    return sorted(of_model, key=lambda found: (found.key.devices, found.key.batch_size))


def log_if_slow(
    lookahead: LookaheadConfig, params: Any, decoder: object, batch_size: int, mesh: Mesh | None = None
) -> None:
    """Logs once for each setting, at INFO, that tuning or the estimate shows it to be slower than plain decoding.

    An adaptive setting is not, as it falls back to plain steps. With lookahead parallelism nothing is logged.
    """
    if lookahead.relative_step_time is not None or lookahead.block_size == 1 or mesh_lib.size(mesh, LOOKAHEAD) > 1:
        return
    device, stored = mesh_lib.device_of(params, mesh), find(params, decoder, batch_size, mesh)
    if stored is not None and lookahead in stored.speeds:
        speed, source = stored.speeds[lookahead], "as measured by tuning"
    elif stored is not None and stored.step_times:
        speed, source = estimate.speed_limit(lookahead, stored.step_times), "at most, by the step times of tuning"
    else:
        each, weights = batch_size // mesh_lib.size(mesh, DATA), estimate.weights_of(params)
        times = estimate.step_times(device.platform, device.device_kind, each, weights)
        speed = estimate.speed_limit(lookahead, times)
        source = "at most, by an estimate; `jlade tune` measures"
    if speed < 1:
        _log_slow(names.label(lookahead), device.device_kind, batch_size, speed, source)


@functools.cache
def _log_slow(*facts: Any) -> None:
    logger.info(
        "%s is slower than plain decoding on %s, batch size %d: %.2fx its speed, %s. "
        'lookahead="auto" is the setting for this device.',
        *facts,
    )


def forget() -> None:
    """Makes the next call of `choose` read the file again, and the next of `log_if_slow` log again."""
    _find.cache_clear()
    _log_slow.cache_clear()


@functools.cache
def _find(key: SettingKey, path: pathlib.Path, shared: bool) -> Stored | None:
    """The key's `path` is an argument because it depends on the environment."""
    stored: Stored | None = mesh_lib.gather(load(key))[0] if shared else load(key)
    return stored


def key(params: Any, decoder: object, batch_size: int, mesh: Mesh | None = None) -> SettingKey:
    """Returns the key of a model. For `params`, shapes alone (`jax.ShapeDtypeStruct`) suffice."""
    mesh = mesh_lib.mesh_of(params) if mesh is None else mesh
    device = mesh_lib.device_of(params, mesh)
    count = str(len(mesh_lib.devices_of(params))) if mesh is None else mesh_lib.label(mesh)
    leaves = jax.tree.leaves(params)
    shapes = tuple((getattr(leaf, "dtype", type(leaf)), getattr(leaf, "shape", ())) for leaf in leaves)
    # A home directory may be shared by machines with different processors.
    kind = f"{devices.processor()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    model = _fingerprint(f"{type(decoder).__module__}.{decoder!r}", shapes)
    return SettingKey(f"{count} x {kind} ({device.platform})", model, batch_size)


@functools.cache
def _fingerprint(decoder: str, shapes: tuple[tuple[Any, ...], ...]) -> str:
    stable = re.sub(" at 0x[0-9a-f]+", "", decoder)  # the address in a default repr differs between processes
    return hashlib.sha256(" ".join([stable, *(f"{dtype}{shape}" for dtype, shape in shapes)]).encode()).hexdigest()


def save(key: SettingKey, lookahead: LookaheadConfig, facts: dict[str, Any]) -> None:
    """Writes the setting for `key`, with `facts` about how it was found, in place of an earlier one.

    The file appears whole or not at all.
    """
    found = {"format": FORMAT, **dataclasses.asdict(key), "lookahead": dataclasses.asdict(lookahead)}
    found |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "jax": jax.__version__}
    text = json.dumps(found | facts, indent=1) + "\n"
    with files.written_whole(key.path, replace=True) as file:
        file.write_text(text, encoding="utf-8")


def load(key: SettingKey) -> Stored | None:
    """Returns what is stored for `key`, None when there is nothing. A broken file is ignored with a warning."""
    return _load(key.path)


def _load(path: pathlib.Path) -> Stored | None:
    try:
        return Stored.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a broken file can raise any
        warnings.warn(f"{path} is ignored; `jlade tune` writes it anew: {error!r}", stacklevel=2)
        return None
