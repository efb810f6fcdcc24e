"""Simon Willison's llm: a stream, chains of calls in a conversation, and a schema."""

import os

from agent import ASK, LAST, LIMIT, MODEL, THEN, Report, add, feature, weather
from llm.default_plugins.openai_models import Chat

model = Chat(MODEL, model_name=MODEL, api_base=os.environ["OPENAI_BASE_URL"], supports_tools=True, supports_schema=True)
model.key = os.environ["OPENAI_API_KEY"]
talk = model.conversation()
settings = {"temperature": 0, "max_tokens": LIMIT}

with feature("stream"):
    assert "".join(model.prompt(ASK, **settings))
with feature("tools"):
    assert talk.chain(ASK, tools=[weather, add], chain_limit=3, options=settings).text()
with feature("second turn"):
    assert talk.chain(THEN, tools=[weather, add], chain_limit=3, options=settings).text()
with feature("final structure"):
    assert Report.model_validate_json(talk.prompt(LAST, schema=Report, **settings).text())
