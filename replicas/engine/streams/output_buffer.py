"""Queue of messages that a reader has not taken yet, and the merge of several into one."""

from __future__ import annotations

from collections import deque

from ...types import Delta, PromptLogprob, StreamMessage, join_deltas

# A slow reader must be seen to read, which one huge message would hide; and the connections that carry messages
# between processes limit the size of one.
MAX_MERGED_MESSAGES = 64  # messages
MAX_MERGED_BYTES = 2**16

_MESSAGE, _DELTA, _TOKEN, _LOGPROB, _ALTERNATIVE, _VALUE = 128, 190, 28, 168, 116, 32  # bytes of CPython's objects


class OutputBuffer:
    """Queue of messages for one reader. `message_bytes`: about what they take in memory; log-probabilities outweigh
    tokens tenfold.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._messages: deque[tuple[int, StreamMessage]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: StreamMessage) -> None:
        size = message_bytes(message)
        self.num_bytes += size
        self._messages.append((size, message))

    def take(self, max_messages: int = MAX_MERGED_MESSAGES) -> StreamMessage:
        """Return the oldest messages merged into one: at most `most` of them, and at most MAX_MERGED_BYTES unless the
        first alone is larger.
        """
        if len(self._messages) == 1:
            return self._pop()
        before, taken = self.num_bytes, [self._pop()]
        while self._messages and len(taken) < max_messages:
            if before - self.num_bytes + self._messages[0][0] > MAX_MERGED_BYTES:
                break
            taken.append(self._pop())
        return merge_messages(taken)

    def clear(self) -> None:
        self._messages.clear()
        self.num_bytes = 0

    def _pop(self) -> StreamMessage:
        size, message = self._messages.popleft()
        self.num_bytes -= size
        return message


def message_bytes(message: StreamMessage) -> int:
    """Return about how many bytes a message takes in memory. The estimate is quick: it counts short integers and texts
    as if they were not shared.
    """
    size = _MESSAGE + _VALUE * len(message.embedding or ())
    if message.prompt_logprobs:
        size += _of_logprobs(message.prompt_logprobs)
    for delta in message.deltas:
        size += _DELTA + _TOKEN * len(delta.token_ids) + len(delta.text)
        if delta.logprobs:
            size += _of_logprobs(delta.logprobs)
    return size


def _of_logprobs(entries: tuple[PromptLogprob, ...]) -> int:
    return sum(_LOGPROB + _ALTERNATIVE * len(entry.top) for entry in entries if entry is not None)


def merge_messages(messages: list[StreamMessage]) -> StreamMessage:
    """Merge messages into one: one delta per choice, and the latest load and store state."""
    if len(messages) == 1:
        return messages[0]
    by_choice: dict[int, list[Delta]] = {}
    for message in messages:
        for delta in message.deltas:
            by_choice.setdefault(delta.index, []).append(delta)
    deltas = tuple(join_deltas(deltas) for deltas in by_choice.values())
    stored = next((message.stored for message in reversed(messages) if message.stored is not None), None)
    last = messages[-1]
    return messages[0]._replace(deltas=deltas, load=last.load, stored=stored, preemptions=last.preemptions)
