"""The files of a tokenizer, against transformers' AutoTokenizer."""

import itertools
import json
import shutil
import warnings

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import jlade
from jlade.cli.arguments import DEMO
from jlade.conversion import tokenizer_classes, tokenizer_files
from jlade.conversion.families import FAMILIES, WITH_TEXT
from jlade.conversion.gguf_splits import SPLITS

TEXT = "a <|im_start|> user b <x> </s>c def <s> A<x>"


def token(content, **flags):
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content} | off | {"special": True} | flags


def in_object(content, **flags):
    return {"__type": "AddedToken"} | token(content, **flags)


def checkpoint(directory, config=None, **files):
    """Makes a directory with the demo tokenizer, changed keys of tokenizer_config.json and other files."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory / name)
    files["tokenizer_config"] = json.loads((DEMO / "tokenizer_config.json").read_text()) | (config or {})
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {}),
        (
            {"added_tokens_decoder": {"4097": token("<x>", rstrip=True, special=False), "4096": token("<|im_start|>")}},
            {"added_tokens": {"def": 4098}},
        ),
        ({"added_tokens_decoder": {"4096": token("<x>", special=False, normalized=True)}, "pad_token": "<x>"}, {}),
        ({"added_tokens_decoder": {"608": token("def")}}, {}),
        ({}, {"added_tokens": {"<x>": 4096, "<|im_start|>": 4097}}),
        ({"additional_special_tokens": ["<x>"]}, {"added_tokens": {"<|im_start|>": 4097, "<x>": 4096}}),
        ({"additional_special_tokens": ["<x>", "<|im_start|>", "def"]}, {}),
        ({"extra_special_tokens": ["<x>", in_object("<|im_start|>", lstrip=True)]}, {}),
        ({"extra_special_tokens": [in_object("<x>", special=False)]}, {}),
        ({"extra_special_tokens": {"image_token": "<x>"}}, {}),
        (
            {
                "pad_token": in_object("<|im_start|>", single_word=True),
                "boi_token": in_object("<x>"),
                "eoi_token": "user",
            },
            {},
        ),
        (
            {},
            {
                "special_tokens_map": {"additional_special_tokens": ["<x>"], "pad_token": token("<|im_start|>")},
                "added_tokens": {"<y>": 4096},
            },
        ),
        ({}, {"special_tokens_map": {"additional_special_tokens": ["<x>"]}, "added_tokens": {"<x>": 4096}}),
        ({"split_special_tokens": True}, {}),
        ({"add_bos_token": False, "add_eos_token": True, "add_prefix_space": True, "do_lower_case": True}, {}),
    ],
    ids=str,
)
def test_added_tokens_are_those_of_transformers(config, files, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    expected = transformers.AutoTokenizer.from_pretrained(checkpoint(tmp_path, config, **files))
    found = tokenizer_files.load_tokenizer(tmp_path)
    assert found.encode(TEXT).ids == expected.encode(TEXT)
    added = found.get_added_tokens_decoder()
    assert {i: vars_of(added[i]) for i in added} == {
        i: vars_of(one) for i, one in expected.added_tokens_decoder.items()
    }


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("settings", [{}, {"legacy": True}, {"legacy": False, "add_prefix_space": False}], ids=str)
def test_spaces_are_added_as_the_class_of_transformers_adds_them(model_type, kind, settings, tmp_path):
    """LlamaTokenizer builds its own normalizer, pre-tokenizer and decoder; the files are those of Llama 2."""
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab[]", "▁a", "▁[", "ab", "▁▁"]
    merges = [("▁", "a"), ("▁", "["), ("a", "b"), ("▁", "▁")]
    vocabulary = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(names[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = tokenizer_files.load_tokenizer(tmp_path)
    for text in ("ab [ab] ab", "<s>[ab</s>ab", " ab", "  a  b\n", "é ab", "</s> ab"):
        ids = expected.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids), text


KINDS = (*tokenizer_classes.PARTS, "PreTrainedTokenizerFast", "TokenizersBackend", None)
OF_FILES = (  # parts, some of them those of a class
    (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), decoders.Fuse()),
    (None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    (
        normalizers.NFC(),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
        decoders.ByteLevel(),
    ),
)


@pytest.mark.parametrize("family", dict.fromkeys([*FAMILIES, *WITH_TEXT, *tokenizer_classes.CLASSES]))
def test_the_class_that_transformers_takes_is_known_and_its_difference_from_the_file_said(family, tmp_path):
    """For every class that files can name, with a space added before the text or not."""
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    for (i, kind), (j, prefix) in itertools.product(enumerate(KINDS), enumerate((None, False, True))):
        tokenizer = Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = OF_FILES[(i + j) % len(OF_FILES)]
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": kind} if kind else {}
        config |= {} if prefix is None else {"add_prefix_space": prefix}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        name = tokenizer_classes.class_of(tokenizer, config, {"model_type": family})
        assert (name or "TokenizersBackend") == type(theirs).__name__, config
        if name is None:
            continue
        built = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        tokenizer_classes.build(built, name, config)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            assert repr(getattr(built, part)) == repr(getattr(theirs.backend_tokenizer, part)), config
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = tokenizer_files.load_tokenizer(tmp_path)
        if said:
            assert f"the class {name}, whose " in str(said[0].message)
            with pytest.raises(ValueError, match=f"strict=True refuses the class {name}"):
                tokenizer_files.load_tokenizer(tmp_path, strict=True)
        else:
            assert all(pieces(ours, text) == pieces(built, text) for text in ("a b12 Ж <0x0A>", " e\u0301'S  a12")), (
                config
            )


def pieces(tokenizer, text):
    """Returns what the model of a tokenizer makes tokens of."""
    normal = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    return tokenizer.pre_tokenizer.pre_tokenize_str(normal)


def vars_of(added):
    return added.content, added.special, added.lstrip, added.rstrip, added.normalized, added.single_word


def test_no_config_is_needed(tmp_path):
    checkpoint(tmp_path, added_tokens={"<x>": 4096})
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizer_files.load_tokenizer(tmp_path).encode("<x>").ids == [1, 4096]


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (
            {"added_tokens_decoder": {"5000": token("<x>")}},
            {},
            r"tokenizer_config\.json: '<x>' must have the id 4096, .*, got 5000",
        ),
        (
            {"added_tokens_decoder": {"9": token("</s>")}},
            {},
            r"tokenizer_config\.json: '</s>' must have the id 2, .*, got 9",
        ),
        ({}, {"added_tokens": {"<x>": 7}}, r"added_tokens\.json: '<x>' must have the id 4096, .*, got 7"),
        ({"added_tokens_decoder": ["<x>"]}, {}, "the tokens that files add to tokenizer.json cannot be read"),
        ({"extra_special_tokens": [5]}, {}, "the tokens that files add to tokenizer.json cannot be read"),
        ({"split_special_tokens": "no"}, {}, "split_special_tokens must be true or false, got 'no'"),
    ],
    ids=str,
)
def test_tokens_with_other_ids_are_refused(config, files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tokenizer_files.load_tokenizer(checkpoint(tmp_path, config, **files))


def test_another_version_of_tokenizer_json_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    checkpoint(tmp_path, {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]})
    other = json.loads((DEMO / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.4.0.0.json").write_text(json.dumps(other))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode(TEXT)[0] != 1  # it reads the other one
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: fast_tokenizer_files is .*tokenizer\.4\.0\.0\.json"):
        tokenizer_files.load_tokenizer(tmp_path)


CLEAN = "clean_up_tokenization_spaces"
FOR_BPE = f"{CLEAN}_for_bpe_even_though_it_will_corrupt_output"


def test_bpe_decodes_with_spaces_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint(tmp_path, {CLEAN: True}))
    assert theirs.decode(theirs.encode("a , b .", add_special_tokens=False)) == "a , b ."
    tokenizer_files.load_tokenizer(tmp_path, strict=True)


@pytest.mark.parametrize("kind", ["BPE", "WordLevel"])
def test_spaces_that_transformers_removes_from_texts_are_said(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    checkpoint(tmp_path, {CLEAN: True} | ({FOR_BPE: True} if kind == "BPE" else {}))
    if kind != "BPE":
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        model = {"type": kind, "vocab": content["model"]["vocab"], "unk_token": "<unk>"}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"model": model}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.decode(theirs.convert_tokens_to_ids(["a", "Ġ."])) == "a."
    with pytest.warns(UserWarning, match=f"tokenizer_config.json: ignored, which strict=True refuses: {CLEAN}"):
        tokenizer_files.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"tokenizer_config.json: strict=True refuses {CLEAN}"):
        tokenizer_files.load_tokenizer(tmp_path, strict=True)


def test_tokens_beyond_the_vocabulary_are_named_once_and_strict_refuses_them(tmp_path):
    checkpoint(tmp_path, {"pad_token": "[PAD]"})
    shutil.copy(DEMO / "model.safetensors", tmp_path)
    named = r"tokens beyond the model's vocabulary of 4096.*: '\[PAD\]' \(4096\)$"
    with pytest.warns(UserWarning, match=named) as caught:
        params, tokenizer = jlade.load(tmp_path, "float32")
    assert len(caught) == 1
    with pytest.raises(ValueError, match="prompt holds token id 4096; accepted are 0 to 4095"):
        jlade.generate(params, "a [PAD]", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"strict=True refuses them: '\[PAD\]' \(4096\)$"):
        jlade.load(tmp_path, "float32", strict=True)


def test_a_directory_without_a_tokenizer_gives_none(tmp_path):
    assert tokenizer_files.load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", json.dumps({"version": "1.0"}), "\xff"])
def test_a_broken_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_files.load_tokenizer(tmp_path)


LLAMA_3 = pre_tokenizers.Split(Regex(SPLITS["llama-bpe"][0]), "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.fixture(scope="module")
def large_vocabulary():
    """Returns a byte-level tokenizer of 100,100 tokens, some of which cross the ends of Mistral's words."""
    merges = [("e", "T"), ("2", "0"), ("T", "h"), ("Th", "e")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokens += [f"<{i}>" for i in range(100_100 - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


FIXED, UNSAID = {"fix_mistral_regex": True}, {}


@pytest.mark.parametrize(
    ("parts", "config", "model", "said"),
    [
        (pre_tokenizers.Sequence([LLAMA_3, BYTES]), FIXED, {}, False),
        (pre_tokenizers.Sequence([LLAMA_3, BYTES]), UNSAID, {}, True),
        (pre_tokenizers.Sequence([LLAMA_3, BYTES]), {"fix_mistral_regex": False}, {}, False),
        (pre_tokenizers.Sequence([LLAMA_3, BYTES]), FIXED, {"transformers_version": "5.1.0"}, False),
        (pre_tokenizers.Sequence([LLAMA_3, BYTES]), FIXED, {"transformers_version": "5.0.0.dev0"}, False),
        (pre_tokenizers.Sequence([LLAMA_3, BYTES]), FIXED, {"model_type": "llama"}, False),
        (BYTES, FIXED, {"transformers_version": None}, False),
    ],
    ids=range(7),
)
def test_words_are_those_of_mistral_where_transformers_divides_them_so(
    parts, config, model, said, large_vocabulary, tmp_path
):
    from transformers import AutoTokenizer

    large_vocabulary.pre_tokenizer = parts
    large_vocabulary.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"model_type": "mistral", "transformers_version": "4.50.0"} | model
    (tmp_path / "config.json").write_text(json.dumps(model))
    text = "The 2024 theThe"
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)(text, add_special_tokens=False).input_ids
    if said:
        with pytest.raises(ValueError, match="strict=True refuses a tokenizer without fix_mistral_regex"):
            tokenizer_files.load_tokenizer(tmp_path, strict=True)
        with pytest.warns(UserWarning, match="which fix_mistral_regex: true in this file would change"):
            ours = tokenizer_files.load_tokenizer(tmp_path)
    else:
        ours = tokenizer_files.load_tokenizer(tmp_path, strict=True)
    assert ours.encode(text, add_special_tokens=False).ids == theirs
