"""Bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`, read into prompts and options of `Engine.submit`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from jlade.config import CONTROLS, WITHOUT_FILTERS, SamplingConfig
from jlade.constraints.grammar import check_size
from jlade.errors import ArgumentError
from jlade.generation import constraining
from jlade.generation import text as text_lib
from jlade.generation.chat_template import ChatTemplate, Message
from jlade.generation.least_tokens import LeastTokens
from jlade.generation.request import EOS_SLOTS
from jlade.generation.text import Tokenizer
from jlade.server import fields, known_fields, response_fields, structured, thoughts, tools
from jlade.server.call_formats import Form
from jlade.server.fields import Body, RequestError
from jlade.server.response_fields import ResponseFields
from jlade.server.thoughts import Thoughts
from jlade.server.tools import Tools

MAX_CHOICES = 128  # of a body, by default
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1024  # each token is compared with all of them, on the host
MAX_KEY_LENGTH = 1024  # characters of a prompt_cache_key
DEFAULT_MAX_TOKENS = 16  # of a completion that states no limit, as in OpenAI's interface

# The fields that are read in the body of a chat or a completion alone, and in both.
OF_BOTH = {
    "cache_salt", "ignore_eos", "jlade", "logit_bias", "logprobs", "max_tokens", "min_tokens", "model", "n",
    "prediction", "prompt_cache_key", "remember", "seed", "speculative", "stop", "stop_token_ids", "stream",
    "stream_options", *CONTROLS, *structured.FIELDS, *response_fields.FIELDS,
}  # fmt: skip
OF_CHAT = OF_BOTH | {
    "input_ids", "max_completion_tokens", "messages", "parallel_tool_calls", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip
OF_COMPLETION = OF_BOTH | {"echo", "prompt"}
OF_TOKENIZE = {"add_generation_prompt", "add_special_tokens", "messages", "model", "prompt", "return_token_strs"}
OF_DETOKENIZE = {"model", "tokens"}
# Roles, with those of templates.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Names of the thoughts in a message, in the order of transformers. Templates get the first ones under the first name.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Fields of a message that templates may use beside role, content and calls.
PASSED = {"name", "tool_call_id", *THOUGHTS}
# Arguments of the engine that its errors name, and the fields of bodies.
OF_ENGINE = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_ids": "stop_token_ids"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The completions that a body asks for: n choices for each prompt.

    Attributes:
      prompts: token ids.
      field: that the prompts were read from.
      n: choices for each prompt.
      limit: most new tokens; None for as many as fit.
      shown: the facts of tokens that the response shows.
      echo: the texts of the prompts if the response is to repeat them, else empty.
      tools: that an answer may use, None for none, and the form of their calls.
      thoughts: with which an answer may begin.
      grammar: that a field asks for, None for any text.
      after: the end of the thoughts before a text of a grammar, which alone is the content; None without them.
      options: of `Engine.submit` for all prompts, without `max_new_tokens`, `key` and `grammar`.
      seed: None for a text that differs each time.
      include_usage: whether a stream ends with the numbers of tokens.
      continuous_usage: whether its other chunks have them too, up to there.
      num_predicted: tokens of the prediction, 0 without one.
      steps: whether the response shows the text of each step.
    """

    is_chat: bool
    prompts: list[list[int]]
    field: str
    n: int
    limit: int | None
    shown: ResponseFields
    echo: Sequence[str] = ()
    tools: tuple[Form, Tools] | None = None
    thoughts: Thoughts = ()
    grammar: structured.GrammarField | None = None
    after: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_predicted: int = 0
    steps: bool = False
    names: ClassVar[dict[str, str]] = OF_ENGINE  # of arguments of the engine, in bodies

    def max_new_tokens(self, prompt: Sequence[int], capacity: int) -> int:
        """Returns the most new tokens after a prompt; without a limit as many as fit.

        Raises:
          RequestError: prompt and text exceed `capacity` tokens.
        """
        limit = max(1, capacity - len(prompt)) if self.limit is None else self.limit
        if len(prompt) + limit > capacity:
            remedy = f"shorten it or lower {self.names['max_new_tokens']}"
            raise fields.too_long(self.field, f"{len(prompt)} tokens and {limit} new ones", capacity, remedy)
        return limit

    def refusal(self, error: ArgumentError) -> RequestError:
        """Returns the error of an argument of the engine as that of the field that the argument is made from."""
        names = self.names | {"prompt": self.field}
        if self.grammar is not None:
            names["grammar"] = self.grammar.field
        field = names.get(error.argument, error.argument)
        return RequestError(f"{field} {error.problem}", field)


