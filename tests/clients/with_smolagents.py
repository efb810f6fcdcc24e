"""smolagents: an agent that calls tools until one of them gives the final answer."""

from agent import ASK, LIMIT, MODEL, feature, weather
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(MODEL, temperature=0, max_tokens=LIMIT)
for stream in (False, True):
    with feature("stream" if stream else "tools"):
        agent = ToolCallingAgent([tool(weather)], model, max_steps=2, stream_outputs=stream, verbosity_level=0)
        steps = agent.run(ASK, return_full_result=True).steps
        errors = [step["error"]["type"] for step in steps if step.get("error")]
        assert set(errors) <= {"AgentMaxStepsError"}, errors
