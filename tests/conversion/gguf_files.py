"""Small GGUF files: random weights, a tokenizer, and models of transformers as llama.cpp's converter writes them."""

import functools
import json

import gguf
import numpy as np
import tokenizers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from tokenizers import models, pre_tokenizers, trainers

from jlade.conversion.gguf_tokenizer import CONTROL, NORMAL, USER_DEFINED
from jlade.generation import text

SHAPE = {"vocab": 48, "hidden": 64, "inner": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}


def metadata(arch="llama", **changes):
    """Returns the metadata of a model without a tokenizer; `changes` replace some of `SHAPE`."""
    s = SHAPE | changes
    return {
        f"{arch}.block_count": s["layers"],
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": s["hidden"],
        f"{arch}.feed_forward_length": s["inner"],
        f"{arch}.attention.head_count": s["heads"],
        f"{arch}.attention.head_count_kv": s["kv_heads"],
        f"{arch}.attention.key_length": s["head_dim"],
        f"{arch}.attention.value_length": s["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": s["head_dim"],
        f"{arch}.rope.freq_base": 500.0,
        f"{arch}.vocab_size": s["vocab"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def shapes(arch="llama", tied=False, **changes):
    """Returns the shapes [rows, columns] of the tensors by name."""
    s = SHAPE | changes
    queries, keys = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    result = {"token_embd.weight": (s["vocab"], s["hidden"]), "output_norm.weight": (s["hidden"],)}
    if not tied:
        result["output.weight"] = (s["vocab"], s["hidden"])
    for i in range(s["layers"]):
        layer = {
            "attn_norm.weight": (s["hidden"],),
            "attn_q.weight": (queries, s["hidden"]),
            "attn_k.weight": (keys, s["hidden"]),
            "attn_v.weight": (keys, s["hidden"]),
            "attn_output.weight": (s["hidden"], queries),
            "ffn_norm.weight": (s["hidden"],),
            "ffn_gate.weight": (s["inner"], s["hidden"]),
            "ffn_up.weight": (s["inner"], s["hidden"]),
            "ffn_down.weight": (s["hidden"], s["inner"]),
        }
        if arch == "phi3":
            del layer["attn_q.weight"], layer["attn_k.weight"], layer["attn_v.weight"], layer["ffn_gate.weight"]
            layer |= {
                "attn_qkv.weight": (queries + 2 * keys, s["hidden"]),
                "ffn_up.weight": (2 * s["inner"], s["hidden"]),
            }
        if arch == "qwen2":
            layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (s["head_dim"],), "attn_k_norm.weight": (s["head_dim"],)}
        result |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return result


def stored(shape, kind, seed=0):
    """Returns random elements of a tensor as they are stored in a type."""
    rng, kind = np.random.default_rng(seed), GGMLQuantizationType[kind]
    values = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[-1], dtype=np.float32)
    if len(shape) == 1:
        values = 1 + values  # norms
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:  # random blocks, of numbers that are neither NaN nor very large
        block, size = GGML_QUANT_SIZES[kind]
        blocks, wrong = np.empty((values.size // block, size), np.uint8), np.full(values.size // block, True)
        while wrong.any():
            blocks[wrong] = rng.integers(0, 256, (np.count_nonzero(wrong), size), np.uint8)
            with np.errstate(all="ignore"):
                wrong = ~(np.abs(quants.dequantize(blocks, kind)) < 1e3).all(axis=1)
        return blocks.reshape(*shape[:-1], -1)


NAMES = {  # in a layer of the file, by that in a layer of transformers
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
NORMS_OF_GEMMA_2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def neighbours_together(matrix, head_dim):
    """Returns rows in the order of rotations that turn neighbours: first, middle, second, ... of each head."""
    halves = matrix.reshape(-1, 2, head_dim // 2, matrix.shape[-1])
    return np.swapaxes(halves, 1, 2).reshape(matrix.shape)


def convert(model, file, arch, changed=(), tensors=(), kind="F32"):
    """Writes a model of transformers as llama.cpp's converter does, and returns the path.

    Args:
      model: with matrices of experts [N, out, in], those of gate and product joined.
      file: the path.
      arch: the architecture.
      changed: metadata to add or replace, by their names after that of the architecture.
      tensors: arrays in float32 to add, by name.
      kind: type of the matrices.
    """
    config, arrays = model.config, dict(tensors)
    names = NAMES | (NORMS_OF_GEMMA_2 if arch in ("gemma2", "gemma3") else {})
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if name.startswith("model.layers."):
            _, _, number, within = name.split(".", 3)
            if within == "mlp.experts.gate_up_proj":
                gate, up = np.split(array, 2, axis=1)
                arrays |= {f"blk.{number}.ffn_gate_exps.weight": gate, f"blk.{number}.ffn_up_exps.weight": up}
                continue
            if arch == "llama" and within in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
                array = neighbours_together(array, config.hidden_size // config.num_attention_heads)
            arrays[f"blk.{number}.{names[within.removesuffix('.weight')]}.weight"] = array
        elif name == "model.embed_tokens.weight":
            arrays["token_embd.weight"] = array
        elif name == "model.norm.weight":
            arrays["output_norm.weight"] = array
        elif not config.tie_word_embeddings:
            assert name == "lm_head.weight"
            arrays["output.weight"] = array
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if arch != "phi3":  # its heads always divide the width
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    matrices = {name: array for name, array in arrays.items() if array is not None and array.ndim > 1}
    kind = GGMLQuantizationType[kind]
    quantized = {name: (quants.quantize(array, kind), kind) for name, array in matrices.items()}
    vectors = {name: array for name, array in arrays.items() if name not in matrices}
    _write(file, arch, {f"{arch}.{key}": value for key, value in (keys | dict(changed)).items()}, vectors, quantized)
    return file


def write(file, arch="llama", *, kind="F32", kinds=(), changed=(), tensors=(), tied=False, split=None, **sizes):
    """Writes a file, or those of a split model, and returns its path.

    Args:
      file: the path.
      arch: the architecture.
      kind: type of the matrices; `kinds` maps names of tensors to other types.
      changed: metadata to add or replace; None removes a key.
      tensors: arrays in float32 to add or replace by name; None removes a tensor.
      tied: whether there is no output matrix.
      split: arguments of gguf's writer that divide the tensors among several files.
      sizes: replace some of `SHAPE`.
    """
    quantized = {}
    for seed, (name, shape) in enumerate(shapes(arch, tied, **sizes).items()):
        own = dict(kinds).get(name, kind if len(shape) == 2 else "F32")
        if name not in dict(tensors):
            quantized[name] = stored(shape, own, seed), GGMLQuantizationType[own]
    _write(file, arch, metadata(arch, **sizes) | dict(changed), dict(tensors), quantized, split)
    return file


def _write(file, arch, keys, tensors, quantized, split=None):
    """Writes a file with metadata, arrays, and arrays with their types; None is left out."""
    writer = gguf.GGUFWriter(file, arch, **(split or {}))
    for key, value in keys.items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for name, (array, kind) in quantized.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    for name, array in tensors.items():
        if array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PRODUCTS = {f"attn_{name}" for name in ("q", "k", "v", "qkv", "gate", "output")} | {"ssm_out", "ssm_in"}
PRODUCTS |= {f"ffn_{name}_exps" for name in ("gate", "up", "gate_up")} | {"ffn_gate", "ffn_up"}


def quantize_file(file, target, kind="Q8_0"):
    """Writes a file with its matrices of products in a type whose blocks have 32 elements, and returns its path."""
    reader = gguf.GGUFReader(file)
    kind, fields = GGMLQuantizationType[kind], dict(reader.fields)
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for key, field in fields.items():
        if not key.startswith("GGUF."):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for tensor in reader.tensors:
        array, name = np.array(tensor.data), tensor.name.split(".")[-2]
        if name in PRODUCTS and tensor.name.endswith("weight") and array.shape[-1] % 32 == 0:
            writer.add_tensor(tensor.name, quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


WIDE = {"hidden": 256, "inner": 512, "heads": 8, "head_dim": 32, "layers": 1}  # whole blocks of all types


def reference(file):
    """Returns the tensors of a file as the gguf package dequantizes them, by name."""
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}


def halves_apart(matrix, head_dim):
    """Returns rows in Hugging Face's order: of each head first the even ones, then the odd ones."""
    heads = matrix.reshape(-1, head_dim, matrix.shape[-1])
    return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(matrix.shape)


CORPUS = (
    "Numbers like 2024, 12345 and 3.14 occur; so do contractions: I'm, they'll, DON'T, we've.\n\tdef f(x):\n"
    "        return x**2  # squared\n\n\nNaïve café, “quoted” … 日本語のテキスト ½ ² ٣٤ 🙂 the the the then there   \n"
)


@functools.cache
def byte_level():
    """Returns tokens, types and merges of a byte-level BPE."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=text.LETTERS_OF_BYTES, show_progress=False)
    tokenizer.train_from_iterator([CORPUS * 3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {"<begin>": CONTROL, "<end>": CONTROL, "<user>": USER_DEFINED}
    types = [special.get(token, NORMAL) for token in [*special, *tokens]]
    return [*special, *tokens], types, [" ".join(merge) for merge in model["merges"]]


def keys_of_tokenizer(**changed):
    """Returns the keys of a file with the vocabulary of `byte_level`; `changed` replaces some."""
    tokens, types, merges = byte_level()
    keys = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types, "merges": merges}
    keys |= {"bos_token_id": 0, "eos_token_id": 1} | changed
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def write_chat(file, **options):
    """Writes a model that chats: quantized, with a tokenizer, a chat template and room for long conversations."""
    template = "{% for m in messages %}{{ '<user>' + m['content'] + '<end>\n' }}{% endfor %}"
    changed = keys_of_tokenizer() | {"tokenizer.chat_template": template, "llama.context_length": 2048}
    return write(file, kind="Q8_0", changed=changed, vocab=len(byte_level()[0]), **options)
