"""Limits of one model that the engine checks for every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidRequest
from ..sampling_params import SamplingParams
from ..short_repr import short_repr
from ..types import Request


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Vocabulary size, context length, and the ids that end a sequence."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if the request does not fit the model."""
        self._check_ids("prompt", request.prompt_ids)
        max_output_tokens = self.max_model_len - len(request.prompt_ids)
        if max_output_tokens < (request.pooling is None):
            message = (
                f"prompt: {len(request.prompt_ids)} tokens leave no room for an answer. This model's maximum context "
                f"length is {self.max_model_len} tokens"
            )
            raise InvalidRequest(message, param="prompt", code="context_length_exceeded")
        request.sampling.check_vocabulary(self.vocab_size)
        limit = (
            max_output_tokens
            if request.pooling is not None
            else resolve_max_tokens(request.sampling, max_output_tokens)
        )
        for output in request.output_ids:
            self._check_ids("output_ids", output)
            if len(output) > limit:
                message = f"output_ids: {len(output)} tokens are more than the request may have, {limit}"
                raise InvalidRequest(message, param="output_ids", code="invalid_value")

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        if set(map(type, token_ids)) <= {int}:
            wrong = [one for one in (min(token_ids, default=0), max(token_ids, default=0)) if not self._has(one)]
        else:  # a comparison would let True and 1.0 pass for 1
            wrong = [one for one in token_ids if type(one) is not int]
        for token_id in wrong:
            message = f"{name}: token id {short_repr(token_id)} is not in the vocabulary of {self.vocab_size}"
            raise InvalidRequest(message, param=name, code="invalid_value")

    def _has(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size


def resolve_max_tokens(sampling: SamplingParams, context_left: int, default: int | None = None) -> int:
    """Return how many tokens a choice may have: max_tokens, or else a protocol's default, and at most `context_left`.

    Raises InvalidRequest if min_tokens is more than that, which would silently override it.
    """
    requested = sampling.max_tokens or default or context_left
    limit = min(requested, context_left)
    if sampling.min_tokens > limit:
        why = "that is all the room after the prompt" if context_left <= requested else "the default of max_tokens"
        raise InvalidRequest(
            f"min_tokens: {sampling.min_tokens} is not accepted; expected at most {limit}: {why}",
            param="min_tokens",
            code="invalid_value",
        )
    return limit
