"""The sampling controls of a body."""

import dataclasses
from typing import Any

from jlade.config import CONTROLS, WITHOUT_FILTERS, SamplingConfig
from jlade.server import fields
from jlade.server.fields import Body, RequestError


def sampling(body: Body, default: SamplingConfig, vocab_size: int) -> SamplingConfig:
    """Returns the controls of a body, and those of `default` that it does not give.

    The bias of `default` comes on top of that of the body.

    Raises:
      RequestError: names the field, its value and what is accepted.
    """
    given: dict[str, Any] = {}
    for name, control in CONTROLS.items():
        value = body.get(name)
        if value is not None:
            fields.check_number(name, value, *control.served)
            given[name] = None if value == control.neutral else value
    if body.get("logit_bias"):
        given["logit_bias"] = _bias(body["logit_bias"], vocab_size) | dict(default.logit_bias or ())
    if given.get("top_k") == -1:  # as in vLLM's interface
        given["top_k"] = None
    if given.get("top_p") == 0:  # which leaves the best token alone
        given |= {"temperature": 0, "top_p": None}
    try:
        result = dataclasses.replace(default, **given)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error), str(error).split()[0]) from error
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
