"""The server over HTTP: requests as clients send them, limits, faults, and clients that go away."""

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import threading
import time

import httpx
import hypothesis
import pytest
from hypothesis import strategies

import jlade
from jlade import SamplingConfig
from jlade.engine import rows
from jlade.generation import text as text_lib
from jlade.generation.results import DEAD_END, NOT_FINITE
from jlade.server import app, guard
from jlade.server.choices import Choices
from jlade.server.protocol import BodyReader
from tests.server.answers import error_of, events
from tests.server.conftest import LOOKAHEAD, READER, fill, running, wait_until
from tests.server.tiny_chat import PARAMS, TOKENIZER, alone
from tests.tiny import slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "ab"}]
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 6}


@pytest.mark.slow
def test_requests_of_open_webui(served):
    """The body that Open WebUI 0.6 sends for a chat, with the parameters of its controls."""
    listed = served.client.get("/v1/models", headers={"Authorization": "Bearer none"}).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    body = {
        "stream": True,
        "model": "tiny",
        "messages": [{"role": "system", "content": "c"}, {"role": "user", "content": "ab"}],
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 6,
        "stop": ["bbbb"],
        "seed": 42,
        "frequency_penalty": 0,
        "stream_options": {"include_usage": True},
    }
    chunks = events(served.client.post(CHAT, json=body))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == alone("cabc", max_new_tokens=6).text[0]
    assert chunks[-1]["usage"]["total_tokens"] == 10
    title = {"model": "tiny", "messages": MESSAGES, "stream": False, "max_completion_tokens": 6, "metadata": {}}
    assert served.client.post(CHAT, json=title).json()["choices"][0]["message"]["role"] == "assistant"


