"""Keys and values in 8 bits: their rounding, and that a text is that of plain decoding with such a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from JAX 0.11.2 on

import jlade
from jlade.costs import work as work_lib
from jlade.mesh import num_bytes
from jlade.models import attention, kv_rounding
from jlade.models.attention import Operands, hopper, tpu
from jlade.models.kv_rounding import DTYPES, FLOAT8, INT8
from jlade.models.llama import Llama, init_params
from jlade.testing import check_decoder
from tests.models.devices import hopper_kernels
from tests.own_caches import Slots
from tests.tiny import LIKE_DEEPSEEK, LIKE_GEMMA_4, PAPER, RECURRENT, slow, tiny_llama

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [1], [3, 5]]
GEMMA_4 = LIKE_GEMMA_4 | {"num_experts": 0, "separate_experts": False, "per_layer_size": 0}
MODELS = {
    "llama": {},
    "windows": {"sliding_windows": (9, None)},
    "latent": LIKE_DEEPSEEK,
    "gemma 4": GEMMA_4,
    "recurrent": RECURRENT,
}
NEW = {"max_new_tokens": 16, "eos_ids": ()}
VECTORS = (
    np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32) * np.geomspace(1e-6, 1e4, 5)[:, None, None]
)


def float32(stored, scales):
    return np.asarray(kv_rounding.numbers(stored, np.float32)) * np.asarray(scales)[..., None]


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_no_element_changes_by_more_than_it_may(kv_dtype):
    vectors = VECTORS.astype(np.float32)
    stored, scales = kv_rounding.rounded(vectors, kv_dtype)
    assert (stored.dtype.itemsize, scales.dtype, scales.shape) == (1, np.float32, (2, 5, 3))
    largest = np.abs(vectors).max(-1)
    np.testing.assert_allclose(scales, largest / (127 if kv_dtype == INT8 else 448), rtol=1e-6)
    error, scales = np.abs(float32(stored, scales) - vectors), np.asarray(scales)[..., None]
    most = scales / 2 if kv_dtype == INT8 else np.maximum(np.abs(vectors) / 16, scales / 1024)
    assert (error <= most * (1 + 1e-5)).all()
    assert error.max() > 0
    again = kv_rounding.rounded(float32(stored, scales[..., 0]), kv_dtype)
    np.testing.assert_array_equal(again[0], stored)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_vectors_of_zeros_and_of_numbers_that_are_not_finite(kv_dtype):
    vectors = np.zeros((1, 4, 1, 3), np.float32)
    vectors[0, 1:] = [[[1, np.nan, 2]], [[1, -np.inf, 2]], [[1e-42, 0, 0]]]
    stored, scales = kv_rounding.rounded(vectors, kv_dtype)
    np.testing.assert_array_equal(scales[0, :, 0], [1, np.nan, np.nan, 1])
    assert not np.any(stored)


def test_the_parts_of_a_latent_have_scales_of_their_own():
    vectors = np.concatenate([VECTORS[:, :, :1, :5], 1e3 * VECTORS[:, :, 1:2, :3]], axis=-1).astype(np.float32)
    stored, scales = kv_rounding.rounded(vectors, INT8, splits=(5,))
    assert scales.shape == (2, 5, 2)
    parts = [kv_rounding.rounded(part, INT8) for part in (vectors[..., :5], vectors[..., 5:])]
    np.testing.assert_array_equal(stored, np.concatenate([part[0] for part in parts], axis=-1))
    np.testing.assert_array_equal(scales, np.concatenate([part[1] for part in parts], axis=-1))


def rounded_case(kv_dtype, dtype, block_size=5, group=2, capacity=20):
    """Returns random operands in 8 bits, and the same ones in float32."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(3, *shape, 16)), jnp.float32)

    queries, mask = draw(block_size, 2 * group).astype(dtype), np.tri(block_size, dtype=bool)
    block, cached = ([draw(size, 2), draw(size, 2)] for size in (block_size, capacity))
    length = np.array([0, 7, capacity], np.int32)
    rest = length, mask, jnp.asarray(length[:, None] + np.arange(block_size, dtype=np.int32)), None
    block, cached = (kv_rounding.round_all(each, kv_dtype) for each in (block, cached))
    heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    numbers = [list(map(float32, each[:2], each[2:])) for each in (block, cached)]
    exact = Operands.of(queries.astype(jnp.float32), numbers[0], list(map(heads_first, numbers[1])), *rest)
    return Operands.of(queries, block, list(map(heads_first, cached)), *rest), exact


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("variations", [{}, {"window": 6, "cap": 2.0, "scale": 0.3}], ids=["", "variations"])
@pytest.mark.parametrize("form", ["plain", "tpu"])
def test_attention_reads_8_bits_as_the_numbers_that_they_are(form, variations, kv_dtype, monkeypatch):
    monkeypatch.setattr(tpu, "CHUNK", 16)
    operands, exact = rounded_case(kv_dtype, jnp.float32)
    # Entries that are not in use, as a window or a shorter text left them
    unused = np.arange(20) >= np.asarray(operands.cached_length)[:, None, None]
    operands = operands._replace(cached_value_scales=jnp.where(unused, 1e30, operands.cached_value_scales))
    run = functools.partial(attention.attend, implementation=form, **variations)
    if form == "tpu":
        monkeypatch.setattr(tpu, "attend", functools.partial(tpu.attend, interpret=True))
    got = jax.jit(run)(operands)
    np.testing.assert_allclose(got, attention.attend(exact, **variations), atol=2e-5)


