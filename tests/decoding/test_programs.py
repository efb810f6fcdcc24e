"""The compiled programs: how often they are traced, and that their loops copy neither cache nor pool."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.config import PLAIN
from jlade.decoding.state import CHUNKS_ON_CPU
from tests.tiny import tiny_llama

OPTIMIZED = True


def test_prefill_is_traced_once_and_decode_once_for_each_setting(demo, monkeypatch):
    """Twenty prompts, limits, seeds and sets of end tokens, three settings, and two values of the cost of a step."""
    params, _ = demo
    jax.clear_caches()
    sizes = []
    original = type(params.decoder).forward

    def forward(self, params, tokens, *rest):
        sizes.append(tokens.shape[1])
        return original(self, params, tokens, *rest)

    monkeypatch.setattr(type(params.decoder), "forward", forward)
    settings = [None, LookaheadConfig(3, 3, 3), LookaheadConfig(0, 5, 1, step_cost=1.5)]
    rng = np.random.default_rng(0)
    for i, length in enumerate(np.linspace(1, 400, 20).astype(int)):
        setting = settings[i % 3]
        if setting is not None and setting.step_cost is not None:
            setting = dataclasses.replace(setting, step_cost=1.5 + i)
        jlade.generate(
            params,
            rng.integers(0, 4096, length),
            max_new_tokens=1 + i,
            lookahead=setting,
            eos_ids=range(i % 5),
            key=jax.random.key(i),
        )
    jax.clear_caches()
    chunks = [chunk for chunk, _ in CHUNKS_ON_CPU]
    assert sizes == [*chunks, 1, 12, 5, 1]  # the adaptive program has a loop for its width and one for plain steps


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "lookahead",
    [LookaheadConfig(3, 4, 3), LookaheadConfig(3, 4, 3, False), LookaheadConfig(3, 4, 3, step_cost=2.0), PLAIN],
    ids=["prompt pool", "window", "adaptive", "plain"],
)
def test_no_loop_copies_a_cache_layer_or_the_pool(lookahead, batch_size):
    """Neither prefill's loops nor those over steps."""
    params = tiny_llama(vocab_size=2000, max_positions=4096)
    capacity = 4096
    inputs, program = jlade.prepare(params, [[1]] * batch_size, max_new_tokens=capacity - 1, lookahead=lookahead)
    decode = jax.jit(jlade.decode, static_argnames="program").lower(params, inputs, program)
    layer = batch_size * capacity * params.config.num_kv_heads * params.config.head_dim
    pool = batch_size * 2000 * lookahead.guess_set_size * (lookahead.ngram_size - 1)
    assert copies_in_loops(decode.compile().as_text(), [size for size in (layer, pool) if size]) == []


def copies_in_loops(program: str, sizes: list[int]) -> list[str]:
    """Returns the copies and transposes of one or more times so many elements that a program makes inside a loop."""
    computations = dict(re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$\n((?:.*\n)*?)^\}", program, flags=re.MULTILINE))
    assert len(computations) > 2, "the text of compiled programs has changed"
    called = {name: set(re.findall(r"%([\w.\-]+)", body)) & computations.keys() for name, body in computations.items()}
    reached = set(re.findall(r" while\(.*body=%([\w.\-]+)", program))
    assert reached, "no loop found"
    while more := set().union(*(called[name] for name in reached)) - reached:
        reached |= more
    found = []
    for name in reached:
        for line in computations[name].splitlines():
            match = re.search(r"= \w+\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(", line)
            elements = np.prod([int(n) for n in match[1].split(",") if n]) if match else 0
            if elements and any(elements % size == 0 for size in sizes):
                found.append(line.strip())
    return found


def test_the_search_for_copies_finds_one():
    def body(carry):
        i, x = carry
        return i + 1, jnp.roll(x, 1).T.reshape(x.shape) + x[0, 0]

    program = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 9, body, (0, x))).lower(np.zeros((64, 65)))
    assert copies_in_loops(program.compile().as_text(), [64 * 65])
