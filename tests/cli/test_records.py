"""`jlade generate` of records: each has the text of `jlade.generate` alone with its options and its key."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

import jlade
from jlade import SamplingConfig, cli
from jlade.generation import chat_template
from jlade.server import records
from tests.server import json_chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "def f("}]
ASK = {"prompt": "import os\n", "max_tokens": 4}
HOT = SamplingConfig(temperature=1.0)


def of_batch(name, url=CHAT, **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(*records, name="a.jsonl"):
    """Writes records, or lines that are none, to a file."""
    lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
    pathlib.Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def generate(capsys):
    """Returns a function that runs the command without lookahead, and returns the objects that it prints."""

    def run(*arguments):
        assert cli.main(["generate", "a.jsonl", *arguments, "--no-lookahead"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def alone(demo):
    """Returns a function that completes a prompt with `jlade.generate`."""
    params, tokenizer = demo
    return lambda prompt, **options: jlade.generate(params, prompt, tokenizer=tokenizer, lookahead=None, **options)


@pytest.fixture(scope="module")
def hello(small_demo):
    """The token ids of HELLO."""
    return chat_template.encode(chat_template.load_tokenizer(small_demo), HELLO)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["3", "1"])
def test_each_text_is_that_of_its_record_alone(batch_size, alone, hello, generate):
    default = jax.random.key(9)
    controlled = SamplingConfig(temperature=1.0, top_p=0.9, logit_bias={699: 5.0})
    cases = [
        (ASK | {"temperature": 1, "seed": 5}, "import os\n", {"max_new_tokens": 4, "sampling": HOT, "key": 5}),
        ({"messages": HELLO, "max_completion_tokens": 8}, hello, {"max_new_tokens": 8}),
        (ASK | {"temperature": 1}, "import os\n", {"max_new_tokens": 4, "sampling": HOT, "key": None}),
        ({"prompt": "x = [", "stop": ",", "min_tokens": 3}, "x = [", {"stop": ",", "min_new_tokens": 3}),
        (
            {"prompt": [5, 6], "temperature": 1, "top_p": 0.9, "logit_bias": {"699": 5}, "max_tokens": None},
            [5, 6],
            {"sampling": controlled, "key": None},
        ),
    ]
    write(*(record for record, _, _ in cases))
    lines = generate("--json", "--batch-size", batch_size, "--max-new-tokens", "6", "--seed", "9")
    for number, (line, (record, prompt, options)) in enumerate(zip(lines, cases, strict=True)):
        seed = options.pop("key", None)
        key = jax.random.fold_in(default, number) if seed is None else jax.random.key(seed)
        out = alone(prompt, **({"max_new_tokens": 6, "key": key} | options))
        assert (line["source"], line["record"]) == (f"a.jsonl:{number + 1}", record)
        assert (line["text"], line["token_ids"]) == (out.text[0], out.tokens[0, : out.lengths[0]].tolist())
        assert line["finish_reason"] == out.finish_reason[0]


@pytest.mark.slow
def test_log_probabilities_are_for_the_records_that_ask(alone, generate):
    write(ASK | {"logprobs": 0}, ASK)
    first, second = generate("--json", "--batch-size", "2")
    expected = alone("import os\n", max_new_tokens=4, logprobs=True).logprobs[0].tolist()
    assert first["logprobs"] == pytest.approx(expected, abs=1e-4)
    assert "logprobs" not in second
    assert first["text"] == second["text"]


def test_texts_of_records_and_of_other_files(alone, capsys):
    write(ASK, ASK | {"max_tokens": 2})
    pathlib.Path("b.py").write_text("import os\n", encoding="utf-8")
    assert cli.main(["generate", "b.py", "a.jsonl", "--max-new-tokens", "3", "--no-lookahead"]) == 0
    texts = [alone("import os\n", max_new_tokens=number).text[0] for number in (3, 4, 2)]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)


@pytest.mark.slow
def test_batches_have_the_output_of_openai(alone, hello, generate):
    write(
        of_batch("one", model="demo", messages=HELLO, max_tokens=5, logprobs=True),
        of_batch("two", COMPLETIONS, prompt="import os\n", max_tokens=4),
    )
    lines = generate("--json", "--batch-size", "2")
    assert [line.keys() for line in lines] == 2 * [{"id", "custom_id", "response", "error"}]
    assert [line["custom_id"] for line in lines] == ["one", "two"]
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    chat = ChatCompletion.model_validate(lines[0]["response"]["body"])
    expected = alone(hello, max_new_tokens=5, logprobs=True)
    assert (chat.model, chat.choices[0].message.content) == ("demo", expected.text[0])
    assert [each.logprob for each in chat.choices[0].logprobs.content] == pytest.approx(
        expected.logprobs[0].tolist(), abs=1e-4
    )
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(hello), 5)
    completion = Completion.model_validate(lines[1]["response"]["body"])
    assert completion.choices[0].text == alone("import os\n", max_new_tokens=4).text[0]
    assert completion.choices[0].logprobs is None


WRONG = [
    ('{"prompt": "a"', "the record is not JSON"),
    ("[1]", r"the record must be a JSON object, got [1]"),
    ({"max_tokens": 3}, "a record must have either prompt or messages"),
    ({"prompt": "a", "messages": HELLO}, "a record must have either prompt or messages"),
    ({"prompt": ["a", "b"]}, "a record must ask for one text"),
    ({"prompt": "a", "n": 2}, "a record must ask for one text"),
    ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs must be left out"),
    ({"prompt": "a", "include_stop_str_in_output": True}, "include_stop_str_in_output must be false"),
    ({"prompt": "a", "echo": True, "logprobs": 0}, "echo must be false beside logprobs"),
    ({"prompt": "a", "stream": True}, "stream must be false"),
    ({"prompt": "a", "max_new_tokens": 3}, "max_new_tokens is max_tokens in a record"),
    ({"prompt": "a", "max_tokens": "3"}, "max_tokens must be an integer"),
    ({"prompt": "a", "temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
    ({"prompt": "a", "max_tokens": 4000}, "maximum context length is 2048 tokens"),
    ({"prompt": "1 " * 3000}, "maximum context length is 2048 tokens"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role must be one of"),
    (of_batch(7, messages=HELLO), "custom_id must be a string, got 7"),
    (of_batch("a", "/v1/embeddings", prompt="a"), f"url must be {CHAT} or {COMPLETIONS}, got '/v1/embeddings'"),
    (of_batch("b", COMPLETIONS, messages=HELLO), f"body must have prompt for {COMPLETIONS}"),
    (of_batch("c", messages=HELLO) | {"method": "GET"}, "method must be POST, got 'GET'"),
    (of_batch("one", messages=HELLO), "custom_id 'one' is that of a.jsonl:1, too"),
]


@pytest.mark.parametrize(("record", "message"), WRONG)
def test_wrong_records_are_reported_before_anything_is_decoded(record, message, refused):
    write(of_batch("one", messages=HELLO), "", record)
    error = refused(["generate", "a.jsonl"])
    assert error.startswith("jlade generate: error: a.jsonl:3: ")
    assert message in error


def test_calls_of_tools(tmp_path):
    json_chat.chat_template().tokenizer.save_pretrained(tmp_path)
    options = dict.fromkeys(("max_new_tokens", "stop", "logprobs", "grammar")) | {"min_new_tokens": 0}
    request = options | {"tokenizer": json_chat.TOKENIZER, "sampling": SamplingConfig()}
    config = dataclasses.replace(json_chat.PARAMS.config, eos_ids=(json_chat.EOS,))
    params = dataclasses.replace(json_chat.PARAMS, config=config)
    reader = records.RecordReader(params, request, lambda: tmp_path, 512)
    tool = {"type": "function", "function": {"name": "f"}}
    values = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "stop": "f"}
    ids = json_chat.TOKENIZER.encode('\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>').ids
    record = records.Record("a.jsonl:1", json.dumps(values))
    _, own, asked = reader.read(record)
    assert own["stop"] == []
    assert own["grammar"].automaton.accepts(json_chat.TOKENIZER.decode(ids).encode())
    figures = {"lengths": np.array([len(ids)]), "steps": np.array([len(ids)]), "accepted": np.ones((1, len(ids)), int)}
    names = ("logprobs", "processed_logprobs", "top_tokens", "top_logprobs", "statistics", "state")
    texts = {"tokens": np.array([ids]), "text": ("f",), "finish_reason": ("eos",)}
    line = records.result(record, {}, request, asked, jlade.Generation(**texts, **figures, **dict.fromkeys(names)))
    (call,) = line["tool_calls"]
    assert (line["text"], call["function"]) == ("", {"name": "f", "arguments": '{"a": 1}'})

    wrong = records.Record("a.jsonl:1", json.dumps(values | {"tool_choice": "auto"}))
    with pytest.raises(ValueError, match=r"a.jsonl:1: stop must be empty beside tools.* got \['f'\]"):
        reader.read(wrong)


def test_an_empty_file(refused):
    write("", " ")
    assert "a.jsonl is empty; it must hold a record in each line" in refused(["generate", "a.jsonl"])


def test_wrong_records_are_skipped(alone, capsys):
    write(of_batch("one", messages=HELLO, max_tokens=2), *(record for record, _ in WRONG), ASK)
    arguments = ["generate", "a.jsonl", "--json", "--skip-invalid", "--no-lookahead", "--batch-size", "2"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert lines[0]["response"]["status_code"] == 200
    skipped_lines = captured.err.splitlines()
    assert len(skipped_lines) == len(WRONG)
    for number, skipped in enumerate(skipped_lines, start=2):
        assert skipped.startswith(f"skipped: a.jsonl:{number}: ")
    # The last wrong one has the id of the first record, and no line.
    for number, ((record, message), line) in enumerate(zip(WRONG[:-1], lines[1:-1], strict=True), start=2):
        if "custom_id" in line:
            assert line["response"]["status_code"] == 400
            assert message in line["response"]["body"]["error"]["message"]
        else:
            assert (line["record"], line["source"]) == (record, f"a.jsonl:{number}")
            assert message in line["error"]
    assert lines[-1]["text"] == alone("import os\n", max_new_tokens=4).text[0]


def test_a_duplicate_id_has_one_line(capsys):
    one = of_batch("x", COMPLETIONS, prompt="a", max_tokens=1)
    wrong = {"custom_id": "y", "body": "none"}
    write(one, one, wrong, ASK, of_batch("x", COMPLETIONS, prompt="b"), of_batch("y", COMPLETIONS, prompt="b"))
    arguments = ["generate", "a.jsonl", "--no-lookahead", "--skip-invalid", "--output", "out.jsonl"]
    for _ in range(2):  # the second time nothing is left to do
        assert cli.main(arguments) == 0
        lines = [json.loads(line) for line in pathlib.Path("out.jsonl").read_text().splitlines()]
        assert [line.get("custom_id", line.get("source")) for line in lines] == ["x", "y", "a.jsonl:4"]
        assert [line["response"]["status_code"] for line in lines[:2]] == [200, 400]
        reported = capsys.readouterr().err.splitlines()
        assert [line.split()[1] for line in reported if "must be unique" in line] == [
            f"a.jsonl:{number}:" for number in (2, 5, 6)
        ]


@pytest.mark.parametrize("batch_size", ["1", "2"])
def test_an_interrupted_job_goes_on(batch_size, capsys):
    records = [ASK, of_batch("x", messages=HELLO, max_tokens=3), ASK | {"max_tokens": 3}, ASK | {"max_tokens": 2}]
    write(*records)
    arguments = ["generate", "a.jsonl", "--no-lookahead", "--batch-size", batch_size, "--output", "out.jsonl"]
    assert cli.main(arguments) == 0
    out = pathlib.Path("out.jsonl")
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:2]) + whole[2][:30])
    assert cli.main(arguments) == 0
    assert out.read_text().splitlines(keepends=True) == whole
    for changed in ([ASK | {"max_tokens": 5}, *records[1:]], [ASK, of_batch("x", messages=HELLO), *records[2:]]):
        write(*changed)
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert "is not the record of this job's prompt" in capsys.readouterr().err
        assert out.read_text().splitlines(keepends=True) == whole
