"""Programs that can be compiled ahead of their first call, also while another thread runs others.

Given the shapes of arrays, as `shapes` returns them, a function of `jit` compiles, and returns the shapes of its
results. So code that runs programs on arrays compiles them when it gets shapes. JAX keeps what `lower` and `compile`
make: a later call with such arrays compiles nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def jit(**options: Any) -> Callable[[F], F]:
    """Returns a decorator like `jax.jit` with these options, for a function whose first arrays may be shapes."""

    def decorate(function: F) -> F:
        jitted = jax.jit(function, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(next(iter(jax.tree.leaves(args))), jax.ShapeDtypeStruct):
                return jitted(*args, **kwargs)
            compiled = jitted.lower(*args, **kwargs).compile()
            results = jitted.eval_shape(*args, **kwargs)
            return jax.tree.map(_placed, results, compiled.output_shardings) if _are_placed(args) else results

        return call  # type: ignore[return-value]

    return decorate


def shapes(arrays: Any) -> Any:
    """Returns the shapes of a pytree of arrays, in the devices' memory or in NumPy, with the places of the former."""

    def of(array: Any) -> jax.ShapeDtypeStruct:
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return _placed(shape, array.sharding) if isinstance(array, jax.Array) and array.committed else shape

    return jax.tree.map(of, arrays)


def _placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _are_placed(args: Any) -> bool:
    """Whether results are bound to devices, as some arguments are; otherwise JAX may move them."""
    return any(isinstance(each, jax.ShapeDtypeStruct) and each.sharding is not None for each in jax.tree.leaves(args))
