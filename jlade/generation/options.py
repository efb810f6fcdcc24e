"""The options of `jlade.generate` and its companions: their names, defaults and types, listed once."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from jlade.config import LookaheadConfig, SamplingConfig
from jlade.decoding.state import DecodeState
from jlade.drafts.pool import NGramPool
from jlade.generation.corpus import Texts
from jlade.generation.prompts import Prompts
from jlade.generation.text import Tokenizer
from jlade.models.base import Decoder, Params

Keywords = dict[str, Any]  # some fields of `Options` by their names
GREEDY = SamplingConfig()
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options that decide the text; see `jlade.generate`."""

    max_new_tokens: int | Sequence[int] | None = None
    min_new_tokens: int | Sequence[int] = 0
    sampling: SamplingConfig | Sequence[SamplingConfig] = GREEDY
    tokenizer: Tokenizer | None = None
    attention_mask: Any = None
    parse_special: bool = True
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None = None
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None = None
    key: jax.Array | None = None
    decoder: Decoder | None = None
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(TextOptions):
    """The options of `jlade.generate` and `jlade.stream`; see `jlade.generate`."""

    lookahead: LookaheadConfig | Literal["auto"] | None = "auto"
    state: DecodeState | None = None
    pool: NGramPool | None = None
    corpus: Texts | None = None
    prediction: Prompts | None = None
    learn: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    with_statistics: bool = False
    keep_state: bool = False


def keywords(
    options: Callable[P, Any],
) -> Callable[[Callable[[Params, Prompts, Any], R]], Callable[Concatenate[Params, Prompts, P], R]]:
    """Lets a function of parameters, prompt and options take the fields of these options as keyword arguments.

    Editors, type checkers and `help` show every field with its default.

    Args:
      options: a dataclass, made of the keyword arguments.

    Raises:
      TypeError: from the decorated function, for a keyword that is not a field.
    """
    fields = list(inspect.signature(options).parameters.values())
    accepted = {field.name for field in fields}

    def decorate(function: Callable[[Params, Prompts, Any], R]) -> Callable[Concatenate[Params, Prompts, P], R]:
        signature = inspect.signature(function)
        leading = list(signature.parameters.values())[:2]

        def with_keywords(*given: Any, **named: Any) -> R:
            arguments = [*given, *(named.pop(each.name) for each in leading[len(given) :] if each.name in named)]
            if len(arguments) != len(leading):
                names = ", ".join(each.name for each in leading)
                raise TypeError(
                    f"{function.__name__} takes {names} and keyword arguments, got {len(arguments)} of these"
                )
            for name in named:
                if name not in accepted:
                    raise TypeError(f"{name} is not an argument; accepted are {', '.join(sorted(accepted))}")
            return function(*arguments, options(**named))  # type: ignore[call-arg]

        functools.update_wrapper(with_keywords, function)
        with_keywords.__signature__ = signature.replace(parameters=[*leading, *fields])  # type: ignore[attr-defined]
        return with_keywords

    return decorate
