"""Tools, earlier calls and their results as other messages, for chat templates that do not show them."""

from collections.abc import Sequence

from jlade.generation.chat_template import RESULT, SYSTEM, USER, Message, as_text
from jlade.server.call_formats import Form


def introduced(messages: Sequence[Message], text: str, shows_system: bool) -> Sequence[Message]:
    """Returns a conversation after a text: as a system message, or at the beginning of the first question."""
    if shows_system:
        return [{"role": SYSTEM, "content": text}, *messages]
    first = next((i for i, message in enumerate(messages) if message["role"] == USER), None)
    if first is None:
        return [{"role": USER, "content": text}, *messages]
    question = {**messages[first], "content": f"{text}\n\n{as_text(messages[first]['content'])}"}
    return [*messages[:first], question, *messages[first + 1 :]]


def with_calls_as_content(messages: Sequence[Message], form: Form) -> Sequence[Message]:
    """Returns a conversation whose calls are written in a form after the content of their messages."""
    return [_as_content(message, form) if message.get("tool_calls") else message for message in messages]


def _as_content(message: Message, form: Form) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    text = form.written([(function["name"], form.arguments(function["arguments"])) for function in functions])
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": as_text(message["content"]) + text}


def with_results_as_questions(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns a conversation whose results of calls are the user's, those that follow each other in one message."""
    found, was_result = list[Message](), False
    for message in messages:
        is_result = message["role"] == RESULT
        text = as_text(message["content"])
        if is_result:
            message = {"role": USER, "content": f"<tool_response>\n{text}\n</tool_response>"}
        if found and message["role"] == found[-1]["role"] == USER and (is_result or was_result):
            message = {"role": USER, "content": f"{as_text(found.pop()['content'])}\n{as_text(message['content'])}"}
        found.append(message)
        was_result = is_result
    return found
