"""Kills jlade at random moments: whole files are left, and the next run finishes the job.

    python -m tests.stress.kills --moments 50 --json benchmarks/results/kills.json
    python -m tests.stress.kills tune pool --moments 10

Each job runs once undisturbed. Then it begins as often as `--moments` says, each time in a new directory, and is ended
by SIGKILL after a random part of the undisturbed time. Every file that is left must be whole, but for the last line of
a file of lines; then the job runs again, and its results must be those of the undisturbed run.

Jobs are forked from one process that has imported all of jlade, so that no time passes with imports. It never starts
JAX itself, whose threads a fork would lack.
"""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

import jlade
from benchmarks import report
from jlade import cli
from jlade.costs import choice
from jlade.drafts.pool import NGramPool
from jlade.evaluation import runs
from tests.tiny import save_small_demo


class Job(NamedTuple):
    """A job that writes into a directory."""

    run: Callable[[Path], int]  # returns the exit status
    # What a finished job has written, less what varies from run to run. Raises if it is not whole.
    result: Callable[[Path], Any]
    target: str = ""  # the file or directory with the result, or "" if it may lack parts until the job is done


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)} (default: all)")
    parser.add_argument("--moments", type=int, default=50, metavar="K", help="runs to kill of each job (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jobs = {name: each for name, each in JOBS.items() if name in options.jobs or not options.jobs}
    result: dict[str, Any] = {"jobs": {}}
    if options.json and os.path.exists(options.json):  # of other jobs
        result["jobs"] = json.loads(Path(options.json).read_text(encoding="utf-8"))["jobs"]
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        for name, job in jobs.items():
            place = Path(directory) / name
            place.mkdir()
            figures = trials(job, place, options.moments, random.Random(options.seed))
            result["jobs"][name] = figures
            print(name, json.dumps(figures), flush=True)

            def write(_: Path) -> int:
                report.write(options.json, result)
                return 0

            assert begun(write, place).wait() == 0  # not here, as it asks JAX for the device


def prepare(directory: Path) -> None:
    """Writes the model and the prompts of the jobs: the demo model's first layer, for short times."""
    jax.config.update("jax_compilation_cache_dir", str(directory / "programs"))
    os.environ["MPLCONFIGDIR"] = str(directory / "matplotlib")  # its list of fonts, which it makes anew if it is broken
    run = begun(save_model, directory)  # in a process of its own, as it needs JAX
    assert run.wait() == 0, run.messages()
    prompts = [f"import module_{number}" for number in range(16)]
    (directory / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    records = [
        json.dumps({"prompt": prompt, "seed": number, "temperature": 1}) for number, prompt in enumerate(prompts)
    ]
    (directory / "records.jsonl").write_text("\n".join(records), encoding="utf-8")


def save_model(directory: Path) -> int:
    save_small_demo(directory / "model")
    return 0


def trials(job: Job, directory: Path, moments: int, draw: random.Random) -> dict[str, float]:
    """Returns the counts of a job's runs that were killed; see the head of the file.

    Raises:
      AssertionError: a file is not whole, or the next run does not finish the job.
    """
    finished(job, directory / "first")  # compiles
    begin = time.perf_counter()
    begun(job.run, directory / "undisturbed").wait()
    seconds = time.perf_counter() - begin
    expected = finished(job, directory / "undisturbed", is_done=True)
    figures = {"moments": moments, "seconds": round(seconds, 2), "killed": 0, "had_finished": 0, "left_a_part": 0}
    for moment in range(moments):
        place = directory / f"killed-{moment}"
        run = begun(job.run, place)
        time.sleep(draw.uniform(0, seconds))
        run.kill()
        figures["killed" if run.wait() == -signal.SIGKILL else "had_finished"] += 1
        figures["left_a_part"] += bool(parts(place))
        check(job, place)
        assert finished(job, place) == expected, f"moment {moment} gives another result"
        shutil.rmtree(place)
    return figures


class Run:
    """A function of a directory, in a process of its own."""

    def __init__(self, function: Callable[[Path], int], place: Path):
        self._messages = place.with_name(f"{place.name}.messages")
        self._pid = os.fork()
        if not self._pid:
            status = 70
            try:
                output = os.open(self._messages, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.environ["XDG_CACHE_HOME"] = str(place / "cache")
                status = function(place)
            except SystemExit as refused:
                status = int(refused.code or 0)
            except BaseException:
                traceback.print_exc()
                status = 2
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Returns the exit status, negative after a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def messages(self) -> str:
        return self._messages.read_text(encoding="utf-8")


def begun(function: Callable[[Path], int], place: Path) -> Run:
    """Begins a run in a directory, which is made if it is missing."""
    place.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, whose threads a fork lacks: this process has not started them
        return Run(function, place)


def finished(job: Job, place: Path, is_done: bool = False) -> str:
    """Runs a job to its end, unless it is done, and returns its result as JSON."""
    if not is_done:
        run = begun(job.run, place)
        assert run.wait() == 0, run.messages()
    assert not parts(place), parts(place)
    file = place.with_name(f"{place.name}.result")

    def write(place: Path) -> int:
        file.write_text(json.dumps(job.result(place)), encoding="utf-8")
        return 0

    run = begun(write, place)  # as the result may need JAX
    assert run.wait() == 0, run.messages()
    return file.read_text(encoding="utf-8")


def check(job: Job, place: Path) -> None:
    """Raises an AssertionError if a file is not whole."""
    for file in place.rglob("*"):
        if file.is_file() and not any(part in file.parents for part in parts(place)):
            assert is_whole(file), f"{file} is not whole"
    if job.target and (place / job.target).exists():
        finished(job, place, is_done=True) if not parts(place) else None


def is_whole(file: Path) -> bool:
    content = file.read_bytes()
    match file.suffix:
        case ".json":
            return bool(json.loads(content))
        case ".jsonl":  # the next run cuts off a part of a line at the end
            return all(json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n"))
        case ".safetensors":
            return bool(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
        case ".png":
            return content.endswith(b"IEND\xaeB`\x82")
        case ".html":
            return content.rstrip().endswith(b"</html>")
    return bool(content)


def parts(place: Path) -> list[Path]:
    """Returns the temporary directories that a writer has left."""
    return [each for each in place.rglob(".*.jlade-*") if each.is_dir()]


def command(line: str) -> Callable[[Path], int]:
    """Returns a run of a command on a directory, `{place}` in its line; the model lies in `{top}`."""
    words = line.split()

    def run(place: Path) -> int:
        if words[0] == "convert" and (place / "new").exists():
            return 0  # the command would say so
        return cli.main([word.format(place=place, top=place.parent.parent) for word in words])

    return run


def digests(directory: Path, pattern: str = "*") -> dict[str, str]:
    """Returns a digest of each file below a directory."""
    files = (each for each in sorted(directory.rglob(pattern)) if each.is_file())
    return {str(each.relative_to(directory)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def converted(place: Path) -> Any:
    """Returns digests of a checkpoint's files. It must be read."""
    _, tokenizer = jlade.load(place / "new", "auto")
    assert tokenizer is not None
    return digests(place / "new")


def benched(place: Path) -> Any:
    """Returns the results of `jlade bench` without times, its pools, and the names of its files."""
    results = [dataclasses.asdict(result) for result in runs.read(place / "out" / "run.jsonl").results]
    for result in results:
        for answer in result["answers"]:
            answer |= dict.fromkeys(name for name in answer if name.endswith("seconds"))
    return results, digests(place / "out" / "run.pools"), sorted(digests(place / "out"))


def tuned(place: Path) -> Any:
    """Returns whether `jlade tune` has stored a setting and made a plot. Times decide which setting it is."""
    (file,) = (place / "cache" / "jlade" / "tuned").glob("*.json")
    stored = choice.Stored.read(file)
    return bool(stored.speeds), (place / "tune.svg").stat().st_size > 0


def save_pools(place: Path) -> int:
    for number in range(SAVES):
        jlade.save_pool(NGramPool.of(jnp.full((2000, 4, 5), number, jnp.int32), SAVES), place / "pool.safetensors")
    return 0


def saved_pool(place: Path) -> Any:
    (number,) = set(np.asarray(jlade.load_pool(place / "pool.safetensors").ngrams).flat)
    return int(number) if number == SAVES - 1 else "an earlier one"


SAVES = 20
MODEL = "--model {top}/model"
SHORT = f"{MODEL} --max-new-tokens 8 --lookahead tree=7"
JOBS = {
    "convert": Job(command("convert {top}/model {place}/new"), converted, "new"),
    "convert-hf": Job(command("convert {top}/model {place}/new --to hf"), converted, "new"),
    "generate": Job(
        command(f"generate {{top}}/prompts.txt --lines {SHORT} --output {{place}}/a.jsonl"),
        lambda place: digests(place, "a.jsonl"),
    ),
    "records": Job(
        command(f"generate {{top}}/records.jsonl --batch-size 2 {SHORT} --output {{place}}/a.jsonl"),
        lambda place: digests(place, "a.jsonl"),
    ),
    "bench": Job(
        command(f"bench --methods plain 4,4,3:warm --limit 2 --max-new-tokens 6 {MODEL} --output {{place}}/out"),
        benched,
    ),
    "tune": Job(command(f"tune --settings tree=7 --max-new-tokens 16 {MODEL} --plot {{place}}/tune.svg"), tuned),
    "pool": Job(save_pools, saved_pool),
}

if __name__ == "__main__":
    main()