CompletionT = TypeVar("CompletionT", bound=Completion)


@dataclasses.dataclass(frozen=True)
class BodyReader:
    """Reads bodies for a model.

    Attributes:
      tokenizer: of prompts in text.
      chat_template: of conversations; None for a model without one.
      vocab_size: token ids are below it.
      eos_ids: tokens that end a text.
      sampling: for the controls that a body does not give.
      stop: strings that end a text, unless a body gives others.
      capacity: most tokens of a prompt and its text. A text that has more by its length is not tokenized.
      max_prediction: most tokens of a prediction; 0 to ignore predictions, which change no text.
      max_grammar: most entries of the table of a grammar; None for any number.
      max_top_logprobs: most alternatives of a token of a chat.
      max_logprobs: and of a completion.
      max_choices: most choices of a body, no more than may wait.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    vocab_size: int
    eos_ids: Sequence[int]
    sampling: SamplingConfig
    capacity: int
    stop: Sequence[str] = ()
    max_prediction: int = 0
    max_grammar: int | None = None
    max_top_logprobs: int = 0
    max_logprobs: int = 0
    max_choices: int = MAX_CHOICES

    def chat(self, body: Body) -> Completion:
        """Reads a body of `/v1/chat/completions`."""
        known_fields.check(body, OF_CHAT, known_fields.UNSUPPORTED_IN_CHATS, known_fields.WITHIN_CHAT)
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        max_top = self.max_top_logprobs
        logprobs, top = fields.boolean(body, "logprobs"), response_fields.alternatives(body, "top_logprobs", max_top)
        if top and not logprobs:
            raise fields.refused("logprobs", body.get("logprobs"), f"true with top_logprobs={top}")
        chosen = tools.read(body)
        return self.of_chat(
            body,
            self._chat_prompt(body, chosen),
            chosen,
            structured.read(body),
            limit=fields.integer(body, limit, None, 1),
            shown=response_fields.read(body, (top or 0) if logprobs else None, max_top),
            field="messages",
        )

    def of_chat(
        self,
        body: Body,
        prompt: list[int],
        chosen: Tools | None,
        grammar: structured.GrammarField | None,
        *,
        limit: int | None,
        shown: ResponseFields,
        field: str,
    ) -> Completion:
        """Reads the fields of a body that do not depend on how it gives a conversation.

        The body may be that of another endpoint that has some fields of a chat.
        """
        completion = Completion(
            is_chat=True,
            prompts=[prompt],
            field=field,
            limit=limit,
            shown=shown,
            tools=None if chosen is None else (self._form, chosen),
            thoughts=thoughts.of(self.tokenizer, prompt),
            grammar=grammar,
            n=self._num_choices(body, 1),
        )
        return self._with_options(completion, body)

    def completion(self, body: Body) -> Completion:
        """Reads a body of `/v1/completions`."""
        known_fields.check(body, OF_COMPLETION, known_fields.UNSUPPORTED_IN_COMPLETIONS, known_fields.WITHIN_BOTH)
        prompts, is_list = _prompts(body.get("prompt"))
        return self.of_prompts(
            body, {f"prompt[{i}]" if is_list else "prompt": prompt for i, prompt in enumerate(prompts)}, field="prompt"
        )

    def of_prompts(
        self, body: Body, prompts: dict[str, Any], *, field: str, default_limit: int | None = DEFAULT_MAX_TOKENS
    ) -> Completion:
        """Reads the fields of a completion but its prompts, which are texts or token ids by their names in errors."""
        is_echoed = fields.boolean(body, "echo")
        if isinstance(logprobs := body.get("logprobs"), bool):  # as in a chat
            body = body | {"logprobs": 1 if logprobs else None}
        top = response_fields.alternatives(body, "logprobs", self.max_logprobs)
        if is_echoed and top is not None and body.get("stream"):
            raise fields.refused("stream", True, "false for the log-probabilities of an echoed prompt")
        n = self._num_choices(body, len(prompts))
        for name, prompt in prompts.items():
            self._check_length(name, prompt, self._min_tokens)
        completion = Completion(
            is_chat=False,
            grammar=structured.read(body),
            prompts=[self._encode(name, prompt) for name, prompt in prompts.items()],
            field=field,
            n=n,
            limit=fields.integer(body, "max_tokens", default_limit, 1),
            shown=response_fields.read(body, top, self.max_logprobs),
            echo=[
                prompt if isinstance(prompt, str) else text_lib.decode(self.tokenizer, prompt)
                for prompt in (prompts.values() if is_echoed else ())
            ],
        )
        return self._with_options(completion, body)

    def with_grammar(self, completion: CompletionT) -> CompletionT:
        """Returns the same with the grammar among its options. Its table is made, which may take seconds, and kept."""
        if completion.grammar is None:
            return completion
        grammar = completion.grammar.grammar()
        with completion.grammar.errors():
            table = constraining.table_of(
                grammar, text_lib.token_bytes(self.tokenizer), completion.options["eos_ids"], self.vocab_size
            )
            if self.max_grammar is not None:
                check_size(table, self.max_grammar)
        return dataclasses.replace(completion, options=completion.options | {"grammar": grammar})

    def tokens(self, body: Body) -> list[int]:
        """Reads a body of `/tokenize`, and returns the token ids."""
        within = {"messages": known_fields.MESSAGE}
        known_fields.check(body, OF_TOKENIZE, known_fields.UNSUPPORTED_IN_TOKENIZE, within)
        if "messages" in body:
            return self.conversation(
                "messages",
                _messages(body.get("messages")),
                add_generation_prompt=fields.boolean(body, "add_generation_prompt", default=True),
                add_special_tokens=fields.boolean(body, "add_special_tokens"),
            )
        prompt = fields.text("prompt", body.get("prompt"))
        self._check_length("prompt", prompt, self._min_tokens)
        return self._encode("prompt", prompt, fields.boolean(body, "add_special_tokens", default=True))

    def text(self, body: Body) -> str:
        """Reads a body of `/detokenize`, and returns the text with the names of special tokens."""
        known_fields.check(body, OF_DETOKENIZE, {}, {})
        return text_lib.decode_with_special(self.tokenizer, self.token_ids("tokens", body.get("tokens")))

    @functools.cached_property
    def _min_tokens(self) -> LeastTokens:
        return LeastTokens(self.tokenizer)

    @functools.cached_property
    def _min_tokens_of_chats(self) -> LeastTokens:
        assert self.chat_template is not None
        return LeastTokens(self.chat_template.tokenizer)

    def _check_length(self, name: str, prompt: Any, min_tokens: LeastTokens) -> None:
        """Raises a RequestError for token ids that are too many, and a text that has too many by its length."""
        if not isinstance(prompt, str | list) or len(prompt) <= self.capacity:
            return
        if isinstance(prompt, list):
            raise fields.too_long(name, f"{len(prompt)} tokens", self.capacity)
        num_tokens = min_tokens(prompt)
        if num_tokens > self.capacity:
            amount = f"{len(prompt)} characters and therefore at least {num_tokens} tokens"
            raise fields.too_long(name, amount, self.capacity)

    @functools.cached_property
    def _form(self) -> Form:
        """The form of calls of tools."""
        if self.chat_template is None:
            raise RequestError("the model has no chat template, which tools need", "tools")
        try:
            return Form.of(self.chat_template, [text_lib.token_name(self.tokenizer, token) for token in self.eos_ids])
        except ValueError as error:
            raise RequestError(str(error), "tools") from error

    def _chat_prompt(self, body: Body, chosen: Tools | None) -> list[int]:
        """Returns the token ids of `messages`, or `input_ids`, with which a client has rendered them, as in SGLang."""
        ids = body.get("input_ids")
        if ids is None:
            return self.conversation("messages", _messages(body.get("messages")), chosen)
        if ids == []:
            raise fields.refused("input_ids", ids, "at least one token")
        self._check_length("input_ids", ids, self._min_tokens)
        return self.token_ids("input_ids", ids)

    def conversation(
        self,
        field: str,
        messages: Sequence[Message],
        chosen: Tools | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Returns the token ids of messages, which errors call `field`."""
        if self.chat_template is None:
            raise RequestError("the model has no chat template; use `/v1/completions`", field)
        given_tools = None if chosen is None else chosen.given
        try:
            rendered = self.chat_template.render(messages, add_generation_prompt, tools=given_tools)
            self._check_length(field, rendered, self._min_tokens_of_chats)
            ids = self.chat_template.encode(rendered, add_special_tokens)
        except ValueError as error:
            raise RequestError(str(error), field) from error
        if not ids:
            raise fields.refused(field, messages, "a conversation of at least one token")
        return ids

    def _encode(self, name: str, prompt: Any, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a prompt in text or in token ids; errors call it `name`."""
        if isinstance(prompt, str):
            ids = text_lib.encode(self.tokenizer, fields.text(name, prompt), add_special_tokens=add_special_tokens)
            if not ids:
                raise fields.refused(name, prompt, "text of at least one token")
            return ids
        if prompt == []:
            raise fields.refused(name, prompt, "at least one token")
        return self.token_ids(name, prompt)

    def _with_options(self, completion: Completion, body: Body) -> Completion:
        """Returns a completion with the fields of a body that do not depend on how it gives its prompts."""
        limit, grammar, after = completion.limit, completion.grammar, None
        options: dict[str, Any] = {
            "sampling": _sampling(body, self.sampling, self.vocab_size),
            "eos_ids": self._eos_ids(body),
            "stop": list(self.stop) if body.get("stop") is None else _stop(body["stop"]),
            "min_new_tokens": fields.integer(body, "min_tokens", 0, 0, 2**31 - 1 if limit is None else limit),
            **completion.shown.options(bool(completion.echo)),
            **_shares(body),
        }
        prediction = self._prediction(body.get("prediction"))
        if prediction:
            options |= {"prediction": prediction, "with_statistics": True}
        stream, stream_options = fields.boolean(body, "stream"), fields.nested(body, "stream_options")
        if stream_options and not stream:
            raise fields.refused("stream_options", stream_options, "left out unless stream is true")
        if (grammar is not None or completion.tools is not None) and not options["eos_ids"]:
            asking = "tools" if grammar is None else grammar.field
            name = "ignore_eos" if fields.boolean(body, "ignore_eos") else "stop_token_ids"
            accepted = f"left out beside {asking}" if name == "ignore_eos" else f"given beside {asking}"
            raise fields.refused(name, body.get(name), f"{accepted}, whose texts need a token that ends them")
        if completion.tools is not None:
            form, chosen = completion.tools
            if grammar is not None:
                raise RequestError(f"{grammar.field} and tools ask for two grammars: leave out one", grammar.field)
            make = functools.partial(chosen.grammar, form, completion.thoughts)
            grammar = structured.GrammarField("tools", make)
        elif grammar is not None and (after := thoughts.end_of_begun(completion.thoughts)) is not None:
            grammar = grammar.after(after)
        return dataclasses.replace(
            completion,
            grammar=grammar,
            after=after,
            options=options,
            seed=_seed(body),
            stream=stream,
            include_usage=fields.boolean(stream_options, "include_usage", "stream_options"),
            continuous_usage=fields.boolean(stream_options, "continuous_usage_stats", "stream_options"),
            num_predicted=len(prediction),
            steps=fields.boolean(fields.nested(body, "jlade"), "steps", "jlade"),
        )

    def _num_choices(self, body: Body, num_prompts: int) -> int:
        """Returns the number of choices for each prompt."""
        number = fields.integer(body, "n", 1, 1, self.max_choices)
        assert number is not None
        if number * num_prompts > self.max_choices:
            accepted = f"at most {self.max_choices} choices in all, with n={number}"
            raise RequestError(f"prompt must be {accepted}, got {num_prompts} prompts", "prompt")
        return number

    def _prediction(self, prediction: Any) -> list[int]:
        """Returns the token ids of a prediction, none without one."""
        if prediction is None:
            return []
        if not isinstance(prediction, dict) or prediction.get("type") != "content":
            raise fields.refused("prediction", prediction, '{"type": "content", "content": ...}')
        text = fields.content("prediction.content", prediction.get("content"))
        if not self.max_prediction:
            return []
        if len(text) <= self.max_prediction or self._min_tokens(text) <= self.max_prediction:
            ids = text_lib.encode(self.tokenizer, text, add_special_tokens=False)
            if len(ids) <= self.max_prediction:
                return ids
        raise fields.refused("prediction", text, f"a text of at most {self.max_prediction} tokens")

    def token_ids(self, name: str, ids: Any) -> list[int]:
        accepted = f"a list of token ids from 0 to {self.vocab_size - 1}"
        if not isinstance(ids, list):
            raise fields.refused(name, ids, accepted)
        for token in ids:
            if not fields.is_integer(token) or not 0 <= token < self.vocab_size:
                raise fields.refused(name, token, accepted)
        return ids

    def _eos_ids(self, body: Body) -> list[int]:
        ends = [] if fields.boolean(body, "ignore_eos") else list(self.eos_ids)
        extra = self.token_ids("stop_token_ids", body.get("stop_token_ids") or [])
        if len(ends) + len(extra) > EOS_SLOTS:
            raise fields.refused("stop_token_ids", extra, f"at most {EOS_SLOTS - len(ends)} token ids")
        return ends + extra


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    """Returns the prompts, given one or a list of them, and whether it is a list."""
    is_ids = isinstance(prompt, list) and prompt and fields.is_integer(prompt[0])
    if isinstance(prompt, str) or is_ids:
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise fields.refused("prompt", prompt, "a string, token ids, or a list of these")
    return prompt, True


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise fields.refused("messages", messages, "a list of at least one message")
    result: list[Message] = []
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        if not isinstance(message, dict):
            raise fields.refused(name, message, "an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise fields.refused(f"{name}.role", role, f"one of {', '.join(ROLES)}")
        known_fields.refuse(message, known_fields.UNSUPPORTED_IN_MESSAGES, f"{name}.")
        content, calls = message.get("content"), message.get("tool_calls")
        if role == "assistant" and content is None:
            content = ""
        read: dict[str, Any] = {"role": ROLES[role], "content": fields.parts(f"{name}.content", content)}
        for key, value in message.items():
            if key in PASSED and value is not None:
                read[key] = fields.text(f"{name}.{key}", value)
        written = [read.pop(key) for key in THOUGHTS if key in read]
        if written:
            read[THOUGHTS[0]] = written[0]
        if calls:
            read["tool_calls"] = tools.read_calls(f"{name}.tool_calls", calls)
        result.append(read)
    return result


def _sampling(body: Body, default: SamplingConfig, vocab_size: int) -> SamplingConfig:
    """Returns the controls of a body, and those of `default` that it does not give.

    The bias of `default` comes on top of that of the body.
    """
    controls: dict[str, Any] = {}
    for name, control in CONTROLS.items():
        value = body.get(name)
        if value is not None:
            fields.check_number(name, value, *control.served)
            controls[name] = None if value == control.neutral else value
    if body.get("logit_bias"):
        controls["logit_bias"] = _bias(body["logit_bias"], vocab_size) | dict(default.logit_bias or ())
    if controls.get("top_k") == -1:  # as in vLLM's interface
        controls["top_k"] = None
    if controls.get("top_p") == 0:  # which leaves the best token alone
        controls |= {"temperature": 0, "top_p": None}
    try:
        result = dataclasses.replace(default, **controls)
    except ArgumentError as error:  # the controls have the names of fields
        raise RequestError(str(error), error.argument) from error
    if result.temperature == 0:
        result = dataclasses.replace(result, **WITHOUT_FILTERS)
    return result


def _bias(bias: Any, vocab_size: int) -> dict[int, float]:
    accepted = f"an object of numbers from -100 to 100 by token ids from 0 to {vocab_size - 1}"
    if not isinstance(bias, dict):
        raise fields.refused("logit_bias", bias, accepted)
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            raise fields.refused("logit_bias", token, accepted)
        fields.check_number("logit_bias", value, -100, 100)
    return {int(token): float(value) for token, value in bias.items()}


def _stop(stop: Any) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop
    accepted = f"a string or a list of at most {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH} characters"
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise fields.refused("stop", stop, accepted)
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise fields.refused("stop", string, accepted)
        fields.text("stop", string)
    return strings


def _shares(body: Body) -> Body:
    """Returns the options that say what a request has of earlier ones, which changes no text, as far as they are given.

    `Service` makes other keys of these for each API key.
    """
    options: Body = {} if fields.boolean(body, "speculative", default=True) else {"lookahead": False}
    keeps = fields.boolean(body, "remember", default=True)
    key = body.get("prompt_cache_key")
    if key is not None and len(fields.text("prompt_cache_key", key)) > MAX_KEY_LENGTH:
        raise fields.refused("prompt_cache_key", key, f"a string of at most {MAX_KEY_LENGTH} characters")
    options |= {"remember_key": key, "remember": keeps} if key else {}
    salt = body.get("cache_salt")
    if salt == "":
        raise fields.refused("cache_salt", salt, "a string of at least one character")
    return options if salt is None else options | {"prefix_key": fields.text("cache_salt", salt)}


def _seed(body: Body) -> int | None:
    seed = fields.integer(body, "seed", None, -(2**63), 2**63 - 1)
    return None if seed == -1 else seed
