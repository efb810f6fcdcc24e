"""Texts of grammars through `jlade.generate`, against plain constrained decoding with the grammar's table."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import SamplingConfig
from jlade.constraints.grammar import Grammar, by_bits, by_comparison, by_index, by_product
from jlade.constraints.tokens import Trie
from tests.constraints.grammars import COMMON, EOS, GRAMMAR, TREE
from tests.tiny import PAPER, tiny_llama, tiny_tokenizer


def generate(lookahead, prompts=([0, 1, 2], [5, 4]), **options):
    return jlade.generate(tiny_llama(2), list(map(list, prompts)), **COMMON | {"lookahead": lookahead} | options)


@pytest.mark.parametrize("lookahead", [PAPER, TREE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_constrained_decoding(lookahead, temperature):
    options = {"grammar": [GRAMMAR, None], "sampling": SamplingConfig(temperature=temperature)}
    options["key"] = jax.random.key(3)
    plain, found = generate(None, **options), generate(lookahead, **options)
    assert found.text == plain.text
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.text[1] == generate(None, **options | {"grammar": None}).text[1], "of no grammar"
    if found.finish_reason[0] == "eos":
        assert re.fullmatch(GRAMMAR.source, found.text[0])


def test_a_whole_text_is_one_of_the_grammar():
    for seed in range(5):
        sampling = SamplingConfig(temperature=1.0)
        found = generate(
            PAPER, [[seed]], grammar=Grammar.choice(["abc", "ab", "cab"]), key=jax.random.key(seed), sampling=sampling
        )
        assert found.text[0] in ("abc", "ab", "cab")
        assert found.finish_reason == ("eos",)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grammar": "abc"}, TypeError, "grammar must be a jlade.Grammar"),
        ({"grammar": [GRAMMAR]}, ValueError, "grammar must be one for all prompts, or 2"),
        ({"grammar": GRAMMAR, "eos_ids": ()}, ValueError, "grammar needs end tokens"),
        ({"grammar": GRAMMAR, "tokenizer": None}, TypeError, "grammar needs the tokenizer"),
        (
            {"grammar": Grammar.choice(["ab", "ba"]), "min_new_tokens": 3},
            ValueError,
            r"min_new_tokens must be at most \d, after which",
        ),
        ({"constraint": 3}, TypeError, "constraint must have the methods"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        generate(PAPER, **options)


@pytest.mark.parametrize("of_places", [by_bits, by_comparison, by_product])
def test_all_ways_give_what_an_index_does(of_places):
    rng = np.random.default_rng(0)
    is_allowed, places = rng.random(64) < 0.5, rng.integers(64, size=400)
    np.testing.assert_array_equal(of_places(jnp.asarray(is_allowed), jnp.asarray(places)), by_index(is_allowed, places))


def test_wrong_grammars():
    with pytest.raises(ValueError, match=re.escape("#/properties/a/minContains: not supported")):
        Grammar.json_schema({"type": "object", "properties": {"a": {"type": "array", "minContains": 1}}})
    with pytest.raises(ValueError, match="regex"):
        Grammar.regex("(a")
    with pytest.raises(ValueError, match="the grammar of regex has no text"):
        Grammar.regex(r"a[^\s\S]")
    with pytest.raises(ValueError, match="options must be"):
        Grammar.choice([])
    assert json.loads(Grammar.json_schema({"type": "null"}).source) == {"type": "null"}


def test_requests_of_an_engine_have_grammars_of_their_own():
    prompts, grammars = [[0, 1, 2], [5, 4], [3]], [GRAMMAR, None, Grammar.regex("[ab]{2,9}c")]
    with jlade.Engine(
        tiny_llama(2), tiny_tokenizer(), max_sequences=2, capacity=64, lookahead=PAPER, max_grammar=3000
    ) as engine:
        found = engine.generate(prompts, grammar=grammars, eos_ids=[EOS], max_new_tokens=24)
        assert [each.text[0] for each in found] == list(generate(None, prompts, grammar=grammars).text)
        large = Grammar.regex("(a?b?c?){60}")
        with pytest.raises(ValueError, match=r"at most max_grammar=3000 entries.* got 25088 entries of 181 states"):
            engine.submit([1], grammar=large, eos_ids=[EOS])
    with (
        jlade.Engine(tiny_llama(2), tiny_tokenizer(), max_sequences=1, capacity=64, max_grammar=0) as engine,
        pytest.raises(ValueError, match="grammar needs an engine that was made with max_grammar"),
    ):
        engine.submit([1], grammar=GRAMMAR, eos_ids=[EOS])


def test_a_stream_and_turns():
    pieces = list(jlade.stream(tiny_llama(2), [0, 1, 2], grammar=GRAMMAR, **COMMON, lookahead=PAPER))
    alone = generate(PAPER, [[0, 1, 2]], grammar=GRAMMAR, keep_state=True)
    assert "".join(piece.text for piece in pieces) == alone.text[0]
    turn = [0, 1, 2, *alone.tokens[0, : alone.lengths[0]].tolist(), 4]
    later = generate(PAPER, [turn], grammar=GRAMMAR, state=alone.state)
    assert later.text == generate(None, [turn], grammar=GRAMMAR).text


@pytest.mark.parametrize("axes", [{"data": 2}, {"lookahead": 2}, {"model": 2}])
def test_meshes(axes):
    mesh = jlade.make_mesh(**axes)
    found = generate(PAPER, grammar=[GRAMMAR, None], mesh=mesh)
    assert found.text == generate(PAPER, grammar=[GRAMMAR, None]).text


def test_lengths_have_no_states_of_their_own():
    def states(maximum):
        return len(Grammar.json_schema({"type": "string", "minLength": 2, "maxLength": maximum}).automaton.moves)

    assert states(10**9) == states(60_000) == states(10)


def test_a_vocabulary_without_all_bytes_gets_the_states_of_all_iterations():
    tokens = [bytes([byte]) for byte in b"abc"]
    automaton = Grammar.regex("(ab?){2,9}c").automaton
    assert automaton.bounds is not None
    assert Trie(tokens).may_count(automaton, [])
    assert not Trie([*tokens[:2], b"bc"]).may_count(automaton, [])
    assert not Trie([*tokens, b"a" * 129]).may_count(automaton, [])
    assert not Trie(tokens).may_count(automaton, [0]), "an end token is no part of a text"


def test_a_grammar_is_read_from_its_file_with_its_automaton(tmp_path, monkeypatch):
    grammar = Grammar.json_schema({"type": "string", "maxLength": 20})
    grammar.save(tmp_path / "grammar.npz")
    with pytest.raises(ValueError, match="path must not exist yet"):
        grammar.save(tmp_path / "grammar.npz")
    monkeypatch.setattr("jlade.constraints.grammar._automaton", None)
    loaded = Grammar.load(tmp_path / "grammar.npz")
    assert loaded == grammar
    assert hash(loaded) == hash(grammar)
    assert loaded.automaton.accepts(b'"abc"')
    assert not loaded.automaton.accepts(b'"' + 21 * b"a" + b'"')
    assert loaded.automaton.bounds is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("grammar"),
        lambda arrays: arrays.pop("moves"),
        lambda arrays: arrays.update(other=np.zeros(3)),
        lambda arrays: arrays.update(moves=arrays["moves"] + 1),
        lambda arrays: arrays.update(moves=arrays["moves"].astype(float)),
        lambda arrays: arrays.update(class_of_byte=arrays["class_of_byte"] - 1),
        lambda arrays: arrays.update(is_final=arrays["is_final"][:1]),
        lambda arrays: arrays.clear(),
    ],
)
def test_a_file_without_a_grammar_is_refused(tmp_path, change):
    path = tmp_path / "grammar.npz"
    Grammar.regex("(ab)*c").save(path)
    with np.load(path) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"path must be a file of jlade.Grammar.save, got .*grammar\.npz"):
        Grammar.load(path)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"path must be a file of jlade.Grammar.save"):
        Grammar.load(path)
