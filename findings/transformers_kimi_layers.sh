#!/usr/bin/env bash
# Guess: the file that transformers writes of a model that it has loaded has the tensors' published names, as it promises
# unless save_original_format=False.
# Seen: of Kimi K2.5 the layers of the language model are written as `language_model.model.blocks.0...`, and of Qianfan-OCR
# as `language_model.model.encoder.layers.0...`, where published files say `language_model.model.layers.0...`: the names
# of the vision part's layers are restored in the language model too. transformers reads both names, so that a model
# seems to survive; other software finds no layers.
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
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {"model_type": "deepseek_v3", "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
TEXTS = {"Kimi_K25": LATENT, "QianfanOCR": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8}}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
tokens = torch.arange(1, 9)[None]
found = {}
for name, text in TEXTS.items():
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    config = getattr(transformers, f"{name}Config")(text_config=SIZES | text | {"pad_token_id": 0})
    for key, value in VISION.items():
        if hasattr(config.vision_config, key):
            setattr(config.vision_config, key, value)
    model = model_class(config).eval()
    model.save_pretrained(sys.argv[1] + "/saved")
    again = model_class.from_pretrained(sys.argv[1] + "/saved").eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, again(input_ids=tokens).logits)
    with safe_open(sys.argv[1] + "/saved/model.safetensors", "pt") as file:
        ends = ".0.input_layernorm.weight"
        found[name] = [key.removesuffix(ends) for key in file.keys() if key.endswith(ends) and "language" in key]
print(f"transformers {transformers.__version__}, names of layers:", found)
assert found == {"Kimi_K25": ["language_model.model.blocks"], "QianfanOCR": ["language_model.model.encoder.layers"]}
PYTHON
