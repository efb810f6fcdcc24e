"""Anthropic's client over /v1/messages: stream, tools, a second turn, a typed answer, and a count of tokens."""

import anthropic
import pydantic
from agent import ASK, LAST, LIMIT, MODEL, THEN, feature, weather


class Report(pydantic.BaseModel):
    """The weather in a city, without bounds, which the client takes out of a schema."""

    city: str
    degrees: int


client = anthropic.Anthropic()
settings = {"model": MODEL, "max_tokens": LIMIT}
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
tools = [{"name": "weather", "description": weather.__doc__, "input_schema": schema}]
messages = [{"role": "user", "content": ASK}]

with feature("chat"):
    assert client.messages.create(messages=messages, system="Be short.", **settings).content[0].text
with feature("stream"), client.messages.stream(messages=messages, **settings) as stream:
    assert "".join(stream.text_stream)
with feature("tools"):
    choice = {"type": "tool", "name": "weather"}
    answer = client.messages.create(messages=messages, tools=tools, tool_choice=choice, **settings)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
with feature("second turn"):
    with client.messages.stream(messages=messages, tools=tools, **settings) as stream:
        messages.append({"role": "assistant", "content": stream.get_final_message().content})
    messages.append({"role": "user", "content": THEN})
    with client.messages.stream(messages=messages[:3], tools=tools, tool_choice={"type": "any"}, **settings) as stream:
        assert stream.get_final_message().stop_reason == "tool_use"
with feature("final structure"):
    last = [*messages[:4], {"role": "user", "content": LAST}]
    assert client.messages.parse(messages=last, output_format=Report, **settings).parsed_output
with feature("tools+format"):
    answer = client.messages.parse(messages=last, tools=tools, output_format=Report, **settings)
    assert answer.parsed_output or answer.stop_reason == "tool_use"
with feature("count"):
    assert client.messages.count_tokens(model=MODEL, messages=messages[:3], tools=tools).input_tokens > 20
