"""Directory of a running ingress: which replicas exist, what load they have, and where a request is best placed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from ....replicas.types import PromptStoreStatus, ReplicaLoad, ReplicaProfile, Request
from ..fleet_status import ReplicaStatus
from ..policy.routing_policies import DEFAULT_POLICY, create_routing_policy
from ..policy.routing_policy import RANKS, order_replicas
from ..prediction.context_lengths import ContextLengths, max_context_tokens, min_context_tokens
from ..prediction.latency_model import LatencyModel, LatencyPrediction, ReplicaSpeed, RoutingQuery, Slo
from ..prediction.replica_speeds import ReplicaSpeeds
from ..prediction.ttft_lower_bound import IdleReplicaSpeed, TtftLowerBoundCache, idle_replica_speed
from ..prefix_index.prefix_hash_chain import PIECE_TOKENS, PrefixHashChain
from ..prefix_index.prefix_index import PrefixIndex
from ..prefix_index.stored_prefix_index import StoredPrefixIndex
from .directory_entry import DirectoryEntry
from .dispatch_tracker import DispatchTracker
from .prediction_cache import PredictionCache

__all__ = ["DirectoryEntry", "ReplicaDirectory"]

STREAM_AGE_S = 0.02  # maximum age of a load that came with a message of a stream
STATS_AGE_S = 0.3  # approximate age of a load that came through Serve's controller
OFTEN_S = 0.02  # minimum time between two loads taken from one replica's messages, which may be thousands a second
USUAL_TOKENS = 256  # assumed length of an answer without a limit: it moves to a longer context if it fills its own
PROVEN = 8  # first tokens that a replica's predictions must have been compared with before they are trusted


class ReplicaDirectory:
    """Directory of the replicas by name, each with a row in the prediction model. It runs on the ingress's event loop.

    names  names of the pools, by the names of their Serve deployments
    slo    latency objectives, or None
    rng    source of randomness of the routing policy, Motley's own until another one replaces it
    clock  returns the current time in seconds
    """

    def __init__(
        self,
        names: dict[str, str],
        slo: Slo | None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slo = slo
        self.policy_name = DEFAULT_POLICY
        self.policy = create_routing_policy(DEFAULT_POLICY, rng)
        self.changed = asyncio.Event()  # set when a replica joins or a load changes
        self.replicas: dict[str, DirectoryEntry] = {}
        self.had_replica = False
        self.draining: set[str] = set()  # replicas that take no new requests
        self.directory = LatencyModel([], slo)
        self.clock = clock
        self.prefixes = PrefixIndex()
        self.stored = StoredPrefixIndex()
        self.contexts = ContextLengths()
        self._ttft_bounds = TtftLowerBoundCache(clock, self.contexts, self.idle)
        self._names = names
        self._unproven: dict[str, set[str]] = {}  # replicas, by pool
        self._by_row: dict[int, str] = {}
        self._classes: dict[str, int] = {}  # numbers of the numerics classes
        self._lengths: dict[str, int] = {}  # longest contexts, by pool
        self._speeds = ReplicaSpeeds()
        self._latest: PredictionCache | None = None  # cached predictions for the latest request

    def joined(self, profile: ReplicaProfile) -> None:
        if profile.pool not in self._names or profile.replica_id in self.replicas:
            return
        numerics = self._classes.setdefault(profile.numerics, len(self._classes))
        speed = self._speed(profile)
        row = self.directory.add(speed, longest=profile.model.max_model_len, numerics=numerics, profile=profile)
        self.contexts.add(row, profile.model.max_model_len)
        self.prefixes.add_replica(row, profile.kv_tokens // PIECE_TOKENS)
        store = self.stored.add_reader(profile.shares) if profile.shares else None
        if store is not None:
            self.directory.reads(row, store, profile.fetch_s)
        self.replicas[profile.replica_id] = DirectoryEntry(
            row, self._names[profile.pool], profile, store, heard=self.clock()
        )
        self._by_row[row] = profile.replica_id
        self._unproven.setdefault(self._names[profile.pool], set()).add(profile.replica_id)
        self._measure(self._names[profile.pool])
        self.invalidate()
        self.had_replica = True
        self.changed.set()

    def _speed(self, profile: ReplicaProfile) -> ReplicaSpeed:
        """Return the speed of a joining replica, and raise that of others of its kind if it is faster."""
        if self._speeds.record(self._names[profile.pool], profile):
            for entry in self.replicas.values():
                self.directory.set_speed(entry.row, self._speeds.of(entry.pool, entry.profile))
        return self._speeds.of(self._names[profile.pool], profile)

    def replace_slo(self, slo: Slo | None) -> None:
        self.slo = self.directory.slo = slo
        self.invalidate()

    def rename(self, names: dict[str, str]) -> None:
        """Replace the names of the pools; forget replicas of pools that no longer exist."""
        self._names = names
        for name in [name for name, entry in self.replicas.items() if entry.profile.pool not in names]:
            self.left(name)
        for pool in [pool for pool in self._lengths if pool not in names.values()]:
            del self._lengths[pool]

    def left(self, replica: str) -> None:
        entry = self.replicas.pop(replica, None)
        if entry is not None:
            del self._by_row[entry.row]
            self.draining.discard(replica)
            self.contexts.remove(entry.row)
            self._unproven[entry.pool].discard(replica)
            self.prefixes.clear(entry.row)
            if entry.store is not None:
                self.stored.remove_reader(entry.profile.shares)
            self.directory.remove(entry.row)
            self._measure(entry.pool)
            self.invalidate()

    @property
    def longest_context(self) -> int:
        """Tokens that the longest context of all pools holds.

        A pool without replicas counts with its last known length.
        """
        return max(self._lengths.values(), default=0)

    def _measure(self, pool: str) -> None:
        there = [each.profile.model.max_model_len for each in self.replicas.values() if each.pool == pool]
        if there:
            self._lengths[pool] = max(there)

    def reported(self, replica: str, load: ReplicaLoad) -> None:
        """Record a load that came through Serve's controller, and is about `STATS_AGE_S` old."""
        self._hear(replica, load, self.clock() - STATS_AGE_S)

    def heard(self, replica: str | None, load: ReplicaLoad | None, sent_s: float) -> None:
        """Record the load that came with a message of a stream.

        sent_s  when that stream's request was sent, by the clock: the load is not older
        """
        if load is None or replica is None or (entry := self.replicas.get(replica)) is None:
            return
        now = self.clock()
        if now - entry.taken >= OFTEN_S or sent_s > entry.heard:
            entry.taken = now
            self._hear(replica, load, max(now - STREAM_AGE_S, sent_s))

    def drains(self, replica: str, load: ReplicaLoad) -> None:
        """Record the load with which a replica has just said that it drains; loads older than this no longer count."""
        self._hear(replica, load, self.clock())

    def _hear(self, replica: str, load: ReplicaLoad, of: float) -> None:
        entry = self.replicas.get(replica)
        if entry is None or _is_older(load, entry.load):
            return
        if load.weights_version != entry.load.weights_version:
            self.prefixes.clear(entry.row)  # cached prefixes of other weights are not found any more
        entry.load, entry.heard = load, max(of, entry.heard)
        self.directory.heard(entry.row, load, entry.heard)
        self._set_usable(entry, usable=not load.draining)
        self.invalidate()
        self.changed.set()

    def _set_usable(self, entry: DirectoryEntry, *, usable: bool) -> None:
        self.directory.set_usable(entry.row, usable=usable)
        if usable:
            self.draining.discard(entry.profile.replica_id)
            self.contexts.add(entry.row, entry.profile.model.max_model_len)
        else:
            self.draining.add(entry.profile.replica_id)
            self.contexts.remove(entry.row)

    def observed(self, entry: DirectoryEntry) -> None:
        """Count one comparison of a prediction with what was observed, and lend the correction to unproven replicas.

        These are replicas of the same pool with fewer than `PROVEN` observations of their own. Without this, the first
        replica that is tried and beats its profile would be chosen forever.
        """
        entry.observed += 1
        self.invalidate()
        unproven = self._unproven.get(entry.pool)
        if not unproven:
            return
        if entry.observed >= PROVEN:
            unproven.discard(entry.profile.replica_id)
        others = [self.replicas[name].row for name in unproven if self.replicas[name] is not entry]
        self.directory.copy_corrections(entry.row, others)

    def forget_prefixes(self) -> None:
        for entry in self.replicas.values():
            self.prefixes.clear(entry.row)
        self.stored.clear()
        self.invalidate()

    def record_stored(self, entry: DirectoryEntry, chain: PrefixHashChain, stored: PromptStoreStatus) -> None:
        """Record what a replica has reported of a prompt's prefix in its prefix store."""
        if entry.store is not None:
            self.directory.reads(entry.row, entry.store, stored.token_s)
            self.stored.learn(entry.store, chain, stored)

    def pool_of(self, replica: str) -> str | None:
        entry = self.replicas.get(replica)
        return None if entry is None else entry.pool

    def too_short(self, tokens: int) -> frozenset[str]:
        """Return the replicas whose contexts do not hold that many tokens.

        Returns none of them if no pool has a context that does: then any replica may refuse the request.
        """
        if tokens > self.longest_context:
            return frozenset()
        return frozenset(self._by_row[row] for row in self.contexts.shorter(tokens))

    def has_longer(self, replica: str | None, tokens: int = 0) -> bool:
        """Return whether another replica has a longer context than this one, and one that holds that many tokens."""
        entry = None if replica is None else self.replicas.get(replica)
        length = 0 if entry is None else entry.profile.model.max_model_len
        return self.contexts.longest > length and self.contexts.longest >= tokens

    def dispatch(
        self,
        requests: Sequence[Request],
        *,
        last: Collection[str] = (),
        never: Collection[str] = (),
        numerics: str = "",
        weights: str = "",
    ) -> DispatchTracker:
        """Rank the replicas for requests that are placed together, and return the tracker of their dispatch.

        last      replicas that come after all others
        never     replicas that are left out
        numerics  numerics class that the answer began with: replicas of other classes come after; empty at the
                  beginning
        weights   digest of the weights that the answer began with: replicas with others come after; empty at the
                  beginning
        """
        behind = [name for name in {*last, *never} if name in self.replicas]
        if len(requests) == 1 and not (behind or numerics or weights):
            prediction = self._predict(requests[0])
            chain, query, ranked = prediction.chain, prediction.query, self._ranked(prediction)
        else:
            chain = PrefixHashChain(max(requests, key=lambda each: len(each.prompt_ids)))
            query = self._query(requests, chain, behind, numerics)
            if weights:
                query = replace(query, others=self._of_others(weights))
            ranked = self._rank(self.clock(), query)
        order: dict[str, LatencyPrediction] = {self._by_row[each.replica]: each for each in ranked}
        for name in never:
            order.pop(name, None)
        return DispatchTracker(self, order, query, chain)

    def replace_policy(self, name: str) -> None:
        """Order replicas by this routing policy from now on; it keeps its state if it is the current one."""
        policy = create_routing_policy(name)
        if type(policy) is not type(self.policy):
            self.policy, self.policy_name = policy, name
            self.invalidate()

    def invalidate(self) -> None:
        """Discard the cached predictions, because the state of a replica has changed."""
        self._latest = None

    def _predict(self, request: Request) -> PredictionCache:
        now, prediction = self.clock(), self._latest
        if prediction is None or not prediction.is_of(request, now):
            chain = PrefixHashChain(request)
            prediction = self._latest = PredictionCache(request, now, chain, self._query([request], chain))
        return prediction

    def _ranked(self, prediction: PredictionCache) -> list[LatencyPrediction]:
        if prediction.ranked is None:
            prediction.ranked = self._rank(prediction.at, prediction.query)
        return prediction.ranked

    def _rank(self, now: float, query: RoutingQuery) -> list[LatencyPrediction]:
        """Return predictions for the replicas that are tried, in the policy's order."""
        replicas = self.directory.candidates(now, query)
        return replicas.predictions(order_replicas(self.policy, query, replicas)[:RANKS])

    def _query(
        self, requests: Sequence[Request], chain: PrefixHashChain, last: Collection[str] = (), numerics: str = ""
    ) -> RoutingQuery:
        """Return the routing query for the requests together.

        chain  hash chain of the longest prompt
        """
        longest = chain.request
        begun = max(map(min_context_tokens, requests))
        return RoutingQuery(
            sum(len(each.prompt_ids) + sum(map(len, each.output_ids)) for each in requests),
            self._cached(chain),
            self.stored.tokens(chain),
            context=begun,
            last=[*(self.replicas[name].row for name in last), *self._cut_short(requests, begun)],
            numerics=self._classes.get(numerics) if numerics else None,
            output_tokens=1 if longest.pooling is not None else longest.sampling.max_tokens,
            sequences=sum(each.sampling.n for each in requests),
            beginning=chain.beginning,
        )

    def _cut_short(self, requests: Sequence[Request], begun: int) -> list[int]:
        """Return the rows of replicas whose contexts are too short for the whole answer of one of the requests.

        These rank behind all others. A request without a limit on its length seldom fills the longest context, so any
        context that holds an answer of `USUAL_TOKENS` tokens is as good for it.
        """
        longest = self.contexts.longest
        if self.contexts.shortest == longest:
            return []
        max_tokens = max(map(max_context_tokens, requests))
        rows = self.contexts.shorter(max_tokens if max_tokens < longest else min(begun + USUAL_TOKENS, longest))
        return [*rows, *rows]  # twice, so that they come even after replicas that are last for another reason

    def _of_others(self, weights: str) -> list[int]:
        """Return the rows of replicas whose latest reported weights have another digest."""
        return [entry.row for entry in self.replicas.values() if entry.load.weights_contents != weights]

    def _cached(self, chain: PrefixHashChain) -> dict[int, int]:
        return {row: depth * PIECE_TOKENS for row, depth in self.prefixes.depths(chain).items()}

    def has_capacity(self, request: Request, *, allow_late: bool, waited_s: float = 0.0) -> bool:
        """Return whether some replica has capacity for the request now.

        That is one that would meet the objectives or, if `allow_late` is set or there are no objectives, begin it at
        once.

        waited_s  seconds that the request has waited already, which count towards its time to first token
        """
        slo = self.slo
        if (allow_late or slo is None) and self._begins(request):
            return True
        if slo is None:
            return False
        return any(
            each.strain <= 1 and each.ttft_s + waited_s <= slo.ttft_s for each in self._ranked(self._predict(request))
        )

    def fits(self, request: Request) -> bool:
        """Return whether a replica's context holds the request. Also True if none ever did: then any may refuse it."""
        return not self.contexts.longest < min_context_tokens(request) <= self.longest_context

    def min_ttft_s(self, request: Request) -> float:
        """Return the lower bound of the request's time to first token, in seconds, were the best replica idle.

        Only replicas whose contexts hold the request count. Infinite if none would meet the objectives; 0 without
        objectives.
        """
        if self.slo is None:
            return 0.0
        return self._ttft_bounds.now().min_ttft_s(self._predict(request).query, self.slo)

    def is_unmeetable(self, request: Request, waited_s: float) -> bool:
        """Return whether a waiting request can never meet its objectives: all replicas that could are idle already."""
        if self.slo is None:
            return False
        rows = self._ttft_bounds.now().rows(self._predict(request).query, self.slo, self.slo.ttft_s - waited_s)
        return not any(self.directory.carried(row) > 0 for row in rows)

    def idle(self) -> Iterator[IdleReplicaSpeed]:
        """Yield, for each replica that is not draining, the speed that it has when it is idle."""
        for entry in self.replicas.values():
            if not entry.load.draining:
                speed = self._speeds.of(entry.pool, entry.profile)
                yield idle_replica_speed(
                    entry.row, speed, self.directory.off(entry.row), entry.profile.model.max_model_len
                )

    def is_starved_by_others(self, request: Request) -> bool:
        """Return whether other ingresses load most of the fleet while a replica could soon begin this request.

        Soon means as soon as one sequence there has ended.

        They learn sooner than this ingress that a request of their own has ended, and would take the free place every
        time.
        """
        return self.directory.own_share() < 0.5 and self._begins(request, ahead=1)

    def _begins(self, request: Request, ahead: int = 0) -> bool:
        """Return whether a replica whose context is long enough would begin it at once, or after `ahead` sequences."""
        short = self.contexts.shorter(min_context_tokens(request))
        for row in short:
            self.directory.set_usable(row, usable=False)
        try:
            return self.directory.has_capacity(self.clock(), len(request.prompt_ids), ahead)
        finally:
            for row in short:  # only usable replicas are in `contexts`, so all of these were usable
                self.directory.set_usable(row, usable=True)

    def soonest(self, request: Request) -> float | None:
        """Return the earliest predicted time to first token in seconds; None until all predictions are proven.

        The first token decides since a part of the answer by the deadline is of use.
        """
        ranked = self._ranked(self._predict(request))
        if not ranked or any(self.replicas[self._by_row[each.replica]].observed < PROVEN for each in ranked):
            return None
        return min(each.ttft_s for each in ranked)

    def status(self, suspects: Collection[str]) -> tuple[ReplicaStatus, ...]:
        now = self.clock()
        return tuple(
            ReplicaStatus(
                entry.pool,
                name,
                "draining" if entry.load.draining else "suspect" if name in suspects else "ready",
                entry.profile,
                entry.load,
                max(0.0, now - entry.heard),
                *self.directory.off(entry.row),
            )
            for name, entry in sorted(self.replicas.items())
        )


def _is_older(load: ReplicaLoad, than: ReplicaLoad) -> bool:
    """Return whether one load of a replica was taken before another one.

    A replica's steps and weight versions only grow, and a replica that drains does so until it ends.
    """
    return (
        load.steps < than.steps or load.weights_version < than.weights_version or (than.draining and not load.draining)
    )
