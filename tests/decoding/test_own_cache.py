"""Decoders with caches of their own: texts, later turns, an engine's prefixes, meshes, and the compiled loops."""

import functools

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.decoding import prefill
from tests import own_caches
from tests.decoding.copies import copies_in_loops, copies_in_steps
from tests.own_caches import ROOM, WIDTH, Recurrent, Slots
from tests.tiny import PAPER, slow

PARAMS = own_caches.params()
CHAIN = LookaheadConfig.jacobi(4)  # compiles fastest
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [1, 2, 3, 1, 2, 3, 1, 2]]
KINDS = pytest.mark.parametrize("decoder", [Slots(), Recurrent()], ids=["slots", "recurrent"])


def generate(decoder, prompt, **options):
    return jlade.generate(PARAMS, prompt, decoder=decoder, **{"max_new_tokens": 20, "lookahead": CHAIN} | options)


@functools.cache
def continued(decoder, prompt, number=20):
    return own_caches.continued(decoder, PARAMS, prompt, number)


@pytest.mark.parametrize(
    ("decoder", "cost"),
    [slow(Slots(), 1.5), (Recurrent(), None), slow(Recurrent(), 1.5)],
    ids=["slots", "recurrent", "both"],
)
def test_texts_are_those_of_a_model_that_reads_token_by_token(decoder, cost):
    """Also at adaptive widths, whose blocks differ in size."""
    lookahead = PAPER if cost is None else LookaheadConfig.tree(7, relative_step_time=cost)
    out = generate(decoder, PROMPTS, lookahead=lookahead)
    assert out.tokens.tolist() == [continued(decoder, tuple(prompt)) for prompt in PROMPTS]


@pytest.mark.slow
@KINDS
def test_a_later_turn_reads_what_is_new_if_the_cache_can_be_shortened_to_it(decoder, monkeypatch):
    first = generate(decoder, PROMPTS[0], keep_state=True)
    text = [*PROMPTS[0], *first.tokens[0].tolist()]
    longer, leaving = [*text, 5, 3], [*text[:12], 5, 3]
    for prompt in (longer, leaving):
        out = generate(decoder, prompt, state=first.state)
        assert out.tokens[0].tolist() == continued(decoder, tuple(prompt))
    seen = []
    read = prefill.prefill
    monkeypatch.setattr(prefill, "prefill", lambda *given: seen.append(given[1].cache) or read(*given))
    for prompt in (longer, leaving):
        generate(decoder, prompt, state=first.state)
    can_be_shortened = isinstance(decoder, Slots)
    assert seen[0].length.tolist() == [len(text) - 1]
    assert (seen[1].length.tolist() if can_be_shortened else seen[1]) == ([12] if can_be_shortened else None)


@pytest.mark.slow
@KINDS
def test_an_engine_shares_what_can_be_shared(decoder):
    """A text that goes on, and one that leaves it: its beginning is taken over if a cache can be shortened."""
    begin = tuple(np.random.default_rng(1).integers(0, 13, 40).tolist())
    with jlade.Engine(PARAMS, decoder=decoder, lookahead=CHAIN, capacity=200, max_sequences=2) as engine:
        read = engine.submit(begin, max_new_tokens=9)
        text = (*begin, *read.result().tokens[0].tolist())
        assert text == (*begin, *continued(decoder, begin, 9))
        for prompt, num_cached in (((*text, 5), len(text) - 1), ((*begin[:30], 7, 7), 30 * isinstance(decoder, Slots))):
            request = engine.submit(prompt, max_new_tokens=9)
            assert request.result().tokens[0].tolist() == continued(decoder, prompt, 9)
            assert request.num_cached == num_cached


@pytest.mark.slow
def test_a_mesh_divides_the_sequences():
    prompts = [PROMPTS[0], PROMPTS[2]]
    out = generate(Slots(), prompts, mesh=jlade.make_mesh(data=2))
    assert out.tokens.tolist() == [continued(Slots(), tuple(prompt)) for prompt in prompts]


@pytest.mark.slow
def test_a_mesh_divides_the_block_if_forward_returns_its_tokens_alone():
    mesh = jlade.make_mesh(lookahead=2)
    out = generate(Recurrent(), PROMPTS[0], mesh=mesh)
    assert out.tokens[0].tolist() == continued(Recurrent(), tuple(PROMPTS[0]))
    with pytest.raises(ValueError, match=r"mesh has an axis lookahead, .* forward returns arrays \[1, 320, 8\]"):
        generate(Slots(), PROMPTS[0], mesh=mesh)


@pytest.mark.slow
def test_no_loop_copies_the_slots():
    capacity = 4096
    decoder, params = Slots(max_positions=capacity), own_caches.params(capacity)
    inputs, config = jlade.prepare(params, [[1]] * 3, decoder=decoder, lookahead=CHAIN, max_new_tokens=capacity - 1)
    layers = frozenset({3 * (ROOM + capacity) * WIDTH})
    read = jax.jit(jlade.prefill, static_argnames="config").lower(params, inputs, config)
    assert copies_in_loops(read.compile().as_text(), layers) == []
    assert copies_in_steps(params, decoder.init_cache(params, 3, capacity), inputs, config, layers) == []
