"""`/v1/messages`: blocks to conversations, messages whole and in events, calls, errors in Anthropic's form."""

import dataclasses
import json

import pytest

from jlade import SamplingConfig
from jlade.constraints import special
from jlade.server import app
from jlade.server.fields import RequestError
from jlade.server.messages import reading
from jlade.server.messages.events import MessageWriter
from tests.server import json_chat
from tests.server.conftest import running, wait_until
from tests.server.json_chat import BIAS, SCHEMA
from tests.server.tiny_chat import alone, ending

MESSAGES = "/v1/messages"
AB = {"messages": [{"role": "user", "content": "abba"}], "max_tokens": 24}
SHOP = {"name": "shop", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "t1", "name": "shop", "input": {"size": "small"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "done"}]}


def events(response):
    """Returns the events of a stream, each checked against its name."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def replayed(found):
    """Returns the message that the events add up to, as a client adds them."""
    message = found[0]["message"]
    for event in found[1:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block)
                text = ""
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": piece}}:
                message["content"][-1]["text"] += piece
            case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": piece}}:
                message["content"][-1]["thinking"] += piece
            case {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": signature}}:
                message["content"][-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": piece}}:
                text += piece
            case {"type": "content_block_stop"} if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(text)
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= delta | {"usage": usage}
    assert found[-1] == {"type": "message_stop"}
    return message


def without_ids(message):
    content = [{name: block[name] for name in block.keys() - {"id"}} for block in message["content"]]
    return message | {"id": "", "usage": message["usage"]["output_tokens"], "content": content}


@pytest.mark.parametrize("stops", [False, True])
def test_a_message_is_the_text_of_a_chat(served, stops):
    seed, expected = ending("abbac", 1.0)
    body, reason, stop = AB | {"seed": seed, "stream": False}, "end_turn", None
    if stops:
        stop = expected.text[0][3:5]
        expected = alone("abbac", seed=seed, sampling=SamplingConfig(temperature=1.0), max_new_tokens=24, stop=[stop])
        body, reason = body | {"stop_sequences": ["no", stop]}, "stop_sequence"
    whole = served.client.post(MESSAGES, json=body).json()
    assert whole["content"] == [{"type": "text", "text": expected.text[0]}]
    assert (whole["type"], whole["role"], whole["stop_reason"], whole["stop_sequence"]) == (
        "message", "assistant", reason, stop
    )  # fmt: skip
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 5
    assert usage["output_tokens"] == expected.lengths[0]
    found = events(served.client.post(MESSAGES, json=body | {"stream": True}))
    assert [event["type"] for event in found[:3]] == ["message_start", "ping", "content_block_start"]
    assert without_ids(replayed(found)) == without_ids(whole)


@pytest.mark.parametrize(
    ("path", "ping", "end"),
    [(MESSAGES, "event: ping", "event: message_stop"), ("/v1/chat/completions", ": ", "data: [DONE]")],
)
def test_a_silent_stream_sends_pings(served, rounds, monkeypatch, path, ping, end):
    monkeypatch.setattr(app, "PING_SECONDS", 0.05)
    with served.client.stream("POST", path, json=AB | {"stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(3):
            assert ping in lines
        rounds.release(1000)
        assert end in lines, "the events come after them"


def test_a_message_takes_the_tokens_that_fit(served):
    body = AB | {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    whole = served.client.post(MESSAGES, json=body).json()
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("model_context_window_exceeded", 64 - 5)
    assert served.client.post(MESSAGES, json=body | {"max_tokens": 3}).json()["stop_reason"] == "max_tokens"


def test_calls_of_tools(json_engine):
    ask = {"role": "user", "content": [{"type": "text", "text": "a shirt"}]}
    body = {"messages": [ask], "max_tokens": 200, "tools": [SHOP], "logit_bias": BIAS, "temperature": 0}
    body |= {"tool_choice": {"type": "tool", "name": "shop"}}
    with running(json_engine, json_chat.READER) as shop:
        whole = shop.client.post(MESSAGES, json=body).json()
        found = events(shop.client.post(MESSAGES, json=body | {"stream": True}))
        assert without_ids(replayed(found)) == without_ids(whole)
        (call,) = whole["content"]
        assert (whole["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "shop")
        assert call["input"]["size"] in ("small", "large")
        result = {"role": "user", "content": [RESULT | {"tool_use_id": call["id"]}]}
        counted = {"messages": [ask, {"role": "assistant", "content": [call]}, result], "tools": [SHOP]}
        num_tokens = shop.client.post(f"{MESSAGES}/count_tokens", json=counted).json()["input_tokens"]
        answer = shop.client.post(MESSAGES, json=counted | {"max_tokens": 4, "logit_bias": BIAS}).json()
    usage = answer["usage"]
    assert num_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]


CALL = '\n<tool_call>\n{"name": "shop", "arguments": {"size": "small"}}\n</tool_call>'


def test_thoughts_are_a_block_before_text_and_calls():
    reader = json_chat.thinking("<think>\n")
    asked = reading.read(reader, AB | {"tools": [SHOP]})
    result = json_chat.generated(reader.tokenizer, f"hm\n</think>\n\nhello{CALL}")
    whole = MessageWriter(asked, "tiny", reader.tokenizer, "id").whole([result], 0)
    assert without_ids(whole)["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "hello\n"},
        {name: USE[name] for name in USE.keys() - {"id"}},
    ]
    writer = MessageWriter(asked, "tiny", reader.tokenizer, "id")
    found = [event for piece in json_chat.token_by_token(result) for event in writer.chunks(0, piece)]
    assert sum("thinking_delta" in str(event) for event in found) > 1, "the thoughts come in parts"
    assert without_ids(replayed([*writer.begin(), *found, *writer.end([result], 0)])) == without_ids(whole)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True|"),
        ({"thinking": {"type": "disabled"}}, "False|"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "True|low"),
    ],
)
def test_thinking_and_effort_are_variables_of_the_template(fields, shown):
    template = json_chat.chat_template("{{ thinking }}|{{ reasoning_effort }}")
    reader = dataclasses.replace(json_chat.READER, chat_template=template)
    assert json_chat.TOKENIZER.decode(reading.read(reader, AB | fields).prompts[0]) == shown
    counted = AB | fields
    del counted["max_tokens"]
    assert reading.count(reader, counted) == {"input_tokens": len(json_chat.TOKENIZER.encode(shown).ids)}


@pytest.mark.parametrize(
    ("choice", "is_parallel"),
    [
        ({"type": "any"}, False),
        ({"type": "any", "disable_parallel_tool_use": False}, True),
        ({"type": "auto"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
    ],
)
def test_an_answer_that_has_to_call_does_so_once_unless_it_may_do_more(choice, is_parallel):
    asked = reading.read(json_chat.READER, AB | {"tools": [SHOP], "tool_choice": choice})
    automaton = asked.grammar.make().automaton
    assert automaton.accepts(special.encode(CALL))
    assert automaton.accepts(special.encode(CALL + CALL)) is is_parallel


def test_blocks_become_messages():
    shown = dataclasses.replace(json_chat.READER, chat_template=json_chat.chat_template("{{ messages | tojson }}"))
    text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    given = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, text, USE]},
        {"role": "user", "content": [RESULT, text]},
    ]
    header = {"type": "text", "text": "x-anthropic-billing-header: x"}
    asked = reading.read(shown, {"messages": given, "system": [header, text], "max_tokens": 5})
    function = {"name": "shop", "arguments": {"size": "small"}}
    calls = [{"id": "t1", "type": "function", "function": function}]
    assert json.loads(json_chat.TOKENIZER.decode(asked.prompts[0])) == [
        {"role": "system", "content": "b"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "done"},
        {"role": "user", "content": "b"},
    ]


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"messages": IMAGE}, r"messages\[0\]\.content\[0\]\.type must be text or tool_result .*'image'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "tool_use_id must be that of an earlier tool_use"),
        ({"messages": [*AB["messages"], {"role": "assistant", "content": "a"}]}, "must not end with one of the assi"),
        ({"tools": [{"type": "made_up"}]}, r"tools\[0\]\.type must be custom.*'made_up'"),
        ({"tools": [{"name": "a", "input_schema": 3}]}, r"tools\[0\]\.input_schema must be .*, got 3"),
        ({"tools": [{"type": "bash_20250124"}], "tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice must"),
        ({"container": "c"}, "container='c' is not supported"),
        ({"output_config": {"format": {"type": "xml"}}}, r"output_config\.format must be"),
    ],
)
def test_wrong_bodies_are_refused(fields, message):
    with pytest.raises(RequestError, match=message) as error:
        reading.read(json_chat.READER, AB | fields)
    assert error.value.status == 400


def test_a_schema_that_is_not_held_has_the_path_of_its_tool():
    strict = {"name": "a", "input_schema": {"properties": {"b": {"minContains": 2}}}, "strict": True}
    asked = reading.read(json_chat.READER, AB | {"tools": [{"type": "bash_20250124"}, SHOP, strict]})
    with pytest.raises(RequestError, match=r"tools\[2\]\.input_schema has no grammar: a: #/properties/b/minContains"):
        asked.grammar.make()


def test_errors_have_anthropics_form(engine):
    with running(engine, keys=["right"]) as served:
        for headers, body, status, kind in (
            ({}, AB, 401, "authentication_error"),
            ({"x-api-key": "wrong"}, AB, 401, "authentication_error"),
            ({"x-api-key": "right"}, AB | {"model": "other"}, 404, "not_found_error"),
            ({"x-api-key": "right"}, AB | {"max_tokens": 0}, 400, "invalid_request_error"),
        ):
            refused = served.client.post(MESSAGES, json=body, headers=headers)
            answer = refused.json()
            assert (refused.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind)
            assert answer["request_id"] == refused.headers["request-id"]
        assert served.client.post(MESSAGES, json=AB, headers={"x-api-key": "right"}).status_code == 200


def test_an_error_within_a_stream_is_its_last_event(engine, rounds):
    with running(engine, seconds=0.2) as served:
        response = served.client.post(MESSAGES, json=AB | {"stream": True})
        error = {"type": "timeout_error", "message": "the response took more than 0.2 seconds"}
        last = {"type": "error", "error": error, "request_id": response.headers["request-id"]}
        assert [event for event in events(response) if event["type"] not in ("message_start", "ping")] == [last]
        rounds.release(10)
        wait_until(lambda: engine.num_running == 0)
