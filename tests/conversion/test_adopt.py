"""Parameters from the arrays of other JAX programs."""

import dataclasses
import operator
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlade
from jlade.conversion.hf_config import to_hf
from jlade.conversion.tensors import named_arrays
from jlade.models.llama import LlamaConfig
from jlade.models.rotary import Llama3Scaling
from tests.families import checkpoint
from tests.forward import run_blocks
from tests.tiny import slow_but, tiny_llama

SCALING = Llama3Scaling(8.0, 1.0, 4.0, 16)


def nested(arrays):
    """Returns dictionaries in dictionaries for names with dots."""
    tree = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = array
    return tree


def pointers(arrays):
    return [array.unsafe_buffer_pointer() for array in arrays]


FORMS = {
    "flat": lambda arrays: arrays,
    "nested": nested,
    "parameters of Flax": lambda arrays: {"params": nested(arrays)},
    "slashes": lambda arrays: {name.replace(".", "/"): array for name, array in arrays.items()},
    "state of nnx": lambda arrays: nnx.State({name: nnx.Param(array) for name, array in arrays.items()}),
    "without model.": lambda arrays: {name.removeprefix("model."): array for name, array in arrays.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_arrays_with_the_names_of_hugging_face_are_not_copied(form):
    params = tiny_llama()
    found = jlade.adopt(FORMS[form](named_arrays(params)), to_hf(params.config, "float32"))
    assert found.config == params.config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert pointers(jax.tree.leaves(found)) == pointers(jax.tree.leaves(params))


def test_what_a_config_may_be(small_demo):
    params, _ = jlade.load(small_demo, "float32")
    arrays, expected = named_arrays(params), params.config
    assert jlade.adopt(arrays, small_demo).config == expected
    content = to_hf(expected, "float32") | {"eos_token_id": list(expected.eos_ids)}
    assert jlade.adopt(arrays, content).config == dataclasses.replace(expected, stop_strings=())
    with pytest.raises(TypeError, match=r"config must be a directory .* got int"):
        jlade.adopt(arrays, 3)


OF_TRANSFORMERS = {
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2},
    "Llama": {"tie_word_embeddings": True},
    "Phi3": {"pad_token_id": 0},
}


@pytest.mark.parametrize("family", slow_but(OF_TRANSFORMERS, "Qwen3Moe"))
def test_logits_are_those_of_transformers(family, tmp_path):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    model, _ = checkpoint(family, OF_TRANSFORMERS[family], tmp_path / "model")
    tree = {name: jnp.asarray(tensor.numpy()) for name, tensor in model.state_dict().items()}
    tokens = np.random.default_rng(0).integers(0, 50, (1, 24), dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(run_blocks(jlade.adopt(tree, model.config), tokens, [24]), expected, atol=2e-4)


def test_an_output_matrix_that_is_not_the_embedding_is_kept():
    params = tiny_llama(tie_embeddings=True)
    arrays = named_arrays(params)
    assert jlade.adopt(arrays | {"lm_head.weight": jnp.copy(params.embedding)}, params.config).output is None
    other = jlade.adopt(arrays | {"lm_head.weight": params.embedding + 1}, params.config)
    np.testing.assert_array_equal(other.output, params.embedding + 1)
    assert not other.config.tie_embeddings


def test_dtypes():
    params = tiny_llama()
    arrays = {name: array.astype(jnp.bfloat16) for name, array in named_arrays(params).items()}
    arrays["model.norm.weight"] = params.norm
    assert {leaf.dtype.name for leaf in jax.tree.leaves(jlade.adopt(arrays, params.config))} == {"bfloat16"}
    found = jlade.adopt(arrays, params.config, dtype=jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("model.norm.weight"), "tree: 1 tensors are missing: model.norm.weight"),
        (lambda tree: tree.update(extra=jnp.ones(3)), "tree: 1 tensors are not of this model: extra"),
        (
            lambda tree: tree.update({"model.layers.2.mlp.up_proj.weight": jnp.ones((24, 16))}),
            "tree: 1 tensors are of layers beyond the 2 of the model: model.layers.2.mlp.up_proj.weight",
        ),
        (
            lambda tree: tree.update({"model.layers.1.mlp.up_proj.weight": jnp.ones((16, 24))}),
            "tree: model.layers.1.mlp.up_proj.weight has shape (16, 24); config.json implies (24, 16)",
        ),
        (lambda tree: tree.update({"model/norm/weight": jnp.ones(16)}), "tree has model.norm.weight twice"),
        (lambda tree: tree.update({"model.norm.weight": jnp.ones(16, jnp.int32)}), "is of type"),
        (lambda tree: tree.clear(), "tree must hold the arrays of a model, got none"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, message):
    params = tiny_llama()
    tree = named_arrays(params)
    change(tree)
    with pytest.raises(ValueError, match=re.escape(message)):
        jlade.adopt(tree, params.config)


def test_what_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"tree must hold arrays of JAX or NumPy, got str at model\.norm"):
        jlade.adopt({"model": {"norm": "weights"}}, tiny_llama().config)


# The other layouts. A row has the equation by which the code base multiplies with an array, and its name; a row for
# several fields has an array of all of them. Letters are sizes, each of one value.

SIZES = {"v": 13, "e": 16, "h": 4, "k": 2, "d": 6, "f": 24, "n": 4, "x": 10, "p": 2, "q": 3, "b": 24, "c": 12}
LLAMA = LlamaConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=64,
    norm_eps=1e-5,
)
QWEN = dataclasses.replace(LLAMA, qkv_bias=True)
MIXTURE = dataclasses.replace(
    LLAMA, qk_norm=True, num_experts=4, expert_size=10, experts_per_token=2, intermediate_size=0, model_type="qwen3_moe"
)
GEMMA = dataclasses.replace(LLAMA, model_type="gemma2", norm="rms_plus_one", tie_embeddings=True, post_norms=True)
GEMMA_3 = dataclasses.replace(GEMMA, model_type="gemma3_text", qk_norm=True)
EVERY_HEAD = dataclasses.replace(GEMMA, num_kv_heads=4, model_type="gemma", post_norms=False)

