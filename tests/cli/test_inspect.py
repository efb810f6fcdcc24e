import collections
import dataclasses
import datetime
import functools
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jlade import LookaheadConfig, conversion
from jlade.cli.arguments import DEMO
from jlade.config import PLAIN
from jlade.conversion.tensors import build_params, named_arrays
from jlade.conversion.weight_files import StoredTensor
from jlade.costs import choice, devices
from jlade.lookahead import names
from jlade.models.llama import quantize
from jlade.models.rotary import YarnScaling
from tests.conversion.hf_files import SHAPE, random_tensors, write_checkpoint
from tests.tiny import PAPER

QWEN = dataclasses.replace(
    SHAPE,
    qk_norm=True,
    qkv_bias=True,
    attention_output_bias=True,
    sliding_windows=(None, 7),
    rope_scaling=YarnScaling(4.0, 32.0, 1.0, 1.2, 16, truncate=False),
)


def write_own(directory, change=lambda params: params):
    params = change(build_params(QWEN, lambda name, shape: jax.device_put(np.ones(shape, np.float16))))
    conversion.save(params, directory)
    return params


@pytest.fixture
def inspect(printed):
    return functools.partial(printed, "inspect")


def test_facts_equal_those_of_the_loaded_model(inspect, small_demo, demo):
    params, _ = demo
    facts = json.loads(inspect(small_demo, "--json"))
    arrays = jax.tree.leaves(params)
    cache = params.decoder.init_cache(params, 1, params.config.max_positions)
    assert facts["parameters"] == sum(array.size for array in arrays)
    assert facts["memory"] == {
        "dtype": "float32",
        "kinds": [],
        "kv_dtype": None,
        "weights_bytes": sum(array.nbytes for array in arrays),
        "length": 2048,
        "batch_size": 1,
        "kv_cache_bytes": sum(array.nbytes for array in jax.tree.leaves(cache)),
        "total_bytes": sum(array.nbytes for array in (*arrays, *jax.tree.leaves(cache))),
    }
    row = facts["memory"]["kv_cache_bytes"] + 2048 * 4  # and its tokens, at least
    assert facts["engine"]["row_bytes"] > row
    assert facts["engine"]["sequences"] < devices.memory_of("cpu") / row
    tensors = load_file(small_demo / "model.safetensors").values()
    assert facts["files"] == {
        "count": 1,
        "bytes": (small_demo / "model.safetensors").stat().st_size,
        "tensor_bytes": {"bfloat16": sum(array.nbytes for array in tensors)},
    }
    assert facts["config"] == json.loads(json.dumps(dataclasses.asdict(params.config)))
    assert {name: facts[name] for name in ("path", "format", "family", "tokenizer", "chat_template")} == {
        "path": str(small_demo),
        "format": "huggingface",
        "family": "llama",
        "tokenizer": True,
        "chat_template": True,
    }
    assert facts["lookahead"] == names.name(PAPER)
    assert facts["device"] == jax.devices()[0].device_kind
    assert facts["sampling"] == {"temperature": 0.0}
    assert (facts["source"], facts["tuned"]) == ("estimated", [])
    assert len(facts) == 16


def test_length_batch_size_and_dtype_change_the_memory(inspect):
    memory = json.loads(inspect(DEMO, "--length", 100, "--batch-size", 3, "--dtype", "float16", "--json"))["memory"]
    assert memory["weights_bytes"] == 5_475_584 * 2
    keys = 6 * 3 * 4 * 100 * 32 * 2  # layers, batch, heads, length, head_dim, bytes
    assert memory["kv_cache_bytes"] == 2 * keys + 3 * 4  # keys and values, and each sequence's length
    assert (memory["length"], memory["batch_size"], memory["dtype"]) == (100, 3, "float16")
    assert json.loads(inspect(DEMO, "--dtype", "auto", "--json"))["memory"]["dtype"] == "bfloat16"


def test_no_weight_is_read(inspect, monkeypatch):
    def read(*arguments):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(StoredTensor, "read", read)
    assert "5,475,584" in inspect(DEMO)


def test_own_checkpoints(inspect, tmp_path):
    params = write_own(tmp_path / "own", quantize)
    facts = json.loads(inspect(tmp_path / "own", "--dtype", "auto", "--json"))
    arrays = named_arrays(params)
    size = sum(array.size for name, array in arrays.items() if not name.endswith("_scale"))
    files = [file for file in (tmp_path / "own").rglob("*") if file.is_file() and "config" not in file.name]
    assert (facts["format"], facts["family"], facts["parameters"]) == ("jlade", "qwen3", size)
    stored = collections.Counter()
    for array in arrays.values():
        stored[array.dtype.name] += array.nbytes
    assert facts["files"] == {
        "count": len(files),
        "bytes": sum(len(file.read_bytes()) for file in files),
        "tensor_bytes": stored,
    }
    assert facts["memory"]["dtype"] == "float16"
    assert facts["memory"]["weights_bytes"] == sum(stored.values())
    assert facts["config"]["rope_scaling"] == {"type": "yarn", **vars(QWEN.rope_scaling)}
    assert facts["config"]["sliding_windows"] == [None, 7]
    assert (facts["tokenizer"], facts["chat_template"]) == (False, False)