@hopper_kernels
@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "variations"),
    [
        (INT8, jnp.bfloat16, {}),
        (FLOAT8, jnp.bfloat16, {"window": 60, "cap": 2.0, "scale": 0.3}),
        slow(INT8, jnp.float16, {}),
        slow(FLOAT8, jnp.float16, {}),
    ],
)
def test_the_kernel_of_gpus_reads_8_bits(kv_dtype, dtype, variations, monkeypatch):
    """A program has more chunks than slots of their numbers, and than slots of their scales."""
    monkeypatch.setattr(hopper, "PROGRAMS", 6)
    operands, exact = rounded_case(kv_dtype, dtype, capacity=264)
    unused = np.arange(264) >= np.asarray(operands.cached_length)[:, None, None]
    operands = operands._replace(cached_value_scales=jnp.where(unused, 1e30, operands.cached_value_scales))
    interpreted = functools.partial(hopper.attend, interpret=InterpretGPUParams(detect_races=True))
    monkeypatch.setattr(hopper, "attend", interpreted)
    got = jax.jit(functools.partial(attention.attend, implementation="gpu", **variations))(operands)
    assert got.dtype == dtype
    expected = attention.attend(exact, **variations)
    assert jnp.linalg.norm(got.astype(jnp.float32) - expected) < 2**-8 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_numbers_that_are_not_finite_reach_the_tokens_that_see_them_alone(kv_dtype):
    operands, _ = rounded_case(kv_dtype, jnp.float32)
    scales = operands.value_scales.at[1, 3, 1].set(jnp.nan)
    got = np.asarray(attention.attend(operands._replace(value_scales=scales)))
    seen = np.zeros((3, 5, 4), bool)
    seen[1, 3:, 2:] = True
    np.testing.assert_array_equal(np.isfinite(got).all(-1), ~seen)
    np.testing.assert_array_equal(np.isnan(got).all(-1), seen)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "kv_dtype"), [({}, INT8), ({"sliding_windows": (9, None)}, FLOAT8)])
