"""vLLM's `/inference/v1/generate`: token ids in, token ids out."""

from collections.abc import Sequence

from jlade.engine.scoring import PromptLogProbs
from jlade.generation.results import FAILURES, Generation, Piece
from jlade.server import fields, known_fields
from jlade.server.fields import Body
from jlade.server.protocol import OF_COMPLETION, BodyReader, Completion
from jlade.server.responses import Writer, one_piece

# Fields that a completion reads under the same name.
PASSED = ("cache_salt", "return_token_ids", "stream", "stream_options")
READ = {"model", "request_id", "sampling_params", "token_ids", *PASSED}
UNSUPPORTED: known_fields.Unsupported = {
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
    """
    known_fields.check(body, READ, UNSUPPORTED, {"stream_options": known_fields.WITHIN_BOTH["stream_options"]})
    ids = body.get("token_ids")
    if isinstance(ids, str):  # which a completion would take
        raise fields.refused("token_ids", ids, "a list of token ids")
    sampling = {name: value for name, value in fields.nested(body, "sampling_params").items() if name not in OF_TEXTS}
    known_fields.check(sampling, OF_COMPLETION, known_fields.UNSUPPORTED_IN_COMPLETIONS, known_fields.WITHIN_BOTH)
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
        choices = [self._choice(index, one_piece(generation)) for index, generation in enumerate(generations)]
        body = self._chunk_head() | {"choices": choices, "usage": self.usage(generations, num_cached)}
        return body | self._choices[0].of_prompt(prompt_logprobs[0])

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
