"""Quality and speed of weights in eight and four bits.

    python benchmarks/quantization.py                   # quality, and speed on the demo model
    python benchmarks/quantization.py --shape 7b        # the same quality, and speed at a 7 B shape (`inflate.py`)
    python benchmarks/quantization.py --model smollm2 --prompts 6 --quality-only

Quality: a model in float32 continues every prompt greedily. Each kind of weights then reads prompt and text in one
pass, and its predictions are compared with the predictions in float32. `calibrated` weighs errors by the inputs on 4096
tokens of docs/usage.md. The weights of SmolLM2 come from a file in Q4_1 and Q8_0: its figures are those of rounding
once more, but for `bits="file"`.
Speed: decoding steps with weights in few bits, and with weights in jlade's default dtype on this device, timed in
turns. The time of a step excludes prefill: it is the difference between a long and a short text. `temporary MB` is the
memory of `jlade.decode`, compiled as one program, besides its arguments and results. A copy of the weights in floating
point would show there.
"""

import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import jlade
from benchmarks import inflate, measure, report
from jlade.config import PLAIN, SMALL_BLOCK
from jlade.conversion.calibration import mean_squares
from jlade.mesh import device_of, num_bytes
from jlade.models.llama import LlamaParams, quantize

CALIBRATION = Path(__file__).parent.parent / "docs" / "usage.md"
FEW, MANY = 16, 144  # new tokens of two texts; their difference in time is that of steps alone


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--shape", choices=inflate.SHAPES, help="of the model for speed (default: the demo model)")
    parser.add_argument("--model", default="demo", help="for quality: demo, smollm2 or a path (default: demo)")
    parser.add_argument("--prompts", type=int, metavar="P", help="the first prompts alone")
    parser.add_argument("--speed-only", action="store_true", help="skip quality")
    parser.add_argument("--quality-only", action="store_true", help="skip speed")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="tokens of each text")
    parser.add_argument("--repeat", type=int, default=7, metavar="R", help="timings of each program")
    options = parser.parse_args(argv)

    prompts = report.read_lines(report.DEMO_PROMPTS)[: options.prompts]
    quality, speed = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    shape = options.shape or "demo"
    if not options.speed_only:
        quality = _quality(options.model, prompts, options.max_new_tokens)
        _print_figures(f"quality, {options.model}", quality)
    if not options.quality_only:
        params = measure.load(shape, None)
        models = {params.norm.dtype.name: params, "int8": quantize(params), "4 bits": quantize(params, 4)}
        speed = _speed(models, prompts[0]["ids"], options.repeat)
        _print_figures(f"speed, {shape}", speed)
    settings = {"model": options.model, "shape": shape, "prompts": len(prompts)}
    settings |= {"repeat": options.repeat, "max_new_tokens": options.max_new_tokens}
    report.write(options.json, settings | {"quality": quality, "speed": speed})


def _quality(model: str, prompts: Sequence[dict[str, Any]], max_new_tokens: int) -> dict[str, dict[str, float]]:
    """Returns the figures of each kind of weights, means over the tokens of all texts."""
    reference, tokenizer = report.load(model, "float32")
    text = tokenizer.encode(CALIBRATION.read_text(encoding="utf-8")).ids[:4096]
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), reference)
    kinds = {
        "float32": reference,  # the first one has the predictions to compare with
        "bfloat16": half,
        "int8, float32": quantize(reference),
        "int8, bfloat16": quantize(half),
        "4 bits, float32": quantize(reference, 4),
        "4 bits, bfloat16": quantize(half, 4),
        "4 bits, calibrated": quantize(reference, 4, importance=mean_squares(reference, text)),
    }
    if model != "demo":
        kinds['bits="file", float32'] = jlade.load(model, "float32", bits="file")[0]
    ids = [each["ids"] if model == "demo" else tokenizer.encode(each["text"]).ids for each in prompts]
    size = max(map(len, ids)) + max_new_tokens
    rows: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in kinds}
    for prompt in track(ids, "quality"):
        out = jlade.generate(reference, prompt, max_new_tokens=max_new_tokens, lookahead=None, eos_ids=())
        tokens = np.array([*prompt, *out.tokens[0]], np.int32)
        padded = np.pad(tokens, (0, size - len(tokens)))  # no token sees the padding; one program serves all texts
        expected = None
        for name, params in kinds.items():
            logprobs = np.asarray(_logprobs(params, padded))[: len(tokens) - 1]
            expected = logprobs if expected is None else expected
            rows[name].append(_compare(logprobs, expected, tokens[1:], len(prompt) - 1))
    result = {}
    for name, of_texts in rows.items():
        figures = {key: np.concatenate([row[key] for row in of_texts]) for key in of_texts[0]}
        result[name] = {
            "weights, MB": num_bytes(kinds[name]) / 1e6,
            "relative error of the logits": float(np.sqrt(figures["error"].sum() / figures["size"].sum())),
            "KL divergence, nats a token": float(figures["kl"].mean()),
            "same most likely token": float(figures["same"].mean()),
            "perplexity of the prompts": float(np.exp(figures["prompt"].mean())),
            "perplexity of the texts": float(np.exp(figures["text"].mean())),
        }
    return result


