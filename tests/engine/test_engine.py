"""Requests to an engine against `jlade.generate` of each alone, in random orders and under faults."""

import asyncio
import concurrent.futures
import dataclasses
import gc
import queue
import random
import threading
import time
import weakref

import jax
import numpy as np
import pytest

import jlade
from jlade import SamplingConfig
from jlade.config import PLAIN
from jlade.costs import choice
from jlade.decoding import prefill, sampling
from jlade.engine import rows
from jlade.generation import corpus as corpus_lib
from tests import plain_llama
from tests.compilations import recorded
from tests.engine.engines import (
    PARAMS,
    SAMPLINGS,
    SETTINGS,
    SHARED,
    alone,
    assert_equal,
    assert_equal_alone,
    draw,
    engine,
    failing,
    submit_at_random,
)
from tests.tiny import slow, tiny_tokenizer


@pytest.fixture(scope="module")
def shared():
    with engine() as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["windows", "adaptive", "latent"])
def test_a_text_is_that_of_its_request_alone(setting):
    """Random requests arrive at random times from three threads; a part of them is cancelled on the way."""
    memory = 24_000 if setting == "adaptive" else None  # of one prefix
    with engine(setting, prefix_memory=memory) as running:
        requests = submit_at_random(running, num_clients=3, number=12)
        assert 20 < assert_equal_alone(requests, setting) < len(requests)
        assert any(request.num_cached for *_, request in requests)


@pytest.mark.parametrize("lookahead", [True, False])
def test_a_grammar_whose_tokens_are_banned_is_a_dead_end(shared, lookahead):
    """After "ab" it allows "c" alone, which only two tokens begin. The next request for "abc" has it."""
    banned = SamplingConfig(logit_bias={token: -float("inf") for token in (4, 7)})
    options = {"grammar": jlade.Grammar.choice(["abc"]), "eos_ids": 12, "max_new_tokens": 9, "lookahead": lookahead}
    out = shared.submit([1, 2], sampling=banned, **options).result()
    assert (out.text, out.finish_reason) == (("ab",), ("dead_end",))
    out = shared.submit([1, 2], **options).result()
    assert (out.text, out.finish_reason) == (("abc",), ("eos",))


@pytest.mark.parametrize(
    ("grammar", "eos_ids", "text"),
    [
        (jlade.Grammar.choice(["ac"]), [12, 4], None),
        (jlade.Grammar.choice(["bbb"]), [1, 12], None),
        (jlade.Grammar.choice(["cabb"]), [12, 4, 2], "cabb"),  # "cab" is another token
        (jlade.Grammar.regex("(ac?)"), [4], "ac"),
    ],
)
def test_an_end_token_is_no_part_of_a_text_of_a_grammar(shared, grammar, eos_ids, text):
    options = {"grammar": grammar, "eos_ids": eos_ids, "max_new_tokens": 9}
    if text is None:
        with pytest.raises(ValueError, match=r"^eos_ids must leave tokens that spell a text .* got \[[14]\]:"):
            shared.submit([1, 2], **options)
        return
    out = shared.submit([1, 2], **options).result()
    assert (out.text, out.finish_reason) == ((text,), ("eos",))


