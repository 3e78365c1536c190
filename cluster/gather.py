"""Gathers a stream's deltas into whole choices, for answers that are not streamed."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from ..replicas.protocol import Delta, FinishReason, PromptLogprob, StreamMessage, TokenLogprob


@dataclass(slots=True)
class GatheredChoice:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class Gathered:
    choices: list[GatheredChoice]
    cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def add(self, message: StreamMessage) -> None:
        self.cached_tokens = self.cached_tokens if message.cached_tokens is None else message.cached_tokens
        if message.prompt_logprobs is not None:
            self.prompt_logprobs = message.prompt_logprobs
        for delta in message.deltas:
            self.choices[delta.index].add(delta)


async def gather(messages: AsyncIterable[StreamMessage], n: int) -> Gathered:
    """Every choice of a router's stream, whole: what is cut off is raised there."""
    gathered = Gathered([GatheredChoice(index) for index in range(n)])
    async for message in messages:
        gathered.add(message)
    return gathered


def is_cut_off(delta: Delta) -> bool:
    """Its choice ended, and not with a whole answer. The router's stream raises why, after this message."""
    return delta.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH)
