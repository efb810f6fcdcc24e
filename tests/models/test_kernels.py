"""The table of kernels: what "auto" is on which device, and its fallback where a kernel does not compile."""

import dataclasses
import functools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import mesh as mesh_lib
from jlade.models import kernels
from jlade.models.attention import Variation
from jlade.models.grouped import MatrixShape
from jlade.models.kernels import ExpertShape, HeadShape, Kernel
from jlade.models.llama import Llama, init_params, quantize
from tests.models.devices import AMPERE, CPU, HOPPER, MI300, TPU, hopper_kernels
from tests.tiny import slow, tiny_llama

HEADS = HeadShape(heads=4, kv_heads=2, head_dim=128, dtype="bfloat16")
EXPERTS = ExpertShape(number=6, per_token=2, size=64, width=128, dtype="bfloat16")
MATRIX = MatrixShape(128, 256, 64, 4, has_zero=False, has_offset=False, has_levels=False, dtype="bfloat16")
SHAPES = {"attention": HEADS, "experts": EXPERTS, "products": MATRIX}


def choose(operation, implementation, device, **changes):
    return kernels.choose(operation, implementation, [SHAPES[operation]._replace(**changes)], device)


@pytest.mark.parametrize(
    ("operation", "device", "changes", "chosen"),
    [
        pytest.param("attention", HOPPER, {}, "gpu", marks=hopper_kernels),
        pytest.param("attention", HOPPER, {"dtype": "float16", "head_dim": 16}, "gpu", marks=hopper_kernels),
        ("attention", HOPPER, {"dtype": "float32"}, "plain"),
        ("attention", HOPPER, {"head_dim": 100}, "plain"),
        ("attention", HOPPER, {"head_dim": 144}, "plain"),
        ("attention", AMPERE, {}, "plain"),
        ("attention", TPU, {"dtype": "float32", "head_dim": 100}, "tpu"),
        ("attention", TPU, {"head_dim": 576}, "plain"),
        ("attention", CPU, {}, "plain"),
        pytest.param("experts", HOPPER, {}, "gpu", marks=hopper_kernels),
        pytest.param("experts", HOPPER, {"dtype": "float16"}, "gpu", marks=hopper_kernels),
        ("experts", HOPPER, {"dtype": "int8"}, "plain"),
        ("experts", HOPPER, {"dtype": "float32"}, "plain"),
        ("experts", HOPPER, {"width": 96}, "plain"),
        ("experts", AMPERE, {}, "plain"),
        ("experts", TPU, {}, "plain"),
        ("experts", CPU, {}, "plain"),
        ("products", HOPPER, {}, "gpu"),
        ("products", AMPERE, {"has_levels": True}, "gpu"),
        ("products", AMPERE, {"group": 8}, "plain"),
        ("products", MI300, {}, "plain"),
        ("products", TPU, {}, "tpu"),
        ("products", TPU, {"dtype": "float16"}, "plain"),
        ("products", CPU, {}, "plain"),
    ],
)
def test_auto_is_the_kernel_that_supports_device_and_shape(operation, device, changes, chosen):
    assert choose(operation, "auto", device, **changes) == chosen
    assert choose(operation, "plain", device, **changes) == "plain"
    if chosen != "plain":
        assert choose(operation, chosen, device, **changes) == chosen


