"""Bodies of `/v1/messages`, read into chats: their blocks become conversations."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jlade.server import kinds, structured
from jlade.server import tools as tools_lib
from jlade.server.body_fields import CUSTOM_TOOL
from jlade.server.fields import Body, RequestError, refused
from jlade.server.protocol import OF_ENGINE, THOUGHTS, BodyReader, Completion
from jlade.server.tools import Tools

# Types of blocks by the role of their message.
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
ROLE = kinds.one_of(*BLOCKS)
BILLING = "x-anthropic-billing-header"  # begins a block of Claude Code's, which differs in each request
CHOICES = {"auto": tools_lib.AUTO, "any": "required", "none": tools_lib.NO_TOOLS}  # in the form of a chat
ONE_ONLY = "tool_choice.disable_parallel_tool_use"
OF_ANTHROPIC = re.compile(r"[a-z0-9_]{1,64}_\d{8}|mcp_toolset")  # types of tools that its service or models know


@dataclasses.dataclass(frozen=True)
class MessageCompletion(Completion):
    """The message that a body asks for.

    Attributes:
      stop_sequences: the body's own.
    """

    stop_sequences: Sequence[str]
    names = OF_ENGINE | {"stop": "stop_sequences"}

    def max_new_tokens(self, prompt: Sequence[int], capacity: int) -> int:
        """Returns the most new tokens after a prompt: those asked for, or as many as fit."""
        that_fit = Completion.max_new_tokens(dataclasses.replace(self, limit=None), prompt, capacity)
        return min(self.limit or that_fit, that_fit)


def read(reader: BodyReader, body: Body) -> MessageCompletion:
    """Reads a body of `/v1/messages`, which becomes a chat for `reader`."""
    values = kinds.read(body, reader.tables.message)
    values["max_tokens"] = reader.tables.message["max_tokens"]("max_tokens", body.get("max_tokens"))
    messages, chosen = _messages(values), _tools(values)
    if messages[-1]["role"] == "assistant":
        raise RequestError("messages must not end with one of the assistant, whose text is not continued", "messages")
    of_chat, stop_sequences = dict(values), values.get("stop_sequences", [])
    if stop_sequences:
        of_chat["stop"] = stop_sequences
    formats = (values.get("output_config", {}).get("format"), values.get("output_format"))
    of_chat |= {name: make for name, make in zip(structured.OUTPUT_FORMATS, formats, strict=True) if make is not None}
    prompt = reader.conversation("messages", messages, chosen, variables=_variables(reader, values))
    completion = reader.of_chat(of_chat, prompt, chosen, "messages")
    return MessageCompletion(**vars(completion), stop_sequences=stop_sequences)


def count(reader: BodyReader, body: Body) -> Body:
    """Reads a body of `/v1/messages/count_tokens`, and returns that of its response."""
    values = kinds.read(body, reader.tables.message)
    variables = _variables(reader, values)
    return {
        "input_tokens": len(reader.conversation("messages", _messages(values), _tools(values), variables=variables))
    }


def _variables(reader: BodyReader, values: Body) -> Body:
    """Returns the variables of the chat template: whether the model thinks, and how much."""
    as_chat: Body = {}
    if kind := values.get("thinking", {}).get("type"):
        as_chat["enable_thinking"] = kind != "disabled"
    if effort := values.get("output_config", {}).get("effort"):
        as_chat["reasoning_effort"] = effort
    return reader.variables(as_chat)


def _messages(values: Body) -> list[Body]:
    """Returns the messages for a template. Those of one role in a row are one, as if all blocks were in the first."""
    messages: list[Body] = []
    calls: set[str] = set()

    def of_role(role: str) -> Body:
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        return messages[-1]

    for role, path, block in _blocks(values):
        match block["type"]:
            case "text":
                text = kinds.text(f"{path}.text", block.get("text"))
                if not text.startswith(BILLING):
                    of_role(role)["content"].append({"type": "text", "text": text})
            case "thinking":
                thought = kinds.text(f"{path}.thinking", block.get("thinking"))
                message = of_role(role)
                message[THOUGHTS[0]] = message.get(THOUGHTS[0], "") + thought
            case "tool_use":
                call = _call(path, block)
                calls.add(call["id"])
                of_role(role).setdefault("tool_calls", []).append(call)
            case "tool_result":
                call_id = kinds.text(f"{path}.tool_use_id", block.get("tool_use_id"))
                if call_id not in calls:
                    raise refused(f"{path}.tool_use_id", call_id, "that of an earlier tool_use")
                parts = kinds.parts(f"{path}.content", block.get("content") or "")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": parts})
    if not messages:
        raise refused("messages", values.get("messages"), "a list of at least one message with a text")
    return messages


def _blocks(values: Body) -> Iterator[tuple[str, str, Body]]:
    """Yields the blocks of a conversation, each with the role of its message and its path."""
    written = values.get("messages")
    if not isinstance(written, list) or not written:
        raise refused("messages", written, "a list of at least one message")
    system = [("system", "system", values["system"])] if "system" in values else []
    for role, path, content in system + [_message(f"messages[{i}]", message) for i, message in enumerate(written)]:
        if not isinstance(content, list):
            content = [{"type": "text", "text": kinds.text(path, content)}]
        for i, block in enumerate(content):
            kind = kinds.any_object(f"{path}[{i}]", block).get("type")
            if kind not in BLOCKS[role]:
                accepted = f"{' or '.join(BLOCKS[role])} in a message of this role, as the model reads text alone"
                raise refused(f"{path}[{i}].type", kind, accepted)
            yield role, f"{path}[{i}]", block


def _message(path: str, message: Any) -> tuple[str, str, Any]:
    """Returns the role, and the path and the value of the content."""
    kinds.any_object(path, message)
    role: str = ROLE(f"{path}.role", message.get("role"))
    return role, f"{path}.content", message.get("content")


def _call(path: str, block: Body) -> Body:
    """Returns a call in the form of a chat."""
    arguments = kinds.any_object(f"{path}.input", block.get("input"))
    function = {"name": kinds.text(f"{path}.name", block.get("name")), "arguments": arguments}
    return {"id": kinds.text(f"{path}.id", block.get("id")), "type": "function", "function": function}


def _tools(values: Body) -> Tools | None:
    """Returns the tools of a body, without those of Anthropic's own."""
    written, choice = values.get("tools", []), values.get("tool_choice", {"type": "auto"})
    if not isinstance(written, list):
        raise refused("tools", written, "a list of tools")
    read = {f"tools[{i}]": _tool(f"tools[{i}]", tool) for i, tool in enumerate(written)}
    tools = {path: of_chat for path, of_chat in read.items() if of_chat is not None}
    one_only = kinds.any_object("tool_choice", choice).get("disable_parallel_tool_use")
    parallel = {} if one_only is None else {"parallel_tool_calls": not kinds.boolean(ONE_ONLY, one_only)}
    match choice:
        case {"type": "auto" | "any" | "none" as kind}:
            as_chat: Any = CHOICES[kind]
        case {"type": "tool", "name": name} if name in [tool["function"]["name"] for tool in tools.values()]:
            as_chat = {"type": "function", "function": {"name": name}}
        case _:
            accepted = 'an object with the type auto, any, none, or tool and the name of one in "tools"'
            raise refused("tool_choice", choice, accepted)
    of_chat = {"tools": [*tools.values()], "tool_choice": as_chat} | parallel
    return tools_lib.read(of_chat, within="", paths=[*tools], schemas=[f"{path}.input_schema" for path in tools])


def _tool(path: str, tool: Any) -> Body | None:
    """Returns a tool in the form of a chat, None for one that is left out."""
    kind = kinds.any_object(path, tool).get("type") or "custom"
    if isinstance(kind, str) and OF_ANTHROPIC.fullmatch(kind):
        kinds.warn_once("tools of the type %s are left out: neither the model nor the server knows them", kind)
        return None
    if kind != "custom":
        raise refused(f"{path}.type", kind, "custom, or that of a tool of Anthropic's own")
    kinds.values(tool, CUSTOM_TOOL, f"{path}.")
    schema = tool.get("input_schema")
    if not tools_lib.is_of_object(schema):
        raise refused(f"{path}.input_schema", schema, "the JSON schema of an object")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": schema}}
