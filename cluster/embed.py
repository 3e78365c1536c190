"""One prompt's embedding, by the path that every request takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ..replicas.errors import EngineFault
from .ask import Admitted
from .feed import Feed, Streams
from .routing.router import Router
from .streams import all_of


@dataclass(frozen=True, slots=True)
class Embedded:
    """`values` are fp32, one per hidden dimension."""

    values: Sequence[float]
    prompt_tokens: int
    cached_tokens: int

    def normalized(self) -> Embedded:
        """Of unit length; a vector of zeros stays as it is."""
        length = math.sqrt(sum(value * value for value in self.values)) or 1.0
        return Embedded([value / length for value in self.values], self.prompt_tokens, self.cached_tokens)


async def embed_all(router: Router, admitted: Sequence[Admitted]) -> list[Embedded]:
    """Those of one call, in their order; however many tokens they have together."""
    feed = Feed(router)
    return await all_of([embed(feed, one) for one in admitted])


async def embed(router: Streams, admitted: Admitted) -> Embedded:
    """The pooled hidden state of an admitted prompt whose `pooling` is set."""
    async with aclosing(router.stream(admitted.now(), whole=True)) as messages:
        async for message in messages:
            if message.embedding is not None:
                return Embedded(message.embedding, len(admitted.request.prompt_ids), message.cached_tokens or 0)
    raise EngineFault("the stream ended without an embedding", code="engine_fault")
