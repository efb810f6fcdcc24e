"""Tokenizers of GGUF files against llama.cpp's: random texts, for each name of tokenizer.ggml.pre.

    python -m tests.stress.gguf_tokenizers path/to/python --texts 2000 --vocabularies path/to/llama.cpp/models

The Python is one that has the package llama-cpp-python. Vocabularies of a thousand tokens are trained on the texts
without a division into words, so that a wrong one shows in the tokens. Where jlade follows the tokenizer that a model
was trained with, as docs/models.md says, the number of texts with other tokens is printed, and with llama.cpp's own
approximation of it all must be equal. `--vocabularies` adds the texts and the vocabularies of llama.cpp's tests.
`--golden` writes a file such as tests/golden/gguf_tokens.json instead: texts, vocabularies and hashes of their tokens.
"""
# ruff: noqa: RUF001, letters of many scripts

import argparse
import collections
import contextlib
import json
import pathlib
import random
import subprocess
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from jlade.conversion import gguf_splits, gguf_tokenizer
from jlade.conversion.gguf_header import read_header
from jlade.conversion.gguf_tokenizer import CONTROL, NORMAL, SPACE, UNKNOWN
from jlade.conversion.json_files import Values
from jlade.generation.text import LETTERS_OF_BYTES

PARTS = (
    *"abzABZ0123456789 .,!?:;-_/\\'\"`(){}[]<>=+*&|^~$%#@\t\n\r\x0b\x1c\x00",
    *"éÉñßæжЖшωΣςǅʰﬁ漢字龥々かなカー한국กขคابתहिन्दीবা·½²Ⅷ٣५①©→∑…“”’。，、：（）",
    *("\u0301", "\u0308", "\u093f", "\u200b", "\u200d", "\ufe0f", "\xa0", "\u2028", "\x85", "\ufeff", "\ue000"),
    *("🙂", "👍🏽", "𝔘", "𐐀", "𠀀", "\u3000", "\u0378"),
    *("'s", "'S", "'t", "'T", "'re", "'RE", "'Ve", "'m", "'LL", "'d", "’s", " '", "'x", "x's", "É's", "漢's"),
    *(" the", " The", "Hello", " world", "camelCaseHTTPServer2", "snake_case", "ÉCOLE", "Ελλάδα", "straße", "naïve"),
    *("  ", "   ", "    ", "\t\t", " \n", "\n\n", "\n \n", "\r\n", "\r\n\r\n", " \r\n ", "\n\n\n\n", " " * 17),
    *("12", "123", "1234", "12345", "1234567", "3.14", "1,299.99", "0xFF", "  12", "a1b2", "１２３４", "٣٤٥٦"),
    *("==", "!=", "//", "/*", "->", "::", "):\n", "...", "\n\tif x:", "    return", " {", "};\n", "<b>", "#!/"),
    *("IMGIMGABCZ", "<sentinel:12>", "e\u0301", "a\u0300\u0301", "क्षि", "ก็", "ｶﾞ", "ㄅㄆ", "ㄱㅎ", "：，"),
)
SENTENCES = (
    "In 2024, 12345 paid 12 times $1,299.99; 1234567 didn't. They'LL DON'T it; I'M Kars'dan, Van'dan, Ordu'dan",
    "def f(x2):\n    return x**2  # IMGIMGABCZ<sentinel:1>\n\n\n\tif x_camelCase != 0xFF:\r\n\t\tpass   \n  12  345\n ",
    "HTTPServer's ÉCOLE's naïve cafe\u0301 … 日本語のAPIを、。한국어 ①②½ ٣٤٥٦ 🙂👍🏽 हिन्दी กำลัง",
)
BEGIN, END, BYTE = "<begin>", "<end>", 6
SIZE, NUM_GOLDEN = 1000, 30  # tokens; texts
Ids = list[list[list[int]]]  # of each text, first without and then with tokens at its ends
SEPARATOR = "\n__ggml_vocab_test__\n"
PROGRAM = """
import json, sys, llama_cpp
results = []
for path, texts in json.load(sys.stdin):
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    results.append([[model.tokenize(t.encode(), add_bos=b, special=False) for t in texts] for b in (False, True)])
print("\\n" + json.dumps(results))
"""

