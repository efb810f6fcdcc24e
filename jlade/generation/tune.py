"""`jlade.tune`: the fastest setting for prompts like those given, by measuring."""

import dataclasses

from jlade import mesh
from jlade.config import LookaheadConfig
from jlade.costs import search
from jlade.costs.search import SearchOptions
from jlade.costs.tuning import Tuning
from jlade.errors import check_int
from jlade.generation import request
from jlade.generation.options import Options, TextOptions, keywords
from jlade.generation.prompts import Prompts
from jlade.models.base import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions(SearchOptions, TextOptions):
    """The options of `tune`."""

    max_new_tokens: int = 128


@keywords(TuneOptions)
def tune(params: Params, prompts: Prompts, options: TuneOptions) -> Tuning:
    """Finds the setting, plain decoding included, that decodes prompts like these fastest on this device.

    First, the steps of some settings are timed, each with a block at least twice as large as the one before. These
    times exclude the settings that cannot win, except the estimate for this device, which is always tried. Each of the
    others is compiled and decodes all prompts, in turns with plain decoding; the best ones are measured once more, side
    by side. Of equally fast settings the one with the smallest block wins. A warning says when repeated timings differ
    so much that the machine must have been busy.

    Args:
      params: the model's parameters.
      prompts: a few prompts like those to come, as tokens per step depend on the text; see `jlade.generate`.
      settings: the settings to try besides plain decoding and the estimate for this device.
      batch_size: prompts decoded at once. The result holds for batches of this size.
      repeat: how often the best settings are timed; the other ones are timed half as often. The median counts for
        texts, the minimum for steps.
      adaptive: whether trees without a window fall back to narrower steps where wide ones do not pay, by the measured
        `LookaheadConfig.relative_step_time`, in their trials and as the result. Other settings do not.
      store: whether to store the result for `lookahead="auto"`, in place of an earlier one. An earlier one that was
        measured with more tokens, by the product of prompts, tokens and repeats, stays; a warning says so.
      force: whether to replace that one, too.
      progress: called before each measurement with its description, the number of measurements that are done, and the
        most that there will be in all, which falls as settings are excluded; and at the end with "done" and that number
        twice. A setting is one measurement, like the time of a step and the last comparison.
      max_new_tokens: at least twice the most tokens that a step can accept.
      sampling: sampled texts give fewer tokens per step than greedy ones.
      tokenizer and others: see `jlade.generate`.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted, before anything is compiled.
      Interrupted: after Ctrl-C; a KeyboardInterrupt with the measurements until then. Nothing is stored.
    """
    batch_size = check_int("batch_size", options.batch_size, 1)
    check_int("repeat", options.repeat, 1)
    for setting in options.settings:
        if not isinstance(setting, LookaheadConfig):
            raise TypeError(f"settings must hold LookaheadConfigs, got {setting!r}")
    of_text = {field.name: getattr(options, field.name) for field in dataclasses.fields(TextOptions)}
    of_text["stop"] = options.stop or ()  # as no end token of the checkpoint ends a text here, no string does
    with mesh.without_ambient_mesh():
        params = mesh.with_auto_axes(params)
        checked = request.make(params, prompts, Options(**of_text, lookahead=None), batch_size)
        return search.find_fastest(params, checked.inputs, checked.config, options.max_new_tokens, options)
