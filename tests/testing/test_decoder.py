"""`check_decoder` accepts correct decoders and names the error of wrong ones."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.models import base
from jlade.models.llama import Llama
from jlade.testing import check_decoder
from tests import plain_llama
from tests.tiny import RECURRENT, slow, tiny_llama, with_arrays


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "changes"), [("float32", {}), ("bfloat16", {}), ("float32", RECURRENT)])
def test_the_llama_passes(dtype, changes, caplog):
    params = jax.tree.map(lambda x: x.astype(dtype), tiny_llama(num_layers=2, eos_ids=(3, 12), **changes))
    check_decoder(params.decoder, params, reference=lambda tokens: plain_llama.logits(params, tokens))
    assert caplog.records == []


@pytest.mark.slow
def test_windows_need_a_commit_that_goes_round(monkeypatch):
    monkeypatch.setattr(base, "MULTIPLE", 16)
    params = tiny_llama(sliding_windows=(9, None))
    check_decoder(params.decoder, params)

    class Wrong(Llama):
        def commit(self, *args):
            return base.commit(*args)

    with pytest.raises(AssertionError, match="commit must keep the last S tokens in a layer with S entries"):
        check_decoder(Wrong(params.config), params)


@pytest.mark.slow
def test_a_smaller_tolerance_than_rounding_fails():
    with pytest.raises(AssertionError, match="accepted is 0"):
        check({}, tolerance=0.0)


def check(methods, params=None, **options):
    """Checks a Llama of one layer with other methods."""
    params = tiny_llama(num_layers=1) if params is None else params
    check_decoder(type("Wrong", (Llama,), methods)(params.config), params, **options)


def forward(change):
    """Returns a `forward` that applies `change` to tokens, positions, cache and block_mask first."""
    return lambda self, params, *args: Llama.forward(self, params, *change(*args))


def commit(change):
    """Returns a `commit` that applies `change` to its arguments first."""
    return lambda self, *args: base.commit(*change(*args))


def init_cache(change):
    """Returns an `init_cache` that applies `change` to the correct cache."""
    return lambda self, *args: change(Llama.init_cache(self, *args))


def logits(change):
    """Returns a `logits` that applies `change` to the correct logits."""
    return lambda self, *args: change(Llama.logits(self, *args))


WRONG_FORM = {
    "unhashable": ({"__hash__": None}, TypeError, "must be hashable: .*frozen=True"),
    "equal by identity": (
        {"__eq__": object.__eq__, "__hash__": object.__hash__},
        TypeError,
        "must be equal by value: .*frozen=True",
    ),
    "no commit": ({"commit": None}, TypeError, "must have the method commit"),
    "vocab_size is an array": ({"vocab_size": np.arange(13)}, TypeError, "vocab_size must be an integer"),
    "too few positions": ({"max_positions": 8}, ValueError, "max_positions must be at least 16, got 8"),
    "eos_ids in a list": ({"eos_ids": [1]}, TypeError, r"eos_ids must be a tuple of token ids, .* got \[1\]"),
    "eos_ids outside": ({"eos_ids": (1, 13)}, ValueError, "eos_ids holds 13; accepted are 0 to 12"),
    "cache of another type": ({"init_cache": init_cache(vars)}, TypeError, "must return a jlade.*KVCache .* got dict"),
    "cache with the entries first": (
        {"init_cache": init_cache(lambda c: c.replace(keys=tuple(jnp.swapaxes(k, 1, 2) for k in c.keys)))},
        ValueError,
        r"\[B, KV heads, S, head_dim\] = \[3, any, 16, any\], got \[3, 16, 2, 6\]",
    ),
    "float lengths": (
        {"init_cache": init_cache(lambda c: c.replace(length=c.length.astype(jnp.float32)))},
        TypeError,
        "length of init_cache must be int32, got float32",
    ),
    "no keys and values": (
        {"forward": lambda self, *args: Llama.forward(self, *args)[0]},
        TypeError,
        "forward must return hidden states and block_kv",
    ),
    "float16 logits": (
        {"logits": logits(lambda x: x.astype(jnp.float16))},
        TypeError,
        r"logits must be float32, got float16: end with \.astype",
    ),
    "logits of the last token alone": (
        {"logits": logits(lambda x: x[:, -1])},
        ValueError,
        r"logits must have the shape \[B, R, V\] = \[3, 4, 13\], got \[3, 13\]",
    ),
    "commit in another dtype": (
        {"commit": lambda self, *args: jax.tree.map(lambda x: x.astype(jnp.float16), base.commit(*args))},
        TypeError,
        "commit must return a cache like its argument, .*float32.* got .*float16",
    ),
}


def reverse_commit(cache, block_kv, indices, num_accepted):
    """Commits the accepted tokens in reverse order."""
    offset = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]
    order = jnp.where(offset < num_accepted[:, None], num_accepted[:, None] - 1 - offset, offset)
    return cache, block_kv, jnp.take_along_axis(jnp.asarray(indices), order, axis=1), num_accepted


def commit_slice(self, cache, block_kv, indices, num_accepted):
    """Writes all tokens as one slice, which moves if it does not fit."""

    def append(layer, block, length, indices):
        return jax.lax.dynamic_update_slice(layer, jnp.swapaxes(block[indices], 0, 1), (0, length, 0))

    def append_all(layers, part):
        return tuple(
            jax.vmap(append)(layer, kv[part], cache.length, indices) for layer, kv in zip(layers, block_kv, strict=True)
        )

    return cache.replace(
        keys=append_all(cache.keys, 0), values=append_all(cache.values, 1), length=cache.length + num_accepted
    )


def keys_of_other_scale(self, *args):
    hidden, block_kv = Llama.forward(self, *args)
    return hidden, [(2 * keys, values) for keys, values in block_kv]


def nan_past_the_end(self, params, tokens, positions, *args):
    hidden, block_kv = Llama.forward(self, params, tokens, positions, *args)
    # As if attention multiplied the values of all tokens, those that the mask hides by 0.
    reaches_all = jnp.any(positions >= self.max_positions, axis=1)[:, None, None]
    return jnp.where(reaches_all, jnp.nan, hidden), block_kv


def delete_cache(self, params, tokens, positions, cache, block_mask):
    result = Llama.forward(self, params, tokens, positions, cache, block_mask)
    if not isinstance(tokens, jax.core.Tracer):
        jax.tree.map(lambda x: x.delete(), cache)
    return result


@jax.custom_batching.custom_vmap
def other_under_vmap(x):
    return x


@other_under_vmap.def_vmap
def _(axis_size, in_batched, x):
    return x[::-1], True


WRONG_RESULT = {
    "cache not empty": (
        {"init_cache": init_cache(lambda c: c.replace(length=c.length + 1))},
        "init_cache must return an empty cache",
    ),
    "commits rejected tokens": (
        {"commit": commit(lambda c, kv, i, n: (c, kv, i, jnp.full_like(n, i.shape[1])))},
        "commit must add num_accepted",
    ),
    "commits the first tokens of the block": (
        {"commit": commit(lambda c, kv, i, n: (c, kv, jnp.broadcast_to(jnp.arange(i.shape[1]), i.shape), n))},
        "commit must append block_kv of the tokens",
    ),
    "commits in reverse": ({"commit": commit(reverse_commit)}, "commit must append block_kv of the tokens"),
    "commits by slice": ({"commit": commit_slice}, "commit must not change entries below cache.length"),
    "sees unused entries": (
        {"forward": forward(lambda t, p, c, m: (t, p, c.replace(length=jnp.full_like(c.length, 16)), m))},
        "must see only the cache entries below cache.length",
    ),
    "takes the positions of the first sequence": (
        {"forward": forward(lambda t, p, c, m: (t, jnp.broadcast_to(p[:1], p.shape), c, m))},
        "the same logits in a batch and alone, but sequence 1",
    ),
    "ignores the mask": (
        {"forward": forward(lambda t, p, c, m: (t, p, c, jnp.ones_like(m)))},
        r"see token k only where block_mask\[q, k\], but token 1",
    ),
    "takes the mask of the first sequence": (
        {"forward": forward(lambda t, p, c, m: (t, p, c, m[0] if m.ndim == 3 else m))},
        r"must take a block_mask \[B, T, T\], but sequence 1 .* apply mask\[b\] to the scores of sequence b",
    ),
    "joins the masks of all sequences": (
        {"forward": forward(lambda t, p, c, m: (t, p, c, jnp.any(m, axis=0) if m.ndim == 3 else m))},
        r"must take a block_mask \[B, T, T\], but sequence 0",
    ),
    "takes the masks in another order": (
        {"forward": forward(lambda t, p, c, m: (t, p, c, m[::-1] if m.ndim == 3 else m))},
        r"must take a block_mask \[B, T, T\], but sequence 0",
    ),
    "ignores the cache": (
        {"forward": forward(lambda t, p, c, m: (t, p, c.replace(length=jnp.zeros_like(c.length)), m))},
        "the same logits for all sizes of blocks",
    ),
    "caches other keys": ({"forward": keys_of_other_scale}, "the same logits for all sizes of blocks"),
    "counts positions itself": (
        {"forward": forward(lambda t, p, c, m: (t, c.length[:, None] + jnp.arange(t.shape[1])[None], c, m))},
        "must take a token's position from positions",
    ),
    "takes positions from the order in the block": (
        {"forward": forward(lambda t, p, c, m: (t, jnp.broadcast_to(jnp.arange(t.shape[1])[None], t.shape), c, m))},
        "must take a token's position from positions",
    ),
    "shifts positions behind a cache": (
        {"forward": forward(lambda t, p, c, m: (t, p + (c.length > 0).astype(jnp.int32)[:, None], c, m))},
        "positions of tokens behind a cache are off by 1",
    ),
    "adds the cache's length to positions": (
        {"forward": forward(lambda t, p, c, m: (t, p + c.length[:, None], c, m))},
        r"positions of tokens behind a cache are off by cache\.length",
    ),
    "NaN past the last position": ({"forward": nan_past_the_end}, r"jnp\.minimum\(positions, max_positions - 1\)"),
    "deletes the cache": ({"forward": delete_cache}, "must not write the cache"),
    "other without jit": (
        {"logits": logits(lambda x: x if isinstance(x, jax.core.Tracer) else x + jnp.sin(x))},
        "other logits without jit",
    ),
    "other under vmap": ({"logits": logits(other_under_vmap)}, "under jax.vmap"),
}


@pytest.mark.parametrize(("methods", "error", "message"), WRONG_FORM.values(), ids=WRONG_FORM)
def test_wrong_form_is_found(methods, error, message):
    with pytest.raises(error, match=message):
        check(methods)


# One of each part: commit, cache, mask, positions.
QUICK = (
    "commits rejected tokens",
    "sees unused entries",
    "joins the masks of all sequences",
    "counts positions itself",
    "NaN past the last position",
)


@pytest.mark.parametrize(
    ("methods", "message"),
    [(pytest.param if name in QUICK else slow)(*WRONG_RESULT[name], id=name) for name in WRONG_RESULT],
)
def test_wrong_results_are_found(methods, message):
    with pytest.raises(AssertionError, match=message):
        check(methods)


def test_an_exception_for_a_mask_per_sequence_is_explained():
    def one_mask(tokens, positions, cache, mask):
        return tokens, positions, cache, mask.reshape(tokens.shape[1], tokens.shape[1])

    with pytest.raises(TypeError) as caught:
        check({"forward": forward(one_mask)})
    assert any("apply mask[b] to the scores of sequence b" in note for note in caught.value.__notes__)


def test_python_that_reads_traced_values_is_explained():
    def read(tokens, positions, cache, mask):
        return tokens, positions if cache.length[0] > 0 else 0 * positions, cache, mask

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        check({"forward": forward(read)})
    assert any("Use jnp.where" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("scale", "message"),
    [(0.0, "do not depend on the tokens before"), (jnp.nan, "params give logits that are not finite")],
)
def test_parameters_that_show_nothing_are_refused(scale, message):
    params = tiny_llama(num_layers=1)
    (layer,) = params.layers
    layer = with_arrays(layer, {"attention.output": scale * layer.attention.output})
    with pytest.raises(ValueError, match=message):
        check_decoder(params.decoder, dataclasses.replace(params, layers=(layer,)))


def absolute(first):
    """Returns a `forward` with absolute positions from `first` on: each shifts the ids of the tokens by one."""
    return forward(lambda t, p, c, m: ((t + p + first) % 13, p, c, m))


CONSISTENT = {
    "twice the rotary angles": {"forward": forward(lambda t, p, c, m: (t, 2 * p, c, m))},
    "absolute positions from 1": {"forward": absolute(1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSISTENT)
def test_errors_of_all_results_are_found_with_a_reference_and_announced_without(name, caplog):
    params = tiny_llama(num_layers=1)

    def reference(tokens):
        is_absolute = name.startswith("absolute")
        return plain_llama.logits(params, (tokens + np.arange(len(tokens))) % 13 if is_absolute else tokens)

    check(CONSISTENT[name], params)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jlade", logging.WARNING)
    assert "cannot be seen. Pass reference=" in record.message
    with pytest.raises(AssertionError, match=r"other logits than reference. Compare its positions \(the first is 0"):
        check(CONSISTENT[name], params, reference=reference)


@pytest.mark.slow
def test_rotary_positions_may_count_from_any_number():
    params = tiny_llama(num_layers=1)
    shifted = {"forward": forward(lambda t, p, c, m: (t, p + 1, c, m))}
    check(shifted, params, reference=lambda tokens: plain_llama.logits(params, tokens))


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("logits", TypeError, "reference must be a function .* got 'logits'"),
        (lambda tokens: np.zeros((1, 15, 13)), ValueError, r"\[L, V\] = \[15, 13\] .*, got \[1, 15, 13\]"),
    ],
)
def test_wrong_references_are_refused(reference, error, message):
    with pytest.raises(error, match=message):
        check({}, reference=reference)
