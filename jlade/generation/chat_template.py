"""Conversations to tokens, by the chat template of a checkpoint."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]  # with the keys "role" and "content"


def encode(tokenizer: Any, messages: Sequence[Message], template: str | None = None) -> list[int]:
    """Returns the token ids of a conversation, up to the beginning of the next answer.

    Args:
      tokenizer: of transformers, as `load_tokenizer` returns it.
      messages: with the keys "role" and "content".
      template: a Jinja template to use instead of the tokenizer's own.

    Raises:
      ValueError: when the template raises an error.
    """
    import jinja2

    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except jinja2.TemplateError as error:  # also from raise_exception in the template
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    return ids


def load_tokenizer(directory: pathlib.Path) -> Any:
    """Returns the tokenizer of transformers for a checkpoint, with its chat template.

    Raises:
      ValueError: when transformers is missing.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing; nothing here needs it
    try:
        import jinja2  # noqa: F401, transformers needs it for chat templates
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError('the chat templates need transformers: pip install "jlade[chat]"') from error
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
