"""dspy: a prediction that follows a schema, and calls of tools."""

import dspy
import litellm
from agent import ASK, LIMIT, MODEL, Report, feature, weather

known = {
    "litellm_provider": "openai",
    "mode": "chat",
    "supports_response_schema": True,
    "supports_function_calling": True,
}
litellm.register_model({MODEL: known, f"openai/{MODEL}": known})
model = dspy.LM(f"openai/{MODEL}", temperature=0, max_tokens=LIMIT, cache=False, num_retries=0)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
with feature("final structure"):
    signature = dspy.Signature({"text": (str, dspy.InputField()), "report": (Report, dspy.OutputField())})
    assert isinstance(dspy.Predict(signature)(text="It is 21 degrees in Paris.").report, Report)
with feature("tools"):
    fields = {"tools": (list[dspy.Tool], dspy.InputField()), "calls": (dspy.ToolCalls, dspy.OutputField())}
    signature = dspy.Signature({"question": (str, dspy.InputField()), **fields})
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(adapter=adapter, lm=model.copy(tool_choice="required")):
        answer = dspy.Predict(signature)(question=ASK, tools=[dspy.Tool(weather)])
    assert answer.calls.tool_calls[0].name == "weather"
