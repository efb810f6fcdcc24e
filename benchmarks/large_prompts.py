"""Requests of megabytes beside a running stream: how soon they are answered, and how long the stream pauses.

    python benchmarks/large_prompts.py --json results.json

It starts `jlade serve` and reads a stream. Meanwhile it sends bodies of about 4 MB, of each kind --repeat times: too
long prompts, conversations and predictions, which are refused, and bodies that take long to parse.
"""

import contextlib
import json
import pathlib
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

from benchmarks import measure, report
from jlade.server.guard import MAX_BYTES

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
SIZE = MAX_BYTES - 1000


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeat", type=int, default=5, metavar="N")
    options = parser.parse_args(argv)
    with measure.served(options.model, "--warm-up") as (_, url):
        result = times_of(url, options.repeat)
        begin = time.perf_counter()
    result["seconds to end"] = time.perf_counter() - begin
    print(json.dumps(result, indent=1))
    report.write(options.json, vars(options) | result)


def times_of(url: str, repeat: int) -> dict[str, Any]:
    """Returns the seconds of requests and the pauses of the stream, by kinds of bodies."""
    capacity = json.loads(ask(url, "/v1/models", b"")[1])["data"][0]["max_model_len"]
    with streaming(url, capacity - 10) as longest_pause:
        longest_pause(3)
        result: dict[str, Any] = {"capacity": capacity, "alone": longest_pause(3)}
        for kind, (path, body, expected) in bodies().items():
            known = result[kind] = {"status": expected, "seconds": 0.0, "pause": 0.0}
            for number in range(repeat):
                begin = time.perf_counter()
                status, answer = ask(url, path, body)
                seconds, pause = time.perf_counter() - begin, longest_pause(0.5)
                assert status == expected, (kind, status, answer[:500])
                known["seconds"], known["pause"] = max(known["seconds"], seconds), max(known["pause"], pause)
                print(kind, number, f"{seconds:.3f} s, pause {pause:.3f} s", file=sys.stderr)
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


@contextlib.contextmanager
def streaming(url: str, number: int) -> Iterator[Callable[[float], float]]:
    """Reads streams of that many tokens, one after the other.

    Yields a function that waits for some seconds and returns the longest time between events since its last call.
    """
    ended = threading.Event()
    options = {"prompt": "x", "max_tokens": number, "ignore_eos": True, "stream": True, "temperature": 1}
    pauses: list[float] = []

    def read() -> None:
        while not ended.is_set():
            with send(url, COMPLETIONS, json.dumps(options).encode()) as connection:
                connection.recv(2**16)
                last = time.perf_counter()
                while not ended.is_set() and connection.recv(2**16):
                    now = time.perf_counter()
                    pauses.append(now - last)
                    last = now

    def longest_pause(seconds: float) -> float:
        time.sleep(seconds)
        found = max(pauses, default=0.0)
        pauses.clear()
        return found

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield longest_pause
    finally:
        ended.set()
        reading.join()


if __name__ == "__main__":
    main()
