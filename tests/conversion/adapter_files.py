"""Small LoRA adapters, in numbers whose sums and products are exact."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."


SETTINGS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6}


def write_adapter(directory, shapes, targets=("q_proj", "v_proj", "down_proj"), *, ranks=(), saved=(), **changes):
    """Writes an adapter of the modules of a base model with these names, in numbers whose sums and products are exact.

    `shapes` are those of the base model's tensors, `ranks` of modules that have others than two, and `saved` tensors
    that are written whole. Returns the product of the factors of each tensor.
    """
    rng = np.random.default_rng(1)
    tensors, products = {name: rng.integers(-8, 9, shapes[name]).astype(np.float32) / 8 for name in saved}, {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and f".{module}".endswith(tuple(f".{target}" for target in targets)):
            rank = dict(ranks).get(module, 2)
            a, b = (rng.integers(-8, 9, size).astype(np.float32) / 8 for size in ((rank, shape[1]), (shape[0], rank)))
            products[name] = b @ a
            if module.endswith("embed_tokens"):
                tensors |= {f"{module}.lora_embedding_A": b.T.copy(), f"{module}.lora_embedding_B": a.T.copy()}
            else:
                tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(SETTINGS | {"target_modules": list(targets)} | changes))
    save_file({PREFIX + name: array for name, array in tensors.items()}, directory / "adapter_model.safetensors")
    return products


def shapes_of(directory):
    return {name: array.shape for name, array in load_file(directory / "model.safetensors").items()}
