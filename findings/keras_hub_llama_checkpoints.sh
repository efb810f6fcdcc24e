#!/usr/bin/env bash
# Guess: keras-hub reads a Llama checkpoint that transformers has saved with the epsilon of its norms (rms_norm_eps) and
# with the llama3 scaling of its rotary frequencies, or it refuses the checkpoint.
# Seen: `LlamaBackbone.from_preset` reads neither of a checkpoint of transformers 5, without a warning. The epsilon is
# always 1e-6: with 1e-5, as in Meta's models, the logits of this small model are off by 0.0009, and with 1e-2 by 1.1,
# where the logits reach 5. The scaling is looked for in `rope_scaling` alone, but transformers 5 writes it to
# `rope_parameters`: without it the logits are off by 7. They are right if the same scaling is in `rope_scaling`, and if
# epsilon and scaling are passed to `from_preset`.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 kagglehub==1.0.2 jax==0.10.2 jaxlib==0.10.2 \
    transformers==5.24.0 torch==2.13.0 numpy==2.4.6 sentencepiece==0.2.3 kagglesdk==0.1.28
"$folder/venv/bin/pip" install --quiet --no-deps keras-hub==0.32.0  # without TensorFlow, which it asks for
KERAS_BACKEND=jax KERAS_HOME="$folder/keras" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import logging
import pathlib
import sys

import keras_hub
import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0}
SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, **SCALING}
NAMES = ("frequency_adjustment_factor", "low_freq_factor", "high_freq_factor", "pretraining_sequence_length")
GIVEN = {f"rope_{name}": value for name, value in zip(NAMES, SCALING.values(), strict=True)}  # as keras-hub names them
tokens = np.random.default_rng(0).integers(3, 64, (1, 24))


class Listener(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())


heard = []  # what is logged and warned
logging.getLogger().addHandler(Listener())
logging.captureWarnings(True)


def saved(name, **values):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **values)).eval()
    model.save_pretrained(pathlib.Path(sys.argv[1]) / name)
    with torch.no_grad():
        return pathlib.Path(sys.argv[1]) / name, model(torch.tensor(tokens)).logits.numpy()


def loaded(folder, wanted, **given):
    backbone = keras_hub.models.LlamaBackbone.from_preset(str(folder), **given)
    hidden = backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    error = np.abs(np.asarray(backbone.token_embedding(hidden, reverse=True)) - wanted).max()
    return backbone.layer_norm_epsilon, backbone.rope_frequency_adjustment_factor, float(error)


found = {}
for epsilon in (1e-6, 1e-5, 1e-2):
    folder, wanted = saved(f"epsilon {epsilon:g}", rms_norm_eps=epsilon)
    found[f"epsilon {epsilon:g}"] = loaded(folder, wanted)
    found[f"epsilon {epsilon:g} passed"] = loaded(folder, wanted, layer_norm_epsilon=epsilon)
folder, wanted = saved("scaling", rms_norm_eps=1e-6, rope_parameters=LLAMA3)
found["scaling"] = loaded(folder, wanted)
found["scaling passed"] = loaded(folder, wanted, **GIVEN)
config = json.loads((folder / "config.json").read_text())
assert config.pop("rope_parameters") == LLAMA3 and "rope_scaling" not in config, config
config |= {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": {"rope_type": "llama3", **SCALING}}
(folder / "config.json").write_text(json.dumps(config))
found["scaling in rope_scaling"] = loaded(folder, wanted)
warned = [text for text in heard if any(word in text.lower() for word in ("eps", "norm", "rope", "scaling"))]
print(f"keras-hub {keras_hub.__version__}, transformers {transformers.__version__}:")
for name, (epsilon, factor, error) in found.items():
    print(f"  {name}: epsilon {epsilon:g} and factor {factor} read, logits off by {error:.1e}")
print("  warnings of it:", warned)
wrong = {name: error for name, (_, _, error) in found.items() if error > 1e-4}
assert list(wrong) == ["epsilon 1e-05", "epsilon 0.01", "scaling"], wrong
assert [found[name][:2] for name in wrong] == [(1e-6, None)] * 3, found
assert wrong["epsilon 0.01"] > 0.5 and wrong["scaling"] > 5, wrong
assert not warned, warned
PYTHON
