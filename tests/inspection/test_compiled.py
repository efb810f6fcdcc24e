"""Facts about compiled programs, on programs for the CPU; tests/accelerators has those for TPUs and GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.costs.estimate import Rates
from jlade.inspection import compiled, hlo
from jlade.inspection.compiled import Sizes
from jlade.inspection.launches import launches

OPTIMIZED = True

RATES = Rates(flops=1e9, bytes=1e9)
NO_SIZES = Sizes(weights=frozenset())


def text_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile()


def totals(program):
    """Returns the flops and the bytes of the entry computation."""
    module = hlo.Module(program.as_text())
    launched = list(launches(module, module.entry))
    return sum(x.flops * x.times for x in launched), sum(x.traffic * x.times for x in launched)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x @ y, [(64, 128), (128, 96)]),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), [(3, 64, 128), (3, 96, 128)]),
        (lambda x, y: jnp.tanh(x @ y.T) + 1, [(64, 128), (96, 128)]),
    ],
)
def test_work_of_products(function, shapes):
    """Compared with a count by hand: the operands are read and the result is written once, besides the tanh's."""
    flops, num_bytes = totals(text_of(function, *shapes))
    rows, terms, columns = shapes[0][-2], shapes[0][-1], 96
    batch = shapes[0][0] if len(shapes[0]) == 3 else 1
    assert flops == 2 * batch * rows * terms * columns
    least = 4 * batch * (rows * terms + terms * columns + rows * columns)
    assert least <= num_bytes <= least + 2 * 4 * batch * rows * columns


def test_work_agrees_with_the_compiler():
    """XLA's own analysis counts elementwise operations as flops too, fewer than one in a hundred here."""

    def function(x, y, z):
        return jax.nn.softmax(x @ y, axis=-1) @ z

    program = text_of(function, (128, 512), (512, 256), (256, 512))
    analysis = program.cost_analysis()
    flops, num_bytes = totals(program)
    assert flops == pytest.approx(analysis["flops"], rel=0.01)
    assert num_bytes == pytest.approx(analysis["bytes accessed"], rel=0.1)


def test_slices_and_updates_count_their_part():
    def function(x, update, start):
        start = start.astype(jnp.int32)[0]
        return jax.lax.dynamic_update_slice_in_dim(x, update + x[:1], start, 0)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1000, 64), (1, 64), (1,))]
    program = jax.jit(function, donate_argnums=0).lower(*arguments).compile()
    _, num_bytes = totals(program)
    assert num_bytes < 20 * 64 * 4  # of 1000 rows


def rounds(function, *shapes, sizes=NO_SIZES, platform="cpu", trips=1):
    return compiled.loops(text_of(function, *shapes).as_text(), platform, sizes, RATES, trips)


def repeated(body):
    """Returns a function that runs `body` nine times, in a loop."""
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, body(c[0], c[1])), (0, x))


def test_a_round_of_a_loop_is_counted_once():
    (found,) = rounds(repeated(lambda i, x: jnp.tanh(x @ x)), (64, 64))
    assert 2 * 64**3 / RATES.flops == found.time.arithmetic
    assert found.copies == ()
    assert found.host_loops == len(found.exchanges) == 0


@pytest.mark.parametrize("move", [lambda x: jnp.roll(x, 1, 0), jnp.flip], ids=["roll", "flip"])
def test_a_planted_copy_is_found(move):
    (found,) = rounds(repeated(lambda i, x: jnp.tanh(move(x) @ x)), (64, 64), sizes=Sizes(frozenset({64 * 64})))
    assert found.copies
    (found,) = rounds(repeated(lambda i, x: jnp.tanh(move(x) @ x)), (64, 64), sizes=Sizes(frozenset({65 * 64})))
    assert found.copies == ()


