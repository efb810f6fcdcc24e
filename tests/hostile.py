"""Hostile files: every format that jlade reads, changes to intact files of it, and what may come of reading them.

A changed file causes an error that names it (ValueError, OSError or TypeError), or is read. The settings that jlade
keeps for itself are ignored with a warning instead. `tests/test_hostile.py` reads some of each format, and
`tests/stress/fuzz.py` thousands.
"""

import copy
import dataclasses
import functools
import json
import math
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer

import jlade
from jlade import conversion
from jlade.conversion import gguf_header, hf_config, tokenizer_files
from jlade.conversion.families import FAMILIES, WITH_TEXT
from jlade.conversion.tensors import param_shapes
from jlade.costs import choice, estimate, learned
from jlade.drafts import pool as pool_lib
from jlade.drafts import recycled
from jlade.generation import chat_template, text
from jlade.generation import prior as prior_lib
from tests.conversion.hf_files import random_tensors, write_checkpoint

Inputs = st.SearchStrategy[tuple[str, bytes]]  # a file of the directory, and its new content


class Format(NamedTuple):
    """A format of files.

    Attributes:
      write: makes intact files in a directory.
      inputs: returns changes to the files of the directory.
      read: reads and uses the files of the directory. Its result is what intact files give, if `is_checked`.
      refuses: whether broken files raise an error; otherwise they cause a warning.
      is_checked: whether changes that are not refused must not change the result.
    """

    write: Callable[[pathlib.Path], object]
    inputs: Callable[[pathlib.Path], Inputs]
    read: Callable[[pathlib.Path], Any]
    refuses: bool = True
    is_checked: bool = False


class FaultError(AssertionError):
    """What must not come of a file."""


def outcome(form: Format, directory: pathlib.Path, expected: Any, file: str, content: bytes) -> str:
    """Reads the directory with another content of a file, and returns "refused" or "read".

    Raises:
      FaultError: names what came of it.
    """
    path = directory / file
    original = path.read_bytes()
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore" if form.refuses else "always", UserWarning)
            with warnings.catch_warnings(record=not form.refuses) as caught:
                found = form.read(directory)
    except (ValueError, OSError, TypeError) as error:
        if not form.refuses:
            raise FaultError(f"{type(error).__name__}: {error}") from error
        if str(directory) not in str(error) and not str(error).startswith(("the chat template", "tokenizer ")):
            raise FaultError(f"no file in {type(error).__name__}: {error}") from error
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FaultError(f"{type(error).__name__}: {error}") from error
    finally:
        path.write_bytes(original)
    if form.is_checked and not _are_equal(found, expected):
        raise FaultError("read as another model")
    return "refused" if caught else "read"


def _are_equal(found: Any, expected: Any) -> bool:
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(expected)
    return len(leaves) == len(others) and all(map(np.array_equal, leaves, others))


# Changes to bytes and to JSON.