@pytest.mark.parametrize(
    ("operation", "name", "device", "changes", "version", "message"),
    [
        ("attention", "gpu", CPU, {}, (0, 11, 2), "needs an NVIDIA GPU .* is cpu; choose 'auto' or 'plain'"),
        ("attention", "gpu", TPU, {}, (0, 11, 2), "needs an NVIDIA GPU .* the device is TPU v5e"),
        ("attention", "gpu", AMPERE, {}, (0, 11, 2), r"needs .* 9.0 \(H100, H200\), .* is NVIDIA A100"),
        ("attention", "gpu", HOPPER, {}, (0, 11, 1), "needs JAX 0.11.2 or newer"),
        ("attention", "gpu", HOPPER, {"dtype": "float32"}, (0, 11, 2), "needs 16-bit .* these are float32 and 128"),
        ("attention", "gpu", HOPPER, {"head_dim": 100}, (0, 11, 2), "needs .* multiple of 16 .* bfloat16 and 100"),
        ("attention", "gpu", HOPPER, {"head_dim": 144}, (0, 11, 2), "needs .* up to 128, .* bfloat16 and 144"),
        ("attention", "tpu", CPU, {}, (0, 11, 2), "needs a TPU, and the device is cpu"),
        ("attention", "tpu", TPU, {"head_dim": 576}, (0, 11, 2), "needs heads of up to 256, and these are of 576"),
        ("attention", "tpu", HOPPER, {}, (0, 11, 2), "needs a TPU, and the device is NVIDIA H200"),
        ("experts", "gpu", CPU, {}, (0, 11, 2), "needs an NVIDIA GPU .* is cpu; choose 'auto' or 'plain'"),
        ("experts", "gpu", HOPPER, {}, (0, 11, 1), "needs JAX 0.11.2 or newer"),
        pytest.param(
            *("experts", "gpu", HOPPER, {"dtype": "int8"}, (0, 11, 2)),
            "needs 16-bit floats, and these are int8",
            marks=hopper_kernels,
        ),
        pytest.param(
            *("experts", "gpu", HOPPER, {"size": 80}, (0, 11, 2)),
            "needs .* multiples of 64, and these are 80 x 128; choose",
            marks=hopper_kernels,
        ),
        ("products", "tpu", AMPERE, {}, (0, 11, 2), "needs a TPU, and the device is NVIDIA A100; choose 'auto'"),
        ("products", "gpu", MI300, {}, (0, 11, 2), "needs an NVIDIA GPU, and the device is AMD"),
        ("products", "gpu", AMPERE, {"group": 8}, (0, 11, 2), "needs outputs of a multiple of 64"),
    ],
)
def test_a_named_kernel_that_cannot_run_is_refused(operation, name, device, changes, version, message, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    with pytest.raises(ValueError, match=f"^{operation} '{name}' {message}"):
        choose(operation, name, device, **changes)


def test_unknown_implementations_are_refused():
    config = tiny_llama().config
    with pytest.raises(ValueError, match=r"attention must be one of 'auto', 'plain', 'gpu', 'tpu'; got 'fast'"):
        Llama(config, attention="fast")
    with pytest.raises(ValueError, match=r"experts must be one of 'auto', 'plain', 'gpu'; got 'tpu'"):
        Llama(config, experts="tpu")
    with pytest.raises(ValueError, match=r"products must be one of 'auto', 'plain', 'gpu', 'tpu'; got 'cpu'"):
        Llama(config, products="cpu")


def test_the_kernel_of_products_skips_matrices_and_that_of_attention_no_heads():
    small = MATRIX._replace(group=8)
    assert kernels.choose("products", "auto", [small, MATRIX], AMPERE) == "gpu"
    assert kernels.choose("products", "gpu", [small, MATRIX], AMPERE) == "gpu"
    assert kernels.choose("attention", "auto", [HEADS, HEADS._replace(head_dim=576)], TPU) == "plain"
    with pytest.raises(ValueError, match="needs heads of up to 256, and these are of 576"):
        kernels.choose("attention", "tpu", [HEADS, HEADS._replace(head_dim=576)], TPU)


@pytest.mark.parametrize(
    ("operation", "platform", "changes", "call"),
    [
        pytest.param("attention", "gpu", {}, "mosaic_gpu", marks=hopper_kernels),
        ("attention", "tpu", {}, "tpu_custom_call"),
        slow("attention", "tpu", {"kv_dtype": "int8", "variation": Variation(True, True, True)}, "tpu_custom_call"),
        pytest.param("experts", "gpu", {"has_gates": False}, "mosaic_gpu", marks=hopper_kernels),
        ("products", "gpu", {"has_offset": True}, "triton"),
        ("products", "tpu", {"has_levels": True}, "tpu_custom_call"),
    ],
)
def test_the_program_that_is_compiled_first_is_the_kernel(operation, platform, changes, call):
    (kernel,) = (each for each in kernels.KERNELS[operation] if each.platform == platform)
    run, arguments = kernel.program(platform, SHAPES[operation]._replace(**changes))
    kind = {"gpu": "NVIDIA H100", "tpu": "TPU v5e"}[platform]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((1,), ("one",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(run).trace(*arguments)
        lowered = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),))
    assert call in lowered.as_text()


