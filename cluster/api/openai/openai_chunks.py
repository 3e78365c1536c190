"""Conversion of a stream's messages to OpenAI's chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....replicas.types import Delta, StreamMessage, WeightsStatus
from ...transport.http_server.response_content import JsonObject
from ..common.parsed_request import AdmittedRequest
from .openai_response import (
    ChoiceChunks,
    EchoedPrompt,
    ResponseForm,
    response_head,
    usage_fields,
    weights_fingerprint,
)


class OpenAIChunkWriter:
    """Writer of the chunks of one call. Choice i of prompt k has index k * n + i."""

    def __init__(
        self,
        form: ResponseForm,
        admitted: Sequence[AdmittedRequest],
        *,
        include_usage: bool,
        usage_so_far: bool = False,
    ) -> None:
        self._usage_so_far = usage_so_far
        self._begun = False
        self._form = form
        self._admitted = admitted
        self._n = admitted[0].request.sampling.n
        self._include_usage = include_usage
        self._head = response_head(form, admitted[0], form.chunk_object)
        self._choices: dict[int, ChoiceChunks] = {}  # by the index of the choice
        self._tokens = self._cached = 0
        self._weights: set[WeightsStatus] = set()

    def opened(self, which: int) -> bool:
        return which * self._n in self._choices

    def note_weights(self, weights: WeightsStatus | None) -> None:
        """Note the weights that compute the message that is written next; they change the fingerprint."""
        if weights is not None:
            self._weights.add(weights)
            self._head["system_fingerprint"] = weights_fingerprint(self._form, self._weights)

    def openings(self, which: int, echo: EchoedPrompt | None) -> Iterator[JsonObject]:
        """Yield at most one first chunk for each choice, made as it is taken. Take all before a message is written."""
        for index in range(which * self._n, (which + 1) * self._n):
            choice = self._choices[index] = self._form.stream(self._admitted[which], echo)
            if (fields := choice.opening()) is not None:
                yield self._chunk([{"index": index} | fields])

    def message(self, which: int, message: StreamMessage) -> list[JsonObject]:
        self._cached += message.cached_tokens or 0
        chunks = [self._delta(which * self._n + delta.index, delta) for delta in message.deltas]
        return [chunk for chunk in chunks if chunk is not None]

    def closing(self) -> list[JsonObject]:
        if not self._include_usage:
            return []
        return [self._chunk([]) | {"usage": self._counted()}]

    def _counted(self) -> JsonObject:
        return usage_fields(self._admitted, self._tokens, self._cached) | self._form.usage_details()

    def _delta(self, index: int, delta: Delta) -> JsonObject | None:
        self._tokens += len(delta.token_ids)
        fields = self._choices[index].delta(delta)
        return None if fields is None else self._chunk([{"index": index} | fields])

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        counted = {"usage": self._counted() if self._usage_so_far else None} if self._include_usage else {}
        once = {} if self._begun else self._form.beside_choices(self._admitted[0])
        self._begun = True
        return {**self._head, **once, "choices": choices, **counted}
