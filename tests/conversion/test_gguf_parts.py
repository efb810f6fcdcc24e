"""GGUF models in several files, as llama-gguf-split writes them, and the ways to name a GGUF file."""

import shutil

import numpy as np
import pytest

import jlade
from jlade.conversion import load_gguf, location
from jlade.conversion.gguf import read
from tests.conversion.gguf_files import write
from tests.conversion.hf_files import assert_equal, assert_placed, write_checkpoint

IN_PARTS = {"split_max_tensors": 8}  # the 21 tensors of a model make 3 files
METADATA_FIRST = IN_PARTS | {"small_first_shard": True}  # and 4 with one for the metadata alone


@pytest.fixture
def whole(tmp_path):
    return load_gguf(write(tmp_path / "whole.gguf", kind="Q8_0"), "float32")


def write_parts(directory, split=IN_PARTS, **options):
    """Writes the files of a model of the same weights, and returns their paths."""
    write(directory / "model.gguf", kind="Q8_0", split=split, **options)
    return sorted(directory.glob("model-*.gguf"))


@pytest.mark.parametrize(("split", "number"), [(IN_PARTS, 3), (METADATA_FIRST, 4)])
def test_all_parts_are_read_whichever_is_named(split, number, whole, tmp_path):
    parts = write_parts(tmp_path, split)
    assert [part.name for part in parts] == [f"model-{i + 1:05}-of-{number:05}.gguf" for i in range(number)]
    for part in parts:
        assert_equal(jlade.load(part, "float32")[0], whole)


def test_parts_on_a_mesh(whole, tmp_path):
    mesh = jlade.make_mesh(model=4)
    assert_placed(load_gguf(write_parts(tmp_path)[1], "float32", mesh=mesh), whole, mesh)


def test_a_change_of_any_part_is_noticed(tmp_path):
    parts = write_parts(tmp_path, METADATA_FIRST)
    headers = [read(parts[0])]
    assert read(parts[0]) is headers[0]
    for i, part in enumerate(parts):
        part.write_bytes(part.read_bytes() + bytes(i + 1))
        headers.append(read(parts[0]))
    assert len(set(map(id, headers))) == 1 + len(parts)


def test_a_part_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch):
    parts = write_parts(tmp_path)
    header = read(parts[0])
    monkeypatch.setattr("jlade.conversion.gguf.read", lambda path: header)
    parts[2].write_bytes(parts[2].read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.gguf changed while it was read"):
        load_gguf(parts[0])


def without_first(parts):
    parts[0].unlink()
    return parts[1], r"model-00001-of-00003\.gguf is missing: model-00002-of-00003\.gguf is one of 3 files of a model"


def renamed(parts):
    file = parts[1].rename(parts[1].with_name("second.gguf"))
    return file, r"second\.gguf is one of 3 files of a model.* names, which must end with -00001-of-00003\.gguf"


def in_another_order(parts):
    shutil.copy(parts[1], parts[2])
    return parts[0], r"model-00003-of-00003\.gguf: split\.no is 1 and split\.count is 3; its name implies 2 and 3"


def truncated(parts):
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    return parts[0], r"model-00003-of-00003\.gguf is truncated or not a GGUF file"


def of_another_type(parts):
    tensors = {"output_norm.weight": np.ones(7, np.float32)}
    write_parts(parts[0].parent, tensors=tensors)
    return parts[0], r"model-00003-of-00003\.gguf: output_norm\.weight has shape \(7,\); the metadata imply \(64,\)"


@pytest.mark.parametrize("change", [without_first, renamed, in_another_order, truncated, of_another_type])
def test_parts_that_are_refused(change, tmp_path):
    file, message = change(write_parts(tmp_path))
    with pytest.raises(ValueError, match=message):
        jlade.load(file)


def test_parts_of_several_models_are_refused(tmp_path):
    parts = write_parts(tmp_path)
    (tmp_path / "other").mkdir()
    more = {"blk.1.extra.weight": np.ones(2, np.float32)}
    shutil.copy(write_parts(tmp_path / "other", tensors=more)[0], parts[0])
    with pytest.raises(ValueError, match=r"00001-of-00003\.gguf: split\.tensors\.count is 22, and its 3 files have 21"):
        jlade.load(parts[0])


def test_a_whole_file_may_have_the_name_of_a_part(whole, tmp_path):
    assert_equal(load_gguf(write(tmp_path / "whole-00001-of-00002.gguf", kind="Q8_0"), "float32"), whole)


@pytest.mark.parametrize("name", ["model.GGUF", "model", "model.bin", "sha256-0123abcd"])
def test_a_file_is_known_by_its_suffix_or_its_first_bytes(name, whole, tmp_path):
    file = (tmp_path / "whole.gguf").rename(tmp_path / name)
    assert_equal(jlade.load(file, "float32")[0], whole)


def test_a_directory_that_holds_one_model_is_that_model(whole, tmp_path):
    for directory in (tmp_path / "one", tmp_path / "parts"):
        directory.mkdir()
    (tmp_path / "whole.gguf").rename(tmp_path / "one" / "whole.GGUF")
    write_parts(tmp_path / "parts")
    for directory in (tmp_path / "one", tmp_path / "parts"):
        assert_equal(jlade.load(directory, "float32")[0], whole)
        assert location.is_local(directory)


def test_a_directory_that_holds_several_models_is_refused(whole, tmp_path):
    write_parts(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"no config\.json and 2 GGUF models; name one of them: model-00001-of-00003\.gguf, whole\.gguf$",
    ):
        jlade.load(tmp_path)


def test_a_directory_with_config_json_is_not_read_as_a_gguf_model(whole, tmp_path):
    write_checkpoint(tmp_path)
    assert jlade.load(tmp_path)[0].config != whole.config
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has weights only in whole\.gguf: give the path of that file$"):
        jlade.load(tmp_path)
