"""Files and directories that appear whole or not at all."""

import os
import stat
import subprocess
import sys

import pytest

from jlade.files import append_line, written_whole


def write_file(path):
    path.write_text("new")


def write_directory(path):
    path.mkdir()
    (path / "part").write_text("new")


def content(path):
    return {file.name: file.read_text() for file in path.iterdir()} if path.is_dir() else path.read_text()


@pytest.mark.parametrize(("write", "expected"), [(write_file, "new"), (write_directory, {"part": "new"})])
def test_a_file_or_directory_appears_at_the_end(write, expected, tmp_path):
    target = tmp_path / "missing" / "target"
    with written_whole(target) as path:
        assert not path.exists()
        write(path)
        assert not target.exists()
    assert content(target) == expected
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("write", [write_file, write_directory])
def test_permissions_are_those_of_ordinary_files(write, tmp_path):
    write(tmp_path / "ordinary")
    with written_whole(tmp_path / "target") as path:
        write(path)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ordinary", "target")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize(
    "make", [write_file, write_directory, lambda path: path.symlink_to("nowhere")], ids=["file", "directory", "link"]
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_existing_target_is_refused(when, make, tmp_path):
    target = tmp_path / "target"

    def write():
        with written_whole(target) as path:
            assert when == "meanwhile"
            path.write_text("newer")
            make(target)

    if when == "before":
        make(target)
    with pytest.raises(ValueError, match=r"path must not exist yet, got '.*target'"):
        write()
    assert target.is_symlink() or content(target) in ("new", {"part": "new"})
    assert list(tmp_path.iterdir()) == [target]


def test_replace_takes_the_place_of_a_file(tmp_path):
    target = tmp_path / "target"
    for text in ("first", "second"):
        with written_whole(target, replace=True) as path:
            path.write_text(text)
        assert target.read_text() == text
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("write", [write_file, write_directory])
@pytest.mark.parametrize("replace", [False, True])
def test_an_error_leaves_everything_as_it_was(replace, write, tmp_path):
    target = tmp_path / "target"
    if replace:
        target.write_text("old")

    def fail():
        with written_whole(target, replace=replace) as path:
            write(path)
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        fail()
    assert list(tmp_path.iterdir()) == ([target] if replace else [])
    assert not replace or target.read_text() == "old"


def test_concurrent_writers_never_meet(tmp_path):
    """The writer that ends last wins with `replace`, and is refused without it."""
    target = tmp_path / "target"
    with written_whole(target, replace=True) as first, written_whole(target, replace=True) as second:
        first.write_text("first")
        second.write_text("second")
    assert target.read_text() == "first"
    os.remove(target)

    def write_both():
        with written_whole(target) as first, written_whole(target) as second:
            first.write_text("first")
            second.write_text("second")

    with pytest.raises(ValueError, match="path must not exist yet"):
        write_both()
    assert target.read_text() == "second"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("is_in_use", [False, True])
def test_what_a_killed_writer_left_is_removed(is_in_use, tmp_path):
    """A writer that still runs keeps its directory, as does a directory of the user's own."""
    target, mine = tmp_path / "target", tmp_path / ".target.mine"
    mine.mkdir()
    script = (
        "import sys\nfrom jlade.files import written_whole\nwith written_whole(sys.argv[1]) as path:\n"
        "    path.write_text('half')\n    print(flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            writer.stdout.readline()
            if not is_in_use:
                writer.kill()
                writer.wait()
            (left,) = tmp_path.glob(".target.jlade-*")
            with written_whole(target) as path:
                path.write_text("new")
            assert left.exists() == is_in_use
        finally:
            writer.kill()
    assert target.read_text() == "new"
    assert mine.exists()


def test_writers_at_once_neither_lose_nor_tear_a_file(tmp_path):
    """Each of them also looks for what killed ones have left, and must not take the others' files for that."""
    target, size = tmp_path / "target", 50_000
    script = (
        "import sys\nfrom jlade.files import written_whole\nfor _ in range(150):\n"
        "    with written_whole(sys.argv[1], replace=True, sync=False) as path:\n"
        f"        path.write_text(sys.argv[2] * {size})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(target), letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        if target.exists():
            assert target.read_text() in ("a" * size, "b" * size)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [target]


WITH_SMALL_FILES = """
import pathlib, resource, sys, pytest
from jlade.files import append_line, written_whole
directory = pathlib.Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
"""


def run_with_small_files(code, directory):
    """Runs code in a process that cannot write beyond 1000 bytes of a file, as on a full disk."""
    pytest.importorskip("resource", reason="Windows has no such limits")
    subprocess.run([sys.executable, "-c", WITH_SMALL_FILES + code, str(directory)], check=True)


def test_an_error_of_the_system_names_the_target(tmp_path):
    run_with_small_files(
        """
def write(file):
    with written_whole(directory / "target") as path:
        path.mkdir()
        (path / file).write_text("x" * 2000)

with pytest.raises(OSError, match=f"File too large: '{directory / 'target'}'"):
    write("part")
with pytest.raises(FileNotFoundError, match="'/no/where'"):
    write("/no/where")
""",
        tmp_path,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    file = tmp_path / "lines"
    for line in ("é" * 400, "second"):
        append_line(file, line)
    run_with_small_files(
        """
with pytest.raises(OSError, match=f"File too large: '{directory / 'lines'}'"):
    append_line(directory / "lines", "x" * 500)
""",
        tmp_path,
    )
    append_line(file, "third")
    assert file.read_text(encoding="utf-8").split("\n") == ["é" * 400, "second", "third", ""]
