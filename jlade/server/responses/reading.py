"""Bodies of `/v1/responses`, read into chats: their items, and those of earlier responses, become conversations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jlade.server import kinds, protocol, structured
from jlade.server import tools as tools_lib
from jlade.server.body_fields import LOGPROBS, PART
from jlade.server.fields import Body, RequestError, refused
from jlade.server.kinds import Nested, Table, names, only
from jlade.server.protocol import OF_ENGINE, BodyReader, Completion
from jlade.server.responses.store import Store

# Fields of items of calls and their outputs, and of functions, that are not supported.
OF_CALLS: Table = {"async": only(False), "caller": only({"type": "direct"}), "namespace": only()}
OF_TOOLS: Table = {"allowed_callers": only(["direct"]), "async": only(False), "defer_loading": only(False)}
NOT_OF_CHATS = ("prompt_cache_key", "stream_options")  # which mean something else there
_OF_ITEMS = ("id", "status", "type")
ITEMS = {
    "message": names(*_OF_ITEMS, "phase", "role", content=Nested(PART | names("annotations", "logprobs"))),
    "function_call": names(*_OF_ITEMS, "arguments", "async", "call_id", "caller", "name", "namespace"),
    "function_call_output": names(*_OF_ITEMS, "call_id", "caller", "name", "namespace", output=Nested(PART)),
}


@dataclasses.dataclass(frozen=True)
class ItemsCompletion(Completion):
    """The items that a body asks for.

    Attributes:
      items: of the conversation.
      repeated: fields of the response that repeat those of the body, or say what is done without them.
      store: that keeps the response; None to keep it nowhere.
    """

    items: list[Body]
    repeated: Body
    store: Store | None
    names = OF_ENGINE | {"max_new_tokens": "max_output_tokens"}


def read(reader: BodyReader, store: Store, body: Body) -> ItemsCompletion:
    """Reads a body of `/v1/responses`, which becomes a chat for `reader`; `store` has the earlier responses."""
    values = kinds.read(body, reader.tables.response)
    earlier = _earlier(values.get("previous_response_id"), store)
    items = earlier + _input(values.get("input"))
    messages = _messages(items, len(earlier))
    if "instructions" in values:
        messages.insert(0, {"role": "system", "content": values["instructions"]})
    tools, choice = _tools(values.get("tools", [])), values.get("tool_choice", tools_lib.AUTO)
    chosen = tools_lib.read(values | {"tools": tools, "tool_choice": _tool_choice(choice)}, within="")
    limit, top = values.get("max_output_tokens"), values.get("top_logprobs", 0)
    has_logprobs = top > 0 or LOGPROBS in values.get("include", [])
    of_chat = {name: value for name, value in values.items() if name not in NOT_OF_CHATS}
    of_chat |= {"logprobs": top if has_logprobs else None, "max_tokens": limit}
    if (text_format := values.get("text", {}).get("format")) is not None:
        of_chat[structured.TEXT_FORMAT] = text_format
    completion = reader.of_chat(
        of_chat, reader.conversation("input", messages, chosen, variables=reader.variables(values)), chosen, "input"
    )
    if tools and has_logprobs:
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
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "presence_penalty": sampling.presence_penalty or 0,
        "previous_response_id": values.get("previous_response_id"),
        "prompt_cache_key": values.get("prompt_cache_key"),
        "safety_identifier": values.get("safety_identifier"),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": keeps,
        "temperature": sampling.temperature,
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": {"mode": tools_lib.AUTO} | choice if is_of_several else choice,
        "tools": [{"description": None, "parameters": None, "strict": None} | tool for tool in values.get("tools", [])],
        "top_logprobs": top,
        "top_p": 1 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
    }
    return ItemsCompletion(**vars(completion), items=items, repeated=repeated, store=store if keeps else None)


def _earlier(previous: str | None, store: Store) -> list[Body]:
    """Returns the items of the response that a body goes on from."""
    if previous is None:
        return []
    turn = store.find(previous)
    if turn is None:
        message = f"there is no response {previous!r:.100}: it was not stored, is no longer, or the server began anew"
        raise RequestError(message, "previous_response_id", "previous_response_not_found")
    return turn.items


def _input(items: Any) -> list[Body]:
    """Returns the items of `input`, each an object with its type."""
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": kinds.text("input", items)}]
    if not isinstance(items, list) or not items:
        raise refused("input", items, "a string, or a list of at least one item")
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise refused(f"input[{i}]", item, "an item: an object with its type")
    return [{"type": "message"} | item for item in items]


def _messages(items: Sequence[Body], num_earlier: int) -> list[Body]:
    """Returns the messages of items for a template; errors count them from those after the first `num_earlier`."""
    messages: list[Body] = []
    calls: set[str] = set()
    for i, item in enumerate(items, start=-num_earlier):
        name = f"input[{i}]"
        if isinstance(kind := item["type"], str) and kind in ITEMS:
            kinds.log_unknown(item, ITEMS[kind], name, "input")
            kinds.values(item, OF_CALLS, f"{name}.")
        match kind:
            case "message":
                messages.append(_message(name, item))
            case "function_call":
                call = _call(name, item)
                calls.add(call["id"])
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = kinds.text(f"{name}.call_id", item.get("call_id"))
                if call_id not in calls:
                    raise refused(f"{name}.call_id", call_id, "that of an earlier function_call")
                content = _content(f"{name}.output", item.get("output"), "input_text")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case other:
                accepted = "message, function_call or function_call_output: other items are not supported"
                raise refused(f"{name}.type", other, accepted)
    return messages


ROLES = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
ROLE = kinds.one_of(*ROLES)


def _message(name: str, item: Body) -> Body:
    role = ROLE(f"{name}.role", item.get("role"))
    return {"role": protocol.ROLES[role], "content": _content(f"{name}.content", item.get("content"), ROLES[role])}


def _content(name: str, content: Any, kind: str) -> str | list[Body]:
    """Returns a text, or its parts in the form of a chat if it is given in parts of this type."""
    if not isinstance(content, list):
        return kinds.text(name, content)
    parts = []
    for i, part in enumerate(content):
        part_kind = part.get("type") if isinstance(part, dict) else part
        if part_kind != kind:
            accepted = f"{kind}, as the model reads text alone"
            raise refused(f"{name}[{i}].type", part_kind, accepted)
        parts.append({"type": "text", "text": kinds.text(f"{name}[{i}].text", part.get("text"))})
    return parts


def _call(name: str, item: Body) -> Body:
    """Returns a call in the form of a chat."""
    arguments = tools_lib.read_arguments(f"{name}.arguments", item.get("arguments"))
    function = {"name": kinds.text(f"{name}.name", item.get("name")), "arguments": arguments}
    return {"id": kinds.text(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}


def _tools(tools: Any) -> list[Body]:
    """Returns tools in the form of a chat."""
    if not isinstance(tools, list):
        raise refused("tools", tools, "a list of functions")
    of_chat = []
    for i, tool in enumerate(tools):
        match tool:
            case {"type": "function", "name": str(name)} if tools_lib.NAME.fullmatch(name):
                kinds.values(tool, OF_TOOLS, f"tools[{i}].")
                function = {key: value for key, value in tool.items() if key != "type" and value is not None}
                of_chat.append({"type": "function", "function": function})
            case _:
                accepted = 'a function {"type": "function", "name": ..., "parameters": ...}; the server runs no tools'
                raise refused(f"tools[{i}]", tool, accepted)
    return of_chat


def _tool_choice(choice: Any) -> Any:
    """Returns a choice of tools in the form of a chat, which refuses others."""
    match choice:
        case {"type": "function"}:
            return _function(choice)
        case {"type": "allowed_tools", "tools": list(tools), **others}:
            allowed = {"mode": others.get("mode", tools_lib.AUTO), "tools": [_function(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _function(tool: Any) -> Any:
    """Returns a function by its name in the form of a chat, which refuses others."""
    match tool:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
    return tool
