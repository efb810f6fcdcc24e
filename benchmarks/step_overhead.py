"""What a decoding step takes beside the model: pool, window, verification, stopping and bookkeeping.

    python benchmarks/step_overhead.py                          # 134 M parameters in float32, on a CPU
    python benchmarks/step_overhead.py --shape 1b --dtype bfloat16

Two loops start from the same state after the same prompt and take the same number of steps over the same block, in
turns. One is jlade's. The other only runs the model: forward, logits, the most likely token of each position, and as
many rows committed as jlade's loop accepted in that step, so that both read as much of the cache. What it feeds depends
on what it predicted, so that compilers can move nothing out of the loop. The share is of the time of jlade's step.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path

# The script's own folder is no place for imports: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks.accelerator import (
    CAPACITY,
    PROMPT_TOKENS,
    add_model_arguments,
    in_turns,
    load,
    make_decoder,
    prompts_of,
)
from benchmarks.parts import Figures, Parts, add_arguments
from jlade.config import PLAIN, LookaheadConfig
from jlade.lookahead import block as blocks
from jlade.models.base import KVCache
from jlade.models.llama import Llama, LlamaParams
from jlade.sampling import argmax

SETTINGS = {
    "plain": PLAIN,
    "0,4,1": LookaheadConfig(0, 4, 1),
    "0,8,1": LookaheadConfig(0, 8, 1),
    "5,4,5": LookaheadConfig(5, 4, 5),
    "15,5,15": LookaheadConfig(15, 5, 15),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.set_defaults(shape="134m", dtype="float32")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="M", help="tokens of the text that is timed")
    parser.add_argument("--repeat", type=int, default=11, metavar="R", help="timings of each loop")
    add_arguments(parser)
    options = parser.parse_args()

    parts = Parts(options, {name: getattr(options, name) for name in ("shape", "dtype", "attention", "new_tokens")})
    params = load(options)
    decoder = make_decoder(params, options.attention)
    for name, lookahead in SETTINGS.items():
        parts.run(name, functools.partial(_measure, params, decoder, lookahead, options.new_tokens, options.repeat))
    parts.print()
    sys.exit(parts.failed())


def _measure(params: LlamaParams, decoder: Llama, lookahead: LookaheadConfig, new_tokens: int, repeat: int) -> Figures:
    (ids,) = prompts_of("code", 1, PROMPT_TOKENS)
    prompt = np.zeros((1, CAPACITY), np.int32)
    prompt[0, : len(ids)] = ids
    stopping = jlade.Stopping(jnp.array([new_tokens], jnp.int32), jnp.full((1, 1), -1, jnp.int32))
    prefill = jax.jit(jlade.prefill, static_argnames=("decoder", "lookahead"))
    start = prefill(
        params, prompt, np.array([len(ids)]), stopping, jax.random.key(0), decoder=decoder, lookahead=lookahead
    )

    whole = functools.partial(_decode, params, start, decoder=decoder, lookahead=lookahead)
    end = whole()
    num_steps = int(end.steps[0])
    tokens = jnp.asarray(np.resize(ids, (1, lookahead.block_size)))
    accepted = end.accepted[0, :num_steps]
    del end
    model = functools.partial(
        _run_model, params, start.cache, tokens, accepted, num_steps, decoder=decoder, lookahead=lookahead
    )
    jax.block_until_ready(model())
    seconds = in_turns({"whole": whole, "model": model}, repeat)
    beside = [100 * (a - b) / a for a, b in zip(seconds["whole"], seconds["model"], strict=True)]
    lowest, _, highest = statistics.quantiles(beside) if repeat > 1 else 3 * beside
    return {
        "block": lookahead.block_size,
        "steps": num_steps,
        "step, ms": 1e3 * statistics.median(seconds["whole"]) / num_steps,
        "model alone, ms": 1e3 * statistics.median(seconds["model"]) / num_steps,
        "beside the model, %": statistics.median(beside),
        "beside the model, % (quartiles)": [lowest, highest],
    }


@functools.partial(jax.jit, static_argnames=("decoder", "lookahead"))
def _decode(
    params: LlamaParams, state: jlade.DecodeState, *, decoder: Llama, lookahead: LookaheadConfig
) -> jlade.DecodeState:
    step = functools.partial(jlade.step, params, decoder=decoder, lookahead=lookahead)
    return jax.lax.while_loop(lambda s: ~jnp.all(s.done), step, state)


@functools.partial(jax.jit, static_argnames=("decoder", "lookahead"))
def _run_model(
    params: LlamaParams,
    cache: KVCache,
    tokens: jax.Array,
    accepted: jax.Array,
    num_steps: jax.Array,
    *,
    decoder: Llama,
    lookahead: LookaheadConfig,
) -> KVCache:
    """Runs the block `tokens` [1, T], each time changed, and commits `accepted` [S] rows, one number a step."""
    block = blocks.build(lookahead.window_size, lookahead.ngram_size, lookahead.guess_set_size)
    rows = jnp.asarray(block.accepted_rows)[:1]

    def step(i: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        tokens, cache = carry
        positions = cache.length[:, None] + block.positions[None]
        hidden, block_kv = decoder.forward(params, tokens, positions, cache, block.mask)
        best = argmax(decoder.logits(params, hidden[:, block.output_rows]))
        # As in `jlade.prefill`: a number that depends on what the pass returns lets the cache be written in place.
        num_rows = accepted[i] + (best[:, 0] < 0).astype(jnp.int32)
        shift = jnp.sum(best, axis=1, keepdims=True, dtype=jnp.int32)
        return (tokens + shift) % decoder.vocab_size, decoder.commit(cache, block_kv, rows, num_rows)

    return jax.lax.fori_loop(0, num_steps, step, (tokens, cache))[1]


if __name__ == "__main__":
    main()
