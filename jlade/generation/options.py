"""The options of `jlade.generate` and its companions: their names, defaults and types, listed once."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from jlade.config import LookaheadConfig, SamplingConfig
from jlade.constraints.constraint import Constraint
from jlade.constraints.grammar import Grammar
from jlade.decoding.state import DecodeState
from jlade.drafts.pool import NGramPool
from jlade.generation.corpus import Texts
from jlade.generation.prior import Prior
from jlade.generation.prompts import OF_CHAT, Prompts
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
    grammar: Grammar | Sequence[Grammar | None] | None = None
    constraint: Constraint | Sequence[Constraint] | None = None
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    decoder: Decoder | None = None
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(TextOptions):
    """The options of `jlade.generate` and `jlade.stream`; see `jlade.generate`."""

    lookahead: LookaheadConfig | Literal["auto"] | None = "auto"
    state: DecodeState | None = None
    pool: NGramPool | None = None
    corpus: Texts | None = None
    prior: Prior | None = None
    prediction: Prompts | None = None
    learn: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    with_statistics: bool = False
    keep_state: bool = False
    programs: str | os.PathLike[str] | None = None


# How people call options elsewhere, and how they are given here.
_OF_SAMPLING = "sampling=SamplingConfig({name}=...)"
_HERE = {
    **{field.name: _OF_SAMPLING.format(name=field.name) for field in dataclasses.fields(SamplingConfig)},
    **dict.fromkeys(("do_sample", "generation_config", "sampling_params"), _OF_SAMPLING.format(name="temperature")),
    **dict.fromkeys(("seed", "random_seed", "rng", "rng_key", "prng_key"), "key=jax.random.key(seed)"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens=..."),
    **dict.fromkeys(("max_length",), "max_new_tokens=..., which leaves out the prompt"),
    **dict.fromkeys(("min_tokens", "min_length"), "min_new_tokens=..."),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "stop=..."),
    **dict.fromkeys(("stop_token_ids", "eos_token_id", "eos_token_ids"), "eos_ids=..."),
    **dict.fromkeys(("input_ids", "inputs", "prompts"), "the prompt as the second argument"),
    "no_repeat_ngram_size": "constraint=jlade.NoRepeatedNgrams(size, vocab_size)",
    "bad_words_ids": "constraint=jlade.BannedSequences.of(sequences, vocab_size)",
    **dict.fromkeys(("kv_cache_dtype", "cache_dtype", "type_k", "type_v"), 'kv_dtype="int8"'),
    "messages": f"as the prompt {OF_CHAT}",
}


def unknown(name: str, kind: str, accepted: Iterable[str]) -> TypeError:
    """Returns the error for an option of that name: `kind` is what it is not."""
    hint = f": pass {_HERE[name]}" if name in _HERE else ""
    return TypeError(f"{name} is not {kind}{hint}; accepted are {', '.join(sorted(accepted))}")


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
                    raise unknown(name, "an argument", accepted)
            return function(*arguments, options(**named))  # type: ignore[call-arg]

        functools.update_wrapper(with_keywords, function)
        with_keywords.__signature__ = signature.replace(parameters=[*leading, *fields])  # type: ignore[attr-defined]
        return with_keywords

    return decorate
