"""A model of your own, here a small GPT-2 in Flax NNX, decoded by jlade.

    python examples/flax_decoder.py

Three parts: the model, which knows nothing of jlade; the adapter that lets jlade run it, the part to write for your own
model; a program that trains the model on this file's bytes, checks the adapter and generates text.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlade
from jlade.models import attention, base
from jlade.models.base import BlockKV, KVCache
from jlade.testing import check_decoder

# The model: learned positions, LayerNorm, biases, GELU.


class Attention(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.input = nnx.Linear(width, 3 * width, rngs=rngs)
        self.output = nnx.Linear(width, width, rngs=rngs)

    def project(self, x: jax.Array) -> list[jax.Array]:
        """Returns queries, keys and values [B, T, heads, head_dim] of `x` [B, T, width]."""
        return [part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.input(x), 3, axis=-1)]

    def __call__(self, x: jax.Array) -> jax.Array:
        queries, keys, values = self.project(x)
        mixed = nnx.dot_product_attention(queries, keys, values, mask=jnp.tri(x.shape[1], dtype=bool))
        return self.output(mixed.reshape(x.shape))


class MLP(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Layer(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = MLP(width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    def __init__(self, vocab_size: int, max_positions: int, width: int, heads: int, num_layers: int, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(max_positions, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V] of the texts `tokens` [B, T]."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# The adapter. `nnx.split` separates a model into a static graph, for the decoder, and arrays, the parameters.

State = nnx.State[Any, Any]  # the parameters


@dataclasses.dataclass(frozen=True)
class GPTDecoder:
    """The `jlade.models.base.Decoder` that runs a `GPT`."""

    graphdef: nnx.GraphDef[GPT]  # hashable and equal by value
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...] = ()

    def init_cache(self, params: State, batch_size: int, capacity: int) -> KVCache:
        model = nnx.merge(self.graphdef, params)
        heads, dtype = model.layers[0].attention.heads, model.tokens.embedding.dtype
        shape = (batch_size, heads, capacity, model.tokens.features // heads)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in model.layers) for _ in range(2))
        return KVCache(keys=keys, values=values, length=jnp.zeros(batch_size, jnp.int32))

    def forward(
        self,
        params: State,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, BlockKV]:
        """Runs `GPT.__call__` up to the last norm, with the given positions and attention to the cache."""
        model = nnx.merge(self.graphdef, params)
        # Guesses may be past the last position, where Flax returns NaN.
        x = model.tokens(tokens) + model.positions(jnp.minimum(positions, self.max_positions - 1))
        block_kv = []
        for layer, cached_keys, cached_values in zip(model.layers, cache.keys, cache.values, strict=True):
            queries, keys, values = layer.attention.project(layer.attention_norm(x))
            mixed = attention.attend(
                attention.Operands(queries, keys, values, cached_keys, cached_values, cache.length, block_mask)
            )
            x += layer.attention.output(mixed.reshape(x.shape))
            x += layer.mlp(layer.mlp_norm(x))
            block_kv.append((keys, values))
        return x, block_kv

    def logits(self, params: State, hidden: jax.Array) -> jax.Array:
        model = nnx.merge(self.graphdef, params)
        logits: jax.Array = model.head(model.norm(hidden))
        return logits.astype(jnp.float32)

    def commit(self, cache: KVCache, block_kv: BlockKV, indices: jax.Array, num_accepted: jax.Array) -> KVCache:
        return base.commit(cache, block_kv, indices, num_accepted)


def decoder_and_params(model: GPT) -> tuple[GPTDecoder, State]:
    """Returns the decoder and its parameters, the arguments of `jlade.generate`."""
    graphdef, params = nnx.split(model)
    return GPTDecoder(graphdef, model.tokens.num_embeddings, model.positions.num_embeddings), params


def train(model: GPT, text: np.ndarray, num_updates: int) -> None:
    """Trains `model` on the tokens `text` [L], with steps along the sign of the averaged gradient."""
    graphdef, params = nnx.split(model)
    size = model.positions.num_embeddings + 1

    def loss(params: State, tokens: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))

    @jax.jit
    def update(params: State, mean: State, tokens: jax.Array) -> tuple[State, State]:
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, jax.grad(loss)(params, tokens))
        return jax.tree.map(lambda p, m: p - 0.001 * jnp.sign(m), params, mean), mean

    rng, mean = np.random.default_rng(0), jax.tree.map(jnp.zeros_like, params)
    for _ in range(num_updates):
        starts = rng.integers(0, len(text) - size, (8, 1))
        params, mean = update(params, mean, text[starts + np.arange(size)])
    nnx.update(model, params)


def main() -> None:
    model = GPT(vocab_size=256, max_positions=128, width=64, heads=4, num_layers=2, rngs=nnx.Rngs(0))
    text = pathlib.Path(__file__).read_bytes()
    train(model, np.array(list(text), np.int32), num_updates=500)

    decoder, params = decoder_and_params(model)
    check_decoder(decoder, params, reference=lambda tokens: model(jnp.asarray(tokens)[None])[0])

    prompt = list(b"    def ")  # one token per byte
    plain = jlade.generate(params, prompt, decoder=decoder, max_new_tokens=100, lookahead=None)
    lookahead = jlade.generate(params, prompt, decoder=decoder, max_new_tokens=100)
    assert np.array_equal(lookahead.tokens, plain.tokens)
    print(bytes(prompt + lookahead.tokens[0].tolist()).decode(errors="replace"))
    print(f"tokens per step: plain {plain.compression[0]:.2f}, lookahead {lookahead.compression[0]:.2f}")


if __name__ == "__main__":
    main()
