"""vLLM's `/inference/v1/generate`: token ids in, token ids out."""

from collections.abc import Sequence
from typing import Any

from jlade.engine.scoring import PromptLogProbs
from jlade.generation.results import FAILURES, Generation, Piece
from jlade.server import fields, known, unsupported
from jlade.server.fields import Body
from jlade.server.protocol import OF_COMPLETION, BodyReader, Completion
from jlade.server.responses import Writer, one_piece

# Fields that a completion reads under the same name.
PASSED = ("cache_salt", "return_token_ids", "stream", "stream_options")
KNOWN = {"model", "request_id", "sampling_params", "token_ids", *PASSED}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "content_parts": ([],),
    "ec_transfer_params": (),
    "features": (),
    "kv_transfer_params": (),
    "output_mode": ("tokens",),
    "priority": (0,),
}
# Sampling parameters that change the text or its delivery, but no token.
OF_TEXTS = {
    "detokenize", "include_stop_str_in_output", "output_kind", "skip_special_tokens", "spaces_between_special_tokens",
}  # fmt: skip


def read(reader: BodyReader, body: Body) -> Completion:
    """Reads a body: `token_ids`, and `sampling_params` with the fields of a completion.

    Without `max_tokens` a text has as many tokens as fit.

    Raises:
      RequestError: names the field, its value and what is accepted.
    """
    unsupported.refuse(body, UNSUPPORTED)
    known.say_others(body, KNOWN | UNSUPPORTED.keys(), {"stream_options": known.OF_BOTH["stream_options"]})
    ids = body.get("token_ids")
    if isinstance(ids, str):  # which a completion would take
        raise fields.refused("token_ids", ids, "a list of token ids")
    sampling = {name: value for name, value in fields.nested(body, "sampling_params").items() if name not in OF_TEXTS}
    unsupported.refuse(sampling, unsupported.OF_COMPLETIONS)
    known.say_others(sampling, OF_COMPLETION | unsupported.OF_COMPLETIONS.keys(), known.OF_BOTH)
    passed = {name: body.get(name) for name in PASSED}
    merged = sampling | passed | {"return_tokens_as_token_ids": True}
    return reader.of_prompts(merged, {"token_ids": ids}, field="token_ids", default_limit=None)


class TokensWriter(Writer):
    """Writes the response to such a body, whole or in chunks."""

    def whole(
        self,
        generations: Sequence[Generation],
        num_cached: int | None = None,
        prompt_logprobs: Sequence[PromptLogProbs | None] = (),
    ) -> Body:
        """Returns the response with all choices; see `Writer.whole`."""
        choices = [
            self._choice(index, one_piece(generation), generation) for index, generation in enumerate(generations)
        ]
        body = self._body(choices) | {"usage": self.usage(generations, num_cached)}
        return body | self._choices[0].of_prompt(prompt_logprobs[0])

    def begin(self) -> list[Body]:
        """Returns the chunk before the first tokens: the ids of the prompt, if they are asked for."""
        return [self._body([]) | self._choices[0].of_prompt(None)] if self._completion.shown.ids else []

    def chunks(self, index: int, piece: Piece) -> list[Body]:
        """Returns the chunk of a piece. That of a text which ended with an error has no reason."""
        return [self._body([self._choice(index, piece, piece.generation)])]

    def end(self, generations: Sequence[Generation], num_cached: int) -> list[Body]:
        """Returns the chunks after the last tokens: that of the usage, if it is asked for."""
        if not self._completion.include_usage:
            return []
        return [self._body([]) | {"usage": self.usage(generations, num_cached)}]

    def _body(self, choices: list[Body]) -> Body:
        head = {name: self._head[name] for name in ("created", "model")}
        return {"request_id": self._request_id, **head, "choices": choices}

    def _choice(self, index: int, piece: Piece, generation: Generation | None) -> Body:
        choice = self._choices[index]
        is_error = generation is not None and generation.finish_reason[0] in FAILURES
        return {
            "index": index,
            "token_ids": piece.tokens.tolist(),
            "logprobs": None if self._completion.shown.top is None else {"content": choice.entries(piece)},
            "finish_reason": None if generation is None or is_error else choice.reason(generation),
        }
