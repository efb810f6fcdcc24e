"""Structured outputs and tools: fields, forms of templates, calls in pieces, and the official client."""

import dataclasses
import json
import random
from typing import Literal

import openai
import pydantic
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.constraints.grammar import Grammar
from jlade.server import calls, structured, tools
from jlade.server.calls import CallReader
from jlade.server.fields import RequestError
from jlade.server.forms import Form
from jlade.server.tools import Tool, Tools
from tests.server import json_chat
from tests.server.conftest import running

SCHEMA = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
# Random weights may write whitespace without end.
BIAS = {str(token): -100 for byte in "\t\n\r " for token in json_chat.TOKENIZER.encode(byte).ids}
QUESTION = [{"role": "user", "content": "a shirt"}]


def tool(name, parameters=SCHEMA, **others):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | others}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "grammar": "", "guided_json": None, "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "shirt", "schema": SCHEMA}}},
            Grammar.json_schema(SCHEMA),
        ),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
        ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"ebnf": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"structured_outputs": {"regex": "a", "json": None}}, Grammar.regex("a")),
        ({"structured_outputs": {"json_object": True}}, Grammar.json()),
    ],
)
def test_fields_of_all_clients(body, grammar):
    asked = structured.read(body)
    assert (asked and asked.grammar()) == grammar


