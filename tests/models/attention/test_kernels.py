"""The kernels, simulated on the CPU, against the reference of plain attention; and lowered for their devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from JAX 0.11.2 on

import jlade
from jlade import mesh as mesh_lib
from jlade.generation import request
from jlade.models import kv_rounding
from jlade.models.attention import Operands, hopper
from jlade.models.attention import tpu as tpu_module
from jlade.models.llama import Llama
from tests.models.attention.reference import plain_attention
from tests.models.devices import HOPPER, TPU, hopper_kernels
from tests.models.pages import in_pages
from tests.tiny import slow, tiny_llama

gpu = functools.partial(hopper.attend, interpret=InterpretGPUParams(detect_races=True))
tpu = functools.partial(tpu_module.attend, interpret=True)
KERNELS = [pytest.param(gpu, id="gpu", marks=hopper_kernels), pytest.param(tpu, id="tpu")]


def random_case(block_size, heads, kv_heads, head_dim, capacity, lengths, dtype, num_masks=1):
    """Returns random operands, and the same with huge numbers in the cache entries that are not in use."""
    rng = np.random.default_rng(block_size)
    block, cache = (len(lengths), block_size, kv_heads, head_dim), (len(lengths), kv_heads, capacity, head_dim)
    shapes = [(len(lengths), block_size, heads, head_dim), block, block, cache, cache]
    arrays = [jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype) for shape in shapes]
    mask = (rng.random((num_masks, block_size, block_size)) < 0.5) | np.eye(block_size, dtype=bool)
    unused = np.arange(capacity)[None, None, :, None] >= np.array(lengths)[:, None, None, None]
    poisoned = [*arrays[:3], *(jnp.where(unused, jnp.asarray(1e30, dtype), x) for x in arrays[3:])]
    rest = np.array(lengths, np.int32), mask
    return Operands(*arrays, *rest), Operands(*poisoned, *rest)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "head_dim", "capacity", "lengths", "num_masks"),
    [
        (1, 2, 2, 128, 256, [130], 1),
        (5, 4, 1, 48, 72, [0, 33, 72], 3),
        (8, 2, 2, 64, 64, [50, 0], 1),  # a single chunk
        (2, 2, 2, 16, 70, [70], 1),  # not a multiple of 8
        (2, 2, 1, 16, 24, [20], 1),  # less than a chunk
        (70, 2, 1, 16, 200, [64, 200], 2),  # several tiles of queries and of the block
    ],
)
def test_equals_plain_attention(
    kernel, block_size, heads, kv_heads, head_dim, capacity, lengths, num_masks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hopper, "PROGRAMS", 3 * kv_heads * len(lengths))
    monkeypatch.setattr(hopper, "SLOTS", 2)  # fewer than the chunks of a program, in the last case
    monkeypatch.setattr(tpu_module, "CHUNK", 32)
    shape = block_size, heads, kv_heads, head_dim, capacity, lengths
    operands, poisoned = random_case(*shape, jnp.bfloat16, num_masks)
    run = jax.jit(kernel)
    got = run(operands)
    assert got.dtype == jnp.bfloat16
    arrays, (length, mask) = [np.asarray(x, np.float32) for x in operands[:5]], operands[5:7]
    expected = plain_attention(*arrays, length, mask, np.zeros((len(lengths), block_size)))
    difference = np.linalg.norm(np.asarray(got, np.float32) - expected)
    assert difference < 2**-8 * np.linalg.norm(expected)  # a bfloat16 has 8 significant bits
    np.testing.assert_array_equal(run(poisoned), got)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("in_8_bits", [False, slow(True)])
def test_a_cache_in_pages_is_read_as_one_in_rows(kernel, in_8_bits, monkeypatch):
    """Pages of two chunks, in any order; page 0 and others that no sequence has hold large numbers."""
    monkeypatch.setattr(hopper, "PROGRAMS", 6)
    monkeypatch.setattr(tpu_module, "CHUNK", 256)
    size, lengths = 128, [0, 130, 384]
    operands, _ = random_case(5, 4, 2, 32, 384, lengths, jnp.bfloat16)
    if in_8_bits:
        keys, values, *scales = kv_rounding.round_all(operands[1:3], "int8")
        cached = (jnp.swapaxes(x, 1, 2) for x in operands[3:5])
        rounded = kv_rounding.round_all(list(cached), "int8")
        *cached, key_scales, value_scales = (jnp.swapaxes(x, 1, 2) for x in rounded)
        operands = Operands(operands[0], keys, values, *cached, *operands[5:9], *scales, key_scales, value_scales)
    table = (1 + np.random.default_rng(0).permutation(9)).reshape(3, 3).astype(np.int32)
    names = [name for name in Operands._fields if name.startswith("cached_") and name != "cached_length"]
    of_cache = {name: getattr(operands, name) for name in names}
    of_cache = {name: x if x is None else in_pages(x, table, size) for name, x in of_cache.items()}
    paged = operands._replace(**of_cache, table=table)
    np.testing.assert_array_equal(jax.jit(kernel)(paged), jax.jit(kernel)(operands))


def test_float32_on_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu_module, "CHUNK", 32)
    operands, _ = random_case(5, 4, 2, 6, 70, [0, 33, 70], jnp.float32)
    arrays, (length, mask) = map(np.asarray, operands[:5]), operands[5:7]
    expected = plain_attention(*arrays, length, mask, np.zeros((3, 5)))
    np.testing.assert_allclose(tpu(operands), expected, atol=1e-5)


def in_ring(text, lengths, capacity):
    """Returns a cache [B, KH, S, D] of the last tokens of texts [B, KH, P, D], and huge numbers in its free entries."""
    ring = np.full((*text.shape[:2], capacity, text.shape[3]), 1e30, np.float32)
    for b, length in enumerate(lengths):
        for position in range(length):
            ring[b, :, position % capacity] = text[b, :, position]
    return jnp.asarray(ring, text.dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("variations", "has_sinks"),
    [
        ({"scale": 0.4, "cap": 1.5}, False),
        ({}, True),
        ({"window": 60}, False),
        ({"scale": 0.4, "cap": 1.5, "window": 60}, True),
    ],
    ids=["scale and cap", "sinks", "window", "all"],
)
@pytest.mark.parametrize(("block_size", "num_masks"), [(5, 1), slow(70, 3)])
def test_variations(kernel, block_size, num_masks, variations, has_sinks, monkeypatch):
    """The reference has the whole text. With a window, the kernel has a ring that goes round in the last sequence."""
    monkeypatch.setattr(hopper, "PROGRAMS", 6)
    monkeypatch.setattr(tpu_module, "CHUNK", 32)
    lengths = [0, 33, 180]
    operands, poisoned = random_case(block_size, 4, 2, 16, 184, lengths, jnp.bfloat16, num_masks)
    rng = np.random.default_rng(0)
    positions = np.array(lengths)[:, None] + rng.integers(0, 9, (3, block_size))
    sinks = rng.normal(size=4).astype(np.float32) if has_sinks else None
    arrays = [np.asarray(x, np.float32) for x in operands[:5]]
    every = {"window": 999, "sinks": sinks} | variations
    expected = plain_attention(*arrays, *operands[5:7], positions, **every)
    if "window" in variations:
        cached_keys, cached_values = (in_ring(x, lengths, 88) for x in operands[3:5])
        poisoned = poisoned._replace(cached_keys=cached_keys, cached_values=cached_values)
    poisoned = poisoned._replace(positions=jnp.asarray(positions, jnp.int32), sinks=sinks)
    got = jax.jit(functools.partial(kernel, **variations))(poisoned)
    difference = np.linalg.norm(np.asarray(got, np.float32) - expected)
    assert difference < 2**-8 * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_masks", [1, 2])
def test_vmap(kernel, num_masks, monkeypatch):
    monkeypatch.setattr(hopper, "PROGRAMS", 1)  # otherwise one sequence alone is split, and rounded, differently
    operands, _ = random_case(3, 2, 1, 16, 64, [3, 64], jnp.bfloat16, num_masks)
    arrays, masks = operands[:6], operands.block_mask
    mask, axis = (masks, None) if num_masks == 1 else (masks[:, None], 0)
    each = jax.vmap(kernel, in_axes=(Operands(*[0] * len(arrays), axis),))
    alone = each(Operands(*(x[:, None] for x in arrays), mask))
    np.testing.assert_array_equal(alone[:, 0], kernel(Operands(*arrays, masks)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "kernel", "device", "dtype", "variations"),
    [
        pytest.param("gpu", hopper, gpu, HOPPER, jnp.bfloat16, {}, id="gpu", marks=hopper_kernels),
        pytest.param("tpu", tpu_module, tpu, TPU, jnp.float32, {}, id="tpu"),
        pytest.param(
            *("tpu", tpu_module, tpu, TPU, jnp.float32),
            {"sliding_windows": (5,), "attention_scale": 0.5, "attention_cap": 2.0},
            id="tpu with variations",
        ),
    ],
)
def test_same_text(name, module, kernel, device, dtype, variations, monkeypatch):
    """A whole decode, a short one: simulating a GPU takes milliseconds per instruction."""
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [device])
    monkeypatch.setattr(module, "attend", kernel)
    monkeypatch.setattr(hopper, "PROGRAMS", 2)
    monkeypatch.setattr(tpu_module, "CHUNK", 8)
    monkeypatch.setattr(request, "CHUNKS_ON_CPU", ((4, 0),))
    shape = {"head_dim": 16, "num_kv_heads": 1, "num_layers": 1, "max_positions": 64}
    params = jax.tree.map(lambda x: x.astype(dtype), tiny_llama(**shape, **variations))

    def generate(attention: str) -> np.ndarray:
        settings = {"lookahead": jlade.LookaheadConfig.paper(2, 3, 2), "max_new_tokens": 12, "eos_ids": ()}
        return jlade.generate(params, [1, 2, 3, 1, 2], decoder=Llama(params.config, attention), **settings).tokens

    np.testing.assert_array_equal(generate(name), generate("plain"))


@pytest.mark.parametrize(
    ("block_size", "group", "head_dim"),
    [(120, 4, 128), slow(1, 1, 128), slow(8, 4, 64), slow(128, 7, 80), slow(8, 1, 96)],
)
@pytest.mark.parametrize(
    ("num_masks", "kv_dtype", "variations"),
    [
        (1, None, {}),
        (2, None, {}),
        (1, "float8_e4m3fn", {}),
        (1, "int8", {"window": 512, "scale": 0.1, "cap": 50.0}),
    ],
    ids=["one mask", "two masks", "float8", "all variations"],
)
@pytest.mark.parametrize(("platform", "attend"), [("cuda", hopper.attend), ("tpu", tpu_module.attend)])
def test_lowers(platform, attend, variations, kv_dtype, num_masks, block_size, group, head_dim):
    """The compiler passes of Pallas run without the device, and raise for programs that it does not accept."""
    block, cache = (2, block_size, 8, head_dim), (2, 8, 8192, head_dim)
    of_keys = jnp.bfloat16 if kv_dtype is None else kv_rounding.STORED[kv_dtype]
    queries = jax.ShapeDtypeStruct((2, block_size, 8 * group, head_dim), jnp.bfloat16)
    arrays = [jax.ShapeDtypeStruct(shape, of_keys) for shape in (block, block, cache, cache)]
    scales = [jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32) for x in arrays if kv_dtype]
    lengths, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2,), (2, block_size)))
    sinks = jax.ShapeDtypeStruct((8 * group,), jnp.bfloat16) if variations else None
    mask = jax.ShapeDtypeStruct((num_masks, block_size, block_size), bool)
    device = jax.sharding.AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("one",), abstract_device=device if platform == "tpu" else None)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.export.export(jax.jit(functools.partial(attend, **variations)), platforms=[platform])
        program = lowered(Operands(queries, *arrays, lengths, mask, positions, sinks, *scales)).mlir_module()
    assert {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform] in program
