"""The lookahead of a request: its setting, given or that of "auto"."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from jlade.config import PLAIN, LookaheadConfig, TreeConfig
from jlade.costs import choice, learned
from jlade.costs.learned import Learned
from jlade.decoding.state import Chunks, DecodeState
from jlade.generation.options import Options
from jlade.models.base import Decoder, Params


def choose_setting(
    options: Options, params: Params, decoder: Decoder, batch_size: int, mesh: Mesh | None, chunks: Chunks
) -> tuple[LookaheadConfig, Learned | None]:
    """Returns the setting for B sequences, and what earlier calls have taught about its costs if it is "auto"."""
    lookahead: Any = options.lookahead
    # "auto" continues with the setting of a state, which may have one sequence for all prompts.
    number = options.state.tokens.shape[0] if isinstance(options.state, DecodeState) else batch_size
    is_auto = isinstance(lookahead, str) and lookahead == "auto"
    if is_auto:
        setting = choice.choose(params, decoder, number, mesh)
    elif isinstance(lookahead, LookaheadConfig):
        choice.log_if_slow(lookahead, params, decoder, number, mesh)
        setting = lookahead
    elif lookahead is None:
        setting = PLAIN
    else:
        raise TypeError(f'lookahead must be a LookaheadConfig, "auto", or None for plain decoding, got {lookahead!r}')
    if options.prediction is not None:
        setting = with_prediction(setting, lookahead)
    return setting, learned.find(params, decoder, batch_size, mesh, setting, chunks) if is_auto else None


def with_sources(lookahead: LookaheadConfig, *names: str) -> LookaheadConfig:
    """Returns the setting with more sources of drafts, or the same one if it has no tree for them."""
    drafts = lookahead.drafts
    if not isinstance(drafts, TreeConfig):
        return lookahead
    return dataclasses.replace(lookahead, drafts=dataclasses.replace(drafts, sources=tuple({*drafts.sources, *names})))


def with_prediction(lookahead: LookaheadConfig, given: LookaheadConfig | str | None) -> LookaheadConfig:
    """Returns the setting with drafts from predictions, or that of "auto" as it is if it has no tree for them.

    Raises:
      ValueError: the setting that was `given` has no tree.
    """
    if not lookahead.has_tree and given != "auto":
        raise ValueError(
            f"prediction needs a lookahead with a tree, such as LookaheadConfig.tree(63), got lookahead={given}"
        )
    return with_sources(lookahead, "prediction")
