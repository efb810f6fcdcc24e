"""Bodies as clients send them, and wrong ones."""

import contextlib
import copy
import dataclasses
import json
import logging
import math
import re
import sys
import typing

import openai.types.chat.completion_create_params as of_chats
import openai.types.completion_create_params as of_completions
import openai.types.responses.response_create_params as of_responses
import openai.types.responses.response_input_item_param as of_items
import pytest
import typing_extensions
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseOutputMessageParam,
    ToolChoiceAllowedParam,
    ToolChoiceFunctionParam,
)
from tokenizers.processors import TemplateProcessing

from jlade import SamplingConfig
from jlade.cli.arguments import DEMO
from jlade.conversion.tokenizer_files import load_tokenizer
from jlade.generation import chat_template
from jlade.generation import text as text_lib
from jlade.generation.chat_template import ChatTemplate
from jlade.server import fields, kinds, token_ids
from jlade.server.body_fields import HARMLESS, UNSUPPORTED
from jlade.server.fields import RequestError
from jlade.server.kinds import Nested
from jlade.server.responses import items
from tests.server import json_chat, test_responses
from tests.server.conftest import HELLO, READER, response
from tests.server.tiny_chat import CHAT_TOKENIZER, TOKENIZER

# The fields of vLLM 0.33.0 that OpenAI's reference has not.
OF_VLLM = {
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template",
    "chat_template_kwargs", "continue_final_message", "documents", "ec_transfer_params", "ignore_eos",
    "include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logprob_token_ids",
    "media_io_kwargs", "min_p", "min_tokens", "mm_payload", "mm_processor_kwargs", "priority", "prompt_embeds",
    "prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id", "return_mm_kwargs",
    "return_prompt_text", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids",
    "return_weight_versions", "routed_experts_prompt_start", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stop_token_ids", "stream_interval", "structured_outputs", "thinking_token_budget",
    "top_k", "truncate_prompt_tokens", "truncation_side", "use_beam_search", "vllm_xargs", "watermarking",
}  # fmt: skip


TABLES = READER.tables


def chat(**body):
    return READER.chat({"messages": HELLO} | body)


def completion(**body):
    return READER.completion({"prompt": "ab"} | body)


def test_the_ends_and_bans_of_the_checkpoint_are_kept():
    banned = SamplingConfig(temperature=1.0, logit_bias={4: -math.inf})
    reader = dataclasses.replace(READER, sampling=banned, stop=("ca", "bb"))
    for given, stop in ((None, ["ca", "bb"]), ([], []), ("a", ["a"])):
        asked = reader.completion({"prompt": "ab", "stop": given, "logit_bias": {"4": 50, "5": 1}})
        assert asked.options["stop"] == stop
        assert asked.options["sampling"].logit_bias == ((4, -math.inf), (5, 1.0))
    assert reader.completion({"prompt": "ab"}).options["sampling"] == banned


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
        ({"top_p": 0}, SamplingConfig()),
        ({"top_p": 0, "temperature": 2, "frequency_penalty": 1}, SamplingConfig(frequency_penalty=1)),
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
    assert completion(prompt="ab").prompts == [[0, 1]]
    assert completion(prompt=[3, 4]).prompts == [[3, 4]]
    assert completion(prompt=[[3], [4, 5]]).prompts == [[3], [4, 5]]
    assert completion(prompt=["c", [5]], n=2).prompts == [[4], [5]]
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).prompts == [[0, 0, 1, 4, 4]]  # the template ends a conversation with c
    messages.insert(1, {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "name": "n"})
    assert chat(messages=messages).prompts == [[0, 0, 1, 4, 4]]


