"""Responses of OpenAI's interface: whole ones, and the chunks of a stream."""

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jlade
from jlade.engine.scoring import PromptLogProbs
from jlade.generation import text as text_lib
from jlade.generation.results import FAILURES, Generation, Piece
from jlade.generation.text import Detokenizer, Tokenizer
from jlade.server import calls, fields
from jlade.server.calls import Arguments, Called, Content, Part, Thought, gather
from jlade.server.fields import Body, RequestError
from jlade.server.protocol import Completion

Scores = Sequence[PromptLogProbs | None]
OF_THOUGHTS = ("reasoning_content", "reasoning")  # the fields of thoughts in a message, of which clients read one
MIN_LOGPROB = -9999.0  # as OpenAI writes that of an impossible token; JSON has no infinity


def event(body: Body) -> str:
    """Returns a server-sent event."""
    return f"data: {fields.to_json(body)}\n\n"


def named_event(body: Body) -> str:
    """Returns a server-sent event with the name of its type."""
    return f"event: {body['type']}\n{event(body)}"


class Writer:
    """Writes the response to a body, whole or in chunks.

    Args:
      completion: what the body asks for.
      model: its name in the response.
      tokenizer: of the tokens.
      request_id: the last part of the response's id.

    Attributes:
      ping: what a stream sends in place of events that take long; clients skip it.
      done: the last event.
    """

    ping, done = ": \n\n", "data: [DONE]\n\n"

    def __init__(self, completion: Completion, model: str, tokenizer: Tokenizer, request_id: str):
        self._completion, self._tokenizer = completion, tokenizer
        name = "chat.completion" if completion.is_chat else "text_completion"
        self._request_id = request_id
        self._head = {
            "id": f"{'chatcmpl' if completion.is_chat else 'cmpl'}-{request_id}",
            "object": name,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"jlade-{jlade.__version__}",
        }
        self._choices = [_Choice(completion, i, tokenizer) for i in range(completion.n * len(completion.prompts))]

    def whole(self, generations: Sequence[Generation], num_cached: int | None = None, scores: Scores = ()) -> Body:
        """Returns the response with all choices.

        Args:
          generations: their results.
          num_cached: tokens of the prompts that were not read; None to leave it out.
          scores: log-probabilities of the choices' prompts, as far as asked for; those of an echoed one come first.
        """
        scores = scores or [None] * len(self._choices)
        choices = []
        for index, (choice, generation) in enumerate(zip(self._choices, generations, strict=True)):
            piece = one_piece(generation)
            text = choice.echo + choice.text(piece)
            content: Body = {"message": choice.message(text)} if self._completion.is_chat else {"text": text}
            logprobs = choice.logprobs(piece)
            if choice.echo and logprobs is not None:
                of_prompt = choice.echoed_logprobs(scores[index])
                logprobs = {name: of_prompt[name] + logprobs[name] for name in logprobs}
            shown = {**content, "logprobs": logprobs, "finish_reason": choice.reason(generation), **choice.ids(piece)}
            choices.append({"index": index, **shown})
        whole = self._head | {"choices": choices, "usage": self.usage(generations, num_cached)}
        of_prompts = [choice.of_prompt(of_prompt) for choice, of_prompt in zip(self._choices, scores, strict=True)]
        return self._with_prompts(whole, of_prompts)

    def event(self, body: Body) -> str:
        """Returns a server-sent event of a chunk."""
        return event(body)

    def failed(self, error: RequestError) -> list[Body]:
        """Returns the last chunks of a stream that an error ends."""
        return [error.body]

    def begin(self) -> list[Body]:
        """Returns the chunks before the first tokens: the role of each message, or the prompts to repeat."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        chunks = []
        for index, choice in enumerate(self._choices):
            content = {"delta": delta} if self._completion.is_chat else {"text": choice.echo}
            if self._completion.is_chat or choice.echo or self._completion.shown.ids:
                chunks.append(self._with_prompts(self._chunk(index, content), [choice.of_prompt(None)]))
        return chunks

    def _with_prompts(self, body: Body, of_prompts: Sequence[Body]) -> Body:
        """Returns a body with what is known of its prompts: of a completion each choice has it, of a chat the body."""
        if self._completion.is_chat:
            return body | of_prompts[0]
        choices = [choice | of_prompt for choice, of_prompt in zip(body["choices"], of_prompts, strict=True)]
        return body | {"choices": choices}

    def chunks(self, index: int, piece: Piece) -> list[Body]:
        """Returns the chunks of a piece: one if it has something to show, and one for the end of the text.

        A text that ended with an error has none for its end.
        """
        choice, chunks = self._choices[index], []
        choice.num_tokens += len(piece.tokens)
        text, steps = choice.text(piece), choice.steps(piece) if self._completion.steps else None
        if self._completion.is_chat:
            contents: list[Body] = [{"delta": delta} for delta in choice.deltas(text, piece.generation is not None)]
        else:
            contents = [{"text": text}] if text else []
        shown = self._completion.shown
        if not contents and (shown.ids or shown.top is not None or steps is not None):
            contents = [{"delta": {"content": ""}} if self._completion.is_chat else {"text": ""}]
        for number, content in enumerate(contents):  # the first chunk of a piece has what is known of its tokens
            if number:
                chunks.append(self._chunk(index, content))
            else:
                first = self._chunk(index, content | choice.ids(piece), choice.logprobs(piece))
                chunks.append(first if steps is None else first | {"jlade": {"steps": steps}})
        if piece.generation is not None and piece.generation.finish_reason[0] not in FAILURES:
            content = {"delta": {}} if self._completion.is_chat else {"text": ""}
            chunks.append(self._chunk(index, content, reason=choice.reason(piece.generation)))
        return chunks

    def end(self, generations: Sequence[Generation], num_cached: int) -> list[Body]:
        """Returns the chunks after the last tokens: that of the usage, if it is asked for."""
        if not self._completion.include_usage:
            return []
        return [self._chunk_head() | {"choices": [], "usage": self.usage(generations, num_cached)}]

    def counts(self, generations: Sequence[Generation]) -> Body:
        """Returns the numbers of tokens; the end token of a text counts."""
        prompt = sum(map(len, self._completion.prompts))
        return _usage(prompt, int(sum(generation.lengths[0] for generation in generations)))

    def usage(self, generations: Sequence[Generation], num_cached: int | None) -> Body:
        """Returns the numbers of tokens, and which of them were cached, predicted and of thoughts."""
        usage = self.counts(generations)
        if num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        details: Body = {}
        if self._completion.num_predicted:
            accepted = [int(one.statistics.contributed["prediction"][0]) for one in generations]
            rejected = [max(0, self._completion.num_predicted - number) for number in accepted]
            details |= {"accepted_prediction_tokens": sum(accepted), "rejected_prediction_tokens": sum(rejected)}
        if self._completion.thoughts:
            answers = [one_piece(generation).tokens.tolist() for generation in generations]
            counts = [calls.num_thinking(self._completion, self._tokenizer, tokens) for tokens in answers]
            details["reasoning_tokens"] = sum(counts)
        return usage | ({"completion_tokens_details": details} if details else {})

    def _chunk_head(self) -> Body:
        return self._head | {"object": "chat.completion.chunk"} if self._completion.is_chat else self._head

    def _chunk(self, index: int, content: Body, logprobs: Any = None, reason: str | None = None) -> Body:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._chunk_head() | {"choices": [choice]}
        if not self._completion.include_usage:
            return chunk
        return chunk | {"usage": self._choices[index].usage() if self._completion.continuous_usage else None}


class _Choice:
    """A choice of a response, of which pieces may follow each other."""

    def __init__(self, completion: Completion, index: int, tokenizer: Tokenizer):
        self.echo = completion.echo[index // completion.n] if completion.echo else ""
        self._prompt = completion.prompts[index // completion.n]
        self._is_chat, self._tokenizer = completion.is_chat, tokenizer
        self._ends, self._shown = completion.options["eos_ids"], completion.shown
        stop = completion.options["stop"]
        self._reader = calls.reader(completion)
        # Special tokens, which a text that is read further has, are no part of one that keeps the token which ends it.
        self._keeps_end = completion.shown.stop and self._reader is None
        self._of_text = Detokenizer(tokenizer, stop, self._reader is not None, completion.shown.stop)
        self._of_steps = Detokenizer(tokenizer, stop, keeps_stop=completion.shown.stop)
        self._offset = len(self.echo)  # of the next token in the text, in characters
        self._decoder = Detokenizer(tokenizer)
        self._num_calls = 0
        self.num_tokens = 0  # of the pieces so far

    def usage(self) -> Body:
        """Returns the numbers of tokens of the prompt and of the pieces so far, as vLLM counts them in each chunk."""
        return _usage(len(self._prompt), self.num_tokens)

    def text(self, piece: Piece) -> str:
        """Returns the text of a piece, by default without that of the token that ends it."""
        return self._feed(self._of_text, piece.tokens.tolist(), piece.generation)

    def _feed(self, detokenizer: Detokenizer, tokens: list[int], generation: Generation | None) -> str:
        """Returns the text of tokens, the last ones if they come with the result."""
        kept = tokens[:-1] if tokens and tokens[-1] in self._ends and not self._keeps_end else tokens
        cuts = generation is not None and generation.finish_reason[0] == "stop"
        return detokenizer.feed(kept, last=generation is not None, cuts=cuts)

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._of_text.stop_string

    def message(self, text: str) -> Body:
        """Returns the message of a whole answer."""
        thought, content, functions = gather(self.parts(text, is_last=True))
        self._num_calls = len(functions)
        message: Body = {"role": "assistant", "content": content, "refusal": None}
        message |= dict.fromkeys(OF_THOUGHTS, thought) if thought else {}
        if not functions:
            return message
        return message | {"content": content or None, "tool_calls": [_call(function) for function in functions]}

    def parts(self, text: str, is_last: bool) -> list[Part]:
        """Returns the contents and the parts of calls in the text of a piece."""
        if self._reader is None:
            return [Content(text)] if text else []
        return list(self._reader.feed(text, is_last))

    def deltas(self, text: str, is_last: bool) -> list[Body]:
        """Returns the deltas of a piece of a chat."""
        return [self._delta(part) for part in self.parts(text, is_last)]

    def _delta(self, part: Part) -> Body:
        match part:
            case Content(text):
                return {"content": text}
            case Thought(text):
                return dict.fromkeys(OF_THOUGHTS, text)
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
        if self._shown.top is None:
            return None
        entries = self.entries(piece)
        if self._is_chat:
            return {"content": entries, "refusal": None}
        offsets = []
        for token in piece.tokens.tolist():
            offsets.append(self._offset)
            self._offset += len(self._decoder.feed([token]))
        return {**_of_completion(entries), "text_offset": offsets}

    def entries(self, piece: Piece) -> list[Body]:
        """Returns the log-probabilities of the tokens of a piece, each with those of its alternatives."""
        # An end token is no part of the text. In a completion it has its entry all the same, as in vLLM's: who asks for
        # the scores of a prompt counts on one more token, and drops the last one. So it has beside its id.
        drops_end = self._is_chat and not self._shown.ids and len(piece.tokens) > 0 and piece.tokens[-1] in self._ends
        tokens = piece.tokens[: len(piece.tokens) - drops_end]
        return self._scored(tokens, piece.logprobs, piece.top_tokens, piece.top_logprobs)

    def echoed_logprobs(self, scores: PromptLogProbs | None) -> Body:
        """Returns the log-probabilities of the tokens of the prompt, null for the first; None for no more tokens."""
        entries = [] if scores is None else self._scored(self._prompt[1:], *scores)
        of_tokens = {name: [None, *values] for name, values in _of_completion(entries).items()}
        of_tokens["tokens"][0] = self._name(self._prompt[0])
        decoder = Detokenizer(self._tokenizer)
        lengths = [len(decoder.feed([token])) for token in self._prompt]
        return of_tokens | {"text_offset": list(itertools.accumulate(lengths[:-1], initial=0))}

    def _scored(self, tokens: Any, logprobs: Any, top_tokens: Any, top_logprobs: Any) -> list[Body]:
        entries = [self._named(*pair) | {"top_logprobs": []} for pair in zip(tokens, logprobs, strict=False)]
        if top_tokens is not None and self._shown.top:
            for entry, *row in zip(entries, top_tokens, top_logprobs, strict=False):
                pairs = zip(*(values[: self._shown.top] for values in row), strict=True)
                entry["top_logprobs"] = [self._named(*pair) for pair in pairs]
        return entries

    def _named(self, token: int, logprob: float) -> Body:
        token_id = {"token_id": int(token)} if self._shown.ids_as_names else {}
        return token_id | {
            "token": self._name(token),
            "logprob": max(float(logprob), MIN_LOGPROB),
            "bytes": list(text_lib.token_bytes(self._tokenizer)[token]),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._shown.ids_as_names else text_lib.token_name(self._tokenizer, token)

    def ids(self, piece: Piece) -> Body:
        """Returns the ids of the tokens of a piece, the end token too, if they were asked for."""
        return {"token_ids": piece.tokens.tolist()} if self._shown.ids else {}

    def of_prompt(self, scores: PromptLogProbs | None) -> Body:
        """Returns the ids and the log-probabilities of the prompt, as far as they were asked for."""
        facts: Body = {"prompt_token_ids": list(self._prompt)} if self._shown.ids else {}
        if self._shown.of_prompt is None:
            return facts
        return facts | {"prompt_logprobs": [None, *([] if scores is None else self._ranked(scores))]}

    def _ranked(self, scores: PromptLogProbs) -> Iterator[Body]:
        """Yields the log-probabilities of each token of the prompt but the first and of its alternatives, by their ids.

        They have vLLM's form. The rank of a token that is no alternative is not known.
        """
        rows = zip(self._prompt[1:], scores.logprobs, scores.top_tokens, scores.top_logprobs, strict=True)
        for token, logprob, top_tokens, top in rows:
            number = self._shown.of_prompt
            pairs = zip(top_tokens[:number].tolist(), top[:number], strict=True)
            ranked = {other: (of_other, rank) for rank, (other, of_other) in enumerate(pairs, start=1)}
            yield {
                str(scored): {
                    "logprob": max(float(of_scored), MIN_LOGPROB),
                    "rank": rank,
                    "decoded_token": text_lib.token_name(self._tokenizer, scored),
                }
                for scored, (of_scored, rank) in ({token: (logprob, None)} | ranked).items()
            }

    def steps(self, piece: Piece) -> list[Body]:
        """Returns the steps of a piece: the tokens that each accepted, and the text that it made certain."""
        steps, begin = [], 0
        for number in piece.accepted.tolist():
            end = begin + number
            generation = piece.generation if end == len(piece.tokens) else None
            text = self._feed(self._of_steps, piece.tokens[begin:end].tolist(), generation)
            steps.append({"tokens": number, "text": text})
            begin = end
        return steps


def _usage(prompt: int, completion: int) -> Body:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _of_completion(entries: list[Body]) -> Body:
    """Returns log-probabilities in the form of completions, with the most probable tokens in the place of each."""
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {scored["token"]: scored["logprob"] for scored in (*entry["top_logprobs"], entry)} for entry in entries
        ],
    }


def one_piece(generation: Generation) -> Piece:
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
    return {"id": call_id(), "type": "function", "function": function}


def call_id() -> str:
    """Returns an id for a call of a tool: nine digits or letters, as templates of Mistral ask for."""
    return secrets.token_hex(5)[1:]
