"""`lm_eval --model local-completions` against `jlade serve` with default options, on a task of each kind."""

import json
import os
import subprocess

import numpy as np
import pytest

import jlade
from tests import plain_llama, processes

# An environment of its own: lm_eval brings 60 packages.
PYTHON = os.environ.get("JLADE_TEST_HARNESS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None,
        reason="JLADE_TEST_HARNESS is not the Python of an environment with lm-eval[api] and transformers",
    ),
]
CHOICES = [
    {"question": "def is_even(n):\n    return n % 2", "choices": [" == 0", " is a very odd thing"], "answer": 0},
    {"question": "import os\nimport", "choices": [" the", " sys", "\n"], "answer": 1},
]
QUESTIONS = [{"question": "def read_config(path):", "answer": ""}, {"question": "for i in", "answer": ""}]
TEXTS = [{"text": "def add(a, b):\n    return a + b\n"}, {"text": "Once upon a time there was a compiler."}]
RECORDS = {"choice": CHOICES, "generation": QUESTIONS, "rolling": TEXTS}
NUM_TOKENS = 12
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": NUM_TOKENS, "temperature": 0},
        "metric_list": [{"metric": "bypass"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def samples(small_demo, tmp_path_factory):
    """Task -> what lm_eval got for each of its records."""
    directory = tmp_path_factory.mktemp("harness")
    for name, task in TASKS.items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS[name]), encoding="utf-8")
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        # JSON is YAML.
        (directory / f"{name}.yaml").write_text(json.dumps({"task": name} | data | task), encoding="utf-8")
    command = ["-m", "jlade", "serve", str(small_demo), "--port", "0"]
    with processes.started([command], num_devices=1) as (server,):
        line = server.stdout.readline()
        assert line, server.stderr.read()
        arguments = {
            "model": "demo",
            "base_url": f"{line.split()[-1]}/v1/completions",
            "tokenizer": small_demo,
            "tokenizer_backend": "huggingface",
        }
        run = subprocess.run(
            [
                *[PYTHON, "-m", "lm_eval", "--model", "local-completions", "--log_samples"],
                *["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())],
                *["--tasks", ",".join(TASKS), "--include_path", directory, "--output_path", directory / "out"],
            ],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(directory / "cache")},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    files = {name: next((directory / "out").rglob(f"samples_{name}_*.jsonl")) for name in TASKS}
    of_task = {name: map(json.loads, file.read_text(encoding="utf-8").splitlines()) for name, file in files.items()}
    return {name: sorted(found, key=lambda sample: sample["doc_id"]) for name, found in of_task.items()}


@pytest.fixture(scope="module")
def model(small_demo):
    """Parameters in float32, as the server has them, and the tokenizer."""
    return jlade.load(small_demo, "float32")


def encode(tokenizer, text):
    """Returns the tokens that lm_eval makes of a text: by default without the one that begins texts."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def log_likelihood(params, context, ids):
    """Returns the log-likelihood of tokens after others by a pass in NumPy, and whether each is the most probable."""
    logits = plain_llama.logits(params, [*context, *ids])[len(context) - 1 : -1]
    logprobs = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    return logprobs[np.arange(len(ids)), ids].sum(), bool(np.all(logits.argmax(axis=1) == ids))


def test_multiple_choice(samples, model):
    params, tokenizer = model
    for sample, record in zip(samples["choice"], CHOICES, strict=True):
        context = encode(tokenizer, record["question"])
        for (found,), choice in zip(sample["resps"], record["choices"], strict=True):
            ids = encode(tokenizer, record["question"] + choice)
            assert ids[: len(context)] == context
            expected, is_greedy = log_likelihood(params, context, ids[len(context) :])
            assert float(found[0]) == pytest.approx(expected, abs=1e-3)
            assert found[1] in (is_greedy, str(is_greedy))


def test_generation(samples, model):
    params, tokenizer = model
    prompts = [encode(tokenizer, each["question"]) for each in QUESTIONS]
    options = {"tokenizer": tokenizer, "max_new_tokens": NUM_TOKENS, "stop": "\n\n", "lookahead": None}
    expected = jlade.generate(params, prompts, **options).text
    assert tuple(sample["resps"][0][0] for sample in samples["generation"]) == expected


def test_rolling_log_likelihood(samples, model):
    """Of all tokens of a text, the first one after the token that begins texts."""
    params, tokenizer = model
    for sample, record in zip(samples["rolling"], TEXTS, strict=True):
        begin, ids = tokenizer.token_to_id("<s>"), encode(tokenizer, record["text"])
        expected, _ = log_likelihood(params, [begin], ids)
        found = sample["resps"][0][0]
        assert float(found[0] if isinstance(found, list) else found) == pytest.approx(expected, abs=1e-3)
