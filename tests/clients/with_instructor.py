"""instructor: a typed answer in each of its modes that bound what the model writes."""

import instructor
import openai
from agent import LAST, LIMIT, MODEL, Report, feature

messages = [{"role": "user", "content": f"It is 21 degrees in Paris. {LAST}"}]
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    with feature(mode):
        client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode[mode])
        limit = {"max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens": LIMIT}
        answer = client.create(
            messages=messages, response_model=Report, model=MODEL, temperature=0, max_retries=0, **limit
        )
        assert isinstance(answer, Report)
