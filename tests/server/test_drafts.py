"""Fields that say where drafts come from, and the answers that a server remembers."""

import logging
import time

import numpy as np
import pytest
from starlette.testclient import TestClient

import jlade
from jlade.engine.remembered import Remembered
from jlade.server import guard, keeping
from jlade.server.app import Service
from jlade.server.keeping import Keeper
from tests.server.conftest import LOOKAHEAD, READER, wait_until
from tests.server.tiny_chat import PARAMS, TOKENIZER


def options(**body):
    read = READER.completion({"prompt": "ab", **body}).options
    assert read.keys() == READER.chat({"messages": [{"role": "user", "content": "a"}], **body}).options.keys()
    return {name: value for name, value in read.items() if name in ("lookahead", "remember", "remember_key")}


def test_fields_are_read():
    assert options() == options(speculative=True, remember=False, prompt_cache_key=None) == {}
    assert options(speculative=False) == {"lookahead": False}
    assert options(prompt_cache_key="user") == {"remember_key": "user", "remember": True}
    assert options(prompt_cache_key="user", remember=False) == {"remember_key": "user", "remember": False}
    assert options(prompt_cache_key="") == {}, "no name is no key"


def test_compartments_differ_by_api_key_and_reveal_none():
    keys = [(owner, key) for owner in ("first", "second", None) for key in ("a", "b")]
    scopes = [{"state": {} if owner is None else {"api_key": owner}} for owner, _ in keys]
    names = [guard.compartment(scope, key) for scope, (_, key) in zip(scopes, keys, strict=True)]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {64}
    assert guard.compartment({}, "a") == names[4], "a server without API keys"


def test_answers_are_remembered_for_an_api_key_and_a_cache_key_together():
    body = {"prompt": "ab", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    with jlade.Engine(PARAMS, TOKENIZER, max_sequences=1, max_grammar=0, lookahead=LOOKAHEAD, remember=10**6) as engine:
        service = Service(engine, READER, model="tiny", keys=["first", "second"])
        client = TestClient(service.app)

        def ask(owner, **fields):
            answer = client.post("/v1/completions", json=body | fields, headers={"Authorization": f"Bearer {owner}"})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        def metric(name):
            lines = client.get("/metrics", headers={"Authorization": "Bearer first"}).text.splitlines()
            return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

        def steps(*arguments, **fields):
            before = metric("vllm:spec_decode_num_drafts_total")
            assert ask(*arguments, **fields) == text
            return metric("vllm:spec_decode_num_drafts_total") - before

        text = ask("first")
        assert metric("jlade:remembered_texts") == 0
        cold = steps("first", prompt_cache_key="user")
        assert (metric("jlade:remembered_texts"), metric("jlade:remembered_bytes")) == (1, engine.remembered.num_bytes)
        assert steps("first", prompt_cache_key="user") < cold / 2
        assert steps("second", prompt_cache_key="user", remember=False) == cold, "of another API key"
        assert steps("first", prompt_cache_key="other", remember=False) == cold
        assert steps("first", prompt_cache_key="user", speculative=False) == 30
        assert metric("jlade:remembered_texts") == 1


class Engine:
    """The part of an engine that a keeper uses; its file holds the number of texts."""

    def __init__(self, number=0):
        self.remembered, self.num_saved = Remembered(10**6), 0
        self.add(number)

    def add(self, number=1):
        for each in range(number):
            self.remembered.add("a", np.array([1, 2, len(self.remembered), each]), 2)

    def save_remembered(self, path):
        self.num_saved += 1
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(len(self.remembered)))

    def load_remembered(self, path):
        self.add(int(path.read_text()))


def test_texts_are_kept_from_one_run_to_the_next(tmp_path):
    file = tmp_path / "new" / keeping.FILE
    engine = Engine()
    keeper = Keeper(engine, tmp_path / "new", seconds=0.01)
    engine.add(2)
    wait_until(file.exists)
    wait_until(lambda: file.read_text() == "2")
    number = engine.num_saved
    time.sleep(0.1)
    assert engine.num_saved == number, "nothing has changed"
    engine.add()
    keeper.close()
    assert file.read_text() == "3"
    later = Engine()
    keeper = Keeper(later, tmp_path / "new")
    assert len(later.remembered) == 3
    keeper.close()
    assert later.num_saved == 0


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / keeping.FILE).write_text("x")
    with pytest.raises(ValueError, match="invalid literal"):
        Keeper(Engine(), tmp_path)
    assert (tmp_path / keeping.FILE).read_text() == "x"

    def fail(self, path):
        raise OSError(28, "No space left on device", str(path))

    engine = Engine()
    keeper = Keeper(engine, tmp_path / "other")
    monkeypatch.setattr(Engine, "save_remembered", fail)
    engine.add()
    with caplog.at_level(logging.WARNING, logger=keeping.__name__):
        keeper.close()
    assert "remembered texts were not saved" in caplog.text
    assert keeping.FILE in caplog.text
