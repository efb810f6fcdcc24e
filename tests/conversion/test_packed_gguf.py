"""Matrices of GGUF files in the four or eight bits that the files hold, against the package gguf."""

import json
import operator

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import conversion
from jlade.cli import main
from jlade.conversion import load_gguf, packed
from jlade.conversion.checkpoint import loaded_shapes
from jlade.conversion.gguf import GGUF, read
from jlade.conversion.gguf_blocks import KINDS
from jlade.models.grouped import is_grouped
from jlade.models.quantization import quantize
from tests.conversion.gguf_files import WIDE, convert, halves_apart, reference, write, write_chat
from tests.conversion.hf_files import assert_equal, assert_placed, assert_same_arrays
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow

IN_EIGHT = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")  # a byte has one of their codes


def values(matrix):
    """Returns the elements [out, in] float32, or [N, in, out] of experts."""
    elements = packed.values_of(jax.tree.map(np.asarray, matrix))
    return elements if elements.ndim == 3 else elements.T


def dequantized(params):
    """Returns the parameters with the values of matrices in groups in their place."""

    def dense(leaf):
        return jnp.asarray(values(leaf)) if is_grouped(leaf) else leaf

    return jax.tree.map(dense, params, is_leaf=is_grouped)


@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_those_of_the_gguf_package_bit_for_bit(kind, tmp_path):
    file = write(tmp_path / "model.gguf", kind=kind, **WIDE)
    params, expected = load_gguf(file, "float32", bits=8), reference(file)
    (layer,) = params.layers
    names = {f"attention.{name}": f"attn_{name[0]}" for name in ("query", "key", "value")}
    names |= {"attention.output": "attn_output"}
    names |= {"mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down"}
    matrices = {f"blk.0.{name}.weight": operator.attrgetter(field)(layer) for field, name in names.items()}
    for name, matrix in (matrices | {"output.weight": params.output}).items():
        wanted = expected[name]
        if "attn_q" in name or "attn_k" in name:
            wanted = halves_apart(wanted, 32)
        assert matrix.weight.dtype == (jnp.int8 if kind in IN_EIGHT else jnp.uint8)
        assert values(matrix).tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert isinstance(params.embedding, jax.Array)
    if kind not in ("Q6_K", "Q8_0"):
        assert_equal(load_gguf(file, "float32", bits=4), params)
    else:  # four bits are too few for the codes of the file
        rounded = load_gguf(file, "float32", bits=4).layers[0].mlp.gate
        assert_same_arrays(rounded, quantize(load_gguf(file, "float32").layers[0].mlp.gate, 4))


@pytest.mark.parametrize("bits", [8, slow(4), "file"])
def test_other_types_are_rounded_or_stay_in_floating_point(bits, tmp_path):
    kinds = {"blk.0.ffn_up.weight": "IQ3_S", "blk.0.ffn_down.weight": "F16", "token_embd.weight": "BF16"}
    file = write(tmp_path / "model.gguf", kind="Q4_0", kinds=kinds, tied=True, **WIDE)
    params, plain = (load_gguf(file, "float32", bits=each) for each in (bits, None))
    (layer,), (dense,) = params.layers, plain.layers
    for matrix, wanted in ((layer.mlp.up, dense.mlp.up), (layer.mlp.down, dense.mlp.down)):
        assert_same_arrays(matrix, wanted if bits == "file" else quantize(wanted, bits))
    assert_same_arrays(params.embedding, plain.embedding if bits == "file" else quantize(plain.embedding, 8))
    np.testing.assert_array_equal(values(layer.mlp.gate), dense.mlp.gate)


@pytest.mark.parametrize(("kind", "vocab", "bits"), [("Q8_0", 48, 4), slow("Q6_K", 51, "file"), slow("Q4_1", 51, 8)])
def test_a_tied_embedding_is_that_of_the_file_in_both_its_places(kind, vocab, bits, tmp_path):
    file, mesh = write(tmp_path / "model.gguf", kind=kind, tied=True, vocab=vocab, **WIDE), jlade.make_mesh(model=2)
    params, wanted = load_gguf(file, "float32", bits=bits), reference(file)["token_embd.weight"]
    np.testing.assert_array_equal(values(params.embedding), wanted)
    tokens = np.array([[0, vocab - 1, 7], [7, 1, 2]])
    np.testing.assert_array_equal(params.embedding[tokens], wanted[tokens])
    hidden = np.random.default_rng(0).normal(size=(1, 5, 256)).astype(np.float32)
    logits = (each.decoder.logits(each, jnp.asarray(hidden)) for each in (params, dequantized(params)))
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)
    divided = load_gguf(file, "float32", bits=bits, mesh=mesh)
    assert_placed(divided, params, mesh)
    assert_same_texts(*(jlade.generate(each, [3, 1, 4], max_new_tokens=12, eos_ids=()) for each in (divided, params)))


