"""The kernels against the same reference as plain attention, simulated on the CPU; and lowered for their devices."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from JAX 0.11.2 on

import jlade
from jlade import decoding
from jlade.models import attention, attention_gpu, attention_tpu
from jlade.models.llama import Llama
from tests.models.test_attention import plain_attention
from tests.tiny import tiny_llama

gpu = functools.partial(attention_gpu.attend, interpret=InterpretGPUParams(detect_races=True))
tpu = functools.partial(attention_tpu.attend, interpret=True)
simulated_gpu = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="simulating the GPU needs JAX 0.11.2")
KERNELS = [pytest.param(gpu, id="gpu", marks=simulated_gpu), pytest.param(tpu, id="tpu")]

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = types.SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5e")


def random_case(block_size, heads, kv_heads, head_dim, capacity, lengths, dtype):
    """Random arguments, and the same with huge numbers where the cache is not in use."""
    rng = np.random.default_rng(block_size)
    block, cache = (len(lengths), block_size, kv_heads, head_dim), (len(lengths), kv_heads, capacity, head_dim)
    shapes = [(len(lengths), block_size, heads, head_dim), block, block, cache, cache]
    arrays = [jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype) for shape in shapes]
    mask = (rng.random((block_size, block_size)) < 0.5) | np.eye(block_size, dtype=bool)
    unused = np.arange(capacity)[None, None, :, None] >= np.array(lengths)[:, None, None, None]
    poisoned = [*arrays[:3], *(jnp.where(unused, jnp.asarray(1e30, dtype), x) for x in arrays[3:])]
    rest = np.array(lengths, np.int32), mask
    return [*arrays, *rest], [*poisoned, *rest]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "head_dim", "capacity", "lengths"),
    [
        (1, 2, 2, 128, 256, [130]),
        (5, 4, 1, 48, 72, [0, 33, 72]),
        (8, 2, 2, 64, 50, [50, 0]),  # less than a chunk, and not a multiple of 8
        (70, 2, 1, 16, 200, [64, 200]),  # several tiles of queries and of the block
    ],
)
def test_equals_plain_attention(
    kernel, block_size, heads, kv_heads, head_dim, capacity, lengths, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention_gpu, "PROGRAMS", 3 * kv_heads * len(lengths))
    monkeypatch.setattr(attention_gpu, "SLOTS", 2)  # fewer than the chunks of a program, in the last case
    monkeypatch.setattr(attention_tpu, "CHUNK", 32)
    arguments, poisoned = random_case(block_size, heads, kv_heads, head_dim, capacity, lengths, jnp.bfloat16)
    run = jax.jit(kernel)
    got = run(*arguments)
    assert got.dtype == jnp.bfloat16
    arrays, (length, mask) = [np.asarray(x, np.float32) for x in arguments[:5]], arguments[5:]
    expected = plain_attention(*arrays, length, mask, np.zeros((len(lengths), block_size)))
    difference = np.linalg.norm(np.asarray(got, np.float32) - expected)
    assert difference < 2**-8 * np.linalg.norm(expected)  # a bfloat16 has 8 significant bits
    np.testing.assert_array_equal(run(*poisoned), got)


def test_float32_on_a_tpu(monkeypatch):
    monkeypatch.setattr(attention_tpu, "CHUNK", 32)
    arguments, _ = random_case(5, 4, 2, 6, 70, [0, 33, 70], jnp.float32)
    arrays, (length, mask) = map(np.asarray, arguments[:5]), arguments[5:]
    expected = plain_attention(*arrays, length, mask, np.zeros((3, 5)))
    np.testing.assert_allclose(tpu(*arguments), expected, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_vmap(kernel, monkeypatch):
    monkeypatch.setattr(attention_gpu, "PROGRAMS", 1)  # else one row alone is split, and rounded, otherwise
    arguments, _ = random_case(2, 2, 1, 16, 64, [3, 64], jnp.bfloat16)
    *arrays, mask = arguments
    rows = jax.vmap(lambda *arrays: kernel(*arrays, mask))(*(x[:, None] for x in arrays))
    np.testing.assert_array_equal(rows[:, 0], kernel(*arguments))


@pytest.mark.parametrize(
    ("name", "module", "kernel", "device", "dtype"),
    [
        pytest.param("gpu", attention_gpu, gpu, HOPPER, jnp.bfloat16, id="gpu", marks=simulated_gpu),
        pytest.param("tpu", attention_tpu, tpu, TPU, jnp.float32, id="tpu"),
    ],
)
def test_same_text(name, module, kernel, device, dtype, monkeypatch):
    """A whole decode; simulating a GPU takes milliseconds for each instruction, so it is a short one."""
    monkeypatch.setattr(attention, "_device", lambda: device)
    monkeypatch.setattr(module, "attend", kernel)
    monkeypatch.setattr(attention_gpu, "PROGRAMS", 2)
    monkeypatch.setattr(attention_tpu, "CHUNK", 8)
    monkeypatch.setattr(decoding, "PREFILL_CHUNKS_ON_CPU", ((4, 0),))
    shape = {"head_dim": 16, "num_kv_heads": 1, "num_layers": 1, "max_positions": 24}
    params = jax.tree.map(lambda x: x.astype(dtype), tiny_llama(**shape))

    def generate(attention: str) -> np.ndarray:
        settings = {"lookahead": jlade.LookaheadConfig(2, 3, 2), "max_new_tokens": 12, "eos_ids": ()}
        return jlade.generate(params, [1, 2, 3, 1, 2], decoder=Llama(params.config, attention), **settings).tokens

    np.testing.assert_array_equal(generate(name), generate("plain"))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "chosen"),
    [
        pytest.param(HOPPER, jnp.bfloat16, 128, "gpu", marks=simulated_gpu),
        (HOPPER, jnp.float32, 128, "plain"),
        (HOPPER, jnp.bfloat16, 100, "plain"),
        (HOPPER, jnp.bfloat16, 144, "plain"),
        (AMPERE, jnp.bfloat16, 128, "plain"),
        (TPU, jnp.float32, 100, "tpu"),
    ],
)
def test_auto_takes_a_kernel_that_it_may_where_it_runs(device, dtype, head_dim, chosen, monkeypatch):
    monkeypatch.setattr(attention, "_device", lambda: device)
    monkeypatch.setattr(attention, "AUTOMATIC", ("gpu", "tpu"))
    monkeypatch.setattr(attention_gpu, "attend", lambda *arguments: "gpu")
    monkeypatch.setattr(attention_tpu, "attend", lambda *arguments: "tpu")
    arguments, _ = random_case(2, 1, 1, head_dim, 8, [4], dtype)
    plain = attention.attend(*arguments, implementation="plain")
    got = attention.attend(*arguments)
    if chosen == "plain":
        np.testing.assert_array_equal(got, plain)
    else:
        assert got == chosen
    windowed = attention.attend(*arguments, positions=np.array([[4, 5]], np.int32), window=100)
    np.testing.assert_array_equal(windowed, plain)


@pytest.mark.parametrize("device", [HOPPER, TPU, jax.devices("cpu")[0]])
def test_auto_is_plain_otherwise(device, monkeypatch):
    monkeypatch.setattr(attention, "_device", lambda: device)
    arguments, _ = random_case(2, 1, 1, 16, 8, [4], jnp.float32)
    np.testing.assert_array_equal(attention.attend(*arguments), attention.attend(*arguments, implementation="plain"))


def test_bad_choices():
    arguments, _ = random_case(2, 1, 1, 16, 8, [4], jnp.float32)
    with pytest.raises(ValueError, match=r"attention must be one of 'auto', 'plain', 'gpu', 'tpu'; got 'fast'"):
        Llama(tiny_llama().config, attention="fast")
    with pytest.raises(ValueError, match="got 'fast'"):
        attention.attend(*arguments, implementation="fast")
    with pytest.raises(ValueError, match=r"'gpu' needs an NVIDIA GPU .* the device is cpu; choose 'auto' or 'plain'"):
        attention.attend(*arguments, implementation="gpu")
    with pytest.raises(ValueError, match=r"'tpu' needs a TPU, and the device is cpu"):
        attention.attend(*arguments, implementation="tpu")
    params = tiny_llama()
    with pytest.raises(ValueError, match="'tpu' needs a TPU"):
        jlade.generate(params, [1, 2], max_new_tokens=2, decoder=Llama(params.config, attention="tpu"))


def test_wrong_kind_of_number_for_a_gpu(monkeypatch):
    monkeypatch.setattr(attention, "_device", lambda: HOPPER)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    arguments, _ = random_case(2, 1, 1, 16, 8, [4], jnp.float32)
    with pytest.raises(ValueError, match=r"'gpu' needs 16-bit floats .* these are float32 and 16"):
        attention.attend(*arguments, implementation="gpu")


@pytest.mark.parametrize(
    ("block_size", "group", "head_dim"), [(1, 1, 128), (120, 4, 128), (8, 4, 64), (128, 7, 80), (8, 1, 96)]
)
@pytest.mark.parametrize(("platform", "attend"), [("cuda", attention_gpu.attend), ("tpu", attention_tpu.attend)])
def test_lowers(platform, attend, block_size, group, head_dim):
    """What Pallas' own passes refuse for the device is found without it."""
    block, cache = (2, block_size, 8, head_dim), (2, 8, 8192, head_dim)
    shapes = [(2, block_size, 8 * group, head_dim), block, block, cache, cache]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    mask = np.eye(block_size, dtype=bool)
    device = jax.sharding.AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("one",), abstract_device=device if platform == "tpu" else None)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.export.export(jax.jit(lambda *arrays: attend(*arrays, mask)), platforms=[platform])
        program = lowered(*arrays, lengths).mlir_module()
    assert {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform] in program
