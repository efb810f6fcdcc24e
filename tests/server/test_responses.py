"""`/v1/responses`: items to conversations, responses and events against OpenAI's types, tools, stored responses."""

import dataclasses
import json

import hypothesis
import numpy as np
import openai
import pydantic
import pytest
from hypothesis import strategies
from openai.types.responses import Response, ResponseStreamEvent

from jlade import SamplingConfig
from jlade.server import kinds
from jlade.server.body_fields import LOGPROBS, UNSUPPORTED
from jlade.server.calls import Arguments, Called, Content, Thought
from jlade.server.fields import RequestError
from jlade.server.responses.events import ItemsWriter
from jlade.server.responses.store import Store
from jlade.server.writer import _Choice as Choice
from jlade.server.writer import one_piece
from tests.server import json_chat
from tests.server.answers import Shirt
from tests.server.calls import BUY, CALL, OUTPUT, SHOP
from tests.server.conftest import READER, response, running
from tests.server.json_chat import BIAS
from tests.server.tiny_chat import alone, ending

RESPONSES = "/v1/responses"
WARM = SamplingConfig(temperature=1.0)
EVENTS: pydantic.TypeAdapter = pydantic.TypeAdapter(ResponseStreamEvent)
MESSAGES = {  # shows a conversation as it is
    "chat_template": json_chat.chat_template("{{ messages | tojson }}")
}


def conversation(body):
    """Returns the messages that a template sees."""
    asked = response(body, dataclasses.replace(json_chat.READER, **MESSAGES))
    return json.loads(json_chat.TOKENIZER.decode(asked.prompts[0]))


