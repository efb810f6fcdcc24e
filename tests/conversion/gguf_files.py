"""Small GGUF files with random weights."""

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

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
    if not kind.name.endswith("_K"):
        return quants.quantize(values, kind)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    scales = rng.uniform(1e-4, 1e-3, (*blocks.shape[:-1], 2)).astype(np.float16)  # finite ones
    if kind.name == "Q6_K":
        blocks[..., -2:] = scales[..., :1].view(np.uint8)
    else:
        blocks[..., :4] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(file, arch="llama", *, kind="F32", kinds=(), changed=(), tensors=(), tied=False, **sizes):
    """Writes a file and returns its path.

    Args:
      file: the path.
      arch: the architecture.
      kind: type of the matrices; `kinds` maps names of tensors to other types.
      changed: metadata to add or replace; None removes a key.
      tensors: arrays in float32 to add or replace by name; None removes a tensor.
      tied: whether there is no output matrix.
      sizes: replace some of `SHAPE`.
    """
    writer = gguf.GGUFWriter(file, arch)
    for key, value in (metadata(arch, **sizes) | dict(changed)).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    arrays = dict(tensors)
    for seed, (name, shape) in enumerate(shapes(arch, tied, **sizes).items()):
        own = dict(kinds).get(name, kind if len(shape) == 2 else "F32")
        if name not in arrays:
            writer.add_tensor(name, stored(shape, own, seed), raw_dtype=GGMLQuantizationType[own])
    for name, array in arrays.items():
        if array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
