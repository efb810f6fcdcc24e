import json

import pytest

from jlade import text


def test_the_demo_tokenizer_gives_the_recorded_ids(demo, golden):
    for prompt, _ in golden.values():
        assert text.encode(demo[1], prompt["text"]) == prompt["ids"]


def test_decode_leaves_special_tokens_out(demo):
    tokenizer = demo[1]
    assert text.decode(tokenizer, [1, *tokenizer.encode("import os").ids, 2]) == "import os"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_detokenized_pieces_joined_are_the_whole_and_split_no_character(demo, size):
    whole = "déjà vu: 数 → 𝄞, 👩‍🚀\n" * 2
    ids = text.encode(demo[1], whole)
    assert len(ids) > len(whole), "characters should take several tokens"
    detokenizer = text.Detokenizer(demo[1])
    pieces = [detokenizer.feed(ids[i : i + size], last=i + size >= len(ids)) for i in range(0, len(ids), size)]
    assert "".join(pieces) == whole
    assert not any(text.REPLACEMENT in piece for piece in pieces)


def test_bytes_that_never_become_a_character_come_with_the_last_piece(demo):
    ids = text.encode(demo[1], "a𝄞")[:-1]
    detokenizer = text.Detokenizer(demo[1])
    assert detokenizer.feed(ids) == "a"
    assert "a" + detokenizer.feed([], last=True) == text.decode(demo[1], ids)


def test_transformers_tokenizers_serve_as_well(demo, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    demo[1].save(str(tmp_path / "tokenizer.json"))
    other = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = text.encode(other, "def f(x):")
    assert ids == text.encode(demo[1], "def f(x):")
    assert text.decode(other, ids) == text.decode(demo[1], ids)


def test_a_directory_without_a_tokenizer_gives_none(tmp_path):
    assert text.load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", json.dumps({"version": "1.0"}), "\xff"])
def test_a_broken_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        text.load_tokenizer(tmp_path)
