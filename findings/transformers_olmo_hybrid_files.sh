#!/usr/bin/env bash
# Guess: a model of OLMo Hybrid that transformers has loaded and written again has the tensors of the published files:
# filters of the convolutions of queries, keys and values of their sizes, and norms after attention by their names.
# Seen: the three filters, which transformers joins, are written as three equal parts, whatever the sizes: 16, 16 and 48
# rows become 27, 27 and 26. And in layers with attention `post_attention_layernorm` becomes `feedforward_layer_norm`, the
# published name of a norm of the other layers. transformers reads both, so that a model seems to survive; other software
# reads filters of wrong channels, or fails.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import torch
import transformers
from safetensors import safe_open

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
config = transformers.OlmoHybridConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_num_value_heads=4,
    linear_value_head_dim=12,
    pad_token_id=0,
)
model = transformers.OlmoHybridForCausalLM(config).eval()
model.save_pretrained(sys.argv[1] + "/saved")
again = transformers.OlmoHybridForCausalLM.from_pretrained(sys.argv[1] + "/saved").eval()
tokens = torch.arange(1, 9)[None]
with torch.no_grad():
    assert torch.equal(model(tokens).logits, again(tokens).logits)
with safe_open(sys.argv[1] + "/saved/model.safetensors", "pt") as file:
    first = "model.layers.0.linear_attn."
    rows = [file.get_slice(f"{first}{name}_conv1d.weight").get_shape()[0] for name in "qkv"]
    names = [key.rpartition("model.layers.1.")[2] for key in file.keys() if "layers.1." in key and "norm" in key]
    wanted = [file.get_slice(f"{first}{name}_proj.weight").get_shape()[0] for name in "qkv"]
norms = sorted(name for name in names if "self_attn" not in name)
print(f"transformers {transformers.__version__}: channels {wanted}, filters {rows}, norms of attention's layer {norms}")
assert (wanted, rows) == ([16, 16, 48], [27, 27, 26]), (wanted, rows)
assert norms == ["feedforward_layer_norm.weight", "post_feedforward_layernorm.weight"], norms
PYTHON
