"""The examples run: the decoder of a model of one's own, the batch job, the notebook, the training, the rollouts."""

import importlib.util
import json
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

pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    return load("flax_decoder")


@pytest.fixture(scope="module")
def small(small_demo):
    return jlade.load(small_demo, "float32")


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


def test_a_batch_job_that_was_stopped_goes_on(small, tmp_path):
    batch = load("batch")
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = ["def f(", "class A:", "1 " * 2000, "import ", "é"]
    prompts.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts)))
    settings = {"rows": 2, "max_new_tokens": 12, "temperature": 0.8}
    assert batch.complete(prompts, answers, *small, **settings) == 5
    whole = answers.read_bytes()
    records = [json.loads(line) for line in whole.splitlines()]
    assert [record["prompt"] for record in records] == texts
    assert "leaves no room for a new one" in records[2]["error"]
    for key, record in zip(jax.random.split(jax.random.key(0), 5), records, strict=True):
        if "error" in record:
            continue
        alone = jlade.generate(
            small[0],
            record["prompt"],
            tokenizer=small[1],
            key=key,
            sampling=jlade.SamplingConfig(temperature=0.8),
            max_new_tokens=12,
        )
        assert (record["text"], record["finish_reason"]) == (alone.text[0], alone.finish_reason[0])

    assert batch.complete(prompts, answers, *small, **settings) == 0
    answers.write_bytes(whole[: whole.rfind(b"{") + 9])  # stopped within the last line
    assert batch.complete(prompts, answers, *small, **settings) == 1
    assert answers.read_bytes() == whole
    prompts.write_text(prompts.read_text().replace("def f(", "def g("))
    with pytest.raises(ValueError, match="answers to other prompts"):
        batch.complete(prompts, answers, *small, **settings)


def test_the_notebook_runs_and_its_texts_are_the_same(small, monkeypatch, capsys):
    """Its cells in their order, without the lines for IPython."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the test extra installs it")
    pyplot.switch_backend("Agg")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    monkeypatch.setattr(jlade, "demo", lambda: small)
    cells = json.loads((EXAMPLES / "lookahead.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], cell["id"]
            lines = [line for line in cell["source"] if not line.startswith("%")]
            exec(compile("".join(lines), cell["id"], "exec"), namespace)
    assert len({cell["id"] for cell in cells}) == len(cells)
    printed = capsys.readouterr().out
    assert str(jax.devices()[0]) in printed
    assert [line.split()[-1] for line in printed.splitlines()[-3:]] == ["True"] * 3
    steps = [int(label.get_text().split()[1]) for label in pyplot.gca().get_legend().get_texts()]
    pyplot.close()
    plain, wide, _ = steps
    assert plain == namespace["NEW_TOKENS"] > wide


def test_training_and_generation_share_arrays_on_a_mesh(monkeypatch, capsys):
    """The texts are those of the trainer's own forward pass, and the program runs."""
    training = load("training")
    mesh, rng = jax.make_mesh((4,), (training.AXIS,), devices=jax.devices()[:4]), np.random.default_rng(0)
    along = jax.sharding.PartitionSpec(training.AXIS)
    losses = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.set_mesh(mesh):
        weights = training.make_weights(jax.random.key(0))
        for _ in range(2):
            texts = jax.device_put(rng.integers(97, 105, (4, 17), np.int32), along)
            weights, loss = training.update(weights, texts)
            losses.append(float(loss))
            prompts = rng.integers(0, 256, (4, 6), np.int32)
            out = jlade.generate(jlade.adopt(weights, training.CONFIG), prompts, max_new_tokens=8)
            whole = jax.reshard(weights, jax.sharding.PartitionSpec())
            tokens = np.concatenate([prompts, out.tokens], axis=1)
            logits = jax.jit(training.forward)(whole, jax.device_put(tokens, along))
            np.testing.assert_array_equal(np.argmax(logits, axis=-1)[:, 5:-1], out.tokens)
        assert losses[1] < losses[0]
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        training.main(num_rounds=1, num_updates=2, num_tokens=8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("round 1: loss ")
    assert lines[1] == "2 different texts on 2 devices"


def test_a_cluster_of_tunix_makes_lookahead_rollouts(capsys):
    pytest.importorskip("tunix", reason="google-tunix is not installed: pip install 'jlade[tunix]'")
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        runpy.run_path(str(EXAMPLES / "rl_rollout.py"), run_name="__main__")
    first, second = (float(line.split()[4]) for line in capsys.readouterr().out.splitlines()[:2])
    assert second > 1.5 * first, "the same weights and seed: the earlier rollouts are drafts of the same texts"
