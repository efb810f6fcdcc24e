"""The sampling controls of a body."""

import dataclasses
from typing import Any

from jlade.config import SamplingConfig
from jlade.server import fields
from jlade.server.fields import Body, RequestError

# Their ranges, and the values without effect, which take no time if they are left out.
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


def sampling(body: Body, default: SamplingConfig, vocab_size: int) -> SamplingConfig:
    """Returns the controls of a body, and those of `default` that it does not give.

    The bias of `default` comes on top of that of the body.

    Raises:
      RequestError: names the field, its value and what is accepted.
    """
    given: dict[str, Any] = {}
    for name, (least, most) in RANGES.items():
        value = body.get(name)
        if value is not None:
            fields.check_number(name, value, least, most)
            given[name] = None if value in NEUTRAL.get(name, ()) else value
    if body.get("logit_bias"):
        given["logit_bias"] = _bias(body["logit_bias"], vocab_size) | dict(default.logit_bias or ())
    if given.get("top_p") == 0:  # which leaves the best token alone
        given |= {"temperature": 0, "top_p": None}
    try:
        result = dataclasses.replace(default, **given)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error), str(error).split()[0]) from error
    if result.temperature == 0:  # filters take time, and leave greedy text as it is
        result = dataclasses.replace(result, top_k=None, top_p=None, min_p=None)
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
