"""`LookaheadRollout` and `LookaheadSampler`: tunix's vanilla rollouts and sampler, in fewer steps."""

import collections
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import sampler, utils
from tunix.generate.base_sampler import SamplerOutput
from tunix.rl import common
from tunix.rl.rollout import base_rollout, vanilla_rollout

from jlade.config import LookaheadConfig, SamplingConfig
from jlade.conversion.adopt import adopt
from jlade.decoding import loop, prefill
from jlade.decoding.state import Prefix
from jlade.drafts.suffix import LONGEST
from jlade.errors import check_int
from jlade.generation import placement
from jlade.generation import request as request_lib
from jlade.generation.generate import finish
from jlade.generation.options import Options
from jlade.generation.results import Generation, warn_of_errors
from jlade.integrations.tunix import models, parameters
from jlade.models.base import Decoder, Params
from jlade.models.llama import Llama

Tokens = Sequence[np.ndarray]
PROMPTS = 4096  # whose texts are kept, those that came last
NO_TOKEN = -1  # pads texts that are scored: the tokenizer's pad token may be a part of them


class LookaheadSampler(sampler.Sampler):
    """tunix's `Sampler` in fewer steps: the same greedy tokens, and sampled ones of the same distribution.

    The weights of a model that `parameters.describe` knows become jlade's with the first call, and with the first one
    after `transformer_state` was set, which compiles nothing; matrices are a second copy. Other models are decoded as
    they are, by `decoder(model)`.

    Args:
      transformer, tokenizer, cache_config: those of `Sampler`.
      lookahead: as in `jlade.generate`.
      draft_from_rollouts: the texts that are kept for each of the last 4096 prompts, the latest ones, in which drafts
        are searched when the prompt comes again; 0 for none. A `lookahead` without "suffix" among its sources has no
        use for them.
      kv_dtype: of keys and values in the cache, as in `jlade.generate`; None for a model that is decoded as it is.

    Raises:
      TypeError, ValueError: the model cannot be decoded, see `decoder`, or has a cache of its own and `kv_dtype` is
        given; `draft_from_rollouts` or `kv_dtype` is not accepted.
    """

    def __init__(
        self,
        transformer: nnx.Module,
        tokenizer: Any,
        cache_config: sampler.CacheConfig,
        *,
        lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
        draft_from_rollouts: int = 8,
        kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
    ):
        super().__init__(transformer, tokenizer, cache_config)
        self._lookahead = lookahead
        searches = lookahead == "auto" or (isinstance(lookahead, LookaheadConfig) and "suffix" in lookahead.reach)
        self._num_kept = check_int("draft_from_rollouts", draft_from_rollouts, 0) if searches else 0
        self._kept: dict[bytes, collections.deque[np.ndarray]] = {}
        self._config = parameters.describe(transformer, cache_config.cache_size)
        self._dtype = models.cache_dtype(transformer)
        self._decoder: Decoder
        if self._config is None:
            self._decoder, _ = models.decoder(transformer, max_positions=cache_config.cache_size)
        else:
            self._decoder = Llama(self._config)
        self._decoder = placement.with_cache_in(kv_dtype, self._decoder)
        arrays, self._structure = jax.tree.flatten(self._transformer_state)
        self._shardings = [array.sharding for array in arrays]
        self._made: tuple[list[Any], Params] = ([], None)  # arrays of the state, and the parameters made of them
        self.last: Generation | None = None

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        echo: bool = False,
        return_logits: bool = False,
        return_logprobs: bool = False,
        eos_tokens: Sequence[int] | None = None,
        forbidden_tokens: Iterable[int] | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: int | jax.Array | None = None,
        pad_output: bool = False,
        images: Any = None,
    ) -> SamplerOutput:
        """Returns the texts of prompts, with the arguments and results of `Sampler.__call__`.

        As there, tokens are drawn only if `top_p` is given, returned tokens exclude the end token, `seed=None` is seed
        0, and log-probabilities are those of all tokens at this temperature, before `top_k` and `top_p`. A temperature
        of 0 is greedy. `last` has the `Generation` of the latest call, with its numbers of steps.

        Raises:
          ValueError: for `return_logits`, `beam_size` and `images`, which are not supported; for `forbidden_tokens`
            with `return_logprobs` and a filter; or the texts exceed the size of the cache.
        """
        refused = {"return_logits": return_logits, "beam_size": beam_size, "images": images}
        for name, value in refused.items():
            if value is not None and value is not False:
                raise ValueError(f"{name} is not supported by LookaheadSampler, got {value!r}: use tunix's Sampler")
        draws = top_p is not None and temperature != 0
        nucleus = None if top_p is None or top_p >= 1 or not draws else float(top_p)
        highest = None if top_k is None or top_k <= 0 or not draws else top_k
        has_filter = nucleus is not None or highest is not None
        forbidden = dict.fromkeys(forbidden_tokens or (), -np.inf)
        if forbidden and has_filter and return_logprobs:
            raise ValueError("return_logprobs with forbidden_tokens needs top_p=1.0 and top_k=None, or greedy decoding")

        strings = [input_strings] if isinstance(input_strings, str) else input_strings
        pad = self.tokenizer.pad_id()
        prompts = [np.asarray(self.tokenize(string), np.int32) for string in strings]
        length = max(map(len, prompts))
        if max_prompt_length is None or max_prompt_length < length:
            max_prompt_length = utils.next_power_of_2(length)
        if max_prompt_length + max_generation_steps > self.cache_config.cache_size:
            raise ValueError(
                f"max_prompt_length={max_prompt_length} and max_generation_steps={max_generation_steps} exceed the "
                f"cache of {self.cache_config.cache_size} tokens"
            )
        padded = np.stack([utils.pad_to_length(ids, max_prompt_length, pad, left=True) for ids in prompts])
        prompts = [ids[ids != pad] for ids in prompts]  # `Sampler` hides these tokens, wherever they are
        self.last = out = self._generate(
            prompts,
            max_new_tokens=max_generation_steps,
            sampling=SamplingConfig(
                temperature=float(temperature) if draws else 0.0,
                top_p=nucleus,
                top_k=highest,
                logit_bias=forbidden or None,
            ),
            eos_ids=tuple(map(int, eos_tokens or [self.tokenizer.eos_id()])),
            key=seed if isinstance(seed, jax.Array) else jax.random.key(0 if seed is None else seed),
            logprobs=return_logprobs and not has_filter,
        )
        warn_of_errors(out)
        ends = [int(n) - (reason == "eos") for n, reason in zip(out.lengths, out.finish_reason, strict=True)]
        texts: Any = [row[:end] for row, end in zip(out.tokens, ends, strict=True)]
        logprobs = None
        if return_logprobs:
            rows = out.processed_logprobs
            if has_filter:
                rows = self._score(prompts, texts, max_prompt_length, max_generation_steps, float(temperature))
            logprobs = [row[:end] for row, end in zip(rows, ends, strict=True)]
        if echo:
            texts = [np.concatenate(pair) for pair in zip(prompts, texts, strict=True)]
            logprobs = logprobs and [np.pad(row, (len(ids), 0)) for ids, row in zip(prompts, logprobs, strict=True)]
        decoded = [self.tokenizer.decode(ids.tolist()) for ids in texts]
        if pad_output:
            size = max_generation_steps + (max_prompt_length if echo else 0)
            texts = np.stack([utils.pad_to_length(ids, size, pad) for ids in texts])
            logprobs = logprobs and [utils.pad_to_length(row, size, 0.0) for row in logprobs]
        return SamplerOutput(
            text=decoded,
            logits=[],
            tokens=texts,
            padded_prompt_tokens=padded,
            logprobs=logprobs and [row.tolist() for row in logprobs],
        )

    def _generate(self, prompts: Tokens, **options: Any) -> Generation:
        """Returns `jlade.generate` of prompts, of which equal ones are read once and have their earlier texts."""
        corpus = None
        if self._num_kept:
            # A list even while there is none: the first rollouts and the later ones share a program.
            known = dict.fromkeys(map(np.ndarray.tobytes, prompts))
            corpus = [text for prompt in known for text in self._kept.get(prompt, ())]
        params = self._params()
        given = Options(lookahead=self._lookahead, decoder=self._decoder, corpus=corpus, **options)
        request = request_lib.make(params, list(prompts), given)
        begin = time.perf_counter()
        state = prefill.start(self._read(params, prompts, request), request.inputs, request.config)
        out = finish(loop.run_steps(params, state, request.config), request, begin)
        for prompt, tokens, length in zip(prompts, out.tokens, out.lengths, strict=True):
            kept = self._kept.pop(prompt.tobytes(), collections.deque(maxlen=self._num_kept))
            kept.append(np.concatenate([prompt[-LONGEST:], tokens[:length]]))
            self._kept[prompt.tobytes()] = kept  # the last ones come last
        for oldest in list(self._kept)[:-PROMPTS]:
            del self._kept[oldest]
        return out

    def _read(self, params: Params, prompts: Tokens, request: request_lib.DecodeRequest) -> Prefix:
        """Returns the cache of prompts. If each comes equally often, as in groups of rollouts, it is read once."""
        unique = list(dict.fromkeys(map(np.ndarray.tobytes, prompts)))
        row_of = {key: i for i, key in enumerate(unique)}
        rows = np.array([row_of[prompt.tobytes()] for prompt in prompts])
        counts = np.bincount(rows)
        inputs = request.inputs
        if len(unique) == len(prompts) or min(counts) != max(counts):
            return prefill.prefill(params, inputs, request.config)
        first = np.unique(rows, return_index=True)[1]
        parts = (inputs.prompts, inputs.lengths, inputs.stopping, inputs.sources)
        prompts_once, lengths, stopping, sources = jax.tree.map(lambda x: x[first], parts)
        once = dataclasses.replace(inputs, prompts=prompts_once, lengths=lengths, stopping=stopping, sources=sources)
        return _take(prefill.prefill(params, once, request.config), rows)

    def _params(self) -> Params:
        """Returns the parameters of the decoder, for the arrays that the state has now."""
        arrays = jax.tree.leaves(self._transformer_state)
        known, params = self._made
        if len(known) != len(arrays) or any(x is not y for x, y in zip(known, arrays, strict=True)):
            del params
            self._made = ([], None)  # frees the old parameters
            # Equal shardings and metadata of variables may come in other words, for which programs would compile.
            placed = jax.device_put(arrays, self._shardings)
            state = jax.tree.unflatten(self._structure, placed)
            own = state if self._config is None else adopt(state, self._config, dtype=self._dtype)
            self._made = arrays, own
        return self._made[1]

    def _score(self, prompts: Tokens, texts: Tokens, length: int, size: int, temperature: float) -> np.ndarray:
        """Returns the log-probabilities [B, size] of texts at a temperature, without filters, by the model itself.

        Args:
          prompts: as the steps have seen them, of at most `length` tokens.
          texts: of at most `size` tokens.
          length, size, temperature: see above.
        """
        graphdef, state = self.model_def_and_state()
        left = [utils.pad_to_length(ids, length, NO_TOKEN, left=True) for ids in prompts]
        scores = common.compute_per_token_logps(
            graphdef,
            state,
            prompt_tokens=jnp.asarray(np.stack(left)),
            completion_tokens=jnp.asarray(np.stack([utils.pad_to_length(ids, size, NO_TOKEN) for ids in texts])),
            pad_id=NO_TOKEN,
            eos_id=self.tokenizer.eos_id(),
            temperature=temperature,
        )
        return np.asarray(scores)