def test_pieces_make_up_the_result(shared):
    prompt = [3, 1, 4]
    for stop in ((), ("c",), ("éa", "bb")):
        options = {"max_new_tokens": 20, "stop": stop, "logprobs": True, "top_logprobs": 1}
        pieces = list(shared.submit(prompt, **options))
        assert [piece.generation is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        result = pieces[-1].generation
        assert_equal(result, alone(prompt, options))
        assert "".join(piece.text for piece in pieces) == result.text[0]
        for name in ("tokens", "logprobs", "top_tokens"):
            joined = np.concatenate([getattr(piece, name) for piece in pieces])
            np.testing.assert_array_equal(joined, getattr(result, name)[0, : result.lengths[0]])
        np.testing.assert_array_equal(np.concatenate([piece.accepted for piece in pieces]), result.accepted[0])
        assert all(piece.accepted.sum() == len(piece.tokens) for piece in pieces)


@pytest.mark.slow
def test_predictions(compilations):
    """A prediction that is right saves steps; one that is wrong, and none, change no text either."""
    options = {"max_new_tokens": 30, "eos_ids": ()}
    expected = [alone([number], options) for number in range(4)]
    right, wrong = expected[0].tokens[0], [11] * 30
    given = ({"prediction": right}, {}, {"prediction": wrong}, {"prediction": expected[3].tokens[0].tolist()})
    with engine("tree", max_prediction=32, max_sequences=1) as running:
        running.warm_up()
        compilations.clear()
        requests = [running.submit([i], with_statistics=True, **options, **each) for i, each in enumerate(given)]
        results = [request.result(timeout=300) for request in requests]
        assert compilations == []
        with pytest.raises(ValueError, match="prediction must be of at most max_prediction=32 tokens, got 33"):
            running.submit([1], prediction=[1] * 33)
        of_list = running.generate([[0], [3]], prediction=[right, given[3]["prediction"]], **options)
        assert [result.steps[0] for result in of_list] == [results[i].steps[0] for i in (0, 3)]
    for result, each in zip(results, expected, strict=True):
        assert_equal(result, each)
        assert result.statistics.steps[0] == result.steps[0]
    contributed = [int(result.statistics.contributed["prediction"][0]) for result in results]
    assert contributed[1] == 0
    assert [contributed[i] + results[i].steps[0] for i in (0, 3)] == [30, 30]
    assert max(results[i].steps[0] for i in (0, 3)) < min(results[i].steps[0] for i in (1, 2))


def test_a_setting_without_a_tree_ignores_predictions(monkeypatch):
    monkeypatch.setattr(choice, "choose", lambda *_: PLAIN)
    with engine(lookahead="auto", max_prediction=8) as running:
        result = running.submit([1], prediction="abc", max_new_tokens=5).result(timeout=300)
    assert_equal(result, alone([1], {"max_new_tokens": 5}))


def test_statistics_are_those_of_the_row(shared):
    """The setting of `shared` and the same key make the same steps alone."""
    options = {"max_new_tokens": 20, "eos_ids": (), "with_statistics": True, "key": jax.random.key(3)}
    requests = [shared.submit([number], **options) for number in range(4)]
    for number, request in enumerate(requests):
        expected = jlade.generate(PARAMS, [number], lookahead=SETTINGS["paper"], **options).statistics
        for name, value in vars(request.result(timeout=300).statistics).items():
            jax.tree.map(np.testing.assert_array_equal, value, getattr(expected, name))


@pytest.mark.slow
def test_a_list_is_completed_in_order_with_options_for_each_and_one_key(shared):
    prompts = [[1], [2, 3], [4] * 30, [5, 6], [7], [8, 9, 10]]
    options = {
        "max_new_tokens": [3, 20, 9, 14, 1, 20],
        "sampling": SamplingConfig(temperature=0.8),
        "stop": [[], ["c"], [], [], [], ["ab"]],
        "key": jax.random.key(5),
    }
    batch = alone(prompts, options)
    out = shared.generate(prompts, **options)
    assert [each.text[0] for each in out] == list(batch.text)
    assert [each.lengths[0] for each in out] == batch.lengths.tolist()
    keys = jax.random.split(jax.random.key(6), len(prompts))
    batch = alone(prompts, options | {"key": keys})
    assert [each.text[0] for each in shared.generate(prompts, **options | {"key": keys})] == list(batch.text)


def test_a_wrong_prompt_of_a_list_fails_alone(shared):
    """The others have the noise of their places in the list."""
    options = {"max_new_tokens": [5, 5, 5, 5, 60, 5], "sampling": SamplingConfig(temperature=0.8), "eos_ids": ()}
    prompts = [[1], [13], "", [4, 5], [6] * 5, [7, 8]]
    messages = {
        1: "prompt[1] holds token id 13; accepted are 0 to 12",
        2: "prompt[2] is empty; at least one token is needed",
        4: "prompt of 5 tokens and max_new_tokens=60 make 65 tokens; the engine was made with capacity=64",
    }
    right = [[0] if number in messages else prompt for number, prompt in enumerate(prompts)]
    expected = alone(right, options | {"max_new_tokens": 5}).text
    for results in (shared.generate(prompts, **options), shared.map(prompts, **options)):
        for number, result in enumerate(results):
            if number in messages:
                assert isinstance(result, ValueError)
                assert str(result) == messages[number]
            else:
                assert result.text == (expected[number],)
    wrong, right = shared.generate({"input_ids": [[13], [1]], "attention_mask": [[1], [1]]}, max_new_tokens=1)
    assert (str(wrong), right.lengths.tolist()) == ("prompt[0] holds token id 13; accepted are 0 to 12", [1])


def test_no_prompts_have_no_results(shared):
    assert shared.generate([]) == list(shared.map(())) == []
    with pytest.raises(TypeError, match="temperature is not an option of a request"):
        shared.generate([], temperature=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_logprobs": 3, "logprobs": True}, ValueError, "top_logprobs must be at most max_top_logprobs=2, got 3"),
        ({"eos_ids": [[], [1], [2]]}, ValueError, "eos_ids must be a token id, .* one for each of 2 prompts"),
        ({"max_new_tokens": [1]}, ValueError, "max_new_tokens must be one integer or 2, one for each prompt"),
    ],
)
def test_a_wrong_option_of_a_list_is_refused_at_once(shared, options, error, message):
    with pytest.raises(error, match=message):
        shared.map([[1], [2]], **options)


