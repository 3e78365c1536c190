"""The directory of a running ingress: which replicas there are, what they carry, and where a request is best placed."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from ...replicas.protocol import ReplicaLoad, ReplicaProfile, Request, Stored
from ..fleet.status import ReplicaStatus
from .chain import PIECE_TOKENS, Chain
from .contexts import Contexts, least, whole
from .hope import Hopes, Idle, idle
from .look import Look
from .member import Member
from .predict import RANKS, Ask, Directory, Predicted, Slo, Speed
from .prefixes import PrefixView
from .speeds import Speeds
from .stored import StoredView
from .visit import Visit

__all__ = ["Live", "Member", "Order"]

STREAM_AGE_S = 0.02  # how old a load is at most that came with a stream's message,
STATS_AGE_S = 0.3  # and about how old one that came through Serve's controller
OFTEN_S = 0.02  # more often one replica's load is not taken from its messages: there may be thousands a second
USUAL_TOKENS = 256  # of an answer that may go on until a context is full: it moves on if it fills a shorter one
PROVEN = 8  # first tokens that a replica's predictions have been held against
Order = Callable[[Directory, list[Predicted]], list[Predicted]]


class Live:
    """Replicas by their names, rows of the directory behind them. Lives on the ingress's event loop.

    names   of the pools, by that of their deployments
    """

    def __init__(
        self,
        names: dict[str, str],
        slo: Slo | None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slo = slo
        self.order: Order | None = None
        self.changed = asyncio.Event()  # a replica has come, or what one carries has
        self.members: dict[str, Member] = {}
        self.had_any = False
        self.directory = Directory([], slo, rng or random.Random())
        self.clock = clock
        self.prefixes = PrefixView()
        self.stored = StoredView()
        self.contexts = Contexts()
        self._hopes = Hopes(clock, self.contexts, self.idle)
        self._names = names
        self._unproven: dict[str, set[str]] = {}  # replicas, by pool
        self._by_row: dict[int, str] = {}
        self._classes: dict[str, int] = {}  # numerics
        self._lengths: dict[str, int] = {}  # longest contexts, by pool
        self._speeds = Speeds()
        self._look: Look | None = None  # the latest

    def joined(self, profile: ReplicaProfile) -> None:
        if profile.pool not in self._names or profile.replica_id in self.members:
            return
        numerics = self._classes.setdefault(profile.numerics, len(self._classes))
        speed = self._speed(profile)
        row = self.directory.add(speed, longest=profile.model.max_model_len, numerics=numerics)
        self.contexts.come(row, profile.model.max_model_len)
        self.prefixes.come(row, profile.kv_tokens // PIECE_TOKENS)
        store = self.stored.come(profile.shares) if profile.shares else None
        if store is not None:
            self.directory.reads(row, store, profile.fetch_s)
        self.members[profile.replica_id] = Member(row, self._names[profile.pool], profile, store, heard=self.clock())
        self._by_row[row] = profile.replica_id
        self._unproven.setdefault(self._names[profile.pool], set()).add(profile.replica_id)
        self._measure(self._names[profile.pool])
        self.stirred()
        self.had_any = True
        self.changed.set()

    def _speed(self, profile: ReplicaProfile) -> Speed:
        """Of one that comes; others like it may be held to be faster for it."""
        if self._speeds.come(self._names[profile.pool], profile):
            for member in self.members.values():
                self.directory.set_speed(member.row, self._speeds.of(member.pool, member.profile))
        return self._speeds.of(self._names[profile.pool], profile)

    def replace_slo(self, slo: Slo | None) -> None:
        self.slo = self.directory.slo = slo
        self.stirred()

    def rename(self, names: dict[str, str]) -> None:
        """Other pools from now on; replicas of those that are not among them are forgotten."""
        self._names = names
        for name in [name for name, member in self.members.items() if member.profile.pool not in names]:
            self.left(name)
        for pool in [pool for pool in self._lengths if pool not in names.values()]:
            del self._lengths[pool]

    def left(self, replica: str) -> None:
        member = self.members.pop(replica, None)
        if member is not None:
            del self._by_row[member.row]
            self.contexts.leave(member.row)
            self._unproven[member.pool].discard(replica)
            self.prefixes.clear(member.row)
            if member.store is not None:
                self.stored.leave(member.profile.shares)
            self.directory.remove(member.row)
            self._measure(member.pool)
            self.stirred()

    @property
    def longest_context(self) -> int:
        """Tokens that the longest context of all pools holds. A pool without replicas counts as it last was."""
        return max(self._lengths.values(), default=0)

    def _measure(self, pool: str) -> None:
        there = [each.profile.model.max_model_len for each in self.members.values() if each.pool == pool]
        if there:
            self._lengths[pool] = max(there)

    def reported(self, replica: str, load: ReplicaLoad) -> None:
        """Through Serve's controller."""
        self._hear(replica, load, self.clock() - STATS_AGE_S)

    def heard(self, replica: str | None, load: ReplicaLoad | None, since: float) -> None:
        """With a message of a stream that was sent there at `since`, by the clock: the load is no older."""
        if load is None or replica is None or (member := self.members.get(replica)) is None:
            return
        now = self.clock()
        if now - member.taken >= OFTEN_S or since > member.heard:
            member.taken = now
            self._hear(replica, load, max(now - STREAM_AGE_S, since))

    def drains(self, replica: str, load: ReplicaLoad) -> None:
        """It has just said so itself: nothing older is of interest."""
        self._hear(replica, load, self.clock())

    def _hear(self, replica: str, load: ReplicaLoad, of: float) -> None:
        member = self.members.get(replica)
        if member is None or _is_older(load, member.load):
            return
        if load.weights_version != member.load.weights_version:
            self.prefixes.clear(member.row)  # of other weights: they are not found there any more
        member.load, member.heard = load, max(of, member.heard)
        self.directory.heard(member.row, load, member.heard)
        self._set_usable(member, usable=not load.draining)
        self.stirred()
        self.changed.set()

    def _set_usable(self, member: Member, *, usable: bool) -> None:
        self.directory.set_usable(member.row, usable=usable)
        if usable:
            self.contexts.come(member.row, member.profile.model.max_model_len)
        else:
            self.contexts.leave(member.row)

    def observed(self, member: Member) -> None:
        """A prediction has been held against what came. Those of the pool that have nothing of their own take it on.

        Else whoever is tried first, and does better than its profile says, would be tried ever after.
        """
        member.observed += 1
        self.stirred()
        unproven = self._unproven.get(member.pool)
        if not unproven:
            return
        if member.observed >= PROVEN:
            unproven.discard(member.profile.replica_id)
        others = [self.members[name].row for name in unproven if self.members[name] is not member]
        self.directory.lend(member.row, others)

    def forget_prefixes(self) -> None:
        for member in self.members.values():
            self.prefixes.clear(member.row)
        self.stored.clear()
        self.stirred()

    def told(self, member: Member, chain: Chain, stored: Stored) -> None:
        """What the replica knows of that prompt in its store of prefixes."""
        if member.store is not None:
            self.directory.reads(member.row, member.store, stored.token_s)
            self.stored.learn(member.store, chain, stored)

    def pool_of(self, replica: str) -> str | None:
        member = self.members.get(replica)
        return None if member is None else member.pool

    def too_short(self, tokens: int) -> frozenset[str]:
        """Replicas whose contexts do not hold so many; none where no pool has a longer one: then any may say so."""
        if tokens > self.longest_context:
            return frozenset()
        return frozenset(self._by_row[row] for row in self.contexts.shorter(tokens))

    def has_longer(self, replica: str | None, tokens: int = 0) -> bool:
        """Whether another has a longer context than that one, and one that holds so many tokens."""
        member = None if replica is None else self.members.get(replica)
        length = 0 if member is None else member.profile.model.max_model_len
        return self.contexts.longest > length and self.contexts.longest >= tokens

    def visit(
        self,
        requests: Sequence[Request],
        *,
        last: Collection[str] = (),
        never: Collection[str] = (),
        numerics: str = "",
        weights: str = "",
    ) -> Visit:
        """Where the requests are best placed together, best first, and what is to be counted of them there.

        last      replicas that come after all others
        never     replicas that do not come at all
        numerics  the class, and
        weights   the digest of those, that were there at the beginning: others come after; empty: it is the beginning
        """
        behind = [name for name in {*last, *never} if name in self.members]
        if len(requests) == 1 and not (behind or numerics or weights):
            ranked, look = self._ranked(requests[0]), self._seen(requests[0])
            chain, ask = look.chain, look.ask
        else:
            chain = Chain(max(requests, key=lambda each: len(each.prompt_ids)))
            ask = self._ask(requests, chain, behind, numerics)
            if weights:
                ask = replace(ask, others=self._of_others(weights))
            ranked = self.directory.ranked(self.clock(), ask, late=True)
        if self.order is not None:
            ranked = self.order(self.directory, ranked)
        order: dict[str, Predicted] = {self._by_row[each.replica]: each for each in ranked}
        for name in never:
            order.pop(name, None)
        sequences = sum(each.sampling.n for each in requests)
        return Visit(self, order, ask, sequences, chain)

    def replace_order(self, order: Order | None) -> None:
        """Take another policy's order of all replicas in place of the best by prediction; None: the latter."""
        self.order = order
        self.directory.ranks = RANKS if order is None else sys.maxsize
        self.stirred()

    def stirred(self) -> None:
        """What is known of replicas is another now."""
        self._look = None

    def _seen(self, request: Request) -> Look:
        now, look = self.clock(), self._look
        if look is None or not look.is_of(request, now):
            chain = Chain(request)
            look = self._look = Look(request, now, chain, self._ask([request], chain))
        return look

    def _ranked(self, request: Request) -> list[Predicted]:
        look = self._seen(request)
        if look.ranked is None:
            look.ranked = self.directory.ranked(look.at, look.ask, late=True)
        return look.ranked

    def _ask(self, requests: Sequence[Request], chain: Chain, last: Collection[str] = (), numerics: str = "") -> Ask:
        """`chain`: of the longest."""
        longest = chain.request
        begun = max(map(least, requests))
        return Ask(
            sum(len(each.prompt_ids) + sum(map(len, each.output_ids)) for each in requests),
            self._cached(chain),
            self.stored.tokens(chain),
            context=begun,
            last=[*(self.members[name].row for name in last), *self._cut_short(requests, begun)],
            numerics=self._classes.get(numerics) if numerics else None,
            output_tokens=1 if longest.pooling is not None else longest.sampling.max_tokens,
        )

    def _cut_short(self, requests: Sequence[Request], begun: int) -> list[int]:
        """Replicas that would end one of them before it has what it may come to. They come after all others.

        What may go on until the longest context is full seldom does: it is as good on any that holds an answer of
        usual length.
        """
        longest = self.contexts.longest
        if self.contexts.least == longest:
            return []
        wanted = max(map(whole, requests))
        rows = self.contexts.shorter(wanted if wanted < longest else min(begun + USUAL_TOKENS, longest))
        return [*rows, *rows]  # even after those that are last for another reason

    def _of_others(self, weights: str) -> list[int]:
        """Replicas that have other weights, as they were last heard to have."""
        return [member.row for member in self.members.values() if member.load.weights_contents != weights]

    def _cached(self, chain: Chain) -> dict[int, int]:
        return {row: depth * PIECE_TOKENS for row, depth in self.prefixes.depths(chain).items()}

    def has_room(self, request: Request, *, late: bool, waited_s: float = 0.0) -> bool:
        """Whether a replica would keep the objectives, or, where there are none or if `late`, begin it at once.

        waited_s  for so long the request has waited: of the time to its first token
        """
        slo = self.slo
        if (late or slo is None) and self._begins(request):
            return True
        if slo is None:
            return False
        return any(each.strain <= 1 and each.ttft_s + waited_s <= slo.ttft_s for each in self._ranked(request))

    def fits(self, request: Request) -> bool:
        """Whether there is a replica whose context holds it, or never was one: then any may say so."""
        return not self.contexts.longest < least(request) <= self.longest_context

    def least_s(self, request: Request) -> float:
        """Seconds to its first token at least, were the best replica empty; infinite: none would keep the objectives.

        Of those whose context holds it; 0 without objectives.
        """
        if self.slo is None:
            return 0.0
        return self._hopes.now().least_s(self._seen(request).ask, self.slo)

    def is_hopeless(self, request: Request, waited_s: float) -> bool:
        """Of one that has no room now: whether it never will have, since those that would do are empty already."""
        if self.slo is None:
            return False
        rows = self._hopes.now().rows(self._seen(request).ask, self.slo, self.slo.ttft_s - waited_s)
        return not any(self.directory.carried(row) > 0 for row in rows)

    def idle(self) -> Iterator[Idle]:
        """What those that may be chosen would do if they had nothing to do."""
        for member in self.members.values():
            if not member.load.draining:
                speed = self._speeds.of(member.pool, member.profile)
                yield idle(member.row, speed, self.directory.off(member.row), member.profile.model.max_model_len)

    def is_crowded_out(self, request: Request) -> bool:
        """Whether other ingresses have most of the fleet, and a replica would begin the request after another one.

        They hear sooner than this one of room that their own requests leave, and would have it ever after.
        """
        return self.directory.own_share() < 0.5 and self._begins(request, ahead=1)

    def _begins(self, request: Request, ahead: int = 0) -> bool:
        """Whether a replica would begin it at once, of those whose contexts hold it."""
        short = self.contexts.shorter(least(request))
        for row in short:
            self.directory.set_usable(row, usable=False)
        try:
            return self.directory.has_room(self.clock(), len(request.prompt_ids), ahead)
        finally:
            for row in short:  # all of them may be chosen, or they would not be there
                self.directory.set_usable(row, usable=True)

    def soonest(self, request: Request) -> float | None:
        """Seconds to its first token at least, as predicted; None: no prediction has proved itself everywhere.

        What comes by the deadline is of use, if it is not all.
        """
        ranked = self._ranked(request)
        if not ranked or any(self.members[self._by_row[each.replica]].observed < PROVEN for each in ranked):
            return None
        return min(each.ttft_s for each in ranked)

    def status(self, suspects: Collection[str]) -> tuple[ReplicaStatus, ...]:
        now = self.clock()
        return tuple(
            ReplicaStatus(
                member.pool,
                name,
                "draining" if member.load.draining else "suspect" if name in suspects else "ready",
                member.profile,
                member.load,
                max(0.0, now - member.heard),
                *self.directory.off(member.row),
            )
            for name, member in sorted(self.members.items())
        )


def _is_older(load: ReplicaLoad, than: ReplicaLoad) -> bool:
    """Of one replica. Its steps and the versions of its weights only grow, and one that drains does so to its end."""
    return (
        load.steps < than.steps or load.weights_version < than.weights_version or (than.draining and not load.draining)
    )
