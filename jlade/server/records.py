"""Records of a job: prompts or messages in JSON lines, with options of their own in OpenAI's fields, and their results.

A record may also have the form of OpenAI's batch files, and its result then has the form of their output.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.generation import chat_template
from jlade.generation.chat_template import ChatTemplate
from jlade.generation.options import Keywords
from jlade.generation.prompts import DEFAULT_NEW_TOKENS
from jlade.generation.results import FAILURES, Generation
from jlade.models.llama import LlamaParams
from jlade.server import fields, kinds, protocol
from jlade.server.fields import Body, RequestError, refused
from jlade.server.protocol import Completion
from jlade.server.writer import Writer

SUFFIX = ".jsonl"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OPTIONS = ("sampling", "min_new_tokens", "stop", "eos_ids", "grammar")  # of a text, besides its limit and its key


class DuplicateError(ValueError):
    """A record has the custom_id of an earlier one."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A line of a file, and its origin."""

    source: str  # the file, and the line
    line: str

    @functools.cached_property
    def values(self) -> Body:
        """The object of the line; RequestError if it is none."""
        return fields.parse(self.line.encode(), "the record")

    @property
    def is_of_batch(self) -> bool:
        """Whether it has the form of OpenAI's batch files, and a custom_id that its result can have."""
        try:
            return isinstance(self.values.get("custom_id"), str) and "body" in self.values
        except RequestError:
            return False

    def identity(self, given: Keywords) -> Body:
        """Returns the part of a result that shows which record and which options of the command it is of."""
        if self.is_of_batch:
            digest = hashlib.sha256(json.dumps([self.values, given], sort_keys=True).encode()).hexdigest()
            return {"id": f"batch_req_{digest[:32]}", "custom_id": self.values["custom_id"]}
        try:
            values: Any = self.values
        except RequestError:
            values = self.line
        return {"source": self.source, "record": values, "options": given}


def parse(name: str, text: str, first: int = 1) -> list[Record]:
    """Returns the records of a file, or of a part that begins with line `first`, one for each line that is not blank.

    Raises:
      ValueError: names the file, when it is empty.
    """
    lines = enumerate(text.split("\n"), start=first)
    records = [Record(f"{name}:{number}", line) for number, line in lines if line.strip()]
    if not records:
        raise ValueError(f"{name} is empty; it must hold a record in each line")
    return records