def test_parts_of_an_array_in_one_of_the_size_of_a_table_are_no_copy_of_it():
    def shifted(i, x):
        windows = jnp.stack([x[j : j + 100] for j in range(8)])
        return jnp.concatenate([x[1:], jnp.sum(jax.lax.optimization_barrier(windows))[None]])

    def loops(size):
        program = jax.jit(repeated(shifted)).lower(jax.ShapeDtypeStruct((107,), jnp.int32)).compile()
        sizes = Sizes(frozenset(), tables=frozenset({size}))
        return compiled.loops(program.as_text(), "cpu", sizes, RATES, 1)

    assert loops(800)[0].copies == ()
    assert loops(107)[0].copies


def test_inner_loops_wait_for_the_host_on_a_gpu_and_run_as_often_as_said():
    def body(i, x):
        return jax.lax.fori_loop(0, i, lambda _, y: jnp.tanh(y @ y), x)

    (found,) = rounds(repeated(body), (64, 64), platform="gpu", trips=5)
    assert found.host_loops == 1
    assert found.time.arithmetic == pytest.approx(5 * 2 * 64**3 / RATES.flops)
    (found,) = rounds(repeated(lambda i, x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ y), x)), (64, 64))
    assert found.time.arithmetic == pytest.approx(3 * 2 * 64**3 / RATES.flops)


COUNTING_LOOP = """HloModule m

%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i.1, %one)
  %x = f32[4]{0:T(128)} get-tuple-element(%c.1), index=1
  ROOT %after = (s32[], f32[4]) tuple(%next, %x)
}

%condition (c: (s32[], f32[4])) -> pred[] {
  %c.2 = (s32[], f32[4]) parameter(0)
  %i.2 = s32[] get-tuple-element(%c.2), index=0
  %bound = s32[] constant(3)
  ROOT %lt = pred[] compare(%i.2, %bound), direction=LT
}

ENTRY %main (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  ROOT %loop = (s32[], f32[4]) while(%p), condition=%condition, body=%body
}
"""


def test_a_bound_in_the_condition_tells_how_often_a_loop_runs():
    """In the form of compilers for TPUs, which do not write the number of iterations down."""
    module = hlo.Module(COUNTING_LOOP)
    assert [(x.instruction.name, x.times) for x in launches(module, "main", trips=100)] == [("next", 3)]
    dynamic = hlo.Module(COUNTING_LOOP.replace("constant(3)", "get-tuple-element(%c.2), index=0"))
    assert [(x.instruction.name, x.times) for x in launches(dynamic, "main", trips=100)] == [("next", 100)]


def test_time_is_that_of_the_slower_side_of_each_operation():
    def body(i, x):
        return jnp.tanh(x @ x)

    program = text_of(repeated(body), (64, 64)).as_text()
    fast, slow = Rates(flops=1e18, bytes=1e9), Rates(flops=1e3, bytes=1e9)
    (bound_by_memory,) = compiled.loops(program, "cpu", NO_SIZES, fast, 1)
    (bound_by_arithmetic,) = compiled.loops(program, "cpu", NO_SIZES, slow, 1)
    assert bound_by_memory.time.total == pytest.approx(bound_by_memory.time.memory)
    assert bound_by_arithmetic.time.total == pytest.approx(2 * 64**3 / 1e3, rel=0.01)


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.Module("a shopping list")


def test_bytes_of_dtypes():
    text = "(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, pred[5], f8e4m3fn[4], s32[], token[])"
    line = f'  ROOT %x.1 = {text} custom-call(%a, %b), custom_call_target="f", called_computations={{%c, %d}}'
    module = hlo.Module(f"HloModule m\n\nENTRY %main (a: f32[]) -> f32[] {{\n{line}\n}}\n")
    instruction = module.computations["main"]["x.1"]
    assert [shape.num_bytes for shape in instruction.shapes] == [12, 5, 4, 4, 0]
    assert [shape.is_on_chip for shape in instruction.shapes] == [True, *[False] * 4]
    assert (instruction.operands, instruction.called, instruction.is_root) == (("a", "b"), ("c", "d"), True)
    assert np.prod(instruction.shapes[0].dimensions) == 6
