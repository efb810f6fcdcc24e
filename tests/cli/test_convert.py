import dataclasses
import functools
import json
import re
import shutil
import types
import warnings

import jax
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

import jlade
from jlade import conversion
from jlade.cli import convert
from jlade.cli.arguments import DEMO
from jlade.cli.chat import Conversation
from jlade.conversion import weight_files
from jlade.conversion.checkpoint import Checkpoint
from jlade.conversion.tensors import named_arrays
from tests.conversion.hf_files import CONFIGS, random_params, stored, write_checkpoint
from tests.hub import in_hub
from tests.tiny import slow

SIZES = {  # of `random_params`
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "layer_types": None,
}
FULL = OSError(28, "No space left on device")


@pytest.fixture
def run(run):
    """Returns a function that converts and returns stdout and stderr."""
    return functools.partial(run, "convert")


@pytest.fixture
def refused(refused):
    """Returns a function that expects a conversion to fail and returns the message."""
    return lambda *arguments: refused(["convert", *arguments]).removeprefix("jlade convert: error: ")


@pytest.mark.slow
def test_a_round_trip_keeps_every_byte(run, tmp_path):
    own, back = tmp_path / "own", tmp_path / "back"
    for source, target, *to in ((DEMO, own), (own, back, "--to", "hf")):
        captured = run(source, target, *to)
        assert captured.out == f"{target}: 5,475,584 parameters, 11.0 MB of bfloat16\n"
        assert captured.err == "", "no bar without a terminal"
    assert stored(back) == stored(DEMO)
    texts = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    configs = {"config.json", "generation_config.json"}
    assert {path.name for path in own.iterdir()} == {"jlade.safetensors", *texts, *configs}
    assert {path.name for path in back.iterdir()} == {"model.safetensors", *texts, *configs}
    for directory in (own, back):  # who may read the configuration may read all
        assert len({path.stat().st_mode for path in directory.iterdir()}) == 1
    for name in texts:
        assert (back / name).read_bytes() == (own / name).read_bytes() == (DEMO / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"own", "back"}


METADATA = {
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "added_tokens.json": '{"<|end|>": 11}',
    "generation_config.json": '{"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2, 3], "do_sample": true,'
    '  "temperature": 0.6, "top_k": 20, "max_new_tokens": 64, "_from_model_config": true}',
    "merges.txt": "#version: 0.2\nĠ a\n",
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer.model": "\x00\x01",
    "tokenizer_config.json": '{"chat_template": "{{ messages }}", "add_bos_token": true}',
    "vocab.json": '{"Ġ": 0}',
}


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", slow("unsloth-qwen3-0.6b-transformers-5")])
@pytest.mark.parametrize("dtype", ["auto", slow("float16")])
@pytest.mark.filterwarnings("ignore:.*ignored unknown keys")
def test_a_round_trip_keeps_the_metadata(dtype, name, run, tmp_path):
    """Only the dtype in config.json changes: nothing is lost or added, whether jlade knows it or not."""
    source, own, back = (tmp_path / name for name in ("source", "own", "back"))
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | SIZES
    params = random_params({"qk_norm": config["model_type"] == "qwen3", "tie_embeddings": True})
    conversion.save_hf(params, source)
    (source / "additional_chat_templates").mkdir()
    for file, content in (METADATA | {"config.json": json.dumps(config)}).items():
        (source / file).write_text(content)
    (source / "modeling.py").write_text("import os")
    run(source, own, "--dtype", dtype)
    run(own, back, "--to", "hf")
    dtype_key = "dtype" if "dtype" in config else "torch_dtype"
    for directory, weights in ((own, "jlade.safetensors"), (back, "model.safetensors")):
        written = json.loads((directory / "config.json").read_text())
        assert written == config | {dtype_key: "bfloat16" if dtype == "auto" else dtype}
        assert {file: (directory / file).read_text() for file in METADATA} == METADATA
        names = {file.split("/")[0] for file in METADATA} | {"config.json", weights}
        assert {path.name for path in directory.iterdir()} == names


def test_a_round_trip_adds_no_generation_config(run, tmp_path):
    """Without it transformers reads the special tokens from config.json."""
    for source, target, to in ((tmp_path / "source", "own", "jlade"), (tmp_path / "own", "back", "hf")):
        if to == "jlade":
            source.mkdir()
            write_checkpoint(source)
        run(source, tmp_path / target, "--to", to)
        assert not (tmp_path / target / "generation_config.json").exists()
        assert (tmp_path / target / "config.json").exists()


@pytest.mark.slow
def test_a_converted_checkpoint_generates_and_chats_as_before(run, small_demo, demo, tmp_path):
    run(small_demo, tmp_path / "own")
    params, tokenizer = jlade.load(tmp_path / "own")
    texts = [
        jlade.generate(model[0], "import os\n", tokenizer=model[1], lookahead=None, max_new_tokens=12).text
        for model in (demo, (params, tokenizer))
    ]
    assert texts[0] == texts[1] != ("",)
    prompts = [Conversation(params, path, None, None).prompt("import os") for path in (small_demo, tmp_path / "own")]
    assert prompts[0] == prompts[1]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "jlade"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_dtype(dtype, to, run, tmp_path):
    run(DEMO, tmp_path / "new", "--dtype", dtype, "--to", to)
    config = json.loads((DEMO / "config.json").read_text()) | {"dtype": dtype}
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == config
    params, _ = jlade.load(tmp_path / "new", "auto")
    arrays = named_arrays(params)
    for name, array in load_file(DEMO / "model.safetensors").items():
        assert arrays[name].dtype == dtype
        np.testing.assert_array_equal(arrays[name], array.astype(dtype))


