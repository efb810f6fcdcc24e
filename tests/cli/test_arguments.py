"""The sampling of the commands: that of the checkpoint, unless an option says otherwise."""

import json
import math

import pytest

from jlade import SamplingConfig
from jlade.cli import chat, complete, generate
from jlade.cli.arguments import change, read, read_prompts, request
from jlade.server import records

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


def sampling_of(command, *arguments):
    prompt = ["x"] if command is complete else []
    return request(command.parser().parse_args([*prompt, *map(str, arguments)]))["sampling"]


@pytest.mark.parametrize("command", [complete, generate, chat])
def test_the_sampling_is_that_of_the_checkpoint_unless_given(command, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(SAMPLED))
    recommended = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    assert sampling_of(command, "--model", tmp_path) == SamplingConfig(**recommended)
    changed = sampling_of(command, "--model", tmp_path, "--temperature", 0.2, "--min-p", 0.1)
    assert changed == SamplingConfig(**recommended | {"temperature": 0.2, "min_p": 0.1})
    assert sampling_of(command) == SamplingConfig(), "the demo model is greedy"


@pytest.mark.parametrize("do_sample", [False, None])
def test_without_do_sample_the_text_is_greedy(do_sample, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(SAMPLED | {"do_sample": do_sample}))
    assert sampling_of(generate, "--model", tmp_path) == SamplingConfig(repetition_penalty=1.05)


def test_a_temperature_of_0_drops_the_filters_of_the_checkpoint_and_keeps_its_bans(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(SAMPLED | {"suppress_tokens": [5]}))
    greedy = sampling_of(generate, "--model", tmp_path, "--temperature", 0, "--repetition-penalty", 1)
    assert greedy == SamplingConfig(repetition_penalty=1.0, logit_bias={5: -math.inf})


def test_a_chat_returns_to_the_sampling_of_the_checkpoint(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(SAMPLED))
    given = chat.parser().parse_args(["--model", str(tmp_path), "--top-k", "5"])
    assert request(given)["sampling"].top_k == 5
    assert request(change(given, "top_k=none"))["sampling"].top_k == 20


def test_the_default_limit_is_that_of_the_library():
    assert request(complete.parser().parse_args(["x"]))["max_new_tokens"] is None


@pytest.mark.parametrize(
    ("typed", "stop"), [(r"\n", "\n"), (r"a\tb\r", "a\tb\r"), (r"\\n", r"\n"), (r"\s", r"\s"), ("\n", "\n"), ("é", "é")]
)
def test_stop_strings_of_a_shell(typed, stop):
    """A shell passes a backslash and an n for the end of a line."""
    assert generate.parser().parse_args(["--stop", typed]).stop == [stop]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo".encode())
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"prompt": "one"}'.encode())
    assert [prompt.text for prompt in read_prompts(str(tmp_path / "a.txt"), lines=True)] == ["one", "two"]
    found = records.parse("a.jsonl", read(str(tmp_path / "a.jsonl")))
    assert [record.values for record in found] == [{"prompt": "one"}]
