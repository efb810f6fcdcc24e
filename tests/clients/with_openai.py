"""OpenAI's own client: chat, stream, tools, a second turn, and tools beside a format, in both interfaces."""

import json

import openai
from agent import ASK, LAST, LIMIT, MODEL, THEN, Report, add, feature, weather

client = openai.OpenAI()
settings = {"model": MODEL, "temperature": 0, "max_tokens": LIMIT}
parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
functions = [
    {"name": "weather", "description": weather.__doc__, "parameters": parameters},
    {"name": "add", "description": add.__doc__, "parameters": numbers},
]
tools = [{"type": "function", "function": {**function, "strict": False}} for function in functions]
strict = [openai.pydantic_function_tool(Report, name="report")]
messages = [{"role": "user", "content": ASK}]

with feature("chat"):
    answer = client.chat.completions.create(messages=messages, **settings)
    assert answer.choices[0].message.content
with feature("stream"):
    pieces = client.chat.completions.create(messages=messages, stream=True, **settings)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
with feature("tools"):
    first = {"type": "function", "function": {"name": "weather"}}
    message = client.chat.completions.create(messages=messages, tools=tools, tool_choice=first, **settings)
    message = message.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    result = weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
with feature("second turn"):
    messages.append({"role": "user", "content": THEN})
    with client.chat.completions.stream(messages=messages, tools=tools, tool_choice="required", **settings) as stream:
        message = stream.get_final_completion().choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
messages.append({"role": "user", "content": LAST})
with feature("tools+format"):
    answer = client.chat.completions.parse(messages=messages, tools=strict, response_format=Report, **settings)
    assert answer.choices[0].message.parsed or answer.choices[0].message.tool_calls
with feature("final structure"):
    answer = client.chat.completions.parse(messages=messages, response_format=Report, **settings)
    assert isinstance(answer.choices[0].message.parsed, Report)

settings = {"model": MODEL, "temperature": 0, "max_output_tokens": LIMIT}
tools = [{"type": "function", **function, "strict": False} for function in functions]
with feature("responses"):
    first = {"type": "function", "name": "weather"}
    answer = client.responses.create(input=ASK, tools=tools, tool_choice=first, **settings)
    (call,) = (item for item in answer.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is 21 degrees."}
    answer = client.responses.parse(
        input=[result], previous_response_id=answer.id, tools=tools, text_format=Report, **settings
    )
    assert answer.output