# What stands for parts of the expressions in llama.cpp, which knows no large and small letters but those of ASCII, ...
_CASES = {
    gguf_splits.LARGE: r"(?:(?=[\p{L}])[^a-z])",
    gguf_splits.SMALL: r"(?:(?=[\p{L}])[^A-Z])",
}
_CASES_OF_MARKS = {part: other.replace(r"\p{L}", r"\p{L}\p{M}") for part, other in _CASES.items()}
_NO_CASES = dict.fromkeys(_CASES, r"[\p{L}\p{M}]")
_HAN = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef\U0002f800-\U0002fa1f]"
# ... no blanks in classes that are given by characters, and no digits of other scripts.
_NO_BLANKS = {"\u3000-。": "、-。", gguf_splits.IDEOGRAPHS: rf"(?:(?!\s){gguf_splits.IDEOGRAPHS[:-1]})+"}
REPLACED: dict[str, dict[str, str]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _CASES),
    "granite-embed-multi-97m": _CASES_OF_MARKS,
    "youtu": _NO_CASES,
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"), _NO_CASES | {r"\d{1,3}(?=(?:\d{3})*\b)": gguf_splits.SPLITS["afmoe"][0]}
    ),
    "kimi-k2": dict.fromkeys(_CASES, r"\p{L}") | {r"\p{Han}": _HAN},
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), _NO_BLANKS),
    "superbpe": {r"\d": "[0-9]"},
}


def splits_of_llama_cpp(name: str) -> tuple[str, ...]:
    """Returns expressions that divide texts as llama.cpp does."""
    expressions = gguf_splits.SPLITS[name]
    for part, other in REPLACED.get(name, {}).items():
        expressions = tuple(expression.replace(part, other) for expression in expressions)
    return expressions


@contextlib.contextmanager
def as_llama_cpp() -> Iterator[None]:
    """Within it jlade's tokenizers are those of llama.cpp rather than of the models."""
    splits = {name: splits_of_llama_cpp(name) for name in gguf_splits.SPLITS}
    with mock.patch.multiple(gguf_tokenizer, SPLITS=splits, NFC=frozenset()):
        yield


def random_texts(number: int, seed: int = 0) -> list[str]:
    """Returns texts of several scripts, code, digits, marks and blanks."""
    rng = random.Random(seed)
    return [*SENTENCES, *("".join(rng.choices(PARTS, k=rng.randrange(1, 30))) for _ in range(number - len(SENTENCES)))]


