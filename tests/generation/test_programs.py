"""Programs made ahead: what runs them, what refuses them, and why."""

import json
import pathlib
import pickle
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import jlade
from jlade.costs import learned
from jlade.decoding import ahead
from jlade.generation import request, saved_programs
from jlade.inspection import targets
from tests.compilations import EVENTS, recorded, told
from tests.tiny import PAPER, tiny_llama

# A model that no other test has, so that no program is there.
SHAPE = {"num_layers": 1, "head_dim": 8, "vocab_size": 14}
OPTIONS = {"lookahead": PAPER, "max_new_tokens": 8, "eos_ids": ()}
ROOT = pathlib.Path(__file__).parents[2]


def params(**changes):
    return tiny_llama(**(SHAPE | changes))


def texts(prompt=(1, 2, 3), **options):
    return jlade.generate(params(), list(prompt), **(OPTIONS | options)).tokens.tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory of programs."""
    directory = tmp_path_factory.mktemp("made") / "programs"
    jlade.compile(params(), directory, lookahead=PAPER, capacity=64, turns=True)
    return directory


@pytest.mark.slow
def test_a_first_short_text_of_auto_is_plain_and_compiles_nothing_either(tmp_path):
    jlade.compile(params(), tmp_path / "auto", capacity=64)
    learned.forget()
    with recorded(EVENTS) as events:
        options = {"max_new_tokens": 16, "eos_ids": (), "programs": tmp_path / "auto"}
        first, second = (jlade.generate(params(), [1, 2, 3], **options) for _ in range(2))
    assert events == []
    assert first.steps.tolist() == [16] > second.steps.tolist()
    assert first.tokens.tolist() == second.tokens.tolist()


@pytest.fixture
def copied(made, tmp_path):
    """A copy of it, to damage."""
    return shutil.copytree(made, tmp_path / "programs")


def test_a_call_neither_traces_nor_compiles(made):
    params()
    with recorded(EVENTS) as events:
        first = texts(programs=made)
        pieces = list(jlade.stream(params(), [1, 2, 3], programs=made, **OPTIONS))
        other = texts((5, 6), programs=made, max_new_tokens=5, eos_ids=(2,), key=request.make_key(3))
    assert events == []
    assert first == texts() == [[token for piece in pieces for token in piece.tokens]]
    assert other == texts((5, 6), max_new_tokens=5, eos_ids=(2,))


def test_later_turns_run_their_own(made):
    def answer(**more):
        first = jlade.generate(params(), [1, 2, 3], keep_state=True, **OPTIONS, **more)
        longer = [1, 2, 3, *first.tokens[0].tolist(), 4, 5]
        return jlade.generate(params(), longer, state=first.state, **OPTIONS, **more).tokens.tolist()

    with told() as messages, recorded("jaxpr_to_mlir") as events:
        found = answer(programs=made)
    assert messages == []
    assert not {facts["fun_name"] for _, facts in events} & {f"jit({name})" for name in ("_read", "_start", "_run")}
    assert found == answer()


FRESH = """
import sys
sys.path.insert(0, sys.argv[2])
import jax
jax.config.update("jax_platforms", "cpu")
from tests.compilations import EVENTS, recorded
from tests.generation.test_programs import params, texts
params()
with recorded(EVENTS) as events:
    print(texts(programs=sys.argv[1]))
