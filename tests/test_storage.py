"""`jlade.load`: checkpoints in both formats, from directories and from the Hub, and `jlade.load_sampling`.

test_turns.py has the pools.
"""

import json
import shutil

import pytest

import jlade
from jlade import conversion
from tests.conversion.hf_files import DEMO, assert_equal
from tests.hub import in_hub
from tests.tiny import tiny_llama


def test_own_checkpoints_load(demo, tmp_path):
    params, tokenizer = demo
    conversion.save(params, tmp_path / "own")
    (tmp_path / "own" / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    loaded, its_tokenizer = jlade.load(tmp_path / "own", "float32")
    assert_equal(loaded, params)
    assert its_tokenizer.to_str() == tokenizer.to_str()


@pytest.mark.parametrize("to", ["hf", "own"])
def test_strict_refuses_unknown_keys(to, tmp_path):
    save = conversion.save_hf if to == "hf" else conversion.save
    save(tiny_llama(), tmp_path / to)
    file = tmp_path / to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"unheard_of": 0}))
    with pytest.warns(UserWarning, match="ignored unknown keys, .*: unheard_of$"):
        params, _ = jlade.load(tmp_path / to)
    assert_equal(params, tiny_llama())
    with pytest.raises(ValueError, match=r"config\.json: strict=True refuses unknown keys: unheard_of$"):
        jlade.load(tmp_path / to, strict=True)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_format_is_said(name, small_demo, tmp_path):
    shutil.copytree(small_demo, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "model" / name)
    with pytest.warns(
        UserWarning, match=rf"the tokenizer is None, as there is a tokenizer in {name} without tokenizer"
    ):
        assert jlade.load(tmp_path / "model")[1] is None
    with pytest.raises(ValueError, match=rf"strict=True refuses a tokenizer in {name} .*T\.from_pretrained\("):
        jlade.load(tmp_path / "model", strict=True)


@pytest.mark.slow
def test_a_loaded_directory_generates(tmp_path, demo):
    shutil.copytree(DEMO, tmp_path / "copy")
    params, tokenizer = jlade.load(tmp_path / "copy", "float32")
    arguments = {"max_new_tokens": 5, "lookahead": None}
    out = jlade.generate(params, "import os\n", tokenizer=tokenizer, **arguments)
    assert out.text == jlade.generate(demo[0], "import os\n", tokenizer=demo[1], **arguments).text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        (  # Llama 3
            {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001], "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
        ),
        (  # Qwen2.5
            {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        (  # controls without effect
            {"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
            {"temperature": 1.0},
        ),
        (
            {"do_sample": True, "temperature": None, "top_k": None, "min_p": 0.05},
            {"temperature": 1.0, "top_k": 50, "min_p": 0.05},
        ),
    ],
    ids=str,
)
def test_sampling_of_a_checkpoint(content, expected, tmp_path):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert jlade.load_sampling(tmp_path) == jlade.SamplingConfig(**expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"do_sample": True, "top_p": 2}, "top_p must be a number above 0, up to 1, got 2"),
        ({"do_sample": True, "top_k": "all"}, "top_k must be an integer of at least 1, got 'all'"),
        ({"do_sample": 1}, "do_sample must be true or false, got 1"),
        ({"repetition_penalty": -1}, "repetition_penalty must be a number of at least 1e-4, got -1"),
        ([], "must hold a JSON object, got list"),
    ],
    ids=str,
)
def test_broken_sampling_of_a_checkpoint_is_refused(content, message, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"generation_config\.json:? {message}"):
        jlade.load_sampling(tmp_path)


def test_hub_ids_are_found_in_the_cache(tmp_path, monkeypatch, demo):
    in_hub(tmp_path, monkeypatch)
    params, tokenizer = jlade.load("someone/demo", "float32")
    assert_equal(params, demo[0])
    assert tokenizer.to_str() == demo[1].to_str()
    assert jlade.load("someone/demo", revision="main")[1] is not None
    assert jlade.load_sampling("someone/demo", revision="main") == jlade.SamplingConfig()


NO_PATH = "path must be a directory, a GGUF file, smollm2 or an id"
NOWHERE = "some one/demo", "nowhere", "/no/where"


@pytest.mark.parametrize(
    ("path", "revision", "message"),
    [
        ("someone/other", None, f"{NO_PATH} .* 'someone/other'.*HF_HUB_OFFLINE is set"),
        ("someone/demo", "v2", "'someone/demo'.*HF_HUB_OFFLINE is set"),
        *((path, None, f"{NO_PATH} of the Hugging Face Hub .* got {path!r}") for path in NOWHERE),
        (DEMO, "main", "revision='main' is for ids of the Hub"),
    ],
)
def test_a_path_that_is_neither_a_directory_nor_in_the_cache_is_refused(path, revision, message, tmp_path, monkeypatch):
    in_hub(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=message):
        jlade.load(path, revision=revision)