def vocabulary(texts: list[str], of_characters: bool, size: int) -> dict[str, Any]:
    """Returns the keys of a file, without those that name the kind of the tokenizer."""
    trained = Tokenizer(models.BPE())
    if of_characters:
        trained.pre_tokenizer = pre_tokenizers.Split(Regex(gguf_splits.LINES), "isolated")
        texts = [text.replace(" ", SPACE).replace("\0", "") for text in texts]  # llama.cpp's tokens end at "\0"
        alphabet = []
    else:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = LETTERS_OF_BYTES
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, limit_alphabet=256, max_token_length=12, show_progress=False
    )
    trained.train_from_iterator(texts + texts[: len(SENTENCES)] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if of_characters else []
    # Some words are in the vocabulary, and no merges lead to them.
    merges = [" ".join(pair) for i, pair in enumerate(model["merges"]) if of_characters or i % 9 or i < size // 3]
    return {
        "tokens": [BEGIN, END, "<unk>", *bytes_, *tokens],
        "token_type": [CONTROL, CONTROL, UNKNOWN, *[BYTE] * len(bytes_), *[NORMAL] * len(tokens)],
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "unknown_token_id": 2,
    }


def write(file: pathlib.Path, keys: dict[str, Any]) -> None:
    """Writes a file that has a tokenizer alone."""
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in keys.items():
        add: dict[type, Any] = {list: writer.add_array, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{gguf_tokenizer.KEYS}{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def ids_of_llama_cpp(python: str, files: list[tuple[pathlib.Path, list[str]]]) -> list[Ids]:
    """Returns ids of the texts of each file."""
    content = json.dumps([(str(file), texts) for file, texts in files])
    done = subprocess.run([python, "-c", PROGRAM], input=content, stdout=subprocess.PIPE, text=True, check=True)
    ids: list[Ids] = json.loads(done.stdout.splitlines()[-1])
    return ids


def ids_of_jlade(values: Values, texts: list[str]) -> Ids:
    """Returns ids as `ids_of_llama_cpp` does, of the metadata of one file."""
    tokenizer = gguf_tokenizer.read_tokenizer(values, len(values.get(f"{gguf_tokenizer.KEYS}tokens")))
    assert tokenizer is not None
    return [[tokenizer.encode(text, add_special_tokens=special).ids for text in texts] for special in (False, True)]


def differing(some: Ids, others: Ids) -> list[int]:
    """Returns the numbers of the texts whose ids differ."""
    return sorted({i for a, b in zip(some, others, strict=True) for i, ids in enumerate(a) if ids != b[i]})


def keys_of_names(of_bytes: dict[str, Any], of_characters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the keys of a tokenizer for each name of `tokenizer.ggml.pre`, given those of two vocabularies."""
    keys = {name: {"model": "gpt2", "pre": name} | of_bytes for name in gguf_splits.SPLITS}
    keys |= {name: {"model": "gpt2", "pre": name} | of_characters for name in sorted(gguf_splits.OF_CHARACTERS)}
    return keys | {"gemma4": {"model": "gemma4"} | of_characters}


def ids_of_names(python: str, keys: dict[str, dict[str, Any]], texts: list[str]) -> Iterator[tuple[str, Values, Ids]]:
    """Yields each name, the metadata of a file with its keys, and ids by llama.cpp."""
    with tempfile.TemporaryDirectory() as directory:
        files = {name: pathlib.Path(directory) / f"{name}.gguf" for name in keys}
        for name, file in files.items():
            write(file, keys[name])
        ids = ids_of_llama_cpp(python, [(file, texts) for file in files.values()])
        for (name, file), theirs in zip(files.items(), ids, strict=True):
            yield name, read_header(file).metadata, theirs


def compare_names(python: str, texts: list[str]) -> int:
    """Prints how many texts have llama.cpp's tokens with each name, and returns how many names are wrong."""
    num_wrong, keys = 0, keys_of_names(vocabulary(texts, False, SIZE), vocabulary(texts, True, SIZE))
    for name, values, theirs in ids_of_names(python, keys, texts):
        others = differing(ids_of_jlade(values, texts), theirs)
        with as_llama_cpp():
            wrong = differing(ids_of_jlade(values, texts), theirs)
        num_wrong += bool(wrong)
        print(f"{name}: {len(texts) - len(others)} of {len(texts)} equal, {len(wrong)} wrong", flush=True)
        print("".join(f"    {texts[i]!r}\n" for i in wrong[:3]), end="")
    return num_wrong


def write_golden(python: str, file: pathlib.Path) -> None:
    """Writes texts, vocabularies, and for names with the same tokens the hashes of those of each text."""
    texts, names = random_texts(NUM_GOLDEN), collections.defaultdict[tuple[int, ...], list[str]](list)
    of_bytes, of_characters = vocabulary(texts, False, 700), vocabulary(texts, True, 450)
    for name, _, ids in ids_of_names(python, keys_of_names(of_bytes, of_characters), texts):
        names[hashes(ids)].append(name)
    content = {
        "texts": texts,
        "bytes": of_bytes,
        "characters": of_characters,
        "hashes": {" ".join(names): each for each, names in names.items()},
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    file.write_text(f"{{{lines}}}\n")


def hashes(ids: Ids) -> tuple[int, ...]:
    """Returns a number for the ids of each text."""
    return tuple(zlib.crc32(json.dumps(of_text).encode()) for of_text in zip(*ids, strict=True))


def compare_vocabularies(python: str, directory: pathlib.Path, texts: list[str]) -> int:
    """Prints how many texts have llama.cpp's tokens with its own vocabularies, and returns how many are wrong."""
    num_wrong = 0
    texts = [text.translate(dict.fromkeys(b"\0\x0b\x1c")) for text in texts]  # some vocabularies lack these bytes
    for file in sorted(directory.glob("*.gguf")):
        cases, outputs = list(texts), list[list[int]]()
        if (inputs := file.with_name(f"{file.name}.inp")).exists():
            lines = file.with_name(f"{file.name}.out").read_text().splitlines()
            outputs = [[*map(int, line.split())] for line in lines]
            cases = [*inputs.read_bytes().decode().split(SEPARATOR)[: len(outputs)], *texts]
        values = read_header(file).metadata
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ours = ids_of_jlade(values, cases)
        except ValueError as error:
            print(f"{file.name}: {str(error).split(': ', 1)[1]}", flush=True)
            continue
        [theirs] = ids_of_llama_cpp(python, [(file, cases)])
        others = differing(ours, theirs)
        with as_llama_cpp():
            wrong = differing(ids_of_jlade(values, cases), theirs)
        num_wrong += bool(wrong)
        tests = sum(a == b for a, b in zip(ours[0], outputs, strict=False))
        print(
            f"{file.name}: {tests} of {len(outputs)} tests, {len(cases) - len(others)} of {len(cases)} texts equal, ",
            end="",
        )
        print(f"{len(wrong)} wrong", *(repr(cases[i]) for i in wrong[:3]), flush=True)
    return num_wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python", help="of an environment that has llama-cpp-python")
    parser.add_argument("--texts", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabularies", type=pathlib.Path, help="a folder with vocabularies and tests of llama.cpp")
    parser.add_argument("--golden", type=pathlib.Path, help="the file to write instead")
    arguments = parser.parse_args()
    if arguments.golden is not None:
        return write_golden(arguments.python, arguments.golden)
    texts = random_texts(arguments.texts, arguments.seed)
    num_wrong = compare_names(arguments.python, texts)
    if arguments.vocabularies is not None:
        num_wrong += compare_vocabularies(arguments.python, arguments.vocabularies, texts)
    if num_wrong:
        raise SystemExit(f"{num_wrong} names or vocabularies are wrong")


if __name__ == "__main__":
    main()
