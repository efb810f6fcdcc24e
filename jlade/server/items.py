"""OpenAI's `/v1/responses`: a body, whose items become a conversation, and the messages of earlier responses.

The specification is that of https://www.openresponses.org.
"""

import dataclasses
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from jlade.config import CONTROLS
from jlade.server import fields, known_fields, protocol, response_fields, structured
from jlade.server import tools as tools_lib
from jlade.server.fields import Body, RequestError
from jlade.server.known_fields import Unsupported
from jlade.server.protocol import OF_ENGINE, BodyReader, Completion
from jlade.server.response_fields import ResponseFields

MAX_BYTES = 64 * 2**20  # of stored responses, in JSON
LOGPROBS = "message.output_text.logprobs"
INCLUDED = {LOGPROBS, "reasoning.encrypted_content"}  # there is no reasoning apart from the text
TRUNCATION = ("auto", "disabled")  # the first allows what the second forbids, and is not done

REPEATED = ("prompt_cache_key", "safety_identifier")
# Fields that a chat reads under the same name.
PASSED = {
    "cache_salt", "ignore_eos", "logit_bias", "min_tokens", "model", "parallel_tool_calls", "prediction", "seed",
    "stop", "stop_token_ids", "stream", *CONTROLS, *structured.FIELDS.keys() - {"response_format"},
}  # fmt: skip
READ = {
    "include", "input", "instructions", "max_output_tokens", "metadata", "previous_response_id", "prompt_cache_key",
    "reasoning", "safety_identifier", "store", "stream_options", "text", "tool_choice", "tools", "top_logprobs",
    "truncation",
}  # fmt: skip
UNSUPPORTED = known_fields.UNSUPPORTED | {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "n": (1,),
    "prompt": (),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(response_fields.FIELDS, (False,)),
}
OF_REASONING: Unsupported = {"context": ("auto",), "effort": (), "mode": ("standard",)}
WITHIN: known_fields.Known = {**known_fields.WITHIN_RESPONSE, "prediction": known_fields.WITHIN_BOTH["prediction"]}
# Of items of calls and their outputs, and of functions.
OF_CALLS: Unsupported = {"async": (False,), "caller": ({"type": "direct"},), "namespace": ()}
OF_TOOLS: Unsupported = {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,)}


class Turn(NamedTuple):
    """A stored response.

    Attributes:
      items: of the conversation, with those of the response.
      response: as its client got it.
      size: bytes of both in JSON.
    """

    items: list[Body]
    response: Body
    size: int


