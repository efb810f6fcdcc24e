"""Values of a JSON schema as models write parameters in XML: strings as they are, others in JSON or as in Python."""

import ast
import contextlib
import functools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jlade.constraints import automaton, json_schema, special
from jlade.constraints import moves as moves_lib
from jlade.constraints.automaton import NOTHING, Automaton, Expression, Repeat
from jlade.constraints.json_document import APPLIED, ESCAPES, Schema
from jlade.constraints.moves import DEAD

QUOTE = ord('"')
ANYTHING = Repeat(special.OTHERS, 0, None)
LENGTHS = {"minLength", "maxLength"}

# The kinds of values, and the bytes with which they begin in JSON.
KINDS = {"string": b'"', "number": b"-0123456789", "boolean": b"tf", "null": b"n", "list": b"[", "object": b"{"}
WORDS = ("true", "false", "null")


class Values(NamedTuple):
    """How values are written.

    Attributes:
      before: texts before them, by their kinds, in the order of `KINDS`.
      words: those for true, false and null, alone.
      in_python: the kinds of which values are literals of Python: lists and objects.
      in_quotes: the kinds of which values have strings in `quotes`, names of fields without any, and no blanks.
      quotes: texts that may be around a string.
      follows: texts of which one follows a value that has no end of its own: where another one comes, and where none
        does. Strings have their quotes then.
    """

    before: Sequence[str] = ("",) * len(KINDS)
    words: Sequence[str] = WORDS
    in_python: Sequence[str] = ()
    in_quotes: Sequence[str] = ()
    quotes: Sequence[str] = ("", "")
    follows: Sequence[str] = ()


IN_JSON = Values()
STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""  # of Python


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


def parse(schema: Schema, end: str, values: Sequence[Any] = IN_JSON) -> Expression:
    """Returns the texts of the values that a schema accepts, each followed by `end`; see `End`.

    Raises:
      UnsupportedError: names the keyword and its path.
      ValueError: the schema is wrong, or accepts no value without the tag of `end`.
    """
    return _parse(json.dumps(schema), end, json.dumps(values))


@functools.lru_cache(maxsize=256)
def _parse(schema: str, end: str, values: str) -> Expression:
    texts, spelled = json_schema.parse(schema), Values(*json.loads(values))
    if _is_counted(keywords := json.loads(schema), spelled):
        others = {key: value for key, value in keywords.items() if key not in LENGTHS}
        length, maximum = len(spelled.before[0]), keywords.get("maxLength")  # of the text before, which counts too
        bounds = length + int(keywords.get("minLength", 0)), None if maximum is None else length + int(maximum)
        return automaton.counted(_parse(json.dumps(others), end, values), _meter(End.of(end)), *bounds)
    in_json = automaton.build(texts)
    of_before: dict[str, Expression] = dict.fromkeys(spelled.before, NOTHING)
    for kind, before in zip(KINDS, spelled.before, strict=True):
        of_before[before] = automaton.choice(of_before[before], _of_kind(kind, in_json, spelled))
    if spelled.follows:
        return automaton.build(automaton.choice(*of_before.values()))
    parts = [
        automaton.sequence(automaton.literal(special.encode(before)), _before_end(automaton.build(value), end))
        for before, value in of_before.items()
    ]
    whole = automaton.build(automaton.choice(*parts))
    if not whole.is_final.any():
        raise ValueError(f"the schema accepts no value without {End.of(end).tag!r}")
    return whole


def _before_end(value: Automaton, end: str) -> Expression:
    """Returns values, each followed by `end`."""
    parts = End.of(end)
    blanks, tag, rest = (automaton.literal(special.encode(each)) for each in parts)
    before = automaton.sequence(value, blanks)
    if parts.blanks and _may_have(value, special.encode(parts.tag)):
        before = automaton.choice(before, automaton.difference(value, automaton.sequence(ANYTHING, blanks)))
    return automaton.sequence(automaton.intersection(automaton.sequence(before, tag), _through(parts.tag)), rest)


