"""Programs that can be compiled ahead of their first call, also while another thread runs others.

Given the shapes of arrays, as `shapes` returns them, a function of `jit` compiles, and returns the shapes of its
results. So code that runs programs on arrays compiles them when it gets shapes. JAX keeps what `lower` and `compile`
make: a later call with such arrays compiles nothing.

Within `answered` the calls of all these functions go to a function of the caller: one that compiles them for another
device, or one that has the programs of an earlier process. So a call is the list of its own programs.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")


class Call(NamedTuple):
    """A call of a function of `jit`.

    Attributes:
      program: the name of the function.
      function: itself, which `jax.jit` traces with `options`.
      jitted: the result of `jax.jit`; it takes `arrays`, and `settings` as keywords.
      arrays: pytrees of arrays, or of shapes.
      settings: the static arguments by their names.
    """

    program: str
    function: Callable[..., Any]
    options: dict[str, Any]
    jitted: Any
    arrays: tuple[Any, ...]
    settings: dict[str, Any]

    def run(self) -> Any:
        """Returns the results as if nobody answered the call; it compiles the program if it is new."""
        return _run(self.jitted, self.arrays, self.settings)

    def apart(self) -> "Call":
        """Returns the call of a copy of the function, with which it shares no program in memory."""

        @functools.wraps(self.function)
        def copy(*args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

        return self._replace(jitted=jax.jit(copy, **self.options))


Answer = Callable[[Call], Any]
_answer: contextvars.ContextVar[Answer | None] = contextvars.ContextVar("answer", default=None)


@contextlib.contextmanager
def answered(by: Answer | None) -> Iterator[None]:
    """Lets `by` return the results of the calls that this thread makes in the block, but for those that `by` makes."""
    token = _answer.set(by)
    try:
        yield
    finally:
        _answer.reset(token)


def jit(**options: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Returns a decorator like `jax.jit` with these options, for a function whose first arrays may be shapes.

    Its static arguments have names, and come last.
    """
    names = options.get("static_argnames", ())
    static = {names} if isinstance(names, str) else set(names)

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        jitted = jax.jit(function, **options)
        signature = functools.cache(functools.partial(inspect.signature, function))

        @functools.wraps(jitted)
        def call(*args: Any, **kwargs: Any) -> T:
            answer = _answer.get()
            if answer is not None:
                given = signature().bind(*args, **kwargs).arguments
                arrays = tuple(value for name, value in given.items() if name not in static)
                settings = {name: value for name, value in given.items() if name in static}
                with answered(None):
                    results: T = answer(Call(function.__name__, function, options, jitted, arrays, settings))
                return results
            results = _run(jitted, args, kwargs)
            return results

        return call

    return decorate


def is_shapes(arrays: Any) -> bool:
    """Returns whether a pytree is of shapes, by its first leaf."""
    return isinstance(next(iter(jax.tree.leaves(arrays))), jax.ShapeDtypeStruct)


def shapes(arrays: Any) -> Any:
    """Returns the shapes of a pytree of arrays, in the devices' memory or in NumPy, with the places of the former."""

    def of(array: Any) -> jax.ShapeDtypeStruct:
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return _placed(shape, array.sharding) if isinstance(array, jax.Array) and array.committed else shape

    return jax.tree.map(of, arrays)


def results_of(compiled: Any) -> Any:
    """Returns the shapes of the results of a program, a `jax.stages.Compiled`, with their places."""
    return jax.tree.map(lambda each: _placed(each, each.sharding), compiled.out_info)


def _run(jitted: Any, args: Any, kwargs: Any) -> Any:
    try:
        return jitted(*args, **kwargs)
    except TypeError:  # of a shape, before anything runs; a look for one costs every call with arrays 0.1 ms
        if not is_shapes(args):
            raise
        return _compile(jitted, args, kwargs)


def _compile(jitted: Any, args: Any, kwargs: Any) -> Any:
    compiled, results = jitted.lower(*args, **kwargs).compile(), jitted.eval_shape(*args, **kwargs)
    # Results are bound to devices if an argument is; otherwise JAX may move them.
    given = (each for each in jax.tree.leaves(args) if isinstance(each, jax.ShapeDtypeStruct))
    is_placed = any(each.sharding is not None for each in given)
    return jax.tree.map(_placed, results, compiled.output_shardings) if is_placed else results


def _placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
