"""vLLM's `/inference/v1/generate`: token ids in, token ids out."""

from collections.abc import Sequence

from jlade.generation.results import FAILURES, Generation, Piece
from jlade.server import kinds
from jlade.server.body_fields import PASSED
from jlade.server.fields import Body, refused
from jlade.server.protocol import BodyReader, Completion
from jlade.server.writer import Scores, Writer, one_piece

# Sampling parameters that change the text or its delivery, but no token, and those that the body itself has.
OF_TEXTS = {
    "detokenize", "include_stop_str_in_output", "output_kind", "return_tokens_as_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", *PASSED,
}  # fmt: skip


def read(reader: BodyReader, body: Body) -> Completion:
    """Reads a body: `token_ids`, and `sampling_params` with the fields of a completion.

    Without `max_tokens` a text has as many tokens as fit.
    """
    values = kinds.read(body, reader.tables.generate)
    if isinstance(ids := values.get("token_ids"), str):  # which a completion would take
        raise refused("token_ids", ids, "a list of token ids")
    sampling = {name: value for name, value in values.get("sampling_params", {}).items() if name not in OF_TEXTS}
    of_completion = kinds.read(sampling, reader.tables.completion) | {"return_tokens_as_token_ids": True}
    of_completion |= {name: values[name] for name in PASSED if name in values}
    return reader.of_prompts(of_completion, {"token_ids": ids}, "token_ids")


class TokensWriter(Writer):
    """Writes the response to such a body, whole or in chunks."""

    def whole(self, generations: Sequence[Generation], num_cached: int | None = None, scores: Scores = ()) -> Body:
        """Returns the response with all choices; see `Writer.whole`."""
        choices = [self._choice(index, one_piece(generation)) for index, generation in enumerate(generations)]
        body = self._chunk_head() | {"choices": choices, "usage": self.usage(generations, num_cached)}
        return body | self._choices[0].of_prompt(scores[0])

    def begin(self) -> list[Body]:
        """Returns the chunk before the first tokens: the ids of the prompt, if they are asked for."""
        if not self._completion.shown.ids:
            return []
        return [self._chunk_head() | {"choices": []} | self._choices[0].of_prompt(None)]

    def chunks(self, index: int, piece: Piece) -> list[Body]:
        """Returns the chunk of a piece. That of a text which ended with an error has no reason."""
        return [self._chunk_head() | {"choices": [self._choice(index, piece)]}]

    def _chunk_head(self) -> Body:
        return {"request_id": self._request_id} | {name: self._head[name] for name in ("created", "model")}

    def _choice(self, index: int, piece: Piece) -> Body:
        choice, generation = self._choices[index], piece.generation
        is_error = generation is not None and generation.finish_reason[0] in FAILURES
        return {
            "index": index,
            "token_ids": piece.tokens.tolist(),
            "logprobs": None if self._completion.shown.top is None else {"content": choice.entries(piece)},
            "finish_reason": None if generation is None or is_error else choice.reason(generation),
        }
