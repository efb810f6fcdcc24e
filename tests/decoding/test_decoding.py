"""The compiled program against the algorithm in plain Python, with the numbers of its traces."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jlade
from jlade import LookaheadConfig, NGramConfig
from jlade.config import PLAIN
from jlade.decoding import loop, prefill, sampling
from jlade.decoding.state import CHUNKS, CHUNKS_ON_CPU
from jlade.drafts import graded
from jlade.drafts.tree import NONE
from jlade.generation import prior as prior_lib
from jlade.lookahead import window
from tests import reference
from tests.decoding.observed import first_guess, first_window, logits_of, next_token_of, sources_of
from tests.texts import assert_text, text_of
from tests.tiny import PAPER, slow, slow_but, tiny_llama

NO_SHRINKING = (Phase.explicit, Phase.generate)  # every example may compile a program
SETTINGS = [
    PAPER,
    LookaheadConfig.paper(1, 5, 6, pool_from_prompt=False),
    LookaheadConfig.paper(6, 2, 4),
    LookaheadConfig.paper(0, 3, 2),
    LookaheadConfig.paper(0, 4, 2, pool_from_prompt=False),
    LookaheadConfig.paper(3, 3, 0),
    LookaheadConfig.paper(5, 6, 1),
    LookaheadConfig.tree(12, ngrams=NGramConfig(3, 4, 3)),
    LookaheadConfig.tree(6, sources=(), ngrams=NGramConfig(2, 3, 9)),
    LookaheadConfig.tree(30, sources=("suffix",)),
    LookaheadConfig.tree(20, sources=("recycled",)),
    LookaheadConfig.tree(9, sources=("suffix", "chain")),
    LookaheadConfig.jacobi(6),
    LookaheadConfig.paper(4, 4, 3, window_advance="token", pool_from_prompt=False),
    PLAIN,
]
(LARGE, _), (SMALL, _) = CHUNKS_ON_CPU


def pairs_of(row):
    return [(each // graded.LEVELS, each % graded.LEVELS) for each in row if each != NONE]


def drawn_rows(key, lookahead, text, before):
    """The rows that jlade draws after a step which began with `before` tokens."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 0), sampling.WINDOW), before)
    shape = lookahead.max_accepted - 1, lookahead.window_size
    return window.draw(key, jnp.array(text), jnp.int32(len(text)), math.prod(shape)).reshape(shape).tolist()


def decode_plainly(seed, prompt, max_new_tokens, lookahead, key, eos_ids, corpus=(), predicted=(), known=None):
    """Runs the reference with the first window that jlade draws."""
    by_token = lookahead.ngrams.window_advance == "token"
    return reference.decode(
        next_token_of(seed),
        prompt,
        max_new_tokens,
        window_size=lookahead.window_size,
        ngram_size=lookahead.ngram_size,
        guess_set_size=lookahead.ngrams.guess_set_size,
        pool_from_prompt=lookahead.ngrams.pool_from_prompt,
        start=first_window(key, prompt, lookahead),
        eos_ids=eos_ids,
        sources=sources_of(seed, lookahead, corpus, predicted=predicted, known=known),
        drawn_rows=functools.partial(drawn_rows, key, lookahead) if by_token else None,
    )


def assert_equals_reference(seed, prompt, limit, lookahead, key=None, eos_ids=(), known=None, **options):
    """Decodes with the `options` of a call, `known` being what its prior knows, and compares with the reference."""
    key = jax.random.key(0) if key is None else key
    brought = options.get("corpus", ()), options.get("prediction") or ()
    expected = decode_plainly(seed, prompt, limit, lookahead, key, eos_ids, *brought, known)
    options |= {"max_new_tokens": limit, "lookahead": lookahead, "key": key, "eos_ids": eos_ids}
    assert_text(jlade.generate(tiny_llama(seed), prompt, **options), *expected)


def generated(out, row=0):
    return text_of(out, row), out.accepted[row, : out.steps[row]].tolist()


@pytest.mark.parametrize("lookahead", slow_but(SETTINGS, SETTINGS[0], SETTINGS[11], SETTINGS[13], PLAIN), ids=str)
@settings(max_examples=8, phases=NO_SHRINKING)
@given(
    seed=st.sampled_from([0, 2, 3, 4]),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    max_new_tokens=st.integers(1, 40),
    key=st.integers(0, 99),
    eos_ids=st.lists(st.integers(0, 12), max_size=2),
)
def test_equals_the_reference(lookahead, seed, prompt, max_new_tokens, key, eos_ids):
    assert_equals_reference(seed, prompt, max_new_tokens, lookahead, jax.random.key(key), eos_ids)


