#!/usr/bin/env bash
# Guess: `partial_rotary_factor`, the fraction of a head that is rotated, means the same in config.json of Bamba wherever
# it stands: beside the other keys, where transformers 4 wrote it, or within `rope_parameters`, where 5 does.
# Seen: beside the other keys it has no effect: the fraction is always a half. Within `rope_parameters` it counts. Phi,
# which has the key too, reads both.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import transformers
from transformers.models.bamba.modeling_bamba import BambaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

transformers.logging.set_verbosity_error()
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
FORMS = {
    "beside": {"partial_rotary_factor": 0.25},
    "within": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
}
found = {}
for kind, embedding, more in (
    (transformers.BambaConfig, BambaRotaryEmbedding, {"mamba_n_heads": 8}),
    (transformers.PhiConfig, PhiRotaryEmbedding, {}),
):
    sizes = {name: 2 * len(embedding(kind(**SIZES, **more, **form)).inv_freq) for name, form in FORMS.items()}
    found[kind.model_type] = sizes
print(f"transformers {transformers.__version__}, rotated elements of a head of 32 for a fraction of 0.25:", found)
assert found == {"bamba": {"beside": 16, "within": 8}, "phi": {"beside": 8, "within": 8}}, found
PYTHON