class Store:
    """The latest responses, in memory."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes, self._size = max_bytes, 0
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, items: list[Body], response: Body) -> None:
        """Keeps a response and its conversation, and forgets the oldest ones for it."""
        turn = Turn([*items, *response["output"]], response, len(json.dumps([items, response])))
        with self._lock:
            self._turns[response["id"]] = turn
            self._size += turn.size
            while self._size > self._max_bytes:
                self._size -= self._turns.popitem(last=False)[1].size

    def find(self, name: str) -> Turn | None:
        """Returns the response with this id, None if there is none."""
        with self._lock:
            return self._turns.get(name)

    def remove(self, name: str) -> bool:
        """Forgets the response with this id, and returns whether there was one."""
        with self._lock:
            turn = self._turns.pop(name, None)
            self._size -= 0 if turn is None else turn.size
        return turn is not None


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
    known_fields.check(body, PASSED | READ, UNSUPPORTED, WITHIN)
    earlier = _earlier(body, store)
    items = earlier + _input(body.get("input"))
    instructions = body.get("instructions")
    messages = _messages(items, len(earlier))
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": fields.text("instructions", instructions)})
    text, reasoning = fields.nested(body, "text"), fields.nested(body, "reasoning")
    known_fields.refuse(text, {"verbosity": ("medium",)}, "text.")
    known_fields.refuse(reasoning, OF_REASONING, "reasoning.")
    if (truncation := body.get("truncation")) is not None and truncation not in TRUNCATION:
        raise fields.refused("truncation", truncation, f"one of {', '.join(TRUNCATION)}")
    fields.nested(body, "stream_options")
    tools, choice = _tools(body.get("tools")), body.get("tool_choice")
    text_format = fields.nested(text, "format")
    chat: Body = {name: body[name] for name in PASSED & body.keys()}
    chosen = tools_lib.read(chat | {"tools": tools, "tool_choice": _tool_choice(choice)}, within="")
    completion = reader.of_chat(
        chat,
        reader.conversation("input", messages, chosen),
        chosen,
        structured.read(chat, structured.of_text_format("text.format", text_format)),
        limit=fields.integer(body, "max_output_tokens", None, 1),
        shown=_shown(body, reader.max_top_logprobs),
        field="input",
    )
    if tools and completion.shown.top is not None:
        raise fields.refused("include", body.get("include"), f"without {LOGPROBS}, and top_logprobs 0, beside tools")
    keeps, sampling = fields.boolean(body, "store", default=True), completion.options["sampling"]
    repeated = {
        "background": False,
        "frequency_penalty": sampling.frequency_penalty or 0,
        "instructions": instructions,
        "max_output_tokens": completion.limit,
        "max_tool_calls": None,
        "metadata": fields.nested(body, "metadata"),
        "parallel_tool_calls": fields.boolean(body, "parallel_tool_calls", default=True),
        "presence_penalty": sampling.presence_penalty or 0,
        "previous_response_id": body.get("previous_response_id"),
        **{name: fields.text(name, body[name]) if body.get(name) is not None else None for name in REPEATED},
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": keeps,
        "temperature": sampling.temperature,
        "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": _shown_choice(choice),
        "tools": [{"description": None, "parameters": None, "strict": None} | tool for tool in body.get("tools") or []],
        "top_logprobs": completion.shown.top or 0,
        "top_p": 1 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
    }
    return ItemsCompletion(**vars(completion), items=items, repeated=repeated, store=store if keeps else None)


def _earlier(body: Body, store: Store) -> list[Body]:
    """Returns the items of the response that the body goes on from."""
    previous = body.get("previous_response_id")
    if previous is None:
        return []
    turn = store.find(fields.text("previous_response_id", previous))
    if turn is None:
        message = f"there is no response {previous!r:.100}: it was not stored, is no longer, or the server began anew"
        raise RequestError(message, "previous_response_id", "previous_response_not_found")
    return turn.items


def _input(items: Any) -> list[Body]:
    """Returns the items of `input`, each an object with its type."""
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": fields.text("input", items)}]
    if not isinstance(items, list) or not items:
        raise fields.refused("input", items, "a string, or a list of at least one item")
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise fields.refused(f"input[{i}]", item, "an item: an object with its type")
    return [{"type": "message"} | item for item in items]


def _messages(items: Sequence[Body], num_earlier: int) -> list[Body]:
    """Returns the messages of items for a template; errors count them from those after the first `num_earlier`."""
    messages: list[Body] = []
    calls: set[str] = set()
    for i, item in enumerate(items, start=-num_earlier):
        name = f"input[{i}]"
        if isinstance(kind := item["type"], str) and kind in known_fields.ITEMS:
            known_fields.say_unknown(item, known_fields.ITEMS[kind], name, "input")
            known_fields.refuse(item, OF_CALLS, f"{name}.")
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
                call_id = fields.text(f"{name}.call_id", item.get("call_id"))
                if call_id not in calls:
                    raise fields.refused(f"{name}.call_id", call_id, "that of an earlier function_call")
                content = _content(f"{name}.output", item.get("output"), "input_text")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case other:
                accepted = "message, function_call or function_call_output: other items are not supported"
                raise fields.refused(f"{name}.type", other, accepted)
    return messages


ROLES = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}


def _message(name: str, item: Body) -> Body:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise fields.refused(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    return {"role": protocol.ROLES[role], "content": _content(f"{name}.content", item.get("content"), ROLES[role])}


def _content(name: str, content: Any, kind: str) -> str | list[Body]:
    """Returns a text, or its parts in the form of a chat if it is given in parts of this type."""
    if not isinstance(content, list):
        return fields.text(name, content)
    parts = []
    for i, part in enumerate(content):
        part_kind = part.get("type") if isinstance(part, dict) else part
        if part_kind != kind:
            accepted = f"{kind}, as the model reads text alone"
            raise fields.refused(f"{name}[{i}].type", part_kind, accepted)
        parts.append({"type": "text", "text": fields.text(f"{name}[{i}].text", part.get("text"))})
    return parts


def _call(name: str, item: Body) -> Body:
    """Returns a call in the form of a chat."""
    arguments = tools_lib.read_arguments(f"{name}.arguments", item.get("arguments"))
    function = {"name": fields.text(f"{name}.name", item.get("name")), "arguments": arguments}
    return {"id": fields.text(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}


def _tools(tools: Any) -> list[Body] | None:
    """Returns tools in the form of a chat."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise fields.refused("tools", tools, "a list of functions")
    of_chat = []
    for i, tool in enumerate(tools):
        match tool:
            case {"type": "function", "name": str(name)} if tools_lib.NAME.fullmatch(name):
                known_fields.refuse(tool, OF_TOOLS, f"tools[{i}].")
                function = {key: value for key, value in tool.items() if key != "type" and value is not None}
                of_chat.append({"type": "function", "function": function})
            case _:
                accepted = 'a function {"type": "function", "name": ..., "parameters": ...}; the server runs no tools'
                raise fields.refused(f"tools[{i}]", tool, accepted)
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


def _shown_choice(choice: Any) -> Any:
    """Returns a choice of tools as the response shows it, with what it leaves out."""
    match choice:
        case None:
            return tools_lib.AUTO
        case {"type": "allowed_tools"}:
            return {"mode": tools_lib.AUTO} | choice
    return choice


def _shown(body: Body, max_top: int) -> ResponseFields:
    """Returns the facts that a body asks for: log-probabilities, with at most so many alternatives."""
    include, top = body.get("include") or [], response_fields.alternatives(body, "top_logprobs", max_top)
    if not isinstance(include, list) or not all(isinstance(name, str) and name in INCLUDED for name in include):
        raise fields.refused("include", include, f"a list of {' and '.join(sorted(INCLUDED))}")
    return ResponseFields(top=top or 0) if LOGPROBS in include or top else ResponseFields()


def new_id(kind: str) -> str:
    """Returns an id that nobody can guess."""
    return f"{kind}_{secrets.token_hex(16)}"