SIZES = st.sampled_from([0, 1, -1, 2, 3, 7, 64, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63])
NUMBERS = SIZES | st.sampled_from([2**64, 10**30, 10**400, -(2**70), 0.5, 1e-320, 1e-40, 1e39, 1e308, -1e308, math.inf])
VALUES = st.recursive(
    NUMBERS | st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NO_JSON = [b"", b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe{}", b'{"a": 1e999}', b"NaN", b"null", b"[]", b"{}", b'"a"']


@st.composite
def changed_bytes(draw: Any, content: bytes, begin: int = 0, end: int | None = None) -> bytes:
    """Changes within a part of a file; some remove or add bytes."""
    changed, end = bytearray(content), len(content) if end is None else end
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(begin, max(begin, min(end, len(changed)) - 1)))
        match draw(st.sampled_from(["overwrite", "flip", "number", "insert", "delete", "truncate", "append", "copy"])):
            case "overwrite":
                new = draw(st.binary(min_size=1, max_size=4))
                changed[i : i + len(new)] = new
            case "flip" if i < len(changed):
                changed[i] ^= 1 << draw(st.integers(0, 7))
            case "number":
                size, number = draw(st.sampled_from([4, 8])), draw(SIZES)
                changed[i : i + size] = (number % 256**size).to_bytes(size, "little")
            case "insert":
                changed[i:i] = draw(st.binary(min_size=1, max_size=8))
            case "delete":
                del changed[i : i + draw(st.integers(1, 16))]
            case "truncate":
                del changed[i:]
            case "append":
                changed += draw(st.binary(min_size=1, max_size=8))
            case "copy":
                j, size = draw(st.integers(begin, max(begin, end - 1))), draw(st.integers(1, 32))
                changed[i : i + size] = changed[j : j + size]
    return bytes(changed)


@st.composite
def changed_json(draw: Any, content: Any) -> Any:
    """Changes to some values of a JSON object."""
    content = copy.deepcopy(content)
    words = st.sampled_from(sorted(_words(content)))
    values = VALUES | words
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        node: Any = content
        while True:
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(node[key], dict | list) or not node[key] or draw(st.integers(0, 3)) == 0:
                break
            node = node[key]
        change = draw(st.sampled_from(["replace", "replace", "remove", "add", "repeat", "rename"]))
        if change == "add" or key is None:
            if isinstance(node, dict):
                node[draw(words | st.text(max_size=8))] = draw(values)
            else:
                node.append(draw(values))
        elif isinstance(node[key], int | float) and draw(st.booleans()):
            node[key] = draw(NUMBERS)
        elif change == "remove":
            del node[key]
        elif change == "repeat" and isinstance(node, list):
            node.extend(node * draw(st.integers(1, 3)))
        elif change == "rename" and isinstance(node, dict):
            node[draw(words | st.text(max_size=8))] = node.pop(key)
        else:
            node[key] = draw(values)
    return content


def _words(content: Any) -> set[str]:
    if isinstance(content, dict):
        return set(content).union(*map(_words, content.values()))
    return set().union({""}, *map(_words, content)) if isinstance(content, list) else {str(content)}


def mostly_json(contents: st.SearchStrategy[Any], others: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Texts of JSON for some contents, two times in four, and other bytes."""
    as_json = contents.map(lambda content: json.dumps(content).encode())
    return as_json | as_json | others | st.sampled_from(NO_JSON)


def json_inputs(directory: pathlib.Path, *files: str) -> Inputs:
    """Changes to JSON files, mostly such that they are JSON still."""
    parts = []
    for file in files:
        original = (directory / file).read_bytes()
        changes = mostly_json(changed_json(json.loads(original)), changed_bytes(original))
        parts.append(st.tuples(st.just(file), changes))
    return st.one_of(parts)


# Weights in safetensors files, and their index.


def _write_sharded(directory: pathlib.Path) -> None:
    write_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    names, weight_map = sorted(random_tensors()), {}
    for file, part in (("first.safetensors", names[:9]), ("second.safetensors", names[9:])):
        save_file({name: random_tensors()[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _header_inputs(directory: pathlib.Path, *files: str) -> Inputs:
    """Changes to the headers of safetensors files, whose data would be other data."""
    parts = []
    for file in files:
        original = (directory / file).read_bytes()
        end = 8 + int.from_bytes(original[:8], "little")

        def replace(header: Any, data: bytes = original[end:]) -> bytes:
            encoded = json.dumps(header).encode()
            return len(encoded).to_bytes(8, "little") + encoded + data

        as_json = changed_json(json.loads(original[8:end])).map(replace)
        parts.append(st.tuples(st.just(file), as_json | changed_bytes(original, 0, end)))
    return st.one_of(parts)


def _index_inputs(directory: pathlib.Path) -> Inputs:
    file = "model.safetensors.index.json"
    content = json.loads((directory / file).read_text())
    names = ["../first.safetensors", "/dev/zero", "", ".", "..", "a/b", "a\0b", "nowhere.safetensors", "config.json"]
    names += ["~", "second.safetensors", str(directory / "first.safetensors"), "a" * 300]

    @st.composite
    def pointed(draw: Any) -> bytes:
        tensor = draw(st.sampled_from(sorted(content["weight_map"])))
        name = draw(st.sampled_from(names))
        return json.dumps({"weight_map": content["weight_map"] | {tensor: name}}).encode()

    return json_inputs(directory, file) | st.tuples(st.just(file), pointed())


def _load_float32(directory: pathlib.Path) -> Any:
    return conversion.load_hf(directory, "float32")


# Configurations.

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.1, "long_mscale": 1.2}
    | {"original_max_position_embeddings": 512},
]


SETTINGS = {"do_sample": True, "top_k": 20, "top_p": 0.9, "eos_token_id": 2}


def _write_config(directory: pathlib.Path) -> None:
    (directory / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"}))
    (directory / "generation_config.json").write_text(json.dumps(SETTINGS))


def _config_inputs(directory: pathlib.Path) -> Inputs:
    contents = []
    for name, family in FAMILIES.items():
        content = SMALL | {key: value for key, value in family.reads.items() if value is not None}
        content |= {"model_type": name, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": [2]}
        if "kv_lora_rank" in family.reads:
            content |= {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
            content |= {"num_key_value_heads": SMALL["num_attention_heads"], "num_experts_per_tok": 2}
        contents.append({key: value for key, value in content.items() if family.only.get(key) != (None,)})
        contents.append(contents[-1] | {"rope_scaling": SCALINGS[len(contents) // 2 % len(SCALINGS)]})
    contents += [
        {"model_type": name, "architectures": [architecture], "text_config": SMALL | {"model_type": model_type}}
        for name, (architecture, model_type) in WITH_TEXT.items()
    ]
    contents.append({"model_type": "other", "image_token_id": 3, "text_config": SMALL | {"model_type": "llama"}})
    original = (directory / "config.json").read_bytes()
    changes = mostly_json(st.one_of(map(changed_json, contents)), changed_bytes(original))
    of_config = st.tuples(st.just("config.json"), changes)
    return of_config | of_config | json_inputs(directory, "generation_config.json")


def _read_config(directory: pathlib.Path) -> None:
    """Reads the configuration, and makes the program of a model that has it, but for large ones."""
    config = hf_config.read_config(directory)
    jlade.load_sampling(directory)
    if config.num_layers > 4 or config.num_experts > 64:
        return
    params = param_shapes(config, np.float32)

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        cache = params.decoder.init_cache(params, 1, 16)
        hidden, _ = params.decoder.forward(params, tokens, tokens, cache, np.tri(4, dtype=bool))
        return params.decoder.logits(params, hidden)

    jax.eval_shape(run, params, jax.ShapeDtypeStruct((1, 4), jnp.int32))


# Tokenizers.


@functools.cache
def tokenizer_json(kind: str) -> str:
    """Returns the content of a small tokenizer.json, "bytes" for byte-level BPE and "pieces" for SentencePiece's."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        | {"pad_type_id": 0, "pad_token": "<s>"},
        "added_tokens": [{"id": i, "content": name, **special} for i, name in enumerate(("<s>", "</s>"))],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
    }
    model = {"type": "BPE", "dropout": None, "unk_token": "<s>", "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": True, "ignore_merges": False}
    if kind == "bytes":
        words = ["<s>", "</s>", "a", "b", "c", "ab", "Ġ", "Ġa"]
        pattern = {"Regex": r"\w+|\s+(?!\S)|[^\s\w]+"}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        content |= {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "decoder": level,
            "model": model | {"byte_fallback": False, "merges": [["a", "b"], ["Ġ", "a"]]},
        }
    else:
        words = ["<s>", "</s>", "a", "b", "c", "ab", "▁", "▁a", "<0x0A>"]
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        content |= {
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": model | {"byte_fallback": True, "merges": [["a", "b"], ["▁", "a"]]},
        }
    content["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    return Tokenizer.from_str(json.dumps(content)).to_str()


def _write_tokenizer(directory: pathlib.Path) -> None:
    (directory / "tokenizer.json").write_text(tokenizer_json("bytes"))


def _tokenizer_inputs(directory: pathlib.Path) -> Inputs:
    originals = [tokenizer_json(kind) for kind in ("bytes", "pieces")]
    contents = st.one_of([changed_json(json.loads(original)) for original in originals])
    others = st.one_of([changed_bytes(original.encode()) for original in originals])
    return st.tuples(st.just("tokenizer.json"), mostly_json(contents, others))


def _read_tokenizer(directory: pathlib.Path) -> None:
    tokenizer = tokenizer_files.load_tokenizer(directory)
    if tokenizer is None:
        return
    ids = text.encode(tokenizer, "ab a  bc<s>é\n" * 20)
    text.encode(tokenizer, "ab <s>", parse_special=False)
    text.pad_id(tokenizer)
    text.special_names(tokenizer)
    text.decode(tokenizer, [*ids, *range(10)])
    [text.token_name(tokenizer, i) for i in range(10)]


def _write_chat(directory: pathlib.Path) -> None:
    _write_config(directory)
    _write_tokenizer(directory)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"model_max_length": 64, "clean_up_tokenization_spaces": False, "chat_template": "{{ messages }}"}
    added = {"0": {"content": "<s>", "special": True, "__type": "AddedToken"}}
    settings |= {"added_tokens_decoder": added, "extra_special_tokens": {}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "pad_token": "</s>"}))


