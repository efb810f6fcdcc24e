"""Bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`, read into prompts and options of `Engine.submit`."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from jlade.config import CONTROLS, WITHOUT_FILTERS, SamplingConfig
from jlade.constraints.automaton import TooLargeError
from jlade.constraints.grammar import Grammar, TableSizeError, check_size
from jlade.errors import ArgumentError
from jlade.generation import constraining
from jlade.generation import text as text_lib
from jlade.generation.chat_template import RESULT, SYSTEM, USER, ChatTemplate, Message
from jlade.generation.least_tokens import LeastTokens
from jlade.generation.request import EOS_SLOTS
from jlade.generation.text import Tokenizer
from jlade.server import body_fields, history, kinds, structured, tools
from jlade.server.body_fields import Tables
from jlade.server.call_formats import Form
from jlade.server.examples import Examples
from jlade.server.fields import Body, RequestError, refused, too_long
from jlade.server.kinds import Kind
from jlade.server.structured import GrammarField
from jlade.server.thoughts import Marks, Thoughts
from jlade.server.tools import Tools

MAX_CHOICES = 128  # of a body, by default
DEFAULT_MAX_TOKENS = 16  # of a completion that states no limit, as in OpenAI's interface

# Roles, with those of templates.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ROLE = kinds.one_of(*ROLES)
# Names of the thoughts in a message, in the order of transformers. Templates get the first ones under the first name.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Fields of a message that templates may use beside role, content and calls.
PASSED = {"name", "tool_call_id", *THOUGHTS}
# Arguments of the renderer that are no variables for a body to give.
OF_RENDERER = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversations", "messages",
    "return_assistant_tokens_mask", "tools",
}  # fmt: skip
OF_THINKING = {"enable_thinking", "thinking"}  # variables of templates, most of which have one of them
# Arguments of the engine that its errors name, and the fields of bodies.
OF_ENGINE = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_ids": "stop_token_ids"}


class ResponseFields(NamedTuple):
    """The facts of tokens that a response shows.

    Attributes:
      ids: whether it has the ids of prompts and texts.
      ids_as_names: whether the name of a token is `token_id:` and its id, which no other token shares.
      top: alternatives of each token of a text; None without log-probabilities.
      of_prompt: alternatives of each token of a prompt; None without log-probabilities.
      stop: whether a text has the stop string or token that ends it.
    """

    ids: bool = False
    ids_as_names: bool = False
    top: int | None = None
    of_prompt: int | None = None
    stop: bool = False

    def options(self, is_echoed: bool) -> dict[str, Any]:
        """Returns the options of `Engine.submit`, with the log-probabilities of an echoed prompt too."""
        numbers = [number for number in (self.top, self.of_prompt) if number is not None]
        if not numbers:
            return {}
        options = {"logprobs": True, "top_logprobs": max(numbers)}
        return options | ({"prompt_logprobs": True} if is_echoed or self.of_prompt is not None else {})


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
      content: texts around the content of an answer, empty without them.
      grammar: that a field asks for, None for any text.
      has_format: whether the content of an answer without calls is a text of a grammar.
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
    content: tuple[str, str] = ("", "")
    grammar: GrammarField | None = None
    has_format: bool = False
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
            raise too_long(self.field, f"{len(prompt)} tokens and {limit} new ones", capacity, remedy)
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

    @functools.cached_property
    def tables(self) -> Tables:
        """The fields of each route."""
        return Tables(self.vocab_size, self.max_choices, self.max_top_logprobs, self.max_logprobs)

    def chat(self, body: Body) -> Completion:
        """Reads a body of `/v1/chat/completions`."""
        if body.get("max_completion_tokens") is not None:
            body = body | {"max_tokens": None}  # which it replaces
        values = kinds.read(body, self.tables.chat)
        top, has_logprobs = values.get("top_logprobs", 0), values.get("logprobs", False)
        if top and not has_logprobs:
            raise refused("logprobs", body.get("logprobs"), f"true with top_logprobs={top}")
        limit = values.get("max_completion_tokens", values.get("max_tokens"))
        chosen = tools.read(values)
        values |= {"logprobs": top if has_logprobs else None, "max_tokens": limit}
        return self.of_chat(values, self._chat_prompt(values, chosen), chosen, "messages")

    def of_chat(self, values: Body, prompt: list[int], chosen: Tools | None, field: str) -> Completion:
        """Returns a chat; see `_completion`."""
        form = None if chosen is None else (self._form, chosen)
        marks = self._marks.after(self.tokenizer, prompt)
        return self._completion(
            values, [prompt], field, is_chat=True, tools=form, thoughts=marks.thoughts, content=marks.content
        )

    def completion(self, body: Body) -> Completion:
        """Reads a body of `/v1/completions`."""
        values = {"max_tokens": DEFAULT_MAX_TOKENS} | kinds.read(body, self.tables.completion)
        prompts, is_list = _prompts(values.get("prompt"))
        names = [f"prompt[{i}]" for i in range(len(prompts))] if is_list else ["prompt"]
        return self.of_prompts(values, dict(zip(names, prompts, strict=True)), "prompt")

    def of_prompts(self, values: Body, prompts: dict[str, Any], field: str) -> Completion:
        """Returns completions of prompts, which are texts or token ids by their names in errors; see `_completion`."""
        is_echoed, n = values.get("echo", False), values.get("n", 1)
        if is_echoed and values.get("logprobs") is not None and values.get("stream"):
            raise refused("stream", True, "false for the log-probabilities of an echoed prompt")
        if n * len(prompts) > self.max_choices:
            accepted = f"at most {self.max_choices} choices in all, with n={n}"
            raise RequestError(f"prompt must be {accepted}, got {len(prompts)} prompts", "prompt")
        for name, prompt in prompts.items():
            self._check_length(name, prompt, self._min_tokens)
        ids = [self._encode(name, prompt) for name, prompt in prompts.items()]
        echo = [
            prompt if isinstance(prompt, str) else text_lib.decode(self.tokenizer, prompt)
            for prompt in (prompts.values() if is_echoed else ())
        ]
        return self._completion(values, ids, field, is_chat=False, echo=echo)

    def _completion(self, values: Body, prompts: list[list[int]], field: str, **given: Any) -> Completion:
        """Returns the completions that the values of a body's fields ask for.

        Args:
          values: `max_tokens` and `logprobs`, the number of alternatives, have been made of the route's own fields.
          prompts, field, given: attributes of the completions.
        """
        stream, stream_options = values.get("stream", False), values.get("stream_options", {})
        if stream_options and not stream:
            raise refused("stream_options", stream_options, "left out unless stream is true")
        shown = ResponseFields(
            ids=values.get("return_token_ids", False),
            ids_as_names=values.get("return_tokens_as_token_ids", False),
            top=values.get("logprobs"),
            of_prompt=values.get("prompt_logprobs"),
            stop=values.get("include_stop_str_in_output", False),
        )
        if shown.of_prompt is not None and stream:
            raise refused("stream", True, "false with prompt_logprobs")
        limit, prediction = values.get("max_tokens"), self._prediction(values.get("prediction", ""))
        options = {
            "sampling": _sampling(values, self.sampling),
            "eos_ids": self._eos_ids(values),
            "stop": values.get("stop", list(self.stop)),
            "min_new_tokens": kinds.integer(0, limit or 2**31 - 1)("min_tokens", values.get("min_tokens", 0)),
            **shown.options(bool(given.get("echo"))),
            **_shares(values),
            **({"prediction": prediction, "with_statistics": True} if prediction else {}),
        }
        completion = Completion(
            prompts=prompts,
            field=field,
            n=values.get("n", 1),
            limit=limit,
            shown=shown,
            options=options,
            seed=values.get("seed"),
            stream=stream,
            include_usage=stream_options.get("include_usage") or False,
            continuous_usage=stream_options.get("continuous_usage_stats") or False,
            num_predicted=len(prediction),
            steps=values.get("jlade", {}).get("steps") or False,
            **given,
        )
        return _with_grammar_of(values, completion)

    def with_grammar(self, completion: CompletionT) -> CompletionT:
        """Returns the same with the grammar among its options. Its table is made, which may take seconds, and kept."""
        if completion.grammar is None:
            return completion
        of_tools = completion.tools
        with completion.grammar.errors():
            while True:
                try:
                    grammar = completion.grammar.make(*of_tools or ())
                    table = constraining.table_of(
                        grammar, text_lib.token_bytes(self.tokenizer), completion.options["eos_ids"], self.vocab_size
                    )
                    if self.max_grammar is not None:
                        check_size(table, self.max_grammar)
                    break
                except (TooLargeError, TableSizeError) as error:
                    if of_tools is None:
                        raise
                    form, chosen = of_tools
                    of_tools = form, chosen.looser(form, str(error))
        return dataclasses.replace(completion, options=completion.options | {"grammar": grammar})

    def tokens(self, body: Body) -> list[int]:
        """Reads a body of `/tokenize`, and returns the token ids."""
        values = kinds.read(body, self.tables.tokenize)
        if "messages" in body:
            return self.conversation(
                "messages",
                _messages(body["messages"]),
                tools.read(values),
                add_generation_prompt=kinds.boolean("add_generation_prompt", values.get("add_generation_prompt", True)),
                add_special_tokens=values.get("add_special_tokens", False),
                variables=self.variables(values),
            )
        prompt = kinds.text("prompt", body.get("prompt"))
        self._check_length("prompt", prompt, self._min_tokens)
        return self._encode("prompt", prompt, values.get("add_special_tokens", True))

    def text(self, body: Body) -> str:
        """Reads a body of `/detokenize`, and returns the text with the names of special tokens."""
        values = kinds.read(body, self.tables.detokenize)
        return text_lib.decode_with_special(self.tokenizer, self.token_ids("tokens", values.get("tokens")))

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
            raise too_long(name, f"{len(prompt)} tokens", self.capacity)
        num_tokens = min_tokens(prompt)
        if num_tokens > self.capacity:
            amount = f"{len(prompt)} characters and therefore at least {num_tokens} tokens"
            raise too_long(name, amount, self.capacity)

    @functools.cached_property
    def _examples(self) -> Examples | None:
        """Answers as the chat template writes them."""
        ends = [text_lib.token_name(self.tokenizer, token) for token in self.eos_ids]
        return None if self.chat_template is None else Examples(self.chat_template, ends)

    @functools.cached_property
    def _marks(self) -> Marks:
        """The marks of answers."""
        return Marks() if self._examples is None else Marks.of(self._examples)

    @functools.cached_property
    def _form(self) -> Form:
        """The form of calls of tools."""
        if self._examples is None:
            raise RequestError("the model has no chat template, which tools need", "tools")
        try:
            return Form.of(self._examples, self._marks)
        except ValueError as error:
            raise RequestError(str(error), "tools") from error

    def variables(self, values: Body) -> Body:
        """Returns the variables of the chat template that the values of a body's fields give."""
        given = dict(values.get("chat_template_kwargs", {}))
        if effort := values.get("reasoning_effort"):
            given = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {}) | given
        if (is_thinking := values.get("enable_thinking", given.get("enable_thinking"))) is not None:
            given = dict.fromkeys(OF_THINKING, is_thinking) | given
        if self.chat_template is None:
            return {}
        own = {*OF_RENDERER, *self.chat_template.tokenizer.special_tokens_map}
        if taken := sorted(given.keys() & own):
            raise refused(f"chat_template_kwargs.{taken[0]}", given[taken[0]], "a variable that no other field gives")
        source = self.chat_template.source()
        unused = {name for name in given if not re.search(rf"\b{re.escape(name)}\b", source)}
        for name in unused if unused >= OF_THINKING else unused - OF_THINKING:
            kinds.warn_once("the chat template has no variable %s, which changes nothing", name)
        return given

    def _chat_prompt(self, values: Body, chosen: Tools | None) -> list[int]:
        """Returns the token ids of `messages`, or `input_ids`, with which a client has rendered them, as in SGLang."""
        ids = values.get("input_ids")
        if ids is None:
            messages = _messages(values.get("messages"))
            return self.conversation("messages", messages, chosen, variables=self.variables(values))
        if ids == []:
            raise refused("input_ids", ids, "at least one token")
        self._check_length("input_ids", ids, self._min_tokens)
        return self.token_ids("input_ids", ids)

    def conversation(
        self,
        field: str,
        messages: Sequence[Message],
        chosen: Tools | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        variables: Body | None = None,
    ) -> list[int]:
        """Returns the token ids of messages, which errors call `field`; `variables` are those of `variables`."""
        if self.chat_template is None:
            raise RequestError("the model has no chat template; use `/v1/completions`", field)
        given = None if chosen is None or not self._form.is_shown else chosen.given
        try:
            shown = self._as_shown(messages, chosen, given)
            rendered = self.chat_template.render(shown, add_generation_prompt, tools=given, variables=variables)
            self._check_length(field, rendered, self._min_tokens_of_chats)
            ids = self.chat_template.encode(rendered, add_special_tokens)
        except ValueError as error:
            raise RequestError(str(error), field) from error
        if not ids:
            raise refused(field, messages, "a conversation of at least one token")
        return ids

    def _as_shown(
        self, messages: Sequence[Message], chosen: Tools | None, given: list[Body] | None
    ) -> Sequence[Message]:
        """Returns messages so that the chat template, which is given some tools, shows all of them and their calls."""
        assert self.chat_template is not None
        if chosen is not None and given is None:
            example = self._form.example().strip()
            kinds.warn_once("the chat template shows no tools: a message shows them, with this example: %s", example)
            shows_system = self.chat_template.shows((SYSTEM, USER))
            messages = history.introduced(messages, chosen.shown(self._form), shows_system)
        has_calls = any(message.get("tool_calls") for message in messages)
        if has_calls and self.chat_template.call_style(given) is None:
            messages = history.with_calls_as_content(messages, self._form)
        has_results = any(message["role"] == RESULT for message in messages)
        if has_results and not self.chat_template.shows_results(given):
            messages = history.with_results_as_questions(messages)
        return messages

    def _encode(self, name: str, prompt: Any, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a prompt in text or in token ids; errors call it `name`."""
        if isinstance(prompt, str):
            ids = text_lib.encode(self.tokenizer, kinds.text(name, prompt), add_special_tokens=add_special_tokens)
            if not ids:
                raise refused(name, prompt, "text of at least one token")
            return ids
        if prompt == []:
            raise refused(name, prompt, "at least one token")
        return self.token_ids(name, prompt)

    def _prediction(self, text: str) -> list[int]:
        """Returns the token ids of a prediction, none of an empty one."""
        if not self.max_prediction or not text:
            return []
        if len(text) <= self.max_prediction or self._min_tokens(text) <= self.max_prediction:
            ids = text_lib.encode(self.tokenizer, text, add_special_tokens=False)
            if len(ids) <= self.max_prediction:
                return ids
        raise refused("prediction", text, f"a text of at most {self.max_prediction} tokens")

    @property
    def token_ids(self) -> Kind:
        """The kind of lists of token ids."""
        return body_fields.token_ids(self.vocab_size)

    def _eos_ids(self, values: Body) -> list[int]:
        ends = [] if values.get("ignore_eos") else list(self.eos_ids)
        extra = values.get("stop_token_ids", [])
        if len(ends) + len(extra) > EOS_SLOTS:
            raise refused("stop_token_ids", extra, f"at most {EOS_SLOTS - len(ends)} token ids")
        return ends + extra


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    """Returns the prompts, given one or a list of them, and whether it is a list."""
    is_ids = isinstance(prompt, list) and prompt and kinds.is_integer(prompt[0])
    if isinstance(prompt, str) or is_ids:
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise refused("prompt", prompt, "a string, token ids, or a list of these")
    return prompt, True


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise refused("messages", messages, "a list of at least one message")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(name: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise refused(name, message, "an object with role and content")
    role = ROLE(f"{name}.role", message.get("role"))
    kinds.values(message, body_fields.UNSUPPORTED_IN_MESSAGES, f"{name}.")
    content = "" if role == "assistant" and message.get("content") is None else message.get("content")
    read: dict[str, Any] = {"role": ROLES[role], "content": kinds.parts(f"{name}.content", content)}
    read |= {
        key: kinds.text(f"{name}.{key}", value) for key, value in message.items() if key in PASSED and value is not None
    }
    if written := [read.pop(key) for key in THOUGHTS if key in read]:
        read[THOUGHTS[0]] = written[0]
    if calls := message.get("tool_calls"):
        read["tool_calls"] = tools.read_calls(f"{name}.tool_calls", calls)
    return read


def _sampling(values: Body, default: SamplingConfig) -> SamplingConfig:
    """Returns the controls that a body gives, and those of `default` that it does not.

    The bias of `default` comes on top of that of the body.
    """
    controls: dict[str, Any] = {
        name: None if values[name] == control.neutral else values[name]
        for name, control in CONTROLS.items()
        if name in values
    }
    if "logit_bias" in values:
        controls["logit_bias"] = values["logit_bias"] | dict(default.logit_bias or ())
    if controls.get("top_k") == -1:  # as in vLLM's interface
        controls["top_k"] = None
    if controls.get("top_p") == 0:  # which leaves the best token alone
        controls |= {"temperature": 0, "top_p": None}
    try:
        result = dataclasses.replace(default, **controls)
    except ArgumentError as error:  # the controls have the names of fields
        raise RequestError(str(error), error.argument) from error
    return dataclasses.replace(result, **WITHOUT_FILTERS) if result.temperature == 0 else result


def _shares(values: Body) -> Body:
    """Returns the options that say what a request has of earlier ones, which changes no text, as far as they are given.

    `Service` makes other keys of these for each API key.
    """
    options: Body = {} if values.get("speculative", True) else {"lookahead": False}
    if key := values.get("prompt_cache_key"):
        options |= {"remember_key": key, "remember": values.get("remember", True)}
    return options | ({"prefix_key": values["cache_salt"]} if "cache_salt" in values else {})


def _with_grammar_of(values: Body, completion: Completion) -> Completion:
    """Returns a completion with the grammar that the values of a body's fields or its tools ask for."""
    grammar = structured.read(values)
    if grammar is None and completion.tools is None:
        return completion
    if not completion.options["eos_ids"]:
        asking = "tools" if grammar is None else grammar.field
        name, accepted = ("ignore_eos", "left out") if values.get("ignore_eos") else ("stop_token_ids", "given")
        accepted = f"{accepted} beside {asking}, whose texts need a token that ends them"
        raise refused(name, values.get(name), accepted)
    has_format = grammar is not None and (completion.tools is None or not completion.tools[1].must_call)
    if completion.tools is not None:
        grammar = _of_tools(completion, grammar if has_format else None)
    elif grammar is not None:
        grammar = grammar.after(completion.thoughts, completion.content)
    return dataclasses.replace(completion, grammar=grammar, has_format=has_format)


def _of_tools(completion: Completion, other: GrammarField | None) -> GrammarField:
    """Returns the grammar of calls, by default of the completion's tools, or of a text that another field asks for."""
    assert completion.tools is not None
    form, given = completion.tools

    def make(form: Form = form, chosen: Tools = given) -> Grammar:
        text = None
        if other is not None:
            with other.errors():
                text = other.make()
            if text.is_tagged:
                raise RequestError(f"{other.field} and tools ask for two grammars of tags: leave out one", other.field)
        return chosen.grammar(form, completion.thoughts, completion.content, text)

    return GrammarField("tools", make)
