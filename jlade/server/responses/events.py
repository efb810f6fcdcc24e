"""The response of `/v1/responses`, as the events of a stream; a whole response is that of the last event."""

import copy
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jlade.generation.results import FAILURES, Generation, Piece
from jlade.generation.text import Tokenizer
from jlade.server import writer
from jlade.server.calls import Arguments, Called, Content, Part, Thought
from jlade.server.fields import Body, RequestError
from jlade.server.responses.reading import ItemsCompletion
from jlade.server.responses.tools import InputReader, Origin
from jlade.server.writer import Scores, Writer, one_piece

# The field of a call's item with its text, and the name of it in events.
TEXT_OF_CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


class ItemsWriter(Writer):
    """Writes the response to a body of `/v1/responses`, whole or in events. The response has an id of its own."""

    _completion: ItemsCompletion

    def __init__(self, completion: ItemsCompletion, model: str, tokenizer: Tokenizer, request_id: str):
        super().__init__(completion, model, tokenizer, request_id)
        self._num_events = 0
        self._output: list[Body] = []
        self._is_open = False  # whether the last item is
        self._input = InputReader()  # of the last call of a custom tool
        self._entries: list[Body] = []  # of log-probabilities, whose text has not come
        self._response: Body = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "usage": None,
        } | completion.repeated

    def whole(self, generations: Sequence[Generation], num_cached: int | None = None, scores: Scores = ()) -> Body:
        """Returns the response; see `Writer.whole`."""
        self.chunks(0, one_piece(generations[0]))
        response: Body = self.end(generations, num_cached)[-1]["response"]
        return response

    def event(self, body: Body) -> str:
        """Returns a server-sent event with the name of its type."""
        return writer.named_event(body)

    def begin(self) -> list[Body]:
        """Returns the events before the first tokens."""
        return [self._of_response("response.created"), self._of_response("response.in_progress")]

    def chunks(self, index: int, piece: Piece) -> list[Body]:
        """Returns the events of a piece; after the last one no item is open, unless the text ended with an error."""
        choice, generation = self._choices[index], piece.generation
        if self._completion.shown.top is not None:
            self._entries += choice.entries(piece)
        events = [
            event
            for part in choice.parts(choice.text(piece), generation is not None)
            for event in self._events_of(part)
        ]
        if generation is not None and generation.finish_reason[0] not in FAILURES:
            if not self._output:  # an empty text is a message too
                events += self._open_message()
            is_cut = choice.reason(generation) == "length"
            events += self._close("incomplete" if is_cut else "completed")
        return events

    def end(self, generations: Sequence[Generation], num_cached: int | None) -> list[Body]:
        """Returns the last event, that of the whole response, which is stored."""
        is_cut = self._output[-1]["status"] == "incomplete"
        usage = self.usage(generations, num_cached)
        num_thinking = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        self._response |= {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": {"cached_tokens": num_cached or 0, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": num_thinking},
            },
        }
        event = self._of_response(f"response.{self._response['status']}")
        if self._completion.store is not None:
            self._completion.store.add(self._completion.items, event["response"])
        return [event]

    def failed(self, error: RequestError) -> list[Body]:
        """Returns the events of an error, with which the response ends."""
        described = error.body["error"]
        self._response |= {
            "status": "failed",
            "error": {"code": described["code"] or described["type"], "message": described["message"]},
        }
        # The specification nests the error, and OpenAI's reference does not.
        flat = {name: described[name] for name in ("code", "message", "param")}
        return [self._event("error", error=described, **flat), self._of_response("response.failed")]

    def _events_of(self, part: Part) -> Iterator[Body]:
        match part:
            case Content(text):
                if not self._is_in("message"):
                    yield from self._close()
                    yield from self._open_message()
                shown = self._output[-1]["content"][0]
                shown["text"] += text
                entries, self._entries = self._entries, []
                shown["logprobs"] += entries
                yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=entries)
            case Thought(text):
                if not self._is_in("reasoning"):
                    yield from self._close()
                    item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
                    yield from self._open_with_part(item, {"type": "reasoning_text", "text": ""})
                self._output[-1]["content"][0]["text"] += text
                yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)
            case Called(name):
                yield from self._close()
                yield from self._open(self._call(self._completion.origins[name]))
            case Arguments(text):
                call = self._output[-1]
                field, event = TEXT_OF_CALLS[call["type"]]
                if call["type"] == "custom_tool_call":
                    text = self._input.feed(text)
                call[field] += text
                if text:
                    yield self._of_item(f"response.{event}.delta", delta=text)

    def _is_in(self, kind: str) -> bool:
        """Whether the last item is open, and of this type."""
        return self._is_open and self._output[-1]["type"] == kind

    def _call(self, origin: Origin) -> Body:
        """Returns the item of a call that begins."""
        self._input = InputReader()
        kind, short = ("custom_tool_call", "ctc") if origin.kind == "custom" else ("function_call", "fc")
        call: Body = {"id": new_id(short), "type": kind, "call_id": writer.call_id(), "name": origin.name}
        if origin.namespace is not None:
            call["namespace"] = origin.namespace
        return call | {TEXT_OF_CALLS[kind][0]: ""}

    def _open_message(self) -> Iterator[Body]:
        item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        yield from self._open_with_part(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _open_with_part(self, item: Body, part: Body) -> Iterator[Body]:
        """Yields the events that begin an item with a single part."""
        yield from self._open(item)
        self._output[-1]["content"].append(part)
        yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _open(self, item: Body) -> Iterator[Body]:
        self._output.append(item | {"status": "in_progress"})
        self._is_open = True
        yield self._of_whole_item("response.output_item.added")

    def _close(self, status: str = "completed") -> Iterator[Body]:
        """Yields the events that end the last item, if it has not ended."""
        if not self._is_open:
            return
        item, self._is_open = self._output[-1], False
        match item:
            case {"type": "message", "content": [part]}:
                part["logprobs"] += self._entries
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._of_item("response.output_text.done", content_index=0, **text)
                yield self._of_item("response.content_part.done", content_index=0, part=part)
            case {"type": "reasoning", "content": [part]}:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
                yield self._of_item("response.content_part.done", content_index=0, part=part)
            case {"type": "function_call", "name": name, "arguments": arguments}:
                yield self._of_item("response.function_call_arguments.done", name=name, arguments=arguments)
            case {"type": "custom_tool_call", "input": text}:
                yield self._of_item("response.custom_tool_call_input.done", input=text)
        item["status"] = status
        yield self._of_whole_item("response.output_item.done")

    def _of_item(self, kind: str, **values: Any) -> Body:
        """Returns an event within the last item."""
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **values)

    def _of_whole_item(self, kind: str) -> Body:
        """Returns an event of the last item as a whole."""
        return self._event(kind, output_index=len(self._output) - 1, item=self._output[-1])

    def _of_response(self, kind: str) -> Body:
        return self._event(kind, response=self._response | {"output": self._output})

    def _event(self, kind: str, **values: Any) -> Body:
        """Returns the next event, with copies of what later events change."""
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **copy.deepcopy(values)}


def new_id(kind: str) -> str:
    """Returns an id that nobody can guess."""
    return f"{kind}_{secrets.token_hex(16)}"
