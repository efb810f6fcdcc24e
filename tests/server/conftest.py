"""A server of a tiny model, which the tests share."""

import contextlib
import threading
import time
from typing import Any, NamedTuple

import httpx
import openai
import pytest

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.engine import rows
from jlade.generation.chat_template import ChatTemplate
from jlade.server import lifecycle
from jlade.server.app import Service
from jlade.server.protocol import BodyReader
from jlade.server.responses import reading
from jlade.server.responses.store import Store
from tests.server import json_chat
from tests.server.tiny_chat import CHAT_TOKENIZER, PARAMS, TOKENIZER

LOOKAHEAD = LookaheadConfig.tree(7, sources=("prediction", "suffix"))  # which compiles soon
READER = BodyReader(
    tokenizer=TOKENIZER,
    chat_template=ChatTemplate(CHAT_TOKENIZER),
    vocab_size=13,
    eos_ids=(12,),
    sampling=SamplingConfig(temperature=1.0),
    capacity=64,
    max_prediction=16,
    max_top_logprobs=3,
    max_logprobs=3,
)
HELLO = [{"role": "user", "content": "ab"}]


def response(body, reader=READER):
    """Returns what a reader makes of a body of `/v1/responses`."""
    return reading.read(reader, Store(), body)


class Served(NamedTuple):
    """A server that runs."""

    url: str
    engine: jlade.Engine
    client: httpx.Client  # of its URL
    service: Service

    def metric(self, name: str) -> float:
        """Returns the value of a metric, summed over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, name
        return sum(values)

    def openai(self, client=openai.OpenAI, **options):
        """Returns OpenAI's client of the server."""
        return client(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))


@contextlib.contextmanager
def running(engine, reader=READER, **options):
    """Yields a server with an engine."""
    service = Service(engine, reader, model="tiny", **options)
    with lifecycle.bind("127.0.0.1", 0) as bound:
        server, url = lifecycle.Server(lifecycle.Loading(service)), lifecycle.url(bound)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        wait_until(lambda: server.started)
        with httpx.Client(base_url=url, timeout=300) as client:
            yield Served(url, engine, client, service)
        server.should_exit = True
        thread.join()


def wait_until(happened, seconds=300):
    """Waits until something has happened."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)


def fill(engine, rounds):
    """Fills the rows of an engine with requests, which end when there are more rounds."""
    wait_until(lambda: engine.num_running == 0)
    requests = [engine.submit([1], max_new_tokens=60, eos_ids=()) for _ in range(engine.max_sequences)]
    while engine.num_running < len(requests):
        rounds.release()
        time.sleep(0.01)
    while rounds.acquire(blocking=False):  # programs compiled meanwhile
        pass
    return requests


@pytest.fixture(scope="session")
def engine():
    options = {"max_sequences": 3, "max_waiting": 8, "max_prediction": 16, "max_top_logprobs": 3}
    with jlade.Engine(PARAMS, TOKENIZER, lookahead=LOOKAHEAD, **options) as made:
        yield made


@pytest.fixture(scope="session")
def served(engine):
    with running(engine) as made:
        yield made


@pytest.fixture(scope="session")
def client(served):
    with served.openai() as made:
        yield made


@pytest.fixture(scope="session")
def json_engine():
    """An engine of a model whose tokens spell JSON."""
    lookahead = LookaheadConfig.tree(7)
    with jlade.Engine(json_chat.PARAMS, json_chat.TOKENIZER, max_sequences=2, lookahead=lookahead) as made:
        yield made


@pytest.fixture
def rounds(monkeypatch):
    """A semaphore that each round of an engine acquires."""
    semaphore: Any = threading.Semaphore(0)
    run = rows.run

    def waiting(*arguments):
        semaphore.acquire(timeout=300)
        return run(*arguments)

    monkeypatch.setattr(rows, "run", waiting)
    yield semaphore
    semaphore.release(1000)
