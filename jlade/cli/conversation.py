"""A conversation: its turns, which a chat template makes a prompt, and the state after the last answer."""

import pathlib
from collections.abc import Iterator

import jax

import jlade
from jlade.generation import chat_template, prompts
from jlade.generation.options import Keywords
from jlade.models.llama import LlamaParams


class Conversation:
    """The turns of user and model.

    Args:
      params: the model's parameters.
      directory: the directory of its tokenizer and chat template.
      template: a Jinja template to use instead.
      system: the system message, at the beginning of the conversation.

    Raises:
      ValueError: when transformers is missing, or there is no template.
    """

    def __init__(self, params: LlamaParams, directory: pathlib.Path, template: str | None, system: str | None):
        self.params = params
        self.tokenizer = chat_template.load_tokenizer(directory)
        if template is None and self.tokenizer.chat_template is None:
            raise ValueError(f"{directory} has no chat template: pass a Jinja file with --template")
        self._template = template
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forgets the turns and the state."""
        self._turns: list[dict[str, str]] = []
        self._state: jlade.DecodeState | None = None

    def warm_up(self, request: Keywords) -> None:
        """Compiles the programs of a conversation by two short turns, the second from the state of the first.

        They serve conversations of up to 1024 tokens, the answer's most included; longer ones have other programs.
        """
        least = 1 if request["min_new_tokens"] else 0
        for question in ("Hello", "Why?"):
            prompt = self.prompt(question)
            *_, last = self.answer(prompt, {**request, "max_new_tokens": 1, "min_new_tokens": least})
            self.add(question, last.text or "", last.generation)
        self.reset()

    def prompt(self, question: str) -> list[int]:
        """Returns the token ids of the turns so far and of the question.

        Raises:
          ValueError: when the template raises an error.
        """
        messages = [*self._system, *self._turns, {"role": "user", "content": question}]
        return chat_template.encode(self.tokenizer, messages, self._template)

    def answer(self, prompt: list[int], request: Keywords) -> Iterator[jlade.Piece]:
        """Streams the answer. `request` has the key of the whole conversation, which gives each turn a key."""
        key = request["key"]
        assert key is not None
        options: Keywords = {
            **request,
            "key": jax.random.fold_in(key, len(self._turns) // 2),
            "tokenizer": self.tokenizer,
            "state": self._state,
            "keep_state": True,
            "with_statistics": True,
        }
        return jlade.stream(self.params, prompts.whole([prompt]), **options)

    def add(self, question: str, answer: str, generation: jlade.Generation | None) -> None:
        """Adds a turn. `generation` is None for an interrupted answer, which the next turn reads again."""
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if generation is not None:
            self._state = generation.state
