"""The items of `/v1/responses` as the messages of a chat."""

from collections.abc import Sequence
from typing import Any

from jlade.server import kinds, protocol
from jlade.server import tools as tools_lib
from jlade.server.body_fields import PART
from jlade.server.fields import Body, refused
from jlade.server.kinds import Nested, Table, names, only
from jlade.server.responses.store import Store
from jlade.server.responses.tools import INPUT, LEFT_OUT, function_name

OF_CALLS: Table = {"async": only(False), "caller": only({"type": "direct"})}  # which are not supported
_OF_ITEMS = ("id", "status", "type")
_OF_CALLS = (*_OF_ITEMS, "async", "call_id", "caller", "name", "namespace")
_TEXTS = Nested(names("text", "type"))
ITEMS = {
    "message": names(*_OF_ITEMS, "phase", "role", content=Nested(PART | names("annotations", "logprobs"))),
    "function_call": names(*_OF_CALLS, "arguments"),
    "function_call_output": names(*_OF_CALLS, output=Nested(PART)),
    "custom_tool_call": names(*_OF_CALLS, "input"),
    "custom_tool_call_output": names(*_OF_CALLS, output=Nested(PART)),
    "reasoning": names(*_OF_ITEMS, "encrypted_content", content=_TEXTS, summary=_TEXTS),
}
# Items of tools that OpenAI's servers run.
OF_HOSTED = frozenset(
    (
        "code_interpreter_call", "computer_call", "computer_call_output", "file_search_call", "image_generation_call",
        "local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
        "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call",
    )
)  # fmt: skip
REFERENCE = "item_reference"
ROLES = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
ROLE = kinds.one_of(*ROLES)


def read(items: Any, store: Store) -> list[Body]:
    """Returns the items of `input`, each an object with its type; references become the items that they name."""
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": kinds.text("input", items)}]
    if not isinstance(items, list) or not items:
        raise refused("input", items, "a string, or a list of at least one item")
    return [_item(f"input[{i}]", item, store) for i, item in enumerate(items)]


def _item(name: str, item: Any, store: Store) -> Body:
    if not isinstance(item, dict):
        raise refused(name, item, "an item: an object with its type")
    if item.get("type") != REFERENCE:
        return {"type": "message"} | item
    found = store.find_item(kinds.text(f"{name}.id", item.get("id")))
    if found is None:
        raise refused(f"{name}.id", item["id"], "that of an item of a stored response")
    return found


def messages(items: Sequence[Body], num_earlier: int) -> list[Body]:
    """Returns the messages of items for a template; errors count them from those after the first `num_earlier`."""
    found: list[Body] = []
    calls: set[str] = set()
    thoughts: list[str] = []  # before the next message or call
    for i, item in enumerate(items, start=-num_earlier):
        name = f"input[{i}]"
        if isinstance(kind := item["type"], str) and kind in ITEMS:
            kinds.log_unknown(item, ITEMS[kind], name, "input")
            kinds.values(item, OF_CALLS, f"{name}.")
        match kind:
            case "message":
                found.append(_message(name, item))
            case "reasoning":
                thoughts += _thoughts(name, item)
                continue
            case "function_call" | "custom_tool_call":
                call = _call(name, item)
                calls.add(call["id"])
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": ""})
                found[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                call_id = kinds.text(f"{name}.call_id", item.get("call_id"))
                if call_id not in calls:
                    raise refused(f"{name}.call_id", call_id, "that of an earlier call")
                content = _content(f"{name}.output", item.get("output"), "input_text")
                found.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case str() if kind in OF_HOSTED:
                kinds.warn_once(LEFT_OUT, "items", kind)
                continue
            case other:
                accepted = f"{', '.join(ITEMS)} or {REFERENCE}: other items are not supported"
                raise refused(f"{name}.type", other, accepted)
        if thoughts and (last := found[-1])["role"] == "assistant":
            last[protocol.THOUGHTS[0]] = "\n".join([*filter(None, [last.get(protocol.THOUGHTS[0])]), *thoughts])
        thoughts = []
    return found


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


def _thoughts(name: str, item: Body) -> list[str]:
    """Returns the text of an item of reasoning, in a list; none where it is encrypted or empty."""
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if parts := item.get(field):
            texts = _content(f"{name}.{field}", parts, kind)
            text = texts if isinstance(texts, str) else "".join(part["text"] for part in texts)
            if text:
                return [text]
    return []


def _call(name: str, item: Body) -> Body:
    """Returns a call in the form of a chat."""
    if item["type"] == "custom_tool_call":
        arguments: Body = {INPUT: kinds.text(f"{name}.input", item.get("input"))}
    else:
        arguments = tools_lib.read_arguments(f"{name}.arguments", item.get("arguments"))
    namespace = None if item.get("namespace") is None else kinds.text(f"{name}.namespace", item["namespace"])
    called = function_name(kinds.text(f"{name}.name", item.get("name")), namespace)
    function = {"name": called, "arguments": arguments}
    return {"id": kinds.text(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}