def events(response):
    """Returns the events of a stream, each checked against its name and OpenAI's types, and the last response."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, last, end = [block for block in response.text.split("\n\n") if block != ": "]
    assert (last, end) == ("data: [DONE]", "")
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        EVENTS.validate_python(event)
        found.append(event)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    return found, found[-1]["response"]


def replayed(found):
    """Returns the output that the events between the first and the last add up to, part by part."""
    output = []
    for event in found[2:-1]:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert (place, event["item"]["status"]) == (len(output), "in_progress")
            output.append(event["item"])
            continue
        item = output[place]
        assert place == len(output) - 1, "items come one after another"
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta":
                assert event["delta"]
                item["content"][0]["text"] += event["delta"]
                item["content"][0]["logprobs"] += event["logprobs"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "reasoning_text.delta":
                item["content"][0]["text"] += event["delta"]
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "reasoning_text.done":
                assert event["text"] == item["content"][0]["text"]
            case "custom_tool_call_input.done":
                assert event["input"] == item["input"]
            case "output_text.done":
                assert {name: event[name] for name in ("text", "logprobs")}.items() <= item["content"][0].items()
            case "content_part.done":
                assert event["part"] == item["content"][0]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
            case "output_item.done":
                assert event["item"] | {"status": "in_progress"} == item
                output[place] = event["item"]
            case _:
                raise AssertionError(kind)
    return output


def without_ids(response):
    """Returns a response without what is another at each time."""
    output = [{name: item[name] for name in item.keys() - {"id", "call_id"}} for item in response["output"]]
    of_time = {"id", "created_at", "completed_at", "usage"}
    return {name: response[name] for name in response.keys() - of_time} | {"output": output}


@pytest.mark.parametrize("limit", [24, 6])
def test_a_response_is_the_text_of_a_chat(client, served, limit):
    seed, _ = ending("abbac", 1.0)
    expected = alone("abbac", seed=seed, sampling=WARM, max_new_tokens=limit)
    options = {"model": "tiny", "max_output_tokens": limit, "extra_body": {"seed": seed}}
    answer = client.responses.create(input="ba", instructions="ab", **options)
    Response.model_validate(answer.to_dict())
    assert answer.output_text == expected.text[0]
    status, reason = ("completed", None) if limit == 24 else ("incomplete", {"reason": "max_output_tokens"})
    assert (answer.status, answer.output[0].status, answer.to_dict()["incomplete_details"]) == (status, status, reason)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, expected.lengths[0])
    assert (answer.instructions, answer.temperature, answer.top_p, answer.store) == ("ab", 1.0, 1, True)
    assert answer.max_output_tokens == limit

    body = {"input": "ba", "instructions": "ab", "max_output_tokens": limit, "seed": seed}
    found, last = events(served.client.post(RESPONSES, json=body | {"stream": True}))
    assert without_ids(last) == without_ids(served.client.post(RESPONSES, json=body).json())
    assert replayed(found) == last["output"]
    assert found[-1]["type"] == f"response.{answer.status}"
    assert sum(event["type"] == "response.output_text.delta" for event in found) > 1, "the text comes in parts"


def test_the_client_streams(client):
    seed, expected = ending("abbac", 1.0)
    with client.responses.stream(model="tiny", input="abba", extra_body={"seed": seed}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == expected.text[0]
    kinds = [event.type for event in client.responses.create(model="tiny", input="ab", temperature=0, stream=True)]
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_what_a_response_repeats_may_be_any_text_of_json(served):
    given = {"a": "\u2028 \ud800"}
    body = json.dumps({"input": "ab", "max_output_tokens": 1, "metadata": given})
    whole = served.client.post(RESPONSES, content=body, headers={"Content-Type": "application/json"})
    assert whole.json()["metadata"] == given
    assert "\\u2028" in whole.text


def test_an_empty_text_is_a_message(served):
    body = {"input": "ab", "logit_bias": {"12": 100}, "temperature": 0}
    whole = served.client.post(RESPONSES, json=body).json()
    assert [part["text"] for part in whole["output"][0]["content"]] == [""]
    found, last = events(served.client.post(RESPONSES, json=body | {"stream": True}))
    assert without_ids(last) == without_ids(whole)
    assert replayed(found) == last["output"]


def test_log_probabilities(served):
    body = {"input": "abba", "max_output_tokens": 9, "temperature": 0, "include": [LOGPROBS], "top_logprobs": 2}
    expected = alone("abbac", max_new_tokens=9, top_logprobs=2)
    shown = expected.lengths[0] - (expected.finish_reason[0] == "eos")
    whole = served.client.post(RESPONSES, json=body).json()
    entries = whole["output"][0]["content"][0]["logprobs"]
    np.testing.assert_allclose([each["logprob"] for each in entries], expected.logprobs[0, :shown], atol=1e-5)
    assert {len(each["top_logprobs"]) for each in entries} == {2} == {whole["top_logprobs"]}
    found, last = events(served.client.post(RESPONSES, json=body | {"stream": True}))
    assert replayed(found) == last["output"]
    streamed = [each["token"] for each in last["output"][0]["content"][0]["logprobs"]]
    assert streamed == [each["token"] for each in entries]


def test_log_probabilities_of_tokens_without_text_come_last():
    """Those of a stop string, token by token: it is held back, and cut off at the end."""
    stop = alone("abbac", max_new_tokens=9, eos_ids=()).text[0][3:5]
    expected = alone("abbac", max_new_tokens=9, eos_ids=(), stop=[stop])
    body = {"input": "abba", "stop": stop, "ignore_eos": True, "include": [LOGPROBS]}
    writer = ItemsWriter(response(body), "tiny", READER.tokenizer, "id")
    deltas, number = [], int(expected.lengths[0])
    for i in range(number):
        of_token = {"tokens": expected.tokens[0, i : i + 1], "logprobs": expected.logprobs[0, i : i + 1]}
        piece = dataclasses.replace(one_piece(expected), **of_token, generation=expected if i + 1 == number else None)
        deltas += [event for event in writer.chunks(0, piece) if event["type"] == "response.output_text.delta"]
    (last,) = writer.end([expected], 0)
    (part,) = last["response"]["output"][0]["content"]
    assert part["text"] == expected.text[0] == "".join(event["delta"] for event in deltas)
    assert sum(len(event["logprobs"]) for event in deltas) < len(part["logprobs"]) == number


def test_items_become_messages():
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c", "status": "completed"},
        {"role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "d"}]},
        CALL,
        CALL | {"call_id": "c2", "id": "fc_1", "status": "completed"},
        OUTPUT,
        OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "e"}]},
        CALL | {"call_id": "c3"},
        {"role": "user", "content": "f"},
    ]
    function = {"name": "shop", "arguments": {"size": "small"}}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2, 3)]
    assert conversation({"input": given, "instructions": "i"}) == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "e"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "user", "content": "f"},
    ]


CODEX = {  # the tools of its requests, shortened
    "tools": [
        SHOP,
        {"type": "namespace", "name": "agents_v1", "description": "d", "tools": [BUY | {"strict": False}]},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "regex", "definition": "(?:é|\n)+"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "client_metadata": {"id": "a"},
    "store": False,
    "parallel_tool_calls": False,
}


def test_a_later_turn_of_codex(caplog):
    kinds.warn_once.cache_clear()  # once in all tests
    given = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "web_search_call", "id": "w1", "status": "completed"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        CALL | {"namespace": "agents_v1"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "é", "status": "completed"},
        OUTPUT,
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]
    _, answer, *_ = conversation({"input": given} | CODEX | {"tools": []})
    assert answer["reasoning_content"] == "hm"
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "agents_v1__shop", "arguments": {"size": "small"}},
        {"name": "patch", "arguments": {"input": "é"}},
    ]
    asked = response({"input": "a"} | CODEX, json_chat.READER)
    assert [tool.name for tool in asked.tools[1].tools] == ["shop", "agents_v1__buy", "patch"]
    assert asked.repeated["tools"][1:] == CODEX["tools"][1:]
    for line in (
        "tools of the type web_search are left out",
        "items of the type web_search_call are left out",
        "text.verbosity of a request has no effect",
    ):
        assert caplog.text.count(line) == 1
    named = {"tool_choice": {"type": "custom", "name": "patch"}}
    assert [tool.name for tool in response({"input": "a"} | CODEX | named, json_chat.READER).tools[1].tools] == [
        "patch"
    ]


def test_the_input_of_a_custom_tool_is_a_text_of_its_grammar():
    definition = 'start: "*** Begin" LF ("+" /[^\\n]*/ LF)+ "*** End"\nLF: "\\n"'
    custom = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}
    custom["format"]["definition"] = definition
    body = {"input": "a", "tools": [custom], "tool_choice": {"type": "custom", "name": "patch"}}
    grammar = response(body, json_chat.READER).grammar.make()
    for text, is_right in (('*** Begin\n+a "b" \\ é\n+\n*** End', True), ("*** Begin\n*** End", False), ("+a", False)):
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        call = f'\n<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
        assert grammar.accepts(call) is is_right
    for wrong, message in (
        ("start: (", r"line 1: expected '\)'"),
        ("start: <tool>", "special tokens are not supported"),
    ):
        custom["format"]["definition"] = wrong
        asked = response(body, json_chat.READER).grammar
        with pytest.raises(RequestError, match=f"patch: .*lark.*{message}") as error, asked.errors():
            asked.make()
        assert error.value.body["error"]["param"] == "tools[0].format.definition"


def test_a_second_turn_of_the_ai_sdk(served):
    first = served.client.post(RESPONSES, json={"input": "ab", "max_output_tokens": 4, "temperature": 0}).json()
    (item,) = first["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    bodies = [
        {"input": [{"role": "user", "content": "ab"}, reference, {"role": "user", "content": "b"}]},
        {"input": "b", "previous_response_id": first["id"]},
    ]
    texts = [
        served.client.post(RESPONSES, json=body | {"max_output_tokens": 4, "temperature": 0}).json()["output"][0][
            "content"
        ]
        for body in bodies
    ]
    assert texts[0] == texts[1]


def test_items_of_thoughts_and_of_calls_of_other_tools(monkeypatch):
    """The parts of an answer are given."""
    asked = response({"input": "a"} | CODEX, json_chat.READER)
    parts = [
        *(Thought("h"), Thought("m"), Content("so")),
        *(Called("agents_v1__buy"), Arguments("{}")),
        *(Called("patch"), Arguments('{"input"'), Arguments(': "a\\'), Arguments("n\\ud83d"), Arguments('\\ude00"}')),
    ]
    monkeypatch.setattr(Choice, "parts", lambda *_: parts)
    result = alone("ab", max_new_tokens=2)
    writer = ItemsWriter(asked, "tiny", json_chat.TOKENIZER, "id")
    found = [*writer.begin(), *writer.chunks(0, one_piece(result)), *writer.end([result], 0)]
    for event in found:
        EVENTS.validate_python(event)
    output = found[-1]["response"]["output"]
    assert replayed(found) == output
    thought, message, call, custom = output
    assert [thought["content"], message["content"][0]["text"]] == [[{"type": "reasoning_text", "text": "hm"}], "so"]
    assert (call["name"], call["namespace"], call["arguments"]) == ("buy", "agents_v1", "{}")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "a\n😀")


def test_instructions_are_joined_with_a_system_item_where_the_template_takes_one():
    one = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
    {{- raise_exception('at the beginning') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"""
    reader = dataclasses.replace(json_chat.READER, chat_template=json_chat.chat_template(one))
    given = [{"role": "developer", "content": [{"type": "input_text", "text": "b"}]}, {"role": "user", "content": "c"}]
    asked = response({"input": given, "instructions": "a"}, reader)
    assert json_chat.TOKENIZER.decode(asked.prompts[0]) == "system:a\n\nb;user:c;"