def test_the_table(inspect, tmp_path):
    write_own(tmp_path / "own")
    rows = dict(re.findall(r"│ (.+?) +│ (.+?) +│", inspect(tmp_path / "own", "--length", "50")))
    assert rows["family"] == "qwen3"
    assert rows["layers"] == "2, of width 8 and 10"
    assert rows["heads"] == "4 of 2, 2 for keys and values"
    assert rows["vocabulary"] == "12, output matrix of its own"
    assert rows["rotary scaling"].startswith("yarn factor=4.0")
    assert rows["sliding windows"] == "7 tokens in 1 of 2 layers"
    assert rows["biases"] == "qkv, attention_output"
    assert rows["norms"] == "of layers, queries and keys"
    assert rows["end tokens"] == "3, 4"
    assert rows["tokenizer"] == rows["chat template"] == "no"
    assert rows["sampling"] == "greedy"
    assert rows["KV cache"] == f"{(2 * (50 + 8) * 2 * 2 * 4 + 4) / 1000:.1f} kB for 1 x 50 tokens"
    assert rows["setting on cpu"] == "4, 4, 3, estimated"

    rows = dict(re.findall(r"│ (.+?) +│ (.+?) +│", inspect(DEMO)))
    assert rows["parameters"] == "5,475,584"
    assert rows["files"] == "1, 11.0 MB, bfloat16"
    assert rows["weights in float32"] == "21.9 MB"
    assert rows["rotary scaling"] == rows["sliding windows"] == rows["biases"] == "none"
    assert rows["tokenizer"] == rows["chat template"] == "yes"


def test_the_sampling_that_the_checkpoint_recommends(inspect, tmp_path):
    file = write_checkpoint(tmp_path) / "generation_config.json"
    for content, expected, row in (
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
            "temperature=0.6, top_k=50, top_p=0.9",
        ),
        (
            {"repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
            "greedy, repetition_penalty=1.1",
        ),
    ):
        file.write_text(json.dumps({"eos_token_id": 2} | content))
        assert json.loads(inspect(tmp_path, "--json"))["sampling"] == expected
        assert re.search(f"sampling +│ {row} ", inspect(tmp_path))


def test_files_of_several_dtypes(inspect, tmp_path):
    tensors = random_tensors()
    halves = {name: array.astype(np.float16) for name, array in tensors.items() if "mlp" in name}
    write_checkpoint(tmp_path, tensors | halves)
    facts = json.loads(inspect(tmp_path, "--json"))
    assert facts["files"]["tensor_bytes"] == {
        "float16": sum(array.nbytes for array in halves.values()),
        "float32": sum(array.nbytes for name, array in tensors.items() if name not in halves),
    }
    assert re.search(r"│ 1, .* kB, [\d.]+ .*of float32, [\d.]+ .*of float16", inspect(tmp_path))


def test_a_tensor_stored_twice_counts_once(inspect, tmp_path):
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_checkpoint(tmp_path, tensors, tie_word_embeddings=True)
    facts = json.loads(inspect(tmp_path, "--json"))
    assert facts["parameters"] == sum(math.prod(array.shape) for array in tensors.values()) - 12 * 8


def test_a_chat_template_in_the_tokenizers_settings(inspect, tmp_path):
    write_checkpoint(tmp_path)
    for content, has_template in (({}, False), ({"chat_template": "{{ messages }}"}, True)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        assert json.loads(inspect(tmp_path, "--json"))["chat_template"] is has_template
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert json.loads(inspect(tmp_path, "--json"))["chat_template"] is True


def test_a_tuned_setting_is_suggested(inspect, small_demo, demo):
    params, _ = demo
    for batch_size, setting in ((1, LookaheadConfig.paper(3, 4, 5)), (8, PLAIN)):
        choice.save(choice.key(params, params.decoder, batch_size), setting, {})
    facts = json.loads(inspect(small_demo, "--json"))
    assert facts["lookahead"] == "3,4,5"
    assert facts["source"] == "tuned"
    assert [tuned["batch_size"] for tuned in facts["tuned"]] == [1, 8]
    assert facts["tuned"][0]["lookahead"] == facts["lookahead"]
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(facts["tuned"][0]["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)
    rows = dict(re.findall(r"│ (.+?) +│ (.+?) +│", inspect(small_demo, "--batch-size", 8)))
    assert rows["setting on cpu"] == "plain, tuned"
    assert re.fullmatch(r"3, 4, 5, on \d{4}-\d\d-\d\dT.*", rows["tuned for batch size 1"])
    assert json.loads(inspect(small_demo, "--batch-size", 4, "--json"))["source"] == "estimated"
    assert json.loads(inspect(small_demo, "--dtype", "bfloat16", "--json"))["lookahead"].startswith("4,")


NORM_OF_9 = {"model.norm.weight": np.zeros(9, np.float32)}


def tensors_without(name):
    return {other: array for other, array in random_tensors().items() if other != name}


def own_of_another_shape(directory):
    write_checkpoint(directory)
    params = conversion.load_hf(directory)
    shutil.rmtree(directory)
    conversion.save(params, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 11}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda directory: None, r"config\.json is missing"),
        (
            lambda directory: write_checkpoint(directory, hidden_act="gelu"),
            r"config\.json: hidden_act is 'gelu'; supported is 'silu'",
        ),
        (
            lambda directory: write_checkpoint(directory, tensors_without("model.norm.weight")),
            r"1 tensors are missing: model\.norm\.weight",
        ),
        (
            lambda directory: write_checkpoint(directory, random_tensors() | NORM_OF_9),
            r"model\.norm\.weight has shape \(9,\); config\.json implies \(8,\)",
        ),
        (
            lambda directory: (write_checkpoint(directory) / "model.safetensors").unlink(),
            r"has no weights: neither model\.safetensors nor",
        ),
        (
            lambda directory: (write_checkpoint(directory) / "tokenizer.json").write_text("{}"),
            r"tokenizer\.json is not a tokenizer",
        ),
        (own_of_another_shape, r"jlade\.safetensors: .* has shape \(10, 8\); config\.json implies \(11, 8\)"),
    ],
)
def test_checkpoints_that_cannot_be_loaded_are_refused(make, message, tmp_path, refused):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    make(directory)
    error = refused(["inspect", str(directory)])
    assert re.search(message, error)
