"""A record of what JAX traces, lowers and compiles, and of what the code warns of."""

import contextlib
import warnings

import jax


@contextlib.contextmanager
def recorded(kind="backend_compile"):
    """Yields a list that gains the name and the facts of each event of `jax.monitoring` with `kind` in its name.

    The list keeps what it has after the block, and gains nothing more.
    """
    events = []

    def listen(event, seconds, **facts):
        if kind in event:
            events.append((event, facts))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


EVENTS = "/jax/core/compile"  # traces, lowerings and compilations


@contextlib.contextmanager
def told():
    """Yields a list that gains the messages of the warnings in the block."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught]
