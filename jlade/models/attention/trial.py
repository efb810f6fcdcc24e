"""The trial of an attention kernel on the user's own device, which decides whether "auto" takes the kernel.

A kernel passes if it compiles, gives the results of plain attention and is not slower. Its verdict is kept as a JSON
file for each kind of device, shape of heads, variation of attention, and version of JAX, of the device's software and
of this package.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import version as jaxlib_version

from jlade import files
from jlade.models.attention.operands import Operands, Variation
from jlade.models.base import KVCache, commit

Attend = Callable[..., jax.Array]  # of `Operands`, with the arguments `window` and `cap` of `attention.attend`

BLOCK = 60  # tokens of a step with lookahead
PREFILL = 512  # tokens of the largest block that reads a prompt: a kernel's memory may not suffice for it
LENGTHS = (700, 650)  # cache entries in use of two sequences
CAPACITY = 1024
RING = 680  # the capacity with a window, below one of the lengths
WINDOW = 512
CAP = 2.0
LAYERS = 32  # consecutive calls of attention in a program, so that the time to start it does not count
REPEAT = 5
PATIENCE = 60  # seconds, several times what a trial takes
MARGIN = 1.1  # a kernel may take this multiple of plain attention's time: measured times vary by a few percent

logger = logging.getLogger("jlade")


class Shape(NamedTuple):
    """The heads of a model, the dtype of its queries, keys and values, and the attention of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    variation: Variation = Variation()

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention.attend`."""
        named = {"window": (WINDOW, self.variation.window), "cap": (CAP, self.variation.cap)}
        return {name: value for name, (value, present) in named.items() if present}

    def __str__(self) -> str:
        parts = f"{self.heads} heads", f"{self.kv_heads} KV heads", f"head size {self.head_dim}", self.dtype
        return ", ".join([*parts, *(name for name, present in self.variation._asdict().items() if present)])


class Verdict(NamedTuple):
    """The outcome of a trial, and its reason: a clause about the kernel."""

    passed: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Key:
    """The circumstances that a verdict holds for."""

    kernel: str
    device: str  # its kind
    software: str  # versions of JAX, jaxlib, and the device's compiler or driver
    code: str  # a fingerprint of the attention modules: a changed kernel is tried anew
    shape: Shape

    @property
    def path(self) -> pathlib.Path:
        """The file of the verdict."""
        name = hashlib.sha256(repr(self).encode()).hexdigest()[:16]
        return files.cache_directory() / "attention" / f"{name}.json"


_known: dict[pathlib.Path, Verdict] = {}  # verdicts that this process has found or read


def passes(kernel: str, run: Attend, plain: Attend, device: jax.Device, shape: Shape, may_run: bool) -> bool:
    """Returns whether a kernel passes its trial, which takes place unless its verdict is remembered.

    It does not pass where no trial can decide: on a device that is not attached, and with several processes
    (`jax.process_count`), whose programs would differ if their verdicts did.

    Args:
      kernel: its name.
      run: attention with the kernel.
      plain: attention without it.
      device: where both run.
      shape: of the heads, with one variation of attention.
      may_run: whether a trial may take place; otherwise only a remembered verdict counts.
    """
    if jax.process_count() > 1 or not _is_attached(device):
        return False
    key = _key(kernel, device, shape)
    if not may_run:
        known = find(key)
        return known is not None and known.passed
    return decide(key, functools.partial(compare, run, plain, device, shape)).passed


def find(key: Key) -> Verdict | None:
    """Returns the remembered verdict, None when there is none. A broken file is ignored with a warning."""
    path = key.path
    if path in _known:
        return _known[path]
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(bool(facts["passed"]), str(facts["reason"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{path} is ignored; the attention kernel is tried anew: {error!r}", stacklevel=2)
        return None
    _known[path] = verdict
    logger.info("%s As stored in %s.", _describe(key, verdict), path)
    return verdict


def decide(key: Key, try_kernel: Callable[[], Verdict]) -> Verdict:
    """Returns the remembered verdict, or else that of `try_kernel`, which is stored.

    A refusal is warned of when it is found, and logged at INFO when a later process reads it. An exception of
    `try_kernel` is no fault of the kernel: it is refused in this process alone.
    """
    if (known := find(key)) is not None:
        return known
    path = key.path
    try:
        with _alone(path.with_suffix(".lock")) as interrupted:
            if (known := find(key)) is not None:  # of the process that this one has waited for
                return known
            logger.info("Trying the attention kernel %r, once (%s; %s).", key.kernel, key.device, key.shape)
            verdict = Verdict(False, "ended or hung the process that tried it") if interrupted else try_kernel()
            text = json.dumps(dataclasses.asdict(key) | verdict._asdict(), indent=1) + "\n"
            with files.written_whole(path, replace=True) as file:
                file.write_text(text, encoding="utf-8")
        remedy = f" The next process does the same; without {path} it tries the kernel again."
    except Exception as error:
        verdict, remedy = Verdict(False, f"could not be tried: {_first_line(error)}"), ""
    _known[path] = verdict
    if verdict.passed:
        logger.info("%s", _describe(key, verdict))
    else:
        warnings.warn(_describe(key, verdict) + remedy, stacklevel=2)
    return verdict


def compare(run: Attend, plain: Attend, device: jax.Device, shape: Shape) -> Verdict:
    """Tries a kernel on random numbers: first its results, then its time.

    An error is the largest of any token and head, ||x - y|| / ||y||, where y is computed in float32. Plain attention
    runs before the kernel: if the device has no memory left, it is the one to raise.

    Args: see `passes`.
    """
    # In a thread of its own, as the caller may be tracing a program: nothing here becomes a part of it. Under
    # `jax.ensure_compile_time_eval`, kernels cannot be traced.
    outcome: concurrent.futures.Future[Verdict] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(_compare(run, plain, device, shape))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a daemon, as a kernel that hangs must not keep the process
    return outcome.result()


def _compare(run: Attend, plain: Attend, device: jax.Device, shape: Shape) -> Verdict:
    case = _random_case(device, shape, BLOCK)
    one, many = (jax.device_put(np.int32(count), device) for count in (1, LAYERS))
    variation = shape.arguments
    exact = _exact(case, **variation)
    plain_layers, kernel_layers = (_layers(attend, **variation) for attend in (plain, run))
    # Rounding to bfloat16 gives plain attention errors of about its eps, 2**-7, and kernels round in other places. Sums
    # in another order differ by less than 2**-16 in float32, but TPUs multiply float32 in bfloat16 by default: plain
    # attention's own error counts too. If all tokens see a key too many or too few, the largest error is 0.1 to 0.6.
    tolerance = max(2 * float(jnp.finfo(shape.dtype).eps), 2**-16, 2 * _error(plain_layers(case, one), exact))
    prefill = _random_case(device, shape, PREFILL)
    try:
        for tried, expected in ((case, exact), (prefill, _exact(prefill, **variation))):
            error = _error(kernel_layers(tried, one), expected)
            if not error <= tolerance:  # NaN is not
                return Verdict(False, f"gives wrong results: an error of {error:.2g}, with {tolerance:.2g} accepted")
        times = [(_seconds(plain_layers, case, many), _seconds(kernel_layers, case, many)) for _ in range(REPEAT)]
    except Exception as exception:
        return Verdict(False, f"raises {_first_line(exception)}")
    plain_time, kernel_time = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = f"takes {kernel_time / plain_time:.2f} of the time of plain attention"
    return Verdict(kernel_time <= MARGIN * plain_time, ratio)


def _is_attached(device: jax.Device) -> bool:
    try:
        return device in jax.local_devices(backend=device.platform)
    except RuntimeError:  # no such platform here: `device` is that of a topology to compile for
        return False


def _key(kernel: str, device: jax.Device, shape: Shape) -> Key:
    versions = f"JAX {jax.__version__}, jaxlib {jaxlib_version.__version__}, {device.client.platform_version}"
    return Key(kernel, device.device_kind, versions, _code(), shape)


@functools.cache
def _code() -> str:
    sources = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _describe(key: Key, verdict: Verdict) -> str:
    chosen = f"{key.kernel!r}, which" if verdict.passed else f"'plain', as the kernel {key.kernel!r}"
    return f"attention='auto' is {chosen} {verdict.reason} ({key.device}; {key.shape})."


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[bool]:
    """Makes other processes wait at this point until the body is done; yields whether the last one ended in the body.

    The file holds a word while the body runs; it stays, as a process may be waiting for it, but empty. Its lock ends
    with the process. An interrupt after `PATIENCE` leaves the word: someone has ended a process that hung.
    """
    import fcntl  # no device with a kernel runs on Windows, which lacks it

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        interrupted, hangs, begin = bool(file.read()), False, time.monotonic()
        file.write("trying\n")
        file.flush()
        try:
            yield interrupted
        except KeyboardInterrupt:
            hangs = time.monotonic() - begin > PATIENCE
            raise
        finally:
            if not hangs:
                file.truncate(0)


class _Case(NamedTuple):
    """The arguments of attention, and the tokens to commit."""

    block: tuple[jax.Array, jax.Array, jax.Array]  # queries [B, T, H, D], keys and values [B, T, KH, D]
    cache: KVCache  # of one layer
    mask: jax.Array  # [T, T] bool
    positions: jax.Array  # [B, T] int32
    sinks: jax.Array | None  # [H]
    indices: jax.Array  # [B, 4] int32
    num_accepted: jax.Array  # [B] int32


def _random_case(device: jax.Device, shape: Shape, block_size: int) -> _Case:
    rng = np.random.default_rng(block_size)
    heads, kv_heads, _, dtype, variation = shape
    batch_size, capacity = len(LENGTHS), RING if variation.window else CAPACITY
    put = functools.partial(jax.device_put, device=device)

    def draw(*sizes: int) -> jax.Array:
        return put(rng.standard_normal(sizes, np.float32).astype(jnp.dtype(dtype)))

    def draw_heads(*sizes: int) -> jax.Array:
        return draw(batch_size, *sizes, shape.head_dim)

    length = np.array(LENGTHS, np.int32)
    return _Case(
        block=(draw_heads(block_size, heads), draw_heads(block_size, kv_heads), draw_heads(block_size, kv_heads)),
        cache=KVCache((draw_heads(kv_heads, capacity),), (draw_heads(kv_heads, capacity),), put(length)),
        mask=put((rng.random((block_size, block_size)) < 0.5) | np.eye(block_size, dtype=bool)),
        positions=put(length[:, None] + np.arange(block_size, dtype=np.int32)),
        sinks=draw(heads) if variation.sinks else None,
        indices=put(np.tile(np.arange(4, dtype=np.int32), (batch_size, 1))),
        num_accepted=put(np.full(batch_size, 2, np.int32)),
    )


def _layers(attend: Attend, **arguments: Any) -> Callable[[_Case, jax.Array], jax.Array]:
    """Returns a program for consecutive layers, in which the queries of each are the result of the one before.

    The tokens are committed after each, as in a decode: a kernel may want the cache in a layout that `commit` does not,
    and the copies between the two take time.
    """

    def run(case: _Case, count: jax.Array) -> jax.Array:
        _, keys, values = case.block

        def layer(_: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
            queries, cache = carry
            prefix = cache.keys[0], cache.values[0], cache.length
            operands = Operands(queries, keys, values, *prefix, case.mask, case.positions, case.sinks)
            mixed = attend(operands, **arguments)
            committed = commit(cache, [(keys, values)], case.indices, case.num_accepted)
            return mixed, dataclasses.replace(committed, length=cache.length)

        queries, _ = jax.lax.fori_loop(0, count, layer, (case.block[0], case.cache))
        return queries

    return jax.jit(run)


def _exact(case: _Case, window: int | None = None, cap: float | None = None) -> np.ndarray:
    """Returns attention [B, T, H, D] in float32, by NumPy: such programs for TPUs take ten seconds to compile."""
    arrays = (*case.block, *case.cache.keys, *case.cache.values)
    queries, keys, values, cached_keys, cached_values = (np.asarray(jax.device_get(x), np.float32) for x in arrays)
    newest, mask, positions, sinks = jax.device_get((case.cache.length - 1, case.mask, case.positions, case.sinks))
    batch_size, _, heads, head_dim = queries.shape
    sinks = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float32)
    exact = np.empty_like(queries)
    for b, h in np.ndindex(batch_size, heads):
        entries = np.arange(cached_keys.shape[2])
        key_positions = newest[b] - (newest[b] - entries) % entries.size  # negative where an entry is not in use
        seen = np.concatenate([np.tile(key_positions >= 0, (len(mask), 1)), mask], axis=1)
        if window is not None:
            seen &= positions[b, :, None] - np.append(key_positions, positions[b]) < window
        kv_head = h // (heads // keys.shape[2])
        scores = queries[b, :, h] @ np.concatenate([cached_keys[b, kv_head], keys[b, :, kv_head]]).T * head_dim**-0.5
        scores = np.where(seen, scores if cap is None else cap * np.tanh(scores / cap), -np.inf)
        highest = np.maximum(np.max(scores, axis=1, keepdims=True), sinks[h])
        weights = np.exp(scores - highest)
        mixed = weights @ np.concatenate([cached_values[b, kv_head], values[b, :, kv_head]])
        exact[b, :, h] = mixed / (np.sum(weights, axis=1, keepdims=True) + np.exp(sinks[h] - highest))
    return exact


def _error(result: jax.Array, exact: np.ndarray) -> float:
    x = np.asarray(jax.device_get(result), np.float32)
    with np.errstate(all="ignore"):
        return float(np.max(np.linalg.norm(x - exact, axis=-1) / np.linalg.norm(exact, axis=-1)))


def _seconds(run: Callable[..., jax.Array], *arguments: Any) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - begin
