"""Fields that ask for a text of a grammar: OpenAI's `response_format`, and those of vLLM, SGLang and llama.cpp."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jlade.constraints.grammar import Grammar
from jlade.constraints.tags import Tags
from jlade.errors import ArgumentError
from jlade.server import fields, known_fields
from jlade.server.fields import Body, RequestError
from jlade.server.known_fields import Unsupported

Make = Callable[[], Grammar]


class GrammarField(NamedTuple):
    """A grammar that a field asks for. To make it may take seconds."""

    field: str
    make: Make

    def grammar(self) -> Grammar:
        """Returns the grammar."""
        with self.errors():
            return self.make()

    def after(self, end: str) -> "GrammarField":
        """Returns the grammar after any text up to `end`, as `Grammar.after` does."""
        return self._replace(make=lambda: self.make().after(end))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of a grammar into a RequestError that names the field."""
        try:
            yield
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ArgumentError) and error.argument == "eos_ids":
                raise RequestError(f"stop_token_ids {error.problem}", "stop_token_ids") from error
            raise RequestError(f"{self.field} has no grammar: {error}", self.field) from error


def read(body: Body, text_format: GrammarField | None = None) -> GrammarField | None:
    """Returns the grammar that `FIELDS` of a body or `text_format`, see `of_text_format`, ask for; None for none."""
    grammars = [] if text_format is None else [text_format]
    grammars += [grammar for name, of_field in FIELDS.items() if (grammar := _field(body, name, of_field)) is not None]
    if len(grammars) > 1:
        names = " and ".join(grammar.field for grammar in grammars)
        raise RequestError(f"{names} ask for two grammars: leave out one", grammars[1].field)
    return grammars[0] if grammars else None


def _field(body: Body, name: str, of_field: Callable[[str, Any], Make | None]) -> GrammarField | None:
    value = body.get(name)
    make = None if value is None or value == "" else of_field(name, value)
    return None if make is None else GrammarField(name, make)


def _schema(name: str, schema: Any) -> Make:
    if not isinstance(schema, str | dict | bool):
        raise fields.refused(name, schema, "a JSON schema")
    return functools.partial(Grammar.json_schema, schema if isinstance(schema, str) else json.dumps(schema))


def _regex(name: str, pattern: Any) -> Make:
    return functools.partial(Grammar.regex, fields.text(name, pattern))


def _ebnf(name: str, rules: Any) -> Make:
    return functools.partial(Grammar.ebnf, fields.text(name, rules))


def _choice(name: str, options: Any) -> Make:
    if not isinstance(options, list) or not options:
        raise fields.refused(name, options, "a list of at least one string")
    return functools.partial(Grammar.choice, [fields.text(name, option) for option in options])


# The fields of a response_format that another type of it holds.
OF_OTHERS: dict[str, Unsupported] = {
    "text": {"schema": (), "json_schema": ()},
    "json_object": {"json_schema": ()},
    "json_schema": {"schema": ()},
}


def _response_format(name: str, response_format: Any) -> Make | None:
    match response_format:
        case {"type": "text" | "json_object" | "json_schema" as kind}:
            known_fields.refuse(response_format, OF_OTHERS[kind], f"{name}.")
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:  # with a schema in llama.cpp's form
            schema = response_format.get("schema")
            return Grammar.json if schema in (None, {}) else _schema(f"{name}.schema", schema)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _schema(f"{name}.json_schema.schema", schema)
        case {"type": "structural_tag"}:
            return _structural_tag(name, response_format)
    accepted = '{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}'
    raise fields.refused(name, response_format, f"{accepted} or a structural tag")


def of_text_format(name: str, text_format: Body) -> GrammarField | None:
    """Reads the format of `/v1/responses`: a `response_format` that has the fields of a JSON schema beside its type."""
    if text_format.get("type") != "json_schema":
        make = _response_format(name, text_format) if text_format else None
    elif "schema" in text_format:
        make = _schema(f"{name}.schema", text_format["schema"])
    else:
        raise fields.refused(name, text_format, '{"type": "json_schema", "name": ..., "schema": ...}')
    return None if make is None else GrammarField(name, make)


def _structural_tag(name: str, tag: Any) -> Make:
    """Reads XGrammar's structural tag: of its first form, and of the part of its second one that says the same."""
    tag = fields.parse(tag.encode(), name) if isinstance(tag, str) else tag
    match tag:
        case {"structures": list(structures), "triggers": list(triggers)}:
            pass
        case {"format": {"type": "triggered_tags", "tags": list(structures), "triggers": list(triggers), **others}}:
            if unknown := [key for key, value in others.items() if value]:
                raise RequestError(f"{name}.format.{unknown[0]} is not supported: leave it out", name)
        case _:
            raise fields.refused(name, tag, "a structural tag with structures and triggers, or a format of them")
    tags = [_tag(name, structure) for structure in structures]
    texts = [fields.text(f"{name}.triggers", trigger) for trigger in triggers]
    if not texts:
        raise fields.refused(f"{name}.triggers", triggers, "a list of at least one string")
    return lambda: Grammar.tags(Tags(tags, triggers=texts))


def _tag(name: str, tag: Any) -> tuple[str, Any, str]:
    """Returns the text before a part, its schema, and the text after it, of both forms."""
    match tag:
        case {"begin": str(begin), "schema": dict() | bool() as schema, "end": str(end)}:
            pass
        case {
            "begin": str(begin),
            "content": {"type": "json_schema", "json_schema": dict() | bool() as schema},
            "end": str(end),
        }:
            pass
        case _:
            raise fields.refused(name, tag, "tags with begin, a schema and end")
    return fields.text(f"{name}.begin", begin), schema, fields.text(f"{name}.end", end)


def _structured_outputs(name: str, outputs: Any) -> Make | None:
    """Reads vLLM's object of one of its kinds of grammars."""
    if not isinstance(outputs, dict):
        raise fields.refused(name, outputs, "an object")
    kinds = {key: value for key, value in outputs.items() if value is not None and value is not False}
    if not kinds:
        return None
    (kind, value), *others = kinds.items()
    if others or kind not in OF_OUTPUTS:
        raise fields.refused(name, outputs, f"an object with one of {', '.join(OF_OUTPUTS)}")
    return OF_OUTPUTS[kind](f"{name}.{kind}", value)


OF_OUTPUTS: dict[str, Callable[[str, Any], Make | None]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": lambda *_: Grammar.json,
    "structural_tag": _structural_tag,
}
FIELDS: dict[str, Callable[[str, Any], Make | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "structural_tag": _structural_tag,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "grammar": _ebnf,
}