def test_bits_of_the_file_keep_every_matrix(tmp_path):
    kinds = {"token_embd.weight": "Q5_K", "blk.0.ffn_up.weight": "Q8_0", "blk.0.ffn_down.weight": "F16"}
    file = write(tmp_path / "model.gguf", kind="Q4_K", kinds=kinds, **WIDE)
    params, plain = (load_gguf(file, "float32", bits=bits) for bits in ("file", None))
    assert is_grouped(params.embedding)
    assert isinstance(params.layers[0].mlp.down, jax.Array)
    assert_same_arrays(dequantized(params), plain)
    conversion.save(params, tmp_path / "own")
    assert_equal(conversion.load(tmp_path / "own", "float32"), params)


def test_the_command_takes_bits_of_the_file(tmp_path, capsys):
    file = write_chat(tmp_path / "model.gguf", tied=True)
    assert main(["Numbers", "--model", str(file), "--bits", "file", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


@pytest.mark.parametrize("kind", ["Q4_1", slow("Q4_K"), slow("IQ4_NL"), slow("Q6_K")])
def test_texts_with_and_without_lookahead_are_those_of_the_elements(kind, tmp_path):
    file = write(tmp_path / "model.gguf", kind=kind, **WIDE)
    params = load_gguf(file, "float32", bits=8)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5]]
    settings = {"max_new_tokens": 24, "eos_ids": ()}
    plain = jlade.generate(params, prompts, lookahead=None, **settings)
    assert_same_texts(jlade.generate(params, prompts, lookahead=PAPER, **settings), plain)
    assert_same_texts(jlade.generate(dequantized(params), prompts, lookahead=None, **settings), plain)


@pytest.mark.parametrize("kind", ["Q4_K", slow("Q8_0"), slow("IQ4_XS")])
def test_a_mesh_of_two_and_shapes_and_jlades_own_files(kind, tmp_path):
    file, mesh = write(tmp_path / "model.gguf", kind=kind, tied=kind == "Q8_0", **WIDE), jlade.make_mesh(model=2)
    params = load_gguf(file, "float32", bits=8)
    assert_placed(load_gguf(file, "float32", bits=8, mesh=mesh), params, mesh)
    config, tensors = GGUF(file).weights()
    shapes = loaded_shapes(tensors, config, np.dtype("float32"), 8)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    conversion.save(params, tmp_path / "own")
    assert_equal(conversion.load(tmp_path / "own", "float32"), params)


def test_parts_of_joined_tensors_and_experts_are_kept(tmp_path):
    pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0}
    phi3 = transformers.Phi3Config(**common)
    moe = transformers.MixtralConfig(**common, num_local_experts=4)
    for arch, config, added in (("phi3", phi3, {}), ("llama", moe, {"expert_count": 4, "expert_used_count": 2})):
        model = transformers.AutoModelForCausalLM.from_config(config)
        file = convert(model, tmp_path / f"{arch}.gguf", arch, added, kind="Q4_1")
        params, plain = (load_gguf(file, "float32", bits=bits) for bits in (8, None))
        leaves = jax.tree.leaves(params, is_leaf=is_grouped)
        assert sum(map(is_grouped, leaves)) == 8
        for kept, dense in zip(leaves, jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(values(kept) if is_grouped(kept) else kept, dense)
        settings = {"max_new_tokens": 12, "eos_ids": ()}
        assert_same_texts(*(jlade.generate(each, [3, 1, 4], **settings) for each in (params, dequantized(params))))


def test_scales_that_are_not_finite_are_named(tmp_path):
    file = write(tmp_path / "model.gguf", kind="Q4_0", **WIDE)
    (tensor,) = [t for t in gguf.GGUFReader(file).tensors if t.name == "blk.0.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    begin = tensor.data_offset + 3 * 8 * 18  # the fourth row
    content[begin : begin + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.mlp\.up_proj\.weight \(1 of 512 rows: 3\)$"):
        load_gguf(file, bits=4)


def test_a_file_that_is_cut_short_after_its_header_was_read_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "model.gguf", kind="Q4_0", **WIDE)
    header = read(file)
    monkeypatch.setattr("jlade.conversion.gguf.read", lambda path: header)
    file.write_bytes(file.read_bytes()[:4096])
    with pytest.raises(ValueError, match=r"model\.gguf: .* cannot be read"):
        load_gguf(file, bits=4)
