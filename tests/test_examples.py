"""The decoder of the example passes the check and generates the text of its model."""

import importlib.util
import pathlib
import runpy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlade
from jlade.testing import check_decoder

PATH = pathlib.Path(__file__).parents[1] / "examples" / "flax_decoder.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flax_decoder", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example):
    model = example.GPT(vocab_size=17, max_positions=64, width=16, heads=2, num_layers=1, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: 3 * x, nnx.state(model)))  # larger weights give a text with some variety
    return model


def test_the_decoder_passes_the_check(example, model):
    check_decoder(*example.decoder_and_params(model), reference=lambda tokens: model(tokens[None])[0])


def test_lookahead_generates_the_text_of_the_model(example, model):
    text = np.zeros((1, 64), np.int32)
    text[0, :3] = [3, 1, 4]
    run = nnx.jit(lambda model, tokens: model(tokens))
    for i in range(3, 64):
        text[0, i] = jnp.argmax(run(model, text)[0, i - 1])
    assert len(set(text[0].tolist())) > 4

    decoder, params = example.decoder_and_params(model)
    for lookahead in (None, jlade.LookaheadConfig.paper(window_size=4, ngram_size=4, guess_set_size=3)):
        out = jlade.generate(params, [3, 1, 4], decoder=decoder, max_new_tokens=61, lookahead=lookahead)
        assert out.tokens[0].tolist() == text[0, 3:].tolist()
    assert out.compression[0] > 1


def test_a_cluster_of_tunix_makes_lookahead_rollouts(capsys):
    pytest.importorskip("tunix", reason="google-tunix is not installed: pip install 'jlade[tunix]'")
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        runpy.run_path(str(PATH.with_name("rl_rollout.py")), run_name="__main__")
    first, second = (float(line.split()[4]) for line in capsys.readouterr().out.splitlines()[:2])
    assert second > 1.5 * first, "the same weights and seed: the earlier rollouts are drafts of the same texts"
