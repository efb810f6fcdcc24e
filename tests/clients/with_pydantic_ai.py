"""pydantic-ai: an agent with tools in several turns, and each of its ways to a typed answer."""

import asyncio

import pydantic_ai
from agent import ASK, LAST, LIMIT, MODEL, THEN, Report, add, feature, weather

settings = pydantic_ai.ModelSettings(temperature=0, max_tokens=LIMIT)
limits = pydantic_ai.UsageLimits(request_limit=4)
Reached = pydantic_ai.UsageLimitExceeded


async def converse(interface):
    model = f"{interface}:{MODEL}"
    agent = pydantic_ai.Agent(model, tools=[weather, add], model_settings=settings)
    history = []
    with feature(f"{interface}: tools", Reached):
        result = await agent.run(ASK, usage_limits=limits)
        history = result.all_messages()
    with feature(f"{interface}: stream, second turn", Reached):
        async with agent.run_stream(THEN, message_history=history, usage_limits=limits) as stream:
            assert await stream.get_output()
        history = stream.all_messages()
    for output, functions in (
        (pydantic_ai.ToolOutput, []),  # the function of the answer alone: it has to be called
        (pydantic_ai.NativeOutput, [weather]),
        (pydantic_ai.PromptedOutput, [weather]),
    ):
        with feature(f"{interface}: {output.__name__}", Reached, pydantic_ai.UnexpectedModelBehavior):
            reporter = pydantic_ai.Agent(model, tools=functions, output_type=output(Report), model_settings=settings)
            result = await reporter.run(LAST, message_history=history, usage_limits=limits)
            assert isinstance(result.output, Report)


async def main():
    await converse("openai-chat")
    await converse("openai-responses")


asyncio.run(main())
