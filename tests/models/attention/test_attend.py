"""Plain attention against a reference, and the decoder that is resolved for a device."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import mesh as mesh_lib
from jlade.models.attention import Operands, attend, plain, tpu
from jlade.models.llama import Llama
from tests.models.attention.reference import plain_attention
from tests.models.devices import HOPPER, TPU, hopper_kernels
from tests.tiny import slow, tiny_llama


def random_case(seed: int, dtype=np.float32, mask_shape=(5, 5)):
    rng = np.random.default_rng(seed)
    shapes = [(3, 5, 4, 6), (3, 5, 2, 6), (3, 5, 2, 6), (3, 2, 9, 6), (3, 2, 9, 6)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    mask = rng.random(mask_shape) < 0.5
    return [jnp.asarray(a, dtype) for a in arrays], np.array([0, 4, 9], np.int32), mask | np.eye(5, dtype=bool)


@pytest.fixture(params=[False, True], ids=["loop", "unrolled"])
def form(request, monkeypatch):
    """Runs a test with the form for CPUs and TPUs, and with that for GPUs."""

    def attend(operands, window, scale, cap, split):
        options = {"window": window, "scale": scale, "cap": cap, "split": split}
        return plain.attend_in_chunks(operands, **options, unrolled=request.param)

    monkeypatch.setattr(plain, "attend", attend)


@pytest.mark.parametrize(("chunk", "scores"), [(4, 1), slow(1, 1), slow(4, 3 * 5 * 4 * 8), slow(256, 2**24)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mask_shape", [(5, 5), (3, 5, 5)])
def test_equals_plain_attention(form, mask_shape, window, chunk, scores, monkeypatch):
    """The cache has 9 entries, of which the sequences use 0, 4 and 9; some chunk sizes divide 9, others do not."""
    monkeypatch.setattr(plain, "CHUNK", chunk)
    monkeypatch.setattr(plain, "SCORES", scores)
    arrays, length, mask = random_case(chunk, mask_shape=mask_shape)
    positions = length[:, None] + np.array([0, 1, 2, 1, 2], np.int32)
    got = jax.jit(functools.partial(attend, window=window))(Operands(*arrays, length, mask, positions))
    expected = plain_attention(*map(np.asarray, arrays), length, mask, positions, window or 99)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize(("window", "size"), [(4, 3), (4, 4), (4, 7), (7, 8), (1, 1)])
def test_a_ring_has_the_tokens_of_the_window(form, window, size, chunk, monkeypatch):
    """Against the whole cache, for texts before the ring is full, when it is, and after it went round."""
    monkeypatch.setattr(plain, "CHUNK", chunk)
    rng, length = np.random.default_rng(size), np.array([0, size - 1, size, 3 * size + 2], np.int32)
    whole = [rng.normal(size=(4, 2, max(length), 6)).astype(np.float32) for _ in range(2)]
    ring = [rng.normal(size=(4, 2, size, 6)).astype(np.float32) for _ in whole]
    for to, of in zip(ring, whole, strict=True):
        for b, position in np.argwhere(np.arange(max(length)) < length[:, None]):
            to[b, :, position % size] = of[b, :, position]
    block = [rng.normal(size=(4, 5, heads, 6)).astype(np.float32) for heads in (4, 2, 2)]
    mask, positions = np.tri(5, dtype=bool), length[:, None] + np.array([0, 1, 2, 1, 9], np.int32)
    got = jax.jit(functools.partial(attend, window=window))(Operands(*block, *ring, length, mask, positions))
    np.testing.assert_allclose(got, plain_attention(*block, *whole, length, mask, positions, window), atol=1e-5)


@pytest.mark.parametrize(
    "run",
    [
        functools.partial(plain.attend_in_chunks, unrolled=False),
        functools.partial(plain.attend_in_chunks, unrolled=True),
        functools.partial(tpu.attend, interpret=True),
    ],
    ids=["loop", "unrolled", "tpu"],
)
def test_numbers_that_are_not_finite_reach_the_tokens_that_see_them_alone(run, monkeypatch):
    monkeypatch.setattr(plain, "attend", lambda operands, window, *_: run(operands, window=window))
    (queries, keys, values, *cached), length, mask = random_case(2)
    keys = keys.at[0, 3, 0].set(jnp.nan)
    values = values.at[1, 2, 1].set(jnp.nan).at[2, 4, 0].set(jnp.inf)
    arrays = queries, keys, values, *cached
    got = np.asarray(jax.jit(attend)(Operands(*arrays, length, mask)))
    with np.errstate(all="ignore"):
        expected = plain_attention(*map(np.asarray, arrays), length, mask, np.zeros((3, 5)))
    is_finite = np.isfinite(expected)
    assert 0.5 < np.mean(is_finite) < 1
    np.testing.assert_array_equal(np.isfinite(got), is_finite)
    np.testing.assert_allclose(got[is_finite], expected[is_finite], atol=1e-5)


@pytest.mark.slow
def test_bfloat16_keeps_its_type_and_is_close(form):
    arrays, length, mask = random_case(0, jnp.bfloat16)
    got = attend(Operands(*arrays, length, mask))
    assert got.dtype == jnp.bfloat16
    expected = plain_attention(*(np.asarray(a, np.float32) for a in arrays), length, mask, np.zeros((3, 5)))
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.03)


@pytest.mark.parametrize("chunk", [4, 256])
def test_own_scale_cap_and_sinks(form, chunk, monkeypatch):
    """The sinks have logits of the scores' size, and some that take all the weight or none."""
    monkeypatch.setattr(plain, "CHUNK", chunk)
    arrays, length, mask = random_case(1)
    positions = length[:, None] + np.array([0, 1, 2, 1, 2], np.int32)
    sinks, variations = np.array([-1e4, 0.5, 2, 1e4], np.float32), {"window": 3, "scale": 0.8, "cap": 1.5}
    got = attend(Operands(*arrays, length, mask, positions, sinks), **variations)
    expected = plain_attention(*map(np.asarray, arrays), length, mask, positions, **variations, sinks=sinks)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not np.any(got[:, :, 3])


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["TT", "1TT"])
@pytest.mark.parametrize("window", [None, 3])
def test_vmap_over_sequences_with_their_own_masks(form, window, axes):
    arrays, length, mask = random_case(0, mask_shape=(3, 5, 5))
    positions = length[:, None] + np.array([[0, 1, 2, 1, 2]], np.int32)
    run = functools.partial(attend, window=window)
    own = mask if axes == "TT" else mask[:, None]
    alone = jax.vmap(run)(Operands(*(x[:, None] for x in (*arrays, length)), own, positions[:, None]))
    np.testing.assert_allclose(alone[:, 0], run(Operands(*arrays, length, mask, positions)), atol=1e-6)


