"""Tokenizers of GGUF files against plain implementations of both kinds of BPE, and against transformers."""

import functools
import itertools
import json
import pathlib
import random
import unicodedata

import gguf
import pytest
import regex
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import jlade
from jlade.conversion import gguf_config
from jlade.conversion.gguf import GGUF
from jlade.conversion.gguf_header import read_header
from jlade.conversion.gguf_splits import SPLITS
from jlade.conversion.gguf_tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, _joins, tokenizer_config
from jlade.conversion.json_files import Values
from jlade.generation import text
from tests.conversion.gguf_files import CORPUS, byte_level, keys_of_tokenizer, write
from tests.stress import gguf_tokenizers as llama_cpp

TEXTS = [
    CORPUS,
    "In 2024, 12345 people paid $1,299.99 + tax",
    "I'm sure they'll've done it, DON'T you? I'LL see",
    "naïve café — “quoted” … 日本語のテキスト 한국어 🙂👍🏽",
    "def f(x):\n    return x**2\n\n\n\tif x:\r\n\t\tpass   \n ",
    "  leading,  double\u00a0and trailing  ",
    "x = {'a': [1, 22, 333]}; y=0xFF_camelCaseHTTPServer",
    "e\u0301 \u00e9 Ⅷ ½ ² ٣٤",
    "<end>a<end> b <user>  c<end><user>",
    "",
]
GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "gguf_tokens.json").read_text())
OF_BYTE = {byte: character for character, byte in text.BYTE_OF.items()}


def random_texts(number=150):
    rng = random.Random(0)
    parts = [*"abcXYZ 0123456789'\"\n\t.,!?-_()éß漢字🙂½٣", "'s", "'LL", " the", "  ", "<end>", "<user>", "\r\n"]
    return ["".join(rng.choices(parts, k=rng.randrange(1, 40))) for _ in range(number)]


def tokenizer_of(tmp_path, arch="llama", **changed):
    """Returns the tokenizer of a file with these keys of a tokenizer."""
    keys = keys_of_tokenizer(**changed)
    vocab = max(len(byte_level()[0]), len(keys["tokenizer.ggml.tokens"]))
    return jlade.load(write(tmp_path / "model.gguf", arch, changed=keys, vocab=vocab))[1]


def divide(pieces, expression):
    """Returns the pieces, divided at the matches of an expression."""
    return [part for piece in pieces for part in regex.split(f"({expression})", piece) if part]


def plain_bpe(word, ranks, tokens):
    """Returns the tokens of a word: the pair with the lowest rank is joined first."""
    symbols = list(word)
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
        if not pairs:
            return [tokens.index(symbol) for symbol in symbols]
        i = min(pairs)[1]
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]