@jax.jit
def _logprobs(params: LlamaParams, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities [L, V] after each of `tokens` [L]."""
    length = len(tokens)
    cache = params.decoder.init_cache(params, 1, length)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    hidden, _ = params.decoder.forward(params, tokens[None], positions, cache, np.tri(length, dtype=bool))
    return jax.nn.log_softmax(params.decoder.logits(params, hidden)[0])


def _compare(logprobs: np.ndarray, expected: np.ndarray, tokens: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """Returns figures of each of `tokens` [L] from its log-probabilities [L, V]; the text begins at `start`."""
    surprise = -np.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    got, wanted = logprobs[start:], expected[start:]
    centred = [x - x.mean(-1, keepdims=True) for x in (got, wanted)]  # a constant added to all logits has no effect
    return {
        "error": np.square(centred[0] - centred[1]).sum(-1),
        "size": np.square(centred[1]).sum(-1),
        "kl": np.sum(np.exp(wanted) * (wanted - got), axis=-1),
        "same": got.argmax(-1) == wanted.argmax(-1),
        "prompt": surprise[:start],
        "text": surprise[start:],
    }


def _speed(models: dict[str, LlamaParams], prompt: list[int], repeat: int) -> dict[str, dict[str, float]]:
    """Returns the figures of each model, for steps of one token and of a block that suits the device."""
    device = device_of(list(models.values()))
    wide = SMALL_BLOCK if device.platform == "cpu" else jlade.LookaheadConfig.paper(15, 5, 15)
    settings = {"plain": PLAIN, "lookahead": wide}

    programs: dict[tuple[str, str], Any] = {}
    inputs: dict[tuple[str, str, int], jlade.Inputs] = {}
    for name, block in track(list(itertools.product(models, settings)), "compiling"):
        request: Any = {"lookahead": settings[block], "eos_ids": ()}
        for num_tokens in (MANY, FEW):
            made = jlade.prepare(models[name], prompt, max_new_tokens=num_tokens, **request)
            inputs[name, block, num_tokens], config = made
        decode = jax.jit(jlade.decode, static_argnames="config")
        programs[name, block] = decode.lower(models[name], inputs[name, block, FEW], config).compile()

    def num_steps(name: str, block: str, num_tokens: int) -> int:
        return int(programs[name, block](models[name], inputs[name, block, num_tokens]).num_steps[0])

    seconds = measure.step_seconds({key: functools.partial(num_steps, *key) for key in programs}, repeat, FEW, MANY)
    result: dict[str, dict[str, float]] = {}
    for name, params in models.items():
        plain, ahead = (seconds[name, block] for block in ("plain", "lookahead"))
        memory = programs[name, "plain"].memory_analysis()
        result[name] = {
            "weights, MB": num_bytes(params) / 1e6,
            "plain decoding, tokens/s": 1 / plain,
            "step of 1, ms": 1e3 * plain,
            "weights read, GB/s": measure.read_bytes(params) / plain / 1e9,
            f"step of {wide.block_size}, ms": 1e3 * ahead,
            "temporary MB": memory.temp_size_in_bytes / 1e6,
        }
    first = next(iter(result.values()))["step of 1, ms"]
    return {name: figures | {"speed": first / figures["step of 1, ms"]} for name, figures in result.items()}


def _print_figures(title: str, figures: dict[str, dict[str, float]]) -> None:
    rows = ([name, *(f"{value:.4g}" for value in values.values())] for name, values in figures.items())
    report.print_table([title, *next(iter(figures.values()))], rows)


if __name__ == "__main__":
    main()
