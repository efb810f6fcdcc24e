"""`generate` and `stream`: prompts in, a `Generation` out, whole or in pieces."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from jlade import mesh
from jlade.decoding import ahead, loop, prefill, sharding
from jlade.decoding.state import DecodeState
from jlade.generation import memory, results, saved_programs
from jlade.generation import request as request_lib
from jlade.generation.options import Options, keywords
from jlade.generation.prompts import Prompts
from jlade.generation.request import DecodeRequest
from jlade.generation.results import Generation, Piece
from jlade.generation.text import Detokenizer
from jlade.models.base import Params


class Streamer(Protocol):
    """The streamers of transformers: they receive the prompt, then tokens as they are generated."""

    def put(self, value: np.ndarray, /) -> Any:
        """Receives the prompt, int32[1, L], or the next tokens, int32[T]."""

    def end(self) -> Any:
        """Marks the end of the tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """The options of `generate`."""

    streamer: Streamer | None = None


@keywords(GenerateOptions)
def generate(params: Params, prompt: Prompts, options: GenerateOptions) -> Generation:
    """Generates the text of plain decoding in fewer steps.

    Args:
      params: the model's parameters, as `jlade.load` returns them.
      prompt: a string, token ids (a sequence or an array int[L]), or a list of B of these, of any lengths. A sequence
        of a batch gets the result that it would get alone. A padded batch int[B, L] comes with `attention_mask`, or
        with it in a mapping that has "input_ids", as tokenizers of transformers return it.
      streamer: an object like transformers' streamers, for one prompt; it receives NumPy arrays.
      max_new_tokens: most tokens to generate after each prompt, 1 or more, for all prompts or one for each; by default
        as many as the model's positions leave, up to 256.
      min_new_tokens: before this many tokens no end token is generated and no stop string ends the text, for all
        prompts or one for each; 0 by default.
      lookahead: the window and the drafts of a step; None for plain decoding, one token a step; "auto", the default,
        for the setting that `jlade.tune` found on this device for this model and batch size, or an estimate if it did
        not run. "auto" makes narrower steps where wide ones do not pay, and plain ones in the first call of a process
        if its text is too short to pay for their compilation. A setting that is known to be slower than plain
        decoding here is logged once, at INFO by the logger "jlade".
      sampling: how tokens are drawn, for all prompts or one for each; greedy by default. Other values compile nothing;
        a control that was not used before does.
      tokenizer: turns string prompts into tokens and tokens into `Generation.text`; a `tokenizers.Tokenizer`, or a
        tokenizer of transformers that is built on one. By default that of the parameters as `jlade.load` returned them;
        other parameters have none.
      attention_mask: int[B, L], 1 for the tokens of padded prompts and 0 for padding, on either side, which is left
        out; by default there is no padding.
      parse_special: whether the names of special tokens in a string prompt, like "</s>", become these tokens; True by
        default. With False, for text from others, they are plain characters.
      eos_ids: token ids that end a text, for all prompts or a sequence of them for each; by default the checkpoint's
        own, `()` for none.
      stop: strings that end a text, wherever in the generated tokens they begin and end, for all prompts or a sequence
        of them for each; the text is cut before them. By default the checkpoint's own, `()` for none. They need
        `tokenizer`.
      key: key[] of any implementation, or key[B] with one for each prompt; `jax.random.key(0)` by default. It decides
        sampled text; the lookahead does not, unless verification is "rejection". With a key for each prompt, the text
        does not depend on the rest of the batch either: it is that of the prompt alone with its key, given as key[] or
        key[1]. A key changes no greedy text, only the number of its steps.
      grammar: what each text may be, a `jlade.Grammar` for all prompts, or one or None for each; by default any text. A
        whole text ends with an end token. It needs `tokenizer`.
      constraint: a rule for all prompts, such as `jlade.NoRepeatedNgrams` or your own (see `jlade.Constraint`), or a
        list of rules; `grammar` holds besides.
      kv_dtype: of keys and values in the cache, "int8" or "float8_e4m3fn" for half the bytes of bfloat16; that of the
        parameters by default. Each vector is rounded once, so that the text is that of plain decoding with this cache.
      decoder: the model that `params` belong to; needed when they are not jlade's own.
      mesh: the devices to run on, made by `jlade.make_mesh`; those of the parameters by default. In float32 the text is
        the same on any mesh. Parameters that `jlade.load` did not load for this mesh are copied there by each call.
      state: `Generation.state` of an earlier call. The prompt is still the whole text, of a conversation for example;
        the beginning that the state has read is not read again, and the state's pool is used further. The text is the
        same. A state of one sequence serves a whole batch: the common beginning is read once.
      pool: initial n-grams, for example `Generation.state.sources["pool"]` of another call or the result of
        `jlade.load_pool`; one for all prompts, with rows int32[R, S * N] of R buckets of S n-grams, or one for each,
        with rows int32[B, R, S * N] (see `jlade.NGramPool`). By default no call sees the n-grams of another.
      corpus: other texts in which drafts are searched as in the text itself, such as earlier texts of the same user: a
        list of strings, token ids int[L], or `Generation.state` of earlier calls, whose recycled logits are used too;
        or a `jlade.Corpus`, which is indexed once for many calls. For all prompts. It needs a `lookahead` with a tree
        and "suffix" among its sources; "auto" ignores it where it has none.
      prior: what the model predicts after pairs of tokens in other texts, made by `jlade.prior` or read by
        `jlade.load_prior`. Recycled logits fall back on it, so that drafts are good from the first step on. It needs a
        `lookahead` with a tree and "recycled" among its sources; "auto" ignores it where it has none.
      prediction: a text that the generated one is expected to resemble, such as the file that it edits, as a string or
        token ids int[L]; a list of one for each prompt of a batch. Drafts follow it, up to 60 tokens a step, and find
        their place again after a difference. It needs a `lookahead` with a tree; "auto" ignores it where it has none.
      learn: whether `lookahead="auto"` uses the times of earlier calls, and the time of this one for later calls; True
        by default. With False equal calls make equal steps.
      logprobs: whether to return the log-probabilities of the tokens; False by default.
      top_logprobs: with `logprobs`, the number of the most probable tokens of each position to return with their
        log-probabilities; 0 by default.
      with_statistics: whether to return `Generation.statistics`; False by default.
      keep_state: whether to return `Generation.state`, which holds the device memory of cache and pool; False by
        default.
      programs: a directory that `jlade compile` wrote: its programs are loaded instead of being traced and compiled.
        What does not fit is compiled as usual, and a warning says why. They are machine code: trust them like code.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted, before anything is compiled.
      MemoryError: a device is out of memory; says what was asked for, what would fit and what to lower.
    """
    params = mesh.with_auto_axes(params)
    request = request_lib.make(params, prompt, options)
    if options.streamer is not None:
        request_lib.check_streamer(options.streamer, request)
    request = _begun_plainly(request, options)
    if options.streamer is None:
        return run(params, request)
    return _feed(options.streamer, request, pieces(params, request))


