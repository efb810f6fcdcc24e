"""What an answer of the server holds."""

import json
from typing import Literal

import pydantic


def events(response):
    """Returns the bodies of server-sent events, without the last one, which is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last, end = [line for line in response.text.split("\n\n") if line != ": "]
    assert (last, end) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def error_of(response, status):
    """Returns the error of a response in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


class Shirt(pydantic.BaseModel):
    size: Literal["small", "large"]
    colours: list[Literal["red", "blue"]] = pydantic.Field(max_length=2)
