"""Token ids over HTTP, as trainers by reinforcement learning ask for them, and their log-probabilities."""

import numpy as np
import pytest

from jlade import SamplingConfig
from jlade.server import token_ids
from tests.server.conftest import READER
from tests.server.test_app import error_of, events
from tests.server.tiny_chat import TOKENIZER, alone, ending

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "abba"}]
PROMPT = [0, 1, 1, 0, 4]  # of the template
WARM = SamplingConfig(temperature=0.8)


def ids_of(generation):
    return generation.tokens[0, : generation.lengths[0]].tolist()


def posted(served, path, body):
    response = served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def ended():
    """A seed whose text ends with the end token, and the text."""
    return ending(PROMPT, 0.8)


def test_the_request_of_rllm(served, ended):
    """The fields that its gateway adds to a chat, and those that it reads, whole and in a stream."""
    seed, expected = ended
    body = {"messages": MESSAGES, "temperature": 0.8, "seed": seed, "max_tokens": 24}
    body |= {"logprobs": True, "return_token_ids": True, "extra_body": {"return_token_ids": True}}
    whole = posted(served, CHAT, body)
    assert whole["prompt_token_ids"] == PROMPT
    choice = whole["choices"][0]
    assert choice["token_ids"] == ids_of(expected), "with the end token"
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(logprobs, expected.logprobs[0, : len(logprobs)], atol=1e-5)
    assert len(logprobs) == len(choice["token_ids"])

    first, *chunks = events(served.client.post(CHAT, json=body | {"stream": True}))
    assert first["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
    streamed = [entry["logprob"] for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
    np.testing.assert_allclose(streamed, logprobs, atol=1e-6)
    assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]


def test_the_request_of_skyrl_for_completions(served):
    """Of its client for engines of others; true is a number of log-probabilities, as in vLLM."""
    body = {"model": "tiny", "prompt": PROMPT, "n": 2, "seed": 3, "max_tokens": 9, "temperature": 0.8, "top_p": 1}
    body |= {"top_k": -1, "logprobs": True, "stream": False, "return_token_ids": True}
    choices = posted(served, COMPLETIONS, body)["choices"]
    expected = alone(PROMPT, seed=3, sampling=WARM, max_new_tokens=9)
    assert choices[0]["token_ids"] == ids_of(expected) != choices[1]["token_ids"]
    for choice in choices:
        assert choice["prompt_token_ids"] == PROMPT
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    np.testing.assert_allclose(
        choices[0]["logprobs"]["token_logprobs"], expected.logprobs[0, : expected.lengths[0]], atol=1e-5
    )


def test_the_request_of_skyrl_for_verifiers(served):
    """By the official client. The names of tokens are their ids, which no two tokens share."""
    with served.openai(api_key="dummy") as client:
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": -1, "min_p": 0.0}
        extra |= {"repetition_penalty": 1.0, "min_tokens": 1, "skip_special_tokens": True}
        extra |= {"include_stop_str_in_output": True}
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, max_tokens=8, seed=3, extra_body=extra
        )
    choice = answer.choices[0]
    names = [f"token_id:{token}" for token in choice.model_extra["token_ids"]]
    assert [entry.token for entry in choice.logprobs.content] == names
    assert all(entry.top_logprobs[0].token.startswith("token_id:") for entry in choice.logprobs.content)
    assert answer.model_extra["prompt_token_ids"] == PROMPT


def test_the_request_of_skyrl_for_tokens(served, ended):
    """Of its client of vLLM's servers, with the sampling parameters that it always sends, and what it reads."""
    seed, expected = ended
    sampling = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 24}
    sampling |= {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None, "seed": seed}
    body = {"sampling_params": sampling, "model": "tiny", "token_ids": PROMPT}
    whole = posted(served, GENERATE, body)
    choice = whole["choices"][0]
    assert choice["token_ids"] == ids_of(expected)
    assert (choice["finish_reason"], choice["index"]) == ("stop", 0)
    content = choice["logprobs"]["content"]
    assert [(entry["token_id"], entry["token"]) for entry in content] == [
        (token, f"token_id:{token}") for token in choice["token_ids"]
    ]
    logprobs = [entry["logprob"] for entry in content]
    np.testing.assert_allclose(logprobs, expected.logprobs[0, : len(logprobs)], atol=1e-5)
    assert "prompt_token_ids" not in whole
    assert "prompt_logprobs" not in whole

    chunks = events(served.client.post(GENERATE, json=body | {"stream": True, "return_token_ids": True}))
    assert chunks[0]["prompt_token_ids"] == PROMPT
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]


def test_the_request_of_renderers(served):
    """Of the client with which verifiers and prime-rl train; it counts on an entry with this name for each token."""
    sampling = {"stop_token_ids": [12], "logprobs": 1, "skip_special_tokens": False, "temperature": 0.8, "seed": 3}
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": sampling | {"max_tokens": 9}}
    choice = posted(served, GENERATE, body)["choices"][0]
    assert choice["token_ids"] == ids_of(alone(PROMPT, seed=3, sampling=WARM, max_new_tokens=9))
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(isinstance(entry["logprob"], float) for entry in content)