assert events == [], events
"""


@pytest.mark.slow
def test_a_fresh_process_neither_traces_nor_compiles(made):
    done = subprocess.run([sys.executable, "-c", FRESH, made, ROOT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == texts()


@pytest.mark.slow
def test_programs_that_the_cache_has_are_compiled_anew(made, tmp_path):
    """Of a program from its cache JAX would write a part, which does not run."""
    jlade.inspect(params(), "cpu", lookahead=PAPER, capacity=64)
    jlade.compile(params(), tmp_path / "again", lookahead=PAPER, capacity=64)
    done = subprocess.run([sys.executable, "-c", FRESH, tmp_path / "again", ROOT], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_is_still_taken_over(made):
    inputs, config = jlade.prepare(params(), [1, 2, 3], **OPTIONS)
    run = saved_programs.find(made, jax.devices()[0]).handler(lambda: saved_programs.facts_of(params(), inputs, config))
    with ahead.intercept(run):
        state = jlade.start(jlade.prefill(params(), inputs, config), inputs, config)
        after = jlade.run_steps(params(), state, config, 1)
    assert all(array.is_deleted() for array in state.cache.keys)
    assert not any(array.is_deleted() for array in after.cache.keys)


def test_a_call_of_another_batch_size_compiles_and_says_so_once(made):
    pair = [[1, 2, 3], [4, 5]]
    with told() as messages:
        found = [texts(pair, programs=made) for _ in range(2)]
    (message,) = messages
    assert str(made) in message
    assert "batch size is 1 in the file and 2 here; inputs.prompts is int32[1, 64] in the file" in message
    assert found[0] == found[1] == texts(pair)


CHANGES = {
    "config.lookahead.drafts.window_size is 4 in the file and 3 here": {
        "lookahead": jlade.LookaheadConfig.paper(3, 4, 3)
    },
    "inputs.sampling.temperature is None in the file and float32[1] here": {
        "sampling": jlade.SamplingConfig(temperature=0.7)
    },
    "config.logprobs is False in the file and True here": {"logprobs": True},
    "decoder.kv_dtype is None in the file and 'int8' here": {"kv_dtype": "int8"},
    "inputs.stopping.min_new_tokens is None in the file and int32[1] here": {"min_new_tokens": 2},
    "inputs.stopping.eos_ids is int32[1, 32] in the file and int32[1, 64] here": {"eos_ids": [5] * 33},
}


@pytest.mark.parametrize("words", CHANGES)
def test_each_difference_of_a_call_is_named(made, words):
    inputs, config = jlade.prepare(params(), [1, 2, 3], **(OPTIONS | CHANGES[words]))
    found = saved_programs.find(made, jax.devices()[0])
    assert words in saved_programs._differences(found._facts, saved_programs.facts_of(params(), inputs, config))


def test_each_difference_of_the_model_is_named(made):
    inputs, config = jlade.prepare(params(), [1, 2, 3], **OPTIONS)
    facts = saved_programs.find(made, jax.devices()[0])._facts
    assert saved_programs._differences(facts, saved_programs.facts_of(params(), inputs, config)) == ""
    half = jax.tree.map(lambda x: x.astype("bfloat16"), params())
    assert "params.embedding is float32[14, 16] in the file" in saved_programs._differences(
        facts, saved_programs.facts_of(half, inputs, config)
    )


@pytest.mark.parametrize("fact", saved_programs.here(jax.devices("cpu")[0]))
def test_programs_for_another_machine_are_refused(copied, fact):
    manifest = json.loads((copied / saved_programs.MANIFEST).read_text())
    here = manifest["made_for"][fact]
    manifest["made_for"][fact] = "another"
    (copied / saved_programs.MANIFEST).write_text(json.dumps(manifest))
    with told() as messages:
        assert texts(programs=copied) == texts(programs=copied) == texts()
    (message,) = messages
    assert f"{copied} are not for this process, so they compile as usual: {fact} is another in the file" in message
    assert f"and {here} here" in message


@pytest.mark.parametrize("file", ["0.program", saved_programs.MANIFEST])
def test_a_truncated_file_is_refused(copied, file):
    content = (copied / file).read_bytes()
    (copied / file).write_bytes(content[: len(content) // 2])
    with told() as messages:
        assert texts(programs=copied) == texts(programs=copied) == texts()
    (message,) = messages
    assert message.startswith(str(copied / file))


FOREIGN = {
    "[]": "list indices",
    '{"format": 9}': "its format is 9, and this version of jlade reads 1",
    "{": "Expecting",
}


@pytest.mark.parametrize("content", FOREIGN)
def test_a_foreign_manifest_is_refused(tmp_path, content):
    (tmp_path / saved_programs.MANIFEST).write_text(content)
    with told() as messages:
        assert texts(programs=tmp_path) == texts()
    assert FOREIGN[content] in messages[0]


def test_a_program_that_is_none_is_refused(copied):
    """With the right SHA-256."""
    content = pickle.dumps((b"", None, None))
    manifest = json.loads((copied / saved_programs.MANIFEST).read_text())
    for each in manifest["programs"]:
        (copied / each["file"]).write_bytes(content)
        each["sha256"] = saved_programs.hashlib.sha256(content).hexdigest()
    (copied / saved_programs.MANIFEST).write_text(json.dumps(manifest))
    with told() as messages:
        assert texts(programs=copied) == texts()
    assert len(set(messages)) == len(messages) > 1
    assert all("cannot be loaded, so the program compiles as usual" in message for message in messages)


def test_a_wrong_path(tmp_path):
    with pytest.raises(ValueError, match=r"programs must be a directory written by jlade compile, got .*nowhere"):
        texts(programs=tmp_path / "nowhere")


def test_an_error_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    call = saved_programs.Call("_run", None, {}, None, (), {})
    monkeypatch.setattr(saved_programs.serialize_executable, "serialize", fail)
    with pytest.raises(OSError, match="disk full"):
        saved_programs.save(tmp_path / "programs", [(call, None)], jax.devices()[0], {})
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "programs_of", None)  # nothing compiles
    (tmp_path / "there").mkdir()
    for options, message in (
        ({"output": tmp_path / "there"}, "output must not exist yet"),
        ({"capacity": 65}, "capacity must be at most 64, the model's positions, got 65"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"seed": 1}, "seed is not an option of calls that are compiled ahead"),
        ({"dtype": "bfloat16"}, "dtype and bits are for a directory"),
        ({"device": "abacus", "capacity": 64}, "device must be one of"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jlade.compile(params(), **{"output": tmp_path / "new", **options})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_are_those_of_jax(implementation):
    with jax.default_prng_impl(implementation):
        for seed in (0, 1, 2**31, 2**32 - 1):
            found, expected = request.make_key(seed), jax.random.key(seed)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(expected))
