"""`check_decoder` accepts decoders with caches of their own, and names the error of wrong ones."""

import jax
import jax.numpy as jnp
import pytest

from jlade.testing import check_decoder
from tests import own_caches
from tests.own_caches import Recurrent, Slots
from tests.tiny import slow

PARAMS = own_caches.params()


@pytest.mark.parametrize("kind", [slow(Slots), Recurrent])
def test_decoders_with_their_own_cache_pass(kind, caplog):
    decoder = kind()
    check_decoder(decoder, PARAMS, reference=lambda tokens: own_caches.read(decoder, PARAMS, tokens))
    assert caplog.records == []


def init_cache(kind, change):
    """Returns an `init_cache` that applies `change` to the correct cache."""
    return lambda self, *args: change(kind.init_cache(self, *args))


def commit(kind, change):
    """Returns a `commit` that applies `change` to its arguments first."""
    return lambda self, *args: kind.commit(self, *change(*args))


def all_with_the_right_length(self, cache, block_kv, indices, num_accepted):
    everything = Recurrent.commit(self, cache, block_kv, indices, jnp.full_like(num_accepted, indices.shape[1]))
    return everything.replace(length=cache.length + num_accepted)


def sees_what_was_left(self, cache):
    """Sees the entries before the text that a larger block has written."""
    return Slots.seen(self, cache) | jnp.any(cache.keys != 0, axis=-1) & (cache.length > 0)[:, None]


def flip(cache):
    return jax.tree.map(lambda x: jnp.flip(x, 1) if x.ndim > 1 else x, cache)


FLIPPED = {
    "init_cache": init_cache(Slots, flip),
    "forward": lambda self, params, tokens, positions, cache, mask: Slots.forward(
        self, params, tokens, positions, flip(cache), mask
    ),
    "commit": lambda self, cache, *args: flip(Slots.commit(self, flip(cache), *args)),
}

WRONG = {
    "no dataclass": (Slots, {"init_cache": init_cache(Slots, vars)}, TypeError, "attribute length, got dict"),
    "arrays without sequences": (
        Recurrent,
        {"init_cache": init_cache(Recurrent, lambda c: c.replace(total=c.total[0]))},
        ValueError,
        r"arrays of init_cache must have the shape \[B, ...\] = \[3, any\], got \[8, 8\]",
    ),
    "commits rejected tokens": (
        Slots,
        {"commit": commit(Slots, lambda c, kv, i, n: (c, kv, i, jnp.full_like(n, i.shape[1])))},
        AssertionError,
        r"commit must add num_accepted \[1, 3, 0\]",
    ),
    "counts accepted tokens, keeps all": (
        Recurrent,
        {"commit": all_with_the_right_length},
        AssertionError,
        "commit must append",
    ),
    "commits the first tokens of the block": (
        Slots,
        {"commit": commit(Slots, lambda c, kv, i, n: (c, kv, jnp.broadcast_to(jnp.arange(i.shape[1]), i.shape), n))},
        AssertionError,
        r"commit must append the tokens indices\[:, :num_accepted\] of the block, in this order",
    ),
    "sees an earlier block": (
        Slots,
        {"seen": sees_what_was_left},
        AssertionError,
        "commit must append .*spare entries",
    ),
    "the text at the end": (Slots, FLIPPED, AssertionError, "changed from 16 to 7 tokens. Put entries that are not"),
    "a sum that says it can be shortened": (
        Recurrent,
        {
            "init_cache": init_cache(Recurrent, lambda c: own_caches.Divisible(**vars(c))),
            "commit": lambda self, *args: own_caches.Divisible(**vars(Recurrent.commit(self, *args))),
        },
        AssertionError,
        r"divisible=99 must hold the first tokens .* but \[3, 1, 0\] of \[6, 3, 0\]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "methods", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(kind, methods, error, message):
    with pytest.raises(error, match=message):
        check_decoder(type("Wrong", (kind,), methods)(), PARAMS)
