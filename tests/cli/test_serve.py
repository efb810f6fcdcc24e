"""`jlade serve`: its options. tests/server/test_lifecycle.py runs it."""

import importlib.util
import subprocess
import sys
import threading

import pytest
from starlette.testclient import TestClient

from jlade import cli
from jlade.engine.programs import Programs
from jlade.server import lifecycle
from jlade.server.served_model import MAX_PREDICTION


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in: pass --api-key-file, or listen to 127.0.0.1"),
        (["--host", "no host"], "no host:0 cannot be listened to"),
        (["--port", "65536"], "--port must be from 0 to 65535, got 65536"),
        (["--timeout", "0"], "--timeout must be above 0, got 0"),
        (["--max-top-logprobs", "-1"], "--max-top-logprobs must be at least 0, got -1"),
        (["--max-sequences", "0"], "--max-sequences must be at least 1, got 0"),
        (["--max-sequences", "3", "--mesh", "data=2"], "--max-sequences must be a multiple of 2"),
        (["--api-key-file", "nowhere"], "nowhere cannot be read"),
        (["--template", "nowhere"], "nowhere cannot be read"),
        (["nowhere/at-all/here"], "nowhere/at-all/here"),
        (["--lookahead", "tree=3", "--no-lookahead"], "leave one of them out"),
        (["--capacity", "1000000"], "capacity must be at most"),
        (["--corpus", "nowhere"], "path must be a directory written by jlade.save_corpus, got 'nowhere'"),
        (["--remember", "-1"], "--remember must be at least 0, got -1"),
        (["--no-lookahead", "--remember", "4"], "remember needs a lookahead with a tree"),
        (["--no-lookahead", "--drafts", "new"], "--drafts needs answers to keep: --remember above 0"),
        (["--no-lookahead", "--max-prediction", "4"], "prediction needs a lookahead with a tree"),
    ],
)
def test_wrong_options_are_refused_before_anything_compiles(refused, arguments, message):
    assert message in refused(["serve", "--port", "0", *arguments])


@pytest.mark.parametrize("content", ["", "\n \n", "key one\n", "schlüssel\n"])
def test_a_file_without_usable_keys_is_refused(refused, tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    message = refused(["serve", "--port", "0", "--api-key-file", str(file)])
    assert "must hold a key of printable ASCII characters in each line" in message


def test_the_extra_is_named_where_packages_are_missing(refused, monkeypatch):
    found = importlib.util.find_spec
    hidden = ("starlette", "uvicorn")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else found(name))
    assert 'needs starlette, uvicorn: pip install "jlade[serve]"' in refused(["serve"])


def test_the_commands_do_not_import_a_server():
    """A core installation lacks its packages."""
    code = (
        "import sys; from jlade.cli import commands; "
        "sys.exit(any(name in sys.modules for name in ('starlette', 'uvicorn', 'prometheus_client', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_keys_and_settings_reach_the_server(monkeypatch, tmp_path, capsys):
    """Several keys, an address of all machines, the checkpoint's name and the defaults of its texts."""
    served = []

    class Server(lifecycle.Server):
        def run(self, sockets):
            for thread in [each for each in threading.enumerate() if each.name == "jlade start"]:
                thread.join()
            served.append((self.config.app.service, sockets[0].getsockname()))

    keys = tmp_path / "keys"
    keys.write_text("first\n\n  second \n", encoding="utf-8")
    monkeypatch.setattr(lifecycle, "Server", Server)
    monkeypatch.setattr(lifecycle, "leave", lambda status: None)
    monkeypatch.setattr(Programs, "compile", lambda self, part: None)
    arguments = ["--host", "0.0.0.0", "--port", "0", "--api-key-file", str(keys), "--capacity", "512"]
    assert cli.main(["serve", *arguments, "--max-sequences", "2", "--lookahead", "tree=7"]) == 0
    (service, address) = served[0]
    out, log = capsys.readouterr()
    assert out == f"demo at http://0.0.0.0:{address[1]}\n"
    phases = [line.removeprefix("jlade serve: ").rpartition(",")[0] for line in log.splitlines()]
    assert phases == [
        f"demo is being loaded, to serve it at http://0.0.0.0:{address[1]}",
        *[f"{number} of 6 sets of programs are compiled" for number in range(7)],
    ]
    assert (service.engine.max_sequences, service.engine.capacity) == (2, 512)
    assert service.reader.sampling.temperature == 1.0
    assert (service.reader.capacity, service.reader.max_prediction) == (512, MAX_PREDICTION)
    assert (service.reader.max_top_logprobs, service.reader.max_logprobs) == (20, 5), "OpenAI's limits"
    client = TestClient(service.app)
    answers = [client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) for key in ("first", "second", "")]
    assert [answer.status_code for answer in answers] == [200, 200, 401]