def test_text_needs_the_tokenizer_of_the_engine():
    with (
        jlade.Engine(PARAMS, max_sequences=1, lookahead=None) as running,
        pytest.raises(TypeError, match=r"prompt\[1\] is a string, 'a': pass tokenizer="),
    ):
        running.map([[1], "a"])


def test_no_index_of_a_prompt_is_built(shared, monkeypatch):
    """`jlade.generate` has one for each long prompt; a row has no place for it."""
    monkeypatch.setattr(corpus_lib, "LONG", 0)
    monkeypatch.setattr(corpus_lib, "build", lambda tokens: pytest.fail("an index was built"))
    assert_equal(shared.submit([3, 1, 4], max_new_tokens=9).result(300), alone([3, 1, 4], {"max_new_tokens": 9}))


def test_more_prompts_than_may_wait_are_completed():
    with engine(max_waiting=2) as running:
        out = list(running.map([[number] for number in range(12)], max_new_tokens=3))
    assert [each.text[0] for each in out] == [alone([number], {"max_new_tokens": 3}).text[0] for number in range(12)]


@pytest.fixture(scope="module")
def compilations():
    """A list of the programs that compile."""
    with recorded() as events:
        yield events


def assert_scores_prompts(running):
    """Asserts the log-probabilities of a prompt of several chunks, read anew, and of one token."""
    options = {"max_new_tokens": 2, "prompt_logprobs": True, "logprobs": True, "top_logprobs": 2}
    *_, request, short = [running.submit(prompt, **options) for prompt in (SHARED, SHARED, [4])]
    assert short.result(timeout=300).lengths[0] > 0
    assert short.prompt_logprobs is None
    assert request.result(timeout=300).lengths[0] > 0
    assert request.num_cached == 0
    found, logits = request.prompt_logprobs, plain_llama.logits(PARAMS, SHARED)[:-1]
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.logprobs, expected[np.arange(len(logits)), SHARED[1:]], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.top_logprobs, -np.sort(-expected)[:, :2], rtol=1e-4, atol=1e-4)
    assert found.top_tokens.tolist() == np.argsort(-expected)[:, :2].tolist()


@pytest.mark.parametrize("max_sequences", [1, slow(2)])
def test_after_the_warm_up_nothing_compiles(max_sequences, compilations):
    chance = random.Random(1)
    drawn = [draw(chance) for _ in range(20)]
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.enable_padding(pad_id=0)  # the token of made-up prompts
    with engine(max_sequences=max_sequences, tokenizer=tokenizer) as running:
        assert list(running.compile())[-1] == 0
        compilations.clear()
        running.warm_up()
        requests = [running.submit(prompt, with_statistics=True, **options) for prompt, options in drawn]
        requests[3].cancel()
        for number, request in enumerate(requests):
            assert number == 3 or request.result(timeout=300).lengths[0] > 0
        assert any(request.num_cached for request in requests)
        assert_scores_prompts(running)
        assert compilations == []
        jax.jit(lambda x: x + 41)(1)
        assert compilations, "the search finds compilations"


