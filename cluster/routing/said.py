"""A stream that begins when there is something to say, so that a refusal before that is one and no broken answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ...replicas.protocol import StreamMessage
from ..gather import is_cut_off


async def heard(messages: AsyncGenerator[StreamMessage, None]) -> AsyncGenerator[StreamMessage, None]:
    """The same messages, the first ones as soon as one of them says something; none where an error comes before."""
    held: list[StreamMessage] | None = []
    async with aclosing(messages):
        async for message in messages:
            if held is not None:
                held.append(message)
                if not says_something(message):
                    continue
                for one in held:
                    yield one
                held = None
            else:
                yield message
    for one in held or ():
        yield one


def says_something(message: StreamMessage) -> bool:
    """Whether anything of the answer is in it: not if choices are cut off in it, and that is all."""
    if message.embedding is not None or message.prompt_logprobs is not None:
        return True
    ends = any(delta.finish_reason is not None and not is_cut_off(delta) for delta in message.deltas)
    return ends or any(delta.token_ids or delta.text for delta in message.deltas)