def test_a_terminal_shows_a_bar_of_the_bytes(run, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for source, target, to, sizes in (
        (DEMO, "own", "jlade", (11.0, 21.9)),
        (tmp_path / "own", "hf", "hf", (21.9, 21.9)),
    ):
        captured = run(source, tmp_path / target, "--to", to, "--dtype", "float32")
        assert captured.out.count("\n") == 1
        written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", captured.err)
        for name, size in zip(("reading", "writing"), sizes, strict=True):
            assert re.search(rf"0\.0/{size} MB +{name} ━+ 0:00:00 left: -:--:--", written)
            assert re.search(rf"{size}/{size} MB {name} ━+ 0:00:0\d left: 0:00:00 +[\d.]+ .?B/s", written)


def test_weights_are_read_onto_the_cpu_tensor_by_tensor(run, monkeypatch, tmp_path):
    load, calls = Checkpoint.load, []

    def recorded(checkpoint, options):
        assert options.sharding.device_set == {jax.devices("cpu")[0]}
        return load(checkpoint, dataclasses.replace(options, progress=calls.append))

    monkeypatch.setattr(Checkpoint, "load", recorded)
    run(DEMO, tmp_path / "new", "--to", "hf")
    tensors = load_file(DEMO / "model.safetensors").values()
    assert sorted(calls) == sorted(array.nbytes for array in tensors)


def test_ids_of_the_hub(run, refused, monkeypatch, tmp_path):
    in_hub(tmp_path, monkeypatch)
    run("someone/demo", tmp_path / "new", "--to", "hf", "--revision", "main")
    assert stored(tmp_path / "new") == stored(DEMO)
    assert "revision='main' is for ids of the Hub" in refused(DEMO, tmp_path / "other", "--revision", "main")


def test_an_existing_target_is_left_alone(refused, tmp_path):
    for target in (tmp_path / "directory", tmp_path / "file"):
        target.mkdir() if target.name == "directory" else target.write_text("mine")
        assert refused(DEMO, target) == f"{target} exists; DST must be a new directory\n"
    assert list((tmp_path / "directory").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "/no/where",
            "path must be a directory, a GGUF file, smollm2 or an id of the Hugging Face Hub .* got '/no/where'",
        ),
        (DEMO / "config.json", "path must be a directory, a GGUF file, smollm2 or an id .* got '.*/demo/config.json'"),
        (".", r"config\.json is missing"),
    ],
)
def test_a_source_that_is_no_checkpoint(source, message, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refused(source, tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_unknown_keys_are_named_once_and_strict_refuses_them(run, refused, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write_checkpoint(source, unheard_of=0, trainer="none")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        (warning,) = run(source, tmp_path / "new", "--to", "hf").err.splitlines()
    assert warning.startswith("jlade: warning: ")
    assert warning.endswith(": unheard_of, trainer")
    message = refused(source, tmp_path / "other", "--to", "hf", "--strict")
    assert message == f"{source / 'config.json'}: strict=True refuses unknown keys: unheard_of, trainer\n"


@pytest.mark.parametrize("to", ["hf", "jlade"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json"])
def test_a_full_disk_during_the_last_file_leaves_nothing(name, to, refused, monkeypatch, tmp_path):
    copyfile, seen = shutil.copyfile, []

    def fails(source, target):
        if source.name != name:
            return copyfile(source, target)
        seen.extend(path.name for path in target.parent.iterdir())
        target.write_text("half")
        raise FULL

    monkeypatch.setattr(shutil, "copyfile", fails)
    message = refused(DEMO, tmp_path / "new", "--to", to)
    assert message == f"[Errno 28] No space left on device: '{tmp_path / 'new'}'\n"
    assert "config.json" in seen, "the weights had been written"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["hf", "jlade"])
@pytest.mark.parametrize("error", [FULL, SafetensorError("I/O error: No space left on device (os error 28)")])
def test_a_full_disk_during_the_weights_leaves_nothing(error, to, refused, monkeypatch, tmp_path):
    def fails(arrays, path, **metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(weight_files, "save_file", fails)
    assert re.search(r"No space left .*: '.*/new'\n", refused(DEMO, tmp_path / "new", "--to", to))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_too_little_room_is_refused_before_reading(refused, run, monkeypatch, tmp_path):
    num_bytes = 5_475_584 * 2
    asked = []

    def disk_usage(path):
        asked.append(path)
        return types.SimpleNamespace(free=num_bytes)

    def load(*arguments):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    run(DEMO, tmp_path / "fits", "--to", "hf")
    monkeypatch.setattr(Checkpoint, "load", load)
    message = refused(DEMO, tmp_path / "a" / "new", "--dtype", "float32")
    assert message == f"{tmp_path / 'a' / 'new'} would take 21.9 MB, and {tmp_path} has 11.0 MB free\n"
    assert asked == [tmp_path, tmp_path]
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


def test_errors_of_the_system_are_messages(refused, monkeypatch, tmp_path):
    def fails(*arguments):
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr(convert, "read_headers", fails)
    assert refused(DEMO, tmp_path / "new") == "[Errno 13] Permission denied: '/secret'\n"
