"""transformers: `model.generate(..., custom_generate=lookahead(model))` decodes its models with jlade."""

import dataclasses
import math
import sys
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jlade.config import PENALTIES, LookaheadConfig, SamplingConfig
from jlade.constraints.bans import BannedSequences, NoRepeatedNgrams
from jlade.constraints.constraint import Constraint
from jlade.generation import request as request_lib
from jlade.generation import text
from jlade.generation.corpus import Texts
from jlade.generation.generate import Streamer, pieces, run
from jlade.generation.options import Options
from jlade.generation.prompts import Prompts
from jlade.generation.request import DecodeRequest
from jlade.generation.results import Generation, warn_of_errors
from jlade.generation.text import Tokenizer
from jlade.models import kv_rounding, quantization
from jlade.models.llama import LlamaParams

try:
    import torch
    from transformers.generation import logits_process, stopping_criteria
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    from jlade.integrations import torch_weights
except ImportError as error:
    raise ImportError(
        "jlade.integrations.transformers needs torch, transformers 5.23 and xxhash: pip install 'jlade[transformers]'"
    ) from error

Kwargs = dict[str, Any]
# The logits processors that change a distribution as controls of `SamplingConfig` do, or constraints, in the order in
# which they are applied, with the control, if it is one, and the attribute that holds its value.
CONTROLS: dict[type, tuple[str, str]] = {
    logits_process.SequenceBiasLogitsProcessor: ("logit_bias", "sequence_bias"),
    logits_process.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    logits_process.NoRepeatNGramLogitsProcessor: ("", "ngram_size"),
    logits_process.NoBadWordsLogitsProcessor: ("logit_bias", "sequence_bias"),
    logits_process.SuppressTokensLogitsProcessor: ("logit_bias", "suppress_tokens"),
    logits_process.TemperatureLogitsWarper: ("temperature", "temperature"),
    logits_process.TopKLogitsWarper: ("top_k", "top_k"),
    logits_process.TopPLogitsWarper: ("top_p", "top_p"),
    logits_process.MinPLogitsWarper: ("min_p", "min_p"),
    logits_process.LogitNormalization: ("", ""),  # changes no draw
}
LENGTHS = (logits_process.MinLengthLogitsProcessor, logits_process.MinNewTokensLengthLogitsProcessor)
ACCEPTED = (
    "accepted are those of min_length, min_new_tokens, sequence_bias, repetition_penalty, no_repeat_ngram_size, "
    "bad_words_ids, suppress_tokens, temperature, top_k, top_p, min_p and renormalize_logits, in this order"
)
IGNORED = ("use_cache", "logits_to_keep", "return_dict")  # arguments of the model without effect on the text


def lookahead(
    model: Any,
    *,
    lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
    sampling: SamplingConfig | None = None,
    streamer: Streamer | None = None,
    tokenizer: Tokenizer | None = None,
    dtype: jax.typing.DTypeLike = "auto",
    bits: int | None = None,
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
    mesh: Mesh | None = None,
) -> "Lookahead":
    """Returns the argument `custom_generate` of `model.generate`.

    The weights are copied by the first call for a model. Each call of `generate` compares a digest of all their bits
    with that of the copy and copies them again if they have changed, by whatever means: the text is that of the model
    as it is then. The digest reads the weights once, on the host; those on another device are moved there for it.

    Args:
      model: a model of transformers with a family that `jlade.load` reads.
      lookahead: see `jlade.generate`.
      sampling: controls in the place of those of the `GenerationConfig`, which must then be greedy. The default is the
        `GenerationConfig`'s.
      streamer: a streamer of transformers. `generate` does not pass its own `streamer=` on.
      tokenizer: for the stop strings of a `StopStringCriteria`. `generate` does not pass its own `tokenizer=` on.
      dtype: of the copied weights and of the computation: float32, bfloat16, float16, or "auto" for the model's.
      bits: 8 or 4 for copied matrices of so many bits, as in `jlade.load`; the text is then that of these.
      kv_dtype: of keys and values in the cache; see `jlade.generate`.
      mesh: devices to run on; see `jlade.generate`.

    Raises:
      TypeError, ValueError: name the key of `model.config`, the tensor or the argument that is not supported.
    """
    if not hasattr(model, "state_dict") or not hasattr(model, "config"):
        raise TypeError(f"model must be a model of transformers, got {_name(model)}")
    if sampling is not None and not isinstance(sampling, SamplingConfig):
        raise TypeError(f"sampling must be a SamplingConfig or None, got {sampling!r}")
    quantization.check_bits(bits)
    kv_rounding.check(kv_dtype)
    options = Options(lookahead=lookahead, tokenizer=tokenizer, kv_dtype=kv_dtype, mesh=mesh)
    method = Lookahead(model, dtype, bits, options, sampling, streamer)
    if model not in torch_weights.taken:
        method.params()  # so that errors come now
    return method


