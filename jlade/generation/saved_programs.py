"""Programs that were compiled ahead, in a directory: calls and engines run them without tracing.

`jlade.compile` and `jlade.compile_engine` write them. A file holds one program as JAX serializes it: machine code, with
a pickle of what JAX needs to call it. Whoever can write such a file decides what the process does: a directory of
programs is to be trusted like code.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jlade import files
from jlade import mesh as mesh_lib
from jlade.costs import devices
from jlade.decoding import ahead, room
from jlade.decoding.ahead import Call, Handler
from jlade.decoding.state import DecodeConfig, Inputs
from jlade.models.base import Params

FORMAT, MANIFEST = 1, "programs.json"
FIELDS = "program", "arguments", "file", "sha256"  # of a program in the manifest
SHOWN = 3  # differences that a warning names
# What the programs are compiled from, besides JAX.
SOURCES = "config.py", "mesh.py", "vocabulary.py", "constraints", "decoding", "drafts", "engine", "lookahead", "models"
OPTIONS = "jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable"  # of JAX, that decide programs
COMPILERS = {  # of each platform, besides jaxlib
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt"),
}

Facts = Mapping[str, str]


def save(path: str | os.PathLike[str], made: Sequence[tuple[Call, Any]], device: jax.Device, facts: Facts) -> None:
    """Writes programs to a new directory, whole or not at all.

    Args:
      path: of the directory.
      made: the calls of a decode, each with its program for the device, a `jax.stages.Compiled`.
      facts: of the call; see `facts_of`.

    Raises:
      ValueError: if `path` exists.
    """
    with files.written_whole(path) as directory:
        directory.mkdir()
        written = []
        for number, (call, compiled) in enumerate(made):
            content = pickle.dumps(serialize_executable.serialize(compiled))
            file = f"{number}.program"
            (directory / file).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            written.append({"program": call.program, "arguments": _arguments(call), "file": file, "sha256": digest})
        manifest = {"format": FORMAT, "made_for": here(device), "call": dict(facts), "programs": written}
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def here(device: jax.Device) -> Facts:
    """Returns what programs for a device depend on besides the call: the device, and the versions of this process."""
    found = {"device": device.device_kind}
    if device.platform == "cpu":
        found = {"device": devices.processor(), "instructions of the device": _instructions()}
    found["device id"] = str(device.id)
    found["jlade"] = f"{_version('jlade')}, sources {_sources()}"
    for package in ("jax", "jaxlib", *COMPILERS.get(device.platform, ())):
        found[package] = _version(package)
    return found | {name: repr(jax.config.values[name]) for name in OPTIONS}


def facts_of(params: Params, inputs: Inputs, config: DecodeConfig) -> Facts:
    """Returns the facts of a call that decide its programs, those that people name first."""
    batch_size, capacity = inputs.prompts.shape
    named = {"use": "call", "batch size": str(batch_size), "capacity": str(capacity)}
    return described(named, params, config, inputs=inputs)


def described(named: Facts, params: Params, config: DecodeConfig, **more: Any) -> Facts:
    """Returns facts with those of a model, its settings and other values, arrays by their dtypes and shapes."""
    settings = {name: value for name, value in vars(config).items() if name != "decoder"}
    values = {"config": settings, **more, "decoder": config.decoder, "params": params}
    return dict(itertools.chain(named.items(), *(_described(name, value) for name, value in values.items())))


class SavedPrograms:
    """The programs of a directory.

    XLA takes seconds to load a large program. Those of a call begin to load at once, in their order, one on each
    processor; of those of an engine, which may need few of them, each is loaded when it is needed.
    """

    def __init__(self, path: pathlib.Path, device: jax.Device):
        self._path, self._device, self._lock = path, device, threading.RLock()
        self._warned: set[str] = set()
        self._is_broken = False  # whether a program cannot be loaded
        self._threads = futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jlade-programs")
        self._loaded: dict[str, futures.Future[Any]] = {}  # by their files; of None for one that cannot be loaded
        self._in_memory: dict[str, room.Programs] = {}  # the same
        self._known: dict[tuple[Any, ...], tuple[str, str] | None] = {}  # by calls
        self._programs: list[dict[str, str]] = []
        self._facts: Facts = {}
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise ValueError(f"its format is {manifest['format']!r}, and this version of jlade reads {FORMAT}")
            self._facts = {str(name): str(value) for name, value in manifest["call"].items()}
            differences = _differences(manifest["made_for"], here(device))
            programs = [{name: str(each[name]) for name in FIELDS} for each in manifest["programs"]]
        except Exception as error:  # a broken file can raise any
            self._warn(f"{path / MANIFEST} cannot be read, so programs compile as usual: {error}")
            return
        if differences:
            self._warn(f"the programs in {path} are not for this process, so they compile as usual: {differences}")
            return
        self._programs = programs
        for file in (each["file"] for each in programs):
            self._in_memory[file] = room.Programs(functools.partial(self._loaded.pop, file, None))
        if self._facts.get("use") == "call":
            for each in programs:
                self._load(each["file"], each["sha256"])

    def are_for(self, facts: Facts) -> bool:
        """Returns whether the programs are all for what has these facts. If they are not, a warning says why once."""
        differences = _differences(self._facts, facts)
        if self._programs and differences:
            self._warn(f"the programs in {self._path} are not for this {facts['use']}, so it compiles: {differences}")
        return bool(self._programs) and not differences

    def handler(self, facts: Callable[[], Facts]) -> Handler:
        """Returns the function that runs the programs which fit the calls of a decode or an engine with these facts.

        Others compile as usual. A warning says why, once for each reason. Any thread may call it.
        """
        explained = False

        def run(call: Call) -> Any:
            nonlocal explained
            program = self._find(call)
            with contextlib.suppress(TypeError):  # of other arrays, before anything runs
                if program is not None:
                    return ahead.results_of(program) if ahead.is_shapes(call.arrays) else program(*call.arrays)
            if self._programs and not explained:
                explained = True
                now = facts()
                reason = _differences(self._facts, now)
                if reason or not self._is_broken:  # which has been said
                    reason = reason or f"there is no {call.program}"
                    self._warn(
                        f"the programs in {self._path} are not all for this {now['use']}, so others compile: {reason}"
                    )
            return call.run()

        return run

    def _find(self, call: Call) -> Any:
        """Returns the program of a call, None if there is none, or none that can be loaded."""
        shapes = ((array.shape, array.dtype) for array in jax.tree.leaves(call.arrays))
        key = (call.program, *call.settings.values(), *shapes)
        if key not in self._known:
            facts = {"program": call.program, "arguments": _arguments(call)}
            fitting = (each for each in self._programs if facts.items() <= each.items())
            self._known[key] = next(((each["file"], each["sha256"]) for each in fitting), None)
        known = self._known[key]
        return None if known is None else self._load(*known).result()

    def _load(self, file: str, digest: str) -> futures.Future[Any]:
        """Begins to load a program, unless that has begun."""
        self._in_memory[file].use()
        with self._lock:
            if file not in self._loaded:
                self._loaded[file] = self._threads.submit(self._read, file, digest)
            return self._loaded[file]

    def _read(self, file: str, digest: str) -> Any:
        try:
            content = (self._path / file).read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError(f"its SHA-256 is not that in {MANIFEST}")
            program, arguments, results = pickle.loads(content)
            loaded = serialize_executable.deserialize_and_load(
                program, arguments, results, self._device.client, execution_devices=[self._device]
            )
            self._in_memory[file].gain()
            return loaded
        except Exception as error:  # of XLA and of unpickling, which have no type of their own
            self._is_broken = True
            self._warn(f"{self._path / file} cannot be loaded, so the program compiles as usual: {error}")
            return None

    def _warn(self, message: str) -> None:
        with self._lock:
            if message in self._warned:
                return
            self._warned.add(message)
        warnings.warn(message, stacklevel=2)


def find(path: str | os.PathLike[str], device: jax.Device) -> SavedPrograms:
    """Returns the programs of a directory. A process reads it once, unless it is written anew.

    Raises:
      ValueError: `path` is no directory that `jlade compile` wrote.
    """
    manifest = pathlib.Path(path) / MANIFEST
    try:
        state = manifest.stat()
    except OSError as error:
        raise ValueError(
            f"programs must be a directory written by jlade compile, got {os.fspath(path)!r}: {error}"
        ) from error
    return _find(manifest.parent.absolute(), device, state.st_mtime_ns, state.st_ino)


@functools.lru_cache(maxsize=8)
def _find(path: pathlib.Path, device: jax.Device, *version: int) -> SavedPrograms:
    return SavedPrograms(path, device)


def _arguments(call: Call) -> str:
    """Returns a fingerprint of the arguments of a call, the same in every process: settings, dtypes and shapes."""
    arrays = [f"{array.dtype}{list(array.shape)}" for array in jax.tree.leaves(call.arrays)]
    facts = dict(_described("settings", call.settings)), arrays
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _described(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the parts of a value by their names, arrays by their dtypes and shapes."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield name, f"{value.dtype}{list(value.shape)}"
    elif isinstance(value, Mesh):
        yield name, mesh_lib.label(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _described(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in value:
            yield from _described(f"{name}.{key}", value[key])
    elif isinstance(value, tuple | list) and not _is_plain(value):
        for index, part in enumerate(value):
            yield from _described(f"{name}[{index}]", part)
    else:
        yield name, re.sub(" at 0x[0-9a-f]+", "", repr(value))  # an address differs between processes


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | bool | None)


def _differences(there: Facts, now: Facts) -> str:
    """Returns the first facts that differ, in words; nothing if none does."""
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    words = [
        f"{name} is {there.get(name, 'not there')} in the file and {now.get(name, 'not there')} here" for name in names
    ]
    more = f"; and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return "; ".join(words[:SHOWN]) + more


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _sources() -> str:
    """Returns a fingerprint of the code that programs are traced from."""
    root, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for name in SOURCES:
        for file in sorted((root / name).rglob("*.py")) or [root / name]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


@functools.cache
def _instructions() -> str:
    """Returns a fingerprint of the instructions of this processor: a virtual machine may lack some of its name's."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]
