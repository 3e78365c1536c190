"""Envelope in which all messages travel from a replica to an ingress, whichever stream they go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from ...errors import MotleyError
from ...types import CallId, Delta, FinishReason, ReplicaLoad, StreamMessage

__all__ = ["ReplicaEnvelope"]

PackedDelta = tuple[int, tuple[int, ...], str, FinishReason | None, str | int | None]
PackedMessage = tuple[PackedDelta, ...] | StreamMessage
_values_of = attrgetter(*(field.name for field in fields(ReplicaLoad)))


class ReplicaEnvelope(NamedTuple):
    """Messages of one call, or of several that share a stream. It has the same form however it travels.

    Pickled, messages that have nothing but tokens and text are plain tuples, since each class in a pickle costs more
    than a message, and the replica's load goes once, as of the last message.

    calls      numbers of the calls that `messages` are for, where several share the stream
    errors     errors that end calls of the stream
    failed     numbers of these calls
    moves_to   the call whose multiplexed stream brings the next messages; None: this stream does
    num_moved  how many came by it, before this stream goes on
    """

    messages: tuple[StreamMessage, ...] = ()
    calls: tuple[int, ...] = ()
    errors: tuple[MotleyError, ...] = ()
    failed: tuple[int, ...] = ()
    moves_to: CallId | None = None
    num_moved: int = 0

    def __reduce__(self) -> tuple[Callable[..., ReplicaEnvelope], tuple[Any, ...]]:
        messages, *others = self
        load = messages[-1].load if messages else None
        values = None if load is None else _values_of(load)
        return _unpack, (values, tuple([_pack_message(message) for message in messages]), *others)


def _unpack(values: tuple[Any, ...] | None, packed: tuple[PackedMessage, ...], *others: Any) -> ReplicaEnvelope:
    load = None if values is None else ReplicaLoad(*values)
    return ReplicaEnvelope(tuple([_unpack_message(message, load) for message in packed]), *others)


def _pack_message(message: StreamMessage) -> PackedMessage:
    if message.deltas and message == StreamMessage(message.deltas, message.load):
        plain = tuple([(d.index, d.token_ids, d.text, d.finish_reason, d.stop_reason) for d in message.deltas])
        if all(delta.logprobs is None for delta in message.deltas):
            return plain
    return message


def _unpack_message(packed: PackedMessage, load: ReplicaLoad | None) -> StreamMessage:
    if isinstance(packed, StreamMessage):
        return packed
    return StreamMessage(tuple([Delta(i, ids, text, None, end, why) for i, ids, text, end, why in packed]), load)
