"""The least number of tokens of a text, against tokenizing it."""

import hypothesis
import pytest
from hypothesis import strategies
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jlade.generation.least_tokens import LeastTokens
from jlade.generation.text import BYTE_NAMES, LETTERS_OF_BYTES

DOUBLED = ["a", "▁", "Ġ"]  # they merge up to eight times


def bpe(names=(), **options):
    merges = [(one * number, one * number) for one in DOUBLED for number in (1, 2, 4)]
    vocab = dict.fromkeys([*names, *DOUBLED, *(left + right for left, right in merges), "b", "<unk>"])
    return Tokenizer(models.BPE({name: i for i, name in enumerate(vocab)}, merges, **options))


def of_bytes(normalizer=None, pre_tokenizer=None, *tokens):
    """Returns a byte-level tokenizer."""
    tokenizer = bpe(LETTERS_OF_BYTES)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = [] if pre_tokenizer is None else [pre_tokenizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def of_sentencepiece():
    tokenizer = bpe(BYTE_NAMES, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = {
    "bytes": (of_bytes(), 8),
    "sentencepiece": (of_sentencepiece(), 8),
    "unknown characters one by one": (bpe(unk_token="<unk>"), 8),
    "composed": (of_bytes(normalizers.NFC()), 32),
    "decomposed": (of_bytes(normalizers.NFKD()), 8),
    "replaced": (of_bytes(normalizers.Replace("bbb", "a")), 24),
    "words": (of_bytes(None, pre_tokenizers.Split(Regex(r"\S+"), "isolated")), 8),
    "spaces left out": (of_bytes(None, pre_tokenizers.WhitespaceSplit()), 8),
    "stripped": (of_bytes(normalizers.Strip()), 8),
    "a token takes spaces": (of_bytes(None, None, AddedToken("<x>", rstrip=True, lstrip=True)), 8),
    "a long token": (of_bytes(None, None, "<a token that is long>"), 22),
    "a token that its normalizer makes long": (of_bytes(normalizers.NFKD(), None, "ﷺ"), 18),
}
UNBOUNDED = {
    "unknown characters are left out": bpe(),
    "unknown characters are one token": bpe(unk_token="<unk>", fuse_unk=True),
    "words": Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    "replaced by nothing": of_bytes(normalizers.Replace("a", "")),
    "replaced by a pattern": of_bytes(normalizers.Replace(Regex("a+"), "a")),
    "accents left out": of_bytes(normalizers.StripAccents()),
    "left out": of_bytes(None, pre_tokenizers.Split("a", "removed")),
}
PARTS = ["a", "aaaaaaaa", "bbb", " ", "        ", "é", "e\u0301", "日", "<x>", "\U0001d160", "ﷺ"]
TEXTS = strategies.lists(strategies.sampled_from(PARTS)).map("".join)


@pytest.mark.parametrize(("tokenizer", "longest"), BOUNDED.values(), ids=BOUNDED)
@hypothesis.given(text=TEXTS)
def test_no_text_has_fewer_tokens(tokenizer, longest, text):
    least = LeastTokens(tokenizer)
    assert least(text * 9) <= len(tokenizer.encode(text * 9).ids)
    assert least("c" * 1000) == -(-1000 // longest)


@pytest.mark.parametrize("tokenizer", UNBOUNDED.values(), ids=UNBOUNDED)
def test_tokenizers_that_leave_out_characters_have_no_bound(tokenizer):
    assert LeastTokens(tokenizer)("a" * 1000) == 0


def test_spaces_count_unless_something_takes_them():
    spaces = " " * 1000
    assert LeastTokens(BOUNDED["bytes"][0])(spaces) == 125
    for name in ("spaces left out", "stripped", "a token takes spaces"):
        tokenizer = BOUNDED[name][0]
        assert LeastTokens(tokenizer)(f"{spaces}<x>{spaces}") == 1
    assert len(tokenizer.encode(f"{spaces}<x>{spaces}").ids) == 1
