#!/usr/bin/env bash
# Guess: Phi-3.5-MoE computes the same in llama.cpp as in transformers, as other families do once they are converted.
# Seen: the logits differ from the first token on, by several deviations. llama.cpp normalises by root mean squares and
# adds the biases, where transformers subtracts the mean too; and it takes the two largest of a softmax, where the router
# of Phi-MoE draws each expert by a masked softmax of its own. For a LLaMA of these sizes both agree to a hundredth.
# Building llama.cpp takes about ten minutes on two cores.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 gguf==0.19.0 sentencepiece==0.2.1
"$folder/venv/bin/pip" install --quiet llama-cpp-python==0.3.36
"$folder/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$folder" llama-cpp-python==0.3.36
mkdir "$folder/source" && tar xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder/source" --strip-components=1
"$folder/venv/bin/python" - "$folder/source/vendor/llama.cpp" "$folder" <<'PYTHON'
import json
import logging
import pathlib
import sys

source, folder = map(pathlib.Path, sys.argv[1:])
sys.path[:0] = [str(source), str(source / "gguf-py")]
import conversion
import gguf
import llama_cpp
import numpy as np
import torch
import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None}
SIZES |= {"initializer_range": 0.3, "bos_token_id": None, "pad_token_id": None}
TOKENS = list(range(3, 27))
quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(quiet, None)
logging.disable(logging.WARNING)


def write_no_tokens(self) -> None:
    self.gguf_writer.add_tokenizer_model("none")
    self.gguf_writer.add_vocab_size(SIZES["vocab_size"])


def difference(name: str, architecture: str, **settings) -> float:
    """Returns the largest difference of logits, in standard deviations, between transformers and llama.cpp."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **settings))
    directory, file = folder / name, folder / f"{name}.gguf"
    model.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"architectures": [architecture]}))
    converter = conversion.get_model_class(architecture)
    converter.set_vocab = write_no_tokens
    with torch.inference_mode():
        converter(directory, gguf.LlamaFileType.ALL_F32, file, eager=True).write()
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    loaded = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 64
    context = llama_cpp.llama_init_from_model(loaded, settings)
    assert loaded and context
    batch = llama_cpp.llama_batch_init(len(TOKENS), 0, 1)
    batch.n_tokens = len(TOKENS)
    for i, token in enumerate(TOKENS):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    assert llama_cpp.llama_decode(context, batch) == 0
    shape = (SIZES["vocab_size"],)
    rows = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(TOKENS))]
    logits = np.stack([np.ctypeslib.as_array(row, shape) for row in rows])
    return float(np.abs(logits - expected).max() / expected.std())


plain = difference("Llama", "LlamaForCausalLM")
of_experts = {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}
experts = difference("Phimoe", "PhiMoEForCausalLM", original_max_position_embeddings=256, **of_experts)
print(f"llama-cpp-python {llama_cpp.__version__}, transformers {transformers.__version__}:", end=" ")
print(f"logits differ by {plain:.5f} deviations for LLaMA and by {experts:.2f} for Phi-MoE")
assert plain < 0.05 and experts > 1, (plain, experts)
PYTHON