def _chat_inputs(directory: pathlib.Path) -> Inputs:
    rest = json_inputs(directory, "tokenizer_config.json", "special_tokens_map.json", "config.json")
    return rest | _tokenizer_inputs(directory)


MESSAGES = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "a"}]


def _read_chat(directory: pathlib.Path) -> None:
    tokenizer = chat_template.load_tokenizer(directory)
    if tokenizer.chat_template is not None:
        chat_template.encode(tokenizer, MESSAGES)


EXPRESSIONS = [
    "messages[0]['content']",
    "''.__class__",
    "'a' * 10**9",
    "10**10**8",
    "range(10**5)",
    "raise_exception('no')",
    "1 / 0",
    "messages | tojson",
    "message.role",
    "bos_token",
    "namespace(a=1)",
    "self",
    "lipsum(n=9)",
    "'%s' % messages",
    "x.y.z",
    "'{0.__class__}'.format(1)",
    "messages | map(attribute='__class__') | list",
    "'a' | center(10**9)",
    "loop.index",
]
STATEMENTS = [
    "{{% for x in {0} %}}{1}{{% endfor %}}",
    "{{% if {0} %}}{1}{{% endif %}}",
    "{{% set x = {0} %}}{1}",
    "{{% macro m() %}}{1}{{{{ m() }}}}{{% endmacro %}}{{{{ m() }}}}",
    "{{% generation %}}{1}{{% endgeneration %}}",
]
TEMPLATE = "{% for message in messages %}{{ message.role }}{% if loop.last %}{{ bos_token }}{% endif %}{% endfor %}"


