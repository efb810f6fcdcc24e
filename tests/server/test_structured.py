"""Structured outputs and tools: fields, forms of templates, calls in pieces, and the official client."""

import dataclasses
import json
import random
import re
from typing import Literal

import numpy as np
import openai
import pydantic
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.constraints.grammar import Grammar
from jlade.constraints.special import MARK, encode, special
from jlade.constraints.tags import Tags
from jlade.errors import ArgumentValueError
from jlade.server import calls, items, structured, tools
from jlade.server.call_formats import Form
from jlade.server.calls import CallReader
from jlade.server.fields import RequestError
from jlade.server.responses import Writer, one_piece
from jlade.server.tools import Tool, Tools
from tests.server import json_chat
from tests.server.conftest import running

SCHEMA = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
# Random weights may write whitespace without end.
BIAS = {str(token): -100 for byte in "\t\n\r " for token in json_chat.TOKENIZER.encode(byte).ids}
BRACE = json_chat.TOKENIZER.token_to_id("}")
QUESTION = [{"role": "user", "content": "a shirt"}]


def tool(name, parameters=SCHEMA, **others):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | others}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "grammar": "", "guided_json": None, "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json()),
        ({"response_format": {"type": "json_object", "schema": {}, "json_schema": None}}, Grammar.json()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
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
        (
            {"response_format": {"type": "json_object", "schema": 3}},
            "response_format.schema",
            "response_format.schema must be a JSON schema, got 3",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "response_format.json_schema=.* is not supported: leave it out",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": SCHEMA}}},
            "response_format.schema",
            "response_format.schema={} is not supported: leave it out",
        ),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema",
            "response_format.schema=.* is not supported: leave it out",
        ),
        ({"guided_json": {"minContains": 1}}, "guided_json", "#/minContains: not supported"),
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


def thinking(mark="<think>"):
    """Returns a reader of bodies of a model with special tokens for thoughts, whose prompts end with `mark`."""
    made = json_chat.chat_template(json_chat.HERMES + mark)
    made.tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer = made.tokenizer.backend_tokenizer
    size = tokenizer.get_vocab_size()
    return dataclasses.replace(json_chat.READER, tokenizer=tokenizer, chat_template=made, vocab_size=size)


def written(reader, body, text, reason="eos"):
    """Returns the message of an answer and the content of its chunks."""
    ids = [*reader.tokenizer.encode(text).ids, *([json_chat.EOS] if reason == "eos" else [])]
    result = jlade.Generation(
        tokens=np.array([ids]),
        lengths=np.array([len(ids)]),
        steps=np.array([len(ids)]),
        accepted=np.ones((1, len(ids)), int),
        finish_reason=(reason,),
        text=("",),
        **dict.fromkeys(("logprobs", "processed_logprobs", "top_tokens", "top_logprobs", "statistics", "state")),
    )
    asked = reader.chat(body)
    message = Writer(asked, "m", reader.tokenizer, "i").whole([result])["choices"][0]["message"]
    writer, piece, streamed = Writer(asked, "m", reader.tokenizer, "i"), one_piece(result), ""
    for place, token in enumerate(ids, start=1):
        last = result if place == len(ids) else None
        one = dataclasses.replace(piece, tokens=np.array([token]), accepted=np.array([1]), generation=last)
        streamed += "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in writer.chunks(0, one))
    return message, streamed


OBJECT = '{"size": "small"}'


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "shirt", "schema": SCHEMA}}}, OBJECT),
        ({"guided_choice": ["red", " blue"]}, " blue"),
        ({"guided_regex": "(ab)+"}, "abab"),
        ({"grammar": 'root ::= "a"+'}, "aa"),
    ],
)
@pytest.mark.parametrize(
    ("begin", "thought"),
    [
        ("<think>\n", "hm, {}\n</think>\n\n"),
        ("<think>", "</think>"),
        ("[THINK]", f"hm [/think]{special('[/THINK]')}\n"),
        ("<think>\n\n</think>\n\n", ""),
        ("", ""),
    ],
)
def test_a_structured_answer_comes_after_the_thought_that_the_prompt_begins(body, answer, begin, thought):
    reader, body = thinking(begin), body | {"messages": QUESTION}
    found = reader.chat(body).grammar.grammar().automaton
    assert found.accepts(encode(thought + answer))
    assert found.accepts(encode(answer)) is (not thought)
    assert found.accepts(encode(thought + thought + answer)) is (not thought)
    message, streamed = written(reader, body, (thought + answer).replace(MARK, ""))
    assert message["content"] == streamed == answer
    if thought:
        message, streamed = written(reader, body, thought[:2], "length")
        assert message["content"] == streamed == ""


def test_special_tokens_show_where_thoughts_end():
    reader, text = thinking(""), "[THINK]hm[/THINK]hello[ARGS]"
    message, streamed = written(reader, {"messages": QUESTION}, text)
    assert message["content"] == streamed == "[THINK]hm[/THINK]hello"
    body = {"messages": QUESTION, "tools": [tool("f")]}
    automaton = reader.chat(body).grammar.grammar().automaton
    assert automaton.accepts(encode(f"{special('[THINK]')}hm{special('[/THINK]')}hello"))
    message, streamed = written(reader, body, "[THINK]hm[/THINK]hello")
    assert message["content"] == streamed == "[THINK]hm[/THINK]hello"