HEADS = {
    "attention.query": "e,ehd->hd",
    "attention.key": "e,ekd->kd",
    "attention.value": "e,ekd->kd",
    "attention.output": "hd,hde->e",
}
MLP = {"mlp.gate": "e,ef->f", "mlp.up": "e,ef->f", "mlp.down": "f,fe->e"}
OF_MLP = "wi_0", "wi_1", "wo"  # MaxText's names of gate, product and output
EXPERTS = {"mixture.gate": "e,nex->nx", "mixture.up": "e,nex->nx", "mixture.down": "x,nxe->ne"}
OF_TUNIX = {
    "mixer_norm.weight": ("e,e->e", "input_layernorm.w"),
    "mlp_norm.weight": ("e,e->e", "post_attention_layernorm.w"),
} | {field: (HEADS[field], f"attn.{name}_proj.w") for field, name in zip(HEADS, "qkvo", strict=True)}
OF_GEMMA = {
    "mixer_norm.weight": ("e,e->e", "pre_attention_norm.scale"),
    "mlp_norm.weight": ("e,e->e", "pre_ffw_norm.scale"),
    "attention.output": (HEADS["attention.output"], "attn.attn_vec_einsum.w"),
    "mlp.down": (MLP["mlp.down"], "mlp.linear"),
}
OF_MAXTEXT = {
    "mixer_norm.weight": ("e,e->e", "pre_self_attention_layer_norm.scale"),
    "mlp_norm.weight": ("e,e->e", "post_self_attention_layer_norm.scale"),
} | {
    field: (HEADS[field], f"self_attention.{name}.kernel")
    for field, name in zip(HEADS, ("query", "key", "value", "out"), strict=True)
}

OF_KERAS = (
    {
        "mixer_norm.weight": ("e,e->e", "self_attention_layernorm.scale"),
        "mlp_norm.weight": ("e,e->e", "feedforward_layernorm.scale"),
    }
    | {
        field: (HEADS[field], f"self_attention.{name}.kernel")
        for field, name in zip(HEADS, ("query", "key", "value", "attention_output"), strict=True)
    }
    | {
        field: (MLP[field], f"feedforward_{name}_dense.kernel")
        for field, name in zip(MLP, ("gate", "intermediate", "output"), strict=True)
    }
)


