"""The message of `/v1/messages`, whole and as the events of a stream."""

from collections.abc import Iterator, Sequence

from jlade.generation.results import FAILURES, Generation, Piece
from jlade.generation.text import Tokenizer
from jlade.server import tools, writer
from jlade.server.calls import Arguments, Called, Content, Part, Thought
from jlade.server.fields import Body, RequestError
from jlade.server.messages.reading import MessageCompletion
from jlade.server.writer import Scores, Writer, one_piece

DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}  # by the types of blocks, which name their texts too


class MessageWriter(Writer):
    """Writes the response to a body of `/v1/messages`, whole or in events."""

    ping, done = writer.named_event({"type": "ping"}), ""
    _completion: MessageCompletion

    def __init__(self, completion: MessageCompletion, model: str, tokenizer: Tokenizer, request_id: str):
        super().__init__(completion, model, tokenizer, request_id)
        self._blocks: list[Body] = []
        self._is_open = False  # whether the last block is
        self._input = ""  # of the last block, in JSON
        self._message: Body = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def whole(self, generations: Sequence[Generation], num_cached: int | None = None, scores: Scores = ()) -> Body:
        """Returns the message; see `Writer.whole`."""
        self.chunks(0, one_piece(generations[0]))
        usage = self._usage(generations, num_cached)
        return self._message | {"content": self._blocks, **self._end(generations[0]), "usage": usage}

    def event(self, body: Body) -> str:
        """Returns a server-sent event with the name of its type."""
        return writer.named_event(body)

    def begin(self) -> list[Body]:
        """Returns the events before the first tokens. How many of the prompt need not be read is not known yet."""
        return [{"type": "message_start", "message": self._message | {"usage": self._usage([], 0)}}, {"type": "ping"}]

    def chunks(self, index: int, piece: Piece) -> list[Body]:
        """Returns the events of a piece; after the last one no block is open, unless the text ended with an error."""
        choice, generation = self._choices[index], piece.generation
        parts = choice.parts(choice.text(piece), generation is not None)
        events = [event for part in parts for event in self._events_of(part)]
        if generation is not None and generation.finish_reason[0] not in FAILURES:
            events += self._close()
        return events

    def end(self, generations: Sequence[Generation], num_cached: int | None) -> list[Body]:
        """Returns the events of the end of the message."""
        usage = self._usage(generations, num_cached)
        delta = {"type": "message_delta", "delta": self._end(generations[0]), "usage": usage}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: RequestError) -> list[Body]:
        """Returns the event of an error, with which a stream ends."""
        return [error.in_anthropic_form(self._request_id)]

    def _end(self, generation: Generation) -> Body:
        """Returns why the message has ended."""
        reason, stopped = self._choices[0].reason(generation), self._choices[0].stop_string
        if reason == "length":
            is_limit = generation.lengths[0] == self._completion.limit
            return _stop("max_tokens" if is_limit else "model_context_window_exceeded")
        if any(block["type"] == "tool_use" for block in self._blocks):
            return _stop("tool_use")
        is_of_body = stopped in self._completion.stop_sequences
        return _stop("stop_sequence", stopped) if is_of_body else _stop("end_turn")

    def _usage(self, generations: Sequence[Generation], num_cached: int | None) -> Body:
        counts, cached = self.counts(generations), num_cached or 0
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }

    def _events_of(self, part: Part) -> Iterator[Body]:
        match part:
            case Content(text):
                yield from self._add("text", {"type": "text", "text": ""}, text)
            case Thought(text):
                yield from self._add("thinking", {"type": "thinking", "thinking": "", "signature": ""}, text)
            case Called(name):
                yield from self._close()
                yield from self._open({"type": "tool_use", "id": writer.call_id(), "name": name, "input": {}})
            case Arguments(text):
                self._input += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _add(self, kind: str, empty: Body, text: str) -> Iterator[Body]:
        """Yields the events of a text for the last block, which is opened if it is not of this kind."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._close()
            yield from self._open(empty)
        self._blocks[-1][kind] += text
        yield self._delta({"type": DELTAS[kind], kind: text})

    def _open(self, block: Body) -> Iterator[Body]:
        self._blocks.append(block)
        self._is_open, self._input = True, ""
        yield self._of_block("content_block_start", content_block=dict(block))

    def _delta(self, delta: Body) -> Body:
        return self._of_block("content_block_delta", delta=delta)

    def _close(self) -> Iterator[Body]:
        """Yields the events that end the last block, if it has not ended."""
        if not self._is_open:
            return
        block, self._is_open = self._blocks[-1], False
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        if block["type"] == "tool_use":
            block["input"] = tools.read_arguments("the input of a call at the limit", self._input)
        yield self._of_block("content_block_stop")

    def _of_block(self, kind: str, **values: Body) -> Body:
        """Returns an event of the last block."""
        return {"type": kind, "index": len(self._blocks) - 1, **values}


def _stop(reason: str, sequence: str | None = None) -> Body:
    return {"stop_reason": reason, "stop_sequence": sequence}
