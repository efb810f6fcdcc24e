import copy
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from jlade.generation import text
from tests import reference
from tests.tiny import TOKENS, tiny_tokenizer


def test_the_demo_tokenizer_gives_the_recorded_ids(demo, golden):
    for prompt, _ in golden.values():
        assert text.encode(demo[1], prompt["text"]) == prompt["ids"]


def test_decode_leaves_special_tokens_out(demo):
    tokenizer = demo[1]
    assert text.decode(tokenizer, [1, *tokenizer.encode("import os").ids, 2]) == "import os"


@given(ids=st.lists(st.integers(0, 4095), max_size=20))
def test_byte_level_text_is_what_the_tokenizer_decodes(demo, ids):
    assert text.decode(demo[1], ids) == demo[1].decode(ids, skip_special_tokens=True)


def sentencepiece_like(*decoder_list):
    """A tokenizer with pieces and bytes like LLaMA 2's."""
    pieces = ["<unk>", "▁a", "b", "▁", "▁c▁", *(f"<0x{byte:02X}>" for byte in "é数".encode()), "é", "<0x1>", "\n"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(list(decoder_list))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


FUSED = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)


@pytest.mark.parametrize(
    "tokenizer", [sentencepiece_like(*FUSED), sentencepiece_like(decoders.ByteFallback(), decoders.Metaspace())]
)
@given(units=st.lists(st.sampled_from([[1], [2], [3], [4], [5, 6], [7, 8, 9], [10], [11], [12], [13]]), max_size=12))
def test_sentencepiece_text_is_what_the_tokenizer_decodes_after_other_text(tokenizer, units):
    ids = [i for unit in units for i in unit]
    assert "b" + text.decode(tokenizer, ids) == tokenizer.decode([2, *ids], skip_special_tokens=True)


def test_a_character_in_bytes_may_stay_unfinished():
    tokenizer = sentencepiece_like(*FUSED)
    assert text.decode(tokenizer, [2, 5]) == "b\ufffd"
    assert text.decode(tokenizer, [5, 2, 6, 7, 8, 9]) == "\ufffdb\ufffd数"


def test_every_token_has_a_name():
    tokenizer = sentencepiece_like(*FUSED)
    names = [text.token_name(tokenizer, token) for token in (1, 4, 5, 11, 13, 99)]
    assert names == [" a", " c ", "\\xc3", "<0x1>", "</s>", "[99]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_detokenized_pieces_joined_are_the_whole_and_split_no_character(demo, size):
    whole = "déjà vu: 数 → 𝄞, 👩‍🚀\n" * 2
    ids = text.encode(demo[1], whole)
    assert len(ids) > len(whole), "characters should take several tokens"
    detokenizer = text.Detokenizer(demo[1])
    pieces = [detokenizer.feed(ids[i : i + size], last=i + size >= len(ids)) for i in range(0, len(ids), size)]
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_come_with_the_last_piece(demo):
    ids = text.encode(demo[1], "a𝄞")[:-1]
    detokenizer = text.Detokenizer(demo[1])
    assert detokenizer.feed(ids) == "a"
    assert "a" + detokenizer.feed([], last=True) == text.decode(demo[1], ids)


@given(
    ids=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    stop=st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=20, max_size=20),
)
def test_text_with_stop_strings_does_not_depend_on_how_it_was_cut_into_pieces(ids, stop, cuts):
    """Tokens up to one that completes a stop string, in any pieces: the text before it, and nothing taken back."""
    ids, expected, reason = reference.end(ids, TOKENS, stop)
    detokenizer, pieces, fed = text.Detokenizer(tiny_tokenizer(), stop), [], 0
    for size in cuts:
        pieces.append(detokenizer.feed(ids[fed : fed + size], last=fed + size >= len(ids)))
        fed += size
        if fed >= len(ids):
            break
    assert "".join(pieces) == expected
    assert (detokenizer.stop_string in stop) == (reason == "stop")


@pytest.mark.parametrize(("last", "expected"), [(TOKENS.index(b"b"), "a"), (TOKENS.index(b"c"), "abcac")])
def test_the_beginning_of_a_stop_string_waits_for_the_token_that_decides(last, expected):
    detokenizer = text.Detokenizer(tiny_tokenizer(), ["bcab"])
    a, b, c = (TOKENS.index(token) for token in (b"a", b"b", b"c"))
    pieces = [detokenizer.feed([token]) for token in (a, b, c, a)]
    assert pieces == ["a", "", "", ""]
    assert "".join(pieces) + detokenizer.feed([last], last=True) == expected


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.WordPiece(), "tokenizer decodes by .*WordPiece.* accepted are ByteLevel, ByteFallback, Fuse"),
        (decoders.Strip("x", 1, 0), "tokenizer decodes by .*Strip"),
        (None, "tokenizer decodes by .*None"),
    ],
)
def test_tokenizers_of_another_kind_are_refused(decoder, message):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=message):
        text.token_bytes(tokenizer)


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(
        TypeError, match=r"tokenizer must be a tokenizers\.Tokenizer or one of transformers' .* got str"
    ):
        text.Detokenizer("tokenizer.json")


def test_transformers_tokenizers_serve_as_well(demo, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    demo[1].save(str(tmp_path / "tokenizer.json"))
    other = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = text.encode(other, "def f(x):")
    assert ids == text.encode(demo[1], "def f(x):")
    assert text.decode(other, ids) == text.decode(demo[1], ids)


def of_transformers(tokenizer):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_the_truncation_of_the_caller_cuts_no_prompt(demo):
    tokenizer = copy.deepcopy(demo[1])
    whole = text.encode(tokenizer, "def f(x): return x")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    assert text.encode(tokenizer, "def f(x): return x") == whole
    assert tokenizer.truncation["max_length"] == 3


def test_a_tokenizer_that_another_thread_truncates_with_cuts_no_prompt(demo):
    tokenizer, prompt = of_transformers(demo[1]), "def f(x): return x\n" * 20
    expected, ends = tokenizer.encode(prompt), threading.Event()

    def truncate():
        while not ends.is_set():
            tokenizer(prompt, truncation=True, max_length=3)

    thread = threading.Thread(target=truncate)
    thread.start()
    try:
        lengths = {len(text.encode(tokenizer, prompt)) for _ in range(400)}
    finally:
        ends.set()
        thread.join()
    assert lengths == {len(expected)}


@pytest.mark.parametrize("wraps", [False, True], ids=["tokenizers", "transformers"])
def test_tokens_that_are_added_later_are_seen(wraps, demo):
    backend = copy.deepcopy(demo[1])
    tokenizer = of_transformers(backend) if wraps else backend
    before = text.encode(tokenizer, "a<x>b"), text.encode(tokenizer, "a<x>b", parse_special=False)
    assert before[0] == before[1]
    assert text.decode(tokenizer, [68, 4096]) == "a"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]} if wraps else ["<x>"])
    assert text.encode(tokenizer, "a<x>b") == [1, 68, 4096, 69]
    assert text.encode(tokenizer, "a<x>b", parse_special=False) == before[0]
    tokenizer.add_tokens(["<y>"])
    assert text.decode(tokenizer, [68, 4096, 4097]) == "a<y>"


def test_a_beginning_that_is_there_twice_is_warned_of(demo):
    with pytest.warns(UserWarning, match="the prompt begins with '<s>' twice: .* pass the token ids of the template"):
        assert text.encode(demo[1], "<s>a") == [1, 1, 68]
    assert text.encode(demo[1], "a a") == text.encode(demo[1], "a a", parse_special=False)
