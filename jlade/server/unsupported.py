"""Fields of OpenAI's interface, of vLLM's and llama.cpp's, that are not supported: refused, or known to be harmless."""

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from jlade.server.fields import Body, RequestError

# Fields that would change the text or the response, with the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
OF_CHATS = UNSUPPORTED | {"add_special_tokens": (False,), "echo": (False,)}
OF_COMPLETIONS = UNSUPPORTED | {"add_special_tokens": (True,)}
OF_TOKENIZE = {name: UNSUPPORTED[name] for name in ("chat_template", "chat_template_kwargs", "continue_final_message")}
OF_TOKENIZE |= {"tools": ([],)}
OF_MESSAGES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "prefix": (False,),
    "refusal": (),
}

# Fields without effect on a text that is made without beams, images and audio.
HARMLESS = {
    "cache_prompt", "client_metadata", "guided_decoding_backend", "length_penalty", "media_io_kwargs", "metadata",
    "mm_payload", "mm_processor_kwargs", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "session_id", "spaces_between_special_tokens", "store", "stream_interval",
    "truncation_side", "user",
}  # fmt: skip


def refuse(body: Body, unsupported: Mapping[str, tuple[Any, ...]], within: str = "") -> None:
    """Raises a RequestError for a field that would change the text; `within` is the path of the body."""
    for name, neutral in unsupported.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            also = "".join(f" or set it to {json.dumps(allowed)}" for allowed in neutral)
            name = f"{within}{name}"
            raise RequestError(f"{name}={reprlib.repr(value)} is not supported: leave it out{also}", name)
