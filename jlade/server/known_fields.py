"""The fields of a body that are not read: those refused, those known to be harmless, and the log of unknown ones."""

import json
import logging
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from jlade.server.fields import Body, RequestError

MAX_SAID = 1000  # names of unknown fields; anyone may make up more
log = logging.getLogger(__name__)

# Fields that are not supported, with the values that change nothing.
Unsupported = dict[str, tuple[Any, ...]]
# The names of an object's fields. Those of an object, or of each object of a list, have fields of their own; the values
# of others, None here, are not looked into.
Known = Mapping[str, Optional["Known"]]

# Fields of OpenAI, vLLM and llama.cpp that would change the text or the response.
UNSUPPORTED: Unsupported = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "priority": (0,),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "request_id": (),  # a header, X-Request-Id, has it
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
UNSUPPORTED_IN_CHATS = UNSUPPORTED | {"add_special_tokens": (False,), "echo": (False,)}
UNSUPPORTED_IN_COMPLETIONS = UNSUPPORTED | {"add_special_tokens": (True,)}
UNSUPPORTED_IN_TOKENIZE: Unsupported = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "tools": ([],),
}
UNSUPPORTED_IN_MESSAGES: Unsupported = {"audio": (), "function_call": (), "prefix": (False,), "refusal": ()}

# Fields without effect on a text that is made without beams, images and audio.
HARMLESS = {
    "cache_prompt", "client_metadata", "guided_decoding_backend", "length_penalty", "media_io_kwargs", "metadata",
    "mm_payload", "mm_processor_kwargs", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "session_id", "spaces_between_special_tokens", "store", "stream_interval",
    "truncation_side", "user",
}  # fmt: skip


def _of(*names: str, **within: Known) -> Known:
    return dict.fromkeys(names) | within


PART = _of("type", "text", "cache_control", "prompt_cache_breakpoint")
MESSAGE = _of(
    "annotations", "cache_control", "name", "reasoning", "reasoning_content", "role", "thinking", "tool_call_id",
    *UNSUPPORTED_IN_MESSAGES,
    content=PART,
    tool_calls=_of("id", "index", "type", function=_of("arguments", "name")),
)  # fmt: skip
NAMED = _of("type", function=_of("name"))  # a function by its name
TAG = _of("begin", "end", "schema", "type", content=_of("json_schema", "type"))
WITHIN_BOTH: Known = {
    "jlade": _of("steps"),
    "prediction": _of("type", content=PART),
    "response_format": _of(
        "schema",
        "triggers",
        "type",
        format=_of("triggers", "type", tags=TAG),
        json_schema=_of("description", "name", "schema", "strict"),
        structures=TAG,
    ),
    "stream_options": _of("continuous_usage_stats", "include_obfuscation", "include_usage"),
}
WITHIN_CHAT: Known = {
    **WITHIN_BOTH,
    "messages": MESSAGE,
    "tool_choice": {**NAMED, "allowed_tools": _of("mode", tools=NAMED)},
    "tools": _of("cache_control", "type", function=_of("description", "name", "parameters", "strict")),
}

# Within a body of `/v1/responses`. The items have fields by their types.
WITHIN_RESPONSE: Known = {
    "reasoning": _of("context", "effort", "generate_summary", "mode", "summary"),
    "stream_options": _of("include_obfuscation"),
    "text": _of("verbosity", format=_of("description", "name", "schema", "strict", "type")),
    "tool_choice": _of("mode", "name", "type", tools=_of("name", "type")),
    "tools": _of(
        "allowed_callers", "async", "defer_loading", "description", "name", "output_schema", "parameters", "strict",
        "type",
    ),
}  # fmt: skip
_OF_ITEMS = ("id", "status", "type")
ITEMS: dict[str, Known] = {
    "message": _of(*_OF_ITEMS, "phase", "role", content={**PART, **_of("annotations", "logprobs")}),
    "function_call": _of(*_OF_ITEMS, "arguments", "async", "call_id", "caller", "name", "namespace"),
    "function_call_output": _of(*_OF_ITEMS, "call_id", "caller", "name", "namespace", output=PART),
}
_cut = reprlib.Repr()
_cut.maxstring = 100  # characters of a path
_said: set[str] = set()


def check(body: Body, read: Iterable[str], unsupported: Unsupported, within: Known) -> None:
    """Refuses the fields of a body that are not supported, and logs each one that is not known, once.

    Known are those that are read, refused or harmless, and the fields `within` some of them.
    """
    refuse(body, unsupported)
    say_unknown(body, dict.fromkeys([*read, *unsupported, *HARMLESS]) | dict(within))


def refuse(body: Body, unsupported: Unsupported, within: str = "") -> None:
    """Raises a RequestError for a field that would change the text; `within` is the path of the body."""
    for name, neutral_values in unsupported.items():
        value = body.get(name)
        if value is not None and value not in neutral_values:
            alternatives = "".join(f" or set it to {json.dumps(neutral)}" for neutral in neutral_values)
            name = f"{within}{name}"
            raise RequestError(f"{name}={reprlib.repr(value)} is not supported: leave it out{alternatives}", name)


def say_unknown(value: Any, known: Known, path: str = "", pattern: str = "") -> None:
    """Logs each field of an object, or of the objects of a list, that is not known, once.

    Args:
      value: of JSON.
      known: the fields of an object.
      path: that of the value.
      pattern: the same without the indices of lists, by which it is logged once.
    """
    if isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, dict):
                say_unknown(item, known, f"{path}[{i}]", pattern)
    elif isinstance(value, dict):
        for name, field in value.items():
            dot = "." if path else ""
            inner = f"{path}{dot}{name}", f"{pattern}{dot}{name}"
            if (within := known.get(name)) is not None:
                say_unknown(field, within, *inner)
            elif name not in known:
                _say(*inner)


def _say(path: str, pattern: str) -> None:
    pattern = pattern if len(pattern) <= _cut.maxstring else _cut.repr(pattern)  # which takes longer
    if pattern not in _said and len(_said) < MAX_SAID:
        _said.add(pattern)
        log.warning("the field %s of a request is not known and not read", _cut.repr(path))
