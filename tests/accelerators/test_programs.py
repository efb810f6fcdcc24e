"""The programs of TPUs and GPUs, made by their own compilers without a device.

Full width and two layers: layers are alike, and whatever is wrong with one shows.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig
from jlade.config import PLAIN
from jlade.conversion.tensors import param_shapes
from jlade.costs import estimate
from jlade.decoding import ahead
from jlade.inspection import compiled, targets
from jlade.inspection.compiled import Sizes
from jlade.inspection.hlo import Module
from jlade.inspection.launches import PRODUCTS, launches
from jlade.inspection.model_programs import ModelPrograms
from jlade.models.architecture import IndexSizes, Latent
from jlade.models.llama import Llama
from jlade.vocabulary import VocabularyShard
from tests.accelerators.needs import device
from tests.accelerators.shapes import LLAMA, QWEN, state_bytes
from tests.models.devices import hopper_kernels

OPTIMIZED = True

LATENT = dataclasses.replace(
    LLAMA,
    num_kv_heads=1,
    head_dim=576,
    latent=Latent(1536, rank=512, rotated=64, unrotated=128, value_size=128),
    rotary_dim=64,
    interleaved_rotary=True,
)  # attention as in DeepSeek V3
INDEXED = dataclasses.replace(
    LATENT,
    num_layers=2,
    head_dim=704,
    latent=dataclasses.replace(LATENT.latent, index=IndexSizes(64, 128, chosen=512)),
)  # and in DeepSeek V3.2
RINGS = dataclasses.replace(QWEN, vocab_size=32000, sliding_windows=(1408, None))
SHAPES = {"llama": LLAMA, "qwen": QWEN}
KERNEL = "auto"


PAPER, BOTH = LookaheadConfig.paper(15, 5, 15), LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))


def case(name, shape, attention, setting, *marks):
    marked, of_setting = device(name), "tree" if setting.has_tree else "paper"
    return pytest.param(
        *(name, shape, attention, setting),
        marks=[*marked.marks, *marks],
        id=f"{name}-{shape}-{attention}-{of_setting}",
    )


FEW = [
    ("v5e", "llama", KERNEL, BOTH),
    ("h100", "qwen", KERNEL, BOTH),
    ("h100", "llama", "plain", PAPER),
]
ALL = itertools.product(("v5e", "v6e", "h100", "a100"), SHAPES, (KERNEL, "plain"), (PAPER, BOTH))
CASES = [case(*few) for few in FEW] + [case(*each, pytest.mark.thorough) for each in ALL if each not in FEW]


@pytest.mark.parametrize(("name", "shape", "attention", "setting"), CASES)
def test_programs(name, shape, attention, setting):
    params = param_shapes(SHAPES[shape], jnp.bfloat16)
    found = jlade.inspect(params, name, lookahead=setting, attention=attention)
    assert found.failure is None
    expected = {"v5e": "tpu", "v6e": "tpu", "h100": "gpu", "a100": "plain"}
    assert found.attention == ("plain" if attention == "plain" else expected[name])
    assert found.copies == []
    for step in (found.step, found.plain_step):
        assert step.host_loops == 0
        assert step.vector_products == step.copies_at_entry == ()
    # The arguments are weights, cache and pool; everything else takes at most 0.6 GB.
    assert found.memory.needed - found.memory.arguments < 0.6e9
    weights = sum(x.size * 2 for x in jax.tree.leaves(params))
    assert found.memory.arguments - weights == pytest.approx(state_bytes(SHAPES[shape], setting), rel=0.01)
    if name != "v5e":
        return
    share = found.step.time.arithmetic / found.plain_step.time.arithmetic  # of two layers and all that is outside them
    assert 1 < share < (1.55 if setting.has_tree else 1.3)


def steps(name, config, setting, capacity=1024, **options):
    """Returns the implementation of attention and two steps of `jlade.inspect`: with the setting, and a plain one.

    Those that read prompts take longer to compile: `test_prompts_are_read_into_such_caches_too` does it.
    """
    (target,), is_attached = targets.find(name)
    params = param_shapes(config, jnp.bfloat16)
    decoder = Llama(config, **options).on(params, absent=None if is_attached else target)
    programs = ModelPrograms(params, decoder, target, batch_size=1, capacity=capacity)
    found = [programs.loops(programs.decoding(each), each, each.block_size)[-1] for each in (setting, PLAIN)]
    return decoder.attention, found


@pytest.mark.parametrize("name", [device("h100")])
def test_products_of_the_same_tokens_are_one(name):
    """But for matrices whose outputs are no multiple of 64: to join these, XLA would write them to one array."""
    plain_steps = []
    for size in (11008, 11040):
        config = dataclasses.replace(LLAMA, num_layers=1, intermediate_size=size)
        _, (_, plain_step) = steps(name, config, LookaheadConfig.tree(7))
        assert not [copy for copy in plain_step.copies if f"[{2 * size},4096]" in copy]
        plain_steps.append(plain_step)
    assert plain_steps[0].kernels < plain_steps[1].kernels


@pytest.mark.parametrize("name", [device("h100"), device("v5e")])
def test_programs_round_to_bfloat16_where_they_say_so(name):
    target = targets.find(name)[0][0]
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    text = targets.compile_for(target, lambda x: 2 * x.astype(jnp.bfloat16).astype(jnp.float32), x).as_text()
    assert "= bf16[8,128]" in text


@pytest.mark.parametrize("name", [device("tpu7x")])
def test_no_program_copies_weights_to_other_tiles(name, monkeypatch):
    """The compiler for TPU7x would copy those in bfloat16 that a loop reads to tiles of 16 rows, before the loop."""
    for num_copies in (0, 8):
        _, found = steps(name, dataclasses.replace(LLAMA, num_layers=1), LookaheadConfig.tree(7))
        assert [len(step.copies_at_entry) for step in found] == [num_copies] * 2
        monkeypatch.setattr(ahead, "COMPILER_OPTIONS", {})


@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
@pytest.mark.parametrize(
    ("config", "setting"),
    [(LATENT, BOTH), pytest.param(INDEXED, LookaheadConfig.tree(12), marks=pytest.mark.thorough)],
    ids=["all", "chosen"],
)
def test_steps_copy_no_latents(name, config, setting):
    """The keys are the values: XLA for TPUs would otherwise copy them to the layout of one of the two products."""
    attention, found = steps(name, config, setting)
    assert attention == "plain"
    for step in found:
        assert step.host_loops == 0
        assert not [copy for copy in step.copies if f",{config.head_dim}]" in copy]
        assert step.vector_products == ()


@pytest.mark.thorough
@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_batches_copy_nothing_either(name):
    found = jlade.inspect(
        param_shapes(LLAMA, jnp.bfloat16), name, lookahead=LookaheadConfig.paper(3, 4, 3), batch_size=4
    )
    assert found.failure is None
    assert found.copies == []
    assert found.step.host_loops == found.plain_step.host_loops == 0
    assert found.step.vector_products == found.plain_step.vector_products == ()


@pytest.mark.parametrize("name", [device("v6e"), device("h100")])
def test_steps_write_the_rings_of_windows_in_place(name):
    _, found = steps(name, RINGS, LookaheadConfig.tree(7), capacity=8192)
    for step in found:
        assert step.copies == ()
        assert step.host_loops == 0


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_weights_of_few_bits_stay_so(name, bits):
    """A step reads so many bits for each weight: a conversion in memory would be found as a copy."""
    params = param_shapes(LLAMA, jnp.bfloat16, bits)
    found = jlade.inspect(params, name, lookahead=LookaheadConfig.paper(15, 5, 15))
    assert found.bits == bits
    assert found.copies == []
    assert found.step.vector_products == found.plain_step.vector_products == ()


@pytest.mark.parametrize("shape", [LLAMA, pytest.param(LATENT, marks=pytest.mark.thorough)], ids=["llama", "latent"])
@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_keys_and_values_in_8_bits_stay_so(name, kv_dtype, shape):
    """The kernels convert them in on-chip memory; of a latent, plain products do so as they read them."""
    config = dataclasses.replace(shape, vocab_size=512)
    setting = LookaheadConfig.tree(12)  # of 16 rows `top_k` has arrays of the size of the table of recycled logits
    attention, found = steps(name, config, setting, capacity=2048, kv_dtype=kv_dtype)
    kernel = {"v5e": "tpu", "h100": "gpu" if jax.__version_info__ >= (0, 11, 2) else "plain"}[name]
    assert attention == (kernel if shape is LLAMA else "plain")
    for step in found:
        assert step.copies == ()
        assert step.host_loops == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LATENT, {"lookahead": BOTH}),
        (RINGS, {"lookahead": LookaheadConfig.tree(7), "capacity": 8192}),
        (LLAMA, {"lookahead": LookaheadConfig.tree(15), "kv_dtype": "int8"}),
        (LLAMA, {"lookahead": LookaheadConfig.tree(15), "kv_dtype": "float8_e4m3fn"}),
        (LATENT, {"lookahead": LookaheadConfig.tree(15), "kv_dtype": "int8"}),
    ],
    ids=["latent", "rings", "int8", "float8", "latent int8"],
)
@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_prompts_are_read_into_such_caches_too(name, config, options):
    assert jlade.inspect(param_shapes(config, jnp.bfloat16), name, **options).failure is None


@hopper_kernels
@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_steps_read_and_write_pages_in_place(name):
    """The rows of an engine, with a kernel of attention."""
    params = param_shapes(QWEN, jnp.bfloat16)
    (target,), _ = targets.find(name)
    decoder = Llama(QWEN).on(params, absent=target)
    assert decoder.attention != "plain"
    programs = ModelPrograms(params, decoder, target, batch_size=2, capacity=1024, page_size=128)
    loop = programs.loops(programs.decoding(BOTH), BOTH, BOTH.block_size)[-1]
    assert (loop.copies, loop.host_loops) == ((), 0)


@hopper_kernels
@pytest.mark.parametrize("sizes", [{}, pytest.param({"model": 2}, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [device("h100")])
def test_experts_have_a_kernel_without_copies_and_loops(name, sizes):
    """A small Qwen3-MoE. With several tokens, each layer has two kernels of experts: for gate and up, and for down."""
    config = dataclasses.replace(
        QWEN,
        vocab_size=512,
        hidden_size=320,
        intermediate_size=0,
        num_heads=4,
        num_kv_heads=2,
        num_experts=16,
        experts_per_token=4,
        expert_size=192,
        model_type="qwen3_moe",
    )
    params, setting = param_shapes(config, jnp.bfloat16), LookaheadConfig.tree(7)
    found = jlade.inspect(params, name, lookahead=setting, attention="plain", mesh=sizes)
    assert (found.experts, found.failure, found.copies) == ("gpu", None, [])
    assert found.step.host_loops == found.plain_step.host_loops == sum(chunk.host_loops for chunk in found.chunks) == 0
    if not sizes:
        (target,), _ = targets.find(name)
        programs = ModelPrograms(params, Llama(config, "plain", "gpu"), target, 1, 1024)
        counts = [
            programs.decoding(each).as_text().count('custom_call_target="mosaic_gpu') for each in (PLAIN, setting)
        ]
        assert counts == [0, 2 * config.num_layers]


def facts(name, function, *shapes, sizes):
    (target,), _ = targets.find(name)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def nine_times(x, *rest):
        return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, function(c[0], c[1], *rest)), (0, x))

    text = targets.compile_for(target, nine_times, *arguments).as_text()
    rates = estimate.rates(target.platform, target.device_kind)
    (found,) = compiled.loops(text, target.platform, sizes, rates, trips=1)
    return found


@pytest.mark.parametrize("name", [device("v5e"), device("v6e")])
def test_no_product_is_computed_inside_another(name):
    """Otherwise a block of 8 tokens takes longer than one of 120: see the barrier in `llama._layer`."""
    (target,), _ = targets.find(name)
    params = param_shapes(dataclasses.replace(LLAMA, intermediate_size=14336, num_kv_heads=8), jnp.bfloat16)
    program = ModelPrograms(params, Llama(params.config, "tpu"), target, 1, 1024).decoding(LookaheadConfig.tree(7))
    module = Module(program.as_text())
    launched = list(launches(module, module.body(module.loops(module.entry)[-1])))
    products = [sum(inner.instruction.opcode in PRODUCTS for inner in launch.inner) for launch in launched]
    assert sum(products) > 7 * LLAMA.num_layers  # the matrices of a layer, and the output matrix
    assert max(products) == 1


@pytest.mark.parametrize("name", [device("v5e"), device("v6e")])
def test_the_highest_logits_are_found_without_a_copy_in_narrow_rows(name):
    """Rows of 64 of the 128 lanes take 2.5 times as long, more than a hundredth of a step."""
    (target,), _ = targets.find(name)
    logits = jax.ShapeDtypeStruct((1, 64, 128256), jnp.float32)
    text = targets.compile_for(target, lambda x: VocabularyShard(128256).top(x, 8), logits).as_text()
    module = Module(text)
    assert 0 < sum(launch.instruction.estimated_cycles for launch in launches(module, module.entry)) < 350_000


@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_a_planted_copy_is_found(name):
    sizes = Sizes(frozenset({2048 * 2048}))

    def transposed(i, x):
        return jnp.roll(x, 1, 0).T

    assert facts(name, transposed, (2048, 2048), sizes=sizes).copies
    assert not facts(name, lambda i, x: jnp.tanh(x), (2048, 2048), sizes=sizes).copies


@pytest.mark.parametrize("name", [device("h100")])
def test_a_planted_loop_of_the_host_is_found(name):
    sizes = Sizes(frozenset())

    def dynamic(i, x):
        return jax.lax.fori_loop(0, i, lambda _, y: jnp.tanh(y @ y), x)

    assert facts(name, dynamic, (64, 64), sizes=sizes).host_loops == 1
    assert facts(name, lambda i, x: jnp.tanh(x @ x), (64, 64), sizes=sizes).host_loops == 0


@pytest.mark.parametrize("name", [device("v5e"), device("v6e")])
def test_a_planted_vector_product_is_found(name):
    sizes = Sizes(frozenset({2048 * 2048}))

    def product(i, x, weight):
        return jnp.tanh(x @ weight.T)

    assert facts(name, product, (1, 2048), (2048, 2048), sizes=sizes).vector_products
    assert not facts(name, product, (16, 2048), (2048, 2048), sizes=sizes).vector_products
