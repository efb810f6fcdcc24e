"""dspy: typed predictions and an agent with tools, by prompts and by JSON."""

import dspy
from agent import ASK, LIMIT, MODEL, Report, feature, weather

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", temperature=0, max_tokens=LIMIT, cache=False, num_retries=0))
for adapter in (dspy.ChatAdapter(), dspy.JSONAdapter()):
    dspy.configure(adapter=adapter)
    name = type(adapter).__name__
    with feature(f"{name}: final structure"):
        signature = dspy.Signature({"text": (str, dspy.InputField()), "report": (Report, dspy.OutputField())})
        assert isinstance(dspy.Predict(signature)(text="It is 21 degrees in Paris.").report, Report)
with feature("tools"):
    dspy.ReAct("question -> answer", tools=[weather], max_iters=2)(question=ASK)