def test_a_response_goes_on_from_an_earlier_one(client, served):
    first = client.responses.create(model="tiny", input="ab", instructions="c", max_output_tokens=6, temperature=0)
    second = client.responses.create(
        model="tiny", input="ba", previous_response_id=first.id, max_output_tokens=6, temperature=0
    )
    prompt = f"ab{first.output_text}bac"  # without the instructions
    assert second.output_text == alone(prompt, max_new_tokens=6).text[0]
    assert (second.previous_response_id, second.usage.input_tokens) == (first.id, len(prompt))
    body = {"input": "a", "previous_response_id": second.id, "max_output_tokens": 2, "stream": True, "temperature": 0}
    _, third = events(served.client.post(RESPONSES, json=body))
    assert third["usage"]["input_tokens"] == len(prompt) - 1 + len(second.output_text) + 2
    assert client.responses.retrieve(third["id"]).to_dict() == third
    assert third["store"]

    assert client.responses.delete(second.id) is None
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no stored response 'resp_"):
            ask(second.id)
    with pytest.raises(openai.BadRequestError, match="there is no response 'resp_") as error:
        client.responses.create(model="tiny", input="a", previous_response_id=second.id)
    assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")
    unstored = client.responses.create(model="tiny", input="a", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    assert served.client.get(f"{RESPONSES}/{third['id']}", params={"stream": "true"}).status_code == 400


def test_the_store_forgets_the_oldest_responses():
    store = Store(max_bytes=800)
    for i in range(5):
        store.add([{"content": "x" * 300}], {"id": f"r{i}", "output": [{"id": f"i{i}"}]})
    assert [i for i in range(5) if store.find(f"r{i}") is not None] == [3, 4]
    assert store.find("r4").items == [{"content": "x" * 300}, {"id": "i4"}]
    assert [store.find_item(f"i{i}") for i in (2, 3)] == [None, {"id": "i3"}]
    assert store.remove("r3")
    assert store.find_item("i3") is None
    assert not store.remove("r3")
    store.add([{"content": "x" * 300}], {"id": "r5", "output": []})
    assert store.find("r4") is not None, "what was removed takes no memory"


@pytest.fixture(scope="module")
def shop(json_engine):
    """A server whose model calls tools."""
    with running(json_engine, json_chat.READER) as served:
        yield served


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "buy"}]}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "buy"}, ALLOWED])
def test_calls_of_tools(shop, choice):
    """The round trip of the specification's suite, in a stream too."""
    body = {"input": "a shirt", "tools": [SHOP, BUY | {"strict": True}], "tool_choice": choice, "logit_bias": BIAS}
    body |= {"temperature": 1.0, "seed": 3, "max_output_tokens": 200, "parallel_tool_calls": False}
    whole = shop.client.post(RESPONSES, json=body).json()
    Response.model_validate(whole)
    call = whole["output"][-1]
    assert (call["type"], call["status"]) == ("function_call", "completed")
    assert json.loads(call["arguments"])["size"] in ("small", "large")
    assert call["name"] == "buy" or choice == "required"
    assert (whole["tool_choice"], whole["tools"][1]["strict"]) == (choice, True)

    found, last = events(shop.client.post(RESPONSES, json=body | {"stream": True}))
    assert without_ids(last) == without_ids(whole)
    assert replayed(found) == last["output"]

    output = {"type": "function_call_output", "call_id": last["output"][-1]["call_id"], "output": "done"}
    after = {"previous_response_id": last["id"], "input": [output], "max_output_tokens": 4}
    answer = shop.client.post(RESPONSES, json=after).json()
    chat = [{"role": "user", "content": "a shirt"}, {"role": "assistant", "content": "", "tool_calls": []}]
    function = {"name": call["name"], "arguments": call["arguments"]}
    chat[1]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    chat.append({"role": "tool", "tool_call_id": "1", "content": "done"})
    assert answer["usage"]["input_tokens"] == len(json_chat.READER.chat({"messages": chat}).prompts[0])


