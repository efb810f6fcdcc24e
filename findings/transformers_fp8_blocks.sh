#!/usr/bin/env bash
# Guess: transformers decodes a matrix in FP8 with the blocks that config.json names (weight_block_size), the last of which
# are smaller where the sizes do not divide.
# Seen: it divides the matrix by the number of scales. 192 rows in blocks of 128 have two scales, and are decoded in blocks
# of 96: 32 rows are multiplied by the wrong scale, without a warning. Matrices whose sizes are multiples of 128, as in
# the published models that use this format, are right.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.manual_seed(0)
directory, block = f"{sys.argv[1]}/model", 128
config = transformers.LlamaConfig(
    vocab_size=40, hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4
)
transformers.LlamaForCausalLM(config).save_pretrained(directory)
tensors, wanted = load_file(f"{directory}/model.safetensors"), {}
for name in [name for name in tensors if "proj" in name]:
    matrix = tensors[name] * torch.arange(1, len(tensors[name]) + 1)[:, None]  # later rows are larger
    blocks = [matrix[begin : begin + block] for begin in range(0, len(matrix), block)]
    columns = [range(begin, min(begin + block, matrix.shape[1])) for begin in range(0, matrix.shape[1], block)]
    scales = torch.stack([torch.stack([each[:, part].abs().max() / 448 for part in columns]) for each in blocks])
    spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: len(matrix), : matrix.shape[1]]
    tensors[name], tensors[f"{name}_scale_inv"] = (matrix / spread).to(torch.float8_e4m3fn), scales
    wanted[name] = tensors[name].float() * spread
save_file(tensors, f"{directory}/model.safetensors", {"format": "pt"})
with open(f"{directory}/config.json") as file:
    content = json.load(file)
content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
with open(f"{directory}/config.json", "w") as file:
    json.dump(content, file)
found = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
errors = {}
for name, matrix in wanted.items():
    rows = (found[name] - matrix).abs().amax(dim=1) > 1e-6 * matrix.abs().amax()
    errors[name.split(".")[-2]] = int(rows.sum())
print(f"transformers {transformers.__version__}, rows of other values than the file's:", errors)
assert errors == dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), 0) | {
    "gate_proj": 32,
    "up_proj": 32,
    "down_proj": 64,
}, errors
PYTHON
