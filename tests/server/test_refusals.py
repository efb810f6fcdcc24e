"""Bodies that are refused: the field that the error names, and its message."""

import dataclasses

import pytest

from jlade.server import token_ids
from jlade.server.body_fields import LOGPROBS
from jlade.server.fields import RequestError
from tests.server import conftest, json_chat
from tests.server.calls import BUY, CALL, OUTPUT, SHOP
from tests.server.conftest import HELLO, READER
from tests.server.json_chat import SCHEMA, tool


def chat(body):
    return READER.chat({"messages": HELLO} | body)


def completion(body):
    return READER.completion({"prompt": "ab"} | body)


def structured(body):
    """Reads a chat for a model whose tokens spell JSON, and makes its grammar."""
    reader = dataclasses.replace(json_chat.READER, max_grammar=128)
    return reader.with_grammar(reader.chat({"messages": HELLO} | body))


def tokenize(body):
    return READER.tokens({"messages": HELLO} | body)


def detokenize(body):
    return READER.text(body)


def generate(body):
    return token_ids.read(READER, {"token_ids": [0]} | body)


def sampling(body):
    return generate({"sampling_params": body})


def response(body):
    return conftest.response({"input": "ab"} | body)


def response_with_tools(body):
    reader = dataclasses.replace(json_chat.READER, max_top_logprobs=1)
    return conftest.response({"input": "ab", "tools": [BUY]} | body, reader)


def after_call(body):
    """Reads a chat in which a call with these fields comes after the first message."""
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [body]}]
    return json_chat.READER.chat({"messages": messages})


def one_message(body):
    return chat({"messages": [body]})


def one_item(body):
    return response({"input": [body]})