@jax.jit
def _take(prefix: Prefix, rows: jax.Array) -> Prefix:
    taken: Prefix = jax.tree.map(lambda x: x[rows], prefix)
    return taken


class LookaheadRollout(vanilla_rollout.VanillaRollout):
    """A rollout engine of tunix, its vanilla one with `LookaheadSampler`: `ClusterConfig(rollout_engine=...)` takes it.

    `functools.partial(LookaheadRollout, lookahead=..., draft_from_rollouts=...)` has settings of its own.

    Args:
      rollout_actor, tokenizer, rollout_config, mesh: those that `RLCluster` gives. The texts of all calls have to fit
        in `rollout_config.kv_cache_size` tokens. Arrays stay on the devices that hold the model.
      lookahead, draft_from_rollouts, kv_dtype: those of `LookaheadSampler`.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        rollout_config: base_rollout.RolloutConfig,
        mesh: Any = None,
        lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
        draft_from_rollouts: int = 8,
        kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
    ):
        c = rollout_actor.config
        cache = sampler.CacheConfig(rollout_config.kv_cache_size, c.num_layers, c.num_kv_heads, c.head_dim)
        settings: dict[str, Any] = {"draft_from_rollouts": draft_from_rollouts, "kv_dtype": kv_dtype}
        self._sampler = LookaheadSampler(rollout_actor, tokenizer, cache, lookahead=lookahead, **settings)

    @property
    def last(self) -> Generation | None:
        """The `jlade.Generation` of the latest call, with its numbers of steps; None before the first."""
        return self._sampler.last
