"""Structured outputs and tools: fields, forms of templates, calls in pieces, and the official client."""

import json

import openai
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.constraints.grammar import Grammar
from jlade.constraints.special import MARK, encode, special
from jlade.constraints.tags import Tags
from jlade.errors import ArgumentValueError
from jlade.server import kinds, structured, tools
from jlade.server.examples import marked
from jlade.server.fields import RequestError
from jlade.server.responses.events import ItemsWriter
from jlade.server.writer import Writer
from tests.server import json_chat
from tests.server.answers import Shirt
from tests.server.conftest import response, running
from tests.server.json_chat import BIAS, QUESTION, SCHEMA, generated, thinking, token_by_token, tool

# Random weights may write whitespace without end.


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
        ({"grammar": 'start: "::=" # ::='}, Grammar.lark('start: "::=" # ::=')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar.lark('start: "a"')),
        ({"ebnf": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"structured_outputs": {"regex": "a", "json": None}}, Grammar.regex("a")),
        ({"structured_outputs": {"json_object": True}}, Grammar.json()),
    ],
)
def test_fields_of_all_clients(body, grammar):
    asked = structured.read(kinds.read(body, structured.GRAMMARS))
    assert (asked and asked.make()) == grammar


def test_a_schema_that_is_not_strict_is_held_but_for_what_is_not_supported(caplog):
    schema = SCHEMA | {"minProperties": 1, "patternProperties": {"(?<=a)": True}}
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "shirt", "schema": schema}}}

    def grammar():
        asked = structured.read(kinds.read(body, structured.GRAMMARS))
        with asked.errors():
            return asked.make()

    for _ in range(2):
        assert grammar() == Grammar.json_schema(SCHEMA | {"minProperties": 1})
    (record,) = caplog.records
    assert "response_format.json_schema, which is not strict, is not held in full: #/patternProp" in record.getMessage()
    body["response_format"]["json_schema"]["strict"] = True
    with pytest.raises(RequestError, match="response_format has no grammar: #/patternProperties"):
        grammar()


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
        found = structured.read(kinds.read(body, structured.GRAMMARS)).make().automaton
        for text, is_accepted in (
            ("anything < at all", True),
            ('yes: <a>{"size": "small"}</a> and <a>{"size":"large"}</a>.', True),
            ('yes: <a>{"size": "huge"}</a>', False),
            ('<a>{"size": "small"}', False),
            ("<a", False),
        ):
            assert found.accepts(text.encode()) is is_accepted, text


def written(reader, body, text, reason="eos"):
    """Returns the message of an answer and the content of its chunks."""
    result = generated(reader.tokenizer, text, reason)
    asked = reader.chat(body)
    message = Writer(asked, "m", reader.tokenizer, "i").whole([result])["choices"][0]["message"]
    writer = Writer(asked, "m", reader.tokenizer, "i")
    chunks = [chunk for piece in token_by_token(result) for chunk in writer.chunks(0, piece)]
    return message, "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


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
        ("", f"{special('[THINK]')}hm, {{}}{special('[/THINK]')}\n"),
        ("", ""),
    ],
)
def test_a_structured_answer_comes_after_thoughts(body, answer, begin, thought):
    """Those that the prompt has begun have to come, others may."""
    reader, body = thinking(begin), body | {"messages": QUESTION}
    found = reader.chat(body).grammar.make().automaton
    assert found.accepts(encode(thought + answer))
    assert found.accepts(encode(answer)) is (not thought or not begin)
    assert found.accepts(encode(thought + thought + answer)) is (not thought)
    message, streamed = written(reader, body, (thought + answer).replace(MARK, ""))
    assert message["content"] == streamed == answer
    if thought:
        cut = thought.replace(MARK, "")[:9]
        message, streamed = written(reader, body, cut, "length")
        assert message["content"] == streamed == ""


def test_a_structured_text_is_no_thought():
    reader = thinking("")
    found = reader.chat({"messages": QUESTION, "guided_regex": r"\[THINK\]a|ab"}).grammar.make().automaton
    assert found.accepts(b"ab")
    assert found.accepts(b"[THINK]a"), "its characters are no special token"
    reader = thinking("", json_chat.HERMES.replace("assistant:", "assistant:{# <think> </think> #}"))
    found = reader.chat({"messages": QUESTION, "guided_regex": "<think>a|ab"}).grammar.make().automaton
    assert [found.accepts(text) for text in (b"ab", b"<think>a", b"<think>a</think>ab")] == [True, False, True]


@pytest.mark.parametrize("tools", [[], [tool("f")]])
@pytest.mark.parametrize(
    ("begin", "text", "thought", "content"),
    [
        ("", "[THINK]\nhm\n[/THINK]\n hello[ARGS]", "hm", "hello"),
        ("", " hello [THINK]", "", " hello "),
        ("<think>\n", "hm < </\n\nhm\n</think>\n\nhello", "hm < </\n\nhm", "hello"),
        ("<think>", "hm </thi", "hm </thi", ""),
        ("<think>\n\n</think>", "<think>", "", "<think>"),
    ],
)
def test_thoughts_are_a_field(tools, begin, text, thought, content):
    reader, body = thinking(begin), {"messages": QUESTION, "tools": tools}
    message, streamed = written(reader, body, text, "length")
    assert message["content"] == streamed == content
    assert message.get("reasoning_content", "") == message.get("reasoning", "") == thought


