"""Matrices in groups: their values and products, models that use them, the kernels simulated, checkpoints, meshes."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jlade
from jlade import conversion
from jlade.cli import main
from jlade.conversion import load_hf, packed
from jlade.models import grouped, llama, products, sharding
from jlade.models.experts import Experts, mix, ways
from jlade.models.grouped import GroupedMatrix, pack, quantize_in_groups, unpack
from jlade.models.products import gpu, tpu
from jlade.models.quantization import is_quantized
from tests.conversion.hf_files import DEMO, assert_equal, assert_placed
from tests.models.mixture import E, assert_same_mixtures
from tests.models.products import multiply_alone
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow, tiny_llama

MOE = {"model_type": "qwen3_moe", "qk_norm": True, "intermediate_size": 0}
MOE |= {"num_experts": 4, "expert_size": 32, "experts_per_token": 2}
FORMS = "plain", "zero", "offset", "levels", "eight bits"


def random_matrix(form, inputs=128, outputs=32, group=32, dtype=np.float32):
    """Returns a matrix, and its elements in float64 by their definition."""
    rng = np.random.default_rng(0)
    groups = inputs // group, outputs
    low, high = (-127, 128) if form == "eight bits" else (-8, 8)
    codes = rng.integers(low, high, (inputs, outputs), np.int8)
    scale = rng.uniform(0.5, 1, groups).astype(dtype)
    fields = {
        "zero": {"zero": rng.integers(-8, 8, groups, np.int8)},
        "offset": {"offset": rng.normal(size=groups).astype(dtype)},
        "levels": {"levels": rng.normal(size=16).astype(np.float32)},
    }.get(form, {})
    values = fields["levels"][codes & 15].astype(np.float64) if "levels" in fields else codes.astype(np.float64)

    def of_group(array):
        return np.repeat(np.asarray(array, np.float64), group, axis=0)

    values = (values - of_group(fields.get("zero", np.zeros(groups)))) * of_group(scale)
    values += of_group(fields.get("offset", np.zeros(groups)))
    weight = codes if form == "eight bits" else pack(codes, group)
    np.testing.assert_array_equal(unpack(weight, group).reshape(codes.shape), codes)
    return jax.tree.map(jnp.asarray, GroupedMatrix(weight, scale, **fields)), values


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [64, 32 * 32, 2**18])  # two tiles of outputs, two of each group, and one
def test_values_and_products_are_those_of_the_definition(form, tile, monkeypatch):
    monkeypatch.setattr(grouped, "TILE", tile)
    monkeypatch.setattr(grouped, "WIDE", 16)
    matrix, values = random_matrix(form)
    assert (matrix.shape, matrix.group, matrix.dense_shape) == ((128, 32), 32, (32, 128))
    np.testing.assert_allclose(matrix.values(), values, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(packed.values_of(matrix), matrix.values())
    x = np.random.default_rng(1).normal(size=(2, 5, 128)).astype(np.float32)
    product = jax.jit(llama.linear)(x, matrix)
    np.testing.assert_allclose(product, x.astype(np.float64) @ values, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", [tpu, gpu])
@pytest.mark.parametrize(
    ("form", "inputs", "tokens"),
    [
        ("plain", 1024, 1),
        ("zero", 96, 5),
        ("offset", 128, 70),
        ("levels", 160, 3),
        ("eight bits", 128, 40),
        slow("plain", 5504, 130),
        slow("levels", 5504, 130),
    ],
)
def test_simulated_kernels_give_the_product(kernel, form, inputs, tokens):
    """A token, several, more than a program of a GPU takes; groups that divide no block of a TPU."""
    matrix, values = random_matrix(form, inputs, 128, 32, jnp.bfloat16)
    x = np.random.default_rng(1).normal(size=(tokens, inputs)).astype(jnp.bfloat16)
    expected = x.astype(np.float64) @ values
    product = np.asarray(multiply_alone(kernel, x, matrix, interpret=True), np.float64)
    assert np.abs(product - expected).max() < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("kernel", [tpu, gpu])
@pytest.mark.parametrize(
    ("form", "group", "outputs"),
    [("plain", 32, 128), ("levels", 16, 192), ("levels", 32, 256), ("zero", 16, 128), ("eight bits", 16, 192)],
)
def test_simulated_kernels_compute_the_values_of_plain_code(kernel, form, group, outputs):
    """The products of unit vectors are the values, rounded once. 192 outputs fill no whole blocks of a TPU."""
    matrix, _ = random_matrix(form, 96, outputs, group)
    product = multiply_alone(kernel, jnp.eye(96, dtype=jnp.bfloat16), matrix, interpret=True)
    np.testing.assert_array_equal(product, matrix.values(jnp.bfloat16))
    np.testing.assert_array_equal(product, packed.values_of(matrix).astype(jnp.bfloat16))


def test_what_a_kernel_does_not_take_is_multiplied_without_it():
    of_gpu, of_tpu = (
        "needs outputs of a multiple of 64 and groups of a power of two from 16",
        "needs 128 outputs or more",
    )
    for kernel, form, sizes, reason in (
        (gpu, "plain", (128, 96, 32), of_gpu),
        (gpu, "levels", (128, 128, 8), of_gpu),
        (gpu, "plain", (48, 128, 16), of_gpu),  # three groups
        (tpu, "plain", (128, 64, 32), of_tpu),
        (tpu, "levels", (128, 128, 8), of_tpu),
    ):
        matrix, values = random_matrix(form, *sizes)
        x = jnp.ones((3, sizes[0]), jnp.bfloat16)
        with pytest.raises(ValueError, match=f"the kernel of products {reason}"):
            multiply_alone(kernel, x, matrix)
        name = kernel.__name__.rpartition(".")[2]
        product = products.multiply(x, matrix, name)
        np.testing.assert_allclose(product, np.ones((3, sizes[0])) @ values, rtol=0.02, atol=0.5)
        with pytest.raises(ValueError, match="needs a model in"):
            multiply_alone(kernel, jnp.ones((3, sizes[0])), matrix)


def test_the_matrices_of_a_decoder_with_a_kernel_name_it():
    params = llama.quantize(tiny_llama(), 4)
    named = products.assign(params, "tpu")
    leaves = [leaf for leaf in jax.tree.leaves(named, is_leaf=is_quantized) if isinstance(leaf, GroupedMatrix)]
    assert len(leaves) == 14
    assert {leaf.implementation for leaf in leaves} == {"tpu"}
    assert products.assign(params, "plain") is params


@pytest.mark.parametrize("group", [8, 64])
def test_no_element_moves_by_more_than_a_step(group):
    """Half a step, but for the far end of a group."""
    values = np.random.default_rng(0).normal(size=(128, 32)).astype(np.float32)
    values[:group, 0] = 0
    matrix = quantize_in_groups(jnp.asarray(values), group)
    assert (matrix.group, matrix.weight.dtype, matrix.scale.dtype) == (group, jnp.uint8, jnp.bfloat16)
    steps = np.repeat(np.abs(np.asarray(matrix.scale, np.float32)), group, axis=0)
    assert (np.abs(matrix.values() - values) <= 1.05 * steps).all()
    assert not np.asarray(matrix.values())[:group, 0].any()


@pytest.mark.slow
def test_no_matrix_is_converted_whole():
    """Neither before the loop, which would keep a floating-point copy, nor, if it is large, in the loop."""
    params = llama.quantize(tiny_llama(hidden_size=512, intermediate_size=1536), 4)
    inputs, setting = jlade.prepare(params, [1], max_new_tokens=60, lookahead=None)
    program = jax.jit(jlade.decode, static_argnames="config").lower(params, inputs, setting).compile().as_text()
    assert " while(" in program
    assert "u8[256,1536]" in program
    assert "f32[512,1536]" not in program
    assert "f32[1536,512]" not in program


@pytest.mark.slow
def test_experts_are_those_of_their_values():
    keys, shapes = jax.random.split(jax.random.key(2), 3), [(8, E, 24), (8, E, 24), (8, 24, E)]
    rounded = Experts(*(quantize_in_groups(jax.random.normal(*each), 8) for each in zip(keys, shapes, strict=True)))
    assert (rounded.number, rounded.gate.shape) == (8, (8, E, 24))
    assert_same_mixtures(rounded, Experts(*(matrix.values() for matrix in rounded[:3])))


def random_experts(name, number=4, size=128):
    """Returns experts in four bits with levels, for a kernel, and those of their values."""
    levels = jnp.asarray(np.random.default_rng(3).normal(size=16), jnp.float32)

    def matrices(seed, inputs, outputs):
        rng = np.random.default_rng(seed)
        scale = rng.uniform(0.1, 0.2, (number, inputs // 32, outputs)).astype(np.float32)
        weight = rng.integers(0, 256, (number, inputs // 2, outputs), np.uint8)
        return GroupedMatrix(jnp.asarray(weight), jnp.asarray(scale), levels=levels, implementation=name)

    experts = Experts(*(matrices(seed, size, size) for seed in range(3)))
    return experts, Experts(*(each.values() for each in experts[:3]))


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_simulated_kernels_give_the_products_of_all_experts(name):
    matrices, values = random_experts(name)
    x = jax.random.normal(jax.random.key(1), (4, 5, 128), jnp.bfloat16)
    expected = jnp.einsum("nti,nio->nto", x.astype(jnp.float32), values.up)
    product = products.multiply_each(x, matrices.up, interpret=True)
    np.testing.assert_allclose(product.astype(jnp.float32), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("name", ["gpu", "tpu"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_simulated_kernels_read_the_experts_that_tokens_chose(name, tokens, monkeypatch):
    """Of experts on other devices, and of those that no token chose, the matrices would make everything NaN."""
    experts, values = random_experts(name)
    simulated = functools.partial(products.multiply_tiles, interpret=True)
    monkeypatch.setattr(products, "multiply_tiles", simulated)
    x = jax.random.normal(jax.random.key(3), (tokens, 128), jnp.bfloat16)
    chosen = np.tile(np.array([[1, 3]], np.int32), (tokens, 1))
    chosen[tokens // 2 :] = [3, 4]  # 4 is on another device
    weights = np.where(chosen == 4, 0, 0.5).astype(np.float32)
    unused = jnp.array([0, 2])
    poisoned = Experts(*(each.replace(scale=each.scale.at[unused].set(jnp.nan)) for each in experts[:3]))
    expected = ways.all_with_all(x.astype(jnp.float32), chosen, weights, values, "silu")
    mixed = mix(x, jnp.asarray(chosen), jnp.asarray(weights), poisoned, "silu")
    error = np.abs(mixed.astype(jnp.float32) - expected)
    assert error.max() < 0.02 * np.abs(expected).max()


def test_loading_in_four_bits_equals_rounding_after_loading(demo, tmp_path):
    expected = llama.quantize(demo[0], 4)
    assert_equal(load_hf(DEMO, "float32", bits=4), expected)
    conversion.save(expected, tmp_path / "own")
    assert_equal(jlade.load(tmp_path / "own", "float32")[0], expected)
    for bits in (4, 8):
        assert_equal(jlade.load(tmp_path / "own", "float32", bits=bits)[0], expected)
    with pytest.raises(ValueError, match="int8=True is bits=8, got bits=4 too: give one"):
        jlade.load(DEMO, bits=4, int8=True)
    with pytest.raises(ValueError, match="bits must be 4, 8, 'file' or None, got 2"):
        jlade.load(DEMO, bits=2)


@pytest.mark.slow
def test_the_command_converts_and_inspects_four_bits(demo, tmp_path, capsys):
    target = tmp_path / "small"
    assert main(["convert", str(DEMO), str(target), "--bits", "4"]) == 0
    assert "5,475,584 parameters, 3.6 MB of 4 bits and int8 and bfloat16" in capsys.readouterr().out
    assert main(["inspect", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    loaded, _ = jlade.load(target)
    assert facts["memory"]["kinds"] == ["4 bits", "int8"]
    assert facts["memory"]["weights_bytes"] == sum(x.nbytes for x in jax.tree.leaves(loaded))
    assert facts["parameters"] == 5_475_584
    assert_equal(loaded, llama.quantize(demo[0], 4))


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({QUERY: None}, rf"own: 1 tensors are missing: {QUERY}$"),
        ({f"{QUERY}_scale": None}, rf"own: 1 tensors are missing: {QUERY}_scale$"),
        ({QUERY: np.zeros((9, 24), np.uint8)}, rf"{QUERY} has shape \(9, 24\); .* implies \(8, 24\)"),
        ({QUERY: np.zeros((8, 24), np.float32)}, rf"{QUERY} has shape \(8, 24\); .* implies \(16, 24\)"),
        ({f"{QUERY}_scale": np.ones((3, 24), np.float32)}, rf"{QUERY}_scale has 3 groups, .* do not divide 16 inputs"),
        ({f"{QUERY}_scale": np.ones((1, 24), np.int8)}, rf"{QUERY}_scale is of type I8; accepted are F64, F32"),
        ({f"{QUERY}_levels": np.ones(15, np.float32)}, rf"{QUERY}_levels has shape \(15,\); .* implies \(16,\)"),
        (
            {"model.norm.weight_zero": np.ones(3, np.float32)},
            r"1 tensors are not of this model: model.norm.weight_zero",
        ),
    ],
    ids=str,
)
def test_broken_matrices_are_refused(changes, message, tmp_path):
    params = llama.quantize(tiny_llama(), 4)
    conversion.save(params, tmp_path / "own")
    file = tmp_path / "own" / "jlade.safetensors"
    arrays = load_file(file) | changes
    save_file({name: array for name, array in arrays.items() if array is not None}, file)
    with pytest.raises(ValueError, match=message):
        conversion.load(tmp_path / "own")


def test_scales_that_are_not_finite_are_named(tmp_path):
    params = llama.quantize(tiny_llama(), 4)
    conversion.save(params, tmp_path / "own")
    file = tmp_path / "own" / "jlade.safetensors"
    scale = np.ones((1, 24), np.float32)
    scale[0, 5] = np.nan
    save_file(load_file(file) | {f"{QUERY}_scale": scale}, file)
    with pytest.warns(UserWarning, match=rf"NaN or infinite values in {QUERY} \(1 of 24 rows: 5\)$"):
        conversion.load(tmp_path / "own")


@pytest.mark.parametrize("experts", [{}, MOE], ids=bool)
def test_a_mesh_divides_groups(experts, tmp_path):
    params = tiny_llama(**{"hidden_size": 32, "intermediate_size": 48} | experts)
    conversion.save(params, tmp_path / "floats")
    mesh = jlade.make_mesh(1, 1, 2)
    expected = llama.quantize(params, 4, shards=2)
    found = conversion.load(tmp_path / "floats", "float32", bits=4, mesh=mesh)
    assert_placed(found, expected, mesh)
    conversion.save(expected, tmp_path / "own")
    assert_placed(conversion.load(tmp_path / "own", "float32", mesh=mesh), expected, mesh)
    texts = [
        jlade.generate(each, [[3, 1, 4], [1, 5]], max_new_tokens=20, lookahead=PAPER, eos_ids=(), mesh=where)
        for each, where in ((found, mesh), (expected, None))
    ]
    assert_same_texts(*texts)


def test_groups_that_a_mesh_would_cut_are_divided_when_they_are_read(tmp_path):
    """Arrays are not: only a loader can give the parts of a group their scale."""
    params = llama.quantize(tiny_llama(), 4)  # 24 inputs of `down` in groups of 8
    conversion.save(params, tmp_path / "own")
    mesh = jlade.make_mesh(1, 1, 2)
    found = conversion.load(tmp_path / "own", "float32", mesh=mesh)
    assert {layer.mlp.down.group for layer in found.layers} == {4}
    np.testing.assert_array_equal(found.layers[0].mlp.down.values(), params.layers[0].mlp.down.values())
    message = (
        r"mesh divides 24 inputs of a matrix among 2 devices, and not its 3 groups of 8: load the model in floating"
    )
    with pytest.raises(ValueError, match=message):
        sharding.put(params, sharding.mesh_for(params.config, mesh))