def of_cpu(monkeypatch, implementation):
    """Makes an implementation of attention the kernel of this CPU; returns the shapes that it is compiled for."""
    compiled = []

    def program(platform, shape):
        compiled.append(shape)
        return kernels._attention_program(implementation, shape)

    monkeypatch.setitem(kernels.KERNELS, "attention", (Kernel("cpu", lambda shape, device: None, program),))
    return compiled


def test_a_kernel_that_does_not_compile_is_reported_once(monkeypatch):
    """A CPU compiles no kernel of TPUs."""
    compiled = of_cpu(monkeypatch, "tpu")
    message = rf"attention='auto' is 'plain', as JAX {jax.__version__} does not compile the kernel 'cpu' for HeadShape"
    with pytest.warns(UserWarning, match=message + r"\(.*\) on cpu: ValueError: Only interpret mode is") as warned:
        assert choose("attention", "auto", CPU) == "plain"
    assert choose("attention", "auto", CPU) == "plain"
    assert len(warned) == 1
    assert choose("attention", "cpu", CPU) == "cpu"
    assert len(compiled) == 1


def test_a_kernel_that_compiles_is_taken_in_traces_too(monkeypatch):
    """The caller's program holds nothing of it."""
    compiled, chosen = of_cpu(monkeypatch, "plain"), []

    def program(x):
        chosen.append(choose("attention", "auto", CPU))
        return x + 1

    with jax.set_mesh(jlade.make_mesh(lookahead=2)):
        traced = jax.make_jaxpr(jax.vmap(jax.jit(program)))(jnp.ones(3))
    assert chosen == ["cpu"]
    assert "while" not in str(traced)
    assert kernels.choose("attention", "auto", [HEADS, HEADS._replace(heads=8)], CPU) == "cpu"
    assert compiled == [HEADS, HEADS._replace(heads=8)]


def test_several_processes_compile_no_kernel(monkeypatch):
    compiled = of_cpu(monkeypatch, "plain")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert choose("attention", "auto", CPU) == "plain"
    assert choose("attention", "auto", TPU) == "cpu", "not attached"
    assert not compiled


def chosen_for(monkeypatch, *devices):
    """Makes devices pass for those of parameters; returns the operations and shapes that kernels are chosen for."""
    shapes, choose = [], kernels.choose
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [*devices])
    monkeypatch.setattr(kernels, "_hopper_reason", lambda device: None if device == HOPPER else "needs a Hopper")
    monkeypatch.setattr(kernels, "choose", lambda *call: shapes.append((call[0], *call[2])) or choose(*call))
    return shapes


def in_bfloat16(params):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def test_attention_is_chosen_for_the_heads_of_each_variation(monkeypatch):
    shapes = chosen_for(monkeypatch, TPU)
    params = in_bfloat16(tiny_llama())
    assert params.decoder.attention == "tpu"
    assert Llama(params.config, "tpu").on(params).attention == "tpu"
    assert Llama(params.config, "plain").on(params).attention == "plain"
    assert shapes == [("attention", HeadShape(4, 2, 6, "bfloat16"))] * 2
    variations = {"attention_cap": 5.0, "attention_scale": 0.3, "sliding_windows": (3, None)}
    assert in_bfloat16(tiny_llama(**variations)).decoder.attention == "tpu"
    expected = [HeadShape(4, 2, 6, "bfloat16", Variation(window, cap=True)) for window in (True, False)]
    assert shapes[2:] == [("attention", *expected)]


