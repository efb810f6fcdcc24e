"""What the scripts of Python clients share: the model, two tools, a type of answers, and the report of a feature."""

import contextlib
import json
from collections.abc import Iterator

import pydantic

MODEL = "smollm2"
LIMIT = 120  # tokens of an answer
ASK = "What is the weather in Paris? Call weather."
THEN = "And the sum of 2 and 3? Call add."
LAST = "Report the city and the degrees as JSON."


class Report(pydantic.BaseModel):
    """The weather in a city."""

    city: str = pydantic.Field(max_length=20)
    degrees: int = pydantic.Field(ge=-40, le=60)


def weather(city: str) -> str:
    """Returns the weather in a city.

    Args:
        city: The city's name.
    """
    return f"It is 21 degrees in {city[:20]}."


def add(a: int, b: int) -> str:
    """Returns the sum of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


@contextlib.contextmanager
def feature(name: str, *limits: type[Exception]) -> Iterator[None]:
    """Prints how the block ran, as a line of JSON with the feature and its result.

    Errors of the types `limits` say that the agent took all its turns: the model's fault, not the protocol's.
    """
    result = "ok"
    try:
        yield
    except limits:
        result = "ok, to the limit of turns"
    except Exception as exception:
        result = f"failed: {type(exception).__name__}: {exception}".splitlines()[0][:300]
    print(json.dumps({"feature": name, "result": result}), flush=True)
