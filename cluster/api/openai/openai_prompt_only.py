"""A completion of which only the prompt is shown: `max_tokens: 0` with `echo`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ....replicas.types import Delta, FinishReason, StreamMessage


async def hide_output(messages: AsyncGenerator[StreamMessage, None]) -> AsyncGenerator[StreamMessage, None]:
    """Yield the same messages without what was generated: a choice ends by length, with no token."""
    async with aclosing(messages):
        async for message in messages:
            yield message._replace(deltas=tuple(_emptied(delta) for delta in message.deltas))


def _emptied(delta: Delta) -> Delta:
    ended = delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    reason = FinishReason.LENGTH if ended else delta.finish_reason
    return Delta(delta.index, logprobs=None if delta.logprobs is None else (), finish_reason=reason)