def _is_counted(schema: Schema, values: Values) -> bool:
    """Whether a schema is that of strings with bounds of their lengths, which are written as they are."""
    if isinstance(schema, bool) or schema.get("type") != "string" or values.follows or any(values.quotes):
        return False
    keywords = APPLIED & schema.keys()
    return bool(keywords & LENGTHS) and keywords <= {"type", "pattern", "format", *LENGTHS}


@functools.cache
def _meter(end: End) -> Automaton:
    """Returns the automaton that counts the characters of values, each followed by `end`, whose own do not count.

    Those with which `end` may begin count as soon as they are none of it.
    """
    blanks, tag, rest = map(special.encode, end)
    ends = blanks + tag, tag
    begun = sorted({each[:length] for each in ends for length in range(len(each))})  # the states before `rest`
    by_byte = np.full((len(begun) + len(rest) + 1, 256), DEAD)
    for state, held in enumerate(begun):
        for byte in range(256):
            text = held + bytes([byte])
            suffixes = [text[place:] for place in range(len(text) + 1)]  # the longest one first
            after = next(suffix for suffix in suffixes if suffix in ends or suffix in begun)
            number = sum(each & 0xC0 != 0x80 for each in text.removesuffix(after))  # of first bytes of characters
            by_byte[state, byte] = moves_lib.move(len(begun) if after in ends else begun.index(after), number)
    for place, byte in enumerate(rest):
        by_byte[len(begun) + place, byte] = len(begun) + place + 1
    moves, class_of_byte = np.unique(by_byte.astype(np.int32), axis=1, return_inverse=True)
    is_final, bounds = np.arange(len(moves)) == len(moves) - 1, moves_lib.without_bounds(len(moves))
    return Automaton(moves, class_of_byte.reshape(256).astype(np.int32), is_final, bounds)


@functools.cache
def _through(tag: str) -> Automaton:
    """Returns any text up to and with the first tag."""
    end = automaton.literal(special.encode(tag))
    goes_on = automaton.sequence(ANYTHING, end, special.OTHERS, ANYTHING)
    return automaton.difference(automaton.sequence(ANYTHING, end), goes_on)


def _of_kind(kind: str, in_json: Automaton, values: Values) -> Expression:
    """Returns the values of one kind as they are written."""
    if kind == "string":
        strings, (begin, end) = _strings(in_json), [automaton.literal(special.encode(each)) for each in values.quotes]
        if values.follows:
            ends = automaton.choice(*(automaton.literal(values.quotes[1] + each) for each in values.follows))
            return automaton.sequence(
                begin, automaton.difference(strings, automaton.sequence(ANYTHING, ends, ANYTHING)), end
            )
        return automaton.choice(strings, automaton.sequence(begin, strings, end)) if any(values.quotes) else strings
    if kind in ("boolean", "null"):
        words = zip(WORDS, values.words, strict=True)
        own = [word for name, word in words if name[0].encode() in KINDS[kind] and in_json.accepts(name.encode())]
        return automaton.choice(NOTHING, *map(automaton.literal, own))
    if all(in_json.run(bytes([byte])) == DEAD for byte in KINDS[kind]):
        return NOTHING
    if kind in values.in_quotes:
        return _in_quotes(in_json, KINDS[kind], values)
    if kind in values.in_python:
        return _in_python(in_json, KINDS[kind])
    return _beginning(in_json, KINDS[kind])


def _may_have(values: Automaton, text: bytes) -> bool:
    """Whether one of some values has a text."""
    states = np.arange(len(values.next_state))
    for byte in text:
        states = np.unique(values.next_state[states, values.class_of_byte[byte]])
        states = states[states != DEAD]
    return len(states) > 0


def length_before(text: str, values: Values) -> int:
    """Returns the length of the value with which a text begins; 0 while none of `follows` follows one."""
    begin, end = values.quotes
    if text.startswith(begin):
        ends = [text.find(end + each, len(begin)) for each in values.follows]
        return min((place + len(end) for place in ends if place >= 0), default=0)
    string = re.compile(rf"{re.escape(begin)}.*?{re.escape(end)}" if values.in_quotes else STRING, re.DOTALL)
    quotes = (begin,) if values.in_quotes else ("'", '"')
    depth = place = 0
    while place < len(text):
        character = text[place]
        if text.startswith(quotes, place):
            if (found := string.match(text, place)) is None:
                return 0
            place = found.end()
            continue
        if not depth and text.startswith(tuple(values.follows), place):
            return place
        depth += (character in "[{") - (character in "]}")
        place += 1
    return 0


