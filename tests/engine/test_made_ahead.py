"""An engine runs programs that were made ahead, or compiles and says why."""

import json
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import jlade
from jlade.engine import engine as engine_lib
from jlade.engine import rows
from jlade.generation import saved_programs
from jlade.inspection import targets
from tests.compilations import EVENTS, recorded, told
from tests.tiny import PAPER, tiny_llama

# A model that no other test has, so that no program is there.
SHAPE = {"num_layers": 1, "head_dim": 8, "vocab_size": 15}
ENGINE = {"max_sequences": 1, "capacity": 64, "lookahead": None, "max_grammar": 0}
REQUEST = {"max_new_tokens": 8, "eos_ids": ()}
ARRAYS = np.zeros(1, bool), np.zeros((), np.int32)
ROOT = pathlib.Path(__file__).parents[2]


def params():
    return tiny_llama(**SHAPE)


def made_engine(**changes):
    return jlade.Engine(params(), **(ENGINE | changes))


def texts(**changes):
    """Returns the texts of two prompts, greedy and sampled, and log-probabilities of the first prompt."""
    with made_engine(**changes) as engine:
        greedy = engine.submit([1, 2, 3], **REQUEST, prompt_logprobs=True)
        options = {"sampling": jlade.SamplingConfig(temperature=0.7), "logprobs": True, "with_statistics": True}
        sampled = engine.submit([5, 6], key=jax.random.key(3), **options, **REQUEST)
        found = [each.result().tokens.tolist() for each in (greedy, sampled)]
        return found, greedy.prompt_logprobs.logprobs.tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory of programs."""
    directory = tmp_path_factory.mktemp("made") / "programs"
    jlade.compile_engine(params(), directory, **ENGINE)
    return directory


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A directory that is named as such, with a single program, that of `_take`."""
    directory, device = tmp_path_factory.mktemp("named") / "programs", jax.devices()[0]
    ((call, compiled),) = targets.programs_of(lambda: rows._take(*ARRAYS), device, anew=True)
    with made_engine() as engine:
        saved_programs.save(directory, [(call, compiled)], device, engine_lib.facts_of(engine))
    return directory, call._replace(arrays=ARRAYS)


def test_nothing_is_compiled(made):
    params()
    with recorded("backend_compile") as compilations, made_engine(programs=made) as engine, recorded(EVENTS) as events:
        engine.warm_up()
        engine.submit([1, 2, 3], **REQUEST).result()
    assert (compilations, events) == ([], [])
    assert texts(programs=made) == texts()


FRESH = """
import json, sys
sys.path.insert(0, sys.argv[2])
import jax
jax.config.update("jax_platforms", "cpu")
from tests.compilations import recorded
from tests.engine.test_made_ahead import params, texts
params()
with recorded("backend_compile") as events:
    print(json.dumps(texts(programs=sys.argv[1], **json.loads(sys.argv[3]))))
print(len(events), file=sys.stderr)
"""


def fresh(*arguments, **changes):
    command = [sys.executable, "-c", FRESH, *arguments, ROOT, json.dumps(changes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found, logprobs = json.loads(done.stdout)
    return (found, logprobs), done.stderr.splitlines()


@pytest.mark.slow
def test_a_fresh_process_compiles_nothing(made):
    found, (number,) = fresh(made)
    assert (found, number) == (texts(), "0")


@pytest.mark.slow
def test_an_engine_of_other_rows_compiles_and_says_so_once(made):
    found, lines = fresh(made, max_sequences=2)
    (message,) = [line for line in lines if "UserWarning" in line]
    assert f"the programs in {made} are not for this engine, so it compiles: max_sequences is 1 in the file" in message
    assert int(lines[-1]) > 0
    assert found == texts()


CHANGES = {
    "max_sequences is 1 in the file and 2 here": {"max_sequences": 2},
    "capacity is 64 in the file and 32 here": {"capacity": 32},
    "pages is 2 in the file and 3 here": {"max_sequences": 1, "cache_tokens": 128},
    "config.lookahead.drafts.window_size is 0 in the file and 4 here": {"lookahead": PAPER},
    "config.top_logprobs is 0 in the file and 2 here": {"max_top_logprobs": 2},
    "rows.grammar is 0 in the file and 128 here": {"max_grammar": 128},
    "decoder.kv_dtype is None in the file and 'int8' here": {"kv_dtype": "int8"},
    "config.mesh is None in the file and data 1, lookahead 2, model 1 here": {"mesh": {"lookahead": 2}},
}


@pytest.mark.parametrize("words", CHANGES)
def test_each_difference_is_named_when_the_engine_is_made(named, words):
    changes = CHANGES[words]
    if "mesh" in changes:
        changes = {"mesh": jlade.make_mesh(**changes["mesh"])}
    with told() as messages:
        for _ in range(2):
            with made_engine(programs=named[0], **changes) as engine:
                assert engine._answered == engine._keeper.keeping, "none of the programs runs"
    (message,) = messages
    assert words in message


def test_programs_of_calls_are_refused(named, tmp_path):
    copied = shutil.copytree(named[0], tmp_path / "programs")
    manifest = json.loads((copied / saved_programs.MANIFEST).read_text())
    manifest["call"]["use"] = "call"
    (copied / saved_programs.MANIFEST).write_text(json.dumps(manifest))
    with told() as messages:
        made_engine(programs=copied).close()
    (message,) = messages
    assert message.endswith("are not for this engine, so it compiles: use is call in the file and engine here")


@pytest.mark.slow
def test_a_truncated_program_is_compiled(made, tmp_path):
    copied = shutil.copytree(made, tmp_path / "programs")
    manifest = json.loads((copied / saved_programs.MANIFEST).read_text())
    file = next(each["file"] for each in manifest["programs"] if each["program"] == "_end")
    (copied / file).write_bytes((copied / file).read_bytes()[:100])
    with told() as messages:
        assert texts(programs=copied) == texts()
    (message,) = messages
    assert message.startswith(f"{copied / file} cannot be loaded, so the program compiles as usual: its SHA-256")


def test_threads_load_a_program_once(named, monkeypatch):
    directory, call = named
    found, load, loads = saved_programs.SavedPrograms(directory, jax.devices()[0]), saved_programs.pickle.loads, []

    def slowly(content):
        loads.append(content)
        time.sleep(0.1)  # the other threads ask meanwhile
        return load(content)

    monkeypatch.setattr(saved_programs.pickle, "loads", slowly)
    results, run = [], found.handler(dict)
    threads = [threading.Thread(target=lambda: results.append(run(call).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(loads), results) == (1, [[False]] * 4)


def test_wrong_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "programs_of", None)  # nothing compiles
    (tmp_path / "there").mkdir()
    for options, message in (
        ({"output": tmp_path / "there"}, "output must not exist yet"),
        ({"capacity": 65}, "capacity must be at most 64"),
        ({"max_sequences": 0}, "max_sequences must be"),
        ({"batch_size": 1}, "batch_size is not an option of engines that are compiled ahead"),
        ({"mesh": None}, "mesh is not an option of engines that are compiled ahead"),
        ({"device": "abacus"}, "device must be one of"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jlade.compile_engine(params(), **(ENGINE | {"output": tmp_path / "new"} | options))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"programs must be a directory written by jlade compile, got .*nowhere"):
        made_engine(programs=tmp_path / "nowhere")
