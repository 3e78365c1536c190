"""Embedding of a prompt, computed by the path that every request takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing

from ....replicas.errors import EngineFault, InvalidRequest
from ....replicas.types import StreamMessage
from ...async_streams import run_all
from ...routing.router import Router
from .concurrent_prompts import ConcurrentPrompts, RequestStreamer
from .parsed_request import AdmittedRequest

MAX_INPUTS = 2048  # of one call, as OpenAI has it; clients that cut long lists into calls reckon with that
MAX_EMBEDDING_VALUES = 1 << 21  # of an answer: 2,048 vectors of 1,024


def unit_length(message: StreamMessage) -> list[float]:
    """Return a message's embedding, scaled to unit length; a vector of zeros stays as it is."""
    values = message.embedding or ()
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / length for value in values]


async def embed_all(router: Router, admitted: Sequence[AdmittedRequest], name: str) -> list[StreamMessage]:
    """Return the messages with the embeddings of one call's inputs, in order, whatever their tokens add up to.

    Raises InvalidRequest, which calls the inputs `name`, if they have more than MAX_EMBEDDING_VALUES numbers together,
    which the first one shows.
    """
    feed = ConcurrentPrompts(router)

    async def one_of_them(one: AdmittedRequest) -> StreamMessage:
        found = await embed(feed, one)
        width = len(found.embedding or ())
        if width * len(admitted) > MAX_EMBEDDING_VALUES:
            raise InvalidRequest(
                f"{name}: vectors of {width} for {len(admitted)} inputs are more than {MAX_EMBEDDING_VALUES} "
                f"numbers; give {MAX_EMBEDDING_VALUES // width} inputs at most",
                param=name,
                code="answer_too_large",
            )
        return found

    return await run_all([one_of_them(one) for one in admitted])


async def embed(router: RequestStreamer, admitted: AdmittedRequest) -> StreamMessage:
    """Return the message with the pooled hidden state of an admitted prompt whose `pooling` is set."""
    async with aclosing(router.stream(admitted.now(), whole=True)) as messages:
        async for message in messages:
            if message.embedding is not None:
                return message
    raise EngineFault("the stream ended without an embedding", code="engine_fault")
