"""Hostile files of every format end in an error that names them, or are read; and inputs that once did neither."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import jlade
from jlade.cli import main
from jlade.conversion import load_hf, tokenizer_files
from jlade.conversion.hf_config import read_config
from jlade.generation import chat_template, text
from tests import hostile
from tests.conversion.hf_files import write_checkpoint

# Changed files of each format; `tests/stress/fuzz.py` reads thousands.
EXAMPLES = {
    "safetensors": 100,
    "index": 60,
    "config": 150,
    "tokenizer": 150,
    "chat tokenizer": 10,
    "chat template": 50,
    "gguf": 90,
    "own": 60,
    "pool": 60,
    "corpus": 100,
    "settings": 150,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_changed_file_is_refused_or_read(name, tmp_path):
    form = hostile.FORMATS[name]
    form.write(tmp_path)
    expected = form.read(tmp_path)

    @settings(max_examples=EXAMPLES[name], database=None, suppress_health_check=list(HealthCheck))
    @given(form.inputs(tmp_path))
    def read(change):
        hostile.outcome(form, tmp_path, expected, *change)

    read()


def outcome(name, directory, file, content):
    form = hostile.FORMATS[name]
    form.write(directory)
    return hostile.outcome(form, directory, None, file, content)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 2**31 - 1},  # a list of as many names
        {"model_type": "mixtral", "num_local_experts": 2**31 - 1},
        {"rope_theta": 10**400},  # no float
        {"rope_theta": 1e39},  # infinite in float32
        {"rms_norm_eps": 5e-324},  # 0 in float32
        {"vocab_size": 2**31},
    ],
    ids=str,
)
def test_configurations_that_made_no_clear_error(change, tmp_path):
    content = hostile.SMALL | {"model_type": "llama"} | change
    assert outcome("config", tmp_path, "config.json", json.dumps(content).encode()) == "refused"


def changed_tokenizer(**changes):
    return json.dumps(json.loads(hostile.tokenizer_json("bytes")) | changes).encode()


TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [TEN] * 12}},  # "a" becomes a terabyte
        {"decoder": {"type": "Replace", "pattern": {"Regex": "a"}, "content": " "}},  # a KeyError
        {"model": {"type": "BPE", "vocab": {"b": 0}, "merges": [], "unk_token": "<s>"}, "added_tokens": []},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tokenizers_that_made_no_clear_error(change, tmp_path):
    assert outcome("tokenizer", tmp_path, "tokenizer.json", changed_tokenizer(**change)) == "refused"


def test_a_panic_of_the_library_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(changed_tokenizer(pre_tokenizer=SLOW))
    tokenizer = tokenizer_files.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="tokenizer cannot encode the text: Onig"):
        text.encode(tokenizer, "a" * 40 + "b")


def test_a_tokenizer_neither_pads_nor_cuts_a_prompt(tmp_path):
    padding = json.loads(hostile.tokenizer_json("bytes"))["padding"] | {"strategy": {"Fixed": 10**12}}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_bytes(changed_tokenizer(padding=padding, truncation=cut))
    tokenizer = tokenizer_files.load_tokenizer(tmp_path)
    assert len(text.encode(tokenizer, "ab ab ab")) == 6
    assert text.pad_id(tokenizer) == 0


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("choice.json", {"step_times": {"1": "0.1"}, "device": ["CPU"]}),
        ("choice.json", {"step_times": {"1": None}}),
        ("choice.json", {"trials": [{"lookahead": {}, "speed": "fast"}]}),
        ("choice.json", {"prompts": float("inf")}),
        ("learned.json", {"ratios": [-1e3] * 3}),
        ("learned.json", {"ratios": [1e300, 1e-300, 1.0]}),
        ("learned.json", {"scale": float("nan")}),
        ("choice.json", None),
    ],
    ids=str,
)
def test_settings_that_made_an_error_are_ignored(file, change, tmp_path):
    hostile.FORMATS["settings"].write(tmp_path)
    content = b"[" * 10**5
    if change is not None:
        content = json.dumps(json.loads((tmp_path / file).read_bytes()) | change).encode()
    assert hostile.outcome(hostile.FORMATS["settings"], tmp_path, None, file, content) in ("refused", "read")


def test_arrays_that_do_not_make_a_corpus_are_refused(tmp_path):
    path = tmp_path / "corpus"
    jlade.save_corpus(jlade.Corpus([[1, 2, 3]]), path)
    for name, array in {
        "order": np.zeros((16, 63), np.int32),
        "keys": np.zeros((16, 8), np.float32),
        "known": np.array([-(2**31), 2, 3], np.int32),
    }.items():
        kept = (path / f"{name}.npy").read_bytes()
        np.save(path / f"{name}.npy", array)
        with pytest.raises(ValueError, match=r"corpus holds no corpus: its arrays are|it has the token"):
            jlade.load_corpus(path)
        (path / f"{name}.npy").write_bytes(kept)
    content = (path / "order.npy").read_bytes()
    (path / "order.npy").write_bytes(content.replace(b")", b"(", 1))  # a TokenError of Python's parser
    with pytest.raises(ValueError, match=r"written by jlade\.save_corpus"):
        jlade.load_corpus(path)


def test_names_that_lead_out_of_a_checkpoint_are_refused(tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    directory = tmp_path / "model"
    directory.mkdir()
    hostile.FORMATS["chat tokenizer"].write(directory)
    for change in ({"vocab_file": str(tmp_path / "secret.json")}, {"fast_tokenizer_files": ["../secret.json"]}):
        (directory / "tokenizer_config.json").write_text(json.dumps(change))
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: .* names '.*secret\.json'; accepted are files"):
            chat_template.load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"init_inputs": ["../secret.json"]}))
    with pytest.raises(ValueError, match="init_inputs must be empty"):
        chat_template.load_tokenizer(directory)


def test_the_links_of_the_hub_s_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    hostile.FORMATS["index"].write(blobs)
    for i, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{i:040}")
        (snapshot / file.name).symlink_to(pathlib.Path("../../blobs") / f"{i:040}")
    load_hf(snapshot)


def test_the_command_reports_one_line(tmp_path, capsys):
    shutil.copy(hostile.__file__, tmp_path / "model.gguf")
    _, config = tmp_path / "model.gguf", write_checkpoint(tmp_path, num_hidden_layers=2**31 - 1)
    for model in (tmp_path / "model.gguf", config):
        with pytest.raises(SystemExit):
            main(["inspect", str(model)])
        error = capsys.readouterr().err
        assert error.startswith("jlade inspect: error: ")
        assert str(model) in error
        assert error.count("\n") == 1
    with pytest.raises(ValueError, match="num_hidden_layers must be up to 4096"):
        read_config(config)