@dataclasses.dataclass(frozen=True, repr=False)
class Lookahead:
    """A decoding method for `generate`; `lookahead` makes it."""

    model: Any
    dtype: jax.typing.DTypeLike
    bits: int | None
    options: Options
    sampling: SamplingConfig | None
    streamer: Streamer | None

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        corpus: Texts | None = None,
        prediction: Prompts | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Returns what transformers' own decoding returns. `generate` calls it.

        Args:
          input_ids: [B, L] LongTensor, padded on the left.
          logits_processor, stopping_criteria, generation_config: as `generate` prepared them.
          corpus, prediction: of `jlade.generate`; `generate` takes them as keyword arguments and passes them on.
          model_kwargs: the other arguments of the model.

        Returns:
          [B, L + N] LongTensor on the device of `input_ids`: prompts, new tokens, and pad tokens after the end of a
          text; with `return_dict_in_generate=True` a `GenerateDecoderOnlyOutput` that has it as `sequences`.

        Raises:
          TypeError, ValueError: name the argument, its value and what is accepted.
        """
        _check_caller(sys._getframe(1))
        _check_config(generation_config)
        if model is not self.model:
            raise ValueError(f"custom_generate is lookahead(model) of another model: make it for this {_name(model)}")
        mask, ids = _check_model_kwargs(model_kwargs, input_ids), input_ids.cpu().numpy()
        params = self.params()
        stopping = _stopping(stopping_criteria, logits_processor, ids.shape[1], params.config.vocab_size)
        pad = generation_config._pad_token_tensor
        if stopping["stop"]:
            _check_stop(stopping, self.options.tokenizer, needs_pad=pad is None and len(ids) > 1)
        do_sample = generation_config.do_sample is True
        options = dataclasses.replace(
            self.options,
            attention_mask=mask,
            sampling=_sampling(self.sampling, _controls(logits_processor, mask), do_sample),
            key=_key() if do_sample or self.sampling is not None else None,
            corpus=corpus,
            prediction=prediction,
            constraint=_constraints(logits_processor, params.config.vocab_size, ids, mask),
            **stopping,
        )
        request = _stop_from_prompt(request_lib.make(params, ids, options), ids, mask)
        generation = self._generate(params, request, input_ids)
        warn_of_errors(generation)
        new = generation.tokens[:, : generation.lengths.max()].astype(np.int64)
        new[new < 0] = -1 if pad is None else int(pad)
        sequences: Any = torch.cat([input_ids, torch.from_numpy(new).to(input_ids)], dim=-1)
        return (
            GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences
        )

    def params(self) -> LlamaParams:
        """Returns the weights that the model has now, as `torch_weights.params` does."""
        return torch_weights.params(self.model, self.dtype, self.bits, self.options.mesh)

    def _generate(self, params: LlamaParams, request: DecodeRequest, input_ids: Any) -> Generation:
        """Decodes, and passes the prompt and each token to the streamer as transformers does."""
        if self.streamer is None:
            return run(params, request)
        request_lib.check_streamer(self.streamer, request)
        put: Any = self.streamer.put
        put(input_ids.cpu())
        try:
            for piece in pieces(params, request):
                for token in piece.tokens.tolist():
                    put(torch.tensor([token]))
        finally:
            self.streamer.end()
        return piece.generation


def _name(model: Any) -> str:
    return type(model).__name__


def _key() -> jax.Array:
    """Returns a key from torch's generator, so that `torch.manual_seed` decides the text."""
    first, second = torch.randint(2**31 - 1, (2,)).tolist()
    return jax.random.fold_in(jax.random.key(first), second)


def _check_caller(caller: Any) -> None:
    """Raises a ValueError for arguments that `generate` would ignore in silence, as it hands them to no callable."""
    given: Kwargs = caller.f_locals if caller.f_code.co_name == "generate" else {}
    if given.get("streamer") is not None:
        raise ValueError("generate(streamer=...) does not reach custom_generate: use lookahead(model, streamer=...)")
    for name in ("assistant_model", "synced_gpus"):
        if given.get(name):
            raise ValueError(f"{name} must be None with custom_generate=lookahead(model), got {given[name]!r:.80}")


