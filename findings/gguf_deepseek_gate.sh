#!/usr/bin/env bash
# Guess: a DeepSeek V3 checkpoint that transformers 5 has saved can be converted to GGUF like the published ones.
# Seen: transformers 5 fixes the sigmoid of the router in its code and writes no scoring_func to config.json; llama.cpp's
# converter takes the gate from that key alone, so the file has no expert_gating_func, for which llama.cpp's loader has
# the softmax of DeepSeek V2. No step warns, and the weights of the experts are others than in transformers.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 gguf==0.19.0 sentencepiece==0.2.1
"$folder/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$folder" llama-cpp-python==0.3.36
mkdir "$folder/source" && tar xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder/source" --strip-components=1
"$folder/venv/bin/python" - "$folder/source/vendor/llama.cpp" "$folder" <<'PYTHON'
import json
import logging
import pathlib
import re
import sys

source, folder = map(pathlib.Path, sys.argv[1:])
sys.path[:0] = [str(source), str(source / "gguf-py")]
import conversion
import gguf
import torch
import transformers
from conversion.base import TextModel

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8}
sizes |= {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16}
sizes |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
model.save_pretrained(folder / "model")
logging.disable(logging.WARNING)
converter = conversion.get_model_class("DeepseekV3ForCausalLM")
converter.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
with torch.inference_mode():
    converter(folder / "model", gguf.LlamaFileType.ALL_F32, folder / "model.gguf", eager=True).write()
written = "scoring_func" in json.loads((folder / "model" / "config.json").read_text())
keys = [key for key in gguf.GGUFReader(folder / "model.gguf").fields if "expert" in key]
loader = (source / "src" / "models" / "deepseek2.cpp").read_text()
fallback = re.search(r"else \{\s*hparams\.expert_gating_func = (\w+_SOFTMAX);", loader)
print(f"transformers {transformers.__version__}: config.json has scoring_func: {written}")
print(f"the file has {', '.join(keys)}; without a gate the loader takes {fallback and fallback[1]}")
assert not written and "deepseek2.expert_count" in keys and fallback
assert "deepseek2.expert_gating_func" not in keys
PYTHON
