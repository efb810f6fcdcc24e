"""The routes: OpenAI's and Anthropic's interfaces, health, metrics and the page, over an engine."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import jlade
from jlade.engine.engine import Engine
from jlade.generation import text as text_lib
from jlade.generation.results import Generation
from jlade.generation.text import Tokenizer
from jlade.server import fields, guard, messages, page, responses, token_ids
from jlade.server.choices import Choices, key
from jlade.server.fields import Body, RequestError
from jlade.server.guard import Guard, JsonResponse
from jlade.server.metrics import Metrics
from jlade.server.protocol import BodyReader, CompletionT
from jlade.server.token_ids import TokensWriter
from jlade.server.writer import Writer

SECONDS = 600.0  # for a response, by default
SHORT = 2**16  # bytes of a body
PING_SECONDS = 10.0  # without an event, after which a stream sends something that holds idle connections
KEYS = {"prefix_key", "remember_key"}  # options that say which requests share what
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies hand on each event at once
log = logging.getLogger(__name__)
T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
Starting = asyncio.Task[Choices]  # which makes the grammar first


class Service:
    """A model behind OpenAI's interface.

    Args:
      engine: decodes.
      reader: reads bodies for the engine's model.
      model: its name.
      keys: API keys; without one the server answers this machine alone.
      seconds: most time for a response.

    Attributes:
      app: the ASGI application.
      engine, reader: the arguments.
    """

    def __init__(
        self, engine: Engine, reader: BodyReader, *, model: str, keys: Sequence[str] = (), seconds: float = SECONDS
    ):
        self.engine, self.reader, self._model, self._seconds = engine, reader, model, seconds
        self._metrics = Metrics(engine, model)
        self._created = int(time.time())
        self._active: set[Starting] = set()
        self._is_draining = False
        # One thread reads short bodies and one long ones, so that no short one waits for a long one, nor for a grammar.
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"jlade {kind}") for kind in ("reader", "long reader", "grammars")
        ]
        complete, answer = (functools.partial(functools.partial, made) for made in (self._complete, self._answer))
        routes: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/chat/completions", complete(reader.chat, Writer)),
            ("POST", "/v1/completions", complete(reader.completion, Writer)),
            *responses.routes(reader, complete),
            *messages.routes(reader, complete, answer),
            ("POST", "/inference/v1/generate", complete(functools.partial(token_ids.read, reader), TokensWriter)),
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{model:path}", self._show_model),
            ("POST", "/tokenize", answer(self._tokenized)),
            ("POST", "/detokenize", answer(lambda body: {"prompt": reader.text(body)})),
            ("GET", "/health", self._show_health),
            ("GET", "/metrics", self._show_metrics),
            ("GET", "/version", self._show_version),
            ("GET", "/", self._show_page),
        ]
        self.app = Starlette(
            routes=[Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in routes],
            middleware=[Middleware(Guard, keys=keys)],
            exception_handlers={HTTPException: _refuse_path},
        )

    def compile(self) -> Iterator[int]:
        """Returns what `Engine.compile` does."""
        key(0, 1)
        if (template := self.reader.chat_template) is not None:
            # It starts the process that renders, which takes a second. What the template makes of this is not needed.
            self._threads[0].submit(template.render, [{"role": "user", "content": ""}])
        return self.engine.compile()

    @property
    def is_idle(self) -> bool:
        """Whether no completion runs or waits."""
        return all(starting.done() for starting in self._active) and all(each.is_done for each in self._started())

    def drain(self) -> None:
        """Refuses completions from now on, also those that wait for a row. Those with a row go on."""
        self._is_draining = True
        for choices in self._started():
            if choices.is_waiting:
                choices.cancel()

    def _started(self) -> list[Choices]:
        """Returns the active choices, without those whose grammar is being made."""
        return [choices for starting in self._active if (choices := _choices(starting)) is not None]

    async def _complete(
        self,
        read: Callable[[Body], CompletionT],
        writing: Callable[[CompletionT, str, Tokenizer, str], Writer],
        request: Request,
    ) -> Response:
        completion = await self._read(request, read)
        options = {"prefix_key": ""} | completion.options
        of_client = {name: guard.compartment(request.scope, options[name]) for name in KEYS & options.keys()}
        completion = dataclasses.replace(completion, options=options | of_client)
        writer = writing(completion, self._model, self.reader.tokenizer, guard.request_id(request.scope))
        with contextlib.ExitStack() as ending:
            starting = asyncio.create_task(self._start(completion))
            self._active.add(starting)
            ending.callback(self._end, starting)
            if completion.stream:
                await _unless_gone(request.receive, asyncio.wait({starting}, timeout=PING_SECONDS))
                if starting.done():
                    starting.result()  # an error before the stream begins has a status
                return _Events(_with_pings(self._events(starting, writer), writer.ping), ending.pop_all().close)
            choices = await _unless_gone(request.receive, starting)
            generations = await _unless_gone(request.receive, choices.results())
            return JsonResponse(writer.whole(generations, choices.num_cached, choices.prompt_logprobs))

    async def _start(self, completion: CompletionT) -> Choices:
        """Makes the grammar, which may take seconds, and starts the choices."""
        if completion.grammar is not None:
            completion = await asyncio.get_running_loop().run_in_executor(
                self._threads[2], self.reader.with_grammar, completion
            )
        if self._is_draining:
            raise RequestError("the server is shutting down", status=503)
        return Choices(self.engine, completion, self._metrics, self._seconds)

    async def _events(self, starting: Starting, writer: Writer) -> AsyncGenerator[str, None]:
        """Yields the events of a stream. An error is an event too."""
        generations: dict[int, Generation] = {}
        try:
            for chunk in writer.begin():
                yield writer.event(chunk)
            choices = await starting
            async with contextlib.aclosing(choices.pieces()) as pieces:
                async for index, piece in pieces:
                    if piece.generation is not None:
                        generations[index] = piece.generation
                    for chunk in writer.chunks(index, piece):
                        yield writer.event(chunk)
            for chunk in writer.end(list(generations.values()), choices.num_cached):
                yield writer.event(chunk)
        except Exception as error:
            for chunk in writer.failed(_as_refusal(error)):
                yield writer.event(chunk)
        if writer.done:
            yield writer.done

    def _end(self, starting: Starting) -> None:
        starting.cancel()
        if (choices := _choices(starting)) is not None:
            choices.cancel()
        self._active.discard(starting)

    async def _read(self, request: Request, read: Callable[[Body], T]) -> T:
        """Returns what `read` makes of the body of a request for this server's model, unless the client goes away."""
        data = await guard.read(request)

        def parse() -> T:
            body = fields.parse(data)
            self._check_model(body.get("model"))
            return read(body)

        thread = self._threads[len(data) > SHORT]
        return await _unless_gone(request.receive, asyncio.get_running_loop().run_in_executor(thread, parse))

    def _check_model(self, model: Any) -> None:
        if model is not None and model != self._model:
            raise RequestError(
                f"there is no model {model!r:.100}; this server has {self._model!r}", "model", "model_not_found", 404
            )

    async def _answer(self, read: Callable[[Body], Body], request: Request) -> Response:
        """Answers with what `read` makes of the body."""
        return JsonResponse(await self._read(request, read))

    def _tokenized(self, body: Body) -> Body:
        tokens, names = self.reader.tokens(body), None
        if body.get("return_token_strs"):
            names = [text_lib.token_name(self.reader.tokenizer, token) for token in tokens]
        return {"count": len(tokens), "max_model_len": self.engine.capacity, "tokens": tokens, "token_strs": names}

    def _of_model(self) -> Body:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "jlade",
            "max_model_len": self.engine.capacity,
        }

    async def _list_models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._of_model()]})

    async def _show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JsonResponse(self._of_model())

    def check(self) -> None:
        """Raises a RequestError if a completion would not be answered."""
        if self._is_draining:
            raise RequestError("the server is shutting down", status=503)
        if not self.engine.is_alive:
            raise RequestError("the engine has ended", status=503)
        if not self.engine.is_ready:
            raise RequestError(f"the server starts: {self.engine.num_left} sets of programs to compile", status=503)

    async def _show_health(self, request: Request) -> Response:
        self.check()
        return JsonResponse({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _show_version(self, request: Request) -> Response:
        return JsonResponse({"version": jlade.__version__})

    async def _show_page(self, request: Request) -> Response:
        return HTMLResponse(page.text(), headers=page.headers())


class _Events(StreamingResponse):
    """A stream of server-sent events, which ends when the client goes away, also between two events."""

    def __init__(self, events: AsyncGenerator[str, None], end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._events, self._end = events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await _unless_gone(receive, self.stream_response(send))
        finally:
            self._end()
            await self._events.aclose()


def _choices(starting: Starting) -> Choices | None:
    """Returns the choices, None if they have not started."""
    has_started = starting.done() and not starting.cancelled() and starting.exception() is None
    return starting.result() if has_started else None


async def _with_pings(events: AsyncGenerator[str, None], ping: str) -> AsyncGenerator[str, None]:
    """Yields events, and a ping for each `PING_SECONDS` without one."""
    async with contextlib.aclosing(events):
        following = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                while not (await asyncio.wait({following}, timeout=PING_SECONDS))[0]:
                    yield ping
                if (event := following.result()) is None:
                    return
                yield event
                following = asyncio.ensure_future(anext(events, None))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`, or cancels it when the client goes away.

    Raises:
      ClientDisconnect: the client has gone away.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _answering(endpoint: Endpoint) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Returns an endpoint whose errors are responses."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HTTPException:
            raise
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return guard.refuse(_as_refusal(error), request.scope)

    return answer


def _as_refusal(error: Exception) -> RequestError:
    """Returns the error as the client sees it. The log alone shows a fault of the server."""
    if isinstance(error, RequestError):
        return error
    log.error("a request failed", exc_info=error)
    return RequestError(f"the server failed with a {type(error).__name__}, which its log shows", status=500)


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = guard.refuse(RequestError(message, status=error.status_code), request.scope)
    response.headers.update(error.headers or {})
    return response
