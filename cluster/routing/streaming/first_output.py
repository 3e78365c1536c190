"""Stream that begins with the first real output, so that an earlier error is a refusal and not a broken answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ....replicas.types import Delta, FinishReason, StreamMessage


async def hold_until_output(messages: AsyncGenerator[StreamMessage, None]) -> AsyncGenerator[StreamMessage, None]:
    """Yield the same messages, held back until one has real output; yield none if an error comes before that."""
    buffered: list[StreamMessage] | None = []
    async with aclosing(messages):
        async for message in messages:
            if buffered is not None:
                buffered.append(message)
                if not has_output(message):
                    continue
                for one in buffered:
                    yield one
                buffered = None
            else:
                yield message
    for one in buffered or ():
        yield one


def has_output(message: StreamMessage) -> bool:
    """Return whether a message has any output: choices that are merely cut off do not count, nor does the prompt's
    share, which is repeated if another replica begins anew.
    """
    if message.embedding is not None:
        return True
    ends = any(delta.finish_reason is not None and not is_cut_off(delta) for delta in message.deltas)
    return ends or any(delta.token_ids or delta.text for delta in message.deltas)


def is_cut_off(delta: Delta) -> bool:
    """Return whether the choice ended without a whole answer. The router's stream raises the reason after this
    message.
    """
    return delta.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH)