@pytest.mark.slow
def test_requests_wait_for_their_own_programs_alone(compilations):
    """Those that a request waits for compile next; one program makes the steps of all controls."""
    filtered = {"sampling": SAMPLINGS[3], "logprobs": True, "top_logprobs": 2}
    options = [{"sampling": SAMPLINGS[2]}, filtered, {"prompt_logprobs": True}]
    options = [each | {"max_new_tokens": 9, "key": jax.random.key(3), "eos_ids": ()} for each in options]
    with engine(max_sequences=2) as running:
        assert running.is_ready, "programs compile when they first run"
        parts = running.compile()
        total = next(parts)
        requests = [running.submit(SHARED, **each) for each in options]
        assert not running.is_ready
        assert [each.started for each in requests] == [None] * 3
        assert next(parts) == total - 1
        assert running.is_ready
        found = [each.result(timeout=300) for each in requests[:2]]
        for number, request in enumerate(requests[2:], start=2):
            while running.num_running:  # a request waits for the programs of the rows that are free
                time.sleep(0.01)
            assert request.started is None
            assert next(parts) == total - number
            found.append(request.result(timeout=300))
        assert list(parts) == list(range(total - 3, -1, -1))
    for result, each in zip(found, options, strict=True):
        assert_equal(result, alone(SHARED, {name: value for name, value in each.items() if "prompt" not in name}))


def test_the_error_of_a_program_is_that_of_its_requests(monkeypatch):
    failing(monkeypatch, "run", lambda *arguments: len(arguments[1].done) == 2)
    options = {"max_new_tokens": 50, "eos_ids": ()}
    with engine(max_sequences=2) as running:
        with pytest.raises(RuntimeError, match="a fault"):
            running.warm_up()
        assert running.submit([1, 2], **options).result(timeout=300).lengths[0] > 0
        with pytest.raises(RuntimeError, match="a fault"):
            running.generate([[1, 2], [3]], **options)


def test_no_logprobs_are_computed_for_rows_that_ask_for_none(monkeypatch):
    """The time of a step does not depend on `max_top_logprobs`, nor on other requests."""
    inputs, config = jlade.prepare(PARAMS, [[1], [2]], max_new_tokens=5, logprobs=True, top_logprobs=3, lookahead=None)
    computed, compute = [], sampling._logprobs

    def noting(logits, processed, tokens, num_top):
        jax.debug.callback(computed.append, num_top)
        return compute(logits, processed, tokens, num_top)

    monkeypatch.setattr(sampling, "_logprobs", noting)
    for asked in ([False, False], [True, False]):
        of_each = dataclasses.replace(inputs, has_logprobs=np.array(asked))
        state = prefill.start(prefill.prefill(PARAMS, of_each, config), of_each, config)
        jax.block_until_ready(rows.run(PARAMS, state, config, 1, 0))
        jax.effects_barrier()
        assert bool(computed) == any(asked)


@pytest.mark.parametrize("axes", [slow({"data": 3, "model": 2}), slow({"lookahead": 2, "model": 2})], ids=str)
def test_meshes(axes, compilations):
    chance = random.Random(2)
    drawn = [draw(chance) for _ in range(8)]
    with engine(mesh=jlade.make_mesh(**axes)) as running:
        assert list(running.compile())[-1] == 0
        compilations.clear()
        running.warm_up()
        requests = [running.submit(prompt, **options) for prompt, options in drawn]
        concurrent.futures.wait(request._future for request in requests)
        assert_scores_prompts(running)
        assert compilations == []
        assert any(request.num_cached for request in requests)
    assert_equal_alone((*each, request) for each, request in zip(drawn, requests, strict=True))


@pytest.mark.slow
def test_a_mesh():
    with engine("plain", mesh=jlade.make_mesh(lookahead=1, model=2), max_sequences=1) as running:
        result = running.submit(SHARED, max_new_tokens=9).result(timeout=300)
    assert_equal(result, alone(SHARED, {"max_new_tokens": 9}))


def test_a_cancelled_request_frees_its_row(shared):
    requests = [shared.submit([1, 2], max_new_tokens=60, eos_ids=()) for _ in range(4)]  # one more than rows
    next(iter(requests[0]))
    requests[0].cancel()
    requests[0].cancel()
    with pytest.raises(concurrent.futures.CancelledError, match="cancelled"):
        requests[0].result()
    assert sum(len(piece.tokens) for piece in requests[0]) < 60
    assert requests[3].result(timeout=300).lengths[0] == 60