def _check_config(config: Any) -> None:
    """Raises a ValueError for ways of decoding, and for results, that jlade does not have."""
    neutral: Kwargs = {
        "num_beams": 1,
        "prompt_lookup_num_tokens": None,
        "assistant_early_exit": None,
        "use_mtp": False,
        "penalty_alpha": 0,
        "dola_layers": None,
        "constraints": None,
        "force_words_ids": None,
        "speculation_type": None,
        "cache_implementation": "dynamic",
    }
    if config.return_dict_in_generate:
        neutral |= dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False)
    for name, value in neutral.items():
        if (given := getattr(config, name, None)) not in (None, value):
            raise ValueError(f"{name} must be {value!r} with custom_generate=lookahead(model), got {given!r}")


def _check_model_kwargs(kwargs: Kwargs, input_ids: Any) -> np.ndarray:
    """Returns the mask [B, L] of the prompts, and checks that no other argument could change the text."""
    given = {name: value for name, value in kwargs.items() if value is not None and name not in IGNORED}
    mask = given.pop("attention_mask", None)
    ones = torch.ones_like(input_ids)
    mask = ones if mask is None else mask.to(ones)
    if mask.shape != input_ids.shape or not bool((mask[:, -1] == 1).all()) or bool((mask.diff(dim=-1) < 0).any()):
        raise ValueError("attention_mask must have the shape of input_ids and be 0 on the left of each prompt alone")
    positions = given.pop("position_ids", None)
    if positions is not None and not bool(((positions.to(mask) == mask.cumsum(-1) - 1) | (mask == 0)).all()):
        raise ValueError("position_ids must count the tokens of each prompt from 0, or be None")
    for name in ("past_key_values", "cache"):  # before and since transformers 5.24; `generate` makes an empty one
        cache = given.pop(name, None)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
            raise ValueError(f"{name} must be None with custom_generate=lookahead(model), got {_name(cache)}")
    if given:
        raise ValueError(f"lookahead(model) reads input_ids and attention_mask alone, got {', '.join(given)}")
    return mask.cpu().numpy()


def _stopping(criteria: Any, processors: Any, width: int, vocab_size: int) -> Kwargs:
    """Returns the options of `jlade.generate` that say when a text ends."""
    limits: list[int] = []
    ends: set[int] = set()
    stop: list[str] = []
    for criterion in criteria:
        if type(criterion) is stopping_criteria.MaxLengthCriteria:
            limits.append(criterion.max_length - width)
        elif type(criterion) is stopping_criteria.EosTokenCriteria:
            ends.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is stopping_criteria.StopStringCriteria:
            stop += criterion.stop_strings
        else:
            raise ValueError(
                f"stopping_criteria holds {_name(criterion)}, which jlade lacks; accepted are MaxLengthCriteria, "
                f"EosTokenCriteria and StopStringCriteria"
            )
    fewest = 0
    for processor in processors:
        if type(processor) is logits_process.MinLengthLogitsProcessor:
            least = processor.min_length - width
        elif type(processor) is logits_process.MinNewTokensLengthLogitsProcessor:
            least = processor.min_new_tokens + processor.prompt_length_to_skip - width
        else:
            continue
        banned = set(processor.eos_token_id.flatten().tolist())
        if banned != ends:
            raise ValueError(f"{_name(processor)} must ban the end tokens {sorted(ends)}, got {sorted(banned)}")
        fewest = max(fewest, least)
    most = min(limits)
    return {
        "max_new_tokens": most,
        "min_new_tokens": min(fewest, most),
        "eos_ids": [i for i in sorted(ends) if 0 <= i < vocab_size],  # -1 for none is usual
        "stop": stop,
    }


def _controls(processors: Any, mask: np.ndarray) -> Kwargs:
    """Returns the arguments of `SamplingConfig` that mean the same as logits processors."""
    controls: Kwargs = {}
    last = -1
    for processor in processors:
        if type(processor) in LENGTHS:  # see `_stopping`
            continue
        if type(processor) not in CONTROLS:
            raise ValueError(f"logits_processor holds {_name(processor)}, which jlade lacks; {ACCEPTED}")
        place = list(CONTROLS).index(type(processor))
        if place <= last:
            raise ValueError(f"logits_processor has {_name(processor)} twice or out of order; {ACCEPTED}")
        last = place
        _check_processor(processor, mask)
        control, attribute = CONTROLS[type(processor)]
        if control == "logit_bias":
            controls[control] = controls.get(control, {}) | _bias(processor, getattr(processor, attribute))
        elif control:
            controls[control] = getattr(processor, attribute)
    return controls