def test_a_stop_string_within_a_call_that_the_limit_cuts_off_is_kept():
    body = {"messages": QUESTION, "tools": [tool("f")], "stop": ["m"]}
    message, _ = written(json_chat.READER, body, '\n<tool_call>\n{"name": "f", "arguments": {"size": "sm', "length")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"size": "sm'


@pytest.mark.parametrize("given", ["", " ", "null", None, {}, '{"a":', "[1]", "7", '{"a": NaN}', '{"a": 1}', {"a": 1}])
def test_arguments_of_earlier_calls(given, caplog):
    call = {"function": {"name": "f", "arguments": given}}
    (read,) = tools.read_calls("messages[1].tool_calls", [call])
    assert read["function"]["arguments"] == ({"a": 1} if given in ('{"a": 1}', {"a": 1}) else {})
    is_wrong = given in ('{"a":', "[1]", "7", '{"a": NaN}')
    assert ("messages[1].tool_calls[0].function.arguments is taken as {}" in caplog.text) is is_wrong


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"function": {"name": "f", "arguments": [1]}}, "messages[1].tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": "\ud800"}}, "messages[1].tool_calls[0].function.arguments"),
        ({"function": {"name": 3}}, "messages[1].tool_calls[0].function.name"),
        ({"function": {"arguments": "{}"}}, "messages[1].tool_calls[0]"),
    ],
)
def test_wrong_earlier_calls(call, param):
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(RequestError, match=re.escape(f"{param} must be")) as error:
        json_chat.READER.chat({"messages": messages})
    assert error.value.body["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "argument", "of_chat", "of_items"),
    [
        ({}, "min_new_tokens", "min_tokens", "min_tokens"),
        ({}, "max_new_tokens", "max_tokens", "max_output_tokens"),
        ({}, "prompt", "messages", "input"),
        ({}, "top_p", "top_p", "top_p"),
        ({"tools": [tool("f")]}, "grammar", "tools", "tools"),
        ({"guided_choice": ["a"]}, "grammar", "guided_choice", "guided_choice"),
    ],
)
def test_errors_of_the_engine_name_the_fields_of_the_body(body, argument, of_chat, of_items):
    for asked, field in (
        (json_chat.READER.chat({"messages": QUESTION} | body), of_chat),
        (items.read(json_chat.READER, items.Store(), {"input": "a"} | with_tools_of_items(body)), of_items),
    ):
        error = asked.refusal(ArgumentValueError(argument, "must be at most 3, got 8")).body["error"]
        assert (error["param"], error["message"]) == (field, f"{field} must be at most 3, got 8")


def with_tools_of_items(body):
    """Returns a body of `/v1/responses` with the tools of a chat."""
    if "tools" not in body:
        return body
    return body | {"tools": [{"type": "function"} | each["function"] for each in body["tools"]]}


@pytest.mark.parametrize("asking", [{"guided_choice": ["a"]}, {"tools": [tool("f")]}])
def test_a_grammar_needs_an_end_token(asking):
    with pytest.raises(RequestError, match=f"ignore_eos must be left out beside {next(iter(asking))}") as error:
        json_chat.READER.chat({"messages": QUESTION, "ignore_eos": True} | asking)
    assert error.value.body["error"]["param"] == "ignore_eos"


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


def test_stop_strings_end_no_call(client):
    options = {"tools": [tool("buy", strict=True)], "parallel_tool_calls": False}
    answer = asked(client, tool_choice="required", stop=["a", "s", '"', "<", "}", "\n"], **options).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["size"] in ("small", "large")

    whole = asked(client, **options).choices[0].message.content
    end = next(each for each in whole[4:] if each.isascii())
    answer = asked(client, stop=[end], **options).choices[0]
    assert (answer.message.content, answer.finish_reason) == (whole.partition(end)[0], "stop")


def test_the_client_is_told_its_own_fields(client):
    with pytest.raises(openai.BadRequestError, match="- min_tokens must be at most 1, after which") as error:
        asked(client, extra_body={"guided_choice": ["a"], "min_tokens": 8})
    assert error.value.param == "min_tokens"


def test_no_stop_string_is_beside_tags_on_the_device():
    grammar = Grammar.tags(Tags([("<a>", SCHEMA, "</a>")], triggers=["<a>"]))
    for each in (grammar, grammar.after("</think>")):
        with pytest.raises(ValueError, match="stop must be empty beside a grammar of tags"):
            jlade.generate(json_chat.PARAMS, "a", tokenizer=json_chat.TOKENIZER, grammar=each, stop="b", eos_ids=3)


def test_two_grammars_and_wrong_schemas_are_refused(client):
    for options, message in (
        ({"tools": [tool("show")], "response_format": {"type": "json_object"}}, "two grammars"),
        ({"tools": [tool("show", {"not": {"contains": 1}}, strict=True)]}, "show: #"),
        ({"extra_body": {"guided_choice": ["a}b"], "stop_token_ids": [BRACE]}}, rf"stop_token_ids .* \[{BRACE}\]"),
        ({"extra_body": {"guided_json": {"type": "array", "minContains": 1}}}, "guided_json has no grammar: #"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            asked(client, **options)