def test_tracers_and_several_devices_without_a_mesh_are_plain(monkeypatch):
    shapes = chosen_for(monkeypatch, TPU)
    params, chosen = tiny_llama(), []
    jax.jit(lambda params: chosen.append(params.decoder.attention))(params)
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [TPU, TPU])
    assert [*chosen, params.decoder.attention] == ["plain", "plain"]
    assert not shapes


def test_shapes_numpy_arrays_and_absent_devices_have_the_kernel_of_the_device(monkeypatch):
    params = tiny_llama()
    shapes = jax.eval_shape(lambda: params)
    for arrays in (params, shapes):
        assert Llama(params.config).on(arrays, absent=TPU) == Llama(params.config, "tpu")
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [TPU])
    for arrays in (params, shapes, jax.device_get(params)):
        assert Llama(params.config).on(arrays) == Llama(params.config, "tpu")


def test_nothing_happens_on_a_cpu(monkeypatch, cache_directory):
    monkeypatch.setattr(kernels, "choose", pytest.fail)
    monkeypatch.setattr(jax, "eval_shape", pytest.fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny_llama().decoder.attention == "plain"
    assert not list(cache_directory.iterdir())


def test_products_are_chosen_for_models_in_groups(monkeypatch):
    params = quantize(in_bfloat16(tiny_llama()), 4)
    assert (params.decoder.products, tiny_llama().decoder.products) == ("plain", "auto")
    shapes = chosen_for(monkeypatch, TPU)
    assert params.decoder.products == "plain"  # its outputs are too few
    (_, *matrices) = shapes[-1]
    assert shapes[-1][0] == "products"
    assert {matrix.dtype for matrix in matrices} == {"bfloat16"}


@functools.cache
def mixture():
    changes = {"num_experts": 8, "experts_per_token": 3, "expert_size": 64, "hidden_size": 128, "intermediate_size": 0}
    config = dataclasses.replace(tiny_llama().config, **changes)
    return init_params(jax.random.key(0), config, jnp.bfloat16)


@hopper_kernels
def test_experts_are_chosen_as_they_are_on_a_device(monkeypatch):
    shapes = chosen_for(monkeypatch, HOPPER)
    params = mixture()
    assert params.decoder.experts == "gpu"
    assert shapes[-1] == ("experts", ExpertShape(8, 3, 128, 64, "bfloat16"))
    assert Llama(params.config, experts="plain").on(params).experts == "plain"
    assert Llama(params.config, experts="gpu").on(params).experts == "gpu"
    config = dataclasses.replace(params.config, gated_mlp=False, activation="relu2", expert_latent=64)
    assert init_params(jax.random.key(0), config, jnp.bfloat16).decoder.experts == "gpu"
    assert shapes[-1] == ("experts", ExpertShape(8, 3, 64, 64, "bfloat16", has_gates=False))
    mesh = types.SimpleNamespace(devices=np.array([HOPPER]), shape={"model": 2, "copy": 1})
    assert Llama(params.config).on(params, mesh).experts == "gpu"
    assert shapes[-1] == ("experts", ExpertShape(4, 2, 128, 64, "bfloat16"))


@hopper_kernels
def test_experts_in_int8_are_plain_and_models_without_experts_choose_none(monkeypatch):
    shapes = chosen_for(monkeypatch, HOPPER)
    quantized = quantize(mixture())
    assert quantized.decoder.experts == "plain"
    with pytest.raises(ValueError, match="experts 'gpu' needs 16-bit floats, and these are int8"):
        Llama(quantized.config, experts="gpu").on(quantized)
    shapes.clear()
    assert tiny_llama().decoder == Llama(tiny_llama().config, "plain", pads_for="gpu")
    assert [operation for operation, *_ in shapes] == ["attention"]


def test_settings_are_stored_for_an_implementation_of_experts():
    """And for models without experts under the same name as ever."""
    config = tiny_llama().config
    assert repr(Llama(config, "plain", "gpu", pads_for="cpu")) == f"Llama(config={config!r}, attention='plain')"
    names = {repr(Llama(mixture().config, "plain", name)) for name in ("plain", "gpu")}
    assert len(names) == 2
    assert f"Llama(config={mixture().config!r}, attention='plain', experts='gpu')" in names