class CustomIds:
    """The custom_ids of a job. Who joins results by them needs one record for each."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def add(self, record: Record) -> None:
        """Adds the custom_id of a record, if it has one.

        Raises:
          DuplicateError: the record has the custom_id of an earlier one.
        """
        if not record.is_of_batch:
            return
        name = record.values["custom_id"]
        source = self._sources.setdefault(name, record.source)
        if source != record.source:
            raise DuplicateError(f"{record.source}: custom_id {name!r} is that of {source}, too; it must be unique")


class RecordReader:
    """Reads the records of a job, whose options are the defaults of their fields.

    Args:
      params: the model's parameters.
      request: the job's options, as arguments of `jlade.generate`.
      directory: returns the directory of the model's chat template.
      capacity: most tokens of a prompt and its text.
    """

    def __init__(self, params: LlamaParams, request: Keywords, directory: Callable[[], pathlib.Path], capacity: int):
        self._capacity, self._request, self._directory = capacity, request, directory
        self._protocol = protocol.BodyReader(
            tokenizer=request["tokenizer"],
            chat_template=None,
            vocab_size=params.decoder.vocab_size,
            eos_ids=params.decoder.eos_ids,
            stop=params.decoder.stop_strings,
            sampling=request["sampling"],
            capacity=self._capacity,
        )

    def read(self, record: Record) -> tuple[list[int], Keywords, Completion]:
        """Returns the token ids of a record, its options as arguments of `jlade.generate`, and all that it asks for.

        Without a seed the options have no key.

        Raises:
          ValueError: names the file, the line, the field, its value and what is accepted.
        """
        try:
            return self._read(record)
        except RequestError as error:
            raise ValueError(f"{record.source}: {error}") from error

    def _read(self, record: Record) -> tuple[list[int], Keywords, Completion]:
        body = self._body(record)
        is_chat = body.get("messages") is not None
        defaults = {"max_tokens": self._request["max_new_tokens"], "min_tokens": self._request["min_new_tokens"]}
        defaults["stop"] = self._request["stop"]
        if self._request["logprobs"]:
            defaults["logprobs"] = True if is_chat else 0
        body = defaults | {name: value for name, value in body.items() if value is not None}
        completion = self._of_chats.chat(body) if is_chat else self._protocol.completion(body)
        if len(completion.prompts) != 1 or completion.n != 1:
            raise RequestError("a record must ask for one text: n must be 1, and prompt one prompt; repeat the record")
        if completion.shown.stop and not record.is_of_batch:
            raise refused("include_stop_str_in_output", True, "false")
        if completion.shown.of_prompt is not None:
            raise refused("prompt_logprobs", completion.shown.of_prompt, "left out: they are not computed")
        if completion.options.get("prompt_logprobs"):
            raise refused("echo", True, "false beside logprobs: those of the prompt are not computed")
        if completion.stream:
            raise refused("stream", True, "false: a file gets whole texts")
        if completion.tools is not None and not completion.tools[1].must_call and completion.options["stop"]:
            # Texts decoded in batches have them on the device, which knows no calls.
            accepted = "empty beside tools, unless tool_choice asks for a call"
            raise refused("stop", completion.options["stop"], accepted)
        completion = self._protocol.with_grammar(completion)
        ids, options = completion.prompts[0], {name: completion.options.get(name) for name in OPTIONS}
        if options["grammar"] is None and (of_job := self._request["grammar"]) is not None:
            completion = dataclasses.replace(completion, has_format=True)
            options["grammar"] = of_job.after(completion.thoughts, completion.content)
        if completion.tools is not None:
            options["stop"] = []
        limits = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
        if all(body.get(name) is None for name in limits):
            fitting = int(np.clip(self._capacity - len(ids), 1, DEFAULT_NEW_TOKENS))
            completion = dataclasses.replace(completion, limit=fitting)
        options["max_new_tokens"] = completion.max_new_tokens(ids, self._capacity)
        if completion.seed is not None:
            options["key"] = jax.random.key(completion.seed)
        return ids, options, completion

    def _body(self, record: Record) -> Body:
        """Returns the fields of OpenAI's interface."""
        body = record.values
        if "custom_id" in body or "body" in body:
            body = self._of_batch(record)
        if (body.get("prompt") is None) == (body.get("messages") is None):
            raise RequestError("a record must have either prompt or messages")
        for name, other in protocol.OF_ENGINE.items():  # ignored, they would be a surprise
            if name in body:
                raise RequestError(f"{name} is {other} in a record, as in OpenAI's interface")
        return body

    def _of_batch(self, record: Record) -> Body:
        """Returns the body of a record in OpenAI's batch form."""
        name, method, url = (record.values.get(field) for field in ("custom_id", "method", "url"))
        if not isinstance(name, str):
            raise refused("custom_id", name, "a string")
        body = kinds.values(record.values, {"body": kinds.any_object}).get("body", {})
        if method != "POST":
            raise refused("method", method, "POST")
        if url not in (CHAT, COMPLETION):
            raise refused("url", url, f"{CHAT} or {COMPLETION}")
        field = "messages" if url == CHAT else "prompt"
        if body.get(field) is None:
            raise RequestError(f"body must have {field} for {url}")
        return body

    @functools.cached_property
    def _of_chats(self) -> protocol.BodyReader:
        """The reader of chats: loading their template takes seconds."""
        tokenizer = chat_template.load_tokenizer(self._directory())
        if tokenizer.chat_template is None:
            raise RequestError("the model has no chat template: give prompt instead", "messages")
        return dataclasses.replace(self._protocol, chat_template=ChatTemplate(tokenizer))


