"""What one model can take: checked by the engine for whoever reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InvalidRequest
from .protocol import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """The vocabulary, the context, and the ids that end a sequence."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def check(self, request: Request) -> None:
        """Raise InvalidRequest where the request does not fit the model."""
        self._check_ids("prompt", request.prompt_ids)
        room = self.max_model_len - len(request.prompt_ids)
        if room < 1:
            message = f"prompt: {len(request.prompt_ids)} tokens leave no room in the context of {self.max_model_len}"
            raise InvalidRequest(message, param="prompt", code="context_length_exceeded")
        request.sampling.check_vocabulary(self.vocab_size)
        for output in request.output_ids:
            self._check_ids("output_ids", output)
            if len(output) > (most := min(request.sampling.max_tokens or room, room)):
                message = f"output_ids: {len(output)} tokens are more than the request may have, {most}"
                raise InvalidRequest(message, param="output_ids", code="invalid_value")

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                message = f"{name}: token id {token_id} is not in the vocabulary of {self.vocab_size}"
                raise InvalidRequest(message, param=name, code="invalid_value")