def test_entries_of_the_cache_beyond_its_length_are_not_read(form):
    arrays, length, mask = random_case(0)
    unused = np.arange(9)[None, None, :, None] >= length[:, None, None, None]
    poisoned = [*arrays[:3], *(jnp.where(unused, 1e30, a) for a in arrays[3:])]
    np.testing.assert_array_equal(attend(Operands(*poisoned, length, mask)), attend(Operands(*arrays, length, mask)))


@pytest.mark.parametrize("window", [None, 3])
def test_a_single_row_is_that_of_two(window):
    """The form for TPUs, of one token of each sequence and as many KV heads as heads."""
    (queries, keys, values, *cached), length, _ = random_case(0)
    arrays = [queries[:, :1, :2], keys[:, :1], values[:, :1], *cached]
    mask, positions, sinks = np.ones((1, 1, 1), bool), length[:, None], np.array([0.3, -0.5], np.float32)
    got = plain.attend_row_twice(Operands(*arrays, length, mask, positions, sinks), window=window)
    expected = plain_attention(*map(np.asarray, arrays), length, mask[0], positions, window or 99, sinks=sinks)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def exported(platforms, block_size, capacity, axis=None):
    """Returns the program for the platforms, before it is compiled."""
    shapes = [(1, block_size, 8, 16), (1, block_size, 2, 16), (1, block_size, 2, 16)] + 2 * [(1, 2, capacity, 16)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    arrays += [jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((block_size, block_size), bool)]
    run = jax.jit(lambda *arrays: attend(Operands(*arrays)))
    if axis is not None:
        arrays, run = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays], jax.vmap(run, axis)
    return jax.export.export(jax.jit(run), platforms=platforms)(*arrays).mlir_module()