def _constraints(processors: Any, vocab_size: int, ids: np.ndarray, mask: np.ndarray) -> list[Constraint]:
    """Returns the constraints that mean the same as logits processors, for prompts [B, L] with a mask."""
    found: list[Constraint] = []
    for processor in processors:
        if type(processor) is logits_process.NoRepeatNGramLogitsProcessor:
            found.append(NoRepeatedNgrams(processor.ngram_size, vocab_size))
        elif type(processor) is logits_process.NoBadWordsLogitsProcessor:
            sequences = [list(tokens) for tokens in processor.sequence_bias if len(tokens) > 1]
            found += [BannedSequences.of(sequences, vocab_size)] if sequences else []
    # transformers counts the padding of prompts, which ends where they begin.
    if found and (padding := set(ids[mask == 0].tolist()) & set(ids[mask == 1].tolist())):
        raise ValueError(
            f"no_repeat_ngram_size and bad_words_ids need padding that no prompt has among its tokens, got {padding}"
        )
    return found


def _sampling(own: SamplingConfig | None, controls: Kwargs, do_sample: bool) -> SamplingConfig:
    """Returns how tokens are drawn, by `lookahead(model, sampling=own)` or by `generate`."""
    if own is not None:
        if given := ", ".join([*["do_sample"][: int(do_sample)], *controls]):
            raise ValueError(f"lookahead(model, sampling=...) takes the place of {given} in generate: give one of them")
        return own
    if do_sample:
        return SamplingConfig(**{"temperature": 1.0, **controls})
    greedy: Kwargs = {name: value for name, value in controls.items() if name in (*PENALTIES, "logit_bias")}
    return SamplingConfig(**greedy)


def _check_processor(processor: Any, mask: np.ndarray) -> None:
    """Raises a ValueError for settings of a processor that jlade does not have."""
    for name, value in (("filter_value", -math.inf), ("min_tokens_to_keep", 1)):
        if getattr(processor, name, value) != value:
            raise ValueError(f"{name} of {_name(processor)} must be {value}, got {getattr(processor, name)}")
    if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
        padding, ignored = (mask == 0).sum(axis=1), processor.prompt_ignore_length
        if np.any(padding != (0 if ignored is None else torch.as_tensor(ignored).cpu().numpy())):
            raise ValueError(f"prompt_ignore_length of {_name(processor)} must be the padding alone, got {ignored}")


def _bias(processor: Any, value: Any) -> dict[int, float]:
    """Returns the bias of each token."""
    if not isinstance(value, dict):  # tokens to suppress
        return dict.fromkeys(value.tolist(), -math.inf)
    if isinstance(processor, logits_process.NoBadWordsLogitsProcessor):
        value = {tokens: bias for tokens, bias in value.items() if len(tokens) == 1}  # others are constraints
    if longer := [tokens for tokens in value if len(tokens) > 1]:
        raise ValueError(f"{_name(processor)} must name single tokens, got {list(longer[0])}")
    return {tokens[0]: float(bias) for tokens, bias in value.items()}


def _check_stop(stopping: Kwargs, tokenizer: Tokenizer | None, needs_pad: bool) -> None:
    """Raises a ValueError for stop strings that do not mean the same in jlade."""
    stop = stopping["stop"]
    if tokenizer is None:
        raise ValueError(f"stop strings need the tokenizer: use lookahead(model, tokenizer=tokenizer), got {stop}")
    if stopping["min_new_tokens"]:
        raise ValueError(f"stop strings do not go with min_new_tokens={stopping['min_new_tokens']}, got {stop}")
    if needs_pad:
        raise ValueError(f"stop strings of a batch need pad_token_id, which fills up shorter texts, got {stop}")
    for name in text.special_names(tokenizer):
        if any(name in string for string in stop):
            raise ValueError(f"stop strings must not hold special tokens, got {name!r}: add its id to eos_token_id")


def _stop_from_prompt(request: DecodeRequest, ids: np.ndarray, mask: np.ndarray) -> DecodeRequest:
    """Lets stop strings begin in the prompts [B, L], as transformers does."""
    strings = request.inputs.stopping.strings
    if strings is None:
        return request
    next_state = np.asarray(strings.next_state)
    starts: Any = np.array(strings.start)
    for i, prompt in enumerate(ids):
        for token in prompt[mask[i] == 1]:
            state = next_state[starts[i], token]
            starts[i] = ~state if state < 0 else state
    stopping = dataclasses.replace(request.inputs.stopping, strings=dataclasses.replace(strings, start=starts))
    return dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, stopping=stopping))
