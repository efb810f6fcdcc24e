#!/usr/bin/env bash
# Guess: a loop that reads rows of an array and then overwrites them works in place, as the order of the two is plain.
# Seen: XLA for CPUs copies the whole array twice a round, unless what is written there comes from what was read there.
# The mean of the old and the new rows is written in place; the new rows alone are not, if the mean goes into another
# array. An optimization barrier between reading and writing changes nothing. Both in one array, the mean beside the new
# rows, copy nothing.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata
import re

import jax
import jax.numpy as jnp

WIDTH, ROWS, READ = 8, 2000, 20


def put(array, places, rows):
    return array.at[places].set(rows, mode="drop", unique_indices=True)


def apart(means, latest, places, new):
    old = latest[places]
    return put(means, places, (old + new) // 2), put(latest, places, new)


def apart_with_barrier(means, latest, places, new):
    old, places, new = jax.lax.optimization_barrier((latest[places], places, new))
    return put(means, places, (old + new) // 2), put(latest, places, new)


def swapped(means, latest, places, new):
    return put(means, places, new), put(latest, places, (latest[places] + new) // 2)


def together(means, both, places, new):
    old = both[places, WIDTH:]
    return means, put(both, places, jnp.concatenate([(old + new) // 2, new], axis=1))


def copies(update, width=WIDTH):
    def round_(state):
        i, *arrays, total = state
        places = (jnp.arange(READ) * 37 + i * 11) % ROWS
        new = jnp.broadcast_to((places * 3 + i)[:, None], (READ, WIDTH))
        arrays = update(*arrays, places, new)
        return i + 1, *arrays, total + sum(array[(i * 7) % ROWS].sum() for array in arrays)

    def run(*arrays):
        return jax.lax.while_loop(lambda state: state[0] < 200, round_, (0, *arrays, jnp.int32(0)))

    arrays = [jax.ShapeDtypeStruct((ROWS, size), jnp.int32) for size in (WIDTH, width)]
    program = jax.jit(run, donate_argnums=(0, 1)).lower(*arrays).compile().as_text()
    return len(re.findall(rf"= s32\[{ROWS},{width}\]\S* copy\(", program))


found = {
    "the mean in another array": copies(apart),
    "with a barrier": copies(apart_with_barrier),
    "the mean where it was read": copies(swapped),
    "both in one array": copies(together, 2 * WIDTH),
}
print(f"jaxlib {importlib.metadata.version('jaxlib')}, whole arrays copied in the loop:", found)
assert list(found.values()) == [2, 2, 0, 0], found
PYTHON