def _template_inputs(directory: pathlib.Path) -> Inputs:
    del directory
    leaf = st.sampled_from(EXPRESSIONS).map(lambda expression: "{{ " + expression + " }}") | st.text(max_size=5)

    def nest(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        wrapped = st.builds(str.format, st.sampled_from(STATEMENTS), st.sampled_from(EXPRESSIONS), inner)
        return wrapped | st.lists(inner, max_size=3).map("".join)

    grown = st.recursive(leaf, nest, max_leaves=8).map(lambda template: template.encode(errors="replace"))
    return st.tuples(st.just("chat_template.jinja"), grown | changed_bytes(TEMPLATE.encode()))


def _write_template(directory: pathlib.Path) -> None:
    _write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)


@functools.cache
def _tokenizer_of_templates() -> Any:
    transformers = __import__("transformers")
    own = Tokenizer.from_str(tokenizer_json("bytes"))
    own.no_padding()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")


def _read_template(directory: pathlib.Path) -> None:
    template = (directory / "chat_template.jinja").read_text(errors="replace")
    chat_template.encode(_tokenizer_of_templates(), MESSAGES, template)


# GGUF files.


def _write_gguf(directory: pathlib.Path) -> None:
    from tests.conversion import gguf_files

    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁a"]
    keys = {"model": "llama", "tokens": tokens, "scores": [0.0] * 8, "token_type": [2, 3, 3, 1, 1, 1, 1, 1]}
    changed = {f"tokenizer.ggml.{name}": value for name, value in keys.items()} | {"tokenizer.chat_template": TEMPLATE}
    changed |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    sizes = {"vocab": 8, "hidden": 8, "inner": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4}
    gguf_files.write(directory / "pieces.gguf", changed=changed, **sizes)
    keys = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab", "Ġ", "<s>"], "merges": ["a b"]}
    keys |= {"token_type": [1, 1, 1, 1, 3]}
    changed = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    gguf_files.write(directory / "bytes.gguf", "qwen3", tensors={}, changed=changed, **sizes)
    gguf_files.write(directory / "parts.gguf", split={"split_max_tensors": 6}, **sizes)


