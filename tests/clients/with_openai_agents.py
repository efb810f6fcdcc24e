"""openai-agents: agents of several turns with tools and a type of output, over chat completions and over responses."""

import asyncio

import agents
from agent import ASK, LAST, LIMIT, MODEL, THEN, Report, add, feature, weather

agents.set_tracing_disabled(True)
tools = [agents.function_tool(weather), agents.function_tool(add)]
required = agents.ModelSettings(tool_choice="required", temperature=0, max_tokens=LIMIT)
free = agents.ModelSettings(temperature=0, max_tokens=LIMIT)


async def converse(interface):
    agents.set_default_openai_api(interface)
    agent = agents.Agent(name="a", model=MODEL, tools=tools, model_settings=required)
    reporter = agents.Agent(name="b", model=MODEL, tools=tools, output_type=Report, model_settings=free)
    history = []
    with feature(f"{interface}: tools", agents.MaxTurnsExceeded):
        result = await agents.Runner.run(agent, ASK, max_turns=4)
        assert any(item.type == "tool_call_output_item" for item in result.new_items)
        history = result.to_input_list()
    with feature(f"{interface}: stream, second turn", agents.MaxTurnsExceeded):
        stream = agents.Runner.run_streamed(agent, [*history, {"role": "user", "content": THEN}], max_turns=4)
        async for _ in stream.stream_events():
            pass
        history = stream.to_input_list()
    with feature(f"{interface}: tools+format", agents.MaxTurnsExceeded):
        result = await agents.Runner.run(reporter, [*history, {"role": "user", "content": LAST}], max_turns=6)
        assert isinstance(result.final_output, Report)


async def main():
    await converse("chat_completions")
    await converse("responses")


asyncio.run(main())
