"""Faults of clients against a server: malformed requests and slow clients, while right requests get their texts.

    python -m tests.stress.server_faults --json results.json

It starts `jlade serve` and sends --count malformed requests from 32 clients. Each has to be refused, in OpenAI's form
if it is HTTP, or its connection closed; one that is incomplete may wait. Meanwhile clients that never finish have to be
closed in time, and others get the greedy texts of `jlade.generate`. Afterwards no row may be taken.
"""

import collections
import concurrent.futures
import contextlib
import functools
import http.client
import json
import pathlib
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import httpx

import jlade
from benchmarks import measure, report
from jlade.server.body_fields import HARMLESS, UNSUPPORTED, Tables
from jlade.server.lifecycle import MAX_IDLE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
PROMPTS = ["def read(", "Once upon a time", "1, 1, 2, 3,", "class Node:", "import", "The sum of"]
NUM_TOKENS = 24
CLIENTS = 32
PATIENCE = 1  # seconds for the answer to a request that may be incomplete
IDLE, CLOSED = 29, 35  # seconds after which slow clients are closed, least and most
RUSH = 600  # connections at once that send nothing


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="the recorded run had the first layer of the demo model")
    parser.add_argument("--count", type=int, default=10_000, metavar="N", help="malformed requests")
    parser.add_argument("--slow", type=int, default=40, metavar="N", help="slow clients of each kind")
    options = parser.parse_args()
    params, tokenizer = jlade.demo() if options.model == "demo" else jlade.load(options.model)
    texts = jlade.generate(params, PROMPTS, tokenizer=tokenizer, lookahead=None, max_new_tokens=NUM_TOKENS).text
    expected = dict(zip(PROMPTS, texts, strict=True))
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+", encoding="utf-8") as log:
        pathlib.Path(folder, "keys").write_text(KEY, encoding="ascii")
        arguments = "--max-sequences", "4", "--capacity", "256", "--api-key-file", f"{folder}/keys"
        with measure.served(options.model, *arguments, log=log) as (server, url):
            with right_requests(url, expected) as counts, concurrent.futures.ThreadPoolExecutor() as pool:
                slow = pool.submit(slow_clients, url, options.slow)
                megabytes, outcomes, begin = [_megabytes(server.pid)], collections.Counter[str](), time.perf_counter()
                for part in range(4):
                    numbers = range(part * options.count // 4, (part + 1) * options.count // 4)
                    outcomes += malformed_requests(url, numbers)
                    megabytes.append(_megabytes(server.pid))
                    print(f"{numbers.stop} requests after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
                figures: dict[str, Any] = {"seconds": time.perf_counter() - begin}
                figures |= {"outcomes": dict(sorted(outcomes.items())), "slow": slow.result()}
                kept = rush(url, RUSH, 3)
                assert kept <= MAX_IDLE, kept
                figures |= {"rush": RUSH, "kept": kept, "megabytes": megabytes}
            wait_for_rows(url)
        figures |= {"right": counts, "log": pathlib.Path(folder, "log").read_text(encoding="utf-8")}
    print(json.dumps(figures, indent=1))
    report.write(options.json, vars(options) | figures)


def _megabytes(pid: int) -> int:
    return measure.status_bytes("VmRSS", pid) // 2**20


def wait_for_rows(url: str) -> None:
    """Waits until no request runs or waits."""
    measure.wait_until_idle(url, HEADERS)


@contextlib.contextmanager
def right_requests(url: str, expected: dict[str, str]) -> Iterator[list[int]]:
    """Asks for the texts of prompts from two clients until the end, and yields a list that then has their numbers."""
    ended, counts = threading.Event(), list[int]()

    def repeat(stream: bool) -> int:
        number = 0
        while not ended.is_set():
            for prompt, text in expected.items():
                given = ask(url, prompt, stream)
                assert given == text, f"{given!r} after {prompt!r}, not {text!r}"
                number += 1
        return number

    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = [pool.submit(repeat, stream) for stream in (False, True)]
        try:
            yield counts
        finally:
            ended.set()
        counts += [each.result() for each in asking]


def ask(url: str, prompt: str, stream: bool) -> str:
    """Returns the greedy text of a prompt."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": stream}
    data = httpx.post(url + COMPLETIONS, json=body, headers=HEADERS, timeout=300).raise_for_status().text
    parts = data.removesuffix("\n\ndata: [DONE]\n\n").split("\n\n") if stream else [data]
    bodies = [json.loads(part.removeprefix("data: ")) for part in parts if part != ": "]
    return "".join(body["choices"][0]["text"] for body in bodies)


def malformed_requests(url: str, numbers: range) -> collections.Counter[str]:
    """Sends the malformed requests of these numbers, and returns how many ended how."""
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        return collections.Counter(pool.map(functools.partial(_send, url), numbers))


def _send(url: str, number: int) -> str:
    """Sends a malformed request, and returns its kind and how it ended."""
    kind = KINDS[number % len(KINDS)]
    data = kind(random.Random(number), urllib.parse.urlsplit(url).netloc)
    name, is_complete = kind.__name__.strip("_"), kind in COMPLETE
    try:
        with connect(url) as connection:
            connection.sendall(data)
            connection.settimeout(300 if is_complete else PATIENCE)
            response = http.client.HTTPResponse(connection, method=data.partition(b" ")[0].decode("latin-1"))
            response.begin()
            content = response.read()
    except TimeoutError:
        assert not is_complete, f"no answer to {data!r:.900}"
        return f"{name}: waits"
    except (http.client.HTTPException, ConnectionError):
        return f"{name}: closed"
    status = response.status
    if status >= 400 and content and content != b"Invalid HTTP request received.":
        try:
            error = json.loads(content)["error"]
        except (ValueError, KeyError) as fault:
            raise AssertionError(f"{status} {content!r:.900} for {data!r:.900}") from fault
        assert error.keys() == {"message", "type", "param", "code"}, error
    assert status < 500, f"{status} {content!r:.900} for {data!r:.900}"
    return f"{name}: {status}"


def connect(url: str) -> socket.socket:
    parts = urllib.parse.urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def slow_clients(url: str, number: int) -> dict[str, dict[str, float]]:
    """Returns after how many seconds, least and most, slow clients of each kind were closed."""
    host = urllib.parse.urlsplit(url).netloc
    sent = {
        "silent": (b"", b""),
        "headers": (b"GET / HTTP/1.1\r\nHost: x\r\nx: ", b"y"),
        "body": (make_request(host, b"", Content_Length="1000000"), b" "),
        "refused body": (
            make_request(host, b"", Content_Length="1000000", Authorization="", Connection="keep-alive"),
            b" ",
        ),
        "second headers": (make_request(host, b"", "GET", "/health", Connection="keep-alive"), b"G"),
    }
    with concurrent.futures.ThreadPoolExecutor(number * len(sent)) as pool:
        closing = {kind: [pool.submit(linger, url, *each) for _ in range(number)] for kind, each in sent.items()}
        seconds = {kind: [each.result() for each in one] for kind, one in closing.items()}
    assert all(min(each) > IDLE and max(each) < CLOSED for each in seconds.values()), seconds
    return {kind: {"least": min(each), "most": max(each)} for kind, each in seconds.items()}


def linger(url: str, begin: bytes, more: bytes) -> float:
    """Sends a beginning, and then more four times a second, reads nothing, and returns the seconds until it fails."""
    with connect(url) as connection:
        connection.sendall(begin)
        sent = time.perf_counter()
        with contextlib.suppress(ConnectionError):
            while time.perf_counter() - sent < 2 * CLOSED and not is_closed(connection):
                connection.sendall(more)
                time.sleep(0.25)
        return time.perf_counter() - sent


def is_closed(connection: socket.socket) -> bool:
    """Returns whether the other side has closed a connection, from which nothing is read."""
    # State 8 is CLOSE_WAIT, 7 is CLOSE: the first byte of Linux's tcp_info.
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in (7, 8)


def rush(url: str, number: int, seconds: float) -> int:
    """Opens silent connections, and returns how many of them are still open after some time."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(url)) for _ in range(number)]
        time.sleep(seconds)
        return sum(not is_closed(each) for each in connections)


def make_request(host: str, body: bytes, method: str = "POST", path: str = COMPLETIONS, **headers: str) -> bytes:
    """Returns a request of HTTP; the names of `headers` have _ for -."""
    given = {"Host": host, "Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    given |= {"Content-Length": str(len(body)), "Connection": "close"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + body


# The kinds of malformed requests. Some of them turn out to be right.

BODY = {"prompt": "secret", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
REFUSED = {"add_generation_prompt", "best_of", "response_format", "return_token_strs", "suffix"}
TABLES = Tables(vocab_size=1, max_choices=1, max_top_logprobs=0, max_logprobs=0)
FIELDS = sorted((TABLES.chat.keys() | TABLES.completion.keys()) - (HARMLESS.keys() | UNSUPPORTED.keys()) | REFUSED)
NUMBERS = [0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**70), 10**400, 10**4200, 0.5, -0.1, 1e308, 5e-324]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
CHARACTERS = "a \x00\n\x7fé\ud800\udfff\uffff\U0001f600"


def _wrong_shape(chance: random.Random, host: str) -> bytes:
    body = BODY | {chance.choice(FIELDS): _value(chance) for _ in range(chance.randint(1, 3))}
    if chance.random() < 0.2:
        body |= {"messages": [_value(chance)], "prompt": [_value(chance), _value(chance)]}
    return make_request(host, json.dumps(body).encode(), path=_path(chance))


def _path(chance: random.Random) -> str:
    return chance.choice([CHAT, COMPLETIONS, "/tokenize"])


def _value(chance: random.Random, depth: int = 3) -> Any:
    """Returns any value of JSON, NaN or an infinity."""
    kind = chance.randrange(7 if depth else 5)
    inner = [_value(chance, depth - 1) for _ in range(chance.randrange(4))] if kind > 4 else []
    if kind == 5:
        return inner
    if kind == 6:
        return {chance.choice(["type", "text", "content", "role", "steps", "0", "x"]): each for each in inner}
    text = "".join(chance.choices(CHARACTERS, k=chance.randrange(9)))
    return [None, chance.random() < 0.5, chance.choice(NUMBERS), chance.randint(-3, 300), text][kind]


def _broken_json(chance: random.Random, host: str) -> bytes:
    text, field = json.dumps(BODY).encode(), chance.choice(FIELDS).encode()
    at, depth = chance.randrange(len(text)), chance.choice([10, 300, 900, 960, 980, 990, 1000, 100_000, 1_000_000])
    begin, middle, end = chance.choice([(b"[", b"", b"]"), (b'{"a":', b"1", b"}"), (b'{"model":[', b"1", b"]}")])
    nested = begin * depth + middle + end * depth
    digits = b"9" * chance.choice([400, 4300, 4301, 1_000_000])
    constant = chance.choice([b"NaN", b"Infinity", b"-Infinity", b"-", b"0x1", b"01", b".5", b"1e" + digits])
    bodies = [b"", text[:at], text[:at] + text[at + 1 :], text[:at] + chance.randbytes(3) + text[at:], text * 2]
    bodies += [b"\xff\xfe" + text, b"\xef\xbb\xbf" + text, text + b"\0", text.decode().encode("utf-16"), nested]
    bodies += [b'{"prompt": "x", "%s": %s}' % (field, each) for each in (nested, digits, constant, b'"\xed\xa0\x80"')]
    bodies += [json.dumps(_value(chance)).encode(), chance.randbytes(chance.randrange(300))]
    return make_request(host, chance.choice(bodies), path=_path(chance))


def _wrong_method(chance: random.Random, host: str) -> bytes:
    methods = ["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "FOO", "post", "CONNECT", "HEAD", "X" * 5000]
    return make_request(host, json.dumps(BODY).encode(), chance.choice(methods), chance.choice(["*", "/health", CHAT]))


def _wrong_path(chance: random.Random, host: str) -> bytes:
    parts = ["..", "/", "%00", "%2e", "%ff", "%", "v1", "models", "?", "#", ";", ":", "@", "[", "%ed%a0%80", "a" * 3000]
    path = "/" + "".join(chance.choices(parts, k=chance.randrange(9)))
    return make_request(host, json.dumps(BODY).encode(), chance.choice(["GET", "POST"]), path)


def _wrong_header(chance: random.Random, host: str) -> bytes:
    name = chance.choice(["Authorization", "Content-Type", "Host", "Expect", "Upgrade", "Transfer-Encoding", "Range"])
    values = ["", "Bearer é", "100-continue", "websocket", "gzip", "x" * 9000, "\udcff", "text/plain", "[", "[::1"]
    values += ["a b", "application/json, text/plain", "localhost:99999999", "127.0.0.1@evil.example"]
    path = chance.choice([CHAT, "/nothing"])
    return make_request(host, json.dumps(BODY).encode(), path=path, **{name: chance.choice(values)})


def _large_head(chance: random.Random, host: str) -> bytes:
    size = chance.choice([15_000, 17_000, 100_000, 2**20])
    heads = [{"X": "y" * size}, {f"X{i}": "y" for i in range(size // 10)}]
    return make_request(host, b"{}", path=chance.choice(["/", "/" + "y" * size]), **chance.choice(heads))


def _broken_http(chance: random.Random, host: str) -> bytes:
    request = bytearray(make_request(host, json.dumps(BODY).encode()))
    head, extra = request.index(b"\r\n\r\n"), request.index(b"\r\n") + 2
    for _ in range(chance.randrange(4)):
        at = chance.randrange(head)
        request[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
    lines = [b"Content-Length: 3", b"Content-Length: -1", b"Content-Length: 1e9", b": x", b"a b: x", b" x", b"x\0y: z"]
    request[extra:extra] = chance.choice([*lines, b"Host: x", b"Transfer-Encoding: chunked"]) + b"\r\n"
    whole = [chance.randbytes(200), b"\x16\x03\x01\x02\0" + chance.randbytes(99), b"GET / HTTP/9.9\r\n\r\n"]
    whole += [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 99 + b"x\r\n\r\n"]
    return chance.choice([bytes(request)] * 4 + whole)


def _broken_chunks(chance: random.Random, host: str) -> bytes:
    head = make_request(host, b"", path=chance.choice([COMPLETIONS, "/nothing"]))
    head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    text = json.dumps(BODY).encode()
    right = b"%x\r\n%s\r\n" % (len(text), text)
    bodies = [chance.randbytes(50), b"zz\r\n" + text, b"-1\r\n", b"3\r\n" + text, right + b"x\r\n", right]
    bodies += [right + b"0\r\nbad trailer\r\n\r\n", b"f" * 30 + b"\r\n" + text, b"ffffffff\r\n" + text]
    bodies += [b"5;" + b"x" * 20_000 + b"\r\nabcde\r\n0\r\n\r\n", b"1\r\n{\r\n" * 5000 + b"0\r\n\r\n"]
    return head.replace(KEY.encode(), chance.choice([KEY.encode(), b"other"])) + chance.choice(bodies)


def _wrong_length(chance: random.Random, host: str) -> bytes:
    body = json.dumps(BODY).encode()
    lengths = [0, 1, len(body) - 1, len(body) + 1, len(body) + 10**6, 4 * 2**20, 4 * 2**20 + 1, 10**15, 10**19]
    head = make_request(host, b"", Content_Length=str(chance.choice(lengths)), Connection="keep-alive")
    return head + chance.choice([b"", b"x", body, body * 2])


COMPLETE: list[Callable[[random.Random, str], bytes]] = [_wrong_shape, _broken_json, _wrong_path, _large_head]
KINDS = [*COMPLETE, _wrong_shape, _broken_json]
KINDS += [_wrong_header, _wrong_method, _broken_http, _broken_chunks, _wrong_length]


if __name__ == "__main__":
    main()
