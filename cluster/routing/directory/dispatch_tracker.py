"""Tracker of one attempt of one request: where it is best placed, where it is, and what the directory counts for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ....replicas.types import PromptStoreStatus, ReplicaLoad, Request, StreamMessage
from ..policy.routing_policy import RoutingPolicy
from ..prediction.latency_model import LatencyModel, LatencyPrediction, RoutingQuery
from ..prefix_index.prefix_hash_chain import PIECE_TOKENS, PrefixHashChain
from ..prefix_index.prefix_index import PrefixIndex
from .directory_entry import DirectoryEntry

__all__ = ["DispatchTracker"]

MAX_OVERHEAD_S = 0.1  # maximum time to a replica and back; a longer delay is the replica's own
HALF_WEIGHT_S = 0.05  # shorter predictions say more about the way to a replica, and correct by less than half
MIN_STEPS = 4  # minimum number of steps to measure a time per token
READER_SHARE = 0.2  # share of the time above which the reader, not the replica, sets the pace


class DirectoryView(Protocol):
    """Interface of the directory (replica_directory.py) to a dispatch tracker, which reads replicas and reports
    observations.
    """

    directory: LatencyModel
    replicas: dict[str, DirectoryEntry]
    policy: RoutingPolicy
    prefixes: PrefixIndex
    changed: asyncio.Event

    @property
    def clock(self) -> Callable[[], float]: ...

    def heard(self, replica: str | None, load: ReplicaLoad | None, sent_s: float) -> None: ...

    def record_stored(self, entry: DirectoryEntry, chain: PrefixHashChain, stored: PromptStoreStatus) -> None: ...

    def observed(self, entry: DirectoryEntry) -> None: ...

    def invalidate(self) -> None: ...


class DispatchTracker:
    """Tracker of one dispatch: counts a request on its replica, and compares what is observed there with predictions.

    order            predictions of the replicas to try, in this order
    query            the routing query
    chain            hash chain of the longest prompt
    ttft_s           observed seconds to the first token; None: it has not come
    sent_to          replica that the request was last sent to
    sent_s           when it was sent there, in seconds of the directory's clock
    first_s, last_s  when the first and the last message with tokens came, by the same clock; 0: none has come
    reader_s         seconds that messages waited for their reader
    num_tokens       output tokens that came in messages of a stream
    """

    def __init__(
        self,
        live: DirectoryView,
        order: dict[str, LatencyPrediction],
        query: RoutingQuery,
        chain: PrefixHashChain,
    ) -> None:
        self.order = order
        self.ttft_s: float | None = None
        self._taken = self._refused = False
        self._live, self._policy = live, live.policy
        self._query, self._sequences = query, query.sequences
        self._chain = chain
        self._tokens = 0  # prompt tokens that the replica is expected to compute
        self._replica: str | None = None
        self._entry: DirectoryEntry | None = None
        self.sent_to: str | None = None
        self.sent_s = self.first_s = self.last_s = self.reader_s = 0.0
        self._first_tokens = self.num_tokens = 0

    @property
    def best(self) -> str | None:
        return next(iter(self.order), None)

    def to(self, replica: str) -> None:
        """Count the request on this replica, where it goes now, so that the next placement takes it into account."""
        if replica == self._replica:
            return
        self._stop_counting()
        live = self._live
        self._replica = self.sent_to = replica
        self._entry = live.replicas.get(replica)
        self.sent_s, self._taken = live.clock(), False
        if self._entry is not None:
            self._tokens = live.directory.computes(self._entry.row, self._query)
            live.directory.sent(self.sent_s, self._entry.row, self._tokens, self._sequences)
            self._policy = live.policy
            self._policy.sent(self._query, self._entry.row)
            live.invalidate()
            asyncio.get_running_loop().call_soon(self._remember, self._entry)

    def message(self, message: StreamMessage) -> None:
        """Record a message from the replica: its load, the prefixes it reports, and the times of tokens."""
        now = self._live.clock()
        self._live.heard(self._replica, message.load, self.sent_s)
        self.record_stored(message)
        self.take()
        tokens = sum(len(delta.token_ids) for delta in message.deltas)
        if not tokens:
            return
        if self.ttft_s is None:
            self.ttft_s = now - self.sent_s
            self.first_s, self._first_tokens = now, tokens
            self._saw_ttft(self.ttft_s)
        self.num_tokens += tokens
        self.last_s = now

    def record_stored(self, message: StreamMessage, request: Request | None = None) -> None:
        """Record what a message reports of its prompt in the replica's prefix store.

        request  request of the message, where several were placed together: only the longest prompt's prefix is tracked
        """
        is_tracked = request is None or request is self._chain.request
        if message.stored is not None and is_tracked and (entry := self._here()) is not None:
            self._live.record_stored(entry, self._chain, message.stored)

    def take(self) -> None:
        """Record that the replica has accepted the request and begun it, since something has come from there."""
        entry = self._here()
        if not self._taken and entry is not None:
            self._live.directory.begun(self._live.clock(), entry.row, self._tokens)
        self._taken = True

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Measure how long the reader holds a message, while the context is open."""
        began = self._live.clock()
        try:
            yield
        finally:
            self.reader_s += self._live.clock() - began

    def whole(self, message: StreamMessage) -> None:
        """Record an answer that came in one message, and correct the replica's predictions by its time."""
        now = self._live.clock()
        self._live.heard(self._replica, message.load, self.sent_s)
        self.record_stored(message)
        self.take()
        tokens = sum(len(delta.token_ids) for delta in message.deltas)
        if (entry := self._here()) is None or (predicted := self.order.get(self._replica or "")) is None:
            return
        self.ttft_s = now - self.sent_s  # all that can be observed of it
        expected = predicted.ttft_s + max(0.0, tokens / self._sequences - 1) * predicted.tpot_s
        self._live.directory.observe_whole_response(
            entry.row, predicted, _replica_share_s(entry, expected, self.ttft_s) / expected
        )
        self._live.observed(entry)

    def end(self) -> None:
        """Stop counting the request on its replica, from which nothing more is awaited.

        Calling it again does nothing.
        """
        if self._entry is None:
            self._replica = None
            return
        steps = (self.num_tokens - self._first_tokens) / self._sequences
        seconds = self.last_s - self.first_s
        predicted = self.order.get(self._replica or "")
        entry = self._here()
        paced = self.reader_s > READER_SHARE * seconds
        if entry is not None and predicted is not None and steps >= MIN_STEPS and not paced:
            output = round(self.num_tokens / self._sequences)
            self._live.directory.observe_tpot(entry.row, predicted, seconds / steps, output)
        self._stop_counting()

    def _stop_counting(self) -> None:
        if self._entry is not None:
            self._policy.ended(self._query, self._entry.row)
        entry, self._replica = self._here(), None
        self._entry = None
        if entry is None:
            return
        live = self._live
        if self._taken:
            live.directory.done(live.clock(), entry.row, self._sequences)
        else:
            self._refused = True
            live.directory.withdraw_sent(live.clock(), entry.row, self._tokens, self._sequences)
            cached = (self._query.cached or {}).get(entry.row, 0)
            live.prefixes.correct(entry.row, self._chain[:], cached // PIECE_TOKENS)
        live.invalidate()
        live.changed.set()

    def _remember(self, entry: DirectoryEntry) -> None:
        if not self._refused and self._live.replicas.get(entry.profile.replica_id) is entry:
            self._live.prefixes.add(entry.row, self._chain[:])

    def _saw_ttft(self, observed: float) -> None:
        entry, predicted = self._here(), self.order.get(self._replica or "")
        if entry is not None and predicted is not None:
            self._live.directory.observe_ttft(entry.row, predicted, _replica_share_s(entry, predicted.ttft_s, observed))
            self._live.observed(entry)

    def _here(self) -> DirectoryEntry | None:
        """Return the replica if it still exists: its row may belong to another by now."""
        entry = self._entry
        return entry if entry is not None and self._live.replicas.get(self._replica or "") is entry else None


def _replica_share_s(entry: DirectoryEntry, predicted_s: float, observed_s: float) -> float:
    """Return the observed seconds without the way to the replica and back; short predictions are corrected little."""
    excess = max(0.0, observed_s - predicted_s)
    grown = entry.overhead_s * 1.01 + 1e-5 if entry.observed else MAX_OVERHEAD_S
    entry.overhead_s = min(grown, excess, MAX_OVERHEAD_S)
    weight = predicted_s / (predicted_s + HALF_WEIGHT_S)
    return predicted_s + (observed_s - entry.overhead_s - predicted_s) * weight
