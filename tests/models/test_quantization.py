"""Matrices in eight and four bits: bounds on their error, models that use them, compiled programs, checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade import conversion
from jlade.cli import main
from jlade.conversion import load_hf, save_hf
from jlade.models import grouped, llama, quantization
from jlade.models.grouped import GroupedMatrix, quantize_in_groups
from jlade.models.quantization import Int8Matrix, is_quantized, quantize_matrix
from tests import plain_llama
from tests.conversion.hf_files import DEMO, assert_equal
from tests.forward import run_blocks
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow, tiny_llama

BIASES = {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
ALL = {"tie_embeddings": True, "qk_norm": True} | BIASES


def in_floating_point(params):
    """Returns the parameters with matrices of few bits converted to floating point."""

    def converted(leaf):
        if isinstance(leaf, GroupedMatrix):
            return leaf.values().T if len(leaf.shape) == 2 else leaf.values()
        return leaf[jnp.arange(len(leaf.scale))] if is_quantized(leaf) else leaf

    return jax.tree.map(converted, params, is_leaf=is_quantized)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-3, 1.0, 1e30, 3e38]), min_size=4, max_size=4),
    st.sampled_from([1, 3, 40]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_no_element_moves_by_more_than_half_a_step(seed, magnitudes, columns, dtype):
    rng = np.random.default_rng(seed)
    rows = rng.uniform(-1, 1, (len(magnitudes), columns)) * np.array(magnitudes)[:, None]
    largest = float(jnp.finfo(dtype).max)
    matrix = jnp.asarray(np.clip(rows, -largest, largest), dtype)
    result = quantize_matrix(matrix)
    weight, scale = np.asarray(result.weight, np.float64), np.asarray(result.scale, np.float64)
    assert result.weight.dtype == jnp.int8
    assert result.scale.dtype == jnp.float32
    assert np.abs(weight).max() <= 127
    assert (scale > 0).all()
    error = np.abs(np.asarray(matrix, np.float64) - weight * scale[:, None])
    assert (error <= scale[:, None] / 2 * (1 + 1e-5)).all()
    used = scale != 1  # the others are zero, or flushed to zero
    assert (np.abs(weight[used]).max(axis=1) == 127).all()
    assert not weight[~used & (np.abs(np.asarray(matrix, np.float64)).max(axis=1) < 1e-36)].any()


def test_rows_that_are_not_finite_stay_so():
    matrix = jnp.array([[1.0, jnp.nan], [1.0, jnp.inf], [1.0, 2.0]])
    assert np.isfinite(quantize_matrix(matrix)[jnp.arange(3)]).all(axis=1).tolist() == [False, False, True]
    matrix = jnp.where(jnp.eye(64, dtype=bool), jnp.nan, jnp.ones((64, 64), jnp.float32))
    assert not np.isfinite(quantize_matrix(matrix).scale).any()


@pytest.mark.parametrize("rows", [3, 100, 256, 700])  # one chunk, several chunks, several that overlap
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_equals_that_of_the_floating_point_matrix(rows, dtype, monkeypatch):
    monkeypatch.setattr(quantization, "ROWS", 128)
    rng = np.random.default_rng(rows)
    matrix = quantize_matrix(jnp.asarray(rng.normal(size=(rows, 48)), dtype))
    x, bias = (jnp.asarray(rng.normal(size=shape), dtype) for shape in [(2, 5, 48), (rows,)])
    got = jax.jit(llama.linear)(x, matrix, bias)
    floating_point = np.asarray(matrix.weight, np.float64) * np.asarray(matrix.scale, np.float64)[:, None]
    expected = np.asarray(x, np.float64) @ floating_point.T + np.asarray(bias, np.float64)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=1e-4 if dtype == "float32" else 0.15)


@pytest.mark.slow
def test_every_feature_equals_the_model_of_its_rounded_weights():
    quantized = llama.quantize(tiny_llama(**ALL))
    assert {x.ndim for x in jax.tree.leaves(quantized) if x.dtype == jnp.int8} == {2}
    assert {x.ndim for x in jax.tree.leaves(quantized) if x.dtype != jnp.int8} == {1}
    tokens = np.random.default_rng(0).integers(0, 13, (2, 20), dtype=np.int32)
    expected = run_blocks(in_floating_point(quantized), tokens, [20])
    np.testing.assert_allclose(run_blocks(quantized, tokens, [20]), expected, atol=3e-5)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize(("bits", "kinds"), [(8, ["int8"]), (4, ["4 bits", "int8"])])
def test_equals_the_plain_llama_with_the_rounded_weights(bits, kinds, changes):
    quantized = llama.quantize(tiny_llama(**changes), bits)
    assert isinstance(quantized.embedding, Int8Matrix) == bool(changes)
    assert quantization.kinds(quantized) == kinds
    assert quantization.fewest_bits(quantized) == bits
    tokens = np.random.default_rng(0).integers(0, 13, (1, 20), dtype=np.int32)
    expected = [plain_llama.logits(in_floating_point(quantized), text) for text in tokens]
    np.testing.assert_allclose(run_blocks(quantized, tokens, [20]), expected, atol=3e-5)
    assert_equal(llama.quantize(quantized, bits), quantized)
    with pytest.raises(ValueError, match="bits must be 4, 8 or None, got 3"):
        llama.quantize(quantized, 3)


@pytest.mark.parametrize(
    ("bits", "changes", "temperature"),
    [(4, {"tie_embeddings": True}, 0.0), slow(4, {"tie_embeddings": True}, 0.8), slow(8, ALL, 0.0)],
)
def test_lookahead_equals_plain_decoding(bits, changes, temperature):
    params = llama.quantize(tiny_llama(3, **changes), bits)
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7]]
    options = {"sampling": jlade.SamplingConfig(temperature=temperature), "key": jax.random.key(1)}
    plain, ahead = (
        jlade.generate(params, prompts, max_new_tokens=40, lookahead=lookahead, eos_ids=(), **options)
        for lookahead in (None, PAPER)
    )
    assert_same_texts(ahead, plain)
    assert ahead.steps.max() < plain.steps.max()


@pytest.mark.slow
def test_no_matrix_is_converted_whole():
    """Neither before the loop, which would keep a floating-point copy, nor, if it is large, in the loop."""
    params = llama.quantize(tiny_llama(vocab_size=1300, hidden_size=24, intermediate_size=1200))
    inputs, setting = jlade.prepare(params, [1], max_new_tokens=60, lookahead=None)
    program = jax.jit(jlade.decode, static_argnames="config").lower(params, inputs, setting).compile().as_text()
    assert " while(" in program
    assert "s8[1200,24]" in program
    assert "f32[1300,24]" in program  # the embedding, which is not quantized
    assert "f32[1200,24]" not in program
    assert "s8[24,1200]" in program
    assert "f32[24,1200]" not in program[program.index("\nENTRY ") :]


@pytest.mark.slow
def test_the_demo_model_agrees_with_itself(demo, golden):
    """On 0.998 of the tokens of 26 texts in benchmarks/quantization.py; this test reads one, with its prompt."""
    params = demo[0]
    quantized = llama.quantize(params)
    prompt, greedy = next(iter(golden.values()))
    tokens = np.array([prompt["ids"] + greedy], np.int32)
    chosen, own = (run_blocks(p, tokens, [tokens.shape[1]]).argmax(axis=-1) for p in (quantized, params))
    assert (chosen == own).mean() > 0.95
    assert sum(x.nbytes for x in jax.tree.leaves(quantized)) < 0.26 * sum(x.nbytes for x in jax.tree.leaves(params))


def test_loading_in_int8_equals_quantizing_after_loading(demo, tmp_path):
    assert_equal(load_hf(DEMO, "float32", bits=8), llama.quantize(demo[0]))
    untied = tiny_llama()
    conversion.save(untied, tmp_path / "own")
    save_hf(untied, tmp_path / "hf")
    for directory in ("own", "hf"):
        assert_equal(jlade.load(tmp_path / directory, "float32", bits=8)[0], llama.quantize(untied))


@pytest.mark.parametrize("changes", [BIASES, {"tie_embeddings": True, "qk_norm": True}], ids=["biases", "tied, norms"])
def test_int8_comes_back_from_jlades_own_checkpoint(changes, tmp_path):
    params = llama.quantize(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_llama(**changes)))
    conversion.save(params, tmp_path / "own")
    assert_equal(conversion.load(tmp_path / "own", "auto"), params)
    assert conversion.load(tmp_path / "own", "float32", bits=8).norm.dtype == jnp.float32


def test_int8_is_not_written_for_transformers(tmp_path):
    with pytest.raises(ValueError, match=r"params must be in floating point, got matrices in int8"):
        save_hf(llama.quantize(tiny_llama()), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_converts_inspects_and_runs_int8(demo, tmp_path, capsys):
    target = tmp_path / "int8"
    assert main(["convert", str(DEMO), str(target), "--int8"]) == 0
    assert "5,475,584 parameters, 5.6 MB of int8 and bfloat16" in capsys.readouterr().out
    assert main(["inspect", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    loaded, _ = jlade.load(target)
    assert facts["memory"]["weights_bytes"] == sum(x.nbytes for x in jax.tree.leaves(loaded))
    assert facts["files"]["tensor_bytes"].keys() == {"int8", "bfloat16", "float32"}
    assert_equal(loaded, llama.quantize(demo[0]))
    (tmp_path / "prompt.txt").write_text("def read_config(path):")
    run = ["generate", str(tmp_path / "prompt.txt"), "--int8", "--max-new-tokens", "30", "--json", "--logprobs"]
    run += ["--no-lookahead"]
    assert main(run) == 0
    settings = {"tokenizer": demo[1], "max_new_tokens": 30, "lookahead": None, "logprobs": True}
    expected = jlade.generate(llama.quantize(demo[0]), "def read_config(path):", **settings)
    np.testing.assert_array_equal(json.loads(capsys.readouterr().out)["logprobs"], expected.logprobs[0])
    for arguments, what in ([str(DEMO), "--int8"], "--bits 8"), ([str(target)], str(target)):
        with pytest.raises(SystemExit):
            main(["convert", *arguments, str(tmp_path / "new"), "--to", "hf"])
        assert f"--to hf writes floating point alone, and {what} has matrices in int8" in capsys.readouterr().err


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-3, 1.0, 1e30, 1e38]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_four_bits_are_near_in_every_group(seed, magnitude, shift, dtype):
    rng = np.random.default_rng(seed)
    matrix = jnp.asarray(magnitude * (rng.uniform(-1, 1, (32, 5)) + shift / 2), dtype)
    result = quantize_in_groups(matrix, 16)
    wanted, got = (np.asarray(each, np.float64).reshape(2, 16, 5) for each in (matrix, result.values()))
    assert result.weight.dtype == jnp.uint8
    assert result.shape == matrix.shape
    spread, largest = np.ptp(wanted, axis=1, keepdims=True), np.abs(wanted).max(axis=1, keepdims=True)
    # The ends of the range may be a step away; the offset is rounded to bfloat16.
    assert (np.abs(got - wanted) <= spread / 14 + largest / 2**8 + 1e-37).all()
    # On average better than the nearest of 16 numbers evenly from the least to the largest
    assert (
        np.square(got - wanted).mean()
        <= np.square(spread / 15).mean() / 12 * 1.5 + np.square(largest / 2**8).mean() + 1e-74
    )


def test_groups_that_are_not_finite_stay_so_in_four_bits():
    matrix = np.ones((16, 4), np.float32)
    matrix[3, 0], matrix[9, 1], matrix[9, 2] = np.nan, np.inf, -np.inf
    finite = np.isfinite(quantize_in_groups(jnp.asarray(matrix), 8).values()).reshape(2, 8, 4)
    np.testing.assert_array_equal(finite.any(axis=1), [[False, True, True, True], [True, False, False, True]])
    np.testing.assert_array_equal(finite.all(axis=1), finite.any(axis=1))


def test_an_offset_and_outliers_cost_little():
    """Rounding to multiples of one scale alone would waste half of the codes on numbers of one sign."""
    rng = np.random.default_rng(0)
    matrix = rng.uniform(0, 1, (64, 50)).astype(np.float32)
    error = np.square(np.asarray(quantize_in_groups(jnp.asarray(matrix), 64).values()) - matrix).mean()
    assert error < (1 / 15) ** 2 / 12


def test_four_bits_of_normal_numbers_lose_little():
    """Scales that are not fitted lose 0.0080 of the mean square, and multiples of one scale 0.0090."""
    matrix = jax.random.normal(jax.random.key(0), (512, 64))
    error = jnp.mean(jnp.square(quantize_in_groups(matrix, 64).values() - matrix))
    assert error < 0.0071


def test_the_largest_matrices_are_rounded_without_many_copies():
    matrix = jax.ShapeDtypeStruct((4096, 14336), jnp.float32)
    program = quantize_in_groups.lower(matrix, 64).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.5 * 4 * matrix.size


@pytest.mark.parametrize("codes", [jnp.uint8, jnp.int8])
@pytest.mark.parametrize("fields", [("offset",), ("zero",), ("zero", "offset", "levels")], ids=str)
def test_products_with_zeros_and_offsets_are_those_of_the_elements(codes, fields, monkeypatch):
    monkeypatch.setattr(grouped, "TILE", 2**10)  # several tiles
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 200, (64 if codes == jnp.uint8 else 128, 40)).astype(codes)
    of_groups = {name: jnp.asarray(rng.normal(size=(4, 40)), jnp.float32) for name in ("scale", "zero", "offset")}
    of_groups["levels"] = jnp.asarray(rng.normal(size=16), jnp.float32)
    matrix = grouped.GroupedMatrix(jnp.asarray(weight), **{name: of_groups[name] for name in ("scale", *fields)})
    x = jnp.asarray(rng.normal(size=(3, 128)), jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(matrix.values(), np.float64)
    np.testing.assert_allclose(grouped.multiply(x, matrix), expected, atol=1e-5 * np.abs(expected).max())
