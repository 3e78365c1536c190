"""Collector of a stream's deltas into whole choices, for answers that are not streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ....replicas.errors import InvalidRequest
from ....replicas.types import Delta, FinishReason, PromptLogprob, StreamMessage, TokenLogprob, WeightsStatus

T = TypeVar("T")

MAX_RESPONSE_LOGPROBS = 2**18  # of one answer, alternatives included: some 8 MiB of JSON, 100 MiB of Python's objects
LARGE_RESPONSE_VALUES = 2**12  # so many values are written in a thread: every stream would wait for them


class LogprobBudget:
    """Budget for the log-probabilities of one call's answer, of all its prompts and choices together.

    The size of an answer is not known beforehand, so it is counted as it arrives. wire_names: as in `ParsedRequest`.
    """

    def __init__(self, wire_names: Mapping[str, str] | None = None, max_logprobs: int = MAX_RESPONSE_LOGPROBS) -> None:
        self.taken = 0
        self._max_logprobs = max_logprobs
        self._wire_names = wire_names or {}

    def take(self, entries: Iterable[PromptLogprob], times: int = 1) -> None:
        """Count these entries, each `times` times. Raises InvalidRequest when the budget is used up."""
        self.taken += count_logprob_values(entries) * times
        if self.taken > self._max_logprobs:
            name = self._wire_names.get("logprobs", "logprobs")
            raise InvalidRequest(
                f"{name}: the answer has come to more than {self._max_logprobs} log-probabilities, alternatives "
                "included; ask for fewer, or for a stream of them",
                param=name,
                code="answer_too_large",
            )


def count_logprob_values(entries: Iterable[PromptLogprob]) -> int:
    return sum(1 + len(entry.top) for entry in entries if entry is not None)


@dataclass(slots=True)
class CollectedChoice:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprob: float = 0.0  # of all its tokens, whether or not those of each are kept

    def add(self, delta: Delta, *, logprobs: bool = True) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprob += sum(entry.logprob for entry in delta.logprobs)
            if logprobs:
                self.logprobs = self.logprobs or []
                self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class CollectedResponse:
    """A whole answer, while it is collected. Raises InvalidRequest for more log-probabilities than `budget` allows.

    logprobs      whether log-probabilities of the output are kept
    prompt_shown  how many times the answer repeats the log-probabilities of the prompt
    weights       weights that computed it, in order: several if it moved to a replica with other weights
    """

    choices: list[CollectedChoice]
    budget: LogprobBudget = field(default_factory=LogprobBudget)
    logprobs: bool = True
    prompt_shown: int = 1
    cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    weights: list[WeightsStatus] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def add(self, message: StreamMessage) -> None:
        self.cached_tokens = self.cached_tokens if message.cached_tokens is None else message.cached_tokens
        if (weights := message.weights_status) is not None:
            self.weights.append(weights)
        if message.prompt_logprobs is not None:
            self.prompt_logprobs = message.prompt_logprobs
            self.budget.take(message.prompt_logprobs, self.prompt_shown)
        for delta in message.deltas:
            self.choices[delta.index].add(delta, logprobs=self.logprobs)
            if self.logprobs and delta.logprobs is not None:
                self.budget.take(delta.logprobs)


async def collect_response(
    messages: AsyncIterable[StreamMessage],
    n: int,
    budget: LogprobBudget,
    *,
    logprobs: bool = True,
    prompt_shown: int = 1,
) -> CollectedResponse:
    """Return every choice of a router's stream. The stream raises for a choice that is cut off; InvalidRequest if
    it is too large.
    """
    choices = [CollectedChoice(index) for index in range(n)]
    gathered = CollectedResponse(choices, budget, logprobs=logprobs, prompt_shown=prompt_shown)
    async for message in messages:
        gathered.add(message)
    return gathered


async def encode_response(budget: LogprobBudget, write: Callable[[], T]) -> T:
    """Return the result of `write` for an answer; a large one is written in a thread, so that streams go on
    meanwhile.
    """
    return await encode_values(budget.taken, write)


async def encode_values(values: int, write: Callable[[], T]) -> T:
    """Return the result of `write`, in a thread if the answer has LARGE_RESPONSE_VALUES or more values, so that
    streams go on meanwhile.
    """
    return write() if values < LARGE_RESPONSE_VALUES else await asyncio.to_thread(write)
