"""Conversations to tokens, by the chat template of a checkpoint."""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple, cast

from jlade.conversion import formats
from jlade.errors import errors_of
from jlade.generation import text

SECONDS = 4  # of a conversation; templates take milliseconds
WORKER = pathlib.Path(__file__).with_name("template_worker.py")
# With the keys "role" and "content": a text, or a list of parts {"type": "text", "text": ...}.
Message = Mapping[str, Any]

# Of the conversations with which templates are tried.
SYSTEM, USER, ASSISTANT, RESULT = "system", "user", "assistant", "tool"
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "tool", "description": "-", "parameters": PARAMETERS}}
ID, NAME, KEY = "000000000", "probed_call", "probed_argument"
CALL = {"id": ID, "type": "function", "function": {"name": NAME, "arguments": {KEY: "-"}}}
PROBED_QUESTION = {"role": USER, "content": "probed question"}
PROBED_RESULT = {"role": RESULT, "content": "probed result", "name": NAME, "tool_call_id": ID}
CALLED: list[Message] = [PROBED_QUESTION, {"role": ASSISTANT, "content": "", "tool_calls": [CALL]}]


class EndedError(ValueError):
    """A conversation took more time or memory than it may, and its process is ended."""


class CallStyle(NamedTuple):
    """How a template takes earlier calls.

    Attributes:
      arguments_as_text: whether their arguments are JSON in a text, and no object.
      empty_as_none: whether the content beside them is None if it is empty.
    """

    arguments_as_text: bool
    empty_as_none: bool

    def of(self, message: Message) -> Message:
        """Returns a message whose calls have objects as arguments so that the template takes it."""
        if not message.get("tool_calls"):
            return message
        calls = message["tool_calls"]
        if self.arguments_as_text:
            calls = [{**call, "function": _with_text(call["function"])} for call in calls]
        content = None if self.empty_as_none and not message["content"] else message["content"]
        return {**message, "content": content, "tool_calls": calls}