@keywords(Options)
def stream(params: Params, prompt: Prompts, options: Options) -> Iterator[Piece]:
    """Generates the text of `generate` for one prompt, and yields the addition of each step as soon as it is made.

    The last piece has the whole `Generation`. Closing the iterator earlier ends the work. Arguments and errors are
    those of `generate`; they are checked by this call, before the first piece is requested.
    """
    params = mesh.with_auto_axes(params)
    request = request_lib.make(params, prompt, options)
    request_lib.check_single(request)
    return pieces(params, _begun_plainly(request, options))


def _begun_plainly(request: DecodeRequest, options: Options) -> DecodeRequest:
    """Returns a request of "auto" with plain steps if the programs of wider ones would not pay: see `Learned.pays`.

    They do where more is known than the prompt, or more is wanted than the text: a later call then goes on with it.
    """
    names = "state", "pool", "corpus", "prior", "prediction"
    wants_more = options.with_statistics or options.keep_state
    wants_more |= any(getattr(options, name) is not None for name in names)
    agrees = request.config.mesh is None or not request.config.mesh.is_multi_process  # with other processes, as one
    if request.learned is None or wants_more or not agrees:
        return request
    if request.learned.pays(int(np.max(request.inputs.stopping.max_new_tokens))):
        return request
    return request.plain()