def test_requests_of_continue(served):
    """The bodies that Continue's providers `openai` and `vllm` send for a chat and for an autocompletion."""
    first = served.client.get("/v1/models").json()["data"][0]
    assert (first["id"], first["max_model_len"]) == ("tiny", 64)
    content = [{"type": "text", "text": "ab"}]
    chat = {
        "messages": [{"role": "user", "content": content}],
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = events(served.client.post(CHAT, json=chat))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
    completion = {
        "prompt": "ab",
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "stop": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "/src/", "#- coding: utf-8", "```"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = events(served.client.post(COMPLETIONS, json=completion))
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert text == alone("ab", max_new_tokens=6).text[0]


@pytest.mark.parametrize("prompt", ["aab", [0, 0, 1]])
def test_a_prompt_may_begin_with_pad_tokens(served, prompt):
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
    found = served.client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    assert found == alone("aab", max_new_tokens=6).text[0]


def test_the_other_endpoints(served):
    client = served.client
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": jlade.__version__}
    tokens = client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
    assert tokens == {"count": 3, "max_model_len": 64, "tokens": [0, 1, 4], "token_strs": ["a", "b", "c"]}
    assert client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == [0, 1, 4]
    assert client.post("/detokenize", json={"model": "tiny", "tokens": [0, 1, 4, 12]}).json() == {"prompt": "abc</s>"}
    error_of(client.post("/detokenize", json={"tokens": "ab"}), 400)
    error_of(client.post("/tokenize", json={"prompt": [1]}), 400)
    assert "GET /v1/nothing" in error_of(client.get("/v1/nothing"), 404)["message"]
    refused = client.get(CHAT)
    error_of(refused, 405)
    assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/nothing"])
def test_a_response_has_the_id_of_its_request(served, path):
    def ask(given=None):
        headers = {"Content-Type": "application/json"} | ({} if given is None else {"X-Request-Id": given})
        response = served.client.post(path, content=json.dumps(GREEDY | {"prompt": "ab"}), headers=headers)
        made = response.headers["x-request-id"]
        if response.status_code == 200:
            assert response.json()["id"] == f"{'chatcmpl' if path == CHAT else 'cmpl'}-{made}"
        return made

    assert ask("an id.7") == "an id.7"
    made = [ask(given) for given in (None, "", "x" * 129, "é".encode(), None)]
    assert len({*made, ""}) == 6
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_metrics_count_requests_and_tokens(served):
    names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [served.metric(name) for name in names]
    drafts = served.metric("vllm:spec_decode_num_drafts_total")
    accepted = served.metric("vllm:spec_decode_num_accepted_tokens_total")
    drafted = served.metric("vllm:spec_decode_num_draft_tokens_total")
    served.client.post(
        COMPLETIONS, json={"prompt": "ab", "temperature": 0, "max_tokens": 20, "ignore_eos": True, "n": 2}
    )
    assert [served.metric(name) - value for name, value in zip(names, before, strict=True)] == [2, 4, 40]
    steps = served.metric("vllm:spec_decode_num_drafts_total") - drafts
    assert steps + served.metric("vllm:spec_decode_num_accepted_tokens_total") - accepted == 40
    assert 0 < steps < 40
    options = {"tokenizer": TOKENIZER, "lookahead": LOOKAHEAD, "max_new_tokens": 20, "eos_ids": ()}
    expected = jlade.generate(PARAMS, "ab", with_statistics=True, **options).statistics.num_drafted.sum()
    assert served.metric("vllm:spec_decode_num_draft_tokens_total") - drafted == 2 * expected > 0
    assert served.metric("jlade:tokens_per_step_count") == drafts + steps
    shown = served.client.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in shown
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        assert f"# TYPE {name} histogram" in shown


def test_a_client_that_goes_away_frees_the_row(served, rounds):
    before = served.metric("vllm:request_success_total")
    with httpx.stream(
        "POST", served.url + CHAT, json=GREEDY | {"max_tokens": 55, "ignore_eos": True, "stream": True}
    ) as going:
        lines = going.iter_lines()
        next(lines)
        rounds.release()
        assert any('"content":"' in line and "assistant" not in line for line in lines), "it goes on to stream"
    wait_until(lambda: served.metric("vllm:request_success_total") == before + 1)
    rounds.release(3)  # fewer than the rest of the text takes
    wait_until(lambda: served.engine.num_running == 0)


def test_a_client_that_goes_away_before_its_answer_frees_the_row(served, rounds):
    before = served.metric("vllm:request_success_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + CHAT, json=GREEDY | {"max_tokens": 55, "ignore_eos": True}, timeout=0.5)
    wait_until(lambda: served.metric("vllm:request_success_total") == before + 1)
    rounds.release(3)
    wait_until(lambda: served.engine.num_running == 0)


@pytest.mark.parametrize("stream", [slow(False), True])
def test_a_client_that_goes_away_no_longer_waits(served, rounds, stream):
    requests = fill(served.engine, rounds)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + CHAT, json=GREEDY | {"stream": stream}, timeout=0.5)
    wait_until(lambda: served.engine.num_waiting == 0)
    assert served.engine.num_running == len(requests)
    for request in requests:
        request.cancel()


@pytest.fixture
def grammars(monkeypatch):
    """An event before which no grammar is made."""
    with_grammar, released = BodyReader.with_grammar, threading.Event()

    def held(reader, completion):
        assert released.wait(60)
        return with_grammar(reader, completion)

    monkeypatch.setattr(BodyReader, "with_grammar", held)
    yield released
    released.set()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_stream_begins_before_a_grammar_that_takes_long(served, grammars, monkeypatch, wrong):
    """An error of the grammar is an event then, and before it has a status."""
    body = {"messages": MESSAGES, "max_tokens": 9, "stream": True, "guided_regex": "(" if wrong else "abc"}
    with monkeypatch.context() as patched:
        patched.setattr(app, "PING_SECONDS", 0.05)
        with served.client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            assert '"role":"assistant"' in next(lines)
            assert ": " in lines
            grammars.set()
            *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    if wrong:
        assert chunks == []
        assert last["error"] == error_of(served.client.post(CHAT, json=body), 400)
    else:
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abc"
        assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("seconds", [0.05, 10])
def test_a_client_that_goes_away_before_its_grammar_is_made_starts_nothing(served, grammars, monkeypatch, seconds):
    prompts = []

    def recorded(engine, completion, *others):
        prompts.extend(completion.prompts)
        return Choices(engine, completion, *others)

    monkeypatch.setattr(app, "PING_SECONDS", seconds)
    monkeypatch.setattr(app, "Choices", recorded)
    wait_until(lambda: served.service.is_idle)
    body = {"prompt": "ab", "guided_regex": "abc", "stream": True}
    url = f"{served.url}{COMPLETIONS}"
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.5):
        assert not served.service.is_idle, "the stream has begun"
    wait_until(lambda: served.service.is_idle)
    grammars.set()
    served.client.post(COMPLETIONS, json=body | {"prompt": "b"})  # whose grammar is made after that
    assert prompts == [[1]]


@pytest.fixture
def encoded(monkeypatch):
    """The prompts whose tokenization has begun, and an event before which that of "ab" alone ends."""
    encode, encoded, released = text_lib.encode, [], threading.Event()

    def held(tokenizer, prompt, **options):
        encoded.append(prompt)
        assert prompt == "ab" or released.wait(60)
        return encode(tokenizer, prompt, **options)

    monkeypatch.setattr(text_lib, "encode", held)
    return encoded, released


def test_a_short_prompt_does_not_wait_for_a_long_one(served, encoded):
    prompts, released = encoded
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(httpx.post, f"{served.url}/tokenize", json={"prompt": "a" * app.SHORT}, timeout=300)
        wait_until(lambda: prompts)
        assert served.client.post("/tokenize", json={"prompt": "ab"}).json()["count"] == 2
        released.set()
        assert long.result().json()["count"] == app.SHORT


def test_the_prompt_of_a_client_that_went_away_is_not_tokenized(served, encoded):
    prompts, released = encoded
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(httpx.post, f"{served.url}/tokenize", json={"prompt": "a"})
        wait_until(lambda: prompts)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/tokenize", json={"prompt": "b"}, timeout=0.3)
        for _ in range(3):  # by then the server knows that the client has gone
            served.client.get("/health")
        released.set()
        assert first.result().json()["tokens"] == [0]
    assert served.client.post("/tokenize", json={"prompt": "c"}).json()["tokens"] == [4]
    assert prompts == ["a", "c"]


def test_a_fault_ends_its_request_alone(served, monkeypatch):
    read = rows.read

    def failing(params, prefix, row, *arguments):
        if row.inputs.prompts[0, 0] == 9:
            raise RuntimeError("a secret of the device")
        return read(params, prefix, row, *arguments)

    monkeypatch.setattr(rows, "read", failing)
    expected = alone([3, 1, 2], max_new_tokens=9).text[0]

    def ask(first, stream=False):
        body = {"prompt": [first, 1, 2], "temperature": 0, "max_tokens": 9, "stream": stream}
        return served.client.post(COMPLETIONS, json=body)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        good, bad, streamed = pool.map(ask, (3, 9, 9), (False, False, True))
    assert good.json()["choices"][0]["text"] == expected
    error = error_of(bad, 500)
    assert (error["type"], error["message"]) == (
        "server_error",
        "the server failed with a RuntimeError, which its log shows",
    )
    assert streamed.status_code == 200
    assert events(streamed)[-1]["error"]["type"] == "server_error"
    assert ask(3).json()["choices"][0]["text"] == expected


def test_logits_that_are_not_finite_are_a_fault_after_the_text(engine):
    prompt = [3, 1, 2]
    token = alone(prompt, max_new_tokens=9).tokens[0, 4]
    params = dataclasses.replace(PARAMS, embedding=PARAMS.embedding.at[token].set(float("nan")))
    options = {"max_sequences": 3, "max_prediction": 16, "max_top_logprobs": 3, "lookahead": LOOKAHEAD}
    before = jlade.generate(params, prompt, max_new_tokens=9, tokenizer=TOKENIZER, eos_ids=(12,), lookahead=None)
    assert before.finish_reason == ("error",)
    assert before.text[0] != ""
    with jlade.Engine(params, TOKENIZER, **options) as broken, running(broken) as served:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 9}
        error = error_of(served.client.post(COMPLETIONS, json=body), 500)
        assert (error["type"], error["message"]) == ("server_error", NOT_FINITE)
        *chunks, last = events(served.client.post(COMPLETIONS, json=body | {"stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == before.text[0]
        assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
        assert last["error"] == error
        ended = 'vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 2.0'
        assert ended in served.client.get("/metrics").text


def test_a_dead_end_of_a_grammar_is_a_refusal_after_the_text(engine):
    """The checkpoint bans the tokens that begin with "c"."""
    banned = SamplingConfig(logit_bias={token: -float("inf") for token in (4, 7)})
    with running(engine, dataclasses.replace(READER, sampling=banned)) as served:
        body = {"prompt": [3, 1, 2], "guided_choice": ["abc"], "max_tokens": 9}
        error = error_of(served.client.post(COMPLETIONS, json=body), 400)
        assert (error["type"], error["message"]) == ("invalid_request_error", DEAD_END)
        *chunks, last = events(served.client.post(COMPLETIONS, json=body | {"stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
        assert last["error"] == error


def test_a_response_takes_no_longer_than_allowed(engine, rounds):
    with running(engine, seconds=0.2) as served:
        error = error_of(served.client.post(CHAT, json=GREEDY), 504)
        assert error["message"] == "the response took more than 0.2 seconds"
        streamed = events(served.client.post(CHAT, json=GREEDY | {"stream": True}))
        assert streamed[-1]["error"]["message"] == error["message"]
        rounds.release(10)
        wait_until(lambda: engine.num_running == 0)


def test_keys(engine):
    with running(engine, keys=["first-key", "second-key"]) as served:
        client = served.client
        assert client.get("/health").status_code == 200
        for key in ("second-key", "first-key"):
            headers = {"Authorization": f"Bearer {key}", "Host": "models.example"}
            assert client.post(CHAT, json=GREEDY, headers=headers).status_code == 200
        for header in ("", "Bearer", "Bearer first", "Basic first-key", "first-key", "Bearer first-key x"):
            for path in ("/v1/models", "/metrics", CHAT, "/nothing"):
                refused = client.get(path, headers={"Authorization": header})
                assert error_of(refused, 401)["code"] == "invalid_api_key"
                assert refused.headers["WWW-Authenticate"] == "Bearer"


def test_what_was_read_for_one_key_serves_no_other(engine):
    """Neither the number of cached tokens nor the time shows how the prompts of others begin."""
    with running(engine, keys=["one", "two"]) as served:

        def num_cached(key, **others):
            body = {"prompt": "cabcabcbabacbcabbacb", "max_tokens": 1, "temperature": 0, "ignore_eos": True} | others
            response = served.client.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"})
            return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        for key, others in (("one", {}), ("two", {}), ("one", {"cache_salt": "s"}), ("two", {"cache_salt": "s"})):
            assert [num_cached(key, **others) for _ in range(2)] == [0, 19], (key, others)


def test_without_keys_a_foreign_page_is_refused(served):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:1", "[", "a@b", ""):
        error_of(served.client.get("/v1/models", headers={"Host": host}), 403)
    for host in ("localhost:8000", "127.0.0.1", "127.8.8.8:80", "[::1]:8000"):
        assert served.client.get("/v1/models", headers={"Host": host}).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused = served.client.post(CHAT, content=json.dumps(GREEDY), headers={"Content-Type": kind})
        assert "application/json" in error_of(refused, 415)["message"]
    for kind in ("Application/JSON", "application/json; charset=utf-8"):
        assert served.client.post(CHAT, content=json.dumps(GREEDY), headers={"Content-Type": kind}).status_code == 200
    preflight = served.client.options(CHAT, headers={"Origin": "http://evil.example"})
    assert preflight.status_code == 405
    assert not any(name.startswith("access-control") for name in preflight.headers)


def test_the_size_of_a_body_is_bounded(served, monkeypatch):
    monkeypatch.setattr(guard, "MAX_BYTES", 1000)
    headers = {"Content-Type": "application/json"}
    for content in (b"x" * 1001, iter([b"x" * 600] * 2)):  # the latter states no length
        error = error_of(served.client.post(CHAT, content=content, headers=headers), 413)
        assert error["message"] == "the body must be at most 1000 bytes"
    assert served.client.post(CHAT, json=GREEDY).status_code == 200


def test_a_body_has_to_come_in_time(served, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    ended = concurrent.futures.Future()

    def content():
        yield b"{"
        ended.result(10)
        yield b"}"

    with httpx.Client(base_url=served.url) as client, concurrent.futures.ThreadPoolExecutor() as pool:
        response = pool.submit(client.post, CHAT, content=content(), headers={"Content-Type": "application/json"})
        time.sleep(0.3)
        ended.set_result(None)
        error_of(response.result(), 408)


values = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=9),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=5), inner),
    max_leaves=6,
)
plausible = {
    "messages": strategies.lists(
        strategies.fixed_dictionaries(
            {"role": strategies.sampled_from(["system", "user", "assistant", "tool"]), "content": values}
        ),
        max_size=3,
    ),
    "prompt": strategies.text("abc", max_size=70) | strategies.lists(strategies.integers(-1, 14), max_size=70),
    "max_tokens": strategies.integers(0, 70),
    "min_tokens": strategies.integers(0, 9),
    "temperature": strategies.floats(0, 3),
    "top_p": strategies.floats(0, 1),
    "top_k": strategies.integers(-1, 20),
    "min_p": strategies.floats(0, 1),
    "presence_penalty": strategies.floats(-2, 2),
    "frequency_penalty": strategies.floats(-2, 2),
    "repetition_penalty": strategies.floats(0, 2),
    "logit_bias": strategies.dictionaries(
        strategies.integers(0, 13).map(str), strategies.floats(-100, 100), max_size=3
    ),
    "stop": strategies.text("abcé", max_size=3) | strategies.lists(strategies.text("abcé", max_size=3), max_size=4),
    "stop_token_ids": strategies.lists(strategies.integers(0, 13), max_size=4),
    "seed": strategies.integers(-2, 2**33),
    "n": strategies.integers(0, 4),
    "stream": strategies.booleans(),
    "stream_options": strategies.fixed_dictionaries({"include_usage": strategies.booleans()}),
    "logprobs": strategies.booleans() | strategies.integers(-1, 2),
    "echo": strategies.booleans(),
    "ignore_eos": strategies.booleans(),
    "prediction": strategies.fixed_dictionaries(
        {"type": strategies.just("content"), "content": strategies.text("abc", max_size=20)}
    ),
    "jlade": strategies.fixed_dictionaries({"steps": strategies.booleans()}),
    "response_format": strategies.sampled_from([{"type": "text"}, {"type": "json_object"}]),
}
bodies = strategies.fixed_dictionaries({}, optional=plausible)
others = strategies.dictionaries(strategies.sampled_from(sorted(plausible)), values, max_size=1)


@pytest.mark.slow
@hypothesis.settings(max_examples=200)
@hypothesis.given(path=strategies.sampled_from([CHAT, COMPLETIONS]), body=bodies, other=others)
def test_any_body_is_answered_or_refused_in_openai_form(served, path, body, other):
    body = {"messages": MESSAGES, "prompt": "ab", "max_tokens": 3} | body | other
    content = json.dumps(body).encode()
    response = served.client.post(path, content=content, headers={"Content-Type": "application/json"})
    if response.status_code != 200:
        assert response.status_code in (400, 429)
        assert error_of(response, response.status_code)["type"] in ("invalid_request_error", "rate_limit_error")
    elif body.get("stream"):
        assert not any("error" in chunk for chunk in events(response))
    else:
        assert response.json()["usage"]["completion_tokens"] > 0


@hypothesis.given(values)
def test_any_value_is_refused_in_openai_form(served, body):
    content = json.dumps(body).encode()
    error_of(served.client.post(CHAT, content=content, headers={"Content-Type": "application/json"}), 400)