def _with_text(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


STYLES = [CallStyle(*style) for style in itertools.product((False, True), repeat=2)]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the tokenizer for the text that it makes of a conversation.

    Attributes:
      tokenizer: of transformers, as `load_tokenizer` returns it.
      template: a Jinja template to use instead of the tokenizer's own, or the name of one of these.
    """

    tokenizer: Any
    template: str | None = None

    def source(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the Jinja template of conversations with some tools, or without.

        Raises:
          ValueError: there is none.
        """
        with errors_of("the chat template cannot be chosen"):
            chosen: str = self.tokenizer.get_chat_template(self.template, tools)
        return chosen

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation, by default up to the beginning of the next answer.

        With tools the tokenizer's template of the name "tool_use" is used, if it has one, as in transformers.
        Templates that show parts of contents alone get these, and others texts. Calls are written as the template takes
        them. Where it would not show each of several system messages, they become one at the beginning, with blank
        lines between them.

        Args:
          messages: with the keys "role" and "content", and "tool_calls" whose arguments are objects.
          add_generation_prompt: whether the next answer begins.
          continue_final_message: whether the text ends within the last message, as transformers does it.
          tools: functions that the answer may call, in OpenAI's form.
          variables: others that the template may use.

        Raises:
          ValueError: when the template raises an error, or takes too long or too much memory.
        """
        chosen = self.source(tools)
        in_parts = not self.shows((USER,), tools) and self.shows((USER,), tools, in_parts=True)
        together = _one_system(messages, functools.partial(self.shows, tools=tools, in_parts=in_parts))
        conversation: list[Message] = [
            {**message, "content": _content(message["content"], in_parts)} for message in together
        ]
        if any(message.get("tool_calls") for message in conversation):
            style = self.call_style(tools) or STYLES[0]
            conversation = [style.of(message) for message in conversation]
        rendered = _renderer.render(
            conversations=[conversation],
            chat_template=chosen,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else list(tools),
            **{**self.tokenizer.special_tokens_map, **_of_functions(tools), **(variables or {})},
        )
        text.check_utf8("the chat template", "must make", rendered)
        return rendered

    def shows(
        self, roles: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None, in_parts: bool = False
    ) -> bool:
        """Returns whether the content of each message of a conversation between these roles is shown.

        Args:
          roles: of the messages.
          tools: those of the conversation, of which it matters only whether there are any.
          in_parts: whether the contents are lists of parts.

        Raises:
          EndedError: the template takes too long or too much memory.
        """
        texts = [f"probe{letter}" for letter in string.ascii_lowercase[: len(roles)]]
        messages = [
            {"role": role, "content": _content(each, in_parts)} for role, each in zip(roles, texts, strict=True)
        ]
        rendered = self._tried(messages, tools)
        return all(each in rendered for each in texts)

    def call_style(self, tools: Sequence[Mapping[str, Any]] | None = None) -> CallStyle | None:
        """Returns how earlier calls are shown, None if they are not; `tools` and errors are those of `shows`."""
        for style in STYLES:
            called = [style.of(message) for message in CALLED]
            for after in PROBED_RESULT, PROBED_QUESTION:  # since results may be refused
                rendered = self._tried([*called, after], tools)
                if NAME in rendered and KEY in rendered:
                    return style
        return None

    def shows_results(self, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Returns whether results of calls are shown; `tools` and errors are those of `shows`."""
        style = self.call_style(tools) or STYLES[0]
        return PROBED_RESULT["content"] in self._tried([*map(style.of, CALLED), PROBED_RESULT], tools)

    def _tried(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Returns the text of a conversation, with a tool of ours for `tools`; "" if the template refuses it."""
        special = json.dumps(self.tokenizer.special_tokens_map)
        return _tried(self.source(tools), special, tools is not None, json.dumps(messages))

    def encode(self, rendered: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of the text of a conversation, by default with no special tokens but the template's."""
        with errors_of("tokenizer cannot encode the conversation"):
            ids: list[int] = self.tokenizer(rendered, add_special_tokens=add_special_tokens)["input_ids"]
        return ids


def _of_functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """Returns the variables of templates that take functions as a text, and the date."""
    functions = json.dumps([tool["function"] for tool in tools or ()], indent=4)
    return {"functions": functions, "datetime": time.strftime("%Y-%m-%d")}


def _content(content: Any, in_parts: bool) -> Any:
    """Returns the content of a message as a list of parts, or as a text."""
    if not in_parts:
        return as_text(content)
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_text(content: Any) -> Any:
    """Returns the content of a message, a text or a list of parts, as a text; what is neither as it is."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _one_system(messages: Sequence[Message], shows: Callable[[tuple[str, ...]], bool]) -> Sequence[Message]:
    """Returns a conversation with all system messages in one at the beginning, if the template would not show each.

    `shows` says whether the template shows the contents of messages of these roles.
    """
    systems = [message for message in messages if message["role"] == SYSTEM]
    others = [message for message in messages if message["role"] != SYSTEM]
    num_first = next((i for i, message in enumerate(messages) if message["role"] != SYSTEM), len(messages))
    are_shown = num_first < 2 or shows((SYSTEM, SYSTEM, USER))
    if num_first < len(systems):
        are_shown = are_shown and shows((SYSTEM, USER, ASSISTANT, SYSTEM, USER))
    if are_shown or not shows((SYSTEM, USER)):
        return messages
    joined = "\n\n".join(as_text(message["content"]) for message in systems)
    return [{**systems[0], "content": joined}, *others]


@functools.lru_cache(maxsize=1024)
def _tried(template: str, special: str, has_tools: bool, messages: str) -> str:
    """Returns what a Jinja template makes of messages in JSON, "" if it refuses them.

    `special` has the names of special tokens, in JSON. There may be a tool.

    Raises:
      EndedError: the template takes too long or too much memory.
    """
    try:
        return _renderer.render(
            conversations=[json.loads(messages)],
            chat_template=template,
            add_generation_prompt=True,
            tools=[TOOL] if has_tools else None,
            **json.loads(special),
            **_of_functions([TOOL] if has_tools else None),
        )
    except EndedError:
        raise
    except ValueError:
        return ""


def encode(
    tokenizer: Any, messages: Sequence[Message], template: str | None = None, continue_final_message: bool = False
) -> list[int]:
    """Returns the token ids of a conversation, up to the beginning of the next answer or within its last message.

    Raises:
      ValueError: as `ChatTemplate.render` does.
    """
    chat = ChatTemplate(tokenizer, template)
    return chat.encode(chat.render(messages, not continue_final_message, continue_final_message))


def load_tokenizer(path: pathlib.Path) -> Any:
    """Returns the tokenizer of transformers for a checkpoint, with its chat template; see `Checkpoint`."""
    return formats.find(path).chat_tokenizer()


class Renderer:
    """The process that renders templates. It starts with the first conversation, and anew after one that ended it.

    Starting takes half a second, a conversation then less than a millisecond; one of more than `seconds` ends it.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.end)

    def render(self, **question: Any) -> str:
        """Returns the text for arguments of `render_jinja_template`. Errors are those of `encode`."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            process = self._start()
            pipe_in, pipe_out = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            try:
                with contextlib.suppress(BrokenPipeError):
                    pipe_in.write(line)
                    pipe_in.flush()
                answer = pipe_out.readline()
            except BaseException:  # an interrupt; the answer would be that to the next question
                self.end()
                raise
            if not answer:
                self.end()
                raise EndedError(
                    f"the chat template takes more than {self._seconds} seconds for the conversation, or "
                    "more memory than it may have"
                )
        known: dict[str, str] = json.loads(answer)
        if "error" in known:
            raise ValueError(f"the chat template refuses the conversation: {known['error']}")
        return known["text"]

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.end()
        # Without -P the directory of the program would hide modules of the standard library.
        command = [sys.executable, "-P", str(WORKER), str(self._seconds)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if cast(IO[bytes], self._process.stdout).readline() != b"\n":
            self.end()
            raise RuntimeError(f"the process that renders chat templates did not start: {' '.join(command)}")
        return self._process

    def end(self) -> None:
        """Ends the process, until the next conversation."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes the pipes and waits
                self._process = None


_renderer = Renderer()