def test_tools_that_are_allowed_are_shown_among_all():
    body = {"input": "a", "tools": [SHOP, BUY], "tool_choice": {name: ALLOWED[name] for name in ("type", "tools")}}
    asked = response(body, json_chat.READER)
    _, tools = asked.tools
    assert ([tool.name for tool in tools.tools], tools.must_call, len(tools.given)) == (["buy"], False, 2)
    assert asked.repeated["tool_choice"] == ALLOWED | {"mode": "auto"}
    assert "shop" in json_chat.TOKENIZER.decode(asked.prompts[0])


def test_a_call_that_is_cut_off_is_incomplete(shop):
    text = {"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}, "required": ["text"]}
    body = {"input": "a", "tools": [BUY | {"parameters": text}], "tool_choice": "required", "max_output_tokens": 60}
    found, last = events(shop.client.post(RESPONSES, json=body | {"stream": True, "logit_bias": BIAS}))
    call = last["output"][-1]
    assert (last["status"], call["type"], call["status"]) == ("incomplete", "function_call", "incomplete")
    assert replayed(found) == last["output"]
    body = {"input": "b", "previous_response_id": last["id"], "max_output_tokens": 4}
    assert shop.client.post(RESPONSES, json=body).status_code == 200, "the arguments are taken as {}"


def test_the_client_gets_objects(shop):
    with shop.openai() as client:
        options = {"model": "tiny", "input": "a shirt", "extra_body": {"logit_bias": BIAS}, "max_output_tokens": 200}
        parsed = client.responses.parse(text_format=Shirt, **options)
        assert isinstance(parsed.output_parsed, Shirt)
        assert parsed.text.format.schema_ == Shirt.model_json_schema() | parsed.text.format.schema_
        text = {"format": {"type": "json_schema", "name": "s", "strict": True, "schema": {"minContains": 1}}}
        with pytest.raises(openai.BadRequestError, match=r"text\.format has no grammar: #") as error:
            client.responses.create(text=text, **options)
        assert error.value.param == "text.format"


def test_an_error_in_a_stream_is_an_event(engine):
    """An error comes after the text, and before the response that failed."""
    with running(engine, seconds=0.001) as served:
        found, last = events(served.client.post(RESPONSES, json={"input": "ab", "stream": True, "ignore_eos": True}))
        assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
        assert found[-2]["error"]["message"] == found[-2]["message"] == last["error"]["message"]
        assert "the response took more than 0.001 seconds" in last["error"]["message"]
        assert last["status"] == "failed"
        with served.openai() as client, pytest.raises(openai.APIError, match="took more than"):
            list(client.responses.create(model="tiny", input="ab", stream=True, extra_body={"ignore_eos": True}))


PIECES = strategies.sampled_from(
    [None, 3, "a", [], {}, "function", "message", "assistant", CALL, OUTPUT, SHOP, ALLOWED, {"type": "input_text"}]
)
LIKELY = strategies.recursive(
    PIECES,
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(
            strategies.sampled_from(
                ["type", "role", "content", "text", "format", "name", "call_id", "output", "tools"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


# Of `/v1/responses` alone, or with another meaning there.
OWN_FIELDS = sorted(
    name
    for name, kind in READER.tables.response.items()
    if kind is not READER.tables.chat.get(name) and name not in UNSUPPORTED
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(strategies.dictionaries(strategies.sampled_from(OWN_FIELDS), LIKELY, max_size=4))
def test_any_body_is_read_or_refused(body):
    try:
        asked = response({"input": "a"} | body, json_chat.READER)
    except RequestError:
        return
    json.dumps(asked.repeated)
    assert asked.prompts[0]
