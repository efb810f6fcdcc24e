"""The server on Ray Serve: its texts, the replica of a session, and its health."""

import asyncio
import socket

import httpx
import pytest

import jlade
from jlade.engine.programs import Programs
from jlade.integrations.ray import serve
from jlade.server.fields import RequestError
from tests.integrations import ray_cluster

pytestmark = ray_cluster.WARNINGS

SETTING = {"name": "tiny", "max_sequences": 1, "capacity": 128, "max_prediction": 0, "max_grammar": 0}
SETTING |= {"lookahead": None, "max_top_logprobs": 0}  # which compile soon
OPTIONS = {"max_tokens": 6, "temperature": 0}


@pytest.fixture
def replica(small_demo, monkeypatch):
    monkeypatch.setattr(Programs, "compile", lambda self, part: None)
    monkeypatch.setattr(jlade.Engine, "warm_up", lambda self: None)
    return serve.Replica(str(small_demo), **SETTING)


def test_a_replica_is_ill_when_its_engine_has_ended_or_its_device_fails(replica, monkeypatch):
    asyncio.run(replica.check_health())
    with monkeypatch.context() as patch:
        patch.setattr(replica, "_probe", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(replica.check_health())
    replica._service.engine.close()
    with pytest.raises(RequestError, match="the engine has ended"):
        asyncio.run(replica.check_health())


def test_a_server_says_that_its_engine_has_ended(replica):
    async def health():
        transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/health")

    assert asyncio.run(health()).status_code == 200
    replica._service.engine.close()
    answer = asyncio.run(health())
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the engine has ended")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lookahead": "wide"}, ValueError, "a setting is .*; got 'wide'"),
        ({"api_key_file": "nowhere"}, ValueError, "api_key_file 'nowhere' cannot be read"),
        ({"mesh": {"model": 1000}}, ValueError, "1000"),
        ({"max_sequences": 0}, ValueError, "max_sequences must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message, small_demo):
    with pytest.raises(error, match=message):
        serve.Replica(str(small_demo), **arguments)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.running() as ray:
        yield ray


@pytest.fixture(scope="module")
def client(cluster, small_demo):
    """A client of an application of two replicas."""
    from ray import serve as ray_serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    two = {"min_replicas": 2, "max_replicas": 2, "ray_actor_options": {"num_cpus": 0}}
    ray_serve.run(serve.application({"model": str(small_demo)} | SETTING | two))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        yield client
    ray_serve.shutdown()


@pytest.mark.slow
def test_a_session_stays_with_the_replica_that_has_its_prefix(client, small_demo):
    params, tokenizer = jlade.load(small_demo, "float32")
    assert client.get("/health").json() == {"status": "ok"}
    for number in range(8):
        session = {"x-session-id": f"session {number}"}
        prompt = f"{'abcdefgh'[number]} = [{', '.join(map(str, range(number, number + 12)))}]\n"
        for turn in range(2):
            answer = client.post("/v1/completions", json={"prompt": prompt} | OPTIONS, headers=session).json()
            text = answer["choices"][0]["text"]
            alone = jlade.generate(params, prompt, tokenizer=tokenizer, lookahead=None, max_new_tokens=6)
            assert text == alone.text[0]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == bool(turn), "its own first turn is kept where the second one is answered"
            prompt += f"{text}\n"
    sessions = [{"x-session-id": str(number)} for number in range(40)]
    counts = {num_completions(client.get("/metrics", headers=session).text) for session in sessions}
    assert counts != {16}, "other sessions are with another replica"


def num_completions(metrics):
    """Returns the number of completions of a replica."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.slow
def test_unknown_arguments_are_refused_before_anything_is_deployed(cluster):
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        serve.application({})
    with pytest.raises(TypeError, match=r"args must have names of .*max_replicas.*, got 'replicas'"):
        serve.application({"model": "m", "replicas": 3})
