"""`jlade generate`: completions of files, of their lines, or of standard input."""

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp

import jlade
from jlade.cli import options as options_lib
from jlade.cli.options import Prompt
from jlade.config import check_int
from jlade.generation import text


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = argparse.ArgumentParser(
        prog="jlade generate",
        description="Print the completion of each file, or of each line, in order.",
        epilog="Each prompt has its own random key, so that --batch-size does not change a text.",
    )
    result.add_argument("files", nargs="*", metavar="FILE", help="a prompt; - or none for standard input")
    result.add_argument("--lines", action="store_true", help="each non-blank line is a prompt")
    result.add_argument(
        "--batch-size", type=int, default=1, metavar="B", help="prompts to decode at once (default: %(default)s)"
    )
    result.add_argument("--json", action="store_true", help="print a line with a JSON object for each prompt")
    result.add_argument("--logprobs", action="store_true", help="add the tokens' log-probabilities to --json")
    options_lib.add_shared(result)
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command. It checks all prompts before it decodes any."""
    batch_size = check_int("--batch-size", options.batch_size, 1)
    if options.logprobs and not options.json:
        raise ValueError("--logprobs needs --json: the text has no place for log-probabilities")
    request = options_lib.request(options)
    prompts = [prompt for name in options.files or ["-"] for prompt in options_lib.read_prompts(name, options.lines)]
    params, tokenizer = options_lib.load(options)
    ids = [text.encode(tokenizer, prompt.text) for prompt in prompts]
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        options_lib.check_positions(params, prompt.source, prompt_ids, options.max_new_tokens)

    request["tokenizer"], key = tokenizer, request["key"]
    assert key is not None
    # The keys that `jlade.generate` would give the sequences of one batch of all prompts.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(len(prompts)))
    for begin in range(0, len(prompts), batch_size):
        batch = slice(begin, begin + batch_size)
        request["key"] = keys[batch]
        if options.json or batch_size > 1:
            request["logprobs"] = options.logprobs
            out = jlade.generate(params, ids[batch], **request)
            for i, prompt in enumerate(prompts[batch]):
                record = _record(prompt, out, i)
                print(json.dumps(record) if options.json else record["text"], flush=True)
        else:
            for piece in jlade.stream(params, ids[begin], **request):
                print(piece.text, end="", flush=True)
            print(flush=True)


def _record(prompt: Prompt, out: jlade.Generation, i: int) -> dict[str, Any]:
    assert out.text is not None  # there is a tokenizer
    length = int(out.lengths[i])
    record = {
        "source": prompt.source,
        "prompt": prompt.text,
        "text": out.text[i],
        "token_ids": out.tokens[i, :length].tolist(),
        "finish_reason": out.finish_reason[i],
        "tokens": length,
        "steps": int(out.steps[i]),
        "compression": float(out.compression[i]),
    }
    return record if out.logprobs is None else record | {"logprobs": out.logprobs[i, :length].tolist()}
