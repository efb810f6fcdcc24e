"""Decoding on a mesh of the caller's, with Auto or Explicit axes of other names, and in the caller's programs."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlade
from jlade.conversion.tensors import named_arrays
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow, tiny_llama

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 1, 5], [8, 1, 8, 1], [2, 2]]
OPTIONS = {"max_new_tokens": 16, "lookahead": PAPER}
SAMPLED = OPTIONS | {"sampling": jlade.SamplingConfig(temperature=0.9, top_k=9)}


@functools.cache
def callers_mesh(kind):
    """Returns a mesh of four devices with axes that jlade does not have."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), devices=jax.devices()[:4])
    assert set(mesh.axis_types) == {AxisType.Explicit}, "the default that users get"
    return mesh if kind == "explicit" else Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)


def divided(params, mesh):
    """Returns parameters as a trainer divides them: matrices along both axes, where they divide."""

    def place(array):
        axes = [axis if size % 2 == 0 else None for axis, size in zip(("tensor", "fsdp"), array.shape, strict=False)]
        return jax.device_put(array, NamedSharding(mesh, P(*axes)))

    return jax.tree.map(place, params)


@functools.cache
def expected(options=("greedy",)):
    return jlade.generate(tiny_llama(), PROMPTS, **(OPTIONS if options == ("greedy",) else SAMPLED))


def set_by(caller, mesh):
    return jax.set_mesh(mesh) if caller == "set_mesh" else jax.set_mesh(None)


def text_of(state, inputs):
    """Returns the generated tokens of each sequence."""
    tokens, begins, ends = jax.device_get((state.tokens, inputs.lengths, state.num_tokens))
    return [row[begin:end].tolist() for row, begin, end in zip(tokens, begins, ends, strict=True)]


def texts(out):
    return [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]


CASES = [("explicit", "set_mesh"), slow("explicit", ""), slow("auto", "set_mesh"), slow("auto", "")]


@pytest.mark.parametrize(("kind", "caller"), CASES)
def test_calls_have_the_text_of_one_device(kind, caller):
    mesh = callers_mesh(kind)
    params = divided(tiny_llama(), mesh)
    with set_by(caller, mesh):
        out = jlade.generate(params, PROMPTS, **OPTIONS)
        again = jlade.generate(params, PROMPTS, key=jax.random.key(0), **SAMPLED)
        *_, piece = jlade.stream(params, PROMPTS[0], **OPTIONS)
    assert_same_texts(out, expected())
    np.testing.assert_array_equal(out.steps, expected().steps)
    assert_same_texts(again, expected(("sampled",)))
    assert texts(piece.generation) == texts(expected())[:1]


@pytest.mark.slow
def test_an_engine_has_the_text_of_one_device():
    mesh = callers_mesh("explicit")
    with jax.set_mesh(mesh), jlade.Engine(divided(tiny_llama(), mesh), max_sequences=2, lookahead=PAPER) as engine:
        outs = [engine.submit(prompt, max_new_tokens=16).result() for prompt in PROMPTS[:2]]
    assert [texts(out)[0] for out in outs] == texts(expected())[:2]


@pytest.mark.slow
def test_tuning_leaves_the_mesh():
    mesh = callers_mesh("explicit")
    with jax.set_mesh(mesh):
        options = {"max_new_tokens": 16, "settings": [PAPER], "repeat": 1, "adaptive": False}
        tuning = jlade.tune(divided(tiny_llama(), mesh), PROMPTS[:1], **options)
    assert tuning.batch_size == 1