def key(of_job: jax.Array, number: int) -> jax.Array:
    """Returns the key of a job's prompt without a seed; `number` counts from 0. The first has the key of the job."""
    return jax.random.fold_in(of_job, number) if number else of_job


def together(options: Sequence[Keywords]) -> Keywords:
    """Returns the options of several prompts, one for each, as arguments of `jlade.generate`; each has a key."""
    if not options:
        return {}
    joined = {name: [of_prompt[name] for of_prompt in options] for name in options[0]}
    keys = np.stack([jax.random.key_data(key) for key in joined["key"]])
    return joined | {"key": jax.random.wrap_key_data(jnp.asarray(keys))}


def result(
    record: Record,
    given: Keywords,
    request: Keywords,
    completion: Completion | None,
    generation: Generation | None,
    error: str | None = None,
) -> Body:
    """Returns the result of a record as a line has it.

    Args:
      record: of the job.
      given: the job's options that decide the texts, in JSON's types.
      request: the same as arguments of `jlade.generate`.
      completion, generation: the record as `RecordReader.read` returns it, and its text; None for one that cannot be
        completed.
      error: the reason why it cannot.
    """
    identity = record.identity(given)
    if completion is None or generation is None:
        return identity | (_refusal(error or "") if record.is_of_batch else {"error": error})
    if record.is_of_batch:
        return identity | _response(record, completion, generation, request)
    line = identity | text_fields(generation, bool(completion.options.get("logprobs")))
    return line | (_answer(completion, generation, request) if completion.is_chat else {})


def text_fields(out: Generation, logprobs: bool) -> Body:
    """Returns the text of one prompt as a line has it, `logprobs` says whether with its log-probabilities."""
    length = int(out.lengths[0])
    values = {
        "text": out.text[0],
        "token_ids": out.tokens[0, :length].tolist(),
        "finish_reason": out.finish_reason[0],
        "tokens": length,
        "steps": int(out.steps[0]),
        "compression": float(out.compression[0]),
    }
    if logprobs and out.logprobs is not None:
        values["logprobs"] = out.logprobs[0, :length].tolist()
    return values


def _answer(completion: Completion, generation: Generation, request: Keywords) -> Body:
    """Returns the text of a chat without its calls of tools and without thoughts before a text of a grammar."""
    message = Writer(completion, "", request["tokenizer"], "").whole([generation])["choices"][0]["message"]
    calls = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
    return {"text": message["content"] or "", **calls}


def is_line_of(identity: Body, line: bytes) -> bool:
    """Returns whether a line is the result with this identity."""
    try:
        result = json.loads(line)
    except ValueError:
        return False
    return isinstance(result, dict) and identity.items() <= result.items()


def _response(record: Record, completion: Completion, generation: Generation, request: Keywords) -> Body:
    """Returns the result of a record in the form of the output of OpenAI's batches, but for its identity."""
    if not completion.options.get("logprobs"):  # which another record asked for
        generation = dataclasses.replace(generation, logprobs=None)
    if (reason := generation.finish_reason[0]) in FAILURES:
        return _refusal(FAILURES[reason], status=400 if reason == "dead_end" else 500)
    model = record.values["body"].get("model") or "jlade"
    body = Writer(completion, str(model), request["tokenizer"], uuid.uuid4().hex).whole([generation])
    return {"response": {"status_code": 200, "request_id": body["id"], "body": body}, "error": None}


def _refusal(error: str, status: int = 400) -> Body:
    """Returns the same for a record that cannot be completed."""
    body = RequestError(error, status=status).body
    return {"response": {"status_code": status, "request_id": None, "body": body}, "error": None}