class Kind(NamedTuple):
    """A layout: the beginning of names in a layer, the rows outside of layers and within, and the model."""

    layers: str
    whole: dict
    arrays: dict
    config: LlamaConfig


WHOLE_TUNIX = {
    "embedding": ("e,ve->v", "embedder.input_embedding"),
    "norm": ("e,e->e", "final_norm.w"),
    "output": ("e,ev->v", "lm_head.w"),
}
WHOLE_GEMMA = {"embedding": WHOLE_TUNIX["embedding"], "norm": ("e,e->e", "final_norm.scale")}
WHOLE_MAXTEXT = {
    "embedding": ("e,ve->v", "params.token_embedder.embedding"),
    "norm": ("e,e->e", "params.decoder.decoder_norm.scale"),
    "output": ("e,ev->v", "params.decoder.logits_dense.kernel"),
}
WHOLE_KERAS = {
    "embedding": ("e,ve->v", "token_embedding.embeddings"),
    "norm": ("e,e->e", "sequence_output_layernorm.scale"),
    "output": ("e,ev->v", "token_embedding.reverse_embeddings"),
}
KINDS = {
    "tunix, Qwen2": Kind(
        "layers.{}.",
        WHOLE_TUNIX,
        OF_TUNIX
        | {field: (MLP[field], f"{field}_proj.kernel") for field in MLP}
        | {
            "attention.query_bias": ("b,b->b", "attn.q_bias"),
            "attention.key_bias": ("c,c->c", "attn.k_bias"),
            "attention.value_bias": ("c,c->c", "attn.v_bias"),
        },
        QWEN,
    ),
    "tunix, Qwen3 with experts": Kind(
        "layers.{}.",
        WHOLE_TUNIX,
        OF_TUNIX
        | {
            "attention.query_norm": ("d,d->d", "attn.q_norm.w"),
            "attention.key_norm": ("d,d->d", "attn.k_norm.w"),
            "mixture.router": ("e,en->n", "mlp.router.kernel"),
        }
        | {field: (EXPERTS[field], f"mlp.{field.removeprefix('mixture.')}_proj") for field in EXPERTS},
        MIXTURE,
    ),
    "gemma": Kind(
        "layer_{}.",
        WHOLE_GEMMA,
        OF_GEMMA
        | {
            "attention.query": ("e,hed->hd", "attn.q_einsum.w"),
            "attention.key attention.value": ("e,pked->pkd", "attn.kv_einsum.w"),
            "mlp.gate mlp.up": ("e,pfe->pf", "mlp.gating_einsum"),
            "mixer_post_norm.weight": ("e,e->e", "post_attention_norm.scale"),
            "mlp_post_norm.weight": ("e,e->e", "post_ffw_norm.scale"),
        },
        GEMMA,
    ),
    "gemma, as many KV heads": Kind(
        "transformer/layer_{}.",
        {field: (equation, f"transformer/{name}") for field, (equation, name) in WHOLE_GEMMA.items()},
        OF_GEMMA
        | {
            "attention.query attention.key attention.value": ("e,qhed->qhd", "attn.qkv_einsum.w"),
            "mlp.gate mlp.up": ("e,pef->pf", "mlp.gating_einsum"),
        },
        EVERY_HEAD,
    ),
    "MaxText, Qwen3 with experts": Kind(
        "params.decoder.layers_{}.",
        WHOLE_MAXTEXT,
        OF_MAXTEXT
        | {
            "attention.query_norm": ("d,d->d", "self_attention.query_norm.scale"),
            "attention.key_norm": ("d,d->d", "self_attention.key_norm.scale"),
            "mixture.router": ("e,en->n", "moe_block.gate.kernel"),
        }
        | {field: (EXPERTS[field], f"moe_block.{name}") for field, name in zip(EXPERTS, OF_MLP, strict=True)},
        MIXTURE,
    ),
    "keras-hub, Qwen2": Kind(
        "transformer_layer_{}.",
        WHOLE_KERAS,
        OF_KERAS
        | {
            "attention.query_bias": ("hd,hd->hd", "self_attention.query.bias"),
            "attention.key_bias": ("kd,kd->kd", "self_attention.key.bias"),
            "attention.value_bias": ("kd,kd->kd", "self_attention.value.bias"),
        },
        QWEN,
    ),
    "keras-hub, Qwen3": Kind(
        "transformer_layer_{}.",
        WHOLE_KERAS,
        OF_KERAS
        | {
            "attention.query_norm": ("d,d->d", "self_attention.query_dense_layernorm.scale"),
            "attention.key_norm": ("d,d->d", "self_attention.key_dense_layernorm.scale"),
        },
        dataclasses.replace(LLAMA, qk_norm=True),
    ),
    "keras-hub, Gemma 3": Kind(
        "decoder_block_{}.",
        {"embedding": WHOLE_KERAS["embedding"], "norm": ("e,e->e", "final_normalization.scale")},
        {
            "mixer_norm.weight": ("e,e->e", "pre_attention_norm.scale"),
            "attention.query": ("e,hed->hd", "attention.query.kernel"),
            "attention.key": ("e,ked->kd", "attention.key.kernel"),
            "attention.value": ("e,ked->kd", "attention.value.kernel"),
            "attention.output": (HEADS["attention.output"], "attention.attention_output.kernel"),
            "attention.query_norm": ("d,d->d", "attention.query_norm.scale"),
            "attention.key_norm": ("d,d->d", "attention.key_norm.scale"),
            "mixer_post_norm.weight": ("e,e->e", "post_attention_norm.scale"),
            "mlp_norm.weight": ("e,e->e", "pre_ffw_norm.scale"),
            "mlp.gate": (MLP["mlp.gate"], "ffw_gating.kernel"),
            "mlp.up": (MLP["mlp.up"], "ffw_gating_2.kernel"),
            "mlp.down": (MLP["mlp.down"], "ffw_linear.kernel"),
            "mlp_post_norm.weight": ("e,e->e", "post_ffw_norm.scale"),
        },
        GEMMA_3,
    ),
}  # fmt: skip
MAXTEXT_MLP = {field: (MLP[field], f"mlp.{name}.kernel") for field, name in zip(MLP, OF_MLP, strict=True)}
KINDS["MaxText, Qwen3"] = Kind(
    "params.decoder.layers_{}.",
    WHOLE_MAXTEXT,
    {
        field: row
        for field, row in KINDS["MaxText, Qwen3 with experts"].arrays.items()
        if not field.startswith("mixture.")
    }
    | MAXTEXT_MLP,
    dataclasses.replace(LLAMA, qk_norm=True),
)


