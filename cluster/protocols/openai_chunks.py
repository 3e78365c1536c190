"""Messages of a stream -> OpenAI's chunks."""

from __future__ import annotations

from collections.abc import Sequence

from ...replicas.protocol import Delta, StreamMessage
from ..ask import Admitted
from .openai_reply import Echo, Form, Object, head, usage


class ChunkWriter:
    """Writes the chunks of one call. Choice i of prompt k has index k * n + i."""

    def __init__(self, form: Form, admitted: Sequence[Admitted], *, include_usage: bool) -> None:
        self._form = form
        self._admitted = admitted
        self._n = admitted[0].request.sampling.n
        self._include_usage = include_usage
        self._head = head(form, admitted[0], form.chunk_object)
        self._chars: dict[int, int] = {}  # per index, how far the text of its tokens reaches
        self._tokens = self._cached = 0

    def opened(self, which: int) -> bool:
        return which * self._n in self._chars

    def opening(self, which: int, echo: Echo | None) -> list[Object]:
        indices = range(which * self._n, (which + 1) * self._n)
        self._chars.update(dict.fromkeys(indices, 0 if echo is None else len(echo.text)))
        fields = self._form.opening(echo)
        return [] if fields is None else [self._chunk([{"index": index} | fields]) for index in indices]

    def message(self, which: int, message: StreamMessage) -> list[Object]:
        self._cached += message.cached_tokens or 0
        return [self._delta(which * self._n + delta.index, delta) for delta in message.deltas]

    def closing(self) -> list[Object]:
        if not self._include_usage:
            return []
        return [self._chunk([]) | {"usage": usage(self._admitted, self._tokens, self._cached)}]

    def _delta(self, index: int, delta: Delta) -> Object:
        self._tokens += len(delta.token_ids)
        fields = self._form.delta(delta, self._chars[index])
        self._chars[index] += self._form.chars(delta)
        return self._chunk([{"index": index} | fields])

    def _chunk(self, choices: list[Object]) -> Object:
        usage_field = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": choices, **usage_field}
