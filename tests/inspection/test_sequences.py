"""How many sequences of an engine fit, against the memory that the engine's compiled programs state."""

import jax
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.constraints import grammar
from jlade.engine import rows
from jlade.inspection import sequences, targets
from jlade.inspection.model_programs import ModelPrograms
from jlade.models import sharding
from jlade.models.llama import Llama
from tests.tiny import slow, tiny_llama

PARAMS = tiny_llama(vocab_size=101, hidden_size=32, intermediate_size=88, num_layers=1)
SETTING = LookaheadConfig.paper(2, 3, 2)
CAPACITY = 64


def programs_on(**sizes):
    mesh = sharding.mesh_for(PARAMS.config, jlade.make_mesh(**sizes)) if sizes else None
    decoder, device = Llama(PARAMS.config).on(PARAMS, mesh), jax.devices()[0]
    return ModelPrograms(PARAMS, decoder, device, 1, CAPACITY, mesh)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    """Makes the tables of grammars as small as the model's other arrays."""
    monkeypatch.setattr(rows, "GRAMMAR", 1024)
    monkeypatch.setattr(grammar, "CHUNK", 1024)


@pytest.mark.parametrize("sizes", [{}, slow({"data": 2, "model": 2})])
def test_as_many_rows_fit_and_more_do_not(sizes):
    programs, limit = programs_on(**sizes), 3_000_000
    groups = sizes.get("data", 1)
    found = sequences.compiled(programs, SETTING, limit)
    assert found.number % groups == 0
    assert 10 * groups < found.number < sequences.from_shapes(programs, SETTING, limit).number
    for number, fits in ((found.number, True), (int(1.05 * found.number) // groups * groups + groups, False)):
        memory = sequences.steps(programs, SETTING, number).memory_analysis()
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert (needed + memory.temp_size_in_bytes + found.prompt <= limit) is fits


def test_shapes_are_those_of_a_running_engine(monkeypatch):
    states, run = [], rows.run

    def watched(params, state, *arguments):
        states.append((len(state.done), sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))))
        return run(params, state, *arguments)

    monkeypatch.setattr(rows, "run", watched)
    found = sequences.from_shapes(programs_on(), SETTING, 2**30)
    assert found.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))
    with jlade.Engine(PARAMS, max_sequences=3, capacity=CAPACITY, lookahead=SETTING, max_grammar=1024) as engine:
        engine.generate([[1]] * 3, max_new_tokens=4)
        page = engine._running._pool.page_bytes
    number, held = max(states)
    assert number == 3
    assert page <= held - number * found.row < page + 256  # page 0, and arrays for all rows together


@pytest.mark.slow
def test_a_device_that_is_too_small():
    weights = sequences.from_shapes(programs_on(), SETTING, 0).weights
    for limit in (0, weights, weights + 50_000):
        assert sequences.compiled(programs_on(), SETTING, limit).number == 0


@pytest.mark.slow
def test_a_program_that_the_compiler_refuses_is_compiled_for_fewer_rows(monkeypatch):
    """As XLA refuses what needs more memory than a TPU has."""
    asked, steps = [], sequences.steps

    def refuse(programs, lookahead, number):
        asked.append(number)
        if number > 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
        return steps(programs, lookahead, number)

    monkeypatch.setattr(sequences, "steps", refuse)
    found = sequences.compiled(programs_on(), SETTING, 1_000_000)
    assert asked[0] > 4 >= asked[-1]
    assert found.number >= asked[-1]

    monkeypatch.setattr(targets, "compile_for", lambda *_, **__: refuse(None, None, 5))
    assert sequences.compiled(programs_on(), SETTING, 1_000_000).number == 0
