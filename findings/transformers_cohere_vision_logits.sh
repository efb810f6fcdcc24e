#!/usr/bin/env bash
# Guess: a model with images that is built around Command R 7B's type (cohere2), asked about text alone, gives the logits
# of its language model: texts sampled from the two at one temperature have the same distribution.
# Seen: Aya Vision and Command A Vision leave out the scale (logit_scale, 1/16 by default) that the language model alone
# multiplies its logits with. Greedy texts agree; at temperature 1 the model with images draws as the language model does
# at temperature 1/16.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import Cohere2Config, Cohere2ForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
text = Cohere2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
tokens = torch.arange(1, 13)[None]
ratios = {}
for name in ("AyaVision", "Cohere2Vision"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text.to_dict(), vision_config=vision)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    alone = Cohere2ForCausalLM(text).eval()
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.tie_weights()
    with torch.no_grad():
        ratio = (alone(tokens).logits / whole(input_ids=tokens).logits)[..., 1:]  # those of the pad token are 0
    ratios[name] = sorted({round(value, 4) for value in ratio.flatten().tolist()})
print(f"transformers {transformers.__version__}, logits of the language model alone over those of the whole:", ratios)
assert ratios == {"AyaVision": [0.0625], "Cohere2Vision": [0.0625]}, ratios
PYTHON
