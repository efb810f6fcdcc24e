"""LangChain: tools, a second turn, and agents whose answer has a type, by the provider and by a tool."""

from agent import ASK, LAST, LIMIT, MODEL, THEN, Report, add, feature, weather
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

for interface in ("chat", "responses"):
    responses = interface == "responses"
    model = ChatOpenAI(model=MODEL, temperature=0, max_tokens=LIMIT, use_responses_api=responses, max_retries=0)
    with feature(f"{interface}: stream"):
        assert list(model.stream(ASK))
    with feature(f"{interface}: tools"):
        answer = model.bind_tools([weather, add], tool_choice="weather").invoke(ASK)
        assert [call["name"] for call in answer.tool_calls] == ["weather"]
    messages = []
    with feature(f"{interface}: second turn", GraphRecursionError):
        agent = create_agent(model, [weather, add])
        messages = agent.invoke({"messages": [("user", ASK)]}, {"recursion_limit": 10})["messages"]
        messages = agent.invoke({"messages": [*messages, ("user", THEN)]}, {"recursion_limit": 10})["messages"]
    for strategy in (ProviderStrategy, ToolStrategy):
        with feature(f"{interface}: {strategy.__name__}", GraphRecursionError):
            agent = create_agent(model, [weather], response_format=strategy(Report))
            answer = agent.invoke({"messages": [*messages, ("user", LAST)]}, {"recursion_limit": 10})
            assert isinstance(answer["structured_response"], Report)