@pytest.mark.slow
@settings(max_examples=12, phases=NO_SHRINKING)
@given(seed=st.sampled_from([0, 2, 3, 4]), prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20))
def test_a_chain_for_the_whole_text_is_algorithm_1(seed, prompt):
    """The tokens that have converged after each iteration are those that jlade has accepted."""
    guesses = [first_guess(prompt, len(prompt) + i) for i in range(12)]
    converged = []
    for before, after in reference.jacobi(next_token_of(seed), prompt, guesses):
        equal = [*(one == other for one, other in zip(before, after, strict=True)), False].index(False)
        converged.append(min(equal + 1, len(after)))
    out = jlade.generate(tiny_llama(seed), prompt, max_new_tokens=12, lookahead=LookaheadConfig.jacobi(12))
    tokens, accepted = generated(out)
    assert tokens == after
    assert np.cumsum(accepted).tolist() == converged[: len(accepted)]
    assert set(converged[len(accepted) :]) <= {12}


@pytest.mark.slow
@settings(max_examples=12, phases=NO_SHRINKING)
@given(
    seed=st.sampled_from([0, 2, 3, 4]),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    corpus=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=30), max_size=3),
    is_of_the_model=st.booleans(),
)
def test_equals_the_reference_with_a_corpus(seed, prompt, corpus, is_of_the_model):
    if is_of_the_model:
        corpus = [*corpus, prompt[-3:] + decode_plainly(seed, prompt, 20, PLAIN, jax.random.key(0), ())[0]]
    assert_equals_reference(seed, prompt, 30, LookaheadConfig.tree(12, sources=("suffix",)), corpus=corpus)


@pytest.mark.slow
@settings(max_examples=12, phases=NO_SHRINKING)
@given(
    seed=st.sampled_from([0, 2, 3, 4]),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    text=st.lists(st.integers(0, 12), min_size=2, max_size=60),
    is_of_the_model=st.booleans(),
)
def test_equals_the_reference_with_a_prior(seed, prompt, text, is_of_the_model):
    """The most probable tokens are the model's own, or wrong ones."""
    contexts = [text[: end + 1] for end in range(len(text))]
    order = 1 if is_of_the_model else -1
    best = np.array([np.argsort(-order * logits_of(seed)(each), kind="stable") for each in contexts], np.int32)
    chances = np.linspace(0.3, 0.0, best.shape[1], dtype=np.float32)[None, :] * np.ones((len(best), 1), np.float32)
    pairs = np.array(list(zip([NONE, *text[:-1]], text, strict=True)), np.int32)
    table = prior_lib.table_of(pairs, best, chances, 13)
    known = {(token,): pairs_of(row) for token, row in enumerate(table.after_token.tolist())}
    for pair, after in zip(table.pairs.tolist(), table.after_pair.tolist(), strict=True):
        if pair[1] != NONE:
            known[tuple(pair)] = pairs_of(after)
    lookahead = LookaheadConfig.tree(20, sources=("recycled",))
    assert_equals_reference(seed, prompt, 30, lookahead, known=known, prior=jlade.Prior(table))


@pytest.mark.slow
@settings(max_examples=16, phases=NO_SHRINKING)
@given(
    seed=st.sampled_from([0, 2, 3, 4]),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    edits=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.lists(st.integers(0, 12), max_size=3)), max_size=3
    ),
)
def test_equals_the_reference_with_a_prediction(seed, prompt, edits):
    """The prediction is the text itself, with spans of it replaced, left out or added."""
    lookahead = LookaheadConfig.tree(12, sources=("prediction", "suffix"))
    predicted = decode_plainly(seed, prompt, 40, PLAIN, jax.random.key(0), ())[0]
    for place, number, tokens in edits:
        predicted[place : place + number] = tokens
    assert_equals_reference(seed, prompt, 40, lookahead, prediction=predicted or None)


@settings(max_examples=8, phases=NO_SHRINKING)
@given(
    lookahead=st.builds(
        LookaheadConfig.paper,
        *(st.integers(0, 8), st.integers(2, 6), st.integers(0, 8)),
        pool_from_prompt=st.booleans(),
    )
    | st.builds(
        LookaheadConfig.tree,
        st.integers(1, 30),
        ngrams=st.builds(
            NGramConfig,
            *(st.integers(0, 3), st.integers(2, 4), st.integers(0, 3)),
            pool_from_prompt=st.booleans(),
        ),
    ),
    seed=st.sampled_from([0, 2, 3, 4]),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20),
)
@pytest.mark.slow
def test_equals_the_reference_at_random_settings(lookahead, seed, prompt):
    assert_equals_reference(seed, prompt, 40, lookahead)


