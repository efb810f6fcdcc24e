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
        epilog="Prompt number i is drawn as row i of one large batch would be, so --batch-size does not change a text.",
    )
    result.add_argument("files", nargs="*", metavar="FILE", help="a prompt; - or none for standard input")
    result.add_argument("--lines", action="store_true", help="each line that is not blank is a prompt of its own")
    result.add_argument(
        "--batch-size", type=int, default=1, metavar="B", help="prompts to decode at once (default: %(default)s)"
    )
    result.add_argument("--json", action="store_true", help="print one JSON object a line for each prompt")
    result.add_argument("--logprobs", action="store_true", help="with --json: the tokens' log-probabilities too")
    options_lib.add_shared(result)
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command; nothing is decoded before every prompt has been checked."""
    batch_size = check_int("--batch-size", options.batch_size, 1)
    if options.logprobs and not options.json:
        raise ValueError("--logprobs needs --json: the log-probabilities are no part of the text")
    request = options_lib.request(options)
    prompts = [prompt for name in options.files or ["-"] for prompt in options_lib.read_prompts(name, options.lines)]
    params, tokenizer = options_lib.load(options)
    ids = [text.encode(tokenizer, prompt.text) for prompt in prompts]
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        options_lib.check_positions(params, prompt.source, prompt_ids, options.max_new_tokens)

    request["tokenizer"] = tokenizer
    # The keys of the rows of one batch, which `jlade.generate` would make of the same key.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(request.pop("key"), jnp.arange(len(prompts)))
    for begin in range(0, len(prompts), batch_size):
        batch = slice(begin, begin + batch_size)
        if options.json or batch_size > 1:
            out = jlade.generate(params, ids[batch], key=keys[batch], logprobs=options.logprobs, **request)
            for row, prompt in enumerate(prompts[batch]):
                record = _record(prompt, out, row)
                print(json.dumps(record) if options.json else record["text"], flush=True)
        else:
            for piece in jlade.stream(params, ids[begin], key=keys[batch], **request):
                print(piece.text, end="", flush=True)
            print(flush=True)


def _record(prompt: Prompt, out: jlade.Generation, row: int) -> dict[str, Any]:
    assert out.text is not None  # there is a tokenizer
    length = int(out.lengths[row])
    record = {
        "source": prompt.source,
        "prompt": prompt.text,
        "text": out.text[row],
        "token_ids": out.tokens[row, :length].tolist(),
        "finish_reason": out.finish_reason[row],
        "tokens": length,
        "steps": int(out.steps[row]),
        "compression": float(out.compression[row]),
    }
    return record if out.logprobs is None else record | {"logprobs": out.logprobs[row, :length].tolist()}
