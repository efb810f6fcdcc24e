"""The tokenizer that parameters know from `jlade.load`, in every function that takes text."""

import copy

import jax
import pytest
from tokenizers import Tokenizer, decoders, models

import jlade
from jlade.evaluation import trace
from jlade.generation import text
from tests.compilations import recorded
from tests.tiny import PAPER, tiny_tokenizer

TEXT, TOO_MANY = "def read_config(", 10**6


def submit(params, prompt, max_new_tokens, mesh=None):
    with jlade.Engine(params, lookahead=None, max_sequences=1, capacity=64, mesh=mesh) as engine:
        return engine.submit(prompt, max_new_tokens=max_new_tokens)


def submit_on_a_mesh(params, prompt, max_new_tokens):
    return submit(params, prompt, max_new_tokens, jlade.make_mesh())


DOORS = [jlade.generate, jlade.stream, jlade.prepare, jlade.tune, trace.trace, submit, submit_on_a_mesh]


@pytest.fixture(scope="module")
def loaded(small_demo):
    return jlade.load(small_demo, "float32")


@pytest.fixture(scope="module")
def changed(loaded):
    """The same parameters, but not as `jlade.load` returned them."""
    return jax.tree.map(lambda array: array, loaded[0])


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_text_is_read(door, loaded):
    """The error of a limit, the first thing that is wrong, counts the tokens of the text."""
    length = len(text.encode(loaded[1], TEXT))
    with pytest.raises(ValueError, match=f"prompt of {length} tokens and max_new_tokens={TOO_MANY} make"):
        door(loaded[0], TEXT, max_new_tokens=TOO_MANY)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_changed_parameters_know_none_and_the_error_says_what_to_pass(door, changed):
    with pytest.raises(TypeError, match=r"^prompt is a string, '.*': pass tokenizer=, as jlade\.load returns it .*$"):
        door(changed, TEXT, max_new_tokens=TOO_MANY)


def test_texts_are_those_with_the_tokenizer_and_nothing_compiles_anew(loaded, changed, small_demo):
    params, tokenizer = loaded
    again, ids = jlade.load(small_demo, "float32")[0], text.encode(tokenizer, TEXT)
    options = {"max_new_tokens": 8, "lookahead": PAPER, "eos_ids": ()}

    def results(params, prompt, **tokenizer):
        out = jlade.generate(params, prompt, **options, **tokenizer)
        pieces = [piece.text for piece in jlade.stream(params, prompt, **options, **tokenizer)]
        return out.tokens.tolist(), out.text, "".join(pieces)

    expected = results(changed, TEXT, tokenizer=tokenizer)
    assert expected[1] == (expected[2],) != ("",)
    with recorded() as compiled:
        for others, prompt in ((params, TEXT), (params, ids), (again, TEXT)):
            assert results(others, prompt) == expected
    assert not compiled


def test_it_is_no_part_of_the_pytree(loaded, changed):
    assert loaded[0].tokenizer is loaded[1]
    assert changed.tokenizer is None
    assert jax.tree.structure(loaded[0]) == jax.tree.structure(changed)
    assert hash(jax.tree.structure(loaded[0])) == hash(jax.tree.structure(changed))


def test_the_demo_knows_its_own(demo):
    assert demo[0].tokenizer is demo[1]


@pytest.mark.parametrize(("name", "value"), [("stop", "a"), ("prediction", TEXT), ("corpus", [TEXT])])
def test_other_text_is_read(name, value, loaded, changed):
    options = {"lookahead": jlade.LookaheadConfig.tree(7), name: value}
    jlade.prepare(loaded[0], [1], **options)
    with pytest.raises(TypeError, match=rf"^{name}.*: pass tokenizer=, as jlade\.load returns it"):
        jlade.prepare(changed, [1], **options)


def test_a_given_tokenizer_comes_first(loaded):
    inputs, _ = jlade.prepare(loaded[0], "ab", tokenizer=tiny_tokenizer(), max_new_tokens=1)
    assert inputs.prompts[0, : inputs.lengths[0]].tolist() == tiny_tokenizer().encode("ab").ids


def test_with_a_tokenizer_of_another_kind_there_are_token_ids_alone(changed):
    odd = copy.copy(changed)
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.CTC()
    object.__setattr__(odd, "tokenizer", tokenizer)
    jlade.prepare(odd, [1])
    with pytest.raises(TypeError, match="pass tokenizer="):
        jlade.prepare(odd, "a")
