"""Programs that go when there is little room for more, and those that stay."""

import logging
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade.decoding import ahead, room
from jlade.generation import saved_programs
from tests import plain_llama
from tests.compilations import recorded
from tests.tiny import PAPER, tiny_llama

# A model that no other test has, so that no program is there.
SHAPE = {"num_layers": 1, "head_dim": 2, "vocab_size": 15}
PARAMS = tiny_llama(**SHAPE)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The programs of a test, without those that other tests have left."""
    monkeypatch.setattr(room, "_living", weakref.WeakSet())
    room._warned.clear()
    yield
    room._warned.clear()


@pytest.fixture
def few(monkeypatch, tmp_path):
    """A system that does not show its maps, with room for two settings: 3 programs each, and 3 for both."""
    monkeypatch.setattr(room, "LIMIT", tmp_path / "missing")
    monkeypatch.setattr(room, "MAX_PROGRAMS", 9 / room.SHARE)


def text(window_size):
    """Returns a text, and the names of the programs that are compiled for it."""
    lookahead = jlade.LookaheadConfig.paper(window_size, 3, 2)
    with recorded("backend_compile") as events:
        out = jlade.generate(PARAMS, [1, 2, 3], lookahead=lookahead, max_new_tokens=6, eos_ids=())
    return out.tokens[0].tolist(), {facts["fun_name"] for _, facts in events}


def greedy(prompt, number):
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(int(np.argmax(plain_llama.logits(PARAMS, tokens)[-1])))
    return tokens[len(prompt) :]


def test_programs_not_used_for_longest_go_and_compile_again(few, caplog, monkeypatch):
    expected = greedy([1, 2, 3], 6)
    monkeypatch.setattr(room, "MAX_PROGRAMS", 1000)
    assert text(1)[0] == text(2)[0] == expected
    assert text(1) == (expected, set())
    # Room for both settings: other tests may have left some programs of theirs.
    monkeypatch.setattr(room, "MAX_PROGRAMS", room.measure().number / room.SHARE)
    assert text(3)[0] == expected
    assert text(1) == (expected, set()), "it was used last but one"
    found, compiled = text(2)
    assert found == expected
    assert compiled >= {"jit(_start)", "jit(_run)"}
    (message,) = (each.message for each in caplog.records if each.name == "jlade")
    assert "compiled programs" in message
    assert "Fewer settings, models and engines" in message


@pytest.mark.skipif(not room.MAPS.exists(), reason="the system does not show them")
def test_their_memory_maps_go_too(monkeypatch, tmp_path, caplog):
    @ahead.jit(static_argnames="number")
    def program(x, number):
        for _ in range(number):
            x = jnp.sort(jnp.sin(x) @ x)
        return x

    square, before = jnp.ones((8, 8)), room.measure().number
    program(square, number=4).block_until_ready()
    program(ahead.shapes(square), number=5)
    each = (room.measure().number - before) / 2
    assert each > 3
    limit = tmp_path / "limit"
    limit.write_text(str(round((before + 8 * each) / room.SHARE)), encoding="utf-8")
    monkeypatch.setattr(room, "LIMIT", limit)
    for number in range(6, 30):
        program(square, number=number).block_until_ready()
        assert room.measure().number <= before + 10 * each
    (message,) = (each.message for each in caplog.records if each.name == "jlade")
    assert "memory maps" in message
    assert "vm.max_map_count" in message


def test_an_engine_keeps_its_programs_while_it_runs(few, monkeypatch):
    with jlade.Engine(PARAMS, max_sequences=1, capacity=32, lookahead=PAPER) as engine:

        def answer():
            with recorded("backend_compile") as events:
                out = engine.submit([1, 2, 3], max_new_tokens=6, eos_ids=()).result()
            return out.tokens[0].tolist(), {facts["fun_name"] for _, facts in events}

        expected = greedy([1, 2, 3], 6)
        monkeypatch.setattr(room, "MAX_PROGRAMS", 1000)
        assert answer()[0] == expected == text(14)[0]
        monkeypatch.setattr(room, "MAX_PROGRAMS", room.measure().number / room.SHARE)  # the engine and one setting
        for window_size in range(4, 7):
            assert text(window_size)[0] == expected
        assert answer() == (expected, set())
    for window_size in range(7, 10):
        text(window_size)
    with jlade.Engine(PARAMS, max_sequences=1, capacity=32, lookahead=PAPER) as engine:
        assert answer()[1], "they have gone"


def test_loaded_programs_are_loaded_again(few, tmp_path):
    jlade.compile(PARAMS, tmp_path / "made", lookahead=PAPER, capacity=64)

    def saved():
        options = {"lookahead": PAPER, "max_new_tokens": 6, "eos_ids": (), "programs": tmp_path / "made"}
        return jlade.generate(PARAMS, [1, 2, 3], **options).tokens[0].tolist()

    expected = saved()
    programs = saved_programs.find(tmp_path / "made", next(iter(PARAMS.embedding.devices())))
    assert any(programs._loaded.values())
    for window_size in range(10, 13):
        text(window_size)
    assert not any(programs._loaded.values())
    assert saved() == expected == greedy([1, 2, 3], 6)


def test_without_a_warning_nothing_goes(caplog):
    with caplog.at_level(logging.WARNING, logger="jlade"):
        assert text(13)[0] == greedy([1, 2, 3], 6)
    assert room.measure().number < room.measure().limit
    assert not caplog.records
