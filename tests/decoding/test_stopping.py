"""Where texts end, against plain searches in the text that is generated without an end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.decoding import loop
from jlade.generation import stop_strings as automata
from tests import reference
from tests.decoding.observed import first_window, logits_of
from tests.texts import assert_same_texts
from tests.tiny import PAPER, TOKENS, slow, tiny_llama, tiny_tokenizer

LENGTH = 40
SAMPLED = SamplingConfig(temperature=0.2, top_p=0.9)
generate = functools.partial(
    jlade.generate,
    tiny_llama(3),
    max_new_tokens=LENGTH,
    lookahead=PAPER,
    tokenizer=tiny_tokenizer(),
    logprobs=True,
    with_statistics=True,
    keep_state=True,
)


stop_strings = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=4)


@given(stops=st.lists(stop_strings, min_size=1, max_size=3), tokens=st.lists(st.integers(0, 12), max_size=30))
def test_the_automaton_equals_a_search_in_the_text(stops, tokens):
    automaton = automata.build(tiny_tokenizer(), 13, tuple(map(tuple, stops)))
    table = np.asarray(automaton.next_state).astype(int)
    for strings, state in zip(stops, automaton.start.tolist(), strict=True):
        text = b""
        for token in tokens:
            begin, text = len(text), text + TOKENS[token]
            read = table[state, token]
            ends = range(begin + 1, len(text) + 1)
            assert (read < 0) == any(text[:end].endswith(s.encode()) for end in ends for s in strings)
            state = ~read if read < 0 else read


def test_another_number_of_stop_strings_makes_no_other_shape():
    few, many = (automata.build(tiny_tokenizer(), 13, (stops,)) for stops in (("a",), ("abc", "cab", "é")))
    assert few.next_state.shape == many.next_state.shape == (automata.MIN_STATES, 13)
    longest = automata.build(tiny_tokenizer(), 13, (("ab" * 65,),))
    assert longest.next_state.shape == (2 * automata.MIN_STATES, 13)


@pytest.mark.parametrize("config", [SamplingConfig(), slow(SAMPLED)], ids=["greedy", "sampled"])
def test_every_stop_string_ends_the_text_where_a_search_finds_it(config):
    """Each string of up to 4 characters in a text, a sequence each, some with a second string; all results agree."""
    key = jax.random.key(2)
    free = generate([3, 1, 4], sampling=config, key=key[None])
    whole, text = free.tokens[0].tolist(), free.text[0]
    strings = list(dict.fromkeys(text[i : i + n] for n in range(1, 5) for i in range(len(text) - n)))
    strings = [string for string in strings if "\ufffd" not in string]
    stops = [[string] if i % 3 else [string, strings[i // 2]] for i, string in enumerate(strings)]
    out = generate([[3, 1, 4]] * len(stops), sampling=config, key=repeated(key, len(stops)), stop=stops)

    step_of = np.repeat(np.arange(free.steps[0]), free.accepted[0])
    first_of, last_of = (np.searchsorted(step_of, step_of, side) - (side == "right") for side in ("left", "right"))
    seen = set()
    for row, stop in enumerate(stops):
        tokens, expected_text, _ = reference.end(whole, TOKENS, stop)
        assert (out.text[row], out.finish_reason[row]) == (expected_text, "stop")
        assert_row(out, row, tokens, free)
        end = len(tokens) - 1
        seen |= {name for name, is_seen in {
            "first": first_of[end] == end < last_of[end],
            "middle": first_of[end] < end < last_of[end],
            "last": first_of[end] < end == last_of[end],
            "across": first_of[end] == end > 0 and len(TOKENS[tokens[-1]]) < min(len(s.encode()) for s in stop),
        }.items() if is_seen}  # fmt: skip
    assert seen == {"first", "middle", "last", "across"}, "where in a step a stop string ends, and whether it spans two"


def repeated(key, count):
    return jnp.repeat(key[None], count)


def assert_row(out, row, tokens, free):
    """Sequence `row` of `out` is `tokens`, the beginning of the only sequence of `free`, in all results."""
    length = len(tokens)
    assert out.lengths[row] == length
    assert out.tokens[row].tolist() == tokens + [-1] * (LENGTH - length)
    for got, expected in ((out.logprobs, free.logprobs), (out.processed_logprobs, free.processed_logprobs)):
        np.testing.assert_allclose(got[row, :length], expected[0, :length], atol=1e-5)
        assert np.isnan(got[row, length:]).all()
    accepted = out.accepted[row, : out.steps[row]]
    assert accepted.sum() == length
    np.testing.assert_array_equal(accepted[:-1], free.accepted[0, : len(accepted) - 1])
    statistics = out.statistics
    assert statistics.accepted_histogram[row].tolist() == np.bincount(accepted, minlength=5)[1:].tolist()
    assert statistics.steps_with_accepted[row] == (accepted > 1).sum()
    assert out.state.num_tokens[row] == out.state.inputs.lengths[row] + length
    assert out.state.cache.length[row] == out.state.num_tokens[row] - 1


def test_every_set_of_end_tokens_ends_the_text_where_it_is_found():
    free = generate([3, 1, 4], eos_ids=())
    whole = free.tokens[0].tolist()
    sets = [[eos, *more] for eos in sorted(set(whole)) for more in ([], [12, whole[7]], [whole[20], eos])]
    out = generate([[3, 1, 4]] * len(sets), eos_ids=sets, key=repeated(jax.random.key(0), len(sets)))
    for row, eos_ids in enumerate(sets):
        tokens, text, reason = reference.end(whole, TOKENS, eos_ids=eos_ids)
        assert (out.text[row], out.finish_reason[row], reason) == (text, "eos", "eos")
        assert_row(out, row, tokens, free)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [["c"], ["abc", "cab"], ["é"], ["a"]])
def test_streamed_text_is_safe_from_stop_strings(stop):
    whole = generate([3, 1, 4], stop=stop)
    pieces = list(
        jlade.stream(
            tiny_llama(3), [3, 1, 4], max_new_tokens=LENGTH, lookahead=PAPER, stop=stop, tokenizer=tiny_tokenizer()
        )
    )
    assert "".join(piece.text for piece in pieces) == whole.text[0]
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == whole.tokens[0, : whole.lengths[0]].tolist()
    assert [piece.generation is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    last = pieces[-1].generation
    assert (last.text, last.finish_reason) == (whole.text, whole.finish_reason)
    np.testing.assert_array_equal(last.accepted, whole.accepted)


def test_before_min_new_tokens_nothing_ends_a_text():
    """End tokens are not even drawn, in plain decoding or ahead; stop strings are passed over."""
    least = [0, 1, 5, 9, LENGTH]
    prompt, eos_ids = [3, 1, 4], generate([3, 1, 4], eos_ids=()).tokens[0, [0, 3]].tolist()
    arguments = {"eos_ids": eos_ids, "key": repeated(jax.random.key(0), len(least)), "min_new_tokens": least}
    out = generate([prompt] * len(least), **arguments)
    plain = generate([prompt] * len(least), **arguments | {"lookahead": None})
    assert_same_texts(out, plain)
    for row, minimum in enumerate(least):
        tokens, accepted = reference.decode(
            banning_next_token(eos_ids, len(prompt) + minimum),
            prompt,
            LENGTH,
            window_size=4,
            ngram_size=4,
            guess_set_size=3,
            pool_from_prompt=True,
            start=first_window(jax.random.key(0), prompt, PAPER),
            eos_ids=eos_ids,
        )
        assert out.tokens[row, : out.lengths[row]].tolist() == tokens
        assert out.accepted[row, : out.steps[row]].tolist() == accepted
        assert out.lengths[row] >= minimum

    whole = generate(prompt, eos_ids=()).tokens[0].tolist()
    out = generate([prompt] * len(least), stop="b", min_new_tokens=least, eos_ids=())
    for row, minimum in enumerate(least):
        tokens, text, reason = reference.end(whole, TOKENS, ["b"], min_new_tokens=minimum)
        assert out.tokens[row, : out.lengths[row]].tolist() == tokens
        assert (out.text[row], out.finish_reason[row]) == (text, reason)


def banning_next_token(eos_ids, until):
    def next_token(text):
        logits = logits_of(3)(text).copy()
        if len(text) < until:
            logits[list(eos_ids)] = -np.inf
        return int(np.argmax(logits))

    return next_token


@pytest.mark.slow
def test_nothing_after_the_stop_is_in_the_pool():
    """With n-grams from the text alone, the pool is that of the prompt and the tokens kept, to the last."""
    lookahead = LookaheadConfig.paper(0, 3, 4)
    prompt = [3, 1, 4, 1, 5]
    whole = generate(prompt, lookahead=lookahead).text[0]
    for stop in (whole[2:4], whole[9:12], whole[20:24]):
        out = generate(prompt, lookahead=lookahead, stop=stop)
        assert out.finish_reason == ("stop",)
        text = prompt + out.tokens[0, : out.lengths[0]].tolist()
        pool = reference.Pool(4)
        for end in range(3, len(text) + 1):
            pool.insert(text[end - 3 : end])
        for key in range(13):
            found = out.state.sources["pool"].ngrams[0, key].tolist()
            assert [tuple(ngram[1:]) for ngram in found if ngram[0] == key] == pool.lookup(key)


def test_sequences_have_limits_and_stops_of_their_own():
    stops, limits, prompts = [["c"], [], ["a", "bb"], []], [30, 7, 40, 1], [[1], [1, 2, 3], [5, 6], [7]]
    keys = jax.random.split(jax.random.key(0), 4)
    out = generate(prompts, stop=stops, max_new_tokens=limits, eos_ids=[[], [4], [], []], key=keys)
    assert out.tokens.shape == (4, 40)
    for row in range(4):
        alone = generate(
            prompts[row],
            stop=stops[row],
            max_new_tokens=limits[row],
            eos_ids=[[], [4], [], []][row],
            key=keys[row : row + 1],
        )
        assert out.tokens[row, : limits[row]].tolist() == alone.tokens[0].tolist()
        assert (out.text[row], out.finish_reason[row], out.steps[row]) == (
            alone.text[0],
            alone.finish_reason[0],
            alone.steps[0],
        )


@pytest.mark.slow
def test_a_step_of_a_stream_does_not_copy_the_table_of_the_stop_strings():
    options = {"stop": "ab", "tokenizer": tiny_tokenizer(), "lookahead": PAPER}
    inputs, config = jlade.prepare(tiny_llama(3), [1, 2], max_new_tokens=12, min_new_tokens=3, **options)
    state = jlade.start(jlade.prefill(tiny_llama(3), inputs, config), inputs, config)
    table = state.inputs.stopping.strings.next_state
    after = loop.run_steps(tiny_llama(3), state, config, max_steps=1)
    assert after.inputs.stopping.strings.next_state.unsafe_buffer_pointer() == table.unsafe_buffer_pointer()
