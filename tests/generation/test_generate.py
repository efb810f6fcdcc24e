"""What `generate` and `stream` take, give and refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.decoding import loop, prefill
from tests import reference
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow, tiny_llama, tiny_tokenizer

generate = functools.partial(jlade.generate, max_new_tokens=12, lookahead=PAPER)
stream = functools.partial(jlade.stream, max_new_tokens=12, lookahead=PAPER)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        jnp.array([1, 2, 3]),
        [[1, 2, 3]],
        np.array([[1, 2, 3]]),
        [np.array([1, 2, 3])],
    ],
    ids=repr,
)
def test_forms_of_a_prompt(prompt):
    expected = generate(tiny_llama(3), [1, 2, 3])
    assert_same_texts(generate(tiny_llama(3), prompt), expected)


def test_results_of_a_batch_are_in_order_and_padded():
    out = generate(tiny_llama(3), [[1, 2, 3], [4]], eos_ids=[9, 12])
    assert out.tokens.shape == (2, 12)
    for row, length, reason in zip(out.tokens, out.lengths, out.finish_reason, strict=True):
        assert np.all(row[:length] >= 0)
        assert np.all(row[length:] == -1)
        assert reason == ("eos" if row[length - 1] in (9, 12) else "length")
    np.testing.assert_array_equal(out.accepted.sum(axis=1), out.lengths)
    np.testing.assert_array_equal((out.accepted > 0).sum(axis=1), out.steps)
    np.testing.assert_allclose(out.compression, out.lengths / out.steps)


@pytest.mark.slow
def test_a_result_prints_on_a_screen(demo):
    params, tokenizer = demo
    arguments = {"max_new_tokens": 40, "lookahead": PAPER, "tokenizer": tokenizer}
    out = jlade.generate(params, "import os\n", keep_state=True, logprobs=True, **arguments)
    first, row = repr(out).splitlines()
    assert first == "Generation of tokens [1, 40], logprobs [1, 40], processed_logprobs [1, 40], state"
    assert row.startswith(
        f"  0: 40 tokens in {out.steps[0]} steps ({40 / out.steps[0]:.2f} per step), length: '  1, 1, 1"
    )
    assert len(row) < 150
    *rows, more = repr(generate(tiny_llama(3), [[1]] * 30)).splitlines()
    assert (len(rows), more) == (9, "  and 22 more")


@pytest.mark.parametrize("default", [{}, {"max_new_tokens": None}], ids=["absent", "None"])
def test_the_default_limit_is_what_fits_up_to_256(default):
    options = {"lookahead": PAPER, "eos_ids": (), **default}
    prompts = [[1, 2, 3], [4] * 60]
    out = jlade.generate(tiny_llama(3), prompts, **options)
    assert out.lengths.tolist() == [61, 4], "the model reads 64 positions"
    explicit = jlade.generate(tiny_llama(3), prompts, **options | {"max_new_tokens": [61, 4]})
    assert_same_texts(out, explicit)
    inputs, _ = jlade.prepare(tiny_llama(3, max_positions=4096), [[1], [1] * 768, [1] * 3900], **default)
    assert inputs.stopping.max_new_tokens.tolist() == [256, 256, 196]
    with pytest.raises(ValueError, match="prompt of 64 tokens leaves no room for a new one"):
        jlade.generate(tiny_llama(3), [[1], [1] * 64], **options)


def test_the_default_limit_brings_no_other_capacities():
    params = tiny_llama(max_positions=3000)
    capacities = {jlade.prepare(params, [1] * n)[0].prompts.shape[1] for n in range(1, 3000, 50)}
    assert capacities == {1024, 2048, 3000}


def test_the_checkpoints_own_end_tokens_are_the_default():
    free = generate(tiny_llama(3), [1, 2, 3])
    end = int(free.tokens[0, 4])
    out = generate(tiny_llama(3, eos_ids=(end,)), [1, 2, 3])
    assert out.finish_reason == ("eos",)
    assert out.lengths[0] == free.tokens[0].tolist().index(end) + 1
    assert generate(tiny_llama(3, eos_ids=(end,)), [1, 2, 3], eos_ids=()).lengths.tolist() == [12]


@pytest.mark.parametrize("lookahead", [None, PAPER], ids=["plain", "lookahead"])
def test_streamed_pieces_joined_are_the_whole(lookahead, demo):
    params, tokenizer = demo
    arguments = {"max_new_tokens": 40, "lookahead": lookahead, "tokenizer": tokenizer}
    whole = jlade.generate(params, "import os\n", **arguments)
    pieces = list(jlade.stream(params, "import os\n", **arguments))
    assert [len(piece.tokens) for piece in pieces] == whole.accepted[0].tolist()
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == whole.tokens[0].tolist()
    assert "".join(piece.text for piece in pieces) == whole.text[0]


def test_a_streamer_is_given_the_prompt_and_then_what_every_step_accepts(demo):
    params, tokenizer = demo
    calls = []

    class Streamer:
        def put(self, value):
            calls.append(value)

        def end(self):
            calls.append("end")

    arguments = {"max_new_tokens": 20, "lookahead": PAPER, "tokenizer": tokenizer, "stop": "self"}
    whole = jlade.generate(params, "import os\n", **arguments)
    out = jlade.generate(params, "import os\n", streamer=Streamer(), **arguments)
    assert (out.text, out.finish_reason, out.tokens.tolist()) == (
        whole.text,
        whole.finish_reason,
        whole.tokens.tolist(),
    )
    prompt, *pieces, end = calls
    assert prompt.tolist() == [tokenizer.encode("import os\n").ids]
    assert [len(piece) for piece in pieces] == whole.accepted[0].tolist()
    assert np.concatenate(pieces).tolist() == whole.tokens[0, : whole.lengths[0]].tolist()
    assert end == "end"


def test_transformers_streamers_are_taken(demo):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it")
    params, tokenizer = demo
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    arguments = {"max_new_tokens": 20, "lookahead": PAPER, "tokenizer": tokenizer}
    out = jlade.generate(params, "import os\n", streamer=streamer, **arguments)
    assert "".join(streamer) == out.text[0]


def test_a_streamer_is_told_the_end_when_something_fails():
    ended = []

    class Streamer:
        def put(self, value):
            raise RuntimeError("the listener has gone")

        def end(self):
            ended.append(True)

    with pytest.raises(RuntimeError, match="the listener has gone"):
        generate(tiny_llama(3), [1, 2, 3], streamer=Streamer())
    assert ended == [True]


@pytest.mark.parametrize(
    "lookahead",
    [PAPER, slow(LookaheadConfig.paper(0, 3, 2)), slow(LookaheadConfig.paper(3, 3, 0))],
    ids=str,
)
def test_statistics_are_those_of_the_steps_and_the_pool(lookahead):
    """Pools of the text alone are followed in plain Python; the fan-out of any pool is counted in it."""
    prompts = [[3, 1, 4, 1, 5], [1]]
    out = generate(
        tiny_llama(3), prompts, max_new_tokens=30, lookahead=lookahead, with_statistics=True, keep_state=True
    )
    statistics = out.statistics
    np.testing.assert_array_equal(statistics.steps, out.steps)
    for row, prompt in enumerate(prompts):
        accepted = out.accepted[row, : out.steps[row]].tolist()
        histogram = [accepted.count(number) for number in range(1, lookahead.max_accepted + 1)]
        assert statistics.accepted_histogram[row].tolist() == histogram
        assert statistics.steps_with_accepted[row] == sum(number > 1 for number in accepted)
        pool = []
        if lookahead.ngrams.guess_set_size:
            pool = out.state.sources["pool"].ngrams[row].reshape(-1, lookahead.ngram_size).tolist()
        keys = [ngram[0] for ngram in pool if ngram[0] >= 0]
        fan_outs = [keys.count(key) for key in set(keys)] or [0]
        assert statistics.keys[row] == (len(fan_outs) if lookahead.ngrams.guess_set_size else 0)
        assert statistics.ngrams[row] == sum(fan_outs)
        assert statistics.mean_fan_out[row] == pytest.approx(np.mean(fan_outs))
        assert statistics.median_fan_out[row] == np.median(fan_outs)
        assert statistics.max_fan_out[row] == max(fan_outs)
        if lookahead.window_size == 0:
            expected = num_drafted(prompt, out.tokens[row], accepted, lookahead)
            assert statistics.num_drafted[row].tolist() == expected + [0] * (out.steps.max() - len(expected))
    np.testing.assert_array_equal(statistics.steps_with_draft, (statistics.num_drafted > 0).sum(axis=1))
    assert (statistics.steps_with_accepted <= statistics.steps_with_draft).all()
    np.testing.assert_allclose(statistics.draft_rate, statistics.steps_with_draft / out.steps)
    np.testing.assert_allclose(statistics.accepted_rate, statistics.steps_with_accepted / out.steps)
    assert generate(tiny_llama(3), prompts, max_new_tokens=30, lookahead=lookahead).statistics is None


def num_drafted(prompt, tokens, accepted, lookahead):
    """Returns the drafted tokens of each step, with a pool of the text alone in plain Python."""
    pool, text, numbers = reference.Pool(lookahead.ngrams.guess_set_size), [], []
    for new in (prompt, *np.split(tokens[: sum(accepted)], np.cumsum(accepted))):
        for token in [int(i) for i in new]:
            text.append(token)
            if len(text) >= lookahead.ngram_size:
                pool.insert(text[-lookahead.ngram_size :])
        numbers.append((lookahead.ngram_size - 1) * len(pool.lookup(text[-1])))
    return numbers[: len(accepted)]


def test_a_stream_can_be_left_early_and_without_a_tokenizer():
    pieces = stream(tiny_llama(3), [1, 2, 3])
    first = next(pieces)
    pieces.close()
    assert first.text is None
    assert first.tokens.tolist() == generate(tiny_llama(3), [1, 2, 3]).tokens[0, : len(first.tokens)].tolist()


@pytest.mark.parametrize(
    "options", [{"stop": "ab"}, slow({}), slow({"sampling": SamplingConfig(temperature=1.0), "logprobs": True})]
)
def test_a_guard_of_the_callers_own_transfers_changes_nothing(options):
    options = options | {"tokenizer": tiny_tokenizer(), "max_new_tokens": 8, "lookahead": None}
    expected = jlade.generate(tiny_llama(), [1, 2, 3], **options)
    with jax.transfer_guard("disallow"):
        assert jlade.generate(tiny_llama(), [1, 2, 3], **options).text == expected.text
        stream = jlade.stream(tiny_llama(), [1, 2, 3], **options)
        assert next(stream).tokens[0] == expected.tokens[0, 0]
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.ones(3) + np.ones(3, np.float32)
        assert list(stream)[-1].generation.text == expected.text


def test_keys_of_both_kinds_draw_the_same_window():
    typed = generate(tiny_llama(0), list(range(13)), key=jax.random.key(5))
    raw = generate(tiny_llama(0), list(range(13)), key=jax.random.PRNGKey(5))
    np.testing.assert_array_equal(typed.accepted, raw.accepted)


def test_a_given_decoder_comes_before_that_of_the_parameters():
    params = tiny_llama()
    decoder = type(params.decoder)(dataclasses.replace(params.config, eos_ids=(5, 7)))
    inputs, config = jlade.prepare(params, [1], decoder=decoder)
    assert config.decoder.config.eos_ids == (5, 7) != params.config.eos_ids
    assert [token for token in inputs.stopping.eos_ids[0].tolist() if token >= 0] == [5, 7]


def test_a_decoder_can_be_named_for_parameters_that_do_not_carry_one():
    params = tiny_llama(3)
    bare = {"model": params}

    class Wrapped(type(params.decoder)):
        def init_cache(self, params, *args):
            return super().init_cache(params["model"], *args)

        def forward(self, params, *args):
            return super().forward(params["model"], *args)

        def logits(self, params, *args):
            return super().logits(params["model"], *args)

    out = generate(bare, [1, 2, 3], decoder=Wrapped(params.config))
    assert_same_texts(out, generate(params, [1, 2, 3]))


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "prompt is empty"),
        ("", TypeError, "prompt is a string, '': pass tokenizer="),
        (np.zeros(0, np.int32), ValueError, "prompt is empty"),
        ([[1], []], ValueError, r"prompt\[1\] is empty"),
        ("text", TypeError, "prompt is a string, 'text': pass tokenizer="),
        ([1, 13], ValueError, "prompt holds token id 13; accepted are 0 to 12"),
        ([-1], ValueError, "prompt holds token id -1; accepted are 0 to 12"),
        ([[1], [2, 99]], ValueError, r"prompt\[1\] holds token id 99; accepted are 0 to 12"),
        ([1.0, 2.0], TypeError, r"prompt must hold integer token ids, got float64 \(.*1\.0"),
        (np.array([1.5]), TypeError, "prompt must hold integer token ids, got float64"),
        ([True, False], TypeError, "prompt must hold integer token ids, got bool"),
        ([[1, [2]] * 200], TypeError, r"prompt\[0\] must be a string or a flat sequence of token ids, got .{,50}$"),
        (np.zeros((1, 1, 1), np.int32), TypeError, r"prompt\[0\] must be a string or a flat sequence of token ids"),
        (5, TypeError, "prompt must be a string, token ids, or a list of these, got int"),
        (None, TypeError, "prompt must be a string, token ids, or a list of these, got NoneType"),
        ([{"role": "user", "content": "a"}], TypeError, r"prompt\[0\] is a message of a chat, .*apply_chat_template"),
        ([[{"role": "user", "content": "a"}]], TypeError, r"prompt\[0\] is a message of a chat, .*apply_chat_template"),
        ({"role": "user", "content": "a"}, TypeError, "prompt is a message of a chat, .*apply_chat_template"),
        ([None], TypeError, r"prompt\[0\] must be a string or a flat sequence"),
        ([2**40], ValueError, "prompt holds token id 1099511627776; accepted are 0 to 12"),
        (
            [1] * 64,
            ValueError,
            "prompt of 64 tokens leaves no room for a new one; the model reads at most 64 positions",
        ),
        ([1] * 53, ValueError, "prompt of 53 tokens and max_new_tokens=12 make 65 tokens; the model reads at most 64"),
    ],
    ids=str,
)
def test_bad_prompts_are_refused(prompt, error, message, nothing_compiles):
    with pytest.raises(error, match=message):
        generate(tiny_llama(), prompt)
    with pytest.raises(error, match=message):
        stream(tiny_llama(), prompt)


BANS_ALL, BANS_12 = (SamplingConfig(logit_bias=dict.fromkeys(range(n), -np.inf)) for n in (13, 12))


@pytest.mark.parametrize(
    "eos_ids", [np.array([4, 2]), jnp.array([4, 2]), [np.int64(4), jnp.int32(2)], [np.array([4, 2])]]
)
def test_end_tokens_in_arrays(eos_ids):
    inputs, _ = jlade.prepare(tiny_llama(), [1], eos_ids=eos_ids)
    assert inputs.stopping.eos_ids[0, :3].tolist() == [4, 2, -1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an integer of at least 1, got 2.0"),
        ({"max_new_tokens": 64}, ValueError, "max_new_tokens=64 make 65 tokens; the model reads at most 64 positions"),
        (
            {"lookahead": (15, 5, 15)},
            TypeError,
            r"lookahead must be a LookaheadConfig, \"auto\", or None .* got \(15, 5, 15\)",
        ),
        ({"eos_ids": [13]}, ValueError, "eos_ids holds 13; accepted are 0 to 12"),
        ({"eos_ids": -1}, ValueError, "eos_ids must be at least 0, got -1"),
        ({"eos_ids": "</s>"}, TypeError, "eos_ids must be a token id, a sequence of them, .* got '</s>'"),
        ({"eos_ids": 1.5}, TypeError, "eos_ids must be a token id, a sequence of them, .* got 1.5"),
        ({"key": 7}, TypeError, "key must be a key made by jax.random.key, or an array of them, got 7"),
        (
            {"key": jax.random.split(jax.random.key(0))},
            ValueError,
            r"one for each of 1 prompts, got keys of shape \(2,\)",
        ),
        (
            {"sampling": 0.7},
            TypeError,
            "sampling must be a SamplingConfig, or a sequence of one for each prompt, got 0.7",
        ),
        ({"sampling": [SamplingConfig()] * 2}, ValueError, "sampling must be one or 1, .* got 2 configs"),
        ({"max_new_tokens": [1, 2]}, ValueError, r"max_new_tokens must be one integer or 1, .* got \[1, 2\]"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens must be at least 0, got -1"),
        ({"min_new_tokens": 13}, ValueError, "min_new_tokens must be at most 12, the limit of new tokens, got 13"),
        ({"eos_ids": [[1], [2]]}, ValueError, "eos_ids must be a token id, .* or one for each of 1 prompts"),
        ({"eos_ids": [[1], 2]}, TypeError, "eos_ids must be a token id, .* or one for each of 1 prompts"),
        ({"eos_ids": [1, "2"]}, TypeError, "eos_ids must be an integer of at least 0, got '2'"),
        ({"stop": ""}, ValueError, "stop must hold strings of at least one character, got ''"),
        ({"stop": ["a", ""]}, ValueError, "stop must hold strings of at least one character, got ''"),
        ({"stop": 3}, TypeError, "stop must be a string, a sequence of them, or one for each prompt, got 3"),
        ({"stop": [["a"], "b"]}, TypeError, "stop must be a string, a sequence of them, or one for each prompt"),
        ({"stop": [["a"], ["b"]]}, ValueError, "stop must be strings for all prompts or 1 sequences of them, got 2"),
        ({"stop": [[1]]}, TypeError, "stop must hold strings, got 1"),
        ({"stop": "\ud800"}, ValueError, "stop must hold text that UTF-8 can write, got '.ud800'"),
        (
            {"stop": "x" * 2000, "tokenizer": tiny_tokenizer()},
            ValueError,
            "stop strings of 2000 bytes in all are too long",
        ),
        ({"stop": "a"}, TypeError, "stop='a' needs the tokenizer: pass tokenizer="),
        ({"eos_ids": np.array([2.0])}, TypeError, "eos_ids must be an integer of at least 0, got 2.0"),
        ({"sampling": BANS_ALL}, ValueError, "logit_bias leaves none of 13 tokens to draw"),
        ({"sampling": BANS_12, "eos_ids": 12, "min_new_tokens": 1}, ValueError, "leaves none of 13 tokens to draw"),
        ({"temperature": 0.7}, TypeError, r"temperature is not an argument: pass sampling=SamplingConfig\(temperature"),
        (
            {"top_p": 0.7},
            TypeError,
            r"top_p is not an argument: pass sampling=SamplingConfig\(top_p=...\); accepted are",
        ),
        ({"seed": 7}, TypeError, r"seed is not an argument: pass key=jax.random.key\(seed\)"),
        ({"max_tokens": 7}, TypeError, "max_tokens is not an argument: pass max_new_tokens="),
        ({"stop_strings": "a"}, TypeError, "stop_strings is not an argument: pass stop="),
        ({"messages": []}, TypeError, "messages is not an argument: pass as the prompt what .*apply_chat_template"),
        ({"nonsense": 1}, TypeError, "nonsense is not an argument; accepted are"),
        ({"logprobs": 5}, TypeError, "logprobs must be True or False, got 5"),
        ({"top_logprobs": 5}, ValueError, "top_logprobs=5 needs logprobs=True"),
        ({"tokenizer": "tokenizer.json"}, TypeError, "tokenizer must be a tokenizers.Tokenizer .* got str"),
        ({"sampling": SamplingConfig(logit_bias={13: 1})}, ValueError, "logit_bias names token id 13; accepted .* 12"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error, message, nothing_compiles):
    with pytest.raises(error, match=message):
        generate(tiny_llama(), [1], **arguments)


@pytest.mark.parametrize(
    ("streamer", "prompt", "error", "message"),
    [
        (print, [1], TypeError, "streamer must have the methods put and end of transformers' streamers, got <built-in"),
        (type("S", (), {"put": print, "end": print})(), [[1], [2]], ValueError, "prompt must be a single prompt"),
    ],
)
def test_unknown_streamers_and_streamed_batches_are_refused(streamer, prompt, error, message, nothing_compiles):
    with pytest.raises(error, match=message):
        generate(tiny_llama(), prompt, streamer=streamer)


def test_parameters_of_an_unknown_model_are_refused(nothing_compiles):
    with pytest.raises(TypeError, match="params of type dict do not say which model they belong to: pass decoder="):
        generate({"weights": 1}, [1])


def test_a_batch_cannot_be_streamed(nothing_compiles):
    with pytest.raises(ValueError, match="prompt must be a single prompt, got a batch of 2"):
        stream(tiny_llama(), [[1], [2]])


@pytest.fixture
def nothing_compiles(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the program was called")

    for module, name in ((loop, "decode"), (loop, "run_steps"), (prefill, "prefill"), (prefill, "start")):
        monkeypatch.setattr(module, name, fail)