def test_the_form_of_the_decoder(changes, kv_dtype):
    """Among other things, that results do not depend on the division into blocks."""
    params = tiny_llama(1, **changes)
    check_decoder(Llama(params.config, kv_dtype=kv_dtype), params)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_logits_are_those_of_a_cache_of_rounded_vectors(kv_dtype):
    """Against floating-point attention to vectors that NumPy has rounded: of one layer, so that it can round before."""
    params = tiny_llama(5, num_layers=1)
    decoder, tokens = params.decoder, np.array([PROMPTS[0]], np.int32)
    positions, mask = np.arange(tokens.size, dtype=np.int32)[None], np.tri(tokens.size, dtype=bool)
    rounding = dataclasses.replace(decoder, kv_dtype=kv_dtype)
    cache = rounding.init_cache(params, 1, 16)
    _, kept = rounding.forward(params, tokens, positions, cache, mask)
    _, floating = decoder.forward(params, tokens, positions, decoder.init_cache(params, 1, 16), mask)
    for (stored, scales), vectors in zip(zip(kept[0][:2], kept[0][2:], strict=True), floating[0], strict=True):
        scale = np.abs(vectors).max(-1, keepdims=True) / (127 if kv_dtype == INT8 else 448)
        numbers = vectors / scale
        numbers = np.round(numbers) if kv_dtype == INT8 else np.asarray(numbers).astype(jnp.float8_e4m3fn)
        np.testing.assert_allclose(float32(stored, scales), np.asarray(numbers, np.float32) * scale, rtol=1e-5)
    # The last token alone, after the others: it sees rounded vectors in the cache, and is one itself.
    everything = np.arange(tokens.size, dtype=np.int32)[None]
    cache = rounding.commit(cache, kept, everything, np.array([tokens.size - 1], np.int32))
    last, _ = rounding.forward(params, tokens[:, -1:], positions[:, -1:], cache, np.ones((1, 1), bool))
    both = tuple(float32(*pair) for pair in zip(kept[0][:2], kept[0][2:], strict=True))
    exact = decoder.commit(decoder.init_cache(params, 1, 16), [both], everything, np.array([tokens.size], np.int32))
    # The query of a token that the cache has already: hidden from its own block by a window of the whole cache
    seen = dataclasses.replace(exact, length=exact.length - 1)
    unrounded, _ = decoder.forward(params, tokens[:, -1:], positions[:, -1:], seen, np.ones((1, 1), bool))
    whole, _ = rounding.forward(params, tokens, positions, rounding.init_cache(params, 1, 16), mask)
    np.testing.assert_allclose(last[0, 0], whole[0, -1], atol=1e-4)
    assert np.abs(last - unrounded).max() > 1e-4  # whose own key and value are not rounded
    np.testing.assert_allclose(last, unrounded, atol=0.2)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("llama", INT8),
        ("latent", FLOAT8),
        slow("llama", FLOAT8),
        slow("latent", INT8),
        slow("windows", INT8),
        slow("gemma 4", FLOAT8),
        slow("recurrent", INT8),
    ],
)
def test_lookahead_has_the_text_of_plain_decoding(name, kv_dtype):
    params = tiny_llama(7, **MODELS[name])
    generate = functools.partial(jlade.generate, params, PROMPTS, kv_dtype=kv_dtype, **NEW)
    plain = generate(lookahead=None, keep_state=True)
    cache = plain.state.cache
    assert {x.dtype for x in (*cache.keys, *cache.values)} == {jnp.dtype(kv_rounding.STORED[kv_dtype])}
    np.testing.assert_array_equal(generate(lookahead=PAPER).tokens, plain.tokens)
    if name == "llama":
        floating = jlade.generate(params, PROMPTS, lookahead=None, **NEW)
        assert (floating.tokens != plain.tokens).any()


@pytest.mark.parametrize("lookahead", [None, slow(jlade.LookaheadConfig.tree(80, ngrams=jlade.NGramConfig(10, 5, 10)))])
def test_sampled_texts_too(lookahead):
    params = tiny_llama(7)
    sampling = jlade.SamplingConfig(temperature=0.8)
    generate = functools.partial(jlade.generate, params, PROMPTS, kv_dtype=INT8, sampling=sampling, **NEW)
    sampled = generate(lookahead=lookahead, key=jax.random.key(1))
    tree = generate(lookahead=jlade.LookaheadConfig.tree(15), key=jax.random.key(1))
    np.testing.assert_array_equal(tree.tokens, sampled.tokens)


