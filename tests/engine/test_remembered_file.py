"""Remembered texts in a file: all of them, in their order, and after a kill the file of before or the next one."""

import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlade.engine.remembered import FORMAT, Remembered, identity
from tests.tiny import tiny_tokenizer

VOCABULARY = identity(tiny_tokenizer(), 13)
METADATA = {"format": FORMAT, "vocabulary": VOCABULARY, "keys": '["a"]'}


def filled(number, memory=10**6):
    chance, remembered = random.Random(number), Remembered(memory)
    for _ in range(number):
        length = chance.randint(2, 30)
        remembered.add(
            chance.choice("abé"), np.array(chance.choices(range(13), k=length)), chance.randint(0, length - 1)
        )
    return remembered


def listed(remembered):
    return [(text.key, text.tokens.tolist(), text.begin) for text in remembered.texts()]


def loaded(path, memory=10**6):
    remembered = Remembered(memory)
    remembered.load(path, VOCABULARY, 13)
    return remembered


@pytest.mark.parametrize("number", [0, 1, 20])
def test_all_texts_come_back_in_their_order(tmp_path, number):
    saved = filled(number)
    saved.save(tmp_path / "new" / "file", VOCABULARY)
    assert listed(loaded(tmp_path / "new" / "file")) == listed(saved)
    assert (tmp_path / "new" / "file").stat().st_mode & 0o777 == 0o600
    few = listed(loaded(tmp_path / "new" / "file", memory=1500))
    assert few == listed(saved)[len(listed(saved)) - len(few) :], "the last ones, as far as they fit"


def test_a_vocabulary_is_known_by_the_bytes_of_its_tokens():
    assert identity(tiny_tokenizer(), 13) == VOCABULARY
    assert len({VOCABULARY, identity(tiny_tokenizer(), 14), identity(None, 13)}) == 3


def write(path, metadata, **changes):
    remembered = Remembered(10**6)
    remembered.add("a", np.array([1, 2, 3]), 1)
    remembered.save(path, VOCABULARY)
    save_file(load_file(path) | changes, path, METADATA | metadata)


@pytest.mark.parametrize(
    ("metadata", "changes", "message"),
    [
        ({"format": "jlade remembered texts 9"}, {}, "is no file of 'jlade remembered texts 1', but of"),
        ({"vocabulary": "another"}, {}, "has texts of another tokenizer than this model's: remove it, or use another"),
        ({"keys": '["a", "b"]'}, {}, "its arrays do not belong together"),
        ({"keys": "["}, {}, "holds no remembered texts"),
        ({"keys": "[3]"}, {}, "its arrays do not belong together"),
        ({}, {"tokens": np.array([1, 13, 3], np.int32)}, "its arrays do not belong together"),
        ({}, {"lengths": np.array([4])}, "its arrays do not belong together"),
        ({}, {"begins": np.array([4])}, "its arrays do not belong together"),
    ],
)
def test_a_wrong_file_is_named_and_adds_nothing(tmp_path, metadata, changes, message):
    path, remembered = tmp_path / "file", Remembered(10**6)
    write(path, {})
    assert len(loaded(path)) == 1
    write(path, metadata, **changes)
    with pytest.raises(ValueError, match=message) as error:
        remembered.load(path, VOCABULARY, 13)
    assert str(path) in str(error.value)
    assert len(remembered) == 0


def test_what_is_no_file_of_texts_is_named(tmp_path):
    broken = tmp_path / "broken"
    filled(20).save(broken, VOCABULARY)
    broken.write_bytes(broken.read_bytes()[:-10])
    for path in (broken, tmp_path / "none"):
        with pytest.raises(ValueError, match=f"{path} holds no remembered texts"):
            loaded(path)


WRITER = """
import sys
import numpy as np
from jlade.engine.remembered import Remembered

remembered = Remembered(10**9)
for number in range(10**6):
    remembered.add("a", np.full(20_000, number % 13), number % 5)
    remembered.save(sys.argv[1], sys.argv[2])
    print(number, flush=True)
"""


@pytest.mark.slow
def test_after_a_kill_the_file_is_whole(tmp_path):
    path, seen = tmp_path / "file", set()
    for number in (1, 3, 8, 20):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), VOCABULARY], stdout=subprocess.PIPE, text=True
        )
        lines = [writer.stdout.readline() for _ in range(number)]
        writer.send_signal(signal.SIGKILL)
        written = [*map(int, lines), *map(int, writer.communicate()[0].splitlines()[:-1])]
        texts = listed(loaded(path, memory=10**9))
        assert all(key == "a" and len(set(tokens)) == 1 and len(tokens) == 20_000 for key, tokens, _ in texts)
        assert len(texts) >= min(13, written[-1] + 1), "the last file that was written"
        seen.add(len(texts))
    assert len(seen) > 1, "they are killed at several places"