@pytest.mark.parametrize(
    ("begin", "text", "number"),
    [("", "[THINK]hm[/THINK]hello", 3), ("[THINK]", "hm[/THINK]hello", 2), ("", "hello", 0), ("", "[THINK]hm", 3)],
)
def test_tokens_of_thoughts_are_counted(begin, text, number):
    """With that of the mark that begins them."""
    reader = thinking(begin)
    result = generated(reader.tokenizer, text, "length")
    of_chat = Writer(reader.chat({"messages": QUESTION}), "m", reader.tokenizer, "i").whole([result])
    assert of_chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": number}
    of_items = ItemsWriter(response({"input": "a"}, reader), "m", reader.tokenizer, "i").whole([result])
    assert of_items["usage"]["output_tokens_details"] == {"reasoning_tokens": number}


def test_marks_of_special_tokens_are_around_thoughts_and_content():
    """As in OpenAI's harmony."""
    template = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}[ARGS]{{ m.role }}
{%- if m.reasoning_content %}[THINK]thoughts[/THINK]{{ m.reasoning_content }}[CALL_ID][ARGS]assistant{% endif %}
{%- if m.content %}[THINK]answer[/THINK]{{ m.content }}{% endif %}
{%- for call in m.tool_calls %} to={{ call.function.name }}[TOOL_CALLS]{{ call.function.arguments | tojson }}
{%- endfor %}{{- '<|end|>' }}{% endfor %}{% if add_generation_prompt %}[ARGS]assistant{% endif %}"""
    reader = thinking(template=template)
    call, answer = ' to=f[TOOL_CALLS]{"size": "small"}', "[THINK]answer[/THINK]hello"
    for thought in ("", "[THINK]thoughts[/THINK]hm[CALL_ID][ARGS]assistant"):
        for text, content, functions in ((answer, "hello", []), (call, None, ["f"]), (answer + call, "hello", ["f"])):
            body = {"messages": QUESTION, "tools": [tool("f")]}
            for each in (body, {"messages": QUESTION}) if not functions else (body,):
                message, streamed = written(reader, each, thought + text)
                assert message["content"] == content
                assert streamed == (content or "")
                assert message.get("reasoning_content", "") == ("hm" if thought else "")
                assert [each["function"]["name"] for each in message.get("tool_calls", [])] == functions
            automaton = reader.chat(body).grammar.make().automaton
            assert automaton.accepts(encode(marked(reader.tokenizer, thought + text)))
            required = reader.chat(body | {"tool_choice": "required"}).grammar.make().automaton
            assert required.accepts(encode(marked(reader.tokenizer, thought + text))) is (text == call)
        body = {"messages": QUESTION, "guided_choice": ["hello"]}
        message, streamed = written(reader, body, thought + answer)
        assert (message["content"], message.get("reasoning_content", "")) == ("hello", "hm" if thought else "")
        automaton = reader.chat(body).grammar.make().automaton
        assert automaton.accepts(encode(marked(reader.tokenizer, thought + answer)))


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
        (response({"input": "a"} | with_tools_of_items(body), json_chat.READER), of_items),
    ):
        error = asked.refusal(ArgumentValueError(argument, "must be at most 3, got 8")).body["error"]
        assert (error["param"], error["message"]) == (field, f"{field} must be at most 3, got 8")


def with_tools_of_items(body):
    """Returns a body of `/v1/responses` with the tools of a chat."""
    if "tools" not in body:
        return body
    return body | {"tools": [{"type": "function"} | each["function"] for each in body["tools"]]}


@pytest.fixture(scope="module")
def client():
    lookahead = LookaheadConfig.tree(31)  # with all sources, as deep as drafts go
    with (
        jlade.Engine(json_chat.PARAMS, json_chat.TOKENIZER, max_sequences=2, lookahead=lookahead) as engine,
        running(engine, json_chat.READER) as served,
        served.openai() as made,
    ):
        yield made


def asked(client, **options):
    return client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=200, logit_bias=BIAS, seed=1, **options
    )


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


def test_a_format_beside_tools(client):
    """With a choice the call alone, without one the format or a call, and without tools the format."""
    options = {"response_format": {"type": "json_schema", "json_schema": {"name": "shirt", "schema": SCHEMA}}}
    options |= {"tools": [tool("buy", strict=True)]}
    buy = {"type": "function", "function": {"name": "buy"}}
    for choice, kinds_of_answers in (("none", {"stop"}), ("auto", {"stop", "tool_calls"}), (buy, {"tool_calls"})):
        answer = asked(client, tool_choice=choice, **options).choices[0]
        assert answer.finish_reason in kinds_of_answers
        text = answer.message.content
        if answer.finish_reason == "tool_calls":
            assert text is None
            (call,) = answer.message.tool_calls
            text = call.function.arguments
        assert json.loads(text)["size"] in ("small", "large")
        streamed = list(asked(client, tool_choice=choice, stream=True, **options))
        deltas = [chunk.choices[0].delta for chunk in streamed]
        assert "".join(delta.content or "" for delta in deltas) == (answer.message.content or "")


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
    for each in (grammar, grammar.after([("", "</think>")])):
        with pytest.raises(ValueError, match="stop must be empty beside a grammar of tags"):
            jlade.generate(json_chat.PARAMS, "a", tokenizer=json_chat.TOKENIZER, grammar=each, stop="b", eos_ids=3)
