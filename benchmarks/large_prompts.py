"""Requests of megabytes beside a running stream: how soon they are answered, and how long the stream pauses.

    python benchmarks/large_prompts.py --json results.json

It starts `jlade serve` and reads a stream. Meanwhile it sends bodies of about 4 MB, of each kind --repeat times: too
long prompts, conversations and predictions, which are refused, and bodies that take long to parse. A prompt that is as
long as one may be before it is tokenized comes last, once with a short request behind it and once from a client that
goes away.
"""

import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

from benchmarks import report
from jlade.server.guard import MAX_BYTES

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
SIZE = MAX_BYTES - 1000


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeat", type=int, default=5, metavar="N")
    options = parser.parse_args()
    command = [sys.executable, "-m", "jlade", "serve", *([] if options.model == "demo" else [options.model])]
    with subprocess.Popen([*command, "--port", "0", "--warm-up"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        result = measure(url, longest_token(options.model), options.repeat)
        server.send_signal(signal.SIGTERM)
        begin = time.perf_counter()
        server.wait(60)
        result["seconds to end"] = time.perf_counter() - begin
    print(json.dumps(result, indent=1))
    report.write(options.json, vars(options) | result)


def longest_token(model: str) -> int:
    """Returns the characters of the longest token."""
    return max(map(len, report.load(model)[1].get_vocab()))


def measure(url: str, longest: int, repeat: int) -> dict[str, Any]:
    """Returns the seconds of requests and the pauses of the stream, by kinds of bodies."""
    capacity = json.loads(ask(url, "/v1/models", b"")[1])["data"][0]["max_model_len"]
    with streaming(url, capacity - 10) as pauses:
        pauses.longest(3)
        result: dict[str, Any] = {"longest token": longest, "capacity": capacity, "alone": pauses.longest(3)}
        for kind, (path, body, expected) in bodies().items():
            for number in range(repeat):
                begin = time.perf_counter()
                status, answer = ask(url, path, body)
                seconds, pause = time.perf_counter() - begin, pauses.longest(0.5)
                assert status == expected, (kind, status, answer[:500])
                known = result.setdefault(kind, {"status": status, "seconds": 0.0, "pause": 0.0})
                known["seconds"], known["pause"] = max(known["seconds"], seconds), max(known["pause"], pause)
                print(kind, number, f"{seconds:.3f} s, pause {pause:.3f} s", file=sys.stderr)
        result["the longest to be tokenized"] = tokenized(url, pauses, "word " * (longest * capacity // 5))
    return result


def bodies() -> dict[str, tuple[str, bytes, int]]:
    """Returns paths and bodies of about 4 MB, and the status of their responses."""
    text = "def f(x): return x + 1\n" * (SIZE // 25)
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * (SIZE // 100)
    prediction = {"type": "content", "content": text}

    def dumped(**body: Any) -> bytes:
        return json.dumps(body).encode()[:MAX_BYTES]

    def repeated(part: bytes) -> bytes:
        return b'{"prompt": [' + part * (SIZE // len(part)) + b"1]}"

    return {
        "prompt": (COMPLETIONS, dumped(prompt=text), 400),
        "prompt of one letter": (COMPLETIONS, dumped(prompt="a" * SIZE), 400),
        "prompt of spaces": (COMPLETIONS, dumped(prompt=" " * SIZE), 400),
        "conversation": (CHAT, dumped(messages=[{"role": "user", "content": text}]), 400),
        "conversation of many turns": (CHAT, dumped(messages=turns), 400),
        "tokenize": (TOKENIZE, dumped(prompt=text), 400),
        "prediction": (COMPLETIONS, dumped(prompt="x", prediction=prediction), 400),
        "token ids": (COMPLETIONS, repeated(b"123,"), 400),
        "many prompts": (COMPLETIONS, repeated(b'"ab",'), 400),
        "empty lists": (COMPLETIONS, repeated(b"[],"), 400),
        "empty objects": (COMPLETIONS, repeated(b"{},"), 400),
        "numbers": (COMPLETIONS, repeated(b"1.5,"), 400),
    }


def tokenized(url: str, pauses: "Pauses", text: str) -> dict[str, Any]:
    """Returns the seconds of a prompt that is tokenized, of a short one behind it, and those that a client costs."""
    body, short = json.dumps({"prompt": text}).encode(), json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    begin = time.perf_counter()
    status, _ = ask(url, COMPLETIONS, body)
    result: dict[str, Any] = {"characters": len(text), "status": status, "seconds": time.perf_counter() - begin}
    result["pause"] = pauses.longest(0.5)
    long = threading.Thread(target=ask, args=(url, COMPLETIONS, body))
    long.start()
    time.sleep(0.05)
    begin = time.perf_counter()
    assert ask(url, COMPLETIONS, short)[0] == 200
    result["seconds of a short request behind it"] = time.perf_counter() - begin
    long.join()
    for _ in range(20):  # clients that go away
        send(url, COMPLETIONS, body).close()
    begin = time.perf_counter()
    ask(url, COMPLETIONS, body)
    result["seconds behind twenty clients that went away"] = time.perf_counter() - begin
    return result


def send(url: str, path: str, body: bytes) -> socket.socket:
    """Returns the connection of a request that is sent; one with an empty body is a GET."""
    address = urllib.parse.urlsplit(url)
    head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    with contextlib.suppress(ConnectionError):  # the server may have answered before the end
        connection.sendall(head.encode() + body)
    return connection


def ask(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Returns the status and the body of a response."""
    with send(url, path, body) as connection:
        data = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, rest = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


class Pauses:
    """The times between the events of a stream."""

    def __init__(self) -> None:
        self.last, self._most = time.perf_counter(), 0.0

    def add(self) -> None:
        """Notes an event."""
        now = time.perf_counter()
        self._most, self.last = max(self._most, now - self.last), now

    def longest(self, seconds: float) -> float:
        """Returns the longest time since the last call, after so many seconds more."""
        time.sleep(seconds)
        most, self._most = self._most, 0.0
        return most


@contextlib.contextmanager
def streaming(url: str, number: int) -> Iterator[Pauses]:
    """Reads streams of that many tokens, one after the other."""
    pauses, ended = Pauses(), threading.Event()
    options = {"prompt": "x", "max_tokens": number, "ignore_eos": True, "stream": True, "temperature": 1}

    def read() -> None:
        while not ended.is_set():
            with send(url, COMPLETIONS, json.dumps(options).encode()) as connection:
                connection.recv(2**16)
                pauses.last = time.perf_counter()
                while not ended.is_set() and connection.recv(2**16):
                    pauses.add()

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield pauses
    finally:
        ended.set()
        reading.join()


if __name__ == "__main__":
    main()