def make_tree(kind):
    """Returns random arrays of a layout by name."""
    rng = np.random.default_rng(0)

    def make(equation):
        letters = equation.partition("->")[0].partition(",")[2]
        return rng.normal(size=[SIZES[letter] for letter in letters]).astype(np.float32)

    tree = {name: make(equation) for equation, name in kind.whole.values()}
    for i in range(2):
        tree |= {kind.layers.format(i) + name: make(equation) for equation, name in kind.arrays.values()}
    return tree


def stacked(tree, kind):
    """Returns the tree of a model of MaxText whose layers are scanned: the second axis of arrays is the layer."""
    before = [kind.layers.format(i) for i in range(2)]
    whole = {name: array for name, array in tree.items() if not name.startswith(tuple(before))}
    within = [name.removeprefix(before[0]) for name in tree if name.startswith(before[0])]
    joined = {name: np.stack([tree[start + name] for start in before], axis=1) for name in within}
    return whole | {kind.layers.replace("_{}", "") + name: array for name, array in joined.items()}


def multiply(matrix, x):
    """Returns the product of an array of jlade's with an input."""
    equation = {1: "i,i->i", 2: "i,oi->o", 3: "i,nio->no"}[matrix.ndim]
    return np.einsum(equation, x.ravel(), np.asarray(matrix, float))