@pytest.mark.parametrize(("kind", "caller"), CASES)
def test_parts_of_a_program_have_the_text_of_one_device(kind, caller):
    """Called eagerly, and in programs of the caller."""
    mesh = callers_mesh(kind)
    params = divided(tiny_llama(), mesh)
    with set_by(caller, mesh):
        inputs, config = jlade.prepare(params, PROMPTS, **SAMPLED)
        whole = jlade.decode(params=params, inputs=inputs, config=config)
        state = jlade.start(jlade.prefill(params, inputs, config), inputs, config)
        while not state.done.all():
            state = jlade.run_steps(params, state, config, max_steps=2)

        @jax.jit
        def step_by_step(params, inputs):
            state = jlade.start(jlade.prefill(params, inputs, config), inputs, config)
            state = jax.lax.while_loop(lambda s: ~s.done.all(), lambda s: jlade.step(params, s, config), state)
            return state.tokens, state.num_tokens

        decode = jax.jit(jlade.decode, static_argnames="config")
        traced = decode(params, inputs, config)
        tokens, ends = step_by_step(params, inputs)
    wanted = texts(expected(("sampled",)))
    assert text_of(whole, inputs) == wanted
    assert text_of(state, inputs) == wanted
    assert text_of(traced, inputs) == wanted
    np.testing.assert_array_equal(tokens, whole.tokens)
    np.testing.assert_array_equal(ends, whole.num_tokens)


@pytest.mark.parametrize("kind", ["explicit", slow("auto")])
def test_each_device_decodes_its_own_prompts(kind):
    mesh = callers_mesh(kind)
    keys = jax.random.split(jax.random.key(5), 4)
    wanted = texts(jlade.generate(tiny_llama(), PROMPTS, key=keys, **SAMPLED))
    inputs, config = jlade.prepare(tiny_llama(), PROMPTS, key=keys, **SAMPLED)
    specs = jlade.input_specs(inputs, config, "fsdp")

    def decode(params, inputs):
        state = jlade.decode(params, inputs, config)
        return state.tokens, state.num_tokens

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(decode, in_specs=(P(), specs), out_specs=P("fsdp"), check_vma=False)
        tokens, ends = jax.jit(mapped)(jax.reshard(divided(tiny_llama(), mesh), P()), jax.device_put(inputs, specs))
    rows = zip(jax.device_get(tokens), inputs.lengths, ends, strict=True)
    assert [row[begin:end].tolist() for row, begin, end in rows] == wanted


def test_arrays_are_adopted_where_they_are():
    mesh = callers_mesh("explicit")
    arrays = named_arrays(divided(tiny_llama(), mesh))
    with jax.set_mesh(mesh):
        params = jlade.adopt(arrays, tiny_llama().config)
    for name, array in named_arrays(params).items():
        assert [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards] == [
            shard.data.unsafe_buffer_pointer() for shard in arrays[name].addressable_shards
        ]
    out = jlade.generate(params, PROMPTS, **OPTIONS)
    assert_same_texts(out, expected())


@pytest.mark.slow
def test_arrays_are_adopted_in_a_program():
    mesh = callers_mesh("explicit")
    inputs, config = jlade.prepare(tiny_llama(), PROMPTS, **OPTIONS)

    @jax.jit
    def decode(arrays, inputs):
        state = jlade.decode(jlade.adopt(arrays, tiny_llama().config), inputs, config)
        return state.tokens, state.num_tokens

    with jax.set_mesh(mesh):
        tokens, ends = jax.device_get(decode(named_arrays(divided(tiny_llama(), mesh)), inputs))
    rows = zip(tokens, inputs.lengths, ends, strict=True)
    assert [row[begin:end].tolist() for row, begin, end in rows] == texts(expected())


def test_what_a_program_of_the_caller_cannot_have_is_said():
    mesh = callers_mesh("explicit")
    inputs, config = jlade.prepare(tiny_llama(), PROMPTS, **OPTIONS)
    specs = jlade.input_specs(inputs, config, "fsdp")
    decode = functools.partial(jlade.decode, config=config)
    with jax.set_mesh(mesh):
        mapped, placed = (
            jax.shard_map(decode, in_specs=(P(), specs), out_specs=P("fsdp")),
            jax.device_put(inputs, specs),
        )
        with pytest.raises(ValueError, match=r"needs check_vma=False .* vary along fsdp"):
            jax.eval_shape(mapped, tiny_llama(), placed)
    inputs, config = jlade.prepare(tiny_llama(), PROMPTS, mesh=jlade.make_mesh(data=2), **OPTIONS)
    decode = functools.partial(jlade.decode, config=config)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"mesh of data 2, .* on one with the axes fsdp, tensor"):
        jax.eval_shape(decode, tiny_llama(), inputs)