@pytest.mark.parametrize("ends", ["by itself", "cancelled"])
def test_what_ended_is_freed_without_the_garbage_collector(shared, ends):
    gc.collect()
    gc.disable()
    try:
        request = shared.submit([1, 2, 3], max_new_tokens=5)
        if ends == "cancelled":
            request.cancel()
        else:
            request.result()
        freed = weakref.ref(request)
        del request
        deadline = time.monotonic() + 10
        while freed() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the engine's thread may still be at its round
        assert freed() is None
    finally:
        gc.enable()


def test_a_request_can_be_awaited(shared):
    async def both():
        return await asyncio.gather(*(shared.submit([number], max_new_tokens=9) for number in (1, 2)))

    for number, result in enumerate(asyncio.run(both()), start=1):
        assert_equal(result, alone([number], {"max_new_tokens": 9}))


def test_pieces_come_in_an_event_loop(shared):
    """Two coroutines and a thread see the same pieces; a cancelled request ends early."""

    async def collect(request):
        return [piece async for piece in request]

    async def collect_all():
        request = shared.submit([3, 1, 4], max_new_tokens=30, eos_ids=())
        assert request.started is None or request.started <= time.monotonic()
        both = await asyncio.gather(collect(request), collect(request), asyncio.to_thread(list, request))
        assert request.started <= time.monotonic()
        cancelled = shared.submit([3], max_new_tokens=60, eos_ids=())
        async for _ in cancelled:
            cancelled.cancel()
        return both, await collect(cancelled)

    (first, second, third), cut = asyncio.run(collect_all())
    assert [id(piece) for piece in first] == [id(piece) for piece in second] == [id(piece) for piece in third]
    assert_equal(first[-1].generation, alone([3, 1, 4], {"max_new_tokens": 30, "eos_ids": ()}))
    assert cut[-1].generation is None
    assert list(asyncio.run(collect(shared.submit([3], max_new_tokens=1)))), "a loop that has ended disturbs no other"


def test_a_fault_ends_the_request_alone(shared, monkeypatch):
    """The third prompt cannot be read."""
    failing(monkeypatch, "read", lambda *arguments: arguments[2].inputs.prompts[0, 0] == 9)
    requests = [shared.submit([first, 1, 2], max_new_tokens=12) for first in (1, 2, 9, 3)]
    with pytest.raises(RuntimeError, match="a fault"):
        requests[2].result(timeout=300)
    with pytest.raises(RuntimeError, match="a fault"):
        list(requests[2])
    with pytest.raises(RuntimeError, match="a fault"):
        asyncio.run(anext(aiter(requests[2])))
    for first, request in zip((1, 2, 9, 3), requests, strict=True):
        if first != 9:
            assert_equal(request.result(timeout=300), alone([first, 1, 2], {"max_new_tokens": 12}))


def test_a_row_is_written_in_place(shared, monkeypatch):
    insert, places = rows.insert, []

    def watched(state, *arguments):
        before = [layer.unsafe_buffer_pointer() for layer in state.rows.cache.keys]
        after = insert(state, *arguments)
        places.append((before, [layer.unsafe_buffer_pointer() for layer in after.rows.cache.keys]))
        return after

    monkeypatch.setattr(rows, "insert", watched)
    shared.generate([[1, 2], [3, 4]], max_new_tokens=2)
    assert len(places) == 2
    assert all(before == after for before, after in places)


EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 100663296 bytes."
WOULD_FIT = r"cpu:0 is out of memory, with .* free: (\d+) rows of \d+ tokens take .*; \1 rows would fit\. Lower max_s"


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (RuntimeError("a fault"), RuntimeError, "a fault"),
        (jax.errors.JaxRuntimeError(EXHAUSTED), MemoryError, WOULD_FIT),
    ],
)
def test_after_a_fault_of_the_device_the_engine_goes_on(fault, error, message, shared, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, "run", lambda *_: True, fault)
        with pytest.raises(error, match=message):
            shared.submit([1], max_new_tokens=3).result(timeout=300)
    assert_equal(shared.submit([1], max_new_tokens=3).result(timeout=300), alone([1], {"max_new_tokens": 3}))


