"""The choices of a response: the requests of an engine that one body asks for."""

import asyncio
import logging
import queue
import secrets
from collections.abc import AsyncGenerator

import jax

from jlade.engine.engine import Engine
from jlade.engine.request import Request
from jlade.engine.scoring import PromptLogProbs
from jlade.errors import ArgumentError
from jlade.generation import prompts
from jlade.generation.results import FAILURES, Generation, Piece
from jlade.server.fields import RequestError
from jlade.server.metrics import Metrics, Watch
from jlade.server.protocol import Completion

log = logging.getLogger(__name__)
Arrived = asyncio.Queue[tuple[int, Piece] | Exception | None]


def key(seed: int, number: int) -> jax.Array:
    """Returns the random key of choice `number` of a prompt; choice 0 has that of the seed."""
    made = jax.random.key(seed)
    return jax.random.fold_in(made, number) if number else made


class Choices:
    """The running choices of a body: n of the first prompt, n of the next one, and so on.

    Args:
      engine: decodes them.
      completion: what the body asks for.
      metrics: count their tokens.
      seconds: most time for them.

    Raises:
      RequestError: the engine refuses one, or too many requests wait.
    """

    def __init__(self, engine: Engine, completion: Completion, metrics: Metrics, seconds: float):
        self._completion, self._metrics, self._seconds = completion, metrics, seconds
        self._requests: list[Request] = []
        try:
            limits = [completion.max_new_tokens(prompt, engine.capacity) for prompt in completion.prompts]
            for prompt, limit in zip(completion.prompts, limits, strict=True):
                seed = secrets.randbits(32) if completion.seed is None else completion.seed
                for number in range(completion.n):
                    options = completion.options | {"max_new_tokens": limit, "key": key(seed, number)}
                    self._requests.append(engine.submit(prompts.whole([prompt]), **options))
        except Exception as error:
            self.cancel()
            raise _refusal(error, completion) from error

    @property
    def is_waiting(self) -> bool:
        """Whether none of them has a row yet."""
        return all(request.started is None for request in self._requests)

    @property
    def is_done(self) -> bool:
        """Whether all have ended; the client may still take their text."""
        return all(request.done for request in self._requests)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompts that the first choice of each did not read; see `Request`."""
        return sum(request.num_cached for request in self._requests[:: self._completion.n])

    @property
    def prompt_logprobs(self) -> list[PromptLogProbs | None]:
        """The log-probabilities of the prompt of each of them, as far as they were asked for."""
        return [request.prompt_logprobs for request in self._requests]

    def cancel(self) -> None:
        """Ends those that have not ended; their rows are free within two steps."""
        for request in self._requests:
            request.cancel()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields the pieces of all choices as they come, each with the index of its choice.

        All are cancelled when one fails, or when the iteration is left.

        Raises:
          RequestError: they were cancelled, the time is over, or a text has ended for one of `FAILURES`.
          Exception: the error that ended one of them.
        """
        arrived: Arrived = asyncio.Queue()
        end = asyncio.get_running_loop().time() + self._seconds
        tasks = [asyncio.ensure_future(self._follow(index, arrived)) for index in range(len(self._requests))]
        try:
            num_running = len(tasks)
            while num_running:
                async with asyncio.timeout_at(end):
                    entry = await arrived.get()
                if isinstance(entry, Exception):
                    raise entry
                if entry is None:
                    num_running -= 1
                else:
                    yield entry
        except TimeoutError as error:
            raise RequestError(f"the response took more than {self._seconds:g} seconds", status=504) from error
        finally:
            self.cancel()
            for task in tasks:
                task.cancel()

    async def results(self) -> list[Generation]:
        """Returns the results of all choices, or raises as `pieces` does."""
        results = {index: piece.generation async for index, piece in self.pieces() if piece.generation is not None}
        return [results[index] for index in range(len(self._requests))]

    async def _follow(self, index: int, arrived: Arrived) -> None:
        """Hands on the pieces of a choice, and then None or its error."""
        request, prompt = self._requests[index], self._completion.prompts[index // self._completion.n]
        try:
            with Watch(self._metrics, self._completion, prompt, request) as watch:
                async for piece in request:
                    watch.add(piece)
                    reason = None if piece.generation is None else piece.generation.finish_reason[0]
                    arrived.put_nowait((index, piece))
                    if reason in FAILURES:
                        raise failed(reason)
                if not watch.ended:
                    raise RequestError("the request was cancelled: the server is shutting down", status=503)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)


def failed(reason: str) -> RequestError:
    """Returns the error of a text that has ended for one of `FAILURES`."""
    if reason == "dead_end":
        return RequestError(FAILURES[reason])
    log.error("a request failed: %s", FAILURES[reason])
    return RequestError(FAILURES[reason], status=500)


def _refusal(error: Exception, completion: Completion) -> Exception:
    """Returns the error of `Engine.submit` in OpenAI's form."""
    match error:
        case queue.Full():
            return RequestError(f"the server is busy: {error}", status=429)
        case ArgumentError():
            return completion.refusal(error)
        case TypeError() | ValueError():
            return RequestError(str(error))
        case RuntimeError():
            return RequestError("the server is shutting down", status=503)
    return error
