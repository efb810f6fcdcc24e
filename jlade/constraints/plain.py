"""Values of a JSON schema as models write parameters in XML: strings as they are, others in JSON."""

import functools
import json

import numpy as np

from jlade.constraints import automaton, json_schema, special
from jlade.constraints.automaton import NOTHING, Automaton, Expression, Repeat
from jlade.constraints.json_schema import Schema
from jlade.constraints.moves import DEAD

QUOTE = ord('"')
ESCAPED = (*range(32), QUOTE, ord("\\"))  # bytes that strings in JSON do not have as they are


def parse(schema: Schema, end: bytes) -> Automaton:
    """Returns the texts of the values that a schema accepts, each followed by `end`, which is nowhere before.

    Raises:
      UnsupportedError: names the keyword and its path.
      ValueError: the schema is wrong, or accepts no value without `end`.
    """
    return _parse(json.dumps(schema), end)


@functools.lru_cache(maxsize=256)
def _parse(schema: str, end: bytes) -> Automaton:
    in_json = automaton.build(json_schema.parse(schema))
    value = automaton.choice(_strings(in_json), _others(in_json))
    anything, ending = Repeat(special.OTHERS, 0, None), automaton.literal(end)
    goes_on = automaton.sequence(anything, ending, special.OTHERS, anything)
    ends_once = automaton.difference(automaton.sequence(anything, ending), goes_on)
    found = automaton.intersection(automaton.sequence(value, ending), ends_once)
    if not found.is_final.any():
        raise ValueError(f"the schema accepts no value without {end!r}")
    return found


def are_strings(in_json: Automaton) -> bool:
    """Whether the values of an automaton of JSON are strings alone."""
    first = in_json.next_state[0, in_json.class_of_byte]
    return bool((np.delete(first, QUOTE) == DEAD).all())


def to_json(text: str, in_json: Automaton) -> str:
    """Returns a value in plain text in JSON, given the automaton of JSON: as a string only where it is nothing else."""
    is_string = text.startswith('"') or not in_json.accepts(text.encode())
    return json.dumps(text, ensure_ascii=False) if is_string else text


def _strings(in_json: Automaton) -> Expression:
    """Returns the strings among some values, as they are."""
    begin = in_json.run(b'"')
    if begin == DEAD:
        return NOTHING
    by_byte = in_json.next_state[:, in_json.class_of_byte]  # [S, 256]
    after = by_byte.copy()
    for byte in ESCAPED:
        state = np.arange(len(by_byte))
        for each in json.dumps(chr(byte))[1:-1].encode():
            state = np.where(state == DEAD, DEAD, by_byte[state, each])
        after[:, byte] = state
    closed = by_byte[:, QUOTE]
    return _from(after[begin], after, (closed != DEAD) & in_json.is_final[closed], begin)


def _others(in_json: Automaton) -> Expression:
    """Returns the values that are no strings, in JSON."""
    by_byte = in_json.next_state[:, in_json.class_of_byte]
    first = np.where(np.arange(256) == QUOTE, DEAD, by_byte[0])
    return _from(first, by_byte, in_json.is_final, 0)


def _from(first: np.ndarray, by_byte: np.ndarray, is_final: np.ndarray, begin: int) -> Automaton:
    """Returns the automaton of the transitions [S, 256] that begins in a state with the transitions `first` [256].

    Whether a text may end at once is that of the state `begin`.
    """
    rows = np.vstack([first, by_byte])
    classes, class_of_byte = np.unique(np.where(rows == DEAD, DEAD, rows + 1), axis=1, return_inverse=True)
    return Automaton(
        classes.astype(np.int32), class_of_byte.reshape(256).astype(np.int32), np.append(is_final[begin], is_final)
    )
