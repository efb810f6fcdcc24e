"""A proxy between a program and the server, which asks for calls of harmless tools and records the exchanges.

A small model seldom calls a tool when it should, and never stops when it should. So the proxy sets one field,
`tool_choice`: first to harmless tools, one after the other, then to none.
"""

import contextlib
import http.client
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_HOP_BY_HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding"}
_PATHS = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Exchange(NamedTuple):
    """A request as the program sent it, the tool that the proxy made the model call, and the answer."""

    request: Any
    tool: str | None  # None where it left the request as it was, or allowed no call
    status: int
    answer: bytearray  # grows as the answer comes


class Proxy(http.server.ThreadingHTTPServer):
    """A proxy at `port` of this machine for the server at `server_port`, in a thread of its own.

    Answers to the first requests that offer `tools` have to be calls of them, in their order; later ones are texts.
    """

    daemon_threads = True

    def __init__(self, port: int, server_port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.passed_to = server_port
        self.begin(())
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def begin(self, tools: Sequence[str], ends_with_call: bool = False) -> None:
        """Forgets the exchanges, and has `tools` called in the next turn, which may end with the last one's call."""
        self.tools, self.ends_with_call = tools, ends_with_call
        self.waiting = list(tools)
        self.exchanges: list[Exchange] = []

    def next_tool(self, request: Any) -> str | None:
        """Returns the tool that the answer to a request has to call, None if it offers none that waits."""
        offered = {tool.get("function", tool).get("name") for tool in request.get("tools") or []}
        return self.waiting.pop(0) if self.waiting and self.waiting[0] in offered else None

    def features(self) -> dict[str, str]:
        """Returns how the calls of `tools` went in the exchanges: the call, its result, and the answer after all."""
        features = {}
        answered = self.exchanges
        for tool in self.tools:
            forced = [exchange for exchange in self.exchanges if exchange.tool == tool]
            calls = {id for exchange in forced for id, name in _calls(_read(exchange.answer)) if name == tool}
            answered = [exchange for exchange in self.exchanges if calls & set(_results(exchange.request))]
            missing = f"failed: {[exchange.status for exchange in forced] or 'no request offers it'}"
            features[f"call of {tool}"] = "ok" if calls else missing
            if tool != self.tools[-1] or not self.ends_with_call:
                features[f"result of {tool}"] = "ok" if answered else "failed: no request has it"
        if self.tools and not self.ends_with_call:
            ended = any(_ends(_read(exchange.answer)) for exchange in answered if exchange.status == 200)
            features["answer after it"] = "ok" if ended else f"failed: {[exchange.status for exchange in answered]}"
        return features


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        request = json.loads(body) if body else {}
        path = self.path.partition("?")[0]
        tool = self.server.next_tool(request) if path in _PATHS else None
        if path in _PATHS and request.get("tools") and self.server.tools:
            body = json.dumps({**request, "tool_choice": _choice(path, tool)}).encode()
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.passed_to)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, headers)
            self._pass_back(request, tool, connection.getresponse())

    do_GET = do_HEAD = do_POST  # noqa: N815 - http.server's names

    def _pass_back(self, request: Any, tool: str | None, response: http.client.HTTPResponse) -> None:
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.end_headers()
        exchange = Exchange(request, tool, response.status, bytearray())
        self.server.exchanges.append(exchange)
        while piece := response.read1():
            exchange.answer.extend(piece)
            self.wfile.write(piece)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing."""


def _choice(path: str, tool: str | None) -> Any:
    """Returns the value of `tool_choice` for a call of a tool, or for none, in the form of the interface at a path."""
    if path == "/v1/messages":
        return {"type": "tool", "name": tool} if tool else {"type": "none"}
    if tool is None:
        return "none"
    return {"type": "function", "function": {"name": tool}} if "chat" in path else {"type": "function", "name": tool}


def _read(answer: bytearray) -> list[Any]:
    """Returns the values of JSON in an answer: the data of a stream's events, or one value."""
    text = answer.decode()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines or [text] if line.startswith("{")]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yields the objects in a value of JSON, at any depth."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(part)


def _calls(value: Any) -> Iterator[tuple[str, str]]:
    """Yields the id and the name of each call in a value of JSON, in the form of any of the interfaces."""
    for part in _objects(value):
        if part.get("type") == "function_call":
            yield part["call_id"], part["name"]
        elif part.get("type") == "tool_use":
            yield part["id"], part["name"]
        elif part.get("type") == "function" and "id" in part:
            yield part["id"], part["function"]["name"]


def _results(value: Any) -> Iterator[str]:
    """Yields the id of the call of each result in a value of JSON, in the form of any of the interfaces."""
    for part in _objects(value):
        if part.get("type") == "function_call_output":
            yield part["call_id"]
        elif part.get("type") == "tool_result":
            yield part["tool_use_id"]
        elif part.get("role") == "tool":
            yield part["tool_call_id"]


def _ends(answer: list[Any]) -> bool:
    """Returns whether an answer ends as its interface demands, rather than with an error or in its middle."""
    parts = list(_objects(answer))
    reasons = [part for part in parts if part.get("finish_reason") or part.get("stop_reason")]
    statuses = [part.get("status") for part in parts if part.get("object") == "response"]
    return bool(reasons) or bool({"completed", "incomplete"} & set(statuses))
