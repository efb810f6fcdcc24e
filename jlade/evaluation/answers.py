"""Answers: a prompt decoded by a method, with its steps and times."""

import dataclasses
import functools
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade import conversion
from jlade.config import PLAIN, SamplingConfig
from jlade.decoding import loop, prefill
from jlade.decoding.state import Prefix
from jlade.drafts.pool import NGramPool
from jlade.evaluation.methods import Method
from jlade.generation import prompts, results, text
from jlade.generation import request as request_lib
from jlade.generation.options import Options
from jlade.generation.request import DecodeRequest
from jlade.generation.text import Tokenizer
from jlade.mesh import default_device, num_bytes
from jlade.models.llama import LlamaParams

GROWTH_STEPS = 8  # between two counts of the pool
CHOSEN = 1000.0  # added to the logits of the letters of choices
IDLE_SECONDS = 0.25  # torch's threads go on spinning for so long, and would slow the next decode


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to a prompt. `accepted`, `num_drafted` and `growth` of transformers are empty, its pool is (0, 0)."""

    prompt_tokens: int
    tokens: tuple[int, ...]  # generated, an end token included
    text: str
    steps: int  # passes that gave tokens: jlade's without prefill; transformers' with it, as it gives the first token
    accepted: tuple[int, ...]  # tokens of each step
    num_drafted: tuple[int, ...]  # tokens that each step verified
    pool: tuple[int, int]  # n-grams and keys in the pool at the end
    growth: tuple[tuple[int, int, int], ...]  # tokens, n-grams and keys while the text grows, if the method shows them
    prefill_seconds: float  # until the prompt is read; jlade's are of one reading for all methods of a dtype
    first_seconds: float  # until the first tokens, prefill included
    seconds: float  # of all steps, prefill excluded
    timed_tokens: int  # generated in `seconds`
    # Of the state between two steps, by the shapes of its arrays: cache, text, window, drafts with their sources.
    state_bytes: int | None = None  # None for transformers, and in runs that did not record it


@dataclasses.dataclass
class EvaluatedModel:
    """A model with its tokenizer, loaded in the dtypes that are used, and compiled before anything is timed."""

    load: Callable[[str], LlamaParams]  # returns the parameters in a dtype
    dtype: str  # of methods that name none
    tokenizer: Tokenizer
    max_new_tokens: int | None  # of each answer; None for as many as the paper allows, see `answer`
    kv_dtype: Any = None  # of the cache, as in `jlade.generate`; transformers' methods have their own
    _compiled: set[Any] = dataclasses.field(default_factory=set)
    _read: tuple[Any, Prefix, float] | None = None  # the last prompt, as it was read and the seconds of reading it

    def __post_init__(self) -> None:
        self.params = functools.cache(self.load)
        self.transformers = functools.cache(self._load_transformers)

    def answer(
        self,
        prompt: Sequence[int],
        method: Method,
        key: jax.Array,
        pool: NGramPool | None = None,
        choices: Sequence[str] = (),
        max_length: int | None = None,
    ) -> tuple[Answer, NGramPool | None]:
        """Decodes a prompt, and returns the answer with the pool after it (None for transformers).

        Args:
          prompt: token ids.
          method: of decoding.
          key: decides a sampled text.
          pool: to begin with; None for an empty one.
          choices: letters; the answer is the most probable of them. None for a text.
          max_length: most tokens of prompt and answer where `max_new_tokens` is None; None for those of the model.
        """
        chosen = self._tokens_of(choices)
        limit = 1 if choices else self._limit(len(prompt), max_length)
        if method.setting is None:
            if method not in self._compiled:
                self._answer_by_transformers(prompt, method, chosen, limit)  # the first call takes longer
                self._compiled.add(method)
            return self._answer_by_transformers(prompt, method, chosen, limit), None
        dtype = method.dtype or self.dtype
        params = self.params(dtype)
        options = Options(
            max_new_tokens=limit,
            lookahead=None if method.setting == PLAIN else method.setting,
            sampling=SamplingConfig(method.temperature, logit_bias=dict.fromkeys(chosen, CHOSEN) or None),
            tokenizer=self.tokenizer,
            key=key,
            pool=pool,
            kv_dtype=self.kv_dtype,
            with_statistics=True,
        )
        request = request_lib.make(params, prompts.whole([prompt]), options)
        inputs, config = request.inputs, request.config
        compiled = dtype, config, jax.tree.structure(inputs), str(jax.tree.map(np.shape, inputs))
        if compiled not in self._compiled:
            state = prefill.start(prefill.prefill(params, inputs, config), inputs, config)
            jax.block_until_ready(loop.run_steps(params, state, config, max_steps=1))
            self._compiled.add(compiled)
        return self._decode(params, request, method)

    def _limit(self, length: int, max_length: int | None) -> int:
        """Returns the most tokens of a text that follows a prompt of `length` tokens."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        most = self.params(self.dtype).config.max_positions
        most = most if max_length is None else min(most, max_length)
        if length >= most:
            raise ValueError(f"prompt of {length} tokens leaves no room for a new one; prompt and answer have {most}")
        return most - length

    def _tokens_of(self, choices: Sequence[str]) -> list[int]:
        """Returns the token of each letter."""
        tokens = [text.encode(self.tokenizer, letter, parse_special=False)[-1] for letter in choices]
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"a question with choices needs a token for each of {', '.join(choices)}")
        return tokens

    def _decode(self, params: LlamaParams, request: DecodeRequest, method: Method) -> tuple[Answer, NGramPool | None]:
        inputs, config = request.inputs, request.config
        prefix, prefill_seconds = self._prefill(params, request, method)
        begin = time.perf_counter()
        state = prefill.start(prefix, inputs, config)
        state = jax.block_until_ready(loop.run_steps(params, state, config, max_steps=1))
        after_first = time.perf_counter()
        growth = []
        while method.shows_growth and not state.done[0]:
            growth.append((int(state.num_tokens[0] - inputs.lengths[0]), *_pool_size(state.sources.get("pool"))))
            state = loop.run_steps(params, state, config, max_steps=GROWTH_STEPS)
        state = jax.block_until_ready(loop.run_steps(params, state, config))
        end = time.perf_counter()
        if request.learned is not None and state.pace is not None:
            request.learned.learn_steps(inputs, config, np.asarray(state.pace.num_steps), end - begin)

        generation = results.gather(state, request)
        steps, tokens = int(generation.steps[0]), int(generation.lengths[0])
        size = _pool_size(state.sources.get("pool"))
        answer = Answer(
            prompt_tokens=int(inputs.lengths[0]),
            tokens=tuple(generation.tokens[0, :tokens].tolist()),
            text=generation.text[0],
            steps=steps,
            accepted=tuple(generation.accepted[0, :steps].tolist()),
            num_drafted=tuple(generation.statistics.num_drafted[0, :steps].tolist()),
            pool=size,
            growth=(*growth, (tokens, *size)) if method.shows_growth else (),
            prefill_seconds=prefill_seconds,
            first_seconds=prefill_seconds + after_first - begin,
            seconds=end - begin,
            timed_tokens=tokens,
            state_bytes=num_bytes(state),
        )
        return answer, state.sources.get("pool")

    def _prefill(self, params: LlamaParams, request: DecodeRequest, method: Method) -> tuple[Prefix, float]:
        """Returns the prompt as it was read, and the seconds of reading it.

        Methods share the program that reads prompts. So one of them reads a prompt, and the others copy its cache.
        """
        inputs, recycles = request.inputs, "recycled" in request.config.lookahead.reach
        read = method.dtype or self.dtype, recycles, np.asarray(inputs.prompts).tobytes(), tuple(inputs.lengths)
        if self._read is None or self._read[0] != read:
            begin = time.perf_counter()
            prefix = jax.block_until_ready(prefill.prefill(params, inputs, request.config))
            self._read = read, prefix, time.perf_counter() - begin
        _, prefix, seconds = self._read
        return jax.block_until_ready(jax.tree.map(jnp.copy, prefix)), seconds  # decoding takes over the buffers

    def _load_transformers(self, dtype: str) -> Any:
        """Returns transformers' model with the same weights."""
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ValueError("the methods of transformers need torch: pip install torch transformers") from error
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch) / "model"
            conversion.save_hf(self.params(dtype), directory)
            transformers.utils.logging.disable_progress_bar()
            # In memory, not mapped: the directory is removed.
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
            transformers.utils.logging.enable_progress_bar()
        return model.to(torch_device())

    def _answer_by_transformers(
        self, prompt: Sequence[int], method: Method, choices: Sequence[int], limit: int
    ) -> Answer:
        dtype = method.dtype or self.dtype
        model = self.transformers(dtype)  # before the import, as it says when torch is missing
        import torch

        times: list[float] = []

        def record(module: Any, arguments: Any, output: Any) -> None:
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

        ids = torch.tensor([list(prompt)], device=model.device)
        eos_ids = list(self.params(dtype).config.eos_ids)
        settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": False}
        settings |= {"eos_token_id": eos_ids or None, "pad_token_id": (eos_ids or [0])[0]}
        if method.lookup_tokens:
            settings["prompt_lookup_num_tokens"] = method.lookup_tokens
        if choices:
            settings["sequence_bias"] = {(token,): CHOSEN for token in choices}
        hook = model.register_forward_hook(record)
        try:
            with torch.no_grad():
                begin = time.perf_counter()
                text_ids = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                end = time.perf_counter()
        finally:
            hook.remove()
        time.sleep(IDLE_SECONDS)
        tokens = text_ids[0, len(prompt) :].tolist()
        return Answer(
            prompt_tokens=len(prompt),
            tokens=tuple(tokens),
            text=text.decode(self.tokenizer, tokens),
            steps=len(times),
            accepted=(),
            num_drafted=(),
            pool=(0, 0),
            growth=(),
            prefill_seconds=times[0] - begin,
            first_seconds=times[0] - begin,
            seconds=end - times[0],
            timed_tokens=len(tokens) - 1,
        )


def torch_device() -> str:
    """Returns the device of transformers' model: the GPU if JAX and torch both have it, else the CPU."""
    import torch

    return "cuda" if default_device().platform == "gpu" and torch.cuda.is_available() else "cpu"


def _pool_size(pool: NGramPool | None) -> tuple[int, int]:
    """Returns the numbers of n-grams and of keys in the pool of one sequence."""
    if pool is None:
        return 0, 0
    (fan_out,) = pool.fan_out()
    return int(fan_out.sum()), len(fan_out)