def test_log_probabilities_of_a_prompt_are_those_of_the_sampled_tokens(served):
    """A text and its prompt, scored as a prompt of SkyRL and of rllm, beside alternatives of the text alone."""
    expected = alone(PROMPT, seed=3, sampling=WARM, max_new_tokens=9, eos_ids=(), top_logprobs=2)
    ids = [*PROMPT, *ids_of(expected)]
    parameters = {"n": 1, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    of_ids = posted(served, GENERATE, {"token_ids": ids, "sampling_params": parameters})
    body = {"prompt": [ids, [3]], "max_tokens": 1, "prompt_logprobs": 2}
    of_completion, of_one = posted(served, COMPLETIONS, body)["choices"]
    assert of_one["prompt_logprobs"] == [None]
    assert of_completion["logprobs"] is None
    chat = {"messages": MESSAGES, "input_ids": ids, "max_tokens": 1, "prompt_logprobs": 2}
    scores = of_ids["prompt_logprobs"]
    assert scores == of_completion["prompt_logprobs"] == posted(served, CHAT, chat)["prompt_logprobs"]
    assert (scores[0], len(scores)) == (None, len(ids))
    for place, token in enumerate(ids_of(expected)):
        entry = scores[len(PROMPT) + place]
        np.testing.assert_allclose(entry[str(token)]["logprob"], expected.logprobs[0, place], atol=1e-5)
        for rank, other in enumerate(expected.top_tokens[0, place].tolist(), start=1):
            assert entry[str(other)]["rank"] == rank
            assert entry[str(other)]["decoded_token"] == TOKENIZER.decode([other], skip_special_tokens=False)
    assert [len(entry["top_logprobs"]) for entry in of_ids["choices"][0]["logprobs"]["content"]] == [0]


def test_alternatives_of_prompts_and_texts_have_numbers_of_their_own(served):
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    both = posted(served, COMPLETIONS, body | {"logprobs": 1, "prompt_logprobs": 3, "echo": True})["choices"][0]
    alone_of_text = posted(served, COMPLETIONS, body | {"logprobs": 1, "echo": True})["choices"][0]
    assert both["logprobs"] == alone_of_text["logprobs"]
    assert {len(entry) for entry in both["prompt_logprobs"][1:]} <= {3, 4}


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_may_keep_its_stop_string_or_token(served, stream):
    tokens = ids_of(alone(PROMPT, max_new_tokens=24, eos_ids=()))
    text = TOKENIZER.decode(tokens, skip_special_tokens=True)
    for options, expected in (
        ({"stop": text[3:5]}, text[: text.index(text[3:5]) + 2]),
        ({"stop_token_ids": tokens[6:7]}, TOKENIZER.decode(tokens[: tokens.index(tokens[6]) + 1])),
    ):
        body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True, "max_tokens": 24, "return_token_ids": True}
        body |= options | {"include_stop_str_in_output": True, "stream": stream}
        response = served.client.post(CHAT, json=body)
        chunks = events(response) if stream else [response.json()]
        parts = [chunk["choices"][0] for chunk in chunks]
        shown = "".join(part.get("delta", part.get("message")).get("content") or "" for part in parts)
        assert shown == expected
        assert parts[-1]["finish_reason"] == "stop"
        ids = [token for part in parts for token in part.get("token_ids", [])]
        assert ids == tokens[: len(ids)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_prompt_and_token_ids_continue_a_text(served, path):
    """The ids of an answer after those of its prompt go on as if the text had never ended."""
    whole = alone(PROMPT, max_new_tokens=24, eos_ids=())
    options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def asked(ids, number):
        if path == GENERATE:
            body = {"token_ids": ids, "sampling_params": options | {"max_tokens": number}}
        else:
            given = {"messages": MESSAGES, "input_ids": ids} if path == CHAT else {"prompt": [ids]}
            body = given | options | {"max_tokens": number}
        return posted(served, path, body)["choices"][0]["token_ids"]

    ids = PROMPT
    for number in (5, 1, 11, 7):
        ids = ids + asked(ids, number)
    assert ids == PROMPT + ids_of(whole)


def test_a_prompt_and_a_text_that_are_too_long(served):
    too_long = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 60}}
    error = error_of(served.client.post(GENERATE, json=too_long), 400)
    assert (error["param"], error["code"]) == ("token_ids", "context_length_exceeded")


def test_a_text_without_a_limit_takes_what_fits():
    asked = token_ids.read(READER, {"token_ids": PROMPT, "sampling_params": {"min_tokens": 20}})
    assert asked.max_new_tokens(PROMPT, 64) == 64 - len(PROMPT)
    assert asked.prompts == [PROMPT]
