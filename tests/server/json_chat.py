"""A tiny model whose tokens spell JSON, with a chat template that writes calls of tools as Hermes does."""

import dataclasses

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jlade import SamplingConfig
from jlade.generation.chat_template import ChatTemplate
from jlade.generation.results import Generation
from jlade.generation.text import LETTERS_OF_BYTES
from jlade.server.protocol import BodyReader
from jlade.server.writer import one_piece
from tests.tiny import tiny_llama

END, CAPACITY = "<|end|>", 512
MARKS = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]  # special tokens of Mistral's
HERMES = r"""{% for tool in tools or [] %}{{ tool.function | tojson }}
{% endfor %}{% for message in messages %}{{ message.role }}:{{ message.content }}{% for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def _tokenizer() -> Tokenizer:
    """Returns a byte-level tokenizer with some tokens of several bytes."""
    merges = [("{", '"'), ('"', ":"), ("n", "a"), ("m", "e"), ("na", "me"), ('{"', "name"), ('":', "Ġ")]
    names = [*LETTERS_OF_BYTES, *("".join(pair) for pair in merges)]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.add_special_tokens([END, *MARKS])
    return tokenizer


TOKENIZER = _tokenizer()
EOS = TOKENIZER.token_to_id(END)
PARAMS = tiny_llama(3, vocab_size=TOKENIZER.get_vocab_size(), max_positions=CAPACITY)
QUESTION = [{"role": "user", "content": "a shirt"}]
SCHEMA = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
# Random weights may write whitespace without end.
BIAS = {str(token): -100 for byte in "\t\n\r " for token in TOKENIZER.encode(byte).ids}


def tool(name, parameters=SCHEMA, **others):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | others}


def chat_template(template: str = HERMES) -> ChatTemplate:
    return ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token=END, chat_template=template))


READER = BodyReader(
    tokenizer=TOKENIZER,
    chat_template=chat_template(),
    vocab_size=TOKENIZER.get_vocab_size(),
    eos_ids=(EOS,),
    sampling=SamplingConfig(),
    capacity=CAPACITY,
)


def thinking(mark="", template=HERMES):
    """Returns a reader of bodies of a model with special tokens for thoughts, whose prompts end with `mark`."""
    made = chat_template(template + mark)
    made.tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer = made.tokenizer.backend_tokenizer
    size = tokenizer.get_vocab_size()
    return dataclasses.replace(READER, tokenizer=tokenizer, chat_template=made, vocab_size=size)


def generated(tokenizer, text, reason="eos"):
    """Returns the result of a request that has this text."""
    ids = [*tokenizer.encode(text).ids, *([EOS] if reason == "eos" else [])]
    return Generation(
        tokens=np.array([ids]),
        lengths=np.array([len(ids)]),
        steps=np.array([len(ids)]),
        accepted=np.ones((1, len(ids)), int),
        finish_reason=(reason,),
        text=("",),
        **dict.fromkeys(("logprobs", "processed_logprobs", "top_tokens", "top_logprobs", "statistics", "state")),
    )


def token_by_token(result):
    """Yields the pieces of a result, one for each token."""
    whole, length = one_piece(result), result.lengths[0]
    for place, token in enumerate(whole.tokens, start=1):
        last = result if place == length else None
        yield dataclasses.replace(whole, tokens=np.array([token]), accepted=np.array([1]), generation=last)
