#!/usr/bin/env bash
# Guess: the mixtures of experts of Granite have the same names of tensors in the files that transformers writes and reads,
# with windows (granitemoe_swa) as without (granitemoe, granitemoeshared).
# Seen: without windows the experts are `input_linear.weight` and `output_linear.weight`, as published; with windows they
# are `experts.gate_up_proj` and `experts.down_proj`. A file with the first names, as a mixture that is trained on with
# windows would have, loads into the class for windows with random experts and routers, after a report on the console.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import transformers
from safetensors import safe_open

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16, "pad_token_id": 0}
found = {}
for name in ("GraniteMoeShared", "GraniteMoeSWA"):
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    with safe_open(f"{sys.argv[1]}/{name}/model.safetensors", "pt") as file:
        first = "model.layers.0.block_sparse_moe."
        found[name] = sorted(key.removeprefix(first) for key in file.keys() if key.startswith(first))
_, report = transformers.GraniteMoeSWAForCausalLM.from_pretrained(
    f"{sys.argv[1]}/GraniteMoeShared", config=transformers.GraniteMoeSWAConfig(**SIZES), output_loading_info=True
)
missing = {key.rpartition("block_sparse_moe.")[2] for key in report["missing_keys"] if "block_sparse_moe." in key}
print(f"transformers {transformers.__version__}:", found, "missing:", sorted(missing))
assert found == {
    "GraniteMoeShared": ["input_linear.weight", "output_linear.weight", "router.layer.weight"],
    "GraniteMoeSWA": ["experts.down_proj", "experts.gate_up_proj", "router.weight"],
}, found
assert missing == {"experts.down_proj", "experts.gate_up_proj", "router.weight"}, missing
PYTHON
