"""A conversation as the model reads it: the chat template, the turns so far, and the state after the last answer."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

import jlade


class Conversation:
    """Turns of user and model, which the checkpoint's chat template makes one prompt.

    Args:
      params: the model's parameters.
      directory: where its tokenizer and chat template are.
      template: a Jinja template to use instead.
      system: what the conversation begins with.

    Raises:
      ValueError: without transformers or a template.
    """

    def __init__(self, params: Any, directory: pathlib.Path, template: str | None, system: str | None):
        self.params = params
        self.tokenizer = _load_tokenizer(directory)
        if template is None and self.tokenizer.chat_template is None:
            raise ValueError(f"{directory} has no chat template: pass a Jinja file with --template")
        self._template = template
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forgets the turns and what the model has read of them."""
        self._turns: list[dict[str, str]] = []
        self._state: jlade.DecodeState | None = None

    def prompt(self, question: str) -> list[int]:
        """Returns the token ids of the turns so far and of the question."""
        import jinja2

        messages = [*self._system, *self._turns, {"role": "user", "content": question}]
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self._template, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except jinja2.TemplateError as error:  # of the template's own raise_exception too
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def answer(self, prompt: list[int], request: dict[str, Any]) -> Iterator[jlade.Piece]:
        """Streams the answer; `request` is what else `jlade.stream` takes, with the key of the whole conversation."""
        key = jax.random.fold_in(request["key"], len(self._turns) // 2)
        settings = request | {"key": key, "state": self._state, "keep_state": True, "with_statistics": True}
        return jlade.stream(self.params, prompt, tokenizer=self.tokenizer, **settings)

    def add(self, question: str, answer: str, generation: jlade.Generation | None) -> None:
        """Adds a turn; without `generation` the answer was stopped, and its part is read again with the next turn."""
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if generation is not None:
            self._state = generation.state


def _load_tokenizer(directory: pathlib.Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing, which nothing here needs
    try:
        import jinja2  # noqa: F401, transformers needs it for chat templates
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError('the chat needs transformers: pip install "jlade[chat]"') from error
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
