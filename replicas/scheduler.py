"""Who computes how many tokens in the next step. Pure: no tensors, no clock, no threads.

There is no prefill and no decode phase. Every sequence has a counter of computed tokens that catches up with
its length under one token budget; a prompt in chunks, a prefix hit, a resumed or preempted sequence and a
decode differ only in how far the counter has to go.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from .blocks import Allocation, BlockPool, blocks_for
from .plan import PlanItem, StepPlan
from .prefix.prefixes import Prefixes
from .protocol import BLOCK_TOKENS, ReplicaLoad
from .sequence import Sequence, State
from .speculation import Ngrams
from .swap import Swap

MAX_DISPLACED = 4  # a sequence that has lost its place to higher priorities so often keeps it to its end


class Scheduler:
    """Continuous batching over one block pool.

    A request of a higher priority waits for no lower one: where places, KV or the tokens of a step are taken, the least
    important of lower priority give theirs up. Each does so MAX_DISPLACED times at most, so that what it has computed
    is not in vain for ever.

    The pool must hold the longest sequence that is ever added: then the first in rank can always advance,
    if need be alone, and no set of sequences can block each other.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_drafts: int = 0,
        swap: Swap | None = None,
        prefixes: Prefixes | None = None,
        lanes: int = 1,
    ) -> None:
        """max_drafts  tokens of a sequence that are tried in a step beyond its last; 0: no speculation
        swap        where KV of preempted sequences may go; None: nowhere
        prefixes    what is shared beyond this replica; None: nothing
        lanes       steps on their way that sequences are divided among, one for each stage of a pipeline: a sequence
                    has its next token before it is in another, and only pieces of a prompt follow each other closely.
                    1: whatever is on its way, the next step may take all
        """
        assert max_batch_tokens >= max_running >= 1
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []
        self.swap = Swap() if swap is None else swap
        self.prefixes = Prefixes() if prefixes is None else prefixes
        self.lanes = lanes
        self.max_drafts = max_drafts
        self.queried_tokens = 0  # of prompts, looked for in the cache
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.weights = 0  # version that sequences begin with
        self._planned = 0  # version of the last plan
        self._mixed = False  # some sequences may be of an older version
        self._ngrams: dict[int, Ngrams] = {}  # by sequence id
        self._by_id: dict[int, Sequence] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_preemptions(self) -> int:
        return self.swap.swapped + self.swap.recomputed

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        assert blocks_for(sequence.limit) <= self.pool.total, "the pool holds the longest sequence"
        sequence.weights = self.weights
        self._by_id[sequence.id] = sequence
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence, wherever it is, and free its blocks."""
        self.prefixes.leave(sequence)
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        sequence.state = State.FINISHED
        del self._by_id[sequence.id]
        self._ngrams.pop(sequence.id, None)
        self._free(sequence)
        self.swap.drop(sequence)
        if not self:
            self.pool.check_idle()
            self.swap.pool.check_idle()

    def forget(self, owner: str | None) -> None:
        """Drop the cached prefixes of that owner, or all, here and in the store; sequences keep what they hold."""
        self.pool.forget_prefixes(owner)
        self.prefixes.forget(owner)

    @property
    def outdated(self) -> int:
        """Sequences that end on older weights than the newest."""
        return sum(sequence.outdated for sequence in self.sequences)

    def renew(self, version: int, begun: Collection[Sequence]) -> None:
        """Sequences begin with weights of that version from now on.

        Nothing that was computed with others is found any more, here or in the store: see `Prefixes.renew`.

        begun  those that end on what they have begun with
        """
        assert version > self.weights, "versions count"
        self.weights, self._mixed = version, True
        self.pool.forget_prefixes()
        self.prefixes.renew()
        for sequence in self.sequences:
            if sequence in begun:
                sequence.outdated = True
                continue
            self.prefixes.leave(sequence)
            self.swap.drop(sequence)
            sequence.sought, sequence.values, sequence.absent = False, (), None
            sequence.weights = version

    def hold(self, sequence: Sequence, wanted: bool) -> None:
        """Take it out of the batch, or let it come again: who reads slowly keeps no place and no blocks anywhere."""
        sequence.held = wanted
        if wanted:
            self.prefixes.leave(sequence)
            self.swap.drop(sequence)
        if wanted and sequence.state is State.RUNNING:
            self._suspend(sequence)

    def plan(self) -> StepPlan:
        """The next step. Grows allocations, admits and preempts; advances no counter.

        Blocks that it frees may still be written by a step on its way: whoever gets them writes later, as steps are
        computed in the order of their launch.
        """
        for sequence in self.swap.arrived():
            sequence.num_computed = sequence.num_launched
            self._publish(sequence)
        self.prefixes.begin(self.waiting, self.pool)
        planned: dict[int, PlanItem] = {}
        preemptions = self.num_preemptions
        self._planned = self._turn()
        budget = self._plan_running(planned, self.max_batch_tokens)
        if self.num_preemptions == preemptions:  # no room was found by force: then admit
            self._plan_waiting(planned, budget)
        items = tuple(sorted(planned.values(), key=lambda item: len(item.token_ids) > 1))
        out, into = self.swap.copies()
        return StepPlan(items, out + self.prefixes.copies(), into, self._planned)

    def _turn(self) -> int:
        """Whose plan it is: while sequences end on older weights, theirs and the others' follow each other."""
        if not self._mixed:
            return self.weights
        self._mixed = self.outdated > 0
        others = {sequence.weights for sequence in self.sequences} - {self._planned}
        return min(others) if others else self._planned if self._mixed else self.weights

    def not_copied(self) -> None:
        """The copies of the last plan failed: what they were to save is computed again."""
        self.prefixes.not_copied()
        for sequence in self.swap.failed():
            sequence.cached_tokens = None
            self._suspend(sequence)

    def launched(self, plan: StepPlan) -> tuple[Allocation, ...]:
        """The plan is being computed: the next one may go on from where it ends. Where each item's KV goes."""
        allocations = []
        by_id, drafting = self._by_id, self.max_drafts > 0
        for item in plan.items:
            sequence = by_id[item.sequence_id]
            sequence.num_launched = item.start + len(item.token_ids)
            if (spec := item.sample) is not None:
                sequence.ahead += 1
                sequence.unforeseen = not spec.plain or (drafting and sequence.may_draft) or self.lanes > 1
            assert sequence.allocation is not None
            allocations.append(sequence.allocation)
        return tuple(allocations)

    def landed(self, plan: StepPlan) -> None:
        """Nothing of the plan is on its way any more. Sequences may have gone meanwhile."""
        for item in plan.items:
            sequence = self._by_id.get(item.sequence_id)
            if sequence is not None and item.sample is not None:
                sequence.ahead -= 1

    def recalled(self, plan: StepPlan, allocations: Iterable[Allocation]) -> None:
        """It has landed without a result: its tokens are to be computed after all."""
        self.landed(plan)
        for item, allocation in zip(plan.items, allocations, strict=True):
            sequence = self._by_id.get(item.sequence_id)
            if sequence is not None and sequence.allocation is allocation:
                sequence.num_launched = item.start

    def commit(self, items: Iterable[tuple[PlanItem, Allocation]], accepted: Mapping[int, int] | None = None) -> None:
        """These tokens have been computed: their full blocks may now be found by others.

        A sequence may have ended while the step ran, or lost its place, and have another by now.

        accepted  sequence id -> how many of its drafts are right; the others count as never computed, and what they
                  left in the sequence's own blocks is written over
        """
        by_id = self._by_id
        for item, allocation in items:
            sequence = by_id.get(item.sequence_id)
            if sequence is None or sequence.allocation is not allocation:
                continue
            sequence.num_computed = end = item.start + len(item.token_ids)
            if item.verified:
                right = (accepted or {}).get(item.sequence_id, 0)
                self.drafted_tokens += len(item.verified)
                self.accepted_tokens += right
                sequence.num_computed += right - len(item.verified)
                sequence.num_launched = end = sequence.num_computed
            if allocation.publishes(end):
                self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        assert sequence.allocation is not None
        if sequence.outdated or not sequence.allocation.publishes(sequence.num_computed):
            return
        sequence.update_hashes()
        tenant = sequence.request.tenant
        new = sequence.allocation.publish(sequence.hashes, sequence.num_computed, tenant)
        if new and self.pool.log is not None:
            self.pool.log.stored(tenant, sequence.hashes, new, sequence.tokens)

    def holds(self, item: PlanItem, allocation: Allocation) -> bool:
        """Whether the item's sequence still has the blocks that the item was planned for."""
        sequence = self._by_id.get(item.sequence_id)
        return sequence is not None and sequence.allocation is allocation

    def step_back(self, item: PlanItem) -> None:
        """Its last token is to be computed again, by the step that samples; unless all of them are anyway."""
        sequence = self._by_id[item.sequence_id]
        if sequence.num_launched == sequence.num_computed == item.end:
            sequence.num_launched = sequence.num_computed = item.end - 1

    def sequence(self, sequence_id: int) -> Sequence:
        return self._by_id[sequence_id]

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            running=self.num_running,
            waiting=len(self.waiting),
            queued_prefill_tokens=sum(n for s in self.sequences if (n := s.unkept) > 1 and not s.held),
            kv_blocks_free=self.pool.available,
            kv_blocks_total=self.pool.total,
            max_running=self.max_running,
            queried_tokens=self.queried_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            preemptions_swapped=self.swap.swapped,
            preemptions_recomputed=self.swap.recomputed,
            external_queried_tokens=self.prefixes.queried_tokens,
            external_hit_tokens=self.prefixes.hit_tokens,
            weights_version=self.weights,
        )

    def _plan_running(self, planned: dict[int, PlanItem], budget: int) -> int:
        # Decodes first: a long prompt must not stall the streams beside it.
        ranked = sorted(self.running, key=attrgetter("rank"))
        wanted = [(sequence, sequence.remaining) for sequence in ranked if sequence.weights == self._planned]
        decodes, prompts = [one for one in wanted if one[1] <= 1], [one for one in wanted if one[1] > 1]
        others, share = len(wanted), self._share(len(wanted))
        for sequence, remaining in (*decodes, *prompts):
            others -= 1
            if budget == 0 or len(planned) >= share:
                break
            count = min(remaining, budget)
            if count == 0 or sequence.paused or sequence.awaiting:
                continue
            if sequence.state is State.RUNNING and (
                sequence.has_room(count) or self._make_room(sequence, count, planned)
            ):
                drafts = self._drafts(sequence, budget - count, others) if self.max_drafts else ()
                planned[sequence.id] = sequence.item(count, drafts)
                budget -= count + len(drafts)
        return budget

    def _share(self, sequences: int) -> int:
        """How many of so many a step has, that the others on their way may have as many."""
        return -(-sequences // self.lanes)

    def _drafts(self, sequence: Sequence, budget: int, others: int) -> tuple[int, ...]:
        """What is tried beside its last token, in tokens and new blocks that none of so many others may want."""
        if not sequence.may_draft or sequence.remaining != 1:
            return ()
        budget, blocks = budget - others, self.pool.available - others
        assert not sequence.ahead, "a sequence that has drafts waits for its tokens"
        ngrams = self._ngrams.setdefault(sequence.id, Ngrams())
        ngrams.extend(sequence.tokens(len(ngrams), sequence.num_tokens))
        assert sequence.allocation is not None
        room = (len(sequence.allocation.blocks) + max(0, blocks)) * BLOCK_TOKENS - sequence.num_tokens
        # The token after the last draft has a place too.
        drafts = ngrams.draft(min(self.max_drafts, budget, room, sequence.limit - sequence.num_tokens - 1))
        grown = sequence.allocation.grow(sequence.num_tokens + len(drafts))
        assert grown, "there is room for drafts"
        return drafts

    def _plan_waiting(self, planned: dict[int, PlanItem], budget: int) -> None:
        share = self._share(min(self.num_running + len(self.waiting), self.max_running))
        lowest = min((one.request.priority for one in self.running), default=0) if self.waiting else 0
        for sequence in list(self.waiting):
            full = budget == 0 or self.num_running >= self.max_running or len(planned) >= share
            if full and sequence.request.priority <= lowest:
                return
            if sequence.state is State.WAITING_KV or sequence.blocked or sequence.paused or sequence.awaiting:
                continue
            if sequence.weights != self._planned:
                continue
            if full or not self._fits(sequence):
                budget = self._displace(sequence, planned, budget, share)
                if not budget:
                    return  # those behind must not overtake for ever
            if self.swap.leaves and sequence.host_copy is not None:
                return  # a plan copies to the host or back: its own comes with the next one
            if count := self._admit(sequence, budget):
                planned[sequence.id] = sequence.item(count)
                budget -= count

    def _fits(self, sequence: Sequence) -> bool:
        return self._lacks(sequence) <= 0

    def _lacks(self, sequence: Sequence) -> int:
        """Blocks that it would have to be given, for all its tokens and the next, beyond those that there are.

        Admitting by its first chunk alone would only cause preemption.
        """
        hashes = sequence.reusable_hashes()
        wanted = blocks_for(min(sequence.num_tokens + 1, sequence.limit)) - self.pool.cached_prefix(hashes)
        return wanted - self.pool.headroom(hashes)

    def _displace(self, sequence: Sequence, planned: dict[int, PlanItem], budget: int, share: int) -> int:
        """Take from those of a lower priority what it needs to begin: tokens of the step that it may have; 0: none.

        Nobody loses anything unless that is enough.
        """
        priority = sequence.request.priority
        lesser = sorted((s for s in self.running if s.request.priority < priority), key=attrgetter("rank"))
        victims = None if self.swap.comes else self._victims(sequence, lesser)
        if victims is None:
            return 0
        budget += sum(_taken(planned.get(victim.id)) for victim in victims)
        going = {victim.id for victim in victims}
        staying = [one for one in lesser if one.id in planned and one.id not in going]
        while budget == 0 or len(planned.keys() - going) >= share:
            # Who yields its part of the step keeps its place, and goes on with a later one.
            yielding = [one for one in staying if budget or len(planned[one.id].token_ids) > 1]
            if not yielding:
                return 0
            staying.remove(yielding[-1])
            going.add(yielding[-1].id)
            budget += _taken(planned[yielding[-1].id])
        for victim in victims:
            victim.displaced += 1
            self._preempt(victim)
        for number in going:
            planned.pop(number, None)
        return budget

    def _victims(self, sequence: Sequence, lesser: Iterable[Sequence]) -> list[Sequence] | None:
        """Who has to go, the least important first, that it has a place and room; None: it would not help."""
        candidates = [one for one in lesser if one.displaced < MAX_DISPLACED]
        lacks, victims = self._lacks(sequence), list[Sequence]()
        if lacks > sum(len(one.allocation.blocks) for one in candidates if one.allocation is not None):
            return None  # soon told, in the most frequent case
        release = self.pool.release(sequence.reusable_hashes())
        while self.num_running - len(victims) >= self.max_running or lacks > 0:
            if not candidates:
                return None
            victims.append(victim := candidates.pop())
            assert victim.allocation is not None
            lacks -= release(victim.allocation.blocks)
        return victims

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """How many of its tokens this step computes; none while its KV comes from the host."""
        allocation = self.pool.open(sequence.reusable_hashes())
        sequence.allocation = allocation
        sequence.num_computed = sequence.num_launched = allocation.prefix_blocks * BLOCK_TOKENS
        count = 0 if self.swap.resume(sequence, allocation) else min(sequence.remaining, budget)
        if sequence.cached_tokens is None:
            if sequence.leader is None and sequence.may_reuse:  # choices of one prompt are counted as one
                self.queried_tokens += sequence.num_prompt
            sequence.cached_tokens = min(sequence.num_launched, sequence.num_prompt)
        grown = allocation.grow(sequence.num_launched + count)
        assert grown, "admission has checked the room"
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = State.RUNNING
        return count

    def _make_room(self, sequence: Sequence, count: int, planned: dict[int, PlanItem]) -> bool:
        assert sequence.allocation is not None
        while not sequence.allocation.grow(sequence.num_launched + count):
            victims = [s for s in self.running if s.id not in planned and s.rank > sequence.rank]
            if not victims:
                return False  # it keeps what it has and waits for a step
            self._preempt(max(victims, key=lambda s: s.rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.swap.preempt(sequence)
        self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        """Back to waiting; its blocks stay findable for as long as nobody needs the room."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_computed = sequence.num_launched = 0
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def _free(self, sequence: Sequence) -> None:
        if sequence.allocation is not None:
            sequence.allocation.close()
            sequence.allocation = None


def _taken(item: PlanItem | None) -> int:
    """Tokens of the step that it has, drafts included."""
    return 0 if item is None else len(item.token_ids)
