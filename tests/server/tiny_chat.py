"""A tiny model with a tokenizer of characters and a chat template, and its texts without a server."""

import copy

import jax
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jlade
from jlade import SamplingConfig
from tests.tiny import tiny_llama, tiny_tokenizer

PARAMS = tiny_llama(3)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}c{% endif %}"


def _of_characters():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.enable_padding(pad_id=0)  # the token of made-up prompts, and of a text
    return tokenizer


TOKENIZER = _of_characters()
CHAT_TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=_of_characters(), chat_template=TEMPLATE)


def alone(prompt, seed=0, **options):
    """Returns the `jlade.Generation` of a prompt in text or token ids, by plain decoding."""
    options = {"key": jax.random.key(seed), "eos_ids": (12,)} | options
    return jlade.generate(PARAMS, prompt, tokenizer=TOKENIZER, lookahead=None, logprobs=True, **options)


def ending(prompt, temperature):
    """Returns a seed with which a text of several tokens ends within 24, and the text."""
    for seed in range(100):
        text = alone(prompt, seed=seed, sampling=SamplingConfig(temperature=temperature), max_new_tokens=24)
        if text.finish_reason[0] == "eos" and text.lengths[0] > 6:
            return seed, text
    raise AssertionError("no text ends")
