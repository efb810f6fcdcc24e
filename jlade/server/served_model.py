"""A model behind the interface: the engine that decodes, and the reader of bodies with the same limits."""

import dataclasses
import os
import pathlib
from typing import Literal

from jlade import storage
from jlade.config import LookaheadConfig, SamplingConfig
from jlade.conversion import generation_settings
from jlade.engine import rows
from jlade.engine.engine import Engine
from jlade.generation import chat_template
from jlade.generation.chat_template import ChatTemplate
from jlade.generation.corpus import Texts
from jlade.generation.options import Keywords
from jlade.generation.prior import Prior
from jlade.generation.text import Tokenizer
from jlade.models.llama import LlamaParams
from jlade.server.protocol import MAX_CHOICES, BodyReader

MAX_PREDICTION = 1024
REMEMBER = 2**24
MAX_TOP_OF_CHAT, MAX_TOP_OF_COMPLETION = 20, 5  # alternatives of a token, as OpenAI's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Most of what requests may take, as `jlade.Engine` has it.

    Attributes:
      remember: None for `REMEMBER` with a tree of drafts, and none without.
      max_prediction: None for `MAX_PREDICTION` with a tree of drafts, and none without.
      max_top_logprobs: None for OpenAI's limits.
    """

    max_sequences: int = 8
    capacity: int | None = None
    max_waiting: int = 1024
    cache_tokens: int | None = None
    remember: int | None = None
    max_prediction: int | None = None
    max_grammar: int = rows.GRAMMAR
    max_top_logprobs: int | None = None

    def of_engine(self, lookahead: LookaheadConfig | Literal["auto"] | None) -> Keywords:
        """Returns the limits as arguments of a `jlade.Engine` with this setting."""
        has_tree = lookahead == "auto" or (lookahead is not None and lookahead.has_tree)
        defaults = {
            "remember": REMEMBER if has_tree else 0,
            "max_prediction": MAX_PREDICTION if has_tree else 0,
            "max_top_logprobs": MAX_TOP_OF_CHAT,
        }
        return vars(self) | {name: default for name, default in defaults.items() if getattr(self, name) is None}


def ignored(model: str | pathlib.Path, revision: str | None) -> str | None:
    """Returns a sentence on what a checkpoint asks for and an engine has not; None if there is nothing."""
    if not storage.load_constraints(model, revision=revision):
        return None
    return f"{' and '.join(sorted(generation_settings.OF_BANS))} of the model's generation_config.json are ignored"


def make(
    params: LlamaParams,
    tokenizer: Tokenizer,
    directory: pathlib.Path,
    sampling: SamplingConfig,
    limits: Limits,
    *,
    lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
    corpus: Texts | None = None,
    prior: Prior | None = None,
    template: str | None = None,
    programs: str | os.PathLike[str] | None = None,
) -> tuple[Engine, BodyReader]:
    """Returns an engine for a model, and a reader of the bodies that it can complete.

    Args:
      params, tokenizer: of the model.
      directory: of the checkpoint, with the chat template.
      sampling: the checkpoint's; greedy sampling gives way to OpenAI's temperature, 1.
      limits: of requests.
      lookahead, kv_dtype, corpus, prior, programs: of the engine.
      template: a chat template in place of the model's own.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    of_engine = limits.of_engine(lookahead)
    engine = Engine(
        params,
        tokenizer,
        lookahead=lookahead,
        kv_dtype=kv_dtype,
        corpus=corpus,
        prior=prior,
        programs=programs,
        **of_engine,
    )
    of_model = chat_template.load_tokenizer(directory)
    has_template = template is not None or of_model.chat_template is not None
    reader = BodyReader(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(of_model, template) if has_template else None,
        vocab_size=params.decoder.vocab_size,
        eos_ids=params.decoder.eos_ids,
        stop=params.decoder.stop_strings,
        sampling=sampling if sampling.temperature else dataclasses.replace(sampling, temperature=1.0),
        capacity=engine.capacity,
        max_prediction=of_engine["max_prediction"],
        max_grammar=limits.max_grammar,
        max_top_logprobs=of_engine["max_top_logprobs"],
        max_logprobs=MAX_TOP_OF_COMPLETION if limits.max_top_logprobs is None else limits.max_top_logprobs,
        max_choices=min(MAX_CHOICES, limits.max_waiting),
    )
    return engine, reader
