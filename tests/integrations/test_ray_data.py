"""Files of records on a Ray cluster: the lines of the command, whoever dies meanwhile."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import jlade
from jlade import cli
from jlade.integrations.ray import data, serve
from jlade.integrations.ray.data import Completer
from jlade.server import records
from tests.integrations import ray_cluster
from tests.processes import ROOT

pytestmark = ray_cluster.WARNINGS

SETTING = {"rows": 2, "lookahead": "tree=7", "capacity": 128}
PROMPTS = [f"def f{number}(" for number in range(12)]


def write(path, job):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in job), encoding="utf-8")
    return str(path)


def split(files, output, size):
    return data._number(files, [data._spans(file, file, size) for file in files], output)


def complete(completer, parts):
    """Returns the rows of one call, as Ray makes it."""
    rows = [dataclasses.asdict(part) for part in parts]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    done = asyncio.run(completer(columns))
    return [dict(zip(done, row, strict=True)) for row in zip(*done.values(), strict=True)]


def lines_of(directory):
    return [json.loads(line) for path in sorted(directory.iterdir()) for line in path.read_text().splitlines()]


def without_chance(line):
    """Returns a line without what depends on the time, or on what else runs."""
    if "response" not in line:
        return {name: value for name, value in line.items() if name not in ("steps", "compression")}
    body = {name: value for name, value in line["response"]["body"].items() if name not in ("id", "created")}
    return line | {"response": {"status_code": line["response"]["status_code"], "body": body}}


@pytest.fixture(scope="module")
def completer(small_demo):
    return Completer(str(small_demo), **SETTING, seed=9, max_new_tokens=6)


@pytest.fixture(scope="module")
def texts(small_demo):
    """Prompt -> what `jlade.generate` makes of it alone, plainly."""
    params, tokenizer = jlade.load(small_demo, "float32")
    out = jlade.generate(params, PROMPTS, tokenizer=tokenizer, lookahead=None, max_new_tokens=6)
    return dict(zip(PROMPTS, out.text, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_parts_have_the_records_of_the_files(size, end, tmp_path):
    texts = ["\ufeff{1}|  |{2}||é{3}|{4}|", "|{5}|\u00a0", "{6}|{7}"]
    files = []
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / name).write_bytes(text.replace("|", end).encode())
        files.append(str(tmp_path / name))
    parts = split(files, tmp_path / "out", size)
    whole = (records.parse(file, pathlib.Path(file).read_bytes().decode("utf-8-sig")) for file in files)
    assert [record for part in parts for record in part.records()] == list(itertools.chain(*whole))
    assert [part.number for part in parts] == list(np.cumsum([0, *(len(part.records()) for part in parts)])[:-1])
    assert all(0 < len(part.records()) <= size for part in parts)
    assert sorted(part.output for part in parts) == [part.output for part in parts], "names in the order of the records"


def test_each_line_is_that_of_the_command(completer, texts, small_demo, tmp_path, capsys):
    of_batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": PROMPTS[1]}}
    files = [
        write(tmp_path / "a.jsonl", [{"prompt": PROMPTS[0]}, of_batch, of_batch, {"prompt": PROMPTS[2], "n": 2}]),
        write(tmp_path / "b.jsonl", [{"prompt": PROMPTS[3], "temperature": 1}, {"prompt": PROMPTS[4], "logprobs": 0}]),
    ]
    rows = complete(completer, split(files, tmp_path / "out", 3))
    assert [row["kept"] for row in rows] == [False] * 3
    assert ([row["lines"] for row in rows], [row["refused"] for row in rows]) == ([2, 1, 2], [0, 1, 0])
    lines = lines_of(tmp_path / "out")
    assert [lines[place].get("text") for place in (0, 4)] == [texts[PROMPTS[0]], texts[PROMPTS[4]]]
    assert lines[1]["response"]["body"]["choices"][0]["text"] == texts[PROMPTS[1]]

    options = ["--model", str(small_demo), "--lookahead", "tree=7", "--seed", "9", "--max-new-tokens", "6"]
    output = tmp_path / "command.jsonl"
    arguments = ["generate", *files, *options, "--batch-size", "2", "--skip-invalid", "--output", str(output)]
    assert cli.main(arguments) == 0
    capsys.readouterr()
    expected = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[4].pop("logprobs") == pytest.approx(expected[4].pop("logprobs"), abs=1e-4)
    assert list(map(without_chance, lines)) == list(map(without_chance, expected))


def test_a_part_that_is_there_is_kept_if_it_is_the_same(completer, tmp_path, monkeypatch):
    job = [{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1]}]
    parts = split([write(tmp_path / "a.jsonl", job)], tmp_path / "out", 2)
    complete(completer, parts)
    (path,) = (tmp_path / "out").iterdir()
    content, time = path.read_bytes(), path.stat().st_mtime_ns
    monkeypatch.setattr(completer._engine, "generate", None)
    assert complete(completer, parts) == [{"output": str(path), "lines": 2, "refused": 0, "kept": True}]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (content, time)
    path.write_bytes(content.splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="has 1 lines for 2 records; remove it"):
        complete(completer, parts)
    path.write_bytes(content)
    monkeypatch.setitem(completer._given, "max_new_tokens", 7)
    with pytest.raises(ValueError, match=r"jsonl:1 is not the result of this job's record with these options"):
        complete(completer, parts)
    assert path.read_bytes() == content


def test_wrong_files_are_refused_before_anything_begins(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": "a"}] * 3)
    with pytest.raises(ValueError, match="files must be at least one"):
        split([], tmp_path / "out", 2)
    with pytest.raises(ValueError, match="nowhere cannot be read: No such file"):
        data._spans("nowhere", "nowhere", 2)
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "a"}\n\xff\n')
    with pytest.raises(ValueError, match="b:2 is not UTF-8"):
        data._spans("b", str(tmp_path / "b.jsonl"), 2)
    (tmp_path / "b.jsonl").write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="b is empty"):
        data._spans("b", str(tmp_path / "b.jsonl"), 2)
    (tmp_path / "out").mkdir()
    for part in split([file], tmp_path / "out", 2):
        pathlib.Path(part.output).touch()
    assert len(split([file], tmp_path / "out", 2)) == 2
    with pytest.raises(ValueError, match=r"has 000000000000-2.jsonl, which is no part of this job"):
        split([file], tmp_path / "out", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"seed": -1}, "seed must be"),
        ({"lookahead": "wide"}, "a setting is .*; got 'wide'"),
        ({"mesh": {"model": 1000}}, "1000"),
        ({"rows": 0}, "max_sequences must be"),
    ],
)
def test_wrong_options_are_refused(options, message, small_demo):
    with pytest.raises(ValueError, match=message):
        Completer(str(small_demo), **options)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'jlade\[ray\]'"):
        data.parts(["a.jsonl"], tmp_path / "out")
    with pytest.raises(ImportError, match=r"pip install 'jlade\[ray\]'"):
        serve.application({"model": "m"})


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.running() as ray:
        yield ray


def of_workers(parts, kind, small_demo, ray):
    """Returns the rows that two workers make of the parts."""
    done = parts.map_batches(
        kind,
        batch_size=1,
        fn_constructor_args=[str(small_demo)],
        fn_constructor_kwargs=SETTING | {"rows": 1, "max_new_tokens": 6},
        compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2),
    )
    return list(done.iter_rows())


@pytest.mark.slow
def test_a_part_is_repeated_after_its_worker_was_killed_or_failed(cluster, small_demo, texts, tmp_path, monkeypatch):
    died, failed = tmp_path / "died", tmp_path / "failed"

    class Unlucky(Completer):
        """With the texts of a part in its hands, but no file yet, it is killed, and with another part it fails."""

        def _lines(self, job, first):
            lines = super()._lines(job, first)
            with contextlib.suppress(FileExistsError):
                if first == 4:
                    died.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                if first == 8:
                    failed.touch(exist_ok=False)
                    raise MemoryError("no memory, once")
            return lines

    context = cluster.data.DataContext.get_current()
    monkeypatch.setattr(context, "retried_map_errors", True)
    monkeypatch.setattr(context, "max_map_retries", 1)
    file = write(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    rows = of_workers(data.parts([file], tmp_path / "out", size=2), Unlucky, small_demo, cluster)
    assert died.exists()
    assert failed.exists()
    files = sorted((tmp_path / "out").iterdir())
    assert sorted(row["output"] for row in rows) == [str(path) for path in files], "each part comes once"
    lines = lines_of(tmp_path / "out")
    assert [line["record"]["prompt"] for line in lines] == PROMPTS, "nothing lost, nothing twice, in order"
    assert [line["text"] for line in lines] == [texts[prompt] for prompt in PROMPTS]


@pytest.mark.slow
def test_a_job_goes_on_after_its_driver_was_killed(cluster, small_demo, texts, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in PROMPTS * 2])
    options = ["--output", str(tmp_path / "out"), "--model", str(small_demo), "--size", "2"]
    options += ["--rows", "1", "--lookahead", "tree=7", "--max-new-tokens", "6"]
    command = [sys.executable, ROOT / "examples" / "ray_batch.py", file, *options]
    command += ["--address", cluster.get_runtime_context().gcs_address]
    driver = subprocess.Popen([*command, "--workers", "2"], stdout=subprocess.PIPE, text=True)
    acknowledged = pathlib.Path(next(row["output"] for line in driver.stdout if (row := row_of(line))))
    driver.kill()
    left = [row["output"] for line in driver.stdout if (row := row_of(line))]
    driver.wait()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in map(pathlib.Path, [acknowledged, *left])}
    assert len(before) < 12, "it was killed in the middle"
    done = subprocess.run([*command, "--workers", "1"], stdout=subprocess.PIPE, text=True, check=True)
    rows = [row for line in done.stdout.splitlines() if (row := row_of(line))]
    assert len({row["output"] for row in rows}) == len(rows) == 12
    assert {str(path) for path in before} <= {row["output"] for row in rows if row["kept"]}
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    lines = lines_of(tmp_path / "out")
    assert [line["record"]["prompt"] for line in lines] == PROMPTS * 2
    assert [line["text"] for line in lines] == [texts[prompt] for prompt in PROMPTS * 2]


def row_of(line):
    """Returns the row that a line of the driver acknowledges, None for a line of Ray's."""
    return json.loads(line) if line.startswith('{"output"') else None


@pytest.mark.slow
def test_the_errors_of_files_come_from_the_workers(cluster, tmp_path):
    with pytest.raises(ValueError, match="nowhere cannot be read: No such file"):
        data.parts([str(tmp_path / "nowhere")], tmp_path / "out")
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        data.parts([str(tmp_path / "nowhere")], tmp_path / "out", size=0)