def test_templates_that_write_parts_get_those_of_the_client():
    template = "{% for m in messages %}{% for part in m.content %}|{{ part.text }}{% endfor %}{% endfor %}"
    reader = dataclasses.replace(json_chat.READER, chat_template=json_chat.chat_template(template))
    parts = [{"type": kind, "text": text} for kind, text in (("text", "a"), ("text", "b"))]
    for prompts in (
        reader.chat({"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]}).prompts,
        response(
            {
                "input": [
                    {"role": "user", "content": [part | {"type": "input_text"} for part in parts]},
                    {"role": "user", "content": "c"},
                ]
            },
            reader,
        ).prompts,
    ):
        assert json_chat.TOKENIZER.decode(prompts[0]) == "|a|b|c"


def test_templates_see_the_names_of_a_conversation():
    template = ChatTemplate(CHAT_TOKENIZER, "{% for one in messages %}{{ one.name }}{{ one.content }}{% endfor %}")
    named = dataclasses.replace(READER, chat_template=template)
    assert named.chat({"messages": [{"role": "user", "name": "b", "content": "a"}]}).prompts == [[1, 0]]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "ab"}, [12, 0, 1]),
        ({"prompt": "ab", "add_special_tokens": False}, [0, 1]),
        ({"messages": HELLO}, [0, 1, 4]),
        ({"messages": HELLO, "add_generation_prompt": False}, [0, 1]),
        ({"messages": HELLO, "add_special_tokens": True}, [12, 0, 1, 4]),
    ],
)
def test_tokenize(body, expected):
    """The tokens are those of transformers with the same arguments."""
    of_chat = copy.deepcopy(CHAT_TOKENIZER)
    of_chat.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 12)])
    reader = dataclasses.replace(READER, tokenizer=of_chat, chat_template=ChatTemplate(of_chat))
    assert reader.tokens(body) == expected
    special, text = body.get("add_special_tokens"), body.get("prompt")
    if text is None:
        begins = body.get("add_generation_prompt", True)
        text = of_chat.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=begins)
    assert of_chat(text, add_special_tokens="prompt" in body if special is None else special)["input_ids"] == expected


def test_detokenize():
    assert READER.text({"tokens": [0, 12, 4]}) == TOKENIZER.decode([0, 12, 4], skip_special_tokens=False) != "ac"


