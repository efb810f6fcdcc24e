"""The official client against the server, and texts against `jlade.generate` alone."""

import asyncio

import httpx
import jax
import numpy as np
import openai
import pytest

from jlade import SamplingConfig
from jlade.conversion import save_hf
from tests.server.conftest import fill
from tests.server.tiny_chat import PARAMS, TOKENIZER, alone

MESSAGES = [{"role": "system", "content": "ab"}, {"role": "user", "content": "ba"}]
PROMPT = "abbac"  # of the template
WARM = SamplingConfig(temperature=1.0)


def asked(client, **options):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def test_a_chat(client):
    expected = alone(PROMPT, sampling=WARM, seed=7, max_new_tokens=20)
    answer = asked(client, seed=7, max_tokens=20)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", "tiny", "assistant")
    assert choice.message.content == expected.text[0]
    assert choice.message.to_dict()["refusal"] is None, "clients that write it find it"
    assert choice.finish_reason == {"eos": "stop"}.get(expected.finish_reason[0], expected.finish_reason[0])
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, expected.lengths[0])
    assert usage.total_tokens == 5 + expected.lengths[0]


@pytest.mark.slow
def test_the_beginning_of_an_earlier_chat_is_not_read_again(client, served):
    turns = [{"role": "user", "content": "abcabbacabbbcabac"}]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 4, "seed": 1}
    first = client.chat.completions.create(messages=turns, **options)
    turns += [{"role": "assistant", "content": "c"}, {"role": "user", "content": "aab"}]
    hits = served.metric("vllm:prefix_cache_hits_total")
    second = client.chat.completions.create(messages=turns, **options)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 1 <= cached < second.usage.prompt_tokens
    assert served.metric("vllm:prefix_cache_hits_total") == hits + cached
    assert second.choices[0].message.content == alone("abcabbacabbbcabac" + "c" + "aab" + "c", max_new_tokens=4).text[0]


@pytest.mark.slow
def test_controls_reach_the_text(client):
    sampling = SamplingConfig(
        temperature=0.7, top_p=0.9, top_k=8, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.3,
        repetition_penalty=1.2, logit_bias={3: 2.0, 5: -100.0},
    )  # fmt: skip
    options = {"max_new_tokens": 20, "min_new_tokens": 4, "eos_ids": (12, 2), "stop": ["bb"]}
    answer = asked(
        client,
        seed=3,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={"3": 2, "5": -100},
        max_completion_tokens=20,
        stop="bb",
        extra_body={"top_k": 8, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": [2]},
    )
    expected = alone(PROMPT, sampling=sampling, seed=3, **options)
    assert answer.choices[0].message.content == expected.text[0]
    assert answer.usage.completion_tokens == expected.lengths[0]


@pytest.mark.parametrize("stop", [None, ["c"], ["éa", "bb"]])
def test_a_stream_has_the_same_text(client, stop):
    options = {"seed": 7, "max_tokens": 30, "stop": stop}
    whole = asked(client, **options)
    chunks = list(asked(client, stream=True, stream_options={"include_usage": True}, **options))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *texts, last = chunks
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in texts)
    assert texts[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in texts[1:])
    assert texts[-1].choices[0].delta.content is None, "some clients read no text where the reason is"
    assert "".join(chunk.choices[0].delta.content for chunk in texts[:-1]) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in texts]
    assert reasons == [None] * (len(texts) - 1) + [whole.choices[0].finish_reason]
    assert stop or len(texts) > 4, "the text comes in parts"


@pytest.mark.parametrize("stop", [None, ["c"]])
def test_each_chunk_counts_the_tokens_so_far(client, stop):
    options = {"seed": 7, "max_tokens": 30, "stop": stop, "stream": True, "n": 2}
    counted = {"include_usage": True, "continuous_usage_stats": True}
    *texts, last = asked(client, stream_options=counted, **options)
    whole, seen = last.usage, {0: 0, 1: 0}
    for chunk in texts:
        index, usage = chunk.choices[0].index, chunk.usage
        assert usage.prompt_tokens == whole.prompt_tokens
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        if chunk.choices[0].delta.content:
            assert usage.completion_tokens > seen[index]
        seen[index] = usage.completion_tokens
    assert sum(seen.values()) == whole.completion_tokens
    without = list(asked(client, stream_options={"continuous_usage_stats": True}, **options))
    assert all(chunk.usage is None for chunk in without), "as in vLLM, it needs include_usage"


