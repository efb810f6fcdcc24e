"""Token ids over HTTP, as trainers by reinforcement learning ask for them, and their log-probabilities."""

import numpy as np
import pytest

from jlade import SamplingConfig
from jlade.server import token_ids
from tests.server.answers import error_of, events
from tests.server.conftest import READER
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


# The bodies of clients, but for the seed.
OF_RLLM = {"messages": MESSAGES, "temperature": 0.8, "max_tokens": 24, "logprobs": True, "return_token_ids": True}
OF_SKYRL = {"model": "tiny", "prompt": PROMPT, "n": 2, "max_tokens": 24, "temperature": 0.8, "top_p": 1, "top_k": -1}
OF_VERIFIERS = {"messages": MESSAGES, "temperature": 0.8, "max_tokens": 24, "logprobs": True, "top_logprobs": 1}
OF_VERIFIERS |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": -1, "min_p": 0.0}
OF_VERIFIERS |= {"repetition_penalty": 1.0, "min_tokens": 1, "skip_special_tokens": True}
SAMPLING = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 24}
SAMPLING |= {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None}
OF_RENDERERS = {"stop_token_ids": [12], "logprobs": 1, "skip_special_tokens": False, "temperature": 0.8}
CLIENTS = {
    "rllm": (CHAT, OF_RLLM | {"extra_body": {"return_token_ids": True}}),
    # Its client for engines of others, to which true is a number of log-probabilities.
    "skyrl": (COMPLETIONS, OF_SKYRL | {"logprobs": True, "stream": False, "return_token_ids": True}),
    "skyrl for verifiers": (CHAT, OF_VERIFIERS | {"include_stop_str_in_output": True}),
    "skyrl for tokens": (GENERATE, {"model": "tiny", "token_ids": PROMPT, "sampling_params": SAMPLING}),
    # With which verifiers and prime-rl train.
    "renderers": (GENERATE, {"token_ids": PROMPT, "sampling_params": OF_RENDERERS | {"max_tokens": 24}}),
}


def scored(path, choice):
    """Returns the names and the log-probabilities of the tokens of a choice, or of a part of it."""
    logprobs = choice["logprobs"] or {}
    if path == COMPLETIONS:
        return logprobs.get("tokens", []), logprobs.get("token_logprobs", [])
    entries = logprobs.get("content", [])
    return [entry["token"] for entry in entries], [entry["logprob"] for entry in entries]


def text_of(part):
    content = part.get("delta", part.get("message", {})).get("content")
    return content or part.get("text", "")


@pytest.mark.parametrize("client", CLIENTS)
def test_the_requests_of_trainers(served, ended, client):
    """Ids and log-probabilities of all tokens, the end token too, whole and in a stream."""
    seed, expected = ended
    path, body = CLIENTS[client]
    if path == GENERATE:
        body = body | {"sampling_params": body["sampling_params"] | {"seed": seed}}
    else:
        body = body | {"seed": seed}
    whole = posted(served, path, body)
    choice, *others = whole["choices"]
    names, logprobs = scored(path, choice)
    assert choice["token_ids"] == ids_of(expected)
    assert choice["finish_reason"] == "stop"
    np.testing.assert_allclose(logprobs, expected.logprobs[0, : len(choice["token_ids"])], atol=1e-5)
    if path == GENERATE or "return_tokens_as_token_ids" in body:  # names that no two tokens share
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(other["token_ids"] != choice["token_ids"] for other in others)
    asks = "return_token_ids" in body
    assert (choice if path == COMPLETIONS else whole).get("prompt_token_ids") == (PROMPT if asks else None)
    assert "prompt_logprobs" not in whole

    first, *chunks = events(served.client.post(path, json=body | {"stream": True, "return_token_ids": True}))
    assert (first["choices"][0] if path == COMPLETIONS else first)["prompt_token_ids"] == PROMPT
    assert "prompt_token_ids" not in str(chunks[1:])
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == 0]
    assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
    np.testing.assert_allclose([each for part in parts for each in scored(path, part)[1]], logprobs, atol=1e-6)
    assert "".join(map(text_of, parts)) == text_of(choice)
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]


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


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_text_may_keep_its_stop_string_or_token(served, path, stream, keeps):
    """By default it does not, as in vLLM."""
    tokens = ids_of(alone(PROMPT, max_new_tokens=24, eos_ids=()))
    text = TOKENIZER.decode(tokens, skip_special_tokens=True)
    end, index = text.index(text[3:5]), tokens.index(tokens[6])
    body = {"messages": MESSAGES, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 24}
    body |= {"return_token_ids": True, "include_stop_str_in_output": keeps, "stream": stream}
    for options, expected in (
        ({"stop": text[3:5]}, text[: end + 2 * keeps]),
        ({"stop_token_ids": tokens[6:7]}, TOKENIZER.decode(tokens[: index + keeps])),
    ):
        response = served.client.post(path, json=body | options)
        chunks = events(response) if stream else [response.json()]
        parts = [chunk["choices"][0] for chunk in chunks]
        assert "".join(map(text_of, parts)) == expected
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
