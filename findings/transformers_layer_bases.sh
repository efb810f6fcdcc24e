#!/usr/bin/env bash
# Guess: `layer_rope_theta` lists the rotary base of each layer, 0 for none, in the two families of transformers that have
# it. The documentation of both says that it overrides the global base.
# Seen: Granite with windows (granite_swa) rotates each layer by its own base. Muse Glimmer asks of the list only which
# layers are rotated: any base but 0 is the global one. A list of other bases gives the same logits, and no warning.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextModel

transformers.logging.set_verbosity_error()
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
tokens = torch.arange(3, 23)[None]


def outputs(kind, model_class, thetas):
    torch.manual_seed(0)
    model = model_class(kind(**SIZES, layer_rope_theta=thetas)).eval()
    with torch.no_grad():
        return model(tokens).last_hidden_state


found = {}
for kind, model_class in (
    (transformers.GraniteSWAConfig, transformers.GraniteSWAModel),
    (MuseGlimmerTextConfig, MuseGlimmerTextModel),
):
    usual, *others = (outputs(kind, model_class, thetas) for thetas in ([10000.0] * 2, [50.0] * 2, [10000.0, 0]))
    found[kind.model_type] = [torch.equal(usual, other) for other in others]
print(f"transformers {transformers.__version__}, same outputs with other bases, and without one:", found)
assert found == {"granite_swa": [False, False], "muse_glimmer_text": [True, False]}, found
PYTHON