@pytest.mark.parametrize(
    "given",
    [
        {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]},
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<a"],
                "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}],
            }
        },
    ],
)
def test_a_structural_tag(given):
    for body in (
        {"response_format": {"type": "structural_tag"} | given},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag"} | given)}},
    ):
        found = structured.read(body).grammar().automaton
        for text, is_accepted in (
            ("anything < at all", True),
            ('yes: <a>{"size": "small"}</a> and <a>{"size":"large"}</a>.', True),
            ('yes: <a>{"size": "huge"}</a>', False),
            ('<a>{"size": "small"}', False),
            ("<a", False),
        ):
            assert found.accepts(text.encode()) is is_accepted, text


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        ({"guided_json": {"contains": {}}}, "guided_json", "#/contains: not supported"),
        ({"guided_json": "{"}, "guided_json", "guided_json has no grammar: "),
        ({"guided_regex": "(a"}, "guided_regex", r"regex '\(a'"),
        ({"guided_regex": 3}, "guided_regex", "must be a string"),
        ({"guided_choice": []}, "guided_choice", "must be a list of at least one string"),
        ({"ebnf": "rot ::="}, "ebnf", "the rule 'root' is missing"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex and ebnf ask for two grammars"),
        ({"structured_outputs": {"yaml": {}}}, "structured_outputs", "one of json, regex"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag.triggers", "at least one"),
        ({"structural_tag": {"structures": [{}], "triggers": ["a"]}}, "structural_tag", "tags with begin"),
        (
            {"structural_tag": {"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}},
            "structural_tag",
            "triggers must be the beginnings of tags, got 'a'",
        ),
    ],
)
def test_wrong_fields(body, param, message):
    with pytest.raises(RequestError, match=message) as error:
        structured.read(body).grammar()
    assert error.value.body["error"]["param"] == param


def test_a_table_that_is_too_large_is_refused_by_its_field():
    reader = dataclasses.replace(json_chat.READER, max_grammar=128)
    asked = reader.completion({"prompt": "a", "guided_regex": "[a-z]+"})
    with pytest.raises(RequestError, match="guided_regex has no grammar: grammar must have a table of") as error:
        reader.with_grammar(asked)
    assert error.value.body["error"]["param"] == "guided_regex"


HERMES = Form(
    '\n<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    '}\n</tool_call>\n<tool_call>\n{"name": "',
)
LLAMA = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{% if message.tool_calls %}
{% if message.tool_calls | length != 1 %}{{ raise_exception("one call") }}{% endif %}
{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}<|end|>
{%- else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"""
LIST = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}
{%- for call in message.tool_calls %}{{ "<tool_call>[" if loop.first else ", " }}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{{- "]</tool_call>" if loop.last else "" }}{% endfor %}<|end|>{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (json_chat.HERMES, HERMES),
        (
            json_chat.HERMES.replace("{{ message.role }}:", "{{ message.role }}:<think>\n\n</think>\n\n"),
            dataclasses.replace(HERMES, opening=HERMES.opening.lstrip()),
        ),
        (LLAMA, Form('{"name": "', '", "parameters": ', "}")),
        (LIST, Form('<tool_call>[{"name": "', '", "arguments": ', "}]</tool_call>", '}, {"name": "')),
    ],
)
def test_the_form_of_a_template(template, form):
    assert Form.of(json_chat.chat_template(template), ["<|end|>"]) == form


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}", "shows it no tools"),
        ("{{ tools | tojson }}{% for each in messages %}{{ each.content }}{% endfor %}", "in a form that is not"),
        (json_chat.HERMES.replace("<tool_call>", "<|end|>"), "in a form that is not"),
    ],
)
def test_templates_without_a_form(template, message):
    with pytest.raises(ValueError, match=message):
        Form.of(json_chat.chat_template(template), ["<|end|>"])


TEXTS = {
    "Yes.": ("Yes.", []),
    'a\n<tool_call>\n{"name": "f", "arguments": {"x": "}\\"{\\n</tool_call>"} }\n</tool_call>b\n<tool_call': (
        "ab\n<tool_call",
        [("f", '{"x": "}\\"{\\n</tool_call>"}')],
    ),
    '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"y": {}}}\n'
    "</tool_call>": ("", [("f", "{}"), ("g", '{"y": {}}')]),
    '\n<tool_call>\n{"name": "g", "arguments": {"y": [1, {': ("", [("g", '{"y": [1, {')]),
}


@pytest.mark.parametrize("text", TEXTS)
def test_calls_are_read_in_any_pieces(text):
    asked = Tools([], [Tool("f", {}, False), Tool("g", {}, False)], False, True)
    for seed in range(50):
        chance, reader, parts, left = random.Random(seed), CallReader(HERMES, asked), [], text
        while left:
            number = chance.randint(1, 1 + seed)
            piece, left = left[:number], left[number:]
            parts += reader.feed(piece, last=not left)
        content, found = calls.gather(parts)
        assert (content, [(call["name"], call["arguments"]) for call in found]) == TEXTS[text]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be a function"),
        ({"tools": [tool("a b")]}, r"tools\[0\] must be a function"),
        ({"tools": [tool("f"), tool("f")]}, "functions of different names"),
        ({"tools": [tool("f", {"type": "array"})]}, "the JSON schema of an object"),
        ({"tools": [tool("f")], "tool_choice": "f"}, "tool_choice must be auto, required, none, or"),
        ({"tool_choice": "required"}, "at least one function"),
    ],
)
def test_wrong_tools(body, message):
    with pytest.raises(RequestError, match=message):
        tools.read(body)


def test_the_schema_of_a_tool_that_is_not_strict_may_be_loose(caplog):
    loose = {"properties": {"a": {"contains": 3}}}
    form = Form('{"name": "', '", "arguments": ', "}")
    for is_strict in (False, True):
        asked = tools.read({"tools": [tool("loose", loose, strict=is_strict)], "tool_choice": "required"})
        if is_strict:
            with pytest.raises(ValueError, match="loose: #/properties/a/contains"):
                asked.grammar(form)
        else:
            assert asked.grammar(form).automaton.accepts(b'{"name": "loose", "arguments": {"b": 1}}')
            assert "the tool loose, which is not strict, is not held in full" in caplog.text


@pytest.fixture(scope="module")
def client():
    lookahead = LookaheadConfig.tree(31)  # with all sources, as deep as drafts go
    with (
        jlade.Engine(json_chat.PARAMS, json_chat.TOKENIZER, max_sequences=2, lookahead=lookahead) as engine,
        running(engine, json_chat.READER) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def asked(client, **options):
    return client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=200, logit_bias=BIAS, seed=1, **options
    )


class Shirt(pydantic.BaseModel):
    size: Literal["small", "large"]
    colours: list[Literal["red", "blue"]] = pydantic.Field(max_length=2)


def test_the_client_gets_objects(client):
    parsed = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Shirt, logit_bias=BIAS, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Shirt)
    for extra in ({"guided_choice": ["red", "blue"]}, {"structured_outputs": {"choice": ["red", "blue"]}}):
        assert asked(client, extra_body=extra).choices[0].message.content in ("red", "blue")
    completion = client.completions.create(
        model="tiny", prompt="a", max_tokens=200, logit_bias=BIAS, extra_body={"guided_regex": "(ab){3}c?"}
    )
    assert completion.choices[0].text in ("ababab", "abababc")
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "buy"}}])
def test_calls_of_tools(client, choice):
    options = {"tools": [tool("show"), tool("buy", strict=True)], "tool_choice": choice, "parallel_tool_calls": False}
    answer = asked(client, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert json.loads(call.function.arguments)["size"] in ("small", "large")
    assert call.function.name == "buy" or choice == "required"

    name = arguments = ""
    for chunk in asked(client, stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")

    calls = [{"role": "assistant", "tool_calls": [call.to_dict()]}]
    calls += [{"role": "tool", "tool_call_id": call.id, "content": "done"}]
    after = client.chat.completions.create(model="tiny", messages=QUESTION + calls, max_tokens=4, seed=1)
    rendered = json_chat.READER.chat({"messages": QUESTION + calls}).prompts[0]
    assert after.usage.prompt_tokens == len(rendered)
    assert f'"arguments": {json.dumps(json.loads(arguments))}' in json_chat.TOKENIZER.decode(rendered)


def test_an_answer_may_use_no_tool(client):
    answer = asked(client, tools=[tool("show")]).choices[0]
    assert "<tool_call>" not in (answer.message.content or "")
    assert (answer.finish_reason == "tool_calls") == bool(answer.message.tool_calls)
    assert asked(client, tools=[tool("show")], tool_choice="none").choices[0].message.tool_calls is None


def test_two_grammars_and_wrong_schemas_are_refused(client):
    for options, message in (
        ({"tools": [tool("show")], "response_format": {"type": "json_object"}}, "two grammars"),
        ({"tools": [tool("show", {"not": {"contains": 1}}, strict=True)]}, "show: #"),
        ({"extra_body": {"guided_json": {"type": "array", "contains": {}}}}, "guided_json has no grammar: #"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            asked(client, **options)
