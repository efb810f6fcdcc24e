"""Responses of OpenAI's interface: whole ones, and the chunks of a stream."""

import itertools
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import jlade
from jlade.engine.scoring import PromptLogProbs
from jlade.generation import text as text_lib
from jlade.generation.results import Generation, Piece
from jlade.generation.text import Detokenizer, Tokenizer
from jlade.server.calls import Arguments, Called, CallReader, Content, Part, gather
from jlade.server.fields import Body
from jlade.server.protocol import Asked

DONE = "data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # as OpenAI writes that of an impossible token; JSON has no infinity


def event(body: Body) -> str:
    """Returns a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


class Writer:
    """Writes the response to a body, whole or in chunks.

    Args:
      asked: what the body asks for.
      model: its name in the response.
      tokenizer: of the tokens.
      request_id: the last part of the response's id.
    """

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer, request_id: str):
        self._asked, self._tokenizer = asked, tokenizer
        name = "chat.completion" if asked.is_chat else "text_completion"
        self._object = name
        self._head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{request_id}",
            "object": name,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"jlade-{jlade.__version__}",
        }
        self._choices = [_Choice(asked, i, tokenizer) for i in range(asked.n * len(asked.prompts))]

    def whole(
        self,
        generations: Sequence[Generation],
        num_cached: int | None = None,
        prompt_logprobs: Sequence[PromptLogProbs | None] = (),
    ) -> Body:
        """Returns the response with all choices.

        Args:
          generations: their results.
          num_cached: tokens of the prompts that were not read; None to leave it out.
          prompt_logprobs: of the choices' prompts; those of an echoed one come before those of the text.
        """
        choices = []
        for index, (choice, generation) in enumerate(zip(self._choices, generations, strict=True)):
            piece = _one_piece(generation)
            text = choice.echo + choice.text(piece)
            content: Body = {"message": choice.message(text)} if self._asked.is_chat else {"text": text}
            logprobs = choice.logprobs(piece)
            if choice.echo and logprobs is not None:
                of_prompt = choice.prompt_logprobs(prompt_logprobs[index])
                logprobs = {name: of_prompt[name] + logprobs[name] for name in logprobs}
            reason = choice.reason(generation)
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": reason})
        return self._head | {"choices": choices, "usage": self.usage(generations, num_cached)}

    def begin(self) -> list[Body]:
        """Returns the chunks before the first tokens: the role of each message, or the prompts to repeat."""
        if self._asked.is_chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            return [self._chunk(i, {"delta": delta}) for i in range(len(self._choices))]
        return [self._chunk(i, {"text": choice.echo}) for i, choice in enumerate(self._choices) if choice.echo]

    def chunks(self, index: int, piece: Piece) -> list[Body]:
        """Returns the chunks of a piece: one if it has something to show, and one for the end of the text.

        A text that ended with an error has none for its end.
        """
        choice, chunks = self._choices[index], []
        choice.num_tokens += len(piece.tokens)
        text, steps = choice.text(piece), choice.steps(piece) if self._asked.steps else None
        if self._asked.tools is not None:
            contents: list[Body] = [{"delta": delta} for delta in choice.deltas(text, piece.generation is not None)]
        else:
            contents = [{"delta": {"content": text}} if self._asked.is_chat else {"text": text}] if text else []
        if not contents and (piece.logprobs is not None or steps is not None):
            contents = [{"delta": {"content": ""}} if self._asked.is_chat else {"text": ""}]
        for number, content in enumerate(contents):  # the first chunk of a piece has what is known of its tokens
            chunk = self._chunk(index, content, None if number else choice.logprobs(piece))
            chunks.append(chunk if number or steps is None else chunk | {"jlade": {"steps": steps}})
        if piece.generation is not None and piece.generation.finish_reason[0] != "error":
            content = {"delta": {}} if self._asked.is_chat else {"text": ""}
            chunks.append(self._chunk(index, content, reason=choice.reason(piece.generation)))
        return chunks

    def end(self, generations: Sequence[Generation], num_cached: int) -> list[Body]:
        """Returns the chunks after the last tokens: that of the usage, if it is asked for."""
        if not self._asked.include_usage:
            return []
        return [self._chunk_head() | {"choices": [], "usage": self.usage(generations, num_cached)}]

    def usage(self, generations: Sequence[Generation], num_cached: int | None) -> Body:
        """Returns the numbers of tokens; the end token of a text counts."""
        prompt = sum(map(len, self._asked.prompts))
        completion = int(sum(generation.lengths[0] for generation in generations))
        usage = _usage(prompt, completion)
        if num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if self._asked.num_predicted:
            accepted = [int(each.statistics.contributed["prediction"][0]) for each in generations]
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(accepted),
                "rejected_prediction_tokens": sum(max(0, self._asked.num_predicted - each) for each in accepted),
            }
        return usage

    def _chunk_head(self) -> Body:
        return self._head | {"object": "chat.completion.chunk"} if self._asked.is_chat else self._head

    def _chunk(self, index: int, content: Body, logprobs: Any = None, reason: str | None = None) -> Body:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._chunk_head() | {"choices": [choice]}
        if not self._asked.include_usage:
            return chunk
        return chunk | {"usage": self._choices[index].usage() if self._asked.continuous_usage else None}


class _Choice:
    """A choice of a response, of which pieces may follow each other."""

    def __init__(self, asked: Asked, index: int, tokenizer: Tokenizer):
        self.echo = asked.echo[index // asked.n] if asked.echo else ""
        self._prompt = asked.prompts[index // asked.n]
        self._is_chat, self._tokenizer = asked.is_chat, tokenizer
        self._ends = asked.options["eos_ids"]
        stop = asked.options["stop"]
        self._of_text = Detokenizer(tokenizer, stop, with_special=asked.tools is not None)
        self._of_steps = Detokenizer(tokenizer, stop)
        self._offset = len(self.echo)  # of the next token in the text, in characters
        self._decoder = Detokenizer(tokenizer)
        self._calls = None if asked.tools is None else CallReader(*asked.tools)
        self._num_calls = 0
        self.num_tokens = 0  # of the pieces so far

    def usage(self) -> Body:
        """Returns the numbers of tokens of the prompt and of the pieces so far, as vLLM counts them in each chunk."""
        return _usage(len(self._prompt), self.num_tokens)

    def text(self, piece: Piece) -> str:
        """Returns the text of a piece, without that of the token that ends it."""
        return self._feed(self._of_text, piece.tokens.tolist(), piece.generation is not None)

    def _feed(self, detokenizer: Detokenizer, tokens: list[int], is_last: bool) -> str:
        own = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        return detokenizer.feed(own, last=is_last)

    def message(self, text: str) -> Body:
        """Returns the message of a whole answer."""
        content, calls = (text, []) if self._calls is None else gather(self._calls.feed(text, last=True))
        self._num_calls = len(calls)
        message: Body = {"role": "assistant", "content": content, "refusal": None}
        if not calls:
            return message
        return message | {"content": content or None, "tool_calls": [_call(function) for function in calls]}

    def deltas(self, text: str, is_last: bool) -> list[Body]:
        """Returns the deltas of a piece of an answer with tools."""
        assert self._calls is not None
        return [self._delta(part) for part in self._calls.feed(text, is_last)]

    def _delta(self, part: Part) -> Body:
        match part:
            case Content(text):
                return {"content": text}
            case Called(name):
                self._num_calls += 1
                call = _call({"name": name, "arguments": ""})
            case Arguments(text):
                call = {"function": {"arguments": text}}
        return {"tool_calls": [{"index": self._num_calls - 1} | call]}

    def reason(self, generation: Generation) -> str:
        """Returns the reason of the end, after the last part of the answer."""
        if generation.finish_reason[0] == "length":
            return "length"
        return "tool_calls" if self._num_calls else "stop"

    def logprobs(self, piece: Piece) -> Body | None:
        """Returns the log-probabilities of the tokens of a piece, None if they were not asked for."""
        if piece.logprobs is None:
            return None
        # An end token is no part of the text. In a completion it has its entry all the same, as in vLLM's: who asks for
        # the scores of a prompt counts on one more token, and drops the last one.
        drops_end = self._is_chat and len(piece.tokens) > 0 and piece.tokens[-1] in self._ends
        number = len(piece.tokens) - drops_end
        chosen = [self._named(*each) for each in zip(piece.tokens[:number], piece.logprobs, strict=False)]
        if piece.top_tokens is None:
            top: list[list[Body]] = [[] for _ in chosen]
        else:
            rows = zip(piece.top_tokens[:number], piece.top_logprobs, strict=False)
            top = [[self._named(*each) for each in zip(*row, strict=True)] for row in rows]
        if self._is_chat:
            content = [one | {"top_logprobs": others} for one, others in zip(chosen, top, strict=True)]
            return {"content": content, "refusal": None}
        offsets = []
        for token in piece.tokens[:number].tolist():
            offsets.append(self._offset)
            self._offset += len(self._decoder.feed([token]))
        return {**_of_completion(chosen, top), "text_offset": offsets}

    def prompt_logprobs(self, scores: PromptLogProbs | None) -> Body:
        """Returns the log-probabilities of the tokens of the prompt, null for the first; None for no more tokens."""
        chosen, top = [], []
        if scores is not None:
            chosen = [self._named(*each) for each in zip(self._prompt[1:], scores.logprobs, strict=True)]
            rows = zip(scores.top_tokens, scores.top_logprobs, strict=True)
            top = [[self._named(*each) for each in zip(*row, strict=True)] for row in rows]
        of_tokens = {name: [None, *values] for name, values in _of_completion(chosen, top).items()}
        of_tokens["tokens"][0] = text_lib.token_name(self._tokenizer, self._prompt[0])
        decoder = Detokenizer(self._tokenizer)
        lengths = [len(decoder.feed([token])) for token in self._prompt]
        return of_tokens | {"text_offset": list(itertools.accumulate(lengths[:-1], initial=0))}

    def _named(self, token: int, logprob: float) -> Body:
        data = list(text_lib.token_bytes(self._tokenizer)[token])
        return {
            "token": text_lib.token_name(self._tokenizer, token),
            "logprob": max(float(logprob), LEAST_LOGPROB),
            "bytes": data,
        }

    def steps(self, piece: Piece) -> list[Body]:
        """Returns the steps of a piece: the tokens that each accepted, and the text that it made certain."""
        steps, begin = [], 0
        for number in piece.accepted.tolist():
            end = begin + number
            is_last = piece.generation is not None and end == len(piece.tokens)
            text = self._feed(self._of_steps, piece.tokens[begin:end].tolist(), is_last)
            steps.append({"tokens": number, "text": text})
            begin = end
        return steps


def _usage(prompt: int, completion: int) -> Body:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _of_completion(chosen: list[Body], top: list[list[Body]]) -> Body:
    """Returns the log-probabilities of tokens, with the most probable ones in the place of each."""
    return {
        "tokens": [one["token"] for one in chosen],
        "token_logprobs": [one["logprob"] for one in chosen],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in (*others, one)} for one, others in zip(chosen, top, strict=True)
        ],
    }


def _one_piece(generation: Generation) -> Piece:
    """Returns a result as a single piece."""
    length = generation.lengths[0]

    def first(array: Any) -> Any:
        return None if array is None else array[0, :length]

    return Piece(
        tokens=first(generation.tokens),
        text=generation.text[0],
        accepted=generation.accepted[0],
        logprobs=first(generation.logprobs),
        top_tokens=first(generation.top_tokens),
        top_logprobs=first(generation.top_logprobs),
        generation=generation,
    )


def _call(function: Body) -> Body:
    """Returns a call of a tool with an id of its own: nine digits or letters, as templates of Mistral ask for."""
    return {"id": secrets.token_hex(5)[1:], "type": "function", "function": function}
