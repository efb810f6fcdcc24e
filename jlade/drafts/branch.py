"""Costly parts of a step that are left out where no sequence of a batch needs them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def if_any(needed: jax.Array, costly: Callable[..., T], cheap: Callable[..., T], *arrays: Any) -> T:
    """Returns `costly(*arrays)` where `needed` [] bool, else `cheap(*arrays)`, which must return the same there.

    Under `jax.vmap` all sequences take the same branch, the costly one if any of them needs it: `jax.lax.cond` alone
    would compute both. What has a batch axis must be among `arrays`, which are pytrees.
    """

    @jax.custom_batching.custom_vmap
    def choose(needed: jax.Array, *arrays: Any) -> T:
        result: T = jax.lax.cond(needed, costly, cheap, *arrays)
        return result

    @choose.def_vmap
    def choose_for_all(number: int, are_batched: Any, needed: jax.Array, *arrays: Any) -> tuple[T, Any]:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(are_batched[1:]))
        of_each = functools.partial(jax.vmap, in_axes=axes, axis_size=number)
        result = if_any(jnp.any(needed), of_each(costly), of_each(cheap), *arrays)
        return result, jax.tree.map(lambda _: True, result)

    chosen: T = choose(needed, *arrays)
    return chosen