@pytest.mark.parametrize(
    ("name", "form"), [*((name, nested) for name in KINDS), *((name, stacked) for name in KINDS if "MaxText" in name)]
)
def test_products_are_those_of_a_layouts_own_equations(name, form):
    kind, rng = KINDS[name], np.random.default_rng(1)
    tree = make_tree(kind)
    params = jlade.adopt(stacked(tree, kind) if form is stacked else nested(tree), kind.config)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    parts = [(params, kind.whole, "")]
    parts += [(layer, kind.arrays, kind.layers.format(i)) for i, layer in enumerate(params.layers)]
    for arrays, rows, before in parts:
        for fields, (equation, of_array) in rows.items():
            x = rng.normal(size=[SIZES[letter] for letter in equation.partition(",")[0]])
            expected = np.einsum(equation, x, tree[before + of_array].astype(float))
            results = expected[None] if " " not in fields else expected
            for field, result in zip(fields.split(), results, strict=True):
                found = multiply(operator.attrgetter(field)(arrays), x)
                np.testing.assert_allclose(found.ravel(), result.ravel(), atol=1e-4, err_msg=field)


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_scores_of_maxtexts_llama(scaling):
    """Its queries hold the scale, and heads of Llama 3.1 have neighbours for pairs."""
    config = dataclasses.replace(LLAMA, rope_scaling=scaling)
    kind = Kind("params.decoder.layers_{}.", WHOLE_MAXTEXT, OF_MAXTEXT | MAXTEXT_MLP, config)
    tree = make_tree(kind)
    layer, rng = jlade.adopt(tree, config).layers[1], np.random.default_rng(1)
    angles = rng.uniform(size=(2, 3))  # of the pairs of a query, and of those of a key
    cos, sin = np.cos(angles), np.sin(angles)

    def scores(queries, keys, pair):
        """Returns the products of rotated queries and keys, whose pairs of elements are `pair`."""
        rotated = []
        for i, head in enumerate((queries, keys)):
            first, second = pair(head)
            rotated.append((first * cos[i] - second * sin[i], second * cos[i] + first * sin[i]))
        return sum(np.sum(a * b, axis=-1) for a, b in zip(*rotated, strict=True))

    def halves(head):
        return head[..., :3], head[..., 3:]

    def neighbours(head):
        return head[..., ::2], head[..., 1::2]

    x, y = rng.normal(size=(2, 16))
    prefix = "params.decoder.layers_1.self_attention."
    theirs = (
        np.einsum("e,ehd->hd", x, tree[prefix + "query.kernel"])[::2],
        np.einsum("e,ekd->kd", y, tree[prefix + "key.kernel"]),
    )
    ours = multiply(layer.attention.query, x).reshape(4, 6)[::2], multiply(layer.attention.key, y).reshape(2, 6)
    expected = scores(*theirs, halves if scaling is None else neighbours)
    np.testing.assert_allclose(scores(*ours, halves) / np.sqrt(6), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.attn.o_proj.w": None}, "1 tensors are missing: layers.1.attn.o_proj.w"),
        ({"layers.1.attn.q_proj.w_lora_a": np.ones((16, 2))}, "not of this model: layers.1.attn.q_proj.w_lora_a"),
        (
            {"layers.0.attn.q_proj.w": np.ones((16, 6, 4))},
            "layers.0.attn.q_proj.w has shape (16, 6, 4); config implies (16, 4, 6)",
        ),
        ({"final_norm.w": np.ones(16, np.int32)}, "final_norm.w is of type int32; accepted are floating ones"),
    ],
)
def test_what_does_not_fit_another_layout_is_named(change, message):
    kind = KINDS["tunix, Qwen2"]
    tree = {name: array for name, array in (make_tree(kind) | change).items() if array is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        jlade.adopt(tree, kind.config)


def test_a_matrix_whose_inputs_may_be_its_outputs_is_refused():
    square = dataclasses.replace(GEMMA, intermediate_size=16)
    tree = make_tree(KINDS["gemma"])
    for i in range(2):
        tree |= {f"layer_{i}.mlp.gating_einsum": jnp.ones((2, 16, 16)), f"layer_{i}.mlp.linear": jnp.ones((16, 16))}
    with pytest.raises(ValueError, match=r"gating_einsum has shape .* which do not tell inputs from outputs"):
        jlade.adopt(tree, square)


def test_a_family_that_a_layout_does_not_have_is_refused():
    tree = make_tree(KINDS["MaxText, Qwen3"])
    with pytest.raises(
        ValueError, match=r"names of MaxText, of whose models .* qwen3_moe are known; config is of a gemma2"
    ):
        jlade.adopt(tree, GEMMA)
