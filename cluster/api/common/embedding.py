"""Embedding of a prompt, computed by the path that every request takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from ....replicas.errors import EngineFault, InvalidRequest
from ....replicas.types import WeightsStatus
from ...async_streams import run_all
from ...routing.router import Router
from .concurrent_prompts import ConcurrentPrompts, RequestStreamer
from .parsed_request import AdmittedRequest

MAX_INPUTS = 2048  # of one call, as OpenAI has it; clients that cut long lists into calls reckon with that
MAX_EMBEDDING_VALUES = 1 << 21  # of an answer: 2,048 vectors of 1,024


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """An embedding. `values` are fp32, one per hidden dimension. `weights`: those it was computed with, as the
    replica reports.
    """

    values: Sequence[float]
    prompt_tokens: int
    cached_tokens: int
    weights: WeightsStatus | None = None

    def normalized(self) -> EmbeddingResult:
        """Return the vector scaled to unit length; a vector of zeros stays as it is."""
        length = math.sqrt(sum(value * value for value in self.values)) or 1.0
        return replace(self, values=[value / length for value in self.values])


async def embed_all(router: Router, admitted: Sequence[AdmittedRequest], name: str) -> list[EmbeddingResult]:
    """Return the embeddings of one call's inputs, in order, whatever their tokens add up to. name: field with the
    inputs.

    Raises InvalidRequest if they have more than MAX_EMBEDDING_VALUES numbers together, which the first one shows.
    """
    feed = ConcurrentPrompts(router)

    async def one_of_them(one: AdmittedRequest) -> EmbeddingResult:
        found = await embed(feed, one)
        if len(found.values) * len(admitted) > MAX_EMBEDDING_VALUES:
            raise InvalidRequest(
                f"{name}: vectors of {len(found.values)} for {len(admitted)} inputs are more than "
                f"{MAX_EMBEDDING_VALUES} "
                f"numbers; give {MAX_EMBEDDING_VALUES // len(found.values)} inputs at most",
                param=name,
                code="answer_too_large",
            )
        return found

    return await run_all([one_of_them(one) for one in admitted])


async def embed(router: RequestStreamer, admitted: AdmittedRequest) -> EmbeddingResult:
    """Return the pooled hidden state of an admitted prompt whose `pooling` is set."""
    async with aclosing(router.stream(admitted.now(), whole=True)) as messages:
        async for message in messages:
            if message.embedding is not None:
                tokens, cached = len(admitted.request.prompt_ids), message.cached_tokens or 0
                return EmbeddingResult(message.embedding, tokens, cached, message.told)
    raise EngineFault("the stream ended without an embedding", code="engine_fault")