def _gguf_inputs(directory: pathlib.Path) -> Inputs:
    inputs = []
    for file in sorted(directory.glob("*.gguf")):
        tensors = gguf_header.read_header(file).tensors.values()
        end = min(tensor.offset for tensor in tensors if tensor.file == file)
        inputs.append(st.tuples(st.just(file.name), changed_bytes(file.read_bytes(), 0, end)))
    return st.one_of(inputs)


def _read_gguf(directory: pathlib.Path) -> None:
    for file in directory.glob("*.gguf"):
        params, tokenizer = jlade.load(file, "float32")
        del params
        if tokenizer is not None:
            text.encode(tokenizer, "ab a<s>")
            text.decode(tokenizer, range(10))


# jlade's own checkpoints, pools, corpora and priors.


def _write_own(directory: pathlib.Path) -> None:
    conversion.save(conversion.load_hf(write_checkpoint(directory), "float32", bits=8), directory / "own")


def _write_pool(directory: pathlib.Path) -> None:
    jlade.save_pool(pool_lib.empty(13, 4, 3), directory / "pool.safetensors")


def _pool_inputs(directory: pathlib.Path) -> Inputs:
    whole = changed_bytes((directory / "pool.safetensors").read_bytes())
    return _header_inputs(directory, "pool.safetensors") | st.tuples(st.just("pool.safetensors"), whole)


def _read_pool(directory: pathlib.Path) -> None:
    pool = jlade.load_pool(directory / "pool.safetensors")
    jax.eval_shape(lambda pool: pool_lib.lookup(pool, jnp.int32(3), 2), pool)


def _write_corpus(directory: pathlib.Path) -> None:
    jlade.save_corpus(jlade.Corpus([[1, 2, 3, 1, 2, 4], [5, 1, 2]]), directory / "corpus")


def _corpus_inputs(directory: pathlib.Path) -> Inputs:
    parts = []
    for path in sorted((directory / "corpus").iterdir()):
        content = path.read_bytes()
        raw = changed_bytes(content, 0, 128) | changed_bytes(content)
        parts.append(st.tuples(st.just(str(path.relative_to(directory))), raw))
    return st.one_of(parts)


def _read_corpus(directory: pathlib.Path) -> None:
    from jlade.drafts import suffix
    from jlade.generation import corpus as corpus_lib

    corpus = jlade.load_corpus(directory / "corpus")
    if corpus.largest_token < 13:
        corpus_lib.recycled(corpus, corpus, 1, 13)
    repr(corpus)
    jax.eval_shape(suffix.candidates, corpus.index, jnp.zeros(suffix.LONGEST, jnp.int32))


