#!/usr/bin/env bash
# Guess: a window of attention that is set on a backbone of keras-hub, or in a checkpoint that it reads, changes the
# logits of longer texts, in Qwen2 and Qwen3 as in Mistral.
# Seen: Mistral's window works, and those of Qwen2 and Qwen3 do nothing, with Keras on JAX and on torch alike: logits
# with a window of 3 equal those without one. Their layers apply the window only where they compute the scores
# themselves. On both backends they ask Keras's `dot_product_attention`, and do not pass it the window. So the logits of
# checkpoints with windows are wrong, without a warning. Qwen2's window is also lost before: what reads its checkpoints
# passes `use_sliding_window`, where the backbone's argument is `use_sliding_window_attention`. The backbone accepts the
# wrong name, as it does any that it does not know, and has its window off.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 kagglehub==1.0.2 jax==0.10.2 jaxlib==0.10.2 \
    transformers==5.24.0 torch==2.13.0 numpy==2.4.6 sentencepiece==0.2.3 kagglesdk==0.1.28
"$folder/venv/bin/pip" install --quiet --no-deps keras-hub==0.32.0  # without TensorFlow, which it asks for
cat > "$folder/windows.py" <<'PYTHON'
import logging
import sys
from unittest import mock

import keras
import keras_hub
import numpy as np
import torch
import transformers
from keras_hub.models import MistralBackbone, Qwen3Backbone, QwenBackbone

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0}
SIZES |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
OURS = {"vocabulary_size": 64, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_query_heads": 4}
OURS |= {"num_key_value_heads": 2}
QWEN = {"use_sliding_window": True, "max_window_layers": 0}  # 0: windows in all layers
FAMILIES = {
    "Mistral": (MistralBackbone, {"head_dim": 8}, {}, lambda window: {"sliding_window": window}),
    "Qwen2": (
        QwenBackbone,
        {},
        QWEN,
        lambda window: {"use_sliding_window_attention": window is not None, "sliding_window_size": window},
    ),
    "Qwen3": (Qwen3Backbone, {"head_dim": 8}, QWEN, lambda window: {"sliding_window_size": window}),
}
tokens = np.random.default_rng(0).integers(3, 64, (1, 24))


class Listener(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())


heard = []  # what is logged and warned
logging.getLogger().addHandler(Listener())
logging.captureWarnings(True)


def logits(backbone):
    hidden = backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    return keras.ops.convert_to_numpy(backbone.token_embedding(hidden, reverse=True))


def difference(one, other):
    return float(np.abs(one - other).max())


def errors(name, kind, extra, switch):
    """Differences of backbones from checkpoints without and with a window, and of the two models of transformers."""
    found, wanted = [], []
    for window in (None, 3):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(
            **SIZES, **extra, **(switch if window else {}), sliding_window=window
        )
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for weight in model.parameters():
            weight.data = weight.data.half().float()  # keras-hub rounds those of Mistral to float16
        model.save_pretrained(f"{sys.argv[1]}/{name}-{window}")
        with torch.no_grad():
            wanted.append(model(torch.tensor(tokens)).logits.numpy())
        found.append(difference(logits(kind.from_preset(f"{sys.argv[1]}/{name}-{window}")), wanted[-1]))
    return *found, difference(*wanted)


def effect(kind, extra, named):
    without, within = (kind(**OURS, **extra, **named(window)) for window in (None, 3))
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.3, weight.shape) for weight in without.get_weights()]
    without.set_weights(weights)
    within.set_weights(weights)
    return difference(logits(without), logits(within))


print(f"keras-hub {keras_hub.__version__}, transformers {transformers.__version__}, Keras on {keras.backend.backend()}")
for name, (kind, extra, switch, named) in FAMILIES.items():
    changed = effect(kind, extra, named)
    without, within, expected = errors(name, kind, extra, switch)
    print(f"  {name}: a window of 3 changes logits by {changed:.2g}, those of transformers by {expected:.2g};")
    print(f"    checkpoints without a window are off by {without:.1e}, with one by {within:.1e};")
    assert without < 1e-3 and expected > 1, (name, without, expected)
    if name == "Mistral":
        assert changed > 1 and within < 1e-3, (changed, within)
        continue
    assert changed == 0 and within > 1, (name, changed, within)
    with mock.patch(f"{kind.__module__.removesuffix('backbone')}attention.fused_attention_op_available", lambda: False):
        own = effect(kind, extra, named)
    print(f"    where the layer computes the scores itself, the window changes logits by {own:.2g}")
    assert own > 1, (name, own)
read = QwenBackbone.from_preset(f"{sys.argv[1]}/Qwen2-3").get_config()
asked = QwenBackbone(**OURS, use_sliding_window=True, no_such_argument=True).use_sliding_window_attention
print(f"  Qwen2 read with a window: {read['use_sliding_window_attention']}, of {read['sliding_window_size']}")
warned = [text for text in heard if any(word in text.lower() for word in ("window", "sliding", "argument"))]
print("  warnings of it:", warned)
assert (read["use_sliding_window_attention"], read["sliding_window_size"], asked) == (False, 3, False), (read, asked)
assert not warned, warned
PYTHON
for backend in jax torch; do
    KERAS_BACKEND=$backend KERAS_HOME="$folder/keras" "$folder/venv/bin/python" "$folder/windows.py" "$folder"
done
