"""The table of the fields of bodies: what each may be, by route, which are refused, and which have no effect."""

from typing import Any

from jlade.config import CONTROLS
from jlade.server import structured
from jlade.server.fields import refused
from jlade.server.kinds import (
    Kind,
    Nested,
    Table,
    any_object,
    anything,
    boolean,
    integer,
    is_integer,
    names,
    number,
    one_of,
    only,
    parts,
    text,
    that_is,
    without_effect,
)  # fmt: skip

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1024  # each token is compared with all of them, on the host
MAX_KEY_LENGTH = 1024  # characters of a prompt_cache_key
LOGPROBS = "message.output_text.logprobs"
# What a response may include, but for log-probabilities without effect: it has no items of the others.
INCLUDED = (
    LOGPROBS, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _each(kind: Kind, *names: str) -> dict[str, Kind]:
    """Returns the table of fields of one kind."""
    return dict.fromkeys(names, kind)


VERBOSITY = without_effect("medium", "low", "high")
# Fields of OpenAI, vLLM and llama.cpp that would change the text or the response.
UNSUPPORTED = {
    **_each(
        only(),
        "allowed_token_ids", "audio", "chat_template", "ec_transfer_params", "guided_whitespace_pattern",
        "kv_transfer_params", "moderation", "prompt_embeds", "repetition_detection",
        "request_id",  # a header, X-Request-Id, has it
        "thinking_token_budget", "truncate_prompt_tokens", "web_search_options",
    ),
    **_each(
        only(False), "continue_final_message", "return_mm_kwargs", "return_prompt_text", "return_token_offsets",
        "return_weight_versions", "use_beam_search", "watermarking",
    ),
    **_each(only(True), "add_generation_prompt", "include_reasoning", "skip_special_tokens"),
    **_each(only([]), "bad_words", "documents", "functions", "logits_processors", "logprob_token_ids"),
    **_each(only({}), "vllm_xargs"),
    **_each(
        only(0), "dry_multiplier", "dynatemp_range", "mirostat", "priority", "routed_experts_prompt_start",
        "xtc_probability",
    ),
    **_each(only(1), "best_of", "repeat_penalty", "typical_p"),
    "function_call": only("none", "auto"),
    "modalities": only(["text"]),
    "suffix": only(""),
    "verbosity": VERBOSITY,
}  # fmt: skip
# Fields that are variables of a chat template, or hold them.
OF_TEMPLATES = {
    "chat_template_kwargs": any_object,
    "enable_thinking": boolean,
    "reasoning_effort": one_of(*EFFORTS),
}
# Fields without effect on a text that is made without beams, images and audio.
HARMLESS = names(
    "cache_prompt", "client_metadata", "guided_decoding_backend", "length_penalty", "media_io_kwargs", "metadata",
    "mm_payload", "mm_processor_kwargs", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "service_tier", "session_id", "spaces_between_special_tokens", "store", "stream_interval", "truncation_side",
    "user",
)  # fmt: skip

PART = names("type", "text", "cache_control", "prompt_cache_breakpoint")
UNSUPPORTED_IN_MESSAGES = {"audio": only(), "function_call": only(), "prefix": only(False), "refusal": only()}
MESSAGE = UNSUPPORTED_IN_MESSAGES | names(
    "annotations", "cache_control", "name", "reasoning", "reasoning_content", "role", "thinking", "tool_call_id",
    content=Nested(PART),
    tool_calls=Nested(names("id", "index", "type", function=Nested(names("arguments", "name")))),
)  # fmt: skip
FUNCTION = names("description", "name", "parameters", "strict")
NAMED = names("type", function=Nested(names("name")))  # a function by its name
TAG = names("begin", "end", "schema", "type", content=Nested(names("json_schema", "type")))
RESPONSE_FORMAT = names(
    "schema", "triggers", "type",
    format=Nested(names("triggers", "type", tags=Nested(TAG))),
    json_schema=Nested(names("description", "name", "schema", "strict")),
    structures=Nested(TAG),
)  # fmt: skip
REASONING = names("generate_summary", "summary", context=only("auto"), effort=one_of(*EFFORTS), mode=only("standard"))
FLAT_TOOL = FUNCTION | names(
    "allowed_callers", "async", "defer_loading", "output_schema", "type",
    format=Nested(names("definition", "syntax", "type")),
)  # fmt: skip
FLAT_NAMED = names("name", "namespace", "type")
TEXT_FORMAT = names("description", "name", "schema", "strict", "type")
TOOL_CHOICE = NAMED | {"allowed_tools": Nested(names("mode", tools=Nested(NAMED)))}
THINKING = names(
    "budget_tokens", "display", type=one_of("enabled", "disabled", "adaptive", "between_tools")
)  # the templates know no more than whether there is to be any
BLOCK = PART | names(
    "caller", "citations", "data", "id", "input", "is_error", "name", "signature", "thinking", "tool_use_id",
    "toolset_name", content=Nested(PART | names("citations")),
)  # fmt: skip
CUSTOM_TOOL = names(
    "cache_control", "defer_loading", "description", "eager_input_streaming", "input_examples", "input_schema", "name",
    "strict", "type", allowed_callers=only(["direct"]),
)  # fmt: skip
# Fields of `/inference/v1/generate` that are those of a completion.
PASSED = ("cache_salt", "return_token_ids", "stream", "stream_options")


def _bias(vocab_size: int) -> Kind:
    accepted = f"an object of numbers from -100 to 100 by token ids from 0 to {vocab_size - 1}"
    check = number(-100, 100)

    def read(name: str, bias: Any) -> dict[int, float] | None:
        if not bias:
            return None
        if not isinstance(bias, dict):
            raise refused(name, bias, accepted)
        for token, value in bias.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
                raise refused(name, token, accepted)
            check(name, value)
        return {int(token): float(value) for token, value in bias.items()}

    return read


def token_ids(vocab_size: int) -> Kind:
    """Returns the kind of a list of token ids."""
    accepted = f"a list of token ids from 0 to {vocab_size - 1}"

    def read(name: str, ids: Any) -> list[int]:
        if not isinstance(ids, list):
            raise refused(name, ids, accepted)
        for token in ids:
            if not is_integer(token) or not 0 <= token < vocab_size:
                raise refused(name, token, accepted)
        return ids

    return read


def _alternatives(max_top: int) -> Kind:
    """Returns the kind of a number of alternatives of each token."""
    accepted = f"at most {max_top}, the limit that --max-top-logprobs sets"
    return that_is(accepted, lambda top: top <= max_top, integer(0))


def _stop(name: str, stop: Any) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop
    accepted = f"a string or a list of at most {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH} characters"
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise refused(name, stop, accepted)
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise refused(name, string, accepted)
        text(name, string)
    return strings


def _prediction(name: str, prediction: Any) -> str:
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise refused(name, prediction, '{"type": "content", "content": ...}')
    texts = parts(f"{name}.content", prediction.get("content"))
    return texts if isinstance(texts, str) else "".join(part["text"] for part in texts)


def _key(name: str, key: Any) -> str:
    if len(text(name, key)) > MAX_KEY_LENGTH:
        raise refused(name, key, f"a string of at most {MAX_KEY_LENGTH} characters")
    return key


def _included(name: str, included: Any) -> list[str]:
    if included and not (isinstance(included, list) and all(each in INCLUDED for each in included)):
        raise refused(name, included, f"a list of {' and '.join(INCLUDED)}")
    return included or []


class Tables:
    """The fields of each route, for a server with these limits.

    What `anything` may be is read by the route itself: prompts, conversations and tools.

    Args:
      vocab_size: token ids are below it.
      max_choices: most choices of a body.
      max_top_logprobs: most alternatives of a token of a chat.
      max_logprobs: and of a completion.
    """

    def __init__(self, vocab_size: int, max_choices: int, max_top_logprobs: int, max_logprobs: int):
        of_chat, of_completion = _alternatives(max_top_logprobs), _alternatives(max_logprobs)
        ids = token_ids(vocab_size)
        common: dict[str, Kind] = {
            **HARMLESS,
            **UNSUPPORTED,
            **{name: number(*control.served) for name, control in CONTROLS.items()},
            **structured.GRAMMARS,
            "cache_salt": that_is("a string of at least one character", bool, text),
            "ignore_eos": boolean,
            "logit_bias": _bias(vocab_size),
            "min_tokens": anything,  # an integer up to the limit of the text
            "model": anything,
            "prediction": Nested(names("type", content=Nested(PART)), _prediction),
            "seed": lambda name, seed: None if seed == -1 else integer(-(2**63), 2**63 - 1)(name, seed),
            "stop": _stop,
            "stop_token_ids": lambda name, value: ids(name, value or []),
            "stream": boolean,
        }
        of_both: dict[str, Kind] = {
            **common,
            "include_stop_str_in_output": boolean,
            "jlade": Nested({"steps": boolean}),
            "max_tokens": integer(1),
            "n": integer(1, max_choices),
            "prompt_cache_key": _key,
            "remember": boolean,
            "response_format": Nested(RESPONSE_FORMAT, structured.GRAMMARS["response_format"]),
            "return_token_ids": boolean,
            "return_tokens_as_token_ids": boolean,
            "speculative": boolean,
            "stream_options": Nested(
                names("include_obfuscation", continuous_usage_stats=boolean, include_usage=boolean)
            ),
        }
        self.chat: Table = {
            **of_both,
            **OF_TEMPLATES,
            **names("input_ids", "parallel_tool_calls", messages=Nested(MESSAGE, anything)),
            "add_special_tokens": only(False),
            "echo": only(False),
            "logprobs": boolean,
            "max_completion_tokens": integer(1),
            "prompt_logprobs": of_chat,
            "tool_choice": Nested(TOOL_CHOICE, anything),
            "tools": Nested(names("cache_control", "type", function=Nested(FUNCTION)), anything),
            "top_logprobs": of_chat,
        }
        self.completion: Table = {
            **of_both,
            **_each(only(), "enable_thinking", "reasoning_effort"),
            "chat_template_kwargs": only({}),
            **names("prompt"),
            "add_special_tokens": only(True),
            "echo": boolean,
            "logprobs": lambda name, top: None if top is False else of_completion(name, 1 if top is True else top),
            "prompt_logprobs": of_completion,
        }
        self.generate: Table = {
            **HARMLESS,
            **names("model", "request_id", "token_ids"),
            **{name: self.completion[name] for name in PASSED},
            **_each(only(), "ec_transfer_params", "features", "kv_transfer_params"),
            "content_parts": only([]),
            "output_mode": only("tokens"),
            "priority": only(0),
            "sampling_params": any_object,  # fields of a completion
        }
        self.response: Table = {
            **common,
            **OF_TEMPLATES,
            **_each(
                only(), "access_programs", "background_options", "conversation", "image", "max_completion_tokens",
                "max_tokens", "max_tool_calls", "messages", "prompt",
            ),
            **_each(
                only(False), "background", "include_stop_str_in_output", "logprobs", "prompt_logprobs",
                "return_token_ids", "return_tokens_as_token_ids",
            ),
            **_each(text, "instructions", "previous_response_id", "prompt_cache_key", "safety_identifier"),
            **names("input", stream_options=Nested(names("include_obfuscation"))),
            "context_management": only([]),
            "include": _included,
            "max_output_tokens": integer(1),
            "metadata": any_object,
            "n": only(1),
            "parallel_tool_calls": boolean,
            "reasoning": Nested(REASONING),
            "response_format": only({"type": "text"}),
            "store": boolean,
            "text": Nested({"format": Nested(TEXT_FORMAT, structured.text_format), "verbosity": VERBOSITY}),
            "tool_choice": Nested(names("mode", tools=Nested(FLAT_NAMED), **FLAT_NAMED), anything),
            "tools": Nested(FLAT_TOOL | {"tools": Nested(FLAT_TOOL)}, anything),
            "top_logprobs": of_chat,
            "truncation": one_of("auto", "disabled"),  # the first allows what the second forbids, and is not done
        }  # fmt: skip
        output_format = Nested(TEXT_FORMAT, structured.text_format)
        self.message: Table = {
            **common,
            **_each(only(), "container", "stop", "thread"),
            **names(
                "betas", "cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id",
                messages=Nested(names("role", content=Nested(BLOCK)), anything),
                system=Nested(PART | names("citations"), anything),
                tool_choice=Nested(names("disable_parallel_tool_use", "name", "type"), anything),
                tools=Nested(CUSTOM_TOOL, anything),
            ),
            "max_tokens": integer(1),
            "mcp_servers": only([]),
            "n": only(1),
            "output_config": Nested(names("task_budget", effort=one_of(*EFFORTS), format=output_format)),
            "output_format": output_format,
            "response_format": only({"type": "text"}),
            "stop_sequences": _stop,
            "thinking": Nested(THINKING),
        }  # fmt: skip
        self.tokenize: Table = {
            **HARMLESS,
            **OF_TEMPLATES,
            **names("add_generation_prompt", "model", "prompt", messages=Nested(MESSAGE, anything)),
            **{name: self.chat[name] for name in ("parallel_tool_calls", "tool_choice", "tools")},
            **_each(boolean, "add_special_tokens", "return_token_strs"),
            "chat_template": only(),
            "continue_final_message": only(False),
        }
        self.detokenize: Table = {**HARMLESS, **names("model", "tokens")}
