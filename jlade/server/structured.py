"""Fields that ask for a text of a grammar: OpenAI's `response_format`, and those of vLLM, SGLang and llama.cpp."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jlade.constraints.grammar import Grammar
from jlade.constraints.json_document import Schema
from jlade.constraints.loosening import LOOSE, loosened
from jlade.constraints.tags import Tags
from jlade.errors import ArgumentError
from jlade.server import fields, kinds
from jlade.server.fields import Body, RequestError, refused
from jlade.server.kinds import Kind, Table, only
from jlade.server.thoughts import Thoughts

TEXT_FORMAT = "text.format"  # of `/v1/responses`
OUTPUT_FORMATS = ("output_config.format", "output_format")  # of `/v1/messages`, the second one in its older form
Make = Callable[..., Grammar]  # without arguments, or with those of tools


class GrammarField(NamedTuple):
    """A grammar that a field asks for. `make` may take seconds, and is called within `errors`."""

    field: str
    make: Make

    def after(self, thoughts: Thoughts, content: tuple[str, str]) -> "GrammarField":
        """Returns the grammar after thoughts, as `Grammar.after` does."""
        return self._replace(make=lambda: self.make().after(thoughts, content))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of a grammar into a RequestError that names the field."""
        try:
            yield
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ArgumentError) and error.argument == "eos_ids":
                raise RequestError(f"stop_token_ids {error.problem}", "stop_token_ids") from error
            raise RequestError(f"{self.field} has no grammar: {error}", self.field) from error


def read(values: Body) -> GrammarField | None:
    """Returns the grammar that the values of `GRAMMARS`, and of the formats of other routes, ask for; None for none."""
    given = [name for name in (TEXT_FORMAT, *OUTPUT_FORMATS, *GRAMMARS) if name in values]
    grammars = [GrammarField(name, values[name]) for name in given]
    if len(grammars) > 1:
        names = " and ".join(grammar.field for grammar in grammars)
        raise RequestError(f"{names} ask for two grammars: leave out one", grammars[1].field)
    return grammars[0] if grammars else None


def _unless_empty(kind: Kind) -> Kind:
    """Returns a kind of which an empty string is nothing."""
    return lambda name, value: None if value == "" else kind(name, value)


def _schema(name: str, schema: Any) -> Make:
    if not isinstance(schema, str | dict | bool):
        raise refused(name, schema, "a JSON schema")
    return functools.partial(Grammar.json_schema, schema if isinstance(schema, str) else json.dumps(schema))


def _format_schema(path: str, given: Body) -> Make:
    """Reads the schema of a format, whose keywords that are not supported have no effect unless it is strict."""
    exact = _schema(f"{path}.schema", given["schema"])
    is_strict = kinds.values(given, {"strict": kinds.boolean}, f"{path}.").get("strict", False)
    return exact if is_strict else functools.partial(_loosened, path, given["schema"])


def _loosened(path: str, schema: Schema | str) -> Grammar:
    held, reasons = loosened(json.loads(schema) if isinstance(schema, str) else schema)
    for reason in reasons:
        kinds.warn_once(LOOSE, path, reason)
    return Grammar.json_schema(json.dumps(held))


def _regex(name: str, pattern: Any) -> Make:
    return functools.partial(Grammar.regex, kinds.text(name, pattern))


def _ebnf(name: str, rules: Any) -> Make:
    return functools.partial(Grammar.ebnf, kinds.text(name, rules))


def _rules(name: str, rules: Any) -> Make:
    """Reads a grammar in EBNF, or else in Lark's notation, whose rules have a colon alone."""
    is_ebnf = re.search(r"^\s*[\w.-]+\s*::=", kinds.text(name, rules), re.MULTILINE)
    return functools.partial(Grammar.ebnf if is_ebnf else Grammar.lark, rules)


def _choice(name: str, options: Any) -> Make:
    if not isinstance(options, list) or not options:
        raise refused(name, options, "a list of at least one string")
    return functools.partial(Grammar.choice, [kinds.text(name, option) for option in options])


# The fields of a response_format that another type of it holds.
OF_OTHERS: dict[str, Table] = {
    "text": {"schema": only(), "json_schema": only()},
    "json_object": {"json_schema": only()},
    "json_schema": {"schema": only()},
}


def _response_format(name: str, response_format: Any) -> Make | None:
    match response_format:
        case {"type": "text" | "json_object" | "json_schema" as kind}:
            kinds.values(response_format, OF_OTHERS[kind], f"{name}.")
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:  # with a schema in llama.cpp's form
            schema = response_format.get("schema")
            return Grammar.json if schema in (None, {}) else _schema(f"{name}.schema", schema)
        case {"type": "json_schema", "json_schema": {"schema": _}}:
            return _format_schema(f"{name}.json_schema", response_format["json_schema"])
        case {"type": "structural_tag"}:
            return _structural_tag(name, response_format)
    accepted = '{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}'
    raise refused(name, response_format, f"{accepted} or a structural tag")


def text_format(name: str, value: Any) -> Make | None:
    """Reads the format of other routes: a `response_format` that has the fields of a JSON schema beside its type."""
    if kinds.any_object(name, value).get("type") != "json_schema":
        return _response_format(name, value) if value else None
    if "schema" in value:
        return _format_schema(name, value)
    raise refused(name, value, '{"type": "json_schema", "name": ..., "schema": ...}')


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
            raise refused(name, tag, "a structural tag with structures and triggers, or a format of them")
    tags = [_tag(name, structure) for structure in structures]
    texts = [kinds.text(f"{name}.triggers", trigger) for trigger in triggers]
    if not texts:
        raise refused(f"{name}.triggers", triggers, "a list of at least one string")
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
            raise refused(name, tag, "tags with begin, a schema and end")
    return kinds.text(f"{name}.begin", begin), schema, kinds.text(f"{name}.end", end)


def _structured_outputs(name: str, outputs: Any) -> Make | None:
    """Reads vLLM's object of one of its kinds of grammars."""
    if not isinstance(outputs, dict):
        raise refused(name, outputs, "an object")
    given = {key: value for key, value in outputs.items() if value is not None and value is not False}
    if not given:
        return None
    (kind, value), *others = given.items()
    if others or kind not in OF_OUTPUTS:
        raise refused(name, outputs, f"an object with one of {', '.join(OF_OUTPUTS)}")
    return OF_OUTPUTS[kind](f"{name}.{kind}", value)


OF_OUTPUTS: Table = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _rules,
    "json_object": lambda *_: Grammar.json,
    "structural_tag": _structural_tag,
}
# The fields of all clients that ask for a grammar; their values are functions that make it.
GRAMMARS = {
    name: _unless_empty(kind)
    for name, kind in {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
        "guided_json": _schema,
        "guided_regex": _regex,
        "guided_choice": _choice,
        "guided_grammar": _rules,
        "structural_tag": _structural_tag,
        "json_schema": _schema,
        "regex": _regex,
        "ebnf": _ebnf,
        "grammar": _rules,
    }.items()
}