def test_a_full_queue_refuses_requests(monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()
    run = rows.run

    def waiting(*arguments):
        begun.set()
        goes_on.wait(300)
        return run(*arguments)

    monkeypatch.setattr(rows, "run", waiting)
    with engine(max_sequences=1, max_waiting=1) as running:
        first = running.submit([1], max_new_tokens=3)
        assert begun.wait(300)
        second = running.submit([2], max_new_tokens=3)
        with pytest.raises(queue.Full, match="1 requests are waiting"):
            running.submit([3])
        with pytest.raises(TimeoutError):
            second.result(timeout=0.01)
        second.cancel()
        third = running.submit([3], max_new_tokens=3)
        goes_on.set()
        assert [request.result(timeout=300).lengths[0] for request in (first, third)] == [3, 3]


def test_closing_cancels_what_runs_and_refuses_what_comes():
    running = engine(max_sequences=1)
    requests = [running.submit([1], max_new_tokens=60, eos_ids=()) for _ in range(3)]
    next(iter(requests[0]))
    running.close()
    running.close()
    for request in requests:
        with pytest.raises(concurrent.futures.CancelledError):
            request.result(timeout=1)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        running.submit([1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 63}, ValueError, "make 66 tokens; the engine was made with capacity=64"),
        (
            {"max_new_tokens": 2, "min_new_tokens": 3},
            ValueError,
            "min_new_tokens must be at most 2, the limit of new tokens, got 3",
        ),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        (
            {"temperature": 1},
            TypeError,
            "temperature is not an option of a request: pass sampling=.*; accepted are eos_ids",
        ),
        ({"eos_ids": [1] * 33}, ValueError, "eos_ids must be at most 32 for an engine, got 33"),
        ({"stop": ""}, ValueError, "at least one character"),
        ({"prediction": "a"}, ValueError, "prediction needs an engine that was made with max_prediction"),
        ({"logprobs": True, "top_logprobs": 3}, ValueError, "top_logprobs must be at most max_top_logprobs=2, got 3"),
        ({"logprobs": 1}, TypeError, "logprobs must be True or False, got 1"),
        ({"priority": "x"}, TypeError, "priority must be an integer, got 'x'"),
        ({"priority": True}, TypeError, "priority must be an integer, got True"),
    ],
)
def test_a_wrong_request_is_refused_at_once(shared, options, error, message):
    with pytest.raises(error, match=message):
        shared.submit([1, 2, 3], **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_sequences": 0}, ValueError, "max_sequences must be at least 1, got 0"),
        ({"max_sequences": 10**9}, ValueError, "max_sequences must be at most 4096, got 1000000000"),
        ({"max_sequences": "x"}, TypeError, "max_sequences must be an integer of at least 1, got 'x'"),
        ({"capacity": 10**9}, ValueError, "capacity must be at most 64, the tokens that the model reads"),
        ({"capacity": 8.0}, TypeError, "capacity must be an integer of at least 3, got 8.0"),
        ({"prefix_memory": 0.5}, TypeError, "prefix_memory must be an integer of at least 0, got 0.5"),
        ({"max_prediction": 10**9}, ValueError, "max_prediction must be at most 1048576, got 1000000000"),
        ({"max_waiting": "x"}, TypeError, "max_waiting must be an integer of at least 1, got 'x'"),
        ({"capacity": 65}, ValueError, "capacity must be at most 64, the tokens that the model reads, got 65"),
        ({"prefix_memory": -1}, ValueError, "prefix_memory must be at least 0, got -1"),
        ({"max_prediction": -1}, ValueError, "max_prediction must be at least 0, got -1"),
        ({"lookahead": SETTINGS["paper"], "max_prediction": 9}, ValueError, "prediction needs a lookahead with a tree"),
        ({"max_waiting": 0}, ValueError, "max_waiting must be at least 1, got 0"),
        ({"mesh": jlade.make_mesh(data=2)}, ValueError, "mesh has data=2, which does not divide a batch of 3"),
    ],
)
def test_a_wrong_engine_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        engine(**options)


@pytest.mark.slow
def test_the_capacity_bounds_prompt_and_text():
    with engine(capacity=16) as running:
        with pytest.raises(ValueError, match=r"make 17 tokens; the engine was made with capacity=16"):
            running.submit([1, 2], max_new_tokens=15)
        with pytest.raises(ValueError, match=r"prompt of 16 tokens leaves no room .* made with capacity=16"):
            running.submit([1] * 16)
        assert running.submit([1, 2], eos_ids=()).result(300).lengths[0] == 14  # without a limit, what fits
        assert_equal(running.submit([1, 2], max_new_tokens=14).result(300), alone([1, 2], {"max_new_tokens": 14}))