def test_texts_that_are_too_long_by_their_length_are_not_tokenized(monkeypatch):
    tokenizer = load_tokenizer(DEMO)
    longest = max(map(len, tokenizer.get_vocab()))
    template = ChatTemplate(chat_template.load_tokenizer(DEMO))
    reader = dataclasses.replace(READER, tokenizer=tokenizer, chat_template=template, vocab_size=4096)
    spaces = max((name for name in tokenizer.get_vocab() if set(name) == {"Ġ"}), key=len)
    assert len(reader.completion({"prompt": " " * len(spaces) * 50, "max_tokens": 1}).prompts[0]) < 64
    monkeypatch.setattr(text_lib, "encode", None)
    monkeypatch.setattr(ChatTemplate, "encode", None)
    text = "a" * (64 * longest + 1)
    for read, body, field in (
        (reader.completion, {"prompt": text}, "prompt"),
        (reader.completion, {"prompt": ["ab", text]}, "prompt[1]"),
        (reader.tokens, {"prompt": text}, "prompt"),
        (reader.tokens, {"messages": [{"role": "user", "content": text}]}, "messages"),
        (reader.chat, {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        with pytest.raises(RequestError) as info:
            read(body)
        error = info.value.body["error"]
        assert error["message"].startswith("This model's maximum context length is 64 tokens. However, ")
        assert "characters and therefore at least 65 tokens" in error["message"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    prediction = {"type": "content", "content": "a" * (16 * longest + 1)}
    with pytest.raises(RequestError, match="prediction must be a text of at most 16 tokens"):
        reader.completion({"prompt": [1], "prediction": prediction})


def test_a_prediction():
    for content in ("abc", [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]):
        options = chat(prediction={"type": "content", "content": content}).options
        assert (options["prediction"], options["with_statistics"]) == ([0, 1, 4], True)
    assert "prediction" not in chat(prediction={"type": "content", "content": ""}).options


def test_a_salt_divides_what_was_read():
    body = {"cache_salt": "s"}
    for asked in (
        chat(**body),
        completion(**body),
        response({"input": "ab"} | body),
        token_ids.read(READER, {"token_ids": [1]} | body),
    ):
        assert asked.options["prefix_key"] == "s"
    assert "prefix_key" not in chat(cache_salt=None).options


def test_a_chat_without_a_limit_takes_what_fits():
    assert chat().max_new_tokens([1] * 5, 16) == 11
    assert chat(max_tokens=11).max_new_tokens([1] * 5, 16) == 11
    for asked in (chat(max_tokens=12), completion(max_tokens=12)):
        with pytest.raises(RequestError, match=r"length is 16 tokens\. However, .* of 5 tokens and 12 new ones"):
            asked.max_new_tokens([1] * 5, 16)
    of_input = response({"input": "ab"})
    for asked, field in ((chat(), "messages"), (of_input, "input")):
        with pytest.raises(RequestError, match=rf"length is 16 tokens\. However, {field} of 16 tokens and 1 new"):
            asked.max_new_tokens([1] * 16, 16)


@pytest.mark.parametrize("seed", [-(2**63), -2, 2**32, 2**63 - 1])
def test_seeds_have_64_bits(seed):
    assert chat(seed=seed).seed == seed


def test_each_field_of_openai_and_vllm_is_known():
    fields_of_openai = {
        name
        for module in (of_chats, of_completions)
        for name in typing.get_type_hints(module.CompletionCreateParamsStreaming)
    }
    assert {"messages", "prompt", "reasoning_effort", "suffix"} < fields_of_openai
    assert not UNSUPPORTED.keys() & HARMLESS.keys()
    assert fields_of_openai | OF_VLLM <= TABLES.chat.keys() | TABLES.completion.keys()
    of_response = set(typing.get_type_hints(of_responses.ResponseCreateParamsStreaming))
    assert {"input", "conversation"} < of_response
    assert of_response <= TABLES.response.keys()


@pytest.fixture
def said(monkeypatch, caplog):
    """Returns the names of the fields that the log says."""
    monkeypatch.setattr(kinds, "_logged", set())
    caplog.set_level(logging.WARNING)
    parts = ("the field ", " of a request is not known and not read")

    def names():
        messages = [record.getMessage() for record in caplog.records]
        return [message.removeprefix(parts[0]).removesuffix(parts[1]).strip("'") for message in messages]

    return names


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [*HELLO, {"role": "assistant", "contnet": "a"}]}, "messages[1].contnet"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]},
            "messages[0].content[0].txt",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"idx": 1}]}]}, "messages[0].tool_calls[0].idx"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": CALL["function"] | {"args": 1}}]}]},
            "messages[0].tool_calls[0].function.args",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}], "tool_choice": "none"},
            "tools[0].function.paramters",
        ),
        ({"tool_choice": {"type": "none", "allowed": {}}}, "tool_choice.allowed"),
        ({"response_format": {"type": "json_object", "schma": {}}}, "response_format.schma"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": 1}, "stict": True}}},
            "response_format.json_schema.stict",
        ),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        ({"prediction": {"type": "content", "content": "a", "text": "b"}}, "prediction.text"),
        ({"jlade": {"step": True}}, "jlade.step"),
        ({"x" * 4_000_000: 1}, "x" * 47 + "..." + "x" * 48),
    ],
)
def test_unknown_fields_are_said_with_their_paths(said, body, path):
    for _ in range(2):
        with contextlib.suppress(RequestError):
            chat(**body)
    assert said() == [path]


def test_a_field_is_said_once_for_all_bodies_and_messages(said):
    for _ in range(2):
        completion(user="u", never_heard_of=1)
    READER.tokens({"messages": [{"role": "user", "content": "a", "colour": "red"}] * 3})
    READER.text({"tokens": [1], "token": 1})
    assert said() == ["never_heard_of", "messages[0].colour", "token"]


def test_unknown_fields_of_items_are_said_with_their_paths(said):
    given = [HELLO[0] | {"name": "n"}, test_responses.CALL | {"args": 1}, test_responses.OUTPUT | {"result": 1}]
    harmless = {"client_metadata": {"a": "b"}, "reasoning": {"summary": "auto"}, "metadata": {"c": "d"}}
    body = {"input": given, "text": {"fromat": {}}, "stream_options": {"include_usage": True}} | harmless
    response(body, json_chat.READER)
    paths = {"text.fromat", "stream_options.include_usage", "input[0].name", "input[1].args", "input[2].result"}
    assert set(said()) == paths


def unknown_of(hint, table, path=""):
    """Yields the paths of the fields of openai's types for text that are not known."""
    for each in typing.get_args(hint):
        yield from unknown_of(each, table, path)
    if typing_extensions.is_typeddict(hint) and not re.search("Image|Audio|File|Custom|Refusal", hint.__name__):
        for name, of_field in typing.get_type_hints(hint).items():
            if name not in table:
                yield f"{path}{name}"
            elif isinstance(kind := table[name], Nested):
                yield from unknown_of(of_field, kind.table, f"{path}{name}.")


