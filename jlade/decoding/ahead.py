"""Programs that can be compiled ahead of their first call, also while another thread runs others.

Given the shapes of arrays, as `shapes` returns them, a function of `jit` compiles, and returns the shapes of its
results. So code that runs programs on arrays compiles them when it gets shapes. JAX keeps what `lower` and `compile`
make: a later call with such arrays compiles nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def jit(**options: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Returns a decorator like `jax.jit` with these options, for a function whose first arrays may be shapes."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        jitted = jax.jit(function, **options)

        @functools.wraps(jitted)
        def call(*args: Any, **kwargs: Any) -> T:
            try:
                results: T = jitted(*args, **kwargs)
            except TypeError:  # of a shape, before anything runs; a look for one costs every call with arrays 0.1 ms
                if not isinstance(next(iter(jax.tree.leaves(args))), jax.ShapeDtypeStruct):
                    raise
                results = _compile(jitted, args, kwargs)
            return results

        return call

    return decorate


def shapes(arrays: Any) -> Any:
    """Returns the shapes of a pytree of arrays, in the devices' memory or in NumPy, with the places of the former."""

    def of(array: Any) -> jax.ShapeDtypeStruct:
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return _placed(shape, array.sharding) if isinstance(array, jax.Array) and array.committed else shape

    return jax.tree.map(of, arrays)


def _compile(jitted: Any, args: Any, kwargs: Any) -> Any:
    compiled, results = jitted.lower(*args, **kwargs).compile(), jitted.eval_shape(*args, **kwargs)
    # Results are bound to devices if an argument is; otherwise JAX may move them.
    given = (each for each in jax.tree.leaves(args) if isinstance(each, jax.ShapeDtypeStruct))
    is_placed = any(each.sharding is not None for each in given)
    return jax.tree.map(_placed, results, compiled.output_shardings) if is_placed else results


def _placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
