"""Tables of grammars that are read from files."""

import numpy as np

from jlade import files
from jlade.constraints import automaton, regex
from jlade.constraints.tokens import Table
from jlade.generation import saved_tables
from tests.constraints.expressions import EOS, TOKENS, TRIE


def test_a_table_is_made_once_unless_its_file_is_broken(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(saved_tables, "SLOW", -1)
    monkeypatch.setattr(saved_tables, "MOST", 2)
    made = []

    def table_of(pattern):
        def make():
            made.append(pattern)
            return Table.of(automaton.build(regex.parse(pattern), counts=True), TRIE, [EOS], len(TOKENS))

        return saved_tables.saved(pattern, make)

    for pattern in ("a|b", "[ab]{9,20}c"):
        first, again = table_of(pattern), table_of(pattern)
        for one, other in zip([*first.blocks, first.likely], [*again.blocks, again.likely], strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(first.class_of_token, again.class_of_token)
        assert (first.bounds is None) == (again.bounds is None)
    assert made == ["a|b", "[ab]{9,20}c"]
    directory = files.cache_directory() / "tables"
    for file in directory.iterdir():
        file.write_bytes(b"PK" + file.read_bytes()[2:99])
    table_of("a|b")
    assert made[2:] == ["a|b"]
    assert "is made again" in caplog.text
    table_of("abc")
    assert len(list(directory.iterdir())) == 2, "no more than these are kept"