def test_choices_are_interleaved_by_index(client):
    """Choice i has the seed's key folded with i, and choice 0 that of the seed."""
    key = jax.random.key(5)
    keys = [key, jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)]
    expected = [alone(PROMPT, key=each, sampling=WARM, max_new_tokens=24).text[0] for each in keys]
    assert len(set(expected)) == 3
    texts = ["", "", ""]
    order = []
    for chunk in asked(client, n=3, seed=5, max_tokens=24, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        order.append(choice.index)
    assert texts == expected
    assert order != sorted(order), "the choices run side by side"
    assert [choice.message.content for choice in asked(client, n=3, seed=5, max_tokens=24).choices] == expected


@pytest.mark.slow
def test_log_probabilities_of_prompts(client, tmp_path):
    """The request of lm-eval's `local-completions`, against transformers."""
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    save_hf(PARAMS, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    prompts = [[0, 1, 4, 3, 9, 2, 8, 8, 1, 7, 0, 2, 4, 4, 11, 1, 0, 10, 3, 3], [3]]
    out = client.completions.create(model="tiny", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0)
    for prompt, choice in zip(prompts, out.choices, strict=True):
        given, expected = choice.logprobs, alone(prompt, max_new_tokens=1)
        assert choice.text == TOKENIZER.decode(prompt) + expected.text[0]
        assert [
            choice.text.find(token, at) for token, at in zip(given.tokens, given.text_offset, strict=True)
        ] == given.text_offset
        assert (given.token_logprobs[0], given.top_logprobs[0]) == (None, None)
        tokens = [*prompt, int(expected.tokens[0, 0])]
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[:-1].numpy()
        assert len(given.tokens) == len(tokens)
        np.testing.assert_allclose(given.token_logprobs[1:], logprobs[range(len(tokens) - 1), tokens[1:]], atol=1e-4)
        best = [max(top.values()) for top in given.top_logprobs[1:]]
        np.testing.assert_allclose(best, logprobs.max(-1), atol=1e-4)


@pytest.mark.slow
def test_a_completion_that_ends_at_once_has_one_more_token(client):
    """lm-eval drops the last one of prompt and text, whether it is an end token or not."""
    options = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "logit_bias": {"12": 100}}
    choice = client.completions.create(model="tiny", prompt=[0, 1, 4, 3], **options).choices[0]
    assert (choice.text, choice.finish_reason) == (TOKENIZER.decode([0, 1, 4, 3]), "stop")
    assert len(choice.logprobs.token_logprobs) == 5


@pytest.mark.slow
def test_completions_of_several_prompts(client):
    prompts = ["ab", "c", "baa"]
    out = client.completions.create(model="tiny", prompt=prompts, temperature=0, n=2, echo=True)
    expected = [prompt + alone(prompt, max_new_tokens=16).text[0] for prompt in prompts]
    assert [choice.text for choice in out.choices] == [text for text in expected for _ in range(2)]
    assert [choice.index for choice in out.choices] == list(range(6))
    chunks = client.completions.create(model="tiny", prompt=[3, 1], temperature=0, echo=True, stream=True)
    assert (
        "".join(chunk.choices[0].text for chunk in chunks)
        == "cb".replace("cb", "bab") + alone([3, 1], max_new_tokens=16).text[0]
    )


def test_texts_without_a_seed_differ(client):
    out = client.completions.create(model="tiny", prompt=["ab"] * 4, max_tokens=30, temperature=2)
    assert len({choice.text for choice in out.choices}) > 1


def test_log_probabilities(client):
    """In a chat they are those of the tokens without the end token, and their bytes make up the text."""
    expected = alone(PROMPT, sampling=WARM, seed=7, max_new_tokens=20)
    choice = asked(client, seed=7, max_tokens=20, logprobs=True).choices[0]
    shown = expected.lengths[0] - (expected.finish_reason[0] == "eos")
    entries = choice.logprobs.content
    np.testing.assert_allclose([each.logprob for each in entries], expected.logprobs[0, :shown], atol=1e-5)
    data = b"".join(bytes(each.bytes) for each in entries)
    assert data.decode(errors="replace") == choice.message.content
    streamed = [
        entry
        for chunk in asked(client, seed=7, max_tokens=20, logprobs=True, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in entries]
    np.testing.assert_allclose([each.logprob for each in streamed], [each.logprob for each in entries], atol=1e-6)
    completion = client.completions.create(model="tiny", prompt=PROMPT, seed=7, max_tokens=20, logprobs=0).choices[0]
    assert completion.logprobs.tokens[:shown] == [each.token for each in entries]
    assert len(completion.logprobs.tokens) == expected.lengths[0]
    for token, offset in zip(completion.logprobs.tokens[:shown], completion.logprobs.text_offset, strict=False):
        if token.isascii() and "\\" not in token:
            assert completion.text[offset : offset + len(token)] == token


def test_alternatives_of_tokens(client):
    expected = alone(PROMPT, max_new_tokens=6, eos_ids=(), top_logprobs=2)
    options = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    entries = asked(client, logprobs=True, top_logprobs=2, **options).choices[0].logprobs.content
    for i, entry in enumerate(entries):
        np.testing.assert_allclose(
            [each.logprob for each in entry.top_logprobs], expected.top_logprobs[0, i], atol=1e-5
        )
        assert entry.top_logprobs[0].token == entry.token, "greedy"
    completion = client.completions.create(model="tiny", prompt=PROMPT, logprobs=2, **options).choices[0]
    for entry, top in zip(entries, completion.logprobs.top_logprobs, strict=True):
        assert list(top) == [each.token for each in entry.top_logprobs]
        np.testing.assert_allclose(list(top.values()), [each.logprob for each in entry.top_logprobs], atol=1e-5)


@pytest.mark.slow
def test_a_prediction_changes_the_usage_alone(client):
    letters = {str(token): -100 for token in range(13) if token not in (0, 1, 4)}  # spell a text in one way
    options = {"temperature": 0, "max_tokens": 30, "logit_bias": letters}
    plain = asked(client, **options)
    text = plain.choices[0].message.content
    predicted = asked(client, prediction={"type": "content", "content": text[:10]}, **options)
    assert predicted.choices[0].message.content == text
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens == max(0, 10 - details.accepted_prediction_tokens)
    assert plain.usage.completion_tokens_details is None


def test_the_steps_of_a_stream_make_up_its_text(client):
    chunks = list(asked(client, seed=7, max_tokens=30, stream=True, extra_body={"jlade": {"steps": True}}))
    steps = [step for chunk in chunks for step in (chunk.model_extra.get("jlade") or {"steps": []})["steps"]]
    expected = alone(PROMPT, sampling=WARM, seed=7, max_new_tokens=30)
    assert "".join(step["text"] for step in steps) == expected.text[0]
    assert sum(step["tokens"] for step in steps) == expected.lengths[0]
    assert max(step["tokens"] for step in steps) > 1, "a step accepts several tokens"
    for chunk in chunks[1:-1]:
        assert "".join(step["text"] for step in chunk.model_extra["jlade"]["steps"]) == chunk.choices[0].delta.content


def test_the_async_client(served):
    async def ask(client, number):
        if number % 2:
            stream = await client.completions.create(model="tiny", prompt="ab", seed=number, max_tokens=9, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])
        out = await client.completions.create(model="tiny", prompt="ab", seed=number, max_tokens=9)
        return out.choices[0].text

    async def ask_all():
        async with served.openai(openai.AsyncOpenAI, max_retries=8) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(7)))

    expected = [alone("ab", sampling=WARM, seed=number, max_new_tokens=9).text[0] for number in range(7)]
    assert asyncio.run(ask_all()) == expected


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert (model.object, model.model_extra["max_model_len"]) == ("model", 64)
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; this server has 'tiny'"):
        client.models.retrieve("other")


def test_errors_are_those_of_the_client(client):
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert (not_found.value.param, not_found.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as too_long:
        asked(client, max_tokens=60)
    assert (too_long.value.param, too_long.value.code) == ("messages", "context_length_exceeded")
    assert "This model's maximum context length is 64 tokens" in too_long.value.message
    assert "messages of 5 tokens and 60 new ones" in too_long.value.message
    with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 100, got -1"):
        asked(client, temperature=-1)


def test_the_client_waits_and_asks_again_where_the_server_is_busy(served, rounds):
    requests = fill(served.engine, rounds)
    requests += [served.engine.submit([1], max_new_tokens=3) for _ in range(8)]
    body = {"prompt": "ab", "temperature": 0}
    refused = httpx.post(f"{served.url}/v1/completions", json=body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "2")
    assert "8 requests are waiting" in refused.json()["error"]["message"]
    with pytest.raises(openai.RateLimitError), served.openai() as impatient:
        impatient.completions.create(model="tiny", **body)
    rounds.release(1000)
    for request in requests:
        request.result(timeout=300)
    assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 200
