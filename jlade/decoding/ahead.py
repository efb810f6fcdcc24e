"""Programs that can be compiled ahead of their first call, also while another thread runs others.

Called with `jax.ShapeDtypeStruct`s, as `shapes` returns them, a function decorated with `jit` compiles its program and
returns the shapes of its results. The code that runs a model therefore also compiles it ahead of time. JAX keeps what
`lower` and `compile` make: a later call with such arrays compiles nothing.

`intercept(handler)` passes every such call to `handler`, which may compile it for another device or run a program of an
earlier process. To run a decode under it is to list its programs: a list beside the code would have to follow each of
its changes.
"""

import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax

from jlade.decoding import room, status

T = TypeVar("T")
COMPILER_OPTIONS: dict[str, dict[str, int | bool]] = {
    # XLA joins products of the same tokens with several matrices, such as those of queries, keys and values, by default
    # with small ones alone: up to so many megabytes. Its kernel reads each matrix where it lies.
    # By default it also omits roundings to bfloat16 that are widened again, where CPUs and TPUs round: a text would
    # depend on its division into blocks, as keys are rounded in the cache.
    "gpu": {"xla_gpu_dot_merger_threshold_mb": 4096, "xla_allow_excess_precision": False},
    # The compiler for TPU7x would copy all 16-bit weights that a loop reads into tiles of 16 rows before the loop.
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False},
}
_config: Any = jax.config  # for type checkers it has no options


class Call(NamedTuple):
    """A call of a function of `jit`."""

    program: str  # the name of the function
    function: Callable[..., Any]  # itself, which `jax.jit` traces with `options`
    options: dict[str, Any]
    programs: "_Programs"  # of the function with these settings
    arrays: tuple[Any, ...]  # pytrees of arrays, or of shapes
    settings: dict[str, Any]  # the static arguments by their names

    def run(self) -> Any:
        """Returns the results as if nothing intercepted the call; it compiles the program if it is new."""
        return self.programs.run(self.arrays, self.settings)

    def apart(self) -> "Call":
        """Returns the call of a copy of the function, with which it shares no program in memory."""

        @functools.wraps(self.function)
        def copy(*args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

        return self._replace(programs=_Programs(copy, self.options))


Handler = Callable[[Call], Any]
_handler: contextvars.ContextVar[Handler | None] = contextvars.ContextVar("handler", default=None)


@contextlib.contextmanager
def intercept(handler: Handler | None) -> Iterator[None]:
    """Lets `handler` return the results of this thread's calls in the block, but for the calls that it makes itself."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def jit(**options: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Returns a decorator like `jax.jit` with these options, for a function whose first arrays may be shapes.

    Its static arguments have names, and come last. The programs of each choice of them are dropped together when the
    process has little room for more (`jlade.decoding.room`). While JAX looks for NaN, which calls a function again
    where it finds one, no arguments are donated.
    """
    given = options.get("static_argnames", ())
    static = {given} if isinstance(given, str) else set(given)

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        parameters = list(inspect.signature(function).parameters)
        num_arrays, names = len(parameters) - len(static), parameters[len(parameters) - len(static) :]
        assert set(names) == static, (function, names)
        made: dict[tuple[Any, ...], _Programs] = {}
        undonated = {name: value for name, value in options.items() if name != "donate_argnames"}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            named = dict(zip(names, args[num_arrays:], strict=False)) | kwargs
            arrays, settings = args[:num_arrays], {name: named[name] for name in names}
            donates = not (_config.jax_debug_nans or _config.jax_debug_infs)
            key = (*settings.values(), donates)
            programs = made.get(key) or made.setdefault(key, _Programs(function, options if donates else undonated))
            programs.use()
            handler = _handler.get()
            _here.depth += 1
            try:
                if handler is None:
                    results: T = programs.run(arrays, settings)
                else:
                    with intercept(None):
                        results = handler(Call(function.__name__, function, options, programs, arrays, settings))
            finally:
                _here.depth -= 1
                if _here.traced and not _here.depth:
                    _here.traced = False
                    status.end_program()
                    programs.gain()
            return results

        return call

    return decorate


class _Programs(room.Programs):
    """The programs of a function with the same static arguments."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]):
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if _here.depth and not _here.traced:
                _here.traced = True
                status.begin_program()
            return function(*args, **kwargs)

        self._jit: Any = functools.partial(jax.jit, traced, **options)
        self.jitted = self._jit(compiler_options=COMPILER_OPTIONS.get(jax.default_backend()))
        super().__init__(lambda: self.jitted.clear_cache())

    def run(self, args: Any, kwargs: Any) -> Any:
        """Returns the results for arrays, or their shapes for shapes, for which it compiles the program."""
        try:
            return _run(self.jitted, args, kwargs)
        except jax.errors.JaxRuntimeError as error:
            if not refuses_options(error):
                raise
            self.jitted = self._jit()
            return _run(self.jitted, args, kwargs)


class _Here(threading.local):
    """The calls of functions of `jit` in this thread that have not returned, and whether one of them has traced."""

    depth, traced = 0, False


_here = _Here()


def is_shapes(arrays: Any) -> bool:
    """Returns whether a pytree is of shapes, by its first leaf."""
    return isinstance(next(iter(jax.tree.leaves(arrays))), jax.ShapeDtypeStruct)


def shapes(arrays: Any) -> Any:
    """Returns the shapes of a pytree of arrays of JAX, with their shardings, or of NumPy."""

    def shape_of(array: Any) -> jax.ShapeDtypeStruct:
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return _placed(shape, array.sharding) if isinstance(array, jax.Array) and array.committed else shape

    return jax.tree.map(shape_of, arrays)


def results_of(compiled: Any) -> Any:
    """Returns the shapes of the results of a program, a `jax.stages.Compiled`, with their shardings."""
    return jax.tree.map(lambda result: _placed(result, result.sharding), compiled.out_info)


def refuses_options(error: jax.errors.JaxRuntimeError) -> bool:
    """Returns whether a program is for a CPU beside a TPU, whose options its compiler does not know."""
    return "No such compile option" in str(error)


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
    shapes = (leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.ShapeDtypeStruct))
    is_placed = any(shape.sharding is not None for shape in shapes)
    return jax.tree.map(_placed, results, compiled.output_shardings) if is_placed else results


def _placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