@pytest.mark.parametrize("axis", [None, 0])
def test_gpus_have_no_loop_and_other_devices_nothing_else(axis):
    """Two products with the block and two with the cache, in the one form or in the other."""
    counts = {}
    for platform in ("cuda", "rocm", "cpu", "tpu"):
        program = exported([platform], 5, 600, axis)
        counts[platform] = program.count("stablehlo.dot_general"), program.count("stablehlo.while")
    assert counts == {"cuda": (4, 0), "rocm": (4, 0), "cpu": (4, 1), "tpu": (4, 1)}
    assert exported(["cpu", "cuda"], 5, 600, axis).count("stablehlo.while") == 1


def test_gpus_hold_a_part_of_the_scores_of_long_texts():
    program = exported(["cuda"], 512, 2**16)
    shapes = set(re.findall(r"tensor<([\dx]+)xf32>", program))
    assert max(math.prod(map(int, shape.split("x"))) for shape in shapes) == plain.SCORES


def test_unknown_implementations_are_refused():
    arrays, length, mask = random_case(0)
    with pytest.raises(ValueError, match=r"attention must be one of 'auto', 'plain', 'gpu', 'tpu'; got 'fast'"):
        attend(Operands(*arrays, length, mask), implementation="fast")


@pytest.mark.parametrize("implementation", ["auto", "plain"])
def test_auto_is_plain_in_a_program(implementation, monkeypatch):
    monkeypatch.setattr(plain, "attend", lambda *arguments: "plain")
    arrays, length, mask = random_case(0)
    assert attend(Operands(*arrays, length, mask), implementation=implementation) == "plain"


@pytest.mark.parametrize(("name", "module"), [("gpu", "hopper"), ("tpu", "tpu")])
def test_a_named_kernel_runs_with_all_variations(name, module, monkeypatch):
    """On a CPU too: a program is not asked for its device."""
    monkeypatch.setattr(f"jlade.models.attention.{module}.attend", lambda operands, *variations: (name, *variations))
    arrays, length, mask = random_case(0)
    operands = Operands(*arrays, length, mask, np.zeros((3, 5), np.int32))
    assert attend(operands, 100, name, 0.3, 5.0) == (name, 100, 0.3, 5.0)
    assert attend(operands, implementation=name) == (name, None, None, None)


@pytest.mark.parametrize("implementation", ["auto", "gpu", "tpu"])
def test_a_window_without_positions_is_refused(implementation):
    arrays, length, mask = random_case(0)
    with pytest.raises(ValueError, match=r"a window \(3\) needs Operands.positions \[B, T\]; got None"):
        attend(Operands(*arrays, length, mask), 3, implementation)


class OwnLlama(Llama):
    """A subclass for parameters in a dictionary."""

    def init_cache(self, params, *args):
        return super().init_cache(params["model"], *args)


def test_a_decoder_is_resolved_for_the_device_of_its_parameters(monkeypatch):
    params = tiny_llama()
    decoder = Llama(params.config)
    assert decoder.on(params) == Llama(params.config, "plain", pads_for="cpu")
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [TPU])
    assert Llama(params.config, "tpu").on(params).attention == "tpu"
    assert decoder.on(params).attention == "tpu"
    assert OwnLlama(params.config).on({"model": params}) == OwnLlama(params.config, "tpu")
    assert Llama(params.config, "plain").on(params).attention == "plain"


@hopper_kernels
def test_a_decoder_is_resolved_for_the_dtype_of_its_parameters(monkeypatch):
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [HOPPER])
    params = tiny_llama(head_dim=16)
    with pytest.raises(ValueError, match="these are float32 and 16"):
        Llama(params.config, "gpu").on(params)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert Llama(params.config, "gpu").on(half).attention == "gpu"


def test_a_kernel_for_another_device_is_refused_before_it_runs():
    params = tiny_llama()
    with pytest.raises(ValueError, match="'tpu' needs a TPU"):
        Llama(params.config, "tpu").on(params)
    with pytest.raises(ValueError, match="'tpu' needs a TPU"):
        jlade.generate(params, [1, 2], max_new_tokens=2, decoder=Llama(params.config, attention="tpu"))


def test_a_decoder_is_resolved_for_parameters_on_no_device():
    params = tiny_llama()
    decoder = Llama(params.config)
    resolved = [decoder.on(jax.eval_shape(lambda: params)), decoder.on(jax.device_get(params))]
    jax.jit(lambda params: resolved.append(decoder.on(params)))(params)
    assert resolved == [Llama(params.config, "plain", pads_for="cpu")] * 3
