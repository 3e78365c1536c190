"""Embedding of a prompt, computed by the path that every request takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from ..replicas.errors import EngineFault, InvalidRequest
from ..replicas.types import WeightsStatus
from .ask import Admitted
from .feed import Feed, Streams
from .routing.router import Router
from .streams import all_of

MAX_INPUTS = 2048  # of one call, as OpenAI has it; clients that cut long lists into calls reckon with that
MOST_VALUES = 1 << 21  # of an answer: 2,048 vectors of 1,024


@dataclass(frozen=True, slots=True)
class Embedded:
    """An embedding. `values` are fp32, one per hidden dimension. `weights`: those it was computed with, as the
    replica reports.
    """

    values: Sequence[float]
    prompt_tokens: int
    cached_tokens: int
    weights: WeightsStatus | None = None

    def normalized(self) -> Embedded:
        """Return the vector scaled to unit length; a vector of zeros stays as it is."""
        length = math.sqrt(sum(value * value for value in self.values)) or 1.0
        return replace(self, values=[value / length for value in self.values])


async def embed_all(router: Router, admitted: Sequence[Admitted], name: str) -> list[Embedded]:
    """Return the embeddings of one call's inputs, in order, whatever their tokens add up to. name: field with the
    inputs.

    Raises InvalidRequest if they have more than MOST_VALUES numbers together, which the first one shows.
    """
    feed = Feed(router)

    async def one_of_them(one: Admitted) -> Embedded:
        found = await embed(feed, one)
        if len(found.values) * len(admitted) > MOST_VALUES:
            raise InvalidRequest(
                f"{name}: vectors of {len(found.values)} for {len(admitted)} inputs are more than {MOST_VALUES} "
                f"numbers; give {MOST_VALUES // len(found.values)} inputs at most",
                param=name,
                code="answer_too_large",
            )
        return found

    return await all_of([one_of_them(one) for one in admitted])


async def embed(router: Streams, admitted: Admitted) -> Embedded:
    """Return the pooled hidden state of an admitted prompt whose `pooling` is set."""
    async with aclosing(router.stream(admitted.now(), whole=True)) as messages:
        async for message in messages:
            if message.embedding is not None:
                tokens, cached = len(admitted.request.prompt_ids), message.cached_tokens or 0
                return Embedded(message.embedding, tokens, cached, message.told)
    raise EngineFault("the stream ended without an embedding", code="engine_fault")
