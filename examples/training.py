"""Training and generation in turns, on the same arrays: divided among devices, under `jax.set_mesh`.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/training.py

The trainer's weights are a dictionary of its own, on a mesh with Explicit axes, which `jax.make_mesh` makes. After
every few updates `jlade.adopt` takes them from where they are: `jlade.generate` decodes on all devices together, and a
`jax.shard_map` lets each device decode prompts of its own.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jlade

# The content of a config.json, for a model with a token for each byte.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
AXIS = "fsdp"  # divides the weights, and the texts of a batch
Weights = dict[str, jax.Array]


def make_weights(key: jax.Array) -> Weights:
    """Returns random weights, each divided along the axis. The names are those of Hugging Face checkpoints."""
    width, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    of_layer = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    layers = range(CONFIG["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in of_layer.items()}
    shapes |= {"model.embed_tokens.weight": (CONFIG["vocab_size"], width), "model.norm.weight": (width,)}
    keys_of = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))

    def make(name: str) -> jax.Array:
        shape = shapes[name]
        values = jnp.ones(shape) if len(shape) == 1 else jax.random.normal(keys_of[name], shape) * shape[1] ** -0.5
        placed: jax.Array = jax.device_put(values, P(AXIS))
        return placed

    return {name: make(name) for name in shapes}


def forward(weights: Weights, tokens: jax.Array) -> jax.Array:
    """Returns the logits [B, T, V] of texts [B, T], which are divided along the axis."""
    head, size = CONFIG["head_dim"], tokens.shape[1]
    groups = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    angles = jnp.arange(size)[:, None] * CONFIG["rope_theta"] ** (-jnp.arange(0, head, 2) / head)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def norm(x: jax.Array, name: str) -> jax.Array:
        return weights[name] * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + CONFIG["rms_norm_eps"])

    def multiply(x: jax.Array, name: str) -> jax.Array:
        return x @ weights[name].T

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, head)

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding.at[tokens].get(out_sharding=P(AXIS))
    for i in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        x = norm(hidden, f"{prefix}.input_layernorm.weight")
        query = rotate(heads(multiply(x, f"{prefix}.self_attn.q_proj.weight")))
        key = rotate(heads(multiply(x, f"{prefix}.self_attn.k_proj.weight")))
        value = heads(multiply(x, f"{prefix}.self_attn.v_proj.weight"))
        key, value = (jnp.repeat(each, groups, axis=2) for each in (key, value))
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * head**-0.5
        weighted = jax.nn.softmax(jnp.where(np.tri(size, dtype=bool), scores, -jnp.inf))
        mixed = jnp.einsum("bhts,bshd->bthd", weighted, value).reshape(x.shape)
        hidden += multiply(mixed, f"{prefix}.self_attn.o_proj.weight")
        x = norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        inner = jax.nn.silu(multiply(x, f"{prefix}.mlp.gate_proj.weight")) * multiply(x, f"{prefix}.mlp.up_proj.weight")
        hidden += multiply(inner, f"{prefix}.mlp.down_proj.weight")
    return norm(hidden, "model.norm.weight") @ embedding.T


@jax.jit
def update(weights: Weights, texts: jax.Array) -> tuple[Weights, jax.Array]:
    """Returns the weights after a step of gradient descent, and the loss before it, for texts [B, T + 1]."""

    def loss(weights: Weights) -> jax.Array:
        # Each device collects all weights, and the transpose adds up the gradients of its part: data parallelism with
        # divided weights (FSDP).
        whole = {name: jax.reshard(array, P()) for name, array in weights.items()}
        logprobs = jax.nn.log_softmax(forward(whole, texts[:, :-1]))
        right = jax.nn.one_hot(texts[:, 1:], CONFIG["vocab_size"])
        return -jnp.mean(jnp.sum(logprobs * right, axis=-1))

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradient), value


def decode_apart(params: jlade.LlamaParams, prompts: list[list[int]], num_tokens: int) -> np.ndarray:
    """Returns the texts [B, C] of prompts, of which each device decodes its own with a copy of all weights."""
    keys = jax.random.split(jax.random.key(0), len(prompts))
    sampling = jlade.SamplingConfig(temperature=0.7)
    inputs, config = jlade.prepare(params, prompts, max_new_tokens=num_tokens, sampling=sampling, key=keys)
    specs = jlade.input_specs(inputs, config, AXIS)

    @jax.jit
    @functools.partial(jax.shard_map, in_specs=(P(), specs), out_specs=P(AXIS), check_vma=False)
    def decode(params: jlade.LlamaParams, inputs: jlade.Inputs) -> jax.Array:
        return jlade.decode(params, inputs, config).tokens

    return np.asarray(decode(jax.reshard(params, P()), jax.device_put(inputs, specs)))


def main(num_rounds: int = 3, num_updates: int = 60, num_tokens: int = 32) -> None:
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    prompts, size, rng = [list(b"    return "), list(b"def ")], 64, np.random.default_rng(0)
    with jax.set_mesh(mesh):
        weights = make_weights(jax.random.key(0))
        params = jlade.adopt(weights, CONFIG)
        for number in range(num_rounds):
            losses = []
            for _ in range(num_updates):
                starts = rng.integers(0, len(text) - size, (2 * mesh.size, 1))
                weights, loss = update(weights, jax.device_put(text[starts + np.arange(size + 1)], P(AXIS)))
                losses.append(loss)
            params = jlade.adopt(weights, CONFIG)
            out = jlade.generate(params, prompts, max_new_tokens=num_tokens)
            texts = [bytes(row[row >= 0].tolist()).decode(errors="replace") for row in out.tokens]
            print(f"round {number + 1}: loss {losses[-1]:.2f}, {out.compression.mean():.2f} tokens per step, {texts}")
        drawn = decode_apart(params, prompts[:1] * mesh.size, num_tokens)
        print(f"{len({tuple(row.tolist()) for row in drawn})} different texts on {mesh.size} devices")


if __name__ == "__main__":
    main()
