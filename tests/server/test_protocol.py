"""Bodies as clients send them, and wrong ones."""

import pytest

from jlade import SamplingConfig
from jlade.server import fields
from jlade.server.fields import RequestError
from jlade.server.protocol import Reader
from tests.tiny import tiny_tokenizer

READER = Reader(
    tokenizer=tiny_tokenizer(),
    encode_chat=lambda messages: [3, *(len(message["content"]) for message in messages)],
    vocab_size=13,
    eos_ids=(12,),
    sampling=SamplingConfig(temperature=1.0),
    max_top_logprobs=3,
    max_logprobs=2,
)
HELLO = [{"role": "user", "content": "ab"}]


def chat(**body):
    return READER.chat({"messages": HELLO} | body)


def completion(**body):
    return READER.completion({"prompt": "ab"} | body)


def test_the_defaults_are_those_of_openai():
    for asked, limit in ((chat(), None), (completion(), 16)):
        assert (asked.limit, asked.seed, asked.n, asked.stream, asked.include_usage) == (limit, None, 1, False, False)
        assert asked.options == {
            "sampling": SamplingConfig(temperature=1.0),
            "eos_ids": [12],
            "stop": [],
            "min_new_tokens": 0,
        }


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, SamplingConfig()),
        ({"top_p": 1, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}, SamplingConfig(temperature=1.0)),
        ({"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}}, SamplingConfig(temperature=1.0)),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 4}, SamplingConfig(temperature=0.5, top_p=0.9, top_k=4)),
        ({"logit_bias": {"3": -100, "5": 1.5}}, SamplingConfig(temperature=1.0, logit_bias={3: -100.0, 5: 1.5})),
    ],
)
def test_sampling(field, expected):
    """Controls without effect are left out: programs without filters and penalties are faster."""
    assert chat(**field).options["sampling"] == completion(**field).options["sampling"] == expected


def test_ends_of_texts():
    assert chat(stop="c").options["stop"] == ["c"]
    assert chat(stop=["c", "ab"], stop_token_ids=[3]).options["eos_ids"] == [12, 3]
    assert chat(ignore_eos=True, stop_token_ids=[3]).options["eos_ids"] == [3]
    assert chat(max_tokens=5, max_completion_tokens=7, min_tokens=6).limit == 7
    assert completion(max_tokens=5, min_tokens=2).options["min_new_tokens"] == 2


def test_prompts():
    assert completion(prompt="ab").prompts == [[2]]
    assert completion(prompt=[3, 4]).prompts == [[3, 4]]
    assert completion(prompt=[[3], [4, 5]]).prompts == [[3], [4, 5]]
    assert completion(prompt=["c", [4]], n=2).prompts[1] == [4]
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).prompts == [[3, 1, 3]]


def test_a_prediction():
    for content in ("abc", [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]):
        options = chat(prediction={"type": "content", "content": content}).options
        assert (options["prediction"], options["with_statistics"]) == ("abc", True)
    assert "prediction" not in chat(prediction={"type": "content", "content": ""}).options


def test_a_chat_without_a_limit_takes_what_fits():
    assert chat().max_new_tokens([1] * 5, 16) == 11
    assert chat(max_tokens=11).max_new_tokens([1] * 5, 16) == 11
    for asked in (chat(max_tokens=12), completion(max_tokens=12)):
        with pytest.raises(RequestError, match="5 tokens and 12 new ones exceed the limit of 16 tokens"):
            asked.max_new_tokens([1] * 5, 16)
    with pytest.raises(RequestError, match="16 tokens and 1 new ones exceed the limit of 16"):
        chat().max_new_tokens([1] * 16, 16)


def test_fields_that_change_no_text_are_ignored():
    for name, neutral in (("tools", []), ("suffix", ""), ("best_of", 1), ("response_format", {"type": "text"})):
        assert chat(**{name: neutral}).options == chat().options
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(user="u", metadata={}, tools=tools, tool_choice="none", made_up=3).options == chat().options


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature must be a number from 0 to 100, got -1"),
        ({"temperature": "1"}, "temperature", "got '1'"),
        ({"temperature": True}, "temperature", "got True"),
        ({"temperature": 10**400}, "temperature", "from 0 to 100"),
        ({"top_p": 0}, "top_p", "top_p must be a number above 0, up to 1, got 0"),
        ({"top_k": 1.5}, "top_k", "top_k must be an integer of at least 1, got 1.5"),
        ({"logit_bias": {"13": 1}}, "logit_bias", "token ids from 0 to 12, got '13'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids from 0 to 12"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100, got 101"),
        ({"logit_bias": [1]}, "logit_bias", "an object of numbers"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer from 1 to 2147483647, got 0"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "from 0 to 5, got 6"),
        ({"n": 0}, "n", "n must be an integer from 1 to 128, got 0"),
        ({"seed": 2**32}, "seed", "seed must be an integer from -1 to 4294967295"),
        ({"stop": [""]}, "stop", "each of 1 to 1024 characters, got ''"),
        ({"stop": ["a"] * 65}, "stop", "at most 64"),
        ({"stop": ["\ud800"]}, "stop", "text that UTF-8 can write"),
        ({"stop_token_ids": [13]}, "stop_token_ids", "token ids from 0 to 12, got 13"),
        ({"stop_token_ids": [1] * 32}, "stop_token_ids", "at most 31 token ids"),
        ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false, got 1"),
        ({"stream_options": []}, "stream_options", "an object"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported: leave it out or set it to"),
        ({"suffix": "x"}, "suffix", "suffix='x' is not supported"),
        ({"best_of": 2}, "best_of", "best_of=2 is not supported"),
        ({"prediction": "x"}, "prediction", "prediction must be"),
    ],
)
def test_wrong_fields_are_refused(field, param, message):
    for read in (chat, completion):
        with pytest.raises(RequestError) as info:
            read(**field)
        error = info.value.body["error"]
        assert info.value.status == 400
        assert message in error["message"]
        assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", None)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "one of system, developer, user, assistant, got 'tool'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a string, got None"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\] must be a part"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "tool_calls are not supported"),
        ({"tools": [{"type": "function"}]}, 'tools are not supported: leave them out, or set tool_choice to "none"'),
        (
            {"top_logprobs": 4, "logprobs": True},
            "top_logprobs must be at most 3, the limit that --max-top-logprobs sets",
        ),
        ({"top_logprobs": 2}, "logprobs must be true with top_logprobs=2, got None"),
    ],
)
def test_wrong_chats_are_refused(field, message):
    with pytest.raises(RequestError, match=message):
        chat(**field)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"prompt": None}, "prompt must be a string, token ids, or a list of these, got None"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": ""}, "prompt must be text of at least one token"),
        ({"prompt": [[]]}, r"prompt\[0\] must be at least one token"),
        ({"prompt": [3, "a"]}, "token ids from 0 to 12, got 'a'"),
        ({"prompt": [-1]}, "token ids from 0 to 12, got -1"),
        ({"prompt": ["a"] * 65, "n": 2}, "at most 128 choices in all, with n=2"),
        ({"logprobs": 3}, "logprobs must be at most 2, the limit that --max-top-logprobs sets, got 3"),
        ({"logprobs": 0, "echo": True, "stream": True}, "stream must be false for the log-probabilities of an echoed"),
    ],
)
def test_wrong_completions_are_refused(field, message):
    with pytest.raises(RequestError, match=message):
        completion(**field)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"NaN", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_body_that_is_no_object_is_refused(data):
    with pytest.raises(RequestError, match="the body"):
        fields.parse(data)