@pytest.mark.parametrize(("name", "kv_dtype"), [("llama", INT8), slow("latent", FLOAT8)])
def test_turns_an_engine_and_a_mesh_give_that_text_too(name, kv_dtype):
    params = tiny_llama(7, **MODELS[name])
    generate = functools.partial(jlade.generate, params, kv_dtype=kv_dtype, lookahead=PAPER, **NEW)
    expected = generate(PROMPTS[:2], lookahead=None).tokens
    first = generate(PROMPTS[:2], max_new_tokens=9, keep_state=True)
    longer = [prompt + row[:9].tolist() for prompt, row in zip(PROMPTS, expected, strict=False)]
    second = generate(longer, max_new_tokens=7, state=first.state)
    np.testing.assert_array_equal(second.tokens, expected[:, 9:])
    with pytest.raises(ValueError, match=r"state is of another model or kv_dtype: .*int8.* accepted are .* float32"):
        generate(longer, state=first.state, kv_dtype=None)
    sizes = {"lookahead": 2} if name == "latent" else {"model": 2}
    for each in (sizes, {"data": 2}):
        np.testing.assert_array_equal(generate(PROMPTS[:2], mesh=jlade.make_mesh(**each)).tokens, expected)


@pytest.mark.parametrize(("kv_dtype", "sizes"), [(INT8, None), slow(FLOAT8, {"data": 2})])
def test_an_engine_with_prefixes_gives_that_text_too(kv_dtype, sizes):
    params, prompt = tiny_llama(7, max_positions=256), [*range(13)] * 12
    mesh = sizes and jlade.make_mesh(**sizes)
    expected = jlade.generate(params, [prompt, prompt[:-1]], kv_dtype=kv_dtype, lookahead=None, **NEW).tokens
    engine = functools.partial(jlade.Engine, params, max_sequences=2, capacity=256, lookahead=PAPER, mesh=mesh)
    with engine(kv_dtype=kv_dtype) as small, engine() as large:
        for each, text in zip((prompt, prompt[:-1]), expected, strict=True):
            assert small.submit(each, **NEW).result().tokens[0].tolist() == text.tolist()
        assert small.prompt_tokens[1] > 100
        ratio = small._reader.row_bytes / large._reader.row_bytes
        assert 0.4 < ratio < 0.65  # of 6 bytes and a scale to 24: little of a row is no cache


@pytest.mark.parametrize("name", MODELS)
def test_costs_know_the_bytes_of_the_cache(name):
    params = tiny_llama(7, **MODELS[name])
    for kv_dtype in (None, *DTYPES):
        cache = dataclasses.replace(params.decoder, kv_dtype=kv_dtype).init_cache(params, 1, 40)
        assert work_lib.cache_bytes(work_lib.shard(params, 1, kv_dtype), 40) == num_bytes(cache) - 4  # the length


def test_an_inspection_and_a_plan_count_them():
    params = init_params(jax.random.key(0), tiny_llama().config, jnp.bfloat16)
    options = {"lookahead": None, "capacity": 64}
    found = jlade.inspect(params, "cpu", kv_dtype=INT8, **options)
    assert (found.kv_dtype, found.facts()["kv_dtype"]) == (INT8, INT8)
    plans = [jlade.plan(params.config, "h100", kv_dtype=kv_dtype, **options) for kv_dtype in (None, FLOAT8)]
    sizes = [plan.options[0].memory.cache for plan in plans]
    assert sizes == [2 * 2 * 2 * 64 * size for size in (2 * 6, 6 + 4)]
    assert plans[1].facts()["kv_dtype"] == FLOAT8


def test_a_dtype_that_is_none_and_a_model_with_a_cache_of_its_own_are_refused():
    params = tiny_llama()
    message = r"kv_dtype must be 'int8', 'float8_e4m3fn', or None for the dtype of the model; got 'int4'"
    for call in (
        lambda: jlade.generate(params, [1], kv_dtype="int4"),
        lambda: jlade.Engine(params, kv_dtype="int4"),
        lambda: jlade.inspect(params, "cpu", kv_dtype="int4"),
        lambda: jlade.plan(params.config, "h100", kv_dtype="int4"),
        lambda: Llama(params.config, kv_dtype="int4"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="kv_dtype='int8' is for jlade's own models, and Slots makes its own cache"):
        jlade.generate(params, [1], kv_dtype=INT8, decoder=Slots(params.config))
    with pytest.raises(ValueError, match="kv_dtype must be that of the decoder, 'int8', or None; got 'float8_e4m3fn'"):
        jlade.generate(params, [1], kv_dtype=FLOAT8, decoder=Llama(params.config, kv_dtype=INT8))