@pytest.mark.parametrize("chunks", [((8, 6), (4, 2), (2, 0)), slow(((8, 2), (2, 0)))], ids=str)
def test_prompts_longer_than_a_prefill_chunk(chunks):
    params, key, lookahead = tiny_llama(), jax.random.key(1), PAPER
    for length in (1, 3, 4, 5, 8, 9, 17):
        prompt = np.random.default_rng(length).integers(0, 13, length).tolist()
        inputs, config = jlade.prepare(params, prompt, max_new_tokens=20, lookahead=lookahead, key=key)
        state = jlade.decode(params, inputs, dataclasses.replace(config, chunks=chunks))
        tokens = state.tokens[0, length : state.num_tokens[0]].tolist()
        accepted = state.info.accepted[0, : state.num_steps[0]].tolist()
        assert (tokens, accepted) == decode_plainly(0, prompt, 20, lookahead, key, ())


def test_a_capacity_that_is_too_small_is_refused_where_it_is_known():
    params = tiny_llama()
    inputs, config = jlade.prepare(params, [[1, 2, 3], [4]], lookahead=SETTINGS[0], max_new_tokens=[5, 9])
    short = dataclasses.replace(inputs, prompts=inputs.prompts[:, :9])
    message = "inputs.prompts has a capacity of 9 tokens, but a prompt and its max_new_tokens make 10: pad it to"
    for values in (short, jax.tree.map(jnp.asarray, short)):
        for function, first in ((jlade.decode, params), (jlade.prefill, params), (jlade.start, None)):
            with pytest.raises(ValueError, match=message):
                function(first, values, config)
    traced = jax.eval_shape(lambda values: jlade.decode(params, values, config), short)
    assert traced.tokens.shape == (2, 9), "traced lengths are not known"


def test_a_small_cache_has_fewer_chunks():
    assert prefill.fitting(CHUNKS_ON_CPU, 1024) == CHUNKS_ON_CPU == ((64, 32), (16, 0))
    assert prefill.fitting(CHUNKS_ON_CPU, 128) == ((16, 0),)
    assert prefill.fitting(CHUNKS_ON_CPU, 12) == ((12, 0),)
    assert prefill.fitting(CHUNKS, 2048) == CHUNKS


@pytest.mark.parametrize("lookahead", [SETTINGS[0], *map(slow, SETTINGS[2::2])], ids=str)
def test_sequences_of_a_ragged_batch_get_what_they_get_alone(lookahead):
    params, rng = tiny_llama(2), np.random.default_rng(3)
    prompts = [rng.integers(0, 13, length).tolist() for length in (1, 7, 20, 2, 11, 3, 16, 5)]
    generate = functools.partial(jlade.generate, params, max_new_tokens=30, lookahead=lookahead, eos_ids=[4])
    batch = generate(prompts)
    assert len(set(batch.lengths.tolist())) > 1, "some row should end before others"
    for row, prompt in enumerate(prompts):
        assert generated(batch, row) == generated(generate(prompt))


def test_every_position_of_an_end_token_within_a_step():
    """Each token of a text in turn as the end token: it is cut there, wherever in a step it falls."""
    params, prompt, lookahead = tiny_llama(3), [3, 1, 4], PAPER
    whole, accepted = generated(jlade.generate(params, prompt, max_new_tokens=40, lookahead=lookahead, eos_ids=()))
    assert max(accepted) > 2
    for eos in set(whole):
        out = jlade.generate(params, prompt, max_new_tokens=40, lookahead=lookahead, eos_ids=[12, eos])
        end = min(whole.index(e) for e in (12, eos) if e in whole) + 1
        assert generated(out)[0] == whole[:end]
        assert out.finish_reason == ("eos",)
        assert out.accepted.sum() == end


def test_every_limit_cuts_exactly():
    params, prompt, lookahead = tiny_llama(3), [3, 1, 4], PAPER
    whole, _ = generated(jlade.generate(params, prompt, max_new_tokens=30, lookahead=lookahead, eos_ids=()))
    for limit in range(1, 30):
        out = jlade.generate(params, prompt, max_new_tokens=limit, lookahead=lookahead, eos_ids=())
        assert generated(out)[0] == whole[:limit]
        assert out.finish_reason == ("length",)


@pytest.mark.slow
def test_a_text_can_fill_the_models_positions_to_the_last():
    params = tiny_llama(max_positions=32)
    out = jlade.generate(params, [1, 2], max_new_tokens=30, lookahead=PAPER)
    plain = jlade.generate(params, [1, 2], max_new_tokens=30, lookahead=None)
    assert out.lengths.tolist() == [30]
    assert out.tokens.tolist() == plain.tokens.tolist()


def test_no_request_sees_anothers_pool():
    params, lookahead = tiny_llama(3), PAPER
    first = jlade.generate(params, [3, 1, 4], max_new_tokens=40, lookahead=lookahead)
    jlade.generate(params, [7, 8, 9], max_new_tokens=40, lookahead=lookahead)
    again = jlade.generate(params, [3, 1, 4], max_new_tokens=40, lookahead=lookahead)
    assert generated(first) == generated(again)