@pytest.mark.parametrize("pre", ["default", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_bpe_is_that_of_a_plain_implementation(pre, tmp_path):
    tokens, types, merges = byte_level()
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    tokenizer = tokenizer_of(tmp_path, pre=pre, add_bos_token=False)
    whole_words = pre == "llama-bpe"
    added = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != NORMAL}
    for sample in [*TEXTS, *random_texts()]:
        expected = []
        for part in divide([sample], "|".join(added)):
            if part in added:
                expected.append(added[part])
                continue
            part = unicodedata.normalize("NFC", part) if pre == "qwen2" else part
            for word in functools.reduce(divide, SPLITS[pre], [part]):
                written = "".join(OF_BYTE[byte] for byte in word.encode())
                is_token = whole_words and written in tokens
                expected += [tokens.index(written)] if is_token else plain_bpe(written, ranks, tokens)
        assert tokenizer.encode(sample).ids == expected, sample


def test_tokens_of_each_name_are_those_of_llama_cpp():
    """Hashes of ids by llama.cpp, whose approximations take the place of expressions; see tests/stress."""
    found = {}
    for name, keys in llama_cpp.keys_of_names(GOLDEN["bytes"], GOLDEN["characters"]).items():
        values = Values(pathlib.Path("model.gguf"), {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
        with llama_cpp.as_llama_cpp():
            found[name] = llama_cpp.hashes(llama_cpp.ids_of_jlade(values, GOLDEN["texts"]))
    expected = {name: tuple(hashes) for names, hashes in GOLDEN["hashes"].items() for name in names.split()}
    assert len(found) == 90  # all of llama.cpp's but "whitespace"
    assert found == expected


@pytest.mark.parametrize(
    "templates", [None, "a", [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]]
)
def test_chat_templates_are_those_that_the_writer_of_gguf_was_given(tmp_path, templates):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    if templates is not None:
        writer.add_chat_template(templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert tokenizer_config(read_header(tmp_path / "model.gguf").metadata)["chat_template"] == templates


@pytest.mark.parametrize(
    ("names", "sample", "expected"),
    [
        ("smollm starcoder", "DON'T a 12345\n b", "DON|'|T| a| |1|2|3|4|5|\n| b"),
        ("llama-bpe dbrx", "DON'T a 12345\n b", "DON|'T| a| |123|45|\n| b"),
        ("qwen2 qwen35", "DON'T a 12345\n b", "DON|'T| a| |1|2|3|4|5|\n| b"),
        ("gpt-2 olmo", "DON'T a 12345\n b", "DON|'|T| a| 12345|\n| b"),
        ("gpt-4o", "DON'T a 12345\n b", "DON'T| a| |123|45|\n| b"),
        ("tekken gpt-4o youtu kimi-k2 tiny_aya", "camelCase ÉcoleÑu", "camel|Case| École|Ñu"),
        ("tiny_aya", "   1234567, 1234a", "   |1|234|567|,| |123|4|a"),
        ("tekken kimi-k2", "กำ e\u0301a", "กำ| e\u0301a"),
        ("kimi-k2", "漢字kanji々", "漢字|kanji|々"),
        ("deepseek-coder", "\t\u3000 漢字\u3000かな。", "\t|\u3000| |漢字|\u3000かな|。"),
        ("superbpe", "a b, c 1234567 ๑๒๓๔", "a b, c |1|234|567| |๑|๒๓๔"),
    ],
)
def test_pieces_are_those_that_models_were_trained_with(names, sample, expected):
    for name in names.split():
        assert functools.reduce(divide_as_tokenizers, SPLITS[name], [sample]) == expected.split("|"), name


def divide_as_tokenizers(pieces, expression):
    """Returns the pieces, divided at the matches of an expression by the library that encodes."""
    split = pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
    return [part for piece in pieces for part, _ in split.pre_tokenize_str(piece)]


@pytest.mark.parametrize(("pre", "composes"), [("qwen35", True), ("command-r", True), ("olmo", True), ("kormo", False)])
def test_letters_and_accents_are_joined_where_the_model_was_trained_so(pre, composes, tmp_path):
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    assert (tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids) == composes


def test_a_file_without_a_name_for_its_words_gets_the_default_of_llama_cpp(tmp_path):
    with pytest.warns(UserWarning, match=r"model\.gguf lacks tokenizer\.ggml\.pre, .*: taking llama\.cpp's default"):
        tokenizer = tokenizer_of(tmp_path, pre=None)
    with pytest.raises(ValueError, match=r"strict=True refuses a tokenizer without tokenizer\.ggml\.pre"):
        GGUF(tmp_path / "model.gguf").tokenizer(strict=True)
    assert tokenizer.to_str() == tokenizer_of(tmp_path, pre="default").to_str()


def test_smollm_is_the_tokenizer_that_the_model_was_trained_with(tmp_path):
    expected = tokenizers.Tokenizer.from_str(tokenizer_of(tmp_path).to_str())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    for sample in [*TEXTS, *random_texts()]:
        assert tokenizer_of_cached(tmp_path).encode(sample).ids == expected.encode(sample).ids, sample


@functools.cache
def tokenizer_of_cached(tmp_path):
    return tokenizer_of(tmp_path)


@functools.cache
def sentence_piece():
    """Returns tokens, types and scores of a SentencePiece BPE with bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.train_from_iterator(
        [CORPUS.replace(" ", "▁") * 2], trainers.BpeTrainer(vocab_size=200, show_progress=False, max_token_length=6)
    )
    model = json.loads(tokenizer.to_str())["model"]
    known = [p for p in model["vocab"] if p.replace("▁", " ").isascii()]  # other letters are written as bytes
    pieces = sorted((p for p in known if len(p) > 1), key=model["vocab"].get)
    letters = sorted(p for p in known if len(p) == 1)
    control = ["<unk>", "<s>", "<end>", "<user>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, *raw, *pieces, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[6] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 260 + [-float(i) for i in range(len(pieces) + len(letters))]
    return tokens, types, scores


def keys_of_sentence_piece(**changed):
    """Returns keys of a tokenizer with the vocabulary of `sentence_piece`; `changed` replaces some."""
    tokens, types, scores = sentence_piece()
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "merges": None}
    return keys | {"bos_token_id": 1, "eos_token_id": 2} | changed


def plain_sentence_piece(part, tokens, scores):
    """Returns the ids of a text without special tokens: the leftmost pair of the highest score is joined first."""
    symbols = list(part)
    while True:
        joined = ["".join(pair) for pair in itertools.pairwise(symbols)]
        known = [(-scores[tokens.index(token)], i) for i, token in enumerate(joined) if token in tokens]
        if not known:
            break
        i = min(known)[1]
        symbols[i : i + 2] = [joined[i]]
    ids = []
    for symbol in symbols:
        ids += [tokens.index(symbol)] if symbol in tokens else [4 + byte for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_is_that_of_a_plain_implementation(prefix, tmp_path):
    tokens, _, scores = sentence_piece()
    changed = {} if prefix else {"add_space_prefix": False}
    tokenizer = tokenizer_of(tmp_path, **keys_of_sentence_piece(pre="default", **changed))
    for sample in [*TEXTS, *random_texts()]:
        expected = [1]  # by default
        for part in divide([sample], "<end>|<user>"):
            if part in tokens[2:4]:
                expected.append(tokens.index(part))
            else:
                written = f" {part}" if prefix else part
                expected += plain_sentence_piece(written.replace(" ", "▁"), tokens, scores)
        assert tokenizer.encode(sample).ids == expected, sample
        if "<end>" not in sample and "<user>" not in sample:
            assert text.decode(tokenizer, expected) == " " * prefix * bool(sample) + sample


def test_pairs_of_a_sentence_piece_vocabulary():
    """By trying every place of every token."""
    rng = random.Random(0)
    words = {"".join(rng.choices("aé🙂▁", k=rng.randrange(1, 7))) for _ in range(600)} | {"a" * 1024, "a" * 1023, ""}
    tokens = rng.sample(sorted(words), len(words))
    types, scores = [rng.choice([NORMAL, NORMAL, CONTROL]) for _ in tokens], [rng.random() for _ in tokens]
    expected = [
        (score, i, len(token) - i, token)
        for token, kind, score in zip(tokens, types, scores, strict=True)
        for i in range(1, len(token))
        if kind == NORMAL and token[:i] in words and token[i:] in words
    ]
    assert len(expected) > 300
    pairs = [(token[:i], token[i:]) for _, i, _, token in sorted(expected, reverse=True)]
    assert _joins(tokens, types, scores) == pairs
    assert _joins([], [], []) == []


def test_text_of_merges_of_characters(tmp_path):
    tokenizer = tokenizer_of(tmp_path, **GOLDEN["characters"] | {"model": "gemma4"})
    for sample in TEXTS[:5]:
        assert text.decode(tokenizer, tokenizer.encode(sample, add_special_tokens=False).ids) == sample


def test_runs_of_spaces_that_are_tokens_of_gemma(tmp_path):
    tokens, _, scores = (list(of) for of in sentence_piece())
    tokens[3] = "   "
    tokenizer = tokenizer_of(tmp_path, **keys_of_sentence_piece(tokens=tokens, add_space_prefix=False))
    expected = [1, *plain_sentence_piece("the", tokens, scores), 3, *plain_sentence_piece("▁there", tokens, scores)]
    assert tokenizer.encode("the    there").ids == expected
    assert text.decode(tokenizer, expected) == "the    there"


ALL_ENDS = """<|endoftext|> <|end_of_text|> <|eot_id|> <|im_end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn>
    <EOT> _<EOT> [EOT] [EOS] <\uff5cend▁of▁sentence\uff5c> <end_of_utterance> <turn|> <|eom_id|> <eos>
    <|tool_response> [e~[ <|fim_pad|> <|repo_name|> <|file_sep|>"""


@pytest.mark.parametrize(
    ("names", "keys", "left_out"),
    [  # the last: names of tokens that end no text
        ("<|im_end|> <|endoftext|>", {"eos": 0}, ""),
        ("<|im_end|> <|endoftext|> <reponame> <|im_start|>", {"eos": 0}, "<|im_start|>"),
        (
            "<|im_end|> <|endoftext|> <|fim_pad|> <|repo_name|> <|file_sep|> <|fim_prefix|>",
            {"eos": 0},
            "<|fim_prefix|>",
        ),
        ("<|eot_id|> <|end_of_text|> <|eom_id|>", {"eos": 0}, ""),
        ("<|end_of_text|> <|eot_id|> <|eom_id|>", {"eos": 0, "eot": 1}, ""),
        ("<\uff5cend▁of▁sentence\uff5c> <|endoftext|>", {"eos": 0}, ""),
        ("[EOS] [EOT]", {"eos": 0}, ""),
        ("<|endoftext|> <|im_end|>", {"eos": 0, "eot": 0}, ""),
        ("<eos> <end_of_turn> </s>", {"eos": 0}, "</s>"),
        ("</s> <s>", {}, "<s>"),
        ("other <s>", {"eom": 0}, "<s>"),
        ("<|endoftext|> <|end|>", {"eos": 0}, ""),
        ("<|return|> <|call|> <|end|>", {"eos": 0}, "<|end|>"),
        ("<|flush|> <|calls|> <|end|>", {"eos": 0}, "<|end|>"),
        ("<|fim_pad|> <PAD> other", {"fim_pad": 2}, "<|fim_pad|> <PAD>"),
        (f"{ALL_ENDS} <|end|> <reponame> [PAD]", {"eos": 0}, "<|end|> <reponame> [PAD]"),
    ],
)
def test_end_tokens_are_those_of_llama_cpp(names, keys, left_out):
    """By keys and names, as in llama_vocab::impl::load of its src/llama-vocab.cpp."""
    tokens = names.split()
    keys = {f"tokenizer.ggml.{kind}_token_id": token_id for kind, token_id in keys.items()}
    values = Values(pathlib.Path("model.gguf"), {"tokenizer.ggml.tokens": tokens} | keys)
    found = gguf_config._read_eos_ids(values, len(tokens))
    assert {tokens[i] for i in found} == set(tokens) - set(left_out.split())


@pytest.mark.parametrize("arch", ["phi3", "llama"])
def test_special_tokens_of_phi_3_take_the_spaces_after_them(arch, tmp_path):
    tokens, _, scores = sentence_piece()
    sample, plain = "<user>\n the<s>\n", functools.partial(plain_sentence_piece, tokens=tokens, scores=scores)
    tokenizer = tokenizer_of(tmp_path, arch=arch, **keys_of_sentence_piece())
    first = plain("▁the" if arch == "phi3" else "▁\n▁the")
    assert tokenizer.encode(sample).ids == [1, 3, *first, 1, *plain("▁\n")]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [0]),
        ({"pre": "llama-bpe"}, [0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 1]),
        ({"pre": "granite-embed-multi-311m", "add_bos_token": False}, [0]),
    ],
    ids=str,
)
def test_tokens_at_the_beginning_and_the_end(keys, expected, tmp_path):
    assert tokenizer_of(tmp_path, **keys).encode("").ids == expected


def test_streamed_text_is_that_of_the_tokenizer(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    for sample in TEXTS[:8]:
        assert text.decode(tokenizer, tokenizer.encode(sample).ids) == sample
    assert isinstance(tokenizer.decoder, decoders.ByteLevel)


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_transformers_reads_the_same_tokenizer(kind, tmp_path):
    pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")  # for GGUF files
    transformers = pytest.importorskip("transformers")
    if kind == "byte-level":
        tokenizer = tokenizer_of(tmp_path, pre="gpt-2")  # transformers ignores the key
    else:
        tokenizer = tokenizer_of(tmp_path, **keys_of_sentence_piece(unknown_token_id=0))
    other = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for sample in TEXTS[:5]:
        assert other.encode(sample, add_special_tokens=False) == tokenizer.encode(sample, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "whitespace"}, r"pre is 'whitespace'; supported are default, falcon, .* other tokens than the model"),
        ({"model": "bert"}, r"model is 'bert'; supported are gpt2, gemma4, llama"),
        ({"merges": ["a b c"]}, r"merges must be pairs of tokens, got 'a b c'"),
        ({"merges": None}, r"merges must be an array of strs"),
        ({"merges": ["nowhere else"]}, r"has no valid tokenizer: .*Token `nowhere` out of vocabulary"),
        ({"token_type": [1, 2]}, r"token_type has 2 elements for \d+ tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, r"tokens must be up to \d+ different strings, got 2, 1 of them"),
        ({"model": "llama"}, r"scores must be an array of floats"),
        ({"add_bos_token": True, "bos_token_id": 5000}, r"bos_token_id must be a token id below \d+, got 5000"),
        ({"add_bos_token": 1}, r"add_bos_token must be true or false, got 1"),
    ],
    ids=str,
)
def test_tokenizers_that_are_refused(keys, message, tmp_path):
    with pytest.raises(ValueError, match=rf"model\.gguf.*{message}"):
        tokenizer_of(tmp_path, **keys)
