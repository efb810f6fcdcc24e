"""Bodies of `/v1/responses`, read into chats: their items, and those of earlier responses, become conversations."""

import dataclasses

from jlade.server import kinds, structured
from jlade.server import tools as tools_lib
from jlade.server.body_fields import LOGPROBS
from jlade.server.fields import Body, RequestError, refused
from jlade.server.protocol import OF_ENGINE, BodyReader, Completion
from jlade.server.responses import items as items_lib
from jlade.server.responses import tools as tools_of_items
from jlade.server.responses.store import Store
from jlade.server.responses.tools import Origin

WHOLE_FUNCTION: Body = {"description": None, "parameters": None, "strict": None}  # as responses repeat functions
NOT_OF_CHATS = ("prompt_cache_key", "stream_options")  # which mean something else there


@dataclasses.dataclass(frozen=True)
class ItemsCompletion(Completion):
    """The items that a body asks for.

    Attributes:
      items: of the conversation.
      origins: what the functions that an answer may call are made of, by their names.
      repeated: fields of the response that repeat those of the body, or say what is done without them.
      store: that keeps the response; None to keep it nowhere.
    """

    items: list[Body]
    origins: dict[str, Origin]
    repeated: Body
    store: Store | None
    names = OF_ENGINE | {"max_new_tokens": "max_output_tokens"}


def read(reader: BodyReader, store: Store, body: Body) -> ItemsCompletion:
    """Reads a body of `/v1/responses`, which becomes a chat for `reader`; `store` has the earlier responses."""
    values = kinds.read(body, reader.tables.response)
    earlier = _earlier(values.get("previous_response_id"), store)
    items = earlier + items_lib.read(values.get("input"), store)
    messages = items_lib.messages(items, len(earlier))
    if "instructions" in values:
        messages.insert(0, {"role": "system", "content": values["instructions"]})
    tools, choice = tools_of_items.read(values.get("tools", [])), values.get("tool_choice", tools_lib.AUTO)
    of_tools = {"tools": tools.functions, "tool_choice": tools_of_items.choice(choice, tools.origins)}
    chosen = tools_lib.read(values | of_tools, within="", paths=tools.paths, schemas=tools.schemas)
    limit, top = values.get("max_output_tokens"), values.get("top_logprobs", 0)
    has_logprobs = top > 0 or LOGPROBS in values.get("include", [])
    of_chat = {name: value for name, value in values.items() if name not in NOT_OF_CHATS}
    of_chat |= {"logprobs": top if has_logprobs else None, "max_tokens": limit}
    if effort := values.get("reasoning", {}).get("effort"):
        of_chat["reasoning_effort"] = effort
    if (text_format := values.get("text", {}).get("format")) is not None:
        of_chat[structured.TEXT_FORMAT] = text_format
    prompt = reader.conversation("input", messages, chosen, variables=reader.variables(of_chat))
    completion = reader.of_chat(of_chat, prompt, chosen, "input")
    if tools.functions and has_logprobs:
        raise refused("include", body.get("include"), f"without {LOGPROBS}, and top_logprobs 0, beside tools")
    is_of_several = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    keeps, sampling = values.get("store", True), completion.options["sampling"]
    repeated = {
        "background": False,
        "frequency_penalty": sampling.frequency_penalty or 0,
        "instructions": values.get("instructions"),
        "max_output_tokens": limit,
        "max_tool_calls": None,
        "metadata": values.get("metadata", {}),
        "parallel_tool_calls": values.get("parallel_tool_calls", chosen is None or chosen.is_parallel),
        "presence_penalty": sampling.presence_penalty or 0,
        "previous_response_id": values.get("previous_response_id"),
        "prompt_cache_key": values.get("prompt_cache_key"),
        "safety_identifier": values.get("safety_identifier"),
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": keeps,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | _given(body.get("text")),
        "tool_choice": {"mode": tools_lib.AUTO} | choice if is_of_several else choice,
        "tools": [WHOLE_FUNCTION | tool if tool["type"] == "function" else tool for tool in values.get("tools", [])],
        "top_logprobs": top,
        "top_p": 1 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
    }
    return ItemsCompletion(
        **vars(completion), items=items, origins=tools.origins, repeated=repeated, store=store if keeps else None
    )


def _given(values: Body | None) -> Body:
    """Returns the fields of an object that are not null."""
    return {name: value for name, value in (values or {}).items() if value}


def _earlier(previous: str | None, store: Store) -> list[Body]:
    """Returns the items of the response that a body goes on from."""
    if previous is None:
        return []
    turn = store.find(previous)
    if turn is None:
        message = f"there is no response {previous!r:.100}: it was not stored, is no longer, or the server began anew"
        raise RequestError(message, "previous_response_id", "previous_response_not_found")
    return turn.items
