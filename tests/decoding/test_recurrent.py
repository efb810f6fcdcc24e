"""Models with recurrent layers decode as token by token: settings, sampling, turns, an engine, meshes, copies."""

import functools

import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig, SamplingConfig
from jlade.config import PLAIN
from tests import plain_llama
from tests.decoding.copies import copies_in_steps
from tests.tiny import ALONE, BESIDE_ATTENTION, CHANNELS, CONVOLUTIONS, PAPER, RECURRENT, STATE_SPACES, slow, tiny_llama

SHAPE = RECURRENT | {"num_layers": 3}
KINDS = {"delta": SHAPE, "state_space": STATE_SPACES, "convolution": CONVOLUTIONS | {"num_layers": 3}}
KINDS |= {"beside attention": BESIDE_ATTENTION, "alone": ALONE, "channel_delta": CHANNELS | {"num_layers": 3}}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [5], [1, 2, 3, 1, 2, 3, 1, 2]]
TREE = LookaheadConfig.tree(15)
OTHERS = ("state_space", "convolution", "beside attention", "alone", "channel_delta")
MESHES = [("delta", (1, 1, 2)), slow("delta", (1, 2, 1)), slow("delta", (2, 2, 2))]
MESHES += (
    [(kind, (1, 2, 2)) for kind in OTHERS[:-1]]
    + [slow("channel_delta", (1, 2, 2))]
    + [slow(kind, sizes) for kind in OTHERS for sizes in ((1, 1, 2), (1, 2, 1))]
)


@functools.cache
def continued(prompt, number=24, kind="delta"):
    """Returns the greedy text of a model in NumPy that follows its rule token by token."""
    text = list(prompt)
    for _ in range(number):
        text.append(int(np.argmax(plain_llama.logits(tiny_llama(2, **KINDS[kind]), text)[-1])))
    return text[len(prompt) :]


def generate(prompts=PROMPTS, kind="delta", **options):
    options = {"max_new_tokens": 24, "lookahead": PAPER, "eos_ids": ()} | options
    return jlade.generate(tiny_llama(2, **KINDS[kind]), prompts, **options)


@pytest.mark.parametrize(
    ("kind", "lookahead"),
    [
        ("delta", PAPER),
        ("delta", TREE),
        slow("delta", LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))),
        slow("delta", LookaheadConfig.jacobi(5)),
        ("delta", PLAIN),
        *((kind, PAPER) for kind in OTHERS),
        *(slow(kind, TREE) for kind in OTHERS),
    ],
)
def test_texts_are_those_of_the_rule_token_by_token(kind, lookahead):
    out = generate(kind=kind, lookahead=lookahead)
    assert out.tokens.tolist() == [continued(tuple(prompt), kind=kind) for prompt in PROMPTS]
    assert kind != "delta" or (out.steps.sum() < out.tokens.size) == (lookahead is not PLAIN)


@pytest.mark.slow
def test_sampled_texts_do_not_depend_on_the_setting():
    sampling = SamplingConfig(temperature=1.0)
    found = [generate(lookahead=setting, sampling=sampling).tokens.tolist() for setting in (PAPER, TREE, PLAIN)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["delta", *map(slow, OTHERS)])
def test_a_turn_goes_on_from_the_state(kind):
    first = generate(PROMPTS[0], kind, keep_state=True, max_new_tokens=9)
    text = [*PROMPTS[0], *first.tokens[0].tolist(), 5, 3]
    assert generate(text, kind, state=first.state).tokens[0].tolist() == continued(tuple(text), kind=kind)


@pytest.mark.parametrize("kind", ["delta", slow("beside attention"), slow("alone"), slow("channel_delta")])
def test_an_engine_takes_over_a_whole_text(kind):
    prompt = tuple(np.random.default_rng(1).integers(0, 13, 30).tolist())
    with jlade.Engine(tiny_llama(2, **KINDS[kind]), lookahead=PAPER, capacity=64, max_sequences=2) as engine:
        first = engine.submit(prompt, max_new_tokens=9, eos_ids=()).result().tokens[0].tolist()
        assert first == continued(prompt, 9, kind)
        text = (*prompt, *first, 5)
        later = engine.submit(text, max_new_tokens=9, eos_ids=())
        others = [engine.submit(each, max_new_tokens=9, eos_ids=()) for each in PROMPTS]
        assert later.result().tokens[0].tolist() == continued(text, 9, kind)
        assert later.num_cached == len(text) - 2
        for each, request in zip(PROMPTS, others, strict=True):
            assert request.result().tokens[0].tolist() == continued(tuple(each), 9, kind)


@pytest.mark.parametrize(("kind", "sizes"), MESHES)
def test_a_mesh_divides_the_heads_or_the_block(kind, sizes):
    out = generate(PROMPTS[::2], kind, mesh=jlade.make_mesh(*sizes))
    assert out.tokens.tolist() == [continued(tuple(prompt), kind=kind) for prompt in PROMPTS[::2]]


def test_a_mesh_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(ValueError, match="2 recurrent heads, which divide among 1, 2 devices"):
        generate(mesh=jlade.make_mesh(model=4))


def test_no_loop_copies_a_state():
    params = tiny_llama(2, **SHAPE | {"max_positions": 512})
    inputs, config = jlade.prepare(params, [[1]] * 3, lookahead=TREE, max_new_tokens=500)
    cache = params.decoder.init_cache(params, 3, 512)
    sizes = cache.states[0].memory.size, cache.keys[0].size
    assert copies_in_steps(params, cache, inputs, config, sizes) == []
