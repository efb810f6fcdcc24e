"""Clients that are slow, and too many of them. `tests/stress/server_faults.py` sends them to the demo model."""

import json
import socket
import time

import pytest

from jlade.server import guard, lifecycle
from tests.server.conftest import running, wait_until
from tests.server.tiny_chat import alone
from tests.stress import server_faults


@pytest.fixture(scope="module")
def expected():
    """The texts of prompts."""
    return {prompt: alone(prompt, max_new_tokens=server_faults.NUM_TOKENS).text[0] for prompt in ("ab", "cab")}


@pytest.fixture
def impatient(engine, monkeypatch):
    """A server that waits a second for its clients, and whose connections have small buffers."""
    for module, name in ((lifecycle, "IDLE_SECONDS"), (guard, "BODY_SECONDS")):
        monkeypatch.setattr(module, name, 1)
    bind = lifecycle.bind

    def bind_small(*arguments):
        bound = bind(*arguments)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr(lifecycle, "bind", bind_small)
    with running(engine, keys=[server_faults.KEY]) as served:
        yield served


@pytest.mark.slow
def test_clients_that_never_finish_a_request_are_closed(impatient, expected, monkeypatch):
    monkeypatch.setattr(server_faults, "IDLE", 0.4)
    monkeypatch.setattr(server_faults, "CLOSED", 5)
    with server_faults.right_requests(impatient.url, expected) as counts:
        server_faults.slow_clients(impatient.url, number=3)
    assert min(counts) > 0


@pytest.mark.slow
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_client_that_does_not_read_is_closed(impatient, is_slow):
    body = {"prompt": "ab", "n": 8, "max_tokens": 60, "ignore_eos": True, "logprobs": 3, "stream": True}
    request = server_faults.make_request("x", json.dumps(body).encode())
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)  # fewer bytes would pause TCP itself
        client.connect(("127.0.0.1", impatient.client.base_url.port))
        client.sendall(request)
        wait_until(lambda: impatient.engine.num_running)
        wait_until(lambda: not impatient.engine.num_running)
        if not is_slow:
            time.sleep(2.5)
        received = b""
        try:
            while data := client.recv(20_000):
                received += data
                time.sleep(0.05)
        except ConnectionResetError:
            pass
    assert (b"[DONE]" in received) == is_slow


@pytest.mark.slow
def test_the_oldest_of_many_idle_connections_are_closed(engine, expected, monkeypatch):
    monkeypatch.setattr(lifecycle, "MAX_IDLE", 5)
    monkeypatch.setattr(lifecycle, "RUSH_SECONDS", 0.2)
    with running(engine) as served, server_faults.right_requests(served.url, expected):
        assert 3 <= server_faults.rush(served.url, number=40, seconds=1) <= 5
