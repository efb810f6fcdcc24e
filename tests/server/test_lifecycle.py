"""Servers in processes of their own, from the start to the signal that ends them."""

import concurrent.futures
import json
import signal
import time

import httpx
import pytest

import jlade
from jlade.server import lifecycle
from tests import processes
from tests.server.conftest import wait_until
from tests.stress import server_faults

AT_ONCE = 10  # seconds, on a busy machine
LONG = {"prompt": "def f(", "temperature": 0, "max_tokens": 900, "ignore_eos": True, "stream": True}
LONG["stream_options"] = {"include_usage": True}


@pytest.fixture(scope="module")
def servers(small_demo):
    """Two processes with servers of one row, and their addresses."""
    command = ["-m", "jlade", "serve", str(small_demo), "--port", "0", "--max-sequences", "1", "--no-lookahead"]
    with processes.started([[*command, "--capacity", "1024"]] * 2, num_devices=1) as running:
        lines = [process.stdout.readline() for process in running]
        assert all(line.startswith("demo at http://127.0.0.1:") for line in lines), [lines, running[0].poll()]
        yield list(zip(running, (line.split()[-1] for line in lines), strict=True))


def begin(url, lines):
    """Asks for a long text, and puts the lines of the stream into a list."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=300) as response:
        lines.extend(line for line in response.iter_lines() if line)


def is_one(client, kind):
    """Returns whether there is one request of a kind."""
    return f'vllm:num_requests_{kind}{{engine="0",model_name="demo"}} 1.0' in client.get("/metrics").text


@pytest.mark.slow
def test_malformed_requests_are_refused(servers, small_demo):
    """Beside them each text is right, and no fault is logged: the next test looks at the errors of the process."""
    params, tokenizer = jlade.load(small_demo)
    prompts, options = ["def f(", "Once"], {"max_new_tokens": server_faults.NUM_TOKENS, "lookahead": None}
    texts = jlade.generate(params, prompts, tokenizer=tokenizer, **options).text
    url = servers[0][1]
    with server_faults.right_requests(url, dict(zip(prompts, texts, strict=True))) as counts:
        outcomes = server_faults.malformed_requests(url, range(330))
    assert min(counts) > 0
    assert sum(outcomes.values()) == 330
    assert {outcome.split(": ")[1] for outcome in outcomes} >= {"400", "403", "404", "405", "413", "415"}
    server_faults.wait_for_rows(url)


@pytest.mark.slow
def test_a_signal_ends_the_server_after_the_requests_that_run(servers):
    process, url = servers[0]
    short = {"prompt": "x", "max_tokens": 3}
    lines = []
    with concurrent.futures.ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=300) as client:
        running = pool.submit(begin, url, lines)
        wait_until(lambda: is_one(client, "running"))
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=short, timeout=300)
        wait_until(lambda: is_one(client, "waiting"))
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health").status_code == 503)
        for refused in (waiting.result(), client.post("/v1/completions", json=short)):
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert refused.headers["Retry-After"]
        running.result()
        ended = time.monotonic()
        status, out, errors = processes.finish([process])[0]
    assert time.monotonic() - ended < AT_ONCE
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 900
    assert (status, out) == (0, "")
    said = "jlade serve: ", "of a request is not known and not read"
    assert all(any(each in line for each in said) for line in errors.splitlines()), errors


@pytest.mark.slow
def test_a_signal_ends_a_server_that_loads_at_once(small_demo):
    """It listens already, and says so."""
    command = ["-m", "jlade", "serve", str(small_demo), "--port", "0", "--warm-up"]
    with processes.started([command], num_devices=1) as (process,):
        line = process.stderr.readline()
        assert line.startswith("jlade serve: demo is being loaded, to serve it at http://127.0.0.1:"), line
        answer = httpx.get(f"{line.split()[-3].rstrip(',')}/v1/models", timeout=300)
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        assert answer.json()["error"]["message"].startswith("the server starts: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.slow
def test_a_signal_ends_an_idle_server_that_compiles_at_once(small_demo):
    command = ["-m", "jlade", "serve", str(small_demo), "--port", "0"]
    with processes.started([command], num_devices=1) as (process,):
        url = process.stdout.readline().split()[-1]
        assert httpx.get(f"{url}/health", timeout=300).status_code == 503
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - begin < AT_ONCE


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(servers):
    process, url = servers[1]
    lines = []
    with concurrent.futures.ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=300) as client:
        running = pool.submit(begin, url, lines)
        wait_until(lambda: is_one(client, "running"))
        process.send_signal(signal.SIGINT)
        wait_until(lambda: client.get("/health").status_code == 503)
        process.send_signal(signal.SIGINT)
        assert isinstance(running.exception(), httpx.HTTPError | None)
    assert not any("usage" in line and '"choices":[]' in line for line in lines), "the text has not ended"
    status, out, errors = processes.finish([process])[0]
    assert (status, out) == (130, ""), errors


def test_a_port_in_use_is_an_error():
    """From the moment that another server is bound to it."""
    message = r"127.0.0.1:\d+ cannot be listened to: Address already in use"
    with lifecycle.bind("127.0.0.1", 0) as bound, pytest.raises(OSError, match=message):
        lifecycle.bind("127.0.0.1", bound.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("127.8.8.8", True), ("0.0.0.0", False)]
)
def test_loopback(host, expected):
    with lifecycle.bind(host, 0) as bound:
        assert lifecycle.is_loopback(bound) == expected
        assert lifecycle.url(bound).startswith("http://")