def test_each_field_within_a_field_of_openai_is_known():
    of_chat = typing.get_type_hints(of_chats.CompletionCreateParamsStreaming)
    of_response = typing.get_type_hints(of_responses.ResponseCreateParamsStreaming)
    # Of tools and items those that are no function are refused by their types.
    of_response |= {"tools": FunctionToolParam, "tool_choice": ToolChoiceAllowedParam | ToolChoiceFunctionParam}
    for hints, table in ((of_chat, TABLES.chat), (of_response, TABLES.response)):
        nested = {name: kind for name, kind in table.items() if isinstance(kind, Nested) and name in hints}
        assert {"stream_options", "tools", "tool_choice"} < nested.keys()
        assert [path for name in nested for path in unknown_of(hints[name], nested[name].table)] == []
    for kind, hint in (
        ("message", of_items.Message | ResponseOutputMessageParam | EasyInputMessageParam),
        ("function_call", ResponseFunctionToolCallParam),
        ("function_call_output", of_items.FunctionCallOutput),
        ("custom_tool_call", of_items.ResponseCustomToolCallParam),
        ("custom_tool_call_output", of_items.ResponseCustomToolCallOutputParam),
        ("reasoning", of_items.ResponseReasoningItemParam),
    ):
        assert list(unknown_of(hint, items.ITEMS[kind])) == []
    assert "content.text" in unknown_of(of_chat["messages"], {"content": Nested({})})


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"reasoning": "R"}, "R"),
        ({"thinking": "T", "reasoning": "R"}, "T"),
        ({"thinking": "T", "reasoning": "R", "reasoning_content": "C"}, "C"),
        ({"reasoning": None, "reasoning_content": ""}, ""),
    ],
)
def test_thoughts_of_an_earlier_answer_have_the_names_of_transformers(given, shown):
    written = "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "content": "a"}
    reader = dataclasses.replace(json_chat.READER, chat_template=json_chat.chat_template(written))
    text = json_chat.TOKENIZER.decode(reader.chat({"messages": [message | given]}).prompts[0])
    assert text == f"<{shown}>a"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "|"),
        ({"enable_thinking": False}, "False|"),
        ({"chat_template_kwargs": {"enable_thinking": True, "language": "de"}}, "True|de"),
        ({"reasoning_effort": "none"}, "False|"),
        ({"chat_template_kwargs": {"language": "de", "unused": 1}}, "|de"),
    ],
)
def test_a_body_gives_variables_of_the_template(given, shown, caplog):
    template = json_chat.chat_template("{{ thinking }}|{{ language }}")
    reader = dataclasses.replace(json_chat.READER, chat_template=template)
    body = {"messages": HELLO} | given
    assert json_chat.TOKENIZER.decode(reader.chat(body).prompts[0]) == shown
    assert json_chat.TOKENIZER.decode(reader.tokens({"messages": HELLO, **given})) == shown
    assert ("no variable unused" in caplog.text) is ("unused" in str(given))
    for name in ("messages", "tools", "eos_token"):
        with pytest.raises(RequestError, match=f"chat_template_kwargs.{name} must be"):
            reader.chat(body | {"chat_template_kwargs": {name: []}})


def test_fields_that_change_no_text_are_ignored():
    for name, neutral in (("tools", []), ("suffix", ""), ("best_of", 1), ("response_format", {"type": "text"})):
        assert chat(**{name: neutral}).options == chat().options
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(user="u", metadata={}, tools=tools, tool_choice="none", made_up=3).options == chat().options


def test_a_body_is_one_line_whatever_divides_lines():
    """Clients of streams divide them into lines as `str.splitlines` does."""
    every = "a".join(map(chr, range(sys.maxunicode + 1)))  # no two halves of a pair become one character
    line = fields.to_json({"text": every})
    assert line.splitlines() == [line.encode().decode()]
    assert json.loads(line) == {"text": every}
    assert "é" in line


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"NaN", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_body_that_is_no_object_is_refused(data):
    with pytest.raises(RequestError, match="the body"):
        fields.parse(data)
