"""Two small decoders whose caches are no `KVCache`, and their logits in NumPy, token by token.

`Slots` keeps a block in spare entries before those of the text, as models do that write their cache in `forward`.
`Recurrent`, linear attention, keeps a sum over all tokens, which cannot be shortened.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.decoding.state import CHUNKS_ON_CPU

WIDTH, VOCAB, POSITIONS = 8, 13, 256
ROOM = CHUNKS_ON_CPU[0][0]


def params(max_positions=POSITIONS):
    rng = np.random.default_rng(0)
    shapes = {"tokens": (VOCAB, WIDTH), "positions": (max_positions, WIDTH), "input": (WIDTH, 3 * WIDTH)}
    return {name: 0.5 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class Own:
    """What both have in common: embeddings before, and a norm and the embeddings after their one layer."""

    vocab_size: int = VOCAB
    max_positions: int = POSITIONS
    eos_ids: tuple[int, ...] = ()

    def project(self, params, tokens, positions):
        positions = jnp.minimum(positions, self.max_positions - 1)
        x = jnp.asarray(params["tokens"])[tokens] + jnp.asarray(params["positions"])[positions]
        return x, *jnp.split(x @ params["input"], 3, axis=-1)

    def logits(self, params, hidden):
        scale = jnp.sqrt(jnp.mean(hidden**2, axis=-1, keepdims=True))
        return hidden / scale @ params["tokens"].T


@flax.struct.dataclass
class SlotCache:
    keys: jax.Array  # [B, ROOM + C, E]
    values: jax.Array  # [B, ROOM + C, E]
    length: jax.Array  # [B]

    @property
    def divisible(self):
        return self.keys.shape[1]


class Slots(Own):
    def init_cache(self, params, batch_size, capacity):
        zeros = jnp.zeros((batch_size, ROOM + capacity, WIDTH))
        return SlotCache(zeros, zeros, jnp.zeros(batch_size, jnp.int32))

    def forward(self, params, tokens, positions, cache, block_mask):
        size = tokens.shape[1]
        assert size <= ROOM
        x, queries, *block = self.project(params, tokens, positions)
        keys, values = (
            jax.lax.dynamic_update_slice(slots, new, (0, 0, 0))
            for slots, new in zip((cache.keys, cache.values), block, strict=True)
        )
        mask = jnp.broadcast_to(self.seen(cache)[:, None], (*tokens.shape, keys.shape[1]))
        mask = mask.at[:, :, :size].set(block_mask)
        scores = jnp.where(mask, jnp.einsum("bte,bse->bts", queries, keys), -jnp.inf)
        return x + jnp.einsum("bts,bse->bte", jax.nn.softmax(scores), values), (keys, values)

    def seen(self, cache):
        """Returns which entries [B, ROOM + C] are those of the text."""
        entry = jnp.arange(cache.keys.shape[1], dtype=jnp.int32)[None]
        return (entry >= ROOM) & (entry < ROOM + cache.length[:, None])

    def commit(self, cache, block_kv, indices, num_accepted):
        sequence = jnp.arange(len(indices), dtype=jnp.int32)[:, None]
        offset = jnp.arange(indices.shape[1], dtype=jnp.int32)[None]
        end = cache.keys.shape[1]
        place = jnp.where(offset < num_accepted[:, None], ROOM + cache.length[:, None] + offset, end + offset)
        keys, values = (
            slots.at[sequence, place].set(slots[sequence, indices], mode="drop", unique_indices=True)
            for slots in block_kv
        )
        return SlotCache(keys, values, cache.length + num_accepted)


@flax.struct.dataclass
class Sum:
    total: jax.Array  # [B, E, E]
    length: jax.Array  # [B]


@flax.struct.dataclass
class Divisible(Sum):
    """A sum that says, wrongly, that it can be shortened."""

    divisible: int = flax.struct.field(pytree_node=False, default=99)


class Recurrent(Own):
    def init_cache(self, params, batch_size, capacity):
        return Sum(jnp.zeros((batch_size, WIDTH, WIDTH)), jnp.zeros(batch_size, jnp.int32))

    def forward(self, params, tokens, positions, cache, block_mask):
        x, queries, keys, values = self.project(params, tokens, positions)
        scores = jnp.where(block_mask, jnp.einsum("bte,bse->bts", queries, keys), 0)
        return x + queries @ cache.total + scores @ values, (keys, values)

    def commit(self, cache, block_kv, indices, num_accepted):
        keys, values = (jnp.take_along_axis(each, indices[:, :, None], axis=1) for each in block_kv)
        is_accepted = jnp.arange(indices.shape[1], dtype=jnp.int32)[None] < num_accepted[:, None]
        new = jnp.einsum("bae,baf->bef", jnp.where(is_accepted[:, :, None], keys, 0), values)
        return Sum(cache.total + new, cache.length + num_accepted)


def read(decoder, params, tokens):
    """Returns the logits [L, V] of a text, which is read token by token."""
    known, total, logits = [], np.zeros((WIDTH, WIDTH)), []
    for position, token in enumerate(tokens):
        x = params["tokens"][token] + params["positions"][position]
        query, key, value = np.split(x @ params["input"], 3)
        if isinstance(decoder, Recurrent):
            total += np.outer(key, value)
            hidden = x + query @ total
        else:
            known.append((key, value))
            weights = np.exp([query @ key for key, _ in known])
            hidden = x + weights / weights.sum() @ [value for _, value in known]
        logits.append(hidden / np.sqrt(np.mean(hidden**2)) @ params["tokens"].T)
    return np.array(logits)


def continued(decoder, params, prompt, number):
    """Returns the greedy text [number] after a prompt."""
    text = list(prompt)
    for _ in range(number):
        text.append(int(np.argmax(read(decoder, params, text)[-1])))
    return text[len(prompt) :]
