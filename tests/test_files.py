"""Files and directories that appear whole or not at all."""

import os
import stat

import pytest

from jlade.files import written_whole


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
