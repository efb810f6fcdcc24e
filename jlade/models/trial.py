"""The trial of a kernel on the user's own device, which decides whether "auto" takes the kernel.

A kernel passes if it compiles, gives the results of plain JAX and is not slower. Its verdict is kept as a JSON file for
each kind of device, shape of arrays, and version of JAX, of the device's software and of this package.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
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

BLOCK = 60  # tokens of a step with lookahead
PREFILL = 512  # tokens of the largest block that reads a prompt: a kernel's memory may not suffice for it
LAYERS = 32  # consecutive calls in a program, so that the time to start it does not count
REPEAT = 20  # timings of a millisecond or so; the shortest counts, as another program on the device only adds to it
PATIENCE = 60  # seconds, several times what a trial takes
MARGIN = 1.1  # a kernel may take this multiple of the time of plain JAX: measured times vary by a few percent

logger = logging.getLogger("jlade")


class Case(NamedTuple):
    """Arguments of a program, and its result after one layer."""

    arguments: Any
    expected: np.ndarray  # [..., D] float32


class Contest(NamedTuple):
    """A kernel and plain JAX: programs that take the arguments of a case and [] int32, a number of layers."""

    run: Callable[[Any, jax.Array], jax.Array]
    plain: Callable[[Any, jax.Array], jax.Array]
    step: Case  # of `BLOCK` tokens, which is timed
    prefill: Case  # of `PREFILL` tokens


def against_plain(
    run: Callable[[Any, jax.Array], jax.Array],
    plain: Callable[[Any, jax.Array], jax.Array],
    device: jax.Device,
    draw: Callable[[int], Any],
) -> Contest:
    """Returns the contest in which the results of plain JAX are the expected ones.

    `draw` returns the arguments, on the device, for a number of tokens.
    """
    cases = []
    for num_tokens in (BLOCK, PREFILL):
        arguments = draw(num_tokens)
        expected = plain(arguments, jax.device_put(np.int32(1), device))
        cases.append(Case(arguments, np.asarray(jax.device_get(expected), np.float32)))
    return Contest(run, plain, *cases)


class Outcome(NamedTuple):
    """The outcome of a trial, and its reason: a clause about the kernel."""

    passed: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class TrialKey:
    """The circumstances that a verdict holds for."""

    subject: str  # "attention" or "experts"
    kernel: str
    device: str  # its kind
    software: str  # versions of JAX, jaxlib, and the device's compiler or driver
    code: str  # a fingerprint of the subject's modules and this one: a changed kernel is tried anew
    shape: Any  # a named tuple

    @classmethod
    def of(cls, subject: str, kernel: str, device: jax.Device, shape: Any) -> "TrialKey":
        """Returns the key of a kernel here and now. The arguments are those of `passes`."""
        versions = f"JAX {jax.__version__}, jaxlib {jaxlib_version.__version__}, {device.client.platform_version}"
        return cls(subject, kernel, device.device_kind, versions, _code(subject), shape)

    @property
    def path(self) -> pathlib.Path:
        """The file of the verdict."""
        name = hashlib.sha256(repr(self).encode()).hexdigest()[:16]
        return files.cache_directory() / self.subject / f"{name}.json"


_known: dict[pathlib.Path, Outcome] = {}  # verdicts that this process has found or read


def passes(
    subject: str, kernel: str, device: jax.Device, shape: Any, prepare: Callable[[], Contest], may_run: bool
) -> bool:
    """Returns whether a kernel passes its trial, which takes place unless its verdict is remembered.

    It does not pass where no trial can decide: on a device that is not attached, and with several processes
    (`jax.process_count`), whose programs would differ if their verdicts did.

    Args:
      subject: what it computes, "attention" or "experts".
      kernel: its name.
      device: where it runs.
      shape: of its arrays, a named tuple. `str(shape)` is for people.
      prepare: see `compare`.
      may_run: whether a trial may take place; otherwise only a remembered verdict counts.
    """
    if jax.process_count() > 1 or not _is_attached(device):
        return False
    key = TrialKey.of(subject, kernel, device, shape)
    if not may_run:
        verdict = find(key)
        return verdict is not None and verdict.passed
    return decide(key, functools.partial(compare, prepare, device)).passed


def find(key: TrialKey) -> Outcome | None:
    """Returns the remembered verdict, None when there is none. A broken file is ignored with a warning."""
    path = key.path
    if path in _known:
        return _known[path]
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        verdict = Outcome(bool(facts["passed"]), str(facts["reason"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a broken file can raise any
        warnings.warn(f"{path} is ignored; the kernel is tried anew: {error!r}", stacklevel=2)
        return None
    _known[path] = verdict
    logger.info("%s As stored in %s.", _describe(key, verdict), path)
    return verdict


def decide(key: TrialKey, try_kernel: Callable[[], Outcome]) -> Outcome:
    """Returns the remembered verdict, or else that of `try_kernel`, which is stored.

    A refusal is warned of when it is found, and logged at INFO when a later process reads it. An exception of
    `try_kernel` is no fault of the kernel: it is refused in this process alone.
    """
    if (remembered := find(key)) is not None:
        return remembered
    path = key.path
    try:
        with _alone(path.with_suffix(".lock")) as interrupted:
            if (remembered := find(key)) is not None:  # of the process that this one has waited for
                return remembered
            logger.info("Trying the kernel %r for %s, once (%s; %s).", key.kernel, key.subject, key.device, key.shape)
            verdict = Outcome(False, "ended or hung the process that tried it") if interrupted else try_kernel()
            text = json.dumps(dataclasses.asdict(key) | verdict._asdict(), indent=1) + "\n"
            with files.written_whole(path, replace=True) as file:
                file.write_text(text, encoding="utf-8")
        remedy = f" The next process does the same; without {path} it tries the kernel again."
    except Exception as error:
        verdict, remedy = Outcome(False, f"could not be tried: {_first_line(error)}"), ""
    _known[path] = verdict
    if verdict.passed:
        logger.info("%s", _describe(key, verdict))
    else:
        warnings.warn(_describe(key, verdict) + remedy, stacklevel=2)
    return verdict


def forget() -> None:
    """Makes this process read the files of verdicts again, as the next one will."""
    _known.clear()


def compare(
    prepare: Callable[[], Contest], device: jax.Device, clock: Callable[[], float] = time.perf_counter
) -> Outcome:
    """Tries a kernel: first its results, then its time.

    An error is the largest of any row [D], ||x - y|| / ||y||, where y is expected. Plain JAX runs before the kernel: if
    the device has no memory left, it is the one to raise.

    Args:
      prepare: returns the programs and their arguments, on the device.
      device: where both run.
      clock: returns the time in seconds, and is read before and after each timed program.
    """
    # In a thread of its own, as the caller may be tracing a program: nothing here becomes a part of it. Under
    # `jax.ensure_compile_time_eval`, kernels cannot be traced.
    outcome: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(_compare(prepare(), device, clock))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a daemon, as a kernel that hangs must not keep the process
    return outcome.result()


def _compare(contest: Contest, device: jax.Device, clock: Callable[[], float]) -> Outcome:
    run, plain, step, prefill = contest

    def seconds(program: Callable[[Any, jax.Array], jax.Array]) -> float:
        begin = clock()
        jax.block_until_ready(program(step.arguments, many))
        return clock() - begin

    one, many = (jax.device_put(np.int32(count), device) for count in (1, LAYERS))
    result = plain(step.arguments, one)
    # Rounding to bfloat16 gives plain JAX errors of about its eps, 2**-7, and kernels round in other places. Sums in
    # another order differ by less than 2**-16 in float32, but TPUs multiply float32 in bfloat16 by default: the error
    # of plain JAX counts too.
    tolerance = max(2 * float(jnp.finfo(result.dtype).eps), 2**-16, 2 * _error(result, step.expected))
    try:
        for case in (step, prefill):
            error = _error(run(case.arguments, one), case.expected)
            if not error <= tolerance:  # NaN is not
                return Outcome(False, f"gives wrong results: an error of {error:.2g}, with {tolerance:.2g} accepted")
        times = [(seconds(plain), seconds(run)) for _ in range(REPEAT)]
    except Exception as exception:
        return Outcome(False, f"raises {_first_line(exception)}")
    plain_time, kernel_time = map(min, zip(*times, strict=True))
    return Outcome(kernel_time <= MARGIN * plain_time, f"takes {kernel_time / plain_time:.2f} of the time of 'plain'")


def _is_attached(device: jax.Device) -> bool:
    try:
        return device in jax.local_devices(backend=device.platform)
    except RuntimeError:  # no such platform here: `device` is that of a topology to compile for
        return False


@functools.cache
def _code(subject: str) -> str:
    trial = pathlib.Path(__file__)
    sources = [trial, *sorted((trial.parent / subject).glob("*.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _describe(key: TrialKey, verdict: Outcome) -> str:
    chosen = f"{key.kernel!r}, which" if verdict.passed else f"'plain', as the kernel {key.kernel!r}"
    return f"{key.subject}='auto' is {chosen} {verdict.reason} ({key.device}; {key.shape})."


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


def _error(result: jax.Array, expected: np.ndarray) -> float:
    x = np.asarray(jax.device_get(result), np.float32)
    with np.errstate(all="ignore"):
        return float(np.max(np.linalg.norm(x - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))