@mesh.without_ambient_mesh()
def run(params: Params, request: DecodeRequest) -> Generation:
    """Returns the result of a checked request."""
    begin = time.perf_counter()
    with _explained(params, request), _answered(params, request)():
        params = sharding.put_params(params, request.config.mesh)
        return finish(loop.run_steps(params, _start(params, request), request.config), request, begin)


def _start(params: Params, request: DecodeRequest) -> DecodeState:
    """Reads the prompts of a request, and returns the state before its first step."""
    prefix = prefill.prefill(params, request.inputs, request.reading or request.config)
    return prefill.start(prefix, request.inputs, request.config)


def finish(state: DecodeState, request: DecodeRequest, begin: float) -> Generation:
    """Returns the result of a request after its steps; the time since `begin`, a `time.perf_counter`, is learned."""
    if request.learned is not None and state.pace is not None:
        num_steps = mesh.fetch(state.pace.num_steps)
        request.learned.learn(request.inputs, request.config, num_steps, time.perf_counter() - begin)
    return results.gather(state, request)


def pieces(params: Params, request: DecodeRequest) -> Iterator[Piece]:
    """Yields the addition of each step to the one text of a checked request."""
    with _explained(params, request):
        config, answered = request.config, _answered(params, request)
        with mesh.without_ambient_mesh(), answered():
            params = sharding.put_params(params, config.mesh)
            state = _start(params, request)
        detokenizer = None if request.tokenizer is None else Detokenizer(request.tokenizer, request.stop[0])
        begin, done = int(request.inputs.lengths[0]), False
        while not done:
            with mesh.without_ambient_mesh(), answered():
                state = loop.run_steps(params, state, config, max_steps=1)
                tokens, end, done, recorded = mesh.fetch(
                    (state.tokens, state.num_tokens, state.done, state.info.logprobs)
                )
                generation = results.gather(state, request) if done[0] else None
            new, end, done = slice(begin, int(end[0])), int(end[0]), bool(done[0])
            added = tokens[0, new]
            yield Piece(
                tokens=added,
                text=None if detokenizer is None else detokenizer.feed(added.tolist(), last=done),
                accepted=np.array([len(added)], np.int32),
                **results.of_piece(recorded, new),
                generation=generation,
            )
            begin = end


def _explained(params: Params, request: DecodeRequest) -> contextlib.AbstractContextManager[None]:
    device = mesh.device_of(params, request.config.mesh)
    return memory.explained(device, functools.partial(memory.of_request, params, request))


def _answered(params: Params, request: DecodeRequest) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns contexts in which the programs of a request run, if it has any."""
    if request.programs is None:
        return contextlib.nullcontext
    facts = functools.partial(saved_programs.facts_of, params, request.inputs, request.config)
    return functools.partial(ahead.intercept, request.programs.handler(facts))


def _feed(streamer: Streamer, request: DecodeRequest, pieces: Iterator[Piece]) -> Generation:
    """Passes the pieces on to `streamer`, and calls its `end` also after an error: another thread may wait for it."""
    try:
        streamer.put(np.asarray(request.inputs.prompts)[:, : int(request.inputs.lengths[0])])
        for piece in pieces:
            streamer.put(piece.tokens)
    finally:
        streamer.end()
    return piece.generation
