"""Values of a JSON schema as models write parameters in XML: strings as they are, others in JSON."""

import functools
import json
import re
from typing import NamedTuple

import numpy as np

from jlade.constraints import automaton, json_schema, special
from jlade.constraints.automaton import NOTHING, Automaton, Expression, Repeat
from jlade.constraints.json_document import Schema
from jlade.constraints.moves import DEAD

QUOTE = ord('"')
ESCAPED = (*range(32), QUOTE, ord("\\"))  # bytes that strings in JSON do not have as they are


class End(NamedTuple):
    """The text after a value, which does not have the tag.

    Some models leave out the blanks before the tag. Where a value could go on with the tag, it ends there all the same.
    """

    blanks: str
    tag: str
    rest: str

    @classmethod
    def of(cls, text: str) -> "End":
        """Returns the parts of a text: its tag is the first one in XML, or else all up to a blank."""
        match = re.fullmatch(r"(\s*)(<[^<>]*>|\S+)(.*)", text, re.DOTALL)
        return cls("", text, "") if match is None else cls(*match.groups())


def parse(schema: Schema, end: str) -> Automaton:
    """Returns the texts of the values that a schema accepts, each followed by `end`; see `End`.

    Raises:
      UnsupportedError: names the keyword and its path.
      ValueError: the schema is wrong, or accepts no value without the tag of `end`.
    """
    return _parse(json.dumps(schema), end)


@functools.lru_cache(maxsize=256)
def _parse(schema: str, end: str) -> Automaton:
    in_json = automaton.build(json_schema.parse(schema))
    value = automaton.build(automaton.choice(_strings(in_json), _others(in_json)))
    anything, parts = Repeat(special.OTHERS, 0, None), End.of(end)
    blanks, tag, rest = (automaton.literal(special.encode(each)) for each in parts)
    before = automaton.sequence(value, blanks)
    if parts.blanks and _may_have(value, special.encode(parts.tag)):
        before = automaton.choice(before, automaton.difference(value, automaton.sequence(anything, blanks)))
    goes_on = automaton.sequence(anything, tag, special.OTHERS, anything)
    ends_once = automaton.difference(automaton.sequence(anything, tag), goes_on)
    whole = automaton.intersection(automaton.sequence(before, tag), ends_once)
    if not whole.is_final.any():
        raise ValueError(f"the schema accepts no value without {parts.tag!r}")
    return automaton.build(automaton.sequence(whole, rest))


def _may_have(values: Automaton, text: bytes) -> bool:
    """Whether one of some values has a text."""
    states = np.arange(len(values.next_state))
    for byte in text:
        states = np.unique(values.next_state[states, values.class_of_byte[byte]])
        states = states[states != DEAD]
    return len(states) > 0


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
        for escaped in json.dumps(chr(byte))[1:-1].encode():
            state = np.where(state == DEAD, DEAD, by_byte[state, escaped])
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