def are_strings(in_json: Automaton) -> bool:
    """Whether the values of an automaton of JSON are strings alone."""
    first = in_json.next_state[0, in_json.class_of_byte]
    return bool((np.delete(first, QUOTE) == DEAD).all())


def to_json(text: str, in_json: Automaton, values: Values = IN_JSON) -> str:
    """Returns a value in plain text in JSON, given the automaton of JSON: as a string only where it is nothing else."""
    before = max((before for before in values.before if text.startswith(before)), key=len, default="")
    text = text.removeprefix(before)
    is_string = before == values.before[0] and before not in values.before[1:]
    written = dict(zip(values.words, WORDS, strict=True)).get(text, text)
    if values.in_quotes and text.startswith(("[", "{")):
        begin, end = map(re.escape, values.quotes)
        words = {word: name for name, word in zip(WORDS, values.words, strict=True)}
        pattern = (
            rf"{begin}(?P<string>.*?){end}|(?<=[{{,])(?P<name>[^\[\]{{}},:]+)(?=:)|\b(?P<word>{'|'.join(words)})\b"
        )

        def in_json_of(match: re.Match[str]) -> str:
            string = match["string"] if match["name"] is None else match["name"]
            return words[match["word"]] if match["word"] else json.dumps(string, ensure_ascii=False)

        written = re.sub(pattern, in_json_of, text, flags=re.DOTALL)
    if values.in_python and text.startswith(("[", "{")):
        with contextlib.suppress(ValueError, SyntaxError):
            written = json.dumps(ast.literal_eval(text), ensure_ascii=False)
    if not is_string and not written.startswith('"') and in_json.accepts(written.encode()):
        return written
    begin, end = values.quotes
    if begin and text.startswith(begin) and text.endswith(end):
        text = text[len(begin) : -len(end)]
    return json.dumps(text, ensure_ascii=False)


def _strings(in_json: Automaton) -> Expression:
    """Returns the strings among some values, as they are."""
    begin = in_json.run(b'"')
    if begin == DEAD:
        return NOTHING
    by_byte = in_json.next_state[:, in_json.class_of_byte]  # [S, 256]
    after = by_byte.copy()
    for byte, escape in ESCAPES.items():
        after[:, byte] = _states_after(by_byte, escape)
    closed = by_byte[:, QUOTE]
    return _from(after[begin], after, (closed != DEAD) & in_json.is_final[closed], begin)


def _beginning(in_json: Automaton, first: bytes) -> Automaton:
    """Returns the values that begin with one of some bytes, in JSON."""
    return _of_modes(in_json.next_state[None, :, in_json.class_of_byte], in_json, first)


def _in_python(in_json: Automaton, first: bytes) -> Automaton:
    """Returns the values that begin with one of some bytes as `repr` of Python writes them."""
    by_byte = in_json.next_state[:, in_json.class_of_byte]
    # A state of JSON becomes one of each mode: outside of strings, in strings of two quotes, after a backslash in each,
    # and after the letters N, No and Non.
    table = np.full((8, *by_byte.shape), DEAD)

    def move(mode: int, letter: str, to: int, spelled: str) -> None:
        """Makes a letter in Python lead to the state after its text in JSON."""
        state = _states_after(by_byte, spelled.encode())
        table[mode, :, ord(letter)] = np.where(state == DEAD, DEAD, to * len(by_byte) + state)

    for character in "[]{}:, -+.0123456789eEruals":
        move(0, character, 0, character)
    for begin in "TF":
        move(0, begin, 0, begin.lower())
    move(0, "N", 5, "null")
    for mode, letter, to in ((5, "o", 6), (6, "n", 7), (7, "e", 0)):
        move(mode, letter, to, "")
    for mode, quote in ((1, "'"), (2, '"')):
        move(0, quote, mode, '"')
        for byte in range(32, 256):
            state = by_byte[:, byte]
            table[mode, :, byte] = np.where(state == DEAD, DEAD, mode * len(by_byte) + state)
        move(mode, '"', mode, '\\"')
        move(mode, quote, 0, '"')
        move(mode, "\\", mode + 2, "")
        for escaped, spelled in (("\\", "\\\\"), ("n", "\\n"), ("r", "\\r"), ("t", "\\t"), ("'", "'"), ('"', '\\"')):
            move(mode + 2, escaped, mode, spelled)
    return _of_modes(table, in_json, first)