def _write_prior(directory: pathlib.Path) -> None:
    pairs, best = np.array([[-1, 1], [1, 2], [2, 3]], np.int32), np.array([[2, 3]] * 3, np.int32)
    table = prior_lib.table_of(pairs, best, np.ones(best.shape, np.float32), 13)
    jlade.save_prior(jlade.Prior(table, "0123456789abcdef"), directory / "prior.safetensors")


def _read_prior(directory: pathlib.Path) -> None:
    prior = jlade.load_prior(directory / "prior.safetensors")
    repr(prior), prior.largest_token
    jax.eval_shape(recycled.find_in_prior, prior.table, jnp.zeros((1, 2), jnp.int32))


# Settings that jlade keeps.


def _write_settings(directory: pathlib.Path) -> None:
    lookahead = jlade.LookaheadConfig()
    fields = dataclasses.asdict(lookahead)
    stored = {"format": choice.FORMAT, "device": "1 x CPU (cpu)", "model": "m", "batch_size": 1, "lookahead": fields}
    stored |= {"date": "2026-01-01", "prompts": 1, "tokens": 8, "repeat": 2, "step_times": {"1": 0.1, "60": 0.2}}
    stored |= {"trials": [{"lookahead": fields, "speed": 1.5}]}
    (directory / "choice.json").write_text(json.dumps(stored))
    times = {"scale": 0.1, "ratios": [1.0, 1.2, 0.9]}
    (directory / "learned.json").write_text(json.dumps({"format": learned.FORMAT} | times))


def _settings_inputs(directory: pathlib.Path) -> Inputs:
    return json_inputs(directory, "choice.json", "learned.json")


def _read_settings(directory: pathlib.Path) -> None:
    stored = choice.load(_Key(directory / "choice.json"))  # type: ignore[arg-type]
    if stored is not None:
        if stored.step_times:
            estimate.speed_limit(jlade.LookaheadConfig(), stored.step_times)
        sizes, seconds = list(stored.step_times), list(stored.step_times.values())
        assert all(np.interp(8, sizes, seconds) / seconds[0] > 0 for _ in sizes[:1])
        hash(stored.key), stored.effort, stored.key.devices
    times = learned.Learned(np.array([1.0, 1.5, 1.0]), 2, 1e-3, directory / "learned.json")
    costs = times.costs()
    assert np.isfinite(costs).all()
    assert (costs > 0).all()
    times.learn_round(np.array([2, 3]), 10, 0.5)
    assert np.isfinite(times.costs()).all()


class _Key(NamedTuple):
    """In the place of the key of a setting, whose file it names."""

    path: pathlib.Path


FORMATS: dict[str, Format] = {
    "safetensors": Format(
        _write_sharded,
        lambda directory: _header_inputs(directory, "first.safetensors", "second.safetensors"),
        _load_float32,
        is_checked=True,
    ),
    "index": Format(_write_sharded, _index_inputs, _load_float32, is_checked=True),
    "config": Format(_write_config, _config_inputs, _read_config),
    "tokenizer": Format(_write_tokenizer, _tokenizer_inputs, _read_tokenizer),
    "chat tokenizer": Format(_write_chat, _chat_inputs, _read_chat),
    "chat template": Format(_write_template, _template_inputs, _read_template),
    "gguf": Format(_write_gguf, _gguf_inputs, _read_gguf),
    "own": Format(
        _write_own,
        lambda directory: _header_inputs(directory, "own/jlade.safetensors"),
        lambda directory: jlade.load(directory / "own")[0],
        is_checked=True,
    ),
    "pool": Format(_write_pool, _pool_inputs, _read_pool),
    "corpus": Format(_write_corpus, _corpus_inputs, _read_corpus),
    "prior": Format(_write_prior, lambda directory: _header_inputs(directory, "prior.safetensors"), _read_prior),
    "settings": Format(_write_settings, _settings_inputs, _read_settings, refuses=False),
}