def state_before_steps(params, prompts, lookahead, **options):
    inputs, config = jlade.prepare(params, prompts, lookahead=lookahead, **options)
    return jlade.start(jlade.prefill(params, inputs, config), inputs, config), config


def test_step_leaves_its_state_as_it_was():
    params = tiny_llama()
    state, config = state_before_steps(params, [1, 2, 3], PAPER, max_new_tokens=20)
    before = jax.tree.map(jnp.copy, state)
    one_step = jax.jit(functools.partial(jlade.step, config=config))
    first, second = (one_step(params, state) for _ in range(2))
    chex.assert_trees_all_equal(*map(without_keys, (state, before)))
    chex.assert_trees_all_equal(*map(without_keys, (first, second)))
    assert first.num_steps.tolist() == [1]
    chex.assert_trees_all_equal(*map(without_keys, (loop.run_steps(params, state, config, max_steps=1), first)))


def without_keys(state):
    """The state with its keys as numbers, which can be compared."""
    return state.replace(inputs=state.inputs.replace(key=jax.random.key_data(state.inputs.key)))


@pytest.mark.slow
def test_a_sequence_that_is_done_stays_as_it_is():
    params = tiny_llama()
    prompts = [[1, 2, 3], [4, 5, 6]]
    state, config = state_before_steps(params, prompts, PAPER, max_new_tokens=[2, 40], eos_ids=())
    one_step = jax.jit(functools.partial(jlade.step, config=config))
    while not state.done[0]:
        state = one_step(params, state)
    later = one_step(params, state)
    assert later.num_steps.tolist() == [state.num_steps[0], state.num_steps[1] + 1]
    first_sequences = (jax.tree.map(lambda x: x[0], without_keys(s)) for s in (later, state))
    chex.assert_trees_all_equal(*first_sequences)


@pytest.mark.slow
def test_decode_works_inside_the_callers_own_jit_and_vmap():
    params, lookahead = tiny_llama(3), PAPER
    prompts = np.array([[1, 2], [3, 4], [5, 6]])
    of_all = [jlade.prepare(params, prompt, max_new_tokens=20, lookahead=lookahead, eos_ids=()) for prompt in prompts]
    config = of_all[0][1]
    inputs = jax.tree.map(lambda *arrays: jnp.stack(arrays), *(inputs for inputs, _ in of_all))
    together = jax.jit(jax.vmap(lambda inputs: jlade.decode(params, inputs, config).tokens[0, 2:22]))(inputs)
    for tokens, prompt in zip(together, prompts, strict=True):
        alone = jlade.generate(params, prompt, max_new_tokens=20, lookahead=lookahead)
        assert tokens.tolist() == alone.tokens[0].tolist()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (SETTINGS[0], [1, SMALL, 21, LARGE]),
        # Recycled logits have another prefill.
        slow(LookaheadConfig.tree(9, ngrams=NGramConfig(2, 3, 2)), [1, SMALL, 13, LARGE, LARGE, SMALL]),
    ],
    ids=["paper", "tree"],
)
def test_prefill_is_traced_once_and_decode_once_for_each_setting(setting, expected, monkeypatch):
    """Twenty prompts, limits, seeds and sets of end tokens, with and without lookahead."""
    params = tiny_llama(max_positions=1000 + setting.block_size)  # a shape of this setting's own
    sizes = []
    original = type(params.decoder).forward

    def forward(self, params, tokens, *rest):
        sizes.append(tokens.shape[1])
        return original(self, params, tokens, *rest)

    monkeypatch.setattr(type(params.decoder), "forward", forward)
    rng = np.random.default_rng(0)
    for i, length in enumerate(np.linspace(1, 400, 20).astype(int)):
        jlade.generate(
            params,
            rng.integers(0, 13, length),
            max_new_tokens=1 + i,
            lookahead=setting if i % 2 else None,
            eos_ids=range(i % 5),
            key=jax.random.key(i),
        )
    assert sizes == expected


@pytest.mark.slow
def test_a_program_holds_no_step_cost():
    with pytest.raises(
        ValueError, match=r"lookahead\.relative_step_time must be None in a DecodeConfig, got 1\.5: pass Inputs\.costs"
    ):
        jlade.DecodeConfig(tiny_llama().decoder, LookaheadConfig(relative_step_time=1.5))


@pytest.mark.slow
def test_works_with_64_bit_types_enabled():
    params, lookahead = tiny_llama(3), PAPER
    expected = generated(jlade.generate(params, [3, 1, 4], max_new_tokens=30, lookahead=lookahead))
    with jax.enable_x64(True):
        assert generated(jlade.generate(params, [3, 1, 4], max_new_tokens=30, lookahead=lookahead)) == expected