def _in_quotes(in_json: Automaton, first: bytes, values: Values) -> Automaton:
    """Returns the values that begin with one of some bytes with strings in quotes, and names of fields without."""
    by_byte = in_json.next_state[:, in_json.class_of_byte]
    begin, end, null = map(special.encode, (*values.quotes, values.words[2]))
    # A state of JSON becomes one of each mode: outside of strings, in a string, in a name, and within quotes and null.
    outside, in_string, in_name, within = range(4)
    table = np.full((within + len(begin + end + null), *by_byte.shape), DEAD)

    def move(mode: int, byte: int, to: int, spelled: bytes) -> None:
        """Makes a byte lead to the state after its text in JSON."""
        state = _states_after(by_byte, spelled)
        alive = state != DEAD
        table[mode, alive, byte] = to * len(by_byte) + state[alive]

    for byte in range(256):
        in_string_of_json = json.dumps(chr(byte))[1:-1].encode() if byte < 128 else bytes([byte])
        if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_$"):
            move(outside, byte, in_name, b'"' + bytes([byte]))
        if byte not in b":[]{},":
            move(in_name, byte, in_name, in_string_of_json)
        if byte not in (begin[0], end[0]):
            move(in_string, byte, in_string, in_string_of_json)
    for byte in b"[]{}:,-+.0123456789eEtrufals":
        move(outside, byte, outside, bytes([byte]))
    move(in_name, ord(":"), outside, b'":')
    for text, mode, to, spelled in (
        (begin, outside, in_string, b'"'),
        (end, in_string, outside, b'"'),
        (null, outside, outside, b"null"),
    ):
        for number, byte in enumerate(text):
            is_last = number == len(text) - 1
            move(
                within + number if number else mode,
                byte,
                to if is_last else within + number + 1,
                b"" if number else spelled,
            )
        within += len(text)
    return _of_modes(table, in_json, first)


def _states_after(by_byte: np.ndarray, text: bytes) -> np.ndarray:
    """Returns the states [S] after a text from each state, given the states after each byte [S, 256]."""
    state = np.arange(len(by_byte))
    for byte in text:
        state = np.where(state == DEAD, DEAD, by_byte[state, byte])
    return state


def _of_modes(table: np.ndarray, in_json: Automaton, first: bytes) -> Automaton:
    """Returns the values that begin with one of some bytes.

    Args:
      table: the states after each byte of the S states of JSON in each of some modes [M, S, 256], numbered from those
        of mode 0 on, in which alone a text may end.
      in_json: the automaton of JSON.
      first: the bytes.
    """
    rows = table.reshape(-1, 256)
    begin = np.where(np.isin(np.arange(256), list(first)), rows[0], DEAD)
    is_final = np.concatenate([in_json.is_final, np.zeros(len(rows) - len(in_json.is_final), bool)])
    return _from(begin, rows, is_final, 0)


def after(whole: Automaton, begin: bytes) -> Automaton:
    """Returns the texts that may follow the beginning of a text of an automaton that does not count."""
    by_byte, state = whole.next_state[:, whole.class_of_byte], whole.run(begin)
    return _from(by_byte[state], by_byte, np.array(whole.is_final), state)


def _from(first: np.ndarray, by_byte: np.ndarray, is_final: np.ndarray, begin: int) -> Automaton:
    """Returns the automaton of the transitions [S, 256] that begins in a state with the transitions `first` [256].

    Whether a text may end at once is that of the state `begin`.
    """
    rows = np.vstack([first, by_byte])
    classes, class_of_byte = np.unique(np.where(rows == DEAD, DEAD, rows + 1), axis=1, return_inverse=True)
    return Automaton(
        classes.astype(np.int32), class_of_byte.reshape(256).astype(np.int32), np.append(is_final[begin], is_final)
    )
