"""Fields that ask for token ids, log-probabilities and stop strings in a response, in OpenAI's and vLLM's words."""

from typing import Any, NamedTuple

from jlade.server import fields
from jlade.server.fields import Body

FIELDS = {"include_stop_str_in_output", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}


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


def read(body: Body, top: int | None, max_top: int) -> ResponseFields:
    """Returns the facts that a body asks for, with `top` alternatives of each token of the text."""
    of_prompt = alternatives(body, "prompt_logprobs", max_top)
    if of_prompt is not None and body.get("stream"):
        raise fields.refused("stream", True, "false with prompt_logprobs")
    ids_as_names = fields.boolean(body, "return_tokens_as_token_ids")
    stop = fields.boolean(body, "include_stop_str_in_output")
    return ResponseFields(fields.boolean(body, "return_token_ids"), ids_as_names, top, of_prompt, stop)


def alternatives(body: Body, name: str, max_top: int) -> int | None:
    """Returns the number of alternatives of each token that a field asks for, None if it is not given."""
    number = fields.integer(body, name, None, 0)
    if number is not None and number > max_top:
        raise fields.refused(name, number, f"at most {max_top}, the limit that --max-top-logprobs sets")
    return number
