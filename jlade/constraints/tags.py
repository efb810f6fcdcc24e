"""Texts with tagged parts in JSON, such as the calls of tools that chat models write.

Let me look.<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

import dataclasses
from collections.abc import Sequence

from jlade.constraints import automaton, json_schema
from jlade.constraints.automaton import Automaton, Expression, Repeat
from jlade.constraints.json_schema import Schema


@dataclasses.dataclass(frozen=True)
class Tags:
    """Blocks of tagged parts. A block is `opening`, one or more of `tags`, and `closing`.

    Attributes:
      tags: of each kind of parts the text before, the schema, and the text after.
      opening, closing: of a block.
      between: the text between two tags of a block; None for one alone.
      triggers: texts that other text must not have, each the beginning of a block; () where the text is a single block.
    """

    tags: Sequence[tuple[str, Schema, str]]
    opening: str = ""
    closing: str = ""
    between: str | None = None
    triggers: Sequence[str] = ()

    def __post_init__(self) -> None:
        begins = [self.opening + begin for begin, _, _ in self.tags]
        if not begins:
            raise ValueError("tags must be one or more")
        for trigger in self.triggers:
            if not trigger or not any(begin.startswith(trigger) for begin in begins):
                raise ValueError(f"triggers must be the beginnings of tags, got {trigger!r}")
        for begin in begins:
            if self.triggers and not begin.startswith(tuple(self.triggers)):
                raise ValueError(f"triggers must have the beginning of each tag, got none of {begin!r}")


def parse(spec: Tags) -> Expression:
    """Returns the expression of the texts.

    Raises:
      ValueError: a schema is wrong, or asks for what is not supported; names the tag, the path and the keyword.
    """
    tag = automaton.choice(*(_tag(*each) for each in spec.tags))
    parts = [automaton.literal(spec.opening), tag]
    if spec.between is not None:
        parts.append(Repeat(automaton.sequence(automaton.literal(spec.between), tag), 0, None))
    block = automaton.sequence(*parts, automaton.literal(spec.closing))
    if not spec.triggers:
        return block
    other = _without(spec.triggers)
    return automaton.sequence(Repeat(automaton.sequence(other, block), 0, None), other)


def _tag(begin: str, schema: Schema, end: str) -> Expression:
    try:
        value = json_schema.parse(schema)
    except ValueError as error:
        raise ValueError(f"of the tag {begin!r}: {error}") from error
    return automaton.sequence(automaton.literal(begin), value, automaton.literal(end))


def _without(texts: Sequence[str]) -> Automaton:
    """Returns the automaton of what contains none of some texts."""
    anything = Repeat(automaton.byte_range(0, 255), 0, None)
    found = automaton.choice(*map(automaton.literal, texts))
    return automaton.difference(anything, automaton.sequence(anything, found, anything))
