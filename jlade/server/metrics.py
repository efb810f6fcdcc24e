"""Metrics in Prometheus's format, with the names of vLLM's, so that its dashboards show them."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jlade.engine.engine import Engine
from jlade.engine.request import Request
from jlade.generation.results import FAILURES, Piece
from jlade.server.fields import RequestError
from jlade.server.protocol import Completion

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
PER_STEP = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
LABELS = ("model_name", "engine")

GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "vllm:num_requests_running": ("Requests that have rows.", lambda engine: engine.num_running),
    "vllm:num_requests_waiting": ("Requests that wait for a row.", lambda engine: engine.num_waiting),
    "jlade:remembered_texts": ("Earlier texts whose answers may be drafts.", lambda engine: len(engine.remembered)),
    "jlade:remembered_bytes": ("Bytes of host memory that these take.", lambda engine: engine.remembered.num_bytes),
    "vllm:kv_cache_usage_perc": (
        "Share of the pages, or of rows without pages, that requests hold; 1 is all.",
        lambda engine: engine.cache_usage,
    ),
}
COUNTERS = {
    "vllm:prompt_tokens": "Tokens of prompts.",
    "vllm:prefix_cache_queries": "Tokens of prompts, sought among earlier prompts and texts.",
    "vllm:prefix_cache_hits": "Tokens of prompts that were not read, as an earlier prompt or text began with them.",
    "vllm:generation_tokens": "Generated tokens.",
    "vllm:num_preemptions": "Times that a request lost its row, as others needed its pages.",
    "vllm:spec_decode_num_drafts": "Steps, each of which verifies a draft.",
    "vllm:spec_decode_num_draft_tokens": "Drafted tokens, each verified by a step.",
    "vllm:spec_decode_num_accepted_tokens": "Drafted tokens that were accepted: all but one of each step.",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time from the arrival to the first tokens.", SECONDS),
    "vllm:inter_token_latency_seconds": ("Time between tokens; those of one piece share it equally.", SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean time of a token after the first piece, by request.", SECONDS),
    "vllm:e2e_request_latency_seconds": ("Time from the arrival to the end.", SECONDS),
    "vllm:request_queue_time_seconds": ("Time without a row.", SECONDS),
    "vllm:request_prefill_time_seconds": ("Time from the row to the first tokens.", SECONDS),
    "vllm:request_decode_time_seconds": ("Time from the first tokens to the end.", SECONDS),
    "vllm:request_inference_time_seconds": ("Time with a row.", SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens of a request.", TOKENS),
    "vllm:request_params_n": ("Choices that a request asks for.", TOKENS[:7]),
    "vllm:request_params_max_tokens": ("Most new tokens that a request asks for.", TOKENS),
    "jlade:tokens_per_step": ("Tokens that a step accepted.", PER_STEP),
}


class Metrics:
    """The metrics of an engine.

    Args:
      engine: the engine.
      model: its name in the labels.
    """

    def __init__(self, engine: Engine, model: str):
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        for name, (text, value) in GAUGES.items():
            gauge = Gauge(name, text, LABELS, registry=self._registry)
            gauge.labels(**self._labels).set_function(functools.partial(value, engine))
        self._counters = {
            name: Counter(name, text, LABELS, registry=self._registry).labels(**self._labels)
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, LABELS, buckets=buckets, registry=self._registry).labels(**self._labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._ended = Counter(
            "vllm:request_success", "Requests that ended.", (*LABELS, "finished_reason"), registry=self._registry
        )
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft.",
            (*LABELS, "position"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(**self._labels, finished_reason=reason)

    def text(self) -> bytes:
        """Returns all values in the text format."""
        return generate_latest(self._registry)

    def count(self, name: str, number: float = 1) -> None:
        """Adds to a counter."""
        self._counters[name].inc(number)

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        self._histograms[name].observe(value)

    def end(self, reason: str) -> None:
        """Counts a request that ended."""
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def step(self, accepted: int) -> None:
        """Counts a step that accepted so many tokens."""
        self.observe("jlade:tokens_per_step", accepted)
        self.count("vllm:spec_decode_num_drafts")
        self.count("vllm:spec_decode_num_accepted_tokens", accepted - 1)
        for position in range(accepted - 1):
            self._accepted_at.labels(**self._labels, position=str(position)).inc()


class Watch:
    """A request while its pieces arrive. On exit it counts how the request ended.

    Attributes:
      ended: whether the last piece has arrived.
    """

    def __init__(self, metrics: Metrics, completion: Completion, prompt: Sequence[int], request: Request):
        self.ended = False
        self._metrics, self._completion, self._prompt, self._request = metrics, completion, prompt, request
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._last = self._arrival
        self._num_tokens = self._num_first = self._num_drafted = self._num_taken_out = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self.ended:
            is_fault = isinstance(error, Exception) and not isinstance(error, RequestError)
            self._metrics.end("error" if is_fault else "abort")

    def add(self, piece: Piece) -> None:
        """Counts a piece that has just arrived."""
        now, number, metrics = time.monotonic(), len(piece.tokens), self._metrics
        if self._first is None:
            self._first, self._num_first = now, number
            metrics.count("vllm:prompt_tokens", len(self._prompt))
            metrics.count("vllm:prefix_cache_queries", len(self._prompt))
            metrics.count("vllm:prefix_cache_hits", self._request.num_cached)
            metrics.observe("vllm:time_to_first_token_seconds", now - self._arrival)
        else:
            for _ in range(number):
                metrics.observe("vllm:inter_token_latency_seconds", (now - self._last) / number)
        self._last = now
        self._num_tokens += number
        metrics.count("vllm:generation_tokens", number)
        for accepted in piece.accepted.tolist():
            metrics.step(accepted)
        before, self._num_drafted = self._num_drafted, self._request.num_drafted
        metrics.count("vllm:spec_decode_num_draft_tokens", self._num_drafted - before)
        before, self._num_taken_out = self._num_taken_out, self._request.num_taken_out
        metrics.count("vllm:num_preemptions", self._num_taken_out - before)
        if piece.generation is not None:
            self.ended = True
            self._end(piece.generation.finish_reason[0])

    def _end(self, reason: str) -> None:
        started, first, last = self._request.started, self._first, self._last
        assert started is not None
        assert first is not None
        self._metrics.end("error" if reason in FAILURES else "length" if reason == "length" else "stop")
        values: dict[str, float] = {
            "vllm:e2e_request_latency_seconds": last - self._arrival,
            "vllm:request_queue_time_seconds": max(0.0, started - self._arrival),
            "vllm:request_prefill_time_seconds": first - started,
            "vllm:request_decode_time_seconds": last - first,
            "vllm:request_inference_time_seconds": last - started,
            "vllm:request_prompt_tokens": len(self._prompt),
            "vllm:request_generation_tokens": self._num_tokens,
            "vllm:request_params_n": self._completion.n,
        }
        if self._completion.limit is not None:
            values["vllm:request_params_max_tokens"] = self._completion.limit
        if self._num_tokens > self._num_first:
            later = self._num_tokens - self._num_first
            values["vllm:request_time_per_output_token_seconds"] = (last - first) / later
        for name, value in values.items():
            self._metrics.observe(name, value)
