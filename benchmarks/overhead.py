"""The share of a step outside the model: sources of drafts, window, verification, stopping and bookkeeping.

    python benchmarks/overhead.py                               # 134 M parameters in float32, on a CPU
    python benchmarks/overhead.py --shape 1b --dtype bfloat16

Two loops start from the same state after the same prompt and make the same number of steps over the same block. They
are timed in turns; prefill is excluded. One loop is jlade's. The other one runs the model alone: forward, logits, the
most likely token of each position, and a commit of as many tokens as jlade's loop accepted in that step, so that both
loops read the same number of cache entries. Its tokens depend on its predictions, so that compilers can move nothing
out of the loop. The share is relative to the time of jlade's step.
"""

import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks import measure, report
from benchmarks.report import Figures
from jlade.config import PLAIN, LookaheadConfig
from jlade.drafts.tree import Tree
from jlade.lookahead import block as blocks
from jlade.models.base import KVCache
from jlade.models.llama import Llama, LlamaParams
from jlade.vocabulary import VocabularyShard

SETTINGS = {
    "plain": PLAIN,
    "0,4,1": LookaheadConfig.paper(0, 4, 1),
    "0,8,1": LookaheadConfig.paper(0, 8, 1),
    "5,4,5": LookaheadConfig.paper(5, 4, 5),
    "15,5,15": LookaheadConfig.paper(15, 5, 15),
    "tree=7": LookaheadConfig.tree(7),
    "tree=63": LookaheadConfig.tree(63),
    "tree=119": LookaheadConfig.tree(119),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__, parts=True)
    measure.add_model_arguments(parser, shape="134m", dtype="float32")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="M", help="tokens of the timed text")
    parser.add_argument("--repeat", type=int, default=11, metavar="R", help="timings of each loop")
    options = parser.parse_args(argv)

    parts = report.Parts(options, ("shape", "dtype", "attention", "new_tokens"))
    params = measure.load(options.shape, options.dtype)
    decoder = measure.make_decoder(params, options.attention)
    for name, lookahead in SETTINGS.items():
        parts.run(name, functools.partial(_measure, params, decoder, lookahead, options.new_tokens, options.repeat))
    parts.finish()


def _measure(params: LlamaParams, decoder: Llama, lookahead: LookaheadConfig, new_tokens: int, repeat: int) -> Figures:
    (ids,) = measure.prompts_of("code", 1, measure.PROMPT_TOKENS)
    inputs, config = jlade.prepare(
        params, ids, max_new_tokens=new_tokens, lookahead=lookahead, eos_ids=(), decoder=decoder
    )
    start = jlade.start(jlade.prefill(params, inputs, config), inputs, config)

    whole = functools.partial(_decode, params, start, config=config)
    end = whole()
    num_steps = int(end.num_steps[0])
    tokens = jnp.asarray(np.resize(ids, (1, lookahead.block_size)))
    accepted = end.info.accepted[0, :num_steps]
    tree = end.drafts.tree
    del end
    model = functools.partial(_run_model, params, start.cache, tree, tokens, accepted, num_steps, config=config)
    jax.block_until_ready(model())
    seconds = measure.in_turns({"whole": whole, "model": model}, repeat)
    outside = [100 * (a - b) / a for a, b in zip(seconds["whole"], seconds["model"], strict=True)]
    lowest, _, highest = statistics.quantiles(outside) if repeat > 1 else 3 * outside
    return {
        "block": lookahead.block_size,
        "steps": num_steps,
        "step, ms": 1e3 * statistics.median(seconds["whole"]) / num_steps,
        "model alone, ms": 1e3 * statistics.median(seconds["model"]) / num_steps,
        "outside the model, %": statistics.median(outside),
        "outside the model, % (quartiles)": [lowest, highest],
    }


@functools.partial(jax.jit, static_argnames="config")
def _decode(params: LlamaParams, state: jlade.DecodeState, *, config: jlade.DecodeConfig) -> jlade.DecodeState:
    """Makes steps until the text has ended. It keeps `state`, which every run starts from."""
    return jax.lax.while_loop(lambda s: ~jnp.all(s.done), lambda s: jlade.step(params, s, config), state)


@functools.partial(jax.jit, static_argnames="config")
def _run_model(
    params: LlamaParams,
    cache: KVCache,
    tree: Tree,
    tokens: jax.Array,
    accepted: jax.Array,
    num_steps: jax.Array,
    *,
    config: jlade.DecodeConfig,
) -> KVCache:
    """Runs the block `tokens` [1, T], changed after each step, and commits `accepted[i]` tokens in step i.

    Its drafts have the form of `tree` in all of them.
    """
    decoder, lookahead = config.decoder, config.lookahead
    block = blocks.build(lookahead.window_size, lookahead.ngram_size, tree.form)
    offsets, mask = jnp.broadcast_to(block.positions, tokens.shape), jnp.asarray(block.mask)
    path = block.first_draft + jnp.arange(lookahead.max_accepted - 1, dtype=jnp.int32)
    indices = jnp.append(0, path)[None]  # the current token, drafted ones

    def step(i: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        tokens, cache = carry
        positions = cache.length[:, None] + offsets
        hidden, block_kv = decoder.forward(params, tokens, positions, cache, mask)
        best = VocabularyShard(decoder.vocab_size).argmax(decoder.logits(params, hidden[:, block.outputs]))
        # As in `jlade.prefill`: a number that depends on the result of the pass lets the cache be written in place.
        num_accepted = accepted[i] + (best[:, 0] < 0).astype(jnp.int32)
        shift = jnp.sum(best, axis=1, keepdims=True, dtype=jnp.int32)
        return (tokens + shift) % decoder.vocab_size, decoder.commit(cache, block_kv, indices, num_accepted)

    return jax.lax.fori_loop(0, num_steps, step, (tokens, cache))[1]


if __name__ == "__main__":
    main()