OF_TEXTS = [
    ({"temperature": -1}, "temperature", "temperature must be a number from 0 to 100, got -1"),
    ({"temperature": "1"}, "temperature", "got '1'"),
    ({"temperature": True}, "temperature", "got True"),
    ({"temperature": 10**400}, "temperature", "from 0 to 100"),
    ({"top_p": 1.5}, "top_p", "top_p must be a number from 0 to 1, got 1.5"),
    ({"top_k": 1.5}, "top_k", "top_k must be an integer of at least 1, got 1.5"),
    ({"logit_bias": {"13": 1}}, "logit_bias", "token ids from 0 to 12, got '13'"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids from 0 to 12"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100, got 101"),
    ({"logit_bias": [1]}, "logit_bias", "an object of numbers"),
    ({"seed": 2**63}, "seed", "seed must be an integer from -9223372036854775808 to 9223372036854775807"),
    ({"stop": [""]}, "stop", "each of 1 to 1024 characters, got ''"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop": ["\ud800"]}, "stop", "text that UTF-8 can write"),
    ({"stop_token_ids": [13]}, "stop_token_ids", "token ids from 0 to 12, got 13"),
    ({"stop_token_ids": [1] * 32}, "stop_token_ids", "at most 31 token ids"),
    ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
    ({"prediction": {"type": "content", "content": "a" * 17}}, "prediction", "at most 16 tokens, got 'aaaaa"),
    ({"prediction": "x"}, "prediction", "prediction must be"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt must be a string of at least one character, got ''"),
    ({"cache_salt": 3}, "cache_salt", "cache_salt must be a string, got 3"),
    ({"suffix": "x"}, "suffix", "suffix='x' is not supported"),
    ({"best_of": 2}, "best_of", "best_of=2 is not supported"),
]
OF_BOTH = [
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer from 1 to 2147483647, got 0"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "from 0 to 5, got 6"),
    ({"n": 0}, "n", "n must be an integer from 1 to 128, got 0"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "left out unless stream is true, got"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false, got 1"),
    ({"stream_options": []}, "stream_options", "an object"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format must be"),
    ({"speculative": "no"}, "speculative", "speculative must be true or false, got 'no'"),
    ({"remember": 1}, "remember", "remember must be true or false, got 1"),
    ({"prompt_cache_key": 3}, "prompt_cache_key", "prompt_cache_key must be a string, got 3"),
    ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key", "must be a string of at most 1024 characters, got 'xxx"),
]
OF_CHATS = [
    ({"input_ids": []}, "input_ids", "at least one token"),
    ({"input_ids": [13]}, "input_ids", "from 0 to 12, got 13"),
    ({"input_ids": [0] * 65}, "input_ids", "of 65 tokens exceed"),
    ({"messages": []}, "messages", "messages must be a list of at least one message"),
    (
        {"top_logprobs": 4, "logprobs": True},
        "top_logprobs",
        "must be at most 3, the limit that --max-top-logprobs sets",
    ),
    ({"top_logprobs": 2}, "logprobs", "logprobs must be true with top_logprobs=2, got None"),
]
OF_MESSAGES = [
    ({"role": "robot", "content": "x"}, "messages[0].role", "developer, user, assistant, tool, got 'robot'"),
    ({"role": "user"}, "messages[0].content", "messages[0].content must be a string, got None"),
    ({"role": "user", "content": None}, "messages[0].content", "messages[0].content must be a string, got None"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]", "content[0] must be a part"),
    ({"role": "user", "content": "", "refusal": "x"}, "messages[0].refusal", "refusal='x' is not supported"),
    ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0]", "tool_calls[0] must be a call"),
]
OF_COMPLETIONS = [
    ({"prompt": None}, "prompt", "prompt must be a string, token ids, or a list of these, got None"),
    ({"prompt": []}, "prompt", "prompt must be"),
    ({"prompt": ""}, "prompt", "prompt must be text of at least one token"),
    ({"prompt": [[]]}, "prompt[0]", "prompt[0] must be at least one token"),
    ({"prompt": [3, "a"]}, "prompt", "token ids from 0 to 12, got 'a'"),
    ({"prompt": [-1]}, "prompt", "token ids from 0 to 12, got -1"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt", "at most 128 choices in all, with n=2"),
    ({"logprobs": 4}, "logprobs", "logprobs must be at most 3, the limit that --max-top-logprobs sets, got 4"),
    ({"logprobs": 0, "echo": True, "stream": True}, "stream", "must be false for the log-probabilities of an echoed"),
]
BRACE = json_chat.TOKENIZER.token_to_id("}")
OF_GRAMMARS = [
    ({"response_format": "json"}, "response_format", "must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
        "must be a JSON schema",
    ),
    (
        {"response_format": {"type": "json_object", "schema": 3}},
        "response_format.schema",
        "response_format.schema must be a JSON schema, got 3",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema",
        "response_format.json_schema=... is not supported: leave it out",
    ),
    (
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": SCHEMA}}},
        "response_format.schema",
        "response_format.schema={} is not supported: leave it out",
    ),
    (
        {"response_format": {"type": "text", "schema": SCHEMA}},
        "response_format.schema",
        "response_format.schema=... is not supported: leave it out",
    ),
    ({"guided_json": {"minContains": 1}}, "guided_json", "#/minContains: not supported"),
    ({"guided_json": "{"}, "guided_json", "guided_json has no grammar: "),
    ({"guided_regex": "(a"}, "guided_regex", "regex '(a'"),
    ({"guided_regex": 3}, "guided_regex", "must be a string"),
    ({"guided_choice": []}, "guided_choice", "must be a list of at least one string"),
    ({"ebnf": "rot ::="}, "ebnf", "the rule 'root' is missing"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex and ebnf ask for two grammars"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs", "one of json, regex"),
    ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag.triggers", "at least one"),
    ({"structural_tag": {"structures": [{}], "triggers": ["a"]}}, "structural_tag", "tags with begin"),
    (
        {"structural_tag": {"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}},
        "structural_tag",
        "triggers must be the beginnings of tags, got 'a'",
    ),
    ({"guided_json": {"type": "array", "minContains": 1}}, "guided_json", "guided_json has no grammar: #"),
    ({"guided_regex": "[a-z]+"}, "guided_regex", "guided_regex has no grammar: grammar must have a table of"),
    ({"guided_choice": ["a}b"], "stop_token_ids": [BRACE]}, "stop_token_ids", f"stop_token_ids ... [{BRACE}]"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "ignore_eos must be left out beside guided_choice"),
]
STRUCTURAL_TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
OF_TOOLS = [
    (
        {"tools": [tool("f")], "structural_tag": STRUCTURAL_TAG},
        "structural_tag",
        "structural_tag and tools ask for two grammars",
    ),
    (
        {"tools": [tool("f"), tool("show", {"not": {"contains": 1}}, strict=True)]},
        "tools[1].function.parameters",
        "show: #",
    ),
    ({"tools": [tool("f")], "ignore_eos": True}, "ignore_eos", "ignore_eos must be left out beside tools"),
    ({"tools": {}}, "tools", "tools must be a list"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "tools[0] must be a function"),
    ({"tools": [tool("a b")]}, "tools[0]", "tools[0] must be a function"),
    ({"tools": [tool("f"), tool("f")]}, "tools", "functions of different names"),
    ({"tools": [tool("f", {"type": "array"})]}, "tools[0].function.parameters", "the JSON schema of an object"),
    ({"tools": [tool("f")], "tool_choice": "f"}, "tool_choice", "tool_choice must be auto, required, none, or"),
    ({"tool_choice": "required"}, "tools", "at least one function"),
]
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
OF_CALLS = [
    ({"function": {"name": "f", "arguments": [1]}}, ARGUMENTS, f"{ARGUMENTS} must be"),
    ({"function": {"name": "f", "arguments": "\ud800"}}, ARGUMENTS, f"{ARGUMENTS} must be"),
    ({"function": {"name": 3}}, "messages[1].tool_calls[0].function.name", "tool_calls[0].function.name must be"),
    ({"function": {"arguments": "{}"}}, "messages[1].tool_calls[0]", "messages[1].tool_calls[0] must be"),
]
OF_TOKENIZE = [
    ({field: {"a": 1}}, field, f"{field}=... is not supported") for field in ("chat_template", "continue_final_message")
]
OF_DETOKENIZE = [({"tokens": [13]}, "tokens", "tokens must be a list of token ids from 0 to 12, got 13")]
OF_TOKENS = [
    ({"token_ids": [13]}, "token_ids", "token_ids must be a list of token ids from 0 to 12, got 13"),
    ({"token_ids": []}, "token_ids", "token_ids must be at least one token"),
    ({"token_ids": "ab"}, "token_ids", "token_ids must be a list of token ids, got 'ab'"),
    ({"token_ids": [[1], [2]]}, "token_ids", "token_ids must be a list of token ids from 0 to 12, got [1]"),
    ({"token_ids": None}, "token_ids", "token ids from 0 to 12, got None"),
    ({"token_ids": [0] * 65}, "token_ids", "token_ids of 65 tokens exceed it"),
    ({"features": {"mm_hashes": {}}}, "features", "features=... is not supported"),
    ({"sampling_params": [1]}, "sampling_params", "sampling_params must be an object"),
    ({"stream": True, "sampling_params": {"prompt_logprobs": 0}}, "stream", "stream must be false"),
]
OF_SAMPLING = [
    ({"bad_words": ["a"]}, "bad_words", "bad_words=... is not supported"),
    ({"prompt_logprobs": 4}, "prompt_logprobs", "must be at most 3, the limit"),
]
GRAMMAR = {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "bnf", "definition": "a"}}
OF_RESPONSES = [
    ({"input": []}, "input", "input must be a string, or a list of at least one item, got []"),
    ({"input": None}, "input", "got None"),
    ({"input": ["a"]}, "input[0]", "an item: an object with its type, got 'a'"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be an integer from 1"),
    ({"max_tokens": 3}, "max_tokens", "max_tokens=3 is not supported"),
    ({"background": True}, "background", "background=True is not supported"),
    ({"conversation": "c"}, "conversation", "conversation='c' is not supported"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort must be one of none, minimal, low"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "reasoning.context='all_turns' is not supported"),
    ({"tools": [SHOP | {"async": True}]}, "tools[0].async", "tools[0].async=True is not supported"),
    ({"tools": [{"type": "made_up"}]}, "tools[0]", "a function or a custom tool ... 'made_up'"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": 3}]}]}, "tools[0].tools[0]", "a function or"),
    ({"tools": [GRAMMAR]}, "tools[0].format", "tools[0].format must be text, or a grammar"),
    ({"tools": [SHOP], "tool_choice": {"type": "web_search"}}, "tool_choice", "functions of tools, got ...web_search"),
    ({"text": {"verbosity": "lengthy"}}, "text.verbosity", "text.verbosity must be one of medium, low, high"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format must be"),
    ({"truncation": "left"}, "truncation", "one of auto, disabled"),
    ({"include": ["made_up"]}, "include", "a list of message.output_text.logprobs"),
    ({"top_logprobs": 4}, "top_logprobs", "top_logprobs must be at most 3"),
    ({"previous_response_id": 3}, "previous_response_id", "must be a string"),
    ({"return_token_ids": True}, "return_token_ids", "is not supported"),
    ({"metadata": 3}, "metadata", "an object"),
    ({"store": "no"}, "store", "true or false"),
    ({"prompt_cache_key": 3}, "prompt_cache_key", "must be a string"),
]
IMAGE = [{"type": "input_image", "image_url": "data:"}]
OF_ITEMS = [
    ({"role": "tool", "content": "a"}, "input[0].role", "one of user, system, developer, assistant"),
    ({"role": "user"}, "input[0].content", "must be a string, got None"),
    (
        {"role": "user", "content": IMAGE},
        "input[0].content[0].type",
        "as the model reads text alone, got 'input_image'",
    ),
    ({"role": "assistant", "content": [{"type": "refusal"}]}, "input[0].content[0].type", "output_text"),
    ({"type": "reasoning", "content": [{"type": "t"}]}, "input[0].content[0].type", "must be reasoning_text"),
    ({"type": "made_up"}, "input[0].type", "must be message, function_call, function_call_output"),
    ({"type": "item_reference", "id": "m"}, "input[0].id", "that of an item of a stored response, got 'm'"),
    (OUTPUT, "input[0].call_id", "must be that of an earlier call, got 'c1'"),
    (CALL | {"arguments": [3]}, "input[0].arguments", "must be a string"),
    (CALL | {"namespace": 3}, "input[0].namespace", "input[0].namespace must be a string"),
]
NO_CHOICES = [
    {"type": "function", "name": "f"},
    {"type": "allowed_tools", "tools": []},
    {"type": "allowed_tools", "tools": [SHOP]},
]
OF_RESPONSES_WITH_TOOLS = [
    ({"tools": [BUY | {"parameters": {"type": "array"}}]}, "tools[0].parameters", "tools[0].parameters must be"),
    *(({"tool_choice": choice}, "tool_choice", "functions of tools") for choice in NO_CHOICES),
    ({"include": [LOGPROBS]}, "include", "include must be without message.output_text"),
]
REFUSED = [
    (chat, OF_TEXTS + OF_BOTH + OF_CHATS),
    (one_message, OF_MESSAGES),
    (completion, OF_TEXTS + OF_BOTH + OF_COMPLETIONS),
    (structured, OF_GRAMMARS + OF_TOOLS),
    (after_call, OF_CALLS),
    (tokenize, OF_TOKENIZE),
    (detokenize, OF_DETOKENIZE),
    (generate, OF_TOKENS),
    (sampling, OF_SAMPLING),
    (response, OF_TEXTS + OF_RESPONSES),
    (one_item, OF_ITEMS),
    (response_with_tools, OF_RESPONSES_WITH_TOOLS),
]


@pytest.mark.parametrize(("read", "body", "param", "message"), [(read, *row) for read, rows in REFUSED for row in rows])
def test_wrong_bodies_are_refused(read, body, param, message):
    """Three dots of `message` stand for any text."""
    with pytest.raises(RequestError) as info:
        read(body)
    error = info.value.body["error"]
    for part in message.split("..."):
        assert part in error["message"]
    assert (info.value.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["code"] == ("context_length_exceeded" if "exceed" in message else None)
