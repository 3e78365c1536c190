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

MOST_OVERHEAD_S = 0.1  # maximum time to a replica and back; a longer delay is the replica's own
TELLING_S = 0.05  # shorter predictions say more about the way to a replica than about the replica
LEAST_STEPS = 4  # minimum number of steps to measure a time per token
READER_SHARE = 0.2  # share of the time above which the reader, not the replica, sets the pace


class DirectoryView(Protocol):
    """Interface of the directory (replica_directory.py) to a dispatch tracker, which reads replicas and reports
    observations.
    """

    directory: LatencyModel
    members: dict[str, DirectoryEntry]
    policy: RoutingPolicy
    prefixes: PrefixIndex
    changed: asyncio.Event

    @property
    def clock(self) -> Callable[[], float]: ...

    def heard(self, replica: str | None, load: ReplicaLoad | None, since: float) -> None: ...

    def told(self, member: DirectoryEntry, chain: PrefixHashChain, stored: PromptStoreStatus) -> None: ...

    def observed(self, member: DirectoryEntry) -> None: ...

    def invalidate(self) -> None: ...


class DispatchTracker:
    """Tracker of one dispatch: counts a request on its replica, and compares what is observed there with predictions.

    order   predictions of the replicas to try, in this order
    ask     the routing query
    chain   hash chain of the longest prompt
    ttft_s  observed seconds to the first token; None: it has not come
    """

    def __init__(
        self,
        live: DirectoryView,
        order: dict[str, LatencyPrediction],
        ask: RoutingQuery,
        chain: PrefixHashChain,
    ) -> None:
        self.order = order
        self.ttft_s: float | None = None
        self._taken = self._refused = False
        self._live, self._policy = live, live.policy
        self._ask, self._sequences = ask, ask.sequences
        self._chain = chain
        self._tokens = 0  # prompt tokens that the replica is expected to compute
        self._replica: str | None = None
        self._member: DirectoryEntry | None = None
        self._sent_s = self._first_s = self._last_s = 0.0
        self._reader_s = 0.0  # seconds that messages waited for their reader
        self._first_tokens = self._all_tokens = 0

    @property
    def best(self) -> str | None:
        return next(iter(self.order), None)

    def to(self, replica: str) -> None:
        """Count the request on this replica, where it goes now, so that the next placement takes it into account."""
        if replica == self._replica:
            return
        self._leave()
        live = self._live
        self._replica, self._member = replica, live.members.get(replica)
        self._sent_s, self._taken = live.clock(), False
        if self._member is not None:
            self._tokens = live.directory.computes(self._member.row, self._ask)
            live.directory.sent(self._sent_s, self._member.row, self._tokens, self._sequences)
            self._policy = live.policy
            self._policy.sent(self._ask, self._member.row)
            live.invalidate()
            asyncio.get_running_loop().call_soon(self._remember, self._member)

    def message(self, message: StreamMessage) -> None:
        """Record a message from the replica: its load, the prefixes it reports, and the times of tokens."""
        now = self._live.clock()
        self._live.heard(self._replica, message.load, self._sent_s)
        self.told(message)
        self.take()
        tokens = sum(len(delta.token_ids) for delta in message.deltas)
        if not tokens:
            return
        if self.ttft_s is None:
            self.ttft_s = now - self._sent_s
            self._first_s, self._first_tokens = now, tokens
            self._saw_ttft(self.ttft_s)
        self._all_tokens += tokens
        self._last_s = now

    def told(self, message: StreamMessage, request: Request | None = None) -> None:
        """Record what a message reports of its prompt in the replica's prefix store.

        request  request of the message, where several were placed together: only the longest prompt's prefix is tracked
        """
        known = request is None or request is self._chain.request
        if message.stored is not None and known and (member := self._here()) is not None:
            self._live.told(member, self._chain, message.stored)

    def take(self) -> None:
        """Record that the replica has accepted the request and begun it, since something has come from there."""
        member = self._here()
        if not self._taken and member is not None:
            self._live.directory.begun(self._live.clock(), member.row, self._tokens)
        self._taken = True

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Measure how long the reader holds a message, while the context is open."""
        began = self._live.clock()
        try:
            yield
        finally:
            self._reader_s += self._live.clock() - began

    def whole(self, message: StreamMessage) -> None:
        """Record an answer that came in one message, and correct the replica's predictions by its time."""
        now = self._live.clock()
        self._live.heard(self._replica, message.load, self._sent_s)
        self.told(message)
        self.take()
        tokens = sum(len(delta.token_ids) for delta in message.deltas)
        if (member := self._here()) is None or (predicted := self.order.get(self._replica or "")) is None:
            return
        self.ttft_s = now - self._sent_s  # all that can be observed of it
        expected = predicted.ttft_s + max(0.0, tokens / self._sequences - 1) * predicted.tpot_s
        self._live.directory.observe_whole_response(
            member.row, predicted, _replica_share_s(member, expected, self.ttft_s) / expected
        )
        self._live.observed(member)

    def end(self) -> None:
        """Stop counting the request on its replica, from which nothing more is awaited.

        Calling it again does nothing.
        """
        if self._member is None:
            self._replica = None
            return
        steps = (self._all_tokens - self._first_tokens) / self._sequences
        seconds = self._last_s - self._first_s
        predicted = self.order.get(self._replica or "")
        member = self._here()
        paced = self._reader_s > READER_SHARE * seconds
        if member is not None and predicted is not None and steps >= LEAST_STEPS and not paced:
            output = round(self._all_tokens / self._sequences)
            self._live.directory.observe_tpot(member.row, predicted, seconds / steps, output)
        self._leave()

    def _leave(self) -> None:
        if self._member is not None:
            self._policy.ended(self._ask, self._member.row)
        member, self._replica = self._here(), None
        self._member = None
        if member is None:
            return
        live = self._live
        if self._taken:
            live.directory.done(live.clock(), member.row, self._sequences)
        else:
            self._refused = True
            live.directory.withdraw_sent(live.clock(), member.row, self._tokens, self._sequences)
            cached = (self._ask.cached or {}).get(member.row, 0)
            live.prefixes.correct(member.row, self._chain[:], cached // PIECE_TOKENS)
        live.invalidate()
        live.changed.set()

    def _remember(self, member: DirectoryEntry) -> None:
        if not self._refused and self._live.members.get(member.profile.replica_id) is member:
            self._live.prefixes.add(member.row, self._chain[:])

    def _saw_ttft(self, observed: float) -> None:
        member, predicted = self._here(), self.order.get(self._replica or "")
        if member is not None and predicted is not None:
            self._live.directory.observe_ttft(
                member.row, predicted, _replica_share_s(member, predicted.ttft_s, observed)
            )
            self._live.observed(member)

    def _here(self) -> DirectoryEntry | None:
        """Return the replica if it still exists: its row may belong to another by now."""
        member = self._member
        return member if member is not None and self._live.members.get(self._replica or "") is member else None


def _replica_share_s(member: DirectoryEntry, predicted_s: float, observed_s: float) -> float:
    """Return the observed seconds without the way to the replica and back; short predictions are corrected little."""
    excess = max(0.0, observed_s - predicted_s)
    grown = member.overhead_s * 1.01 + 1e-5 if member.observed else MOST_OVERHEAD_S
    member.overhead_s = min(grown, excess, MOST_OVERHEAD_S)
    weight = predicted_s / (predicted_s + TELLING_S)
    return predicted_s + (observed_s - member.overhead_s - predicted_s) * weight
