"""Bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`, read into prompts and options of `Engine.submit`."""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from jlade.config import SamplingConfig
from jlade.generation import text as text_lib
from jlade.generation.chat_template import Message
from jlade.generation.request import EOS_SLOTS
from jlade.generation.text import Tokenizer
from jlade.server import fields
from jlade.server.fields import Body, RequestError

MOST_CHOICES = 128  # of a body, by default
MOST_STOP_STRINGS, LONGEST_STOP_STRING = 64, 1024  # each token is compared with all of them, on the host
MOST_COMPLETION_TOKENS = 16  # of a completion that states no limit, as in OpenAI's interface

# Ranges of the sampling controls, and their values without effect, which take no time if they are left out.
RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
NEUTRAL = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
# Fields that would change the text and are not supported, with the values that change nothing. Others are ignored.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # -> the template's


@dataclasses.dataclass(frozen=True)
class Asked:
    """The completions that a body asks for: n choices for each prompt.

    Attributes:
      prompts: token ids.
      options: of `Engine.submit` for all prompts, without `max_new_tokens` and `key`.
      limit: most new tokens; None for a chat without a limit.
      seed: None for a text that differs each time.
      echo: the texts of the prompts if the response is to repeat them, else empty.
      num_predicted: tokens of the prediction, 0 without one.
      steps: whether the response shows the text of each step.
    """

    is_chat: bool
    prompts: list[list[int]]
    options: dict[str, Any]
    limit: int | None
    seed: int | None
    n: int
    stream: bool
    include_usage: bool
    echo: list[str]
    num_predicted: int
    steps: bool

    def max_new_tokens(self, prompt: Sequence[int], capacity: int) -> int:
        """Returns the most new tokens after a prompt; without a limit as many as fit.

        Raises:
          RequestError: prompt and text exceed `capacity` tokens.
        """
        limit = max(1, capacity - len(prompt)) if self.limit is None else self.limit
        if len(prompt) + limit > capacity:
            field = "messages" if self.is_chat else "prompt"
            raise RequestError(
                f"{field} of {len(prompt)} tokens and {limit} new ones exceed the limit of {capacity} tokens; shorten "
                "the prompt or max_tokens",
                field,
                "context_length_exceeded",
            )
        return limit


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads bodies for a model.

    Attributes:
      tokenizer: of prompts in text.
      encode_chat: returns the token ids of a conversation, as `chat_template.encode`; None without a chat template.
      vocab_size: token ids are below it.
      eos_ids: tokens that end a text.
      sampling: for the controls that a body does not give.
      predicts: whether predictions give drafts; they change no text.
      max_top_logprobs: most alternatives of a token of a chat.
      max_logprobs: and of a completion.
      max_choices: most choices of a body, no more than may wait.
    """

    tokenizer: Tokenizer
    encode_chat: Callable[[Sequence[Message]], list[int]] | None
    vocab_size: int
    eos_ids: Sequence[int]
    sampling: SamplingConfig
    predicts: bool = True
    max_top_logprobs: int = 0
    max_logprobs: int = 0
    max_choices: int = MOST_CHOICES

    def chat(self, body: Body) -> Asked:
        """Reads a body of `/v1/chat/completions`.

        Raises:
          RequestError: names the field, its value and what is accepted.
        """
        _refuse_unsupported(body, UNSUPPORTED | {"add_special_tokens": (False,)})
        _refuse_tools(body)
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        logprobs, top = fields.boolean(body, "logprobs"), self._top(body, "top_logprobs", self.max_top_logprobs)
        if top and not logprobs:
            raise fields.refused("logprobs", body.get("logprobs"), f"true with top_logprobs={top}")
        return self._asked(
            body,
            is_chat=True,
            prompts=[self.conversation(body)],
            limit=fields.integer(body, limit, None, 1),
            logprobs={"logprobs": True, "top_logprobs": top or 0} if logprobs else {},
            echo=[],
        )

    def completion(self, body: Body) -> Asked:
        """Reads a body of `/v1/completions`.

        Raises:
          RequestError: as `chat` does.
        """
        _refuse_unsupported(body, UNSUPPORTED | {"add_special_tokens": (True,)})
        top, is_echoed = self._top(body, "logprobs", self.max_logprobs), fields.boolean(body, "echo")
        if is_echoed and top is not None and body.get("stream"):
            raise fields.refused("stream", True, "false for the log-probabilities of an echoed prompt")
        given = _prompts(body.get("prompt"))
        return self._asked(
            body,
            is_chat=False,
            prompts=[self.encode(name, one) for name, one in given.items()],
            limit=fields.integer(body, "max_tokens", MOST_COMPLETION_TOKENS, 1),
            logprobs={} if top is None else {"logprobs": True, "top_logprobs": top, "prompt_logprobs": is_echoed},
            echo=[self._text(one) for one in given.values()] if is_echoed else [],
        )

    def conversation(self, body: Body) -> list[int]:
        """Returns the token ids of `messages`, up to the beginning of the answer."""
        messages = _messages(body.get("messages"))
        if self.encode_chat is None:
            raise RequestError("the model has no chat template; use `/v1/completions`", "messages")
        try:
            ids = self.encode_chat(messages)
        except ValueError as error:
            raise RequestError(str(error), "messages") from error
        if not ids:
            raise fields.refused("messages", messages, "a conversation of at least one token")
        return ids

    def encode(self, name: str, prompt: Any) -> list[int]:
        """Returns the token ids of a prompt in text or in token ids; errors call it `name`."""
        if isinstance(prompt, str):
            ids = text_lib.encode(self.tokenizer, fields.text(name, prompt))
            if not ids:
                raise fields.refused(name, prompt, "text of at least one token")
            return ids
        if prompt == []:
            raise fields.refused(name, prompt, "at least one token")
        return self._token_ids(name, prompt)

    def _top(self, body: Body, name: str, most: int) -> int | None:
        """Returns the number of alternatives of each token, None if the field is not given."""
        number = fields.integer(body, name, None, 0)
        if number is not None and number > most:
            raise fields.refused(name, number, f"at most {most}, the limit that --max-top-logprobs sets")
        return number

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else text_lib.decode(self.tokenizer, prompt)

    def _asked(
        self,
        body: Body,
        *,
        is_chat: bool,
        prompts: list[list[int]],
        limit: int | None,
        logprobs: dict[str, Any],
        echo: list[str],
    ) -> Asked:
        options: dict[str, Any] = {
            "sampling": self._sampling(body),
            "eos_ids": self._eos_ids(body),
            "stop": _stop(body.get("stop")),
            "min_new_tokens": fields.integer(body, "min_tokens", 0, 0, 2**31 - 1 if limit is None else limit),
            **logprobs,
        }
        prediction = _prediction(body.get("prediction"))
        num_predicted = 0
        if prediction and self.predicts:
            options |= {"prediction": prediction, "with_statistics": True}
            num_predicted = len(text_lib.encode(self.tokenizer, prediction)) - len(text_lib.encode(self.tokenizer, ""))
        n = fields.integer(body, "n", 1, 1, self.max_choices)
        assert n is not None
        if n * len(prompts) > self.max_choices:
            raise fields.refused("prompt", prompts, f"at most {self.max_choices} choices in all, with n={n}")
        return Asked(
            is_chat=is_chat,
            prompts=prompts,
            options=options,
            limit=limit,
            seed=_seed(body),
            n=n,
            stream=fields.boolean(body, "stream"),
            include_usage=fields.boolean(fields.nested(body, "stream_options"), "include_usage", "stream_options"),
            echo=echo,
            num_predicted=num_predicted,
            steps=fields.boolean(fields.nested(body, "jlade"), "steps", "jlade"),
        )

    def _token_ids(self, name: str, ids: Any) -> list[int]:
        accepted = f"a list of token ids from 0 to {self.vocab_size - 1}"
        if not isinstance(ids, list):
            raise fields.refused(name, ids, accepted)
        for token in ids:
            if not fields.is_integer(token) or not 0 <= token < self.vocab_size:
                raise fields.refused(name, token, accepted)
        return ids

    def _eos_ids(self, body: Body) -> list[int]:
        ends = [] if fields.boolean(body, "ignore_eos") else list(self.eos_ids)
        extra = self._token_ids("stop_token_ids", body.get("stop_token_ids") or [])
        if len(ends) + len(extra) > EOS_SLOTS:
            raise fields.refused("stop_token_ids", extra, f"at most {EOS_SLOTS - len(ends)} token ids")
        return ends + extra

    def _sampling(self, body: Body) -> SamplingConfig:
        given: dict[str, Any] = {}
        for name, (least, most) in RANGES.items():
            value = body.get(name)
            if value is not None:
                fields.check_number(name, value, least, most)
                given[name] = None if value in NEUTRAL.get(name, ()) else value
        if body.get("logit_bias"):
            given["logit_bias"] = self._bias(body["logit_bias"])
        try:
            sampling = dataclasses.replace(self.sampling, **given)
        except (TypeError, ValueError) as error:
            raise RequestError(str(error), str(error).split()[0]) from error
        if sampling.temperature == 0:  # filters take time, and leave greedy text as it is
            sampling = dataclasses.replace(sampling, top_k=None, top_p=None, min_p=None)
        return sampling

    def _bias(self, bias: Any) -> dict[int, float]:
        accepted = f"an object of numbers from -100 to 100 by token ids from 0 to {self.vocab_size - 1}"
        if not isinstance(bias, dict):
            raise fields.refused("logit_bias", bias, accepted)
        for token, value in bias.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < self.vocab_size):
                raise fields.refused("logit_bias", token, accepted)
            fields.check_number("logit_bias", value, -100, 100)
        return {int(token): float(value) for token, value in bias.items()}


def _refuse_unsupported(body: Body, unsupported: dict[str, tuple[Any, ...]]) -> None:
    for name, neutral in unsupported.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            also = "".join(f" or set it to {json.dumps(each)}" for each in neutral)
            raise RequestError(f"{name}={reprlib.repr(value)} is not supported: leave it out{also}", name)


def _refuse_tools(body: Body) -> None:
    if body.get("tools") and body.get("tool_choice") != "none":
        raise RequestError('tools are not supported: leave them out, or set tool_choice to "none"', "tools")


def _prompts(prompt: Any) -> dict[str, Any]:
    """Returns the prompts by their names in errors, given one or a list of them."""
    is_ids = isinstance(prompt, list) and prompt and fields.is_integer(prompt[0])
    if isinstance(prompt, str) or is_ids:
        return {"prompt": prompt}
    if not isinstance(prompt, list) or not prompt:
        raise fields.refused("prompt", prompt, "a string, token ids, or a list of these")
    return {f"prompt[{i}]": one for i, one in enumerate(prompt)}


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
        if message.get("tool_calls"):
            raise RequestError(f"{name}.tool_calls are not supported", f"{name}.tool_calls")
        result.append({"role": ROLES[role], "content": fields.content(f"{name}.content", message.get("content"))})
    return result


def _stop(stop: Any) -> list[str]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    accepted = f"a string or a list of at most {MOST_STOP_STRINGS}, each of 1 to {LONGEST_STOP_STRING} characters"
    if not isinstance(strings, list) or len(strings) > MOST_STOP_STRINGS:
        raise fields.refused("stop", stop, accepted)
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= LONGEST_STOP_STRING:
            raise fields.refused("stop", string, accepted)
        fields.text("stop", string)
    return strings


def _seed(body: Body) -> int | None:
    seed = fields.integer(body, "seed", None, -1, 2**32 - 1)
    return None if seed == -1 else seed


def _prediction(prediction: Any) -> str | None:
    if prediction is None:
        return None
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise fields.refused("prediction", prediction, '{"type": "content", "content": ...}')
    return fields.content("prediction.content", prediction.get("content"))
