"""Broken directories give an error that names the file. `tests/test_hostile.py` has the contents of files."""

import json
import os
import shutil
import sys

import pytest

from jlade import conversion
from jlade.conversion import load_hf, save_hf
from tests import hostile
from tests.conversion.hf_files import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*ignored unknown keys")


@pytest.fixture
def directory(tmp_path):
    """A checkpoint in two files with an index."""
    hostile.FORMATS["index"].write(tmp_path)
    return tmp_path


def test_directories_and_dangling_links_in_place_of_files(directory):
    for file in ("config.json", "generation_config.json", "model.safetensors.index.json", "first.safetensors"):
        kept = (directory / file).read_bytes()
        (directory / file).unlink()
        (directory / file).mkdir()
        with pytest.raises(ValueError, match=file):
            load_hf(directory)
        (directory / file).rmdir()
        (directory / file).symlink_to(directory / "nowhere")
        if file.startswith(("first", "config")):
            with pytest.raises(ValueError, match=file):
                load_hf(directory)
        (directory / file).unlink()
        (directory / file).write_bytes(kept)
    load_hf(directory)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in directories")
def test_pipes_and_long_files_in_place_of_files(directory):
    for file in ("config.json", "model.safetensors.index.json", "first.safetensors"):
        kept = (directory / file).read_bytes()
        (directory / file).unlink()
        os.mkfifo(directory / file)  # to open it would wait for a writer
        with pytest.raises(ValueError, match=f"{file} is neither a file nor a link to one"):
            load_hf(directory)
        (directory / file).unlink()
        (directory / file).write_bytes(kept)
    with open(directory / "config.json", "r+b") as stream:
        stream.truncate(2**40)
    with pytest.raises(ValueError, match=r"config\.json has 1099511627776 bytes; accepted are 33554432"):
        load_hf(directory)


def test_a_tensor_in_two_files_is_refused(directory):
    shutil.copy(directory / "first.safetensors", directory / "third.safetensors")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first = min(weight_map)
    index.write_text(json.dumps({"weight_map": weight_map | {first: "third.safetensors"}}))
    with pytest.raises(ValueError, match="both have the tensor"):
        load_hf(directory)


def test_a_target_below_a_file_leaves_nothing(tmp_path):
    params = load_hf(write_checkpoint(tmp_path), "float32")
    (tmp_path / "file").write_text("not a directory")
    for save in (save_hf, conversion.save):
        with pytest.raises((ValueError, OSError)):
            save(params, tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "file", "model.safetensors"]
    assert (tmp_path / "file").read_text() == "not a directory"
