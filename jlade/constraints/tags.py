"""Texts with tagged parts, such as the calls of tools that chat models write.

Let me look.<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

import collections
import dataclasses
import itertools
import json
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jlade.constraints import automaton, json_schema, plain, special
from jlade.constraints.automaton import Automaton, Expression, Network, Repeat
from jlade.constraints.json_document import Schema
from jlade.constraints.moves import DEAD
from jlade.constraints.plain import ANYTHING

MAX_BREAKS = 2  # lines between thoughts and an answer
OF_IDS = string.ascii_letters + string.digits + "_-"
ANY_ID = Repeat(automaton.choice(*map(automaton.literal, OF_IDS)), 1, None)
BLANKS = Repeat(automaton.choice(*map(automaton.literal, " \t\r\n")), 0, None)


class Field(NamedTuple):
    """A value within a tag, in plain text; see `jlade.constraints.plain`."""

    begin: str
    schema: Schema
    end: str
    is_required: bool
    values: Sequence[Any] = plain.Values()


@dataclasses.dataclass(frozen=True)
class Tags:
    """Blocks of tagged parts. A block is `opening`, one or more of `tags`, and `closing`.

    The texts around the values may have special tokens, written by `special`; other text has none.

    Attributes:
      tags: of each kind of parts the text before, the schema of JSON or fields one after the other, and the text after.
      opening, closing: of a block; beside other text the blanks with which the first one begins may be missing.
      between: the text between two tags of a block; None for one alone.
      triggers: texts that other text must not have, each the beginning of a block; () where the text is a single block.
      maximum: blocks beside other text; None for any number.
      content: texts that may be around other text.
      other: kind and source of the grammar of other text, which is then in place of a block; None for any text.
      thoughts: texts around thoughts with which other text may begin, and in which no block is; the text before them is
        empty where the prompt has begun them.
    """

    tags: Sequence[tuple[str, Schema | Sequence[Field], str]]
    opening: str = ""
    closing: str = ""
    between: str | None = None
    triggers: Sequence[str] = ()
    maximum: int | None = None
    thoughts: Sequence[tuple[str, str]] = ()
    content: tuple[str, str] = ("", "")
    other: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        begins = [(self.opening + begin).lstrip() for begin, _, _ in self.tags]
        if not begins:
            raise ValueError("tags must be one or more")
        for trigger in self.triggers:
            if not trigger or not any(begin.startswith(trigger.lstrip()) for begin in begins):
                raise ValueError(f"triggers must be the beginnings of tags, got {trigger!r}")
        for begin in begins:
            if self.triggers and not begin.startswith(tuple(trigger.lstrip() for trigger in self.triggers)):
                raise ValueError(f"triggers must have the beginning of each tag, got none of {begin!r}")


def parse(spec: Tags, of_other: Expression | None = None) -> Expression:
    """Returns the expression of the texts.

    Args:
      spec: of the texts.
      of_other: the texts of the grammar `other`.

    Raises:
      ValueError: a schema is wrong, or asks for what is not supported; names the tag, the path and the keyword.
    """
    begins_of = collections.defaultdict[str, list[str]](list)  # of tags that are alike but for the text before
    for begin, *rest in spec.tags:
        begins_of[json.dumps(rest)].append(begin)
    tag = automaton.choice(*(_tag(begins, *json.loads(rest)) for rest, begins in begins_of.items()))
    tags = tag
    if spec.between is not None:  # the states of a tag are there once, whatever comes before it
        tags = Network(3, ((0, tag, 1), (1, _literal(spec.between), 0), (1, None, 2)))
    opening = spec.opening.lstrip()
    blanks = _literal(spec.opening.removesuffix(opening))
    if spec.triggers:
        blanks = automaton.optional(blanks)
    block = automaton.sequence(blanks, _literal(opening), tags, _literal(spec.closing))
    if not spec.triggers:
        return block
    if of_other is not None:
        others = [begin for begin, _ in spec.thoughts] + [spec.opening + begin for begin, _, _ in spec.tags]
        return after_thoughts(spec.thoughts, spec.content, automaton.choice(block, unlike(of_other, others)))
    other: Expression = _without(*spec.triggers)
    if special.MARK in "".join(spec.content):  # which other text has not
        before, after = map(_literal, spec.content)
        other = automaton.choice(other, automaton.sequence(BLANKS, before, other, automaton.optional(after)))
    begins = [(automaton.sequence(BLANKS, _literal(begin)), end) for begin, end in spec.thoughts]
    thoughts = [automaton.sequence(begin, _through(end)) for begin, end in begins]
    cut_off = [automaton.sequence(begin, _without(end)) for begin, end in begins]
    # Without thoughts nothing begins as they do. So the grammar has no second reading of what is within them.
    begun = automaton.sequence(automaton.choice(*(begin for begin, _ in begins)), ANYTHING)
    first = automaton.choice(
        automaton.difference(other, begun), *(automaton.sequence(thought, other) for thought in thoughts)
    )
    blocks = Repeat(automaton.sequence(block, other), 0, spec.maximum)
    return automaton.choice(automaton.sequence(first, blocks), *cut_off)


def unlike(texts: Expression, begins: Sequence[str]) -> Expression:
    """Returns the texts that do not begin as other parts of an answer do; empty beginnings do not count."""
    begins = [begin.lstrip() for begin in begins if begin]
    whole = automaton.build(texts, counts=True) if begins else None
    if whole is None or not any(_may_begin(whole, begin) for begin in begins):
        return texts
    return automaton.difference(texts, automaton.sequence(BLANKS, automaton.choice(*map(_literal, begins)), ANYTHING))


def after_thoughts(thoughts: Sequence[tuple[str, str]], content: tuple[str, str], answer: Expression) -> Expression:
    """Returns an answer, perhaps between the texts `content`, after thoughts.

    Thoughts are as in `Tags`, with up to two line breaks behind them. If the prompt has begun them, they come first.
    """
    opening, closing = (automaton.optional(_literal(mark)) for mark in content)
    answer = automaton.sequence(opening, answer, closing)
    if not thoughts:
        return answer
    breaks = Repeat(automaton.literal("\n"), 0, MAX_BREAKS)
    thought = automaton.choice(
        *(automaton.sequence(BLANKS, _literal(begin), _through(end), breaks) for begin, end in thoughts)
    )
    has_begun = any(not begin for begin, _ in thoughts)
    return automaton.sequence(thought if has_begun else automaton.optional(thought), answer)


def _may_begin(texts: Automaton, begin: str) -> bool:
    """Whether a text may begin so after blanks, whatever the counts of its loops."""
    by_byte = np.vstack([texts.next_state[:, texts.class_of_byte], np.full(256, DEAD)])  # `DEAD` is the last
    states = np.array([0])
    while len(after := np.union1d(states, by_byte[states][:, list(b" \t\r\n")])) > len(states):
        states = after
    for byte in special.encode(begin.split(special.ID)[0]):
        states = np.unique(by_byte[states, byte])
    return bool((states != DEAD).any())


def _through(end: str) -> Expression:
    """Returns any text without special tokens up to and with the first `end`."""
    return automaton.sequence(_without(end), _literal(end))


def _tag(begins: Sequence[str], content: Schema | Sequence[Field], end: str) -> Expression:
    try:
        value = _fields(content) if isinstance(content, Sequence) else json_schema.parse(content)
    except ValueError as error:
        raise ValueError(f"of the tag {begins[0]!r}: {error}") from error
    return automaton.sequence(automaton.choice(*map(_literal, begins)), value, _literal(end))


def _fields(fields: Sequence[Field]) -> Expression:
    if fields and (follows := plain.Values(*fields[0][4]).follows):
        return _joined(fields, follows[0])
    parts = []
    for begin, schema, end, is_required, values in fields:
        part = automaton.sequence(_literal(begin), plain.parse(schema, end, values))
        parts.append(part if is_required else automaton.optional(part))
    return automaton.sequence(*parts)


def _joined(fields: Sequence[Field], separator: str) -> Expression:
    """Returns fields with a separator between two of those that are there."""
    parts = []
    for begin, schema, end, is_required, values in fields:
        part = automaton.sequence(_literal(separator + begin), plain.parse(schema, end, values))
        parts.append(part if is_required else automaton.optional(part))
    joined = plain.after(automaton.build(automaton.sequence(*parts)), separator.encode())
    return joined if any(field[3] for field in fields) else automaton.optional(joined)


def _literal(text: str) -> Expression:
    first, *others = (automaton.literal(special.encode(part)) for part in text.split(special.ID))
    return automaton.sequence(first, *itertools.chain.from_iterable((ANY_ID, part) for part in others))


def _without(*texts: str) -> Automaton:
    """Returns the automaton of what contains none of some texts."""
    excluded = automaton.choice(*map(_literal, texts))
    return automaton.difference(ANYTHING, automaton.sequence(ANYTHING, excluded, ANYTHING))
