"""Every family of the table against transformers: its logits, its texts, and its checkpoints in every format."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

import jlade
from jlade import conversion
from jlade.conversion import load_hf, save_hf
from jlade.models.llama import quantize
from tests.conversion.hf_files import assert_same_arrays
from tests.families import ROWS, checkpoint, class_of
from tests.forward import run_blocks, run_branches
from tests.tiny import PAPER, slow_but

# transformers writes settings of generation without the end token of some configurations.
pytestmark = pytest.mark.filterwarnings("ignore:.*has no eos_token_id")

# Norms, caps, windows, rotary by layer, parallel residuals, experts, sinks, latents and recurrent layers come once.
QUICK = ("llama, tied", "llama, llama3", "qwen2", "llama, proportional", "gemma2", "cohere2", "smollm3", "phimoe")
QUICK += ("gemma4_text, embeddings of layers", "gpt_oss", "deepseek_v3", "falcon, 40B", "qwen3_next", "falcon_h1")
QUICK += ("granitemoehybrid, experts", "lfm2", "nemotron_h, experts")
QUANTIZED = ("gemma", "gemma4_text", "phi3", "cohere2", "starcoder2", "stablelm", "phimoe", "llama4_text")
QUANTIZED += ("qwen2_moe", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "falcon, 40B", "nemotron_h, experts of a latent")
QUANTIZED += ("kimi_linear", "bailing_hybrid")
GEMMA_4_FORMS = ("gemma4_text", "gemma4_text, experts", "gemma4_text, embeddings of layers")
DECODED = ("mistral, short window", "gemma2", "qwen3_5_text", *GEMMA_4_FORMS, "gpt_oss", "deepseek_v3")
DECODED += ("nemotron_h, experts", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "bailing_hybrid")
NEW_TOKENS = 64  # more than every window
PROMPT_LENGTHS = (17, 9)


@pytest.fixture(scope="module", params=slow_but(ROWS, *QUICK))
def case(request):
    return request.param


@pytest.fixture(scope="module")
def models(case, tmp_path_factory):
    """A random model of transformers, and the parameters that jlade loads from its checkpoint."""
    return checkpoint(*ROWS[case], tmp_path_factory.mktemp("checkpoint"))


def logits_of(model, texts):
    import torch

    with torch.no_grad():
        return model(torch.tensor(texts, dtype=torch.long)).logits.numpy()


def test_logits_are_those_of_transformers(models, case):
    """Of a text longer than every window and most scaled lengths, with branches in the midst of it."""
    model, params = models
    half = 8 if params.config.recurrent_layers else 19  # rounding grows along the text of a recurrent layer
    text, branch = np.random.default_rng(1).integers(0, 50, (2, 5 * half), dtype=np.int32)
    shared, branched = text[: 2 * half], slice(2 * half, 3 * half)
    branch[: 2 * half] = shared
    wanted, other = logits_of(model, np.stack([text, branch]))
    prefix, branches, rest = run_branches(
        params, shared, np.stack([branch[branched], text[branched]]), text[3 * half :]
    )
    np.testing.assert_allclose(np.concatenate([prefix[0], branches[0, half:], rest[0]]), wanted, atol=2e-4)
    np.testing.assert_allclose(branches[0, :half], other[branched], atol=2e-4)
    if case in QUANTIZED:
        rounded = run_blocks(quantize(params), text[None], [len(text)])[0]
        assert np.mean(np.argmax(rounded, axis=-1) == np.argmax(wanted, axis=-1)) > 0.8


def test_every_format_keeps_the_parameters(models, tmp_path):
    model, params = models
    for save, load, name in ((save_hf, load_hf, "hf"), (conversion.save, conversion.load, "own")):
        save(params, tmp_path / name)
        again = load(tmp_path / name, "float32", strict=True)
        assert dataclasses.replace(again.config, eos_ids=params.config.eos_ids) == params.config
        assert_same_arrays(again, params)
    assert_same_arrays(jlade.adopt(load_file(tmp_path / "hf" / "model.safetensors"), tmp_path / "hf"), params)
    assert_same_arrays(load_hf(tmp_path / "hf", "float32", mesh=jlade.make_mesh(model=2)), params)
    theirs, report = class_of(params.config.family).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    text = np.random.default_rng(1).integers(0, 50, (1, 40))
    np.testing.assert_allclose(logits_of(theirs, text), logits_of(model, text), atol=1e-5)
    if params.config.num_experts:  # transformers 5 holds experts in an arrangement of its own, and can save that
        model.save_pretrained(tmp_path / "memory", save_original_format=False)
        again = load_hf(tmp_path / "memory", "float32", strict=True)
        assert again.config == params.config
        assert_same_arrays(again, params)


@pytest.mark.slow
@pytest.mark.parametrize("case", DECODED, indirect=True)
def test_texts_are_those_of_transformers(models):
    import torch

    model, params = models
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 50, length).tolist() for length in PROMPT_LENGTHS]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    out = jlade.generate(params, prompts, max_new_tokens=NEW_TOKENS, lookahead=PAPER, eos_ids=())
    assert out.tokens.tolist() == expected
