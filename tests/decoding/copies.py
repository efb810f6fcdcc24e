"""What tests look for in compiled programs: copies that each step would make."""

import jax

import jlade
from jlade.costs import estimate
from jlade.decoding import loop
from jlade.inspection import compiled
from jlade.inspection.compiled import Sizes


def copies_in_loops(program: str, cache_layers: frozenset[int], pool: int = 0) -> list[str]:
    """Returns the copies inside a program's loops whose elements are a multiple of a cache layer's or the pool's."""
    sizes = Sizes(weights=frozenset(), cache_layers=cache_layers, tables=frozenset({pool}))
    found = compiled.loops(program, "cpu", sizes, estimate.CPU, trips=1)
    assert found, "no loop found"
    return [copy for loop in found for copy in loop.copies]


def copies_in_steps(params, cache, inputs, config, cache_layers, pool=0):
    """Returns `copies_in_loops` of a decode after prompts that are in the cache."""

    def decode(params, cache, inputs):
        return loop.run_steps(params, jlade.start(jlade.Prefix(cache), inputs, config), config)

    program = jax.jit(decode).lower(params, cache, inputs).compile()
    return copies_in_loops(program.as_text(), frozenset(cache_layers), pool)
