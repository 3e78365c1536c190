"""Scheduler that decides how many tokens of which sequence the next step computes. Pure: no tensors, no clock, no
threads.

There is no prefill phase and no decode phase. Every sequence has a counter of computed tokens that catches up with
its length under one token budget. A prompt computed in chunks, a prefix cache hit, a resumed or preempted sequence and
a decode differ only in how far the counter has to go.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from ..execution.step_plan import PlanItem, StepPlan
from ..kv.blocks import Allocation, BlockPool, blocks_for
from ..types import BLOCK_TOKENS, ReplicaLoad
from .drafting.draft_counts import DraftCounts
from .drafting.drafter_registry import Drafter
from .kv_reuse.prefix_connector import PrefixConnector
from .kv_reuse.swap_planner import SwapPlanner
from .sequence import Sequence, SequenceState

MAX_DISPLACEMENTS = 4  # a sequence that was displaced by higher priorities this many times is not displaced again


class Scheduler:
    """Continuous batching of sequences over one pool of KV blocks.

    A request never waits for one of lower priority: where places in the batch, KV blocks or tokens of a step are short,
    the least important sequences of lower priority give theirs up. A sequence is displaced like that at most
    MAX_DISPLACEMENTS times, so that it finishes in the end and its computation is not repeated for ever.

    The pool must hold the longest sequence that is ever added: then the sequence that ranks first can always advance,
    if need be alone, and no set of sequences can block each other.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_drafts: int = 0,
        drafter: Drafter | None = None,
        swap: SwapPlanner | None = None,
        prefixes: PrefixConnector | None = None,
        lanes: int = 1,
    ) -> None:
        """Create a scheduler without sequences.

        max_batch_tokens  most tokens that one step computes
        max_running       most sequences in the running batch
        max_drafts        draft tokens that a step tries for one sequence beyond its last token; 0: no speculation
        drafter           proposes these tokens; may be None where there is no speculation
        swap              host memory for the KV of preempted sequences; None: their KV is not copied to the host
        prefixes          prefix cache that is shared beyond this replica; None: nothing is shared
        lanes             steps in flight that the sequences are divided among, one for each pipeline stage. With
                          several, a sequence must have its next token before it joins another step; only chunks of a
                          prompt follow each other closely. 1: the next step may take every sequence, whatever is in
                          flight
        """
        assert max_batch_tokens >= max_running >= 1
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []
        self.swap = SwapPlanner() if swap is None else swap
        self.prefixes = PrefixConnector() if prefixes is None else prefixes
        self.lanes = lanes
        self.max_drafts = max_drafts
        self.drafter = drafter
        self.queried_tokens = 0  # prompt tokens that were looked up in the prefix cache
        self.draft_counts = DraftCounts()
        self.admitted: list[Sequence] = []  # sequences with their first place in a batch, until the engine takes them
        self.weights = 0  # version of the weights that new sequences begin with
        self._planned = 0  # version of the weights of the last plan
        self._mixed = False  # whether some sequences may be on older weights
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
        """Remove a finished or cancelled sequence, running or waiting, and free its blocks."""
        self.prefixes.cancel(sequence)
        (self.running if sequence.state is SequenceState.RUNNING else self.waiting).remove(sequence)
        sequence.state = SequenceState.FINISHED
        del self._by_id[sequence.id]
        if self.drafter is not None:
            self.drafter.forget(sequence.id)
        self._free(sequence)
        self.swap.drop(sequence)
        if not self:
            self.pool.check_idle()
            self.swap.pool.check_idle()

    def forget(self, owner: str | None) -> None:
        """Drop the cached prefixes of one owner, or of all (None), here and in the store; sequences keep the blocks
        they hold.
        """
        self.pool.forget_prefixes(owner)
        self.prefixes.forget(owner)

    @property
    def outdated(self) -> int:
        """Number of sequences that finish on weights older than the newest."""
        return sum(sequence.outdated for sequence in self.sequences)

    def renew(self, version: int, begun: Collection[Sequence]) -> None:
        """Let sequences begin with the given version of the weights from now on.

        KV that was computed with other weights is no longer found, here or in the store: see `PrefixConnector.renew`.

        version  must be higher than the present one
        begun    sequences that have begun, and that finish on the weights which they began with
        """
        assert version > self.weights, "versions count"
        self.weights, self._mixed = version, True
        self.pool.forget_prefixes()
        self.prefixes.renew()
        for sequence in self.sequences:
            if sequence in begun:
                sequence.outdated = True
                continue
            self.prefixes.cancel(sequence)
            self.swap.drop(sequence)
            sequence.store_lookup_done, sequence.values, sequence.absent = False, (), None
            sequence.weights = version

    def hold(self, sequence: Sequence, wanted: bool) -> None:
        """Take a sequence out of the batch (`wanted`), or let it join again. While it is held, as its client reads
        slowly, it keeps no place in the batch and no KV blocks on the device or on the host.
        """
        sequence.held = wanted
        if wanted:
            self.prefixes.cancel(sequence)
            self.swap.drop(sequence)
        if wanted and sequence.state is SequenceState.RUNNING:
            self._suspend(sequence)

    def plan(self) -> StepPlan:
        """Return the plan of the next step. Grows allocations, admits and preempts sequences, and advances no counter.

        A step in flight may still write to blocks that this frees. That is safe: steps are computed in the order of
        their launch, so whichever sequence gets such a block writes to it later.
        """
        for sequence in self.swap.arrived():
            sequence.num_computed = sequence.num_launched
            self._publish(sequence)
        self.prefixes.begin(self.waiting, self.pool)
        planned: dict[int, PlanItem] = {}
        preemptions = self.num_preemptions
        self._planned = self._turn()
        budget = self._plan_running(planned, self.max_batch_tokens)
        if self.num_preemptions == preemptions:  # admit only if no running sequence had to be preempted for blocks
            self._plan_waiting(planned, budget)
        items = tuple(sorted(planned.values(), key=lambda item: len(item.token_ids) > 1))
        out, into = self.swap.copies()
        return StepPlan(items, out + self.prefixes.copies(), into, self._planned)

    def _turn(self) -> int:
        """Version of the weights that the next plan is computed with. While some sequences finish on older weights,
        plans for the different versions alternate.
        """
        if not self._mixed:
            return self.weights
        self._mixed = self.outdated > 0
        others = {sequence.weights for sequence in self.sequences} - {self._planned}
        return min(others) if others else self._planned if self._mixed else self.weights

    def not_copied(self) -> None:
        """Handle that the KV copies of the last plan failed: what they were to save is computed again."""
        self.prefixes.not_copied()
        for sequence in self.swap.failed():
            sequence.cached_tokens = None
            self._suspend(sequence)

    def launched(self, plan: StepPlan) -> tuple[Allocation, ...]:
        """Record that a plan is being computed, so that the next plan may continue where this one ends.

        Returns the allocation that each item's KV is written to, in the plan's order.
        """
        allocations = []
        by_id, drafting = self._by_id, self.max_drafts > 0
        for item in plan.items:
            sequence = by_id[item.sequence_id]
            sequence.num_launched = item.start + len(item.token_ids)
            if (spec := item.sample) is not None:
                sequence.ahead += 1
                sequence.next_step_depends_on_token = (
                    not spec.plain or (drafting and sequence.may_draft) or self.lanes > 1
                )
            assert sequence.allocation is not None
            allocations.append(sequence.allocation)
        return tuple(allocations)

    def landed(self, plan: StepPlan) -> None:
        """Record that a plan is no longer in flight. Some of its sequences may have been removed in the meantime."""
        for item in plan.items:
            sequence = self._by_id.get(item.sequence_id)
            if sequence is not None and item.sample is not None:
                sequence.ahead -= 1

    def undo_launch(self, plan: StepPlan, allocations: Iterable[Allocation]) -> None:
        """Record that a step ended without a result, so that its tokens are computed again."""
        self.landed(plan)
        for item, allocation in zip(plan.items, allocations, strict=True):
            sequence = self._by_id.get(item.sequence_id)
            if sequence is not None and sequence.allocation is allocation:
                sequence.num_launched = item.start

    def commit(self, items: Iterable[tuple[PlanItem, Allocation]], accepted: Mapping[int, int] | None = None) -> None:
        """Count the tokens of these plan items as computed, and let other sequences find the blocks that they fill.

        A sequence is skipped if it ended while the step ran, or if it was preempted and has another allocation by now.

        accepted  sequence id -> how many of its draft tokens are right. The other drafts count as never computed, and
                  the KV that they left in the sequence's own blocks is overwritten
        """
        by_id = self._by_id
        for item, allocation in items:
            sequence = by_id.get(item.sequence_id)
            if sequence is None or sequence.allocation is not allocation:
                continue
            sequence.num_computed = end = item.start + len(item.token_ids)
            if item.verified:
                right = (accepted or {}).get(item.sequence_id, 0)
                self.draft_counts.add(len(item.verified), right)
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
        """Return whether the item's sequence still has the blocks that the item was planned for."""
        sequence = self._by_id.get(item.sequence_id)
        return sequence is not None and sequence.allocation is allocation

    def step_back(self, item: PlanItem) -> None:
        """Undo the last computed token of an item whose step sampled nothing, so that a later step computes it again
        and samples. Does nothing if all of the item's tokens are to be computed again already.
        """
        sequence = self._by_id[item.sequence_id]
        if sequence.num_launched == sequence.num_computed == item.end:
            sequence.num_launched = sequence.num_computed = item.end - 1

    def sequence(self, sequence_id: int) -> Sequence:
        return self._by_id[sequence_id]

    def forget_counts(self) -> None:
        """Count looked up tokens, drafts and preemptions from 0 again."""
        self.queried_tokens = self.swap.swapped = self.swap.recomputed = 0
        self.draft_counts = DraftCounts()

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            running=self.num_running,
            waiting=len(self.waiting),
            swapped=sum(sequence.host_copy is not None for sequence in self.waiting),
            queued_prefill_tokens=sum(n for s in self.sequences if (n := s.remaining_to_compute) > 1 and not s.held),
            kv_blocks_free=self.pool.available,
            kv_blocks_total=self.pool.total,
            max_running=self.max_running,
            queried_tokens=self.queried_tokens,
            drafted_tokens=self.draft_counts.drafted,
            accepted_tokens=self.draft_counts.num_accepted,
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
            if count == 0 or sequence.paused or sequence.awaits_token:
                continue
            if sequence.state is SequenceState.RUNNING and (
                sequence.has_capacity(count) or self._free_blocks(sequence, count, planned)
            ):
                drafts = self._drafts(sequence, budget - count, others) if self.max_drafts else ()
                planned[sequence.id] = sequence.item(count, drafts)
                budget -= count + len(drafts)
        return budget

    def _share(self, sequences: int) -> int:
        """Most of the given number of sequences that one step may take, so that the other steps in flight may have as
        many.
        """
        return -(-sequences // self.lanes)

    def _drafts(self, sequence: Sequence, budget: int, others: int) -> tuple[int, ...]:
        """Draft tokens to try after the sequence's last token. They take neither tokens of the step (`budget`) nor free
        blocks that the `others`, which are still to be planned, may want: one token and one block for each of those.
        """
        if not sequence.may_draft or sequence.remaining != 1:
            return ()
        budget, blocks = budget - others, self.pool.available - others
        assert not sequence.ahead, "a sequence that has drafts waits for its tokens"
        assert self.drafter is not None, "there is speculation"
        assert sequence.allocation is not None
        capacity = (len(sequence.allocation.blocks) + max(0, blocks)) * BLOCK_TOKENS - sequence.num_tokens
        # The token that follows the last draft needs a place within the limit, too.
        max_drafts = min(self.max_drafts, budget, capacity, sequence.limit - sequence.num_tokens - 1)
        drafts = self.drafter.draft(sequence, max_drafts) if max_drafts > 0 else ()
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
            if (
                sequence.state is SequenceState.WAITING_KV
                or sequence.blocked
                or sequence.paused
                or sequence.awaits_token
            ):
                continue
            if sequence.weights != self._planned:
                continue
            if full or not self._fits(sequence):
                budget = self._displace(sequence, planned, budget, share)
                if not budget:
                    return  # sequences of lower rank must not overtake this one for ever
            if self.swap.swaps_out and sequence.host_copy is not None:
                return  # one plan copies KV either to the host or back, so the next plan brings this sequence's KV
            if count := self._admit(sequence, budget):
                planned[sequence.id] = sequence.item(count)
                budget -= count

    def _fits(self, sequence: Sequence) -> bool:
        return self._missing_blocks(sequence) <= 0

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Number of blocks that the pool lacks for all tokens of a waiting sequence and the next one; 0 or less: it
        fits.

        All of its tokens count, since admitting a sequence by its first chunk alone would only cause preemption.
        """
        hashes = sequence.reusable_hashes()
        wanted = blocks_for(min(sequence.num_tokens + 1, sequence.limit)) - self.pool.cached_prefix(hashes)
        return wanted - self.pool.headroom(hashes)

    def _displace(self, sequence: Sequence, planned: dict[int, PlanItem], budget: int, share: int) -> int:
        """Preempt sequences of lower priority, or take their tokens of this step, so that a waiting sequence can begin.

        Returns the tokens of the step that the sequence may have; 0: it cannot begin. No sequence loses anything unless
        that lets this one begin.
        """
        priority = sequence.request.priority
        lesser = sorted((s for s in self.running if s.request.priority < priority), key=attrgetter("rank"))
        victims = None if self.swap.swaps_in else self._victims(sequence, lesser)
        if victims is None:
            return 0
        budget += sum(_planned_tokens(planned.get(victim.id)) for victim in victims)
        going = {victim.id for victim in victims}
        staying = [one for one in lesser if one.id in planned and one.id not in going]
        while budget == 0 or len(planned.keys() - going) >= share:
            # A sequence that yields its part of this step stays in the batch, and goes on in a later step.
            yielding = [one for one in staying if budget or len(planned[one.id].token_ids) > 1]
            if not yielding:
                return 0
            staying.remove(yielding[-1])
            going.add(yielding[-1].id)
            budget += _planned_tokens(planned[yielding[-1].id])
        for victim in victims:
            victim.displaced += 1
            self._preempt(victim)
        for number in going:
            planned.pop(number, None)
        return budget

    def _victims(self, sequence: Sequence, lesser: Iterable[Sequence]) -> list[Sequence] | None:
        """Running sequences to preempt, the least important first, so that the waiting one has a place in the batch and
        enough KV blocks; None: preempting would not help.
        """
        candidates = [one for one in lesser if one.displaced < MAX_DISPLACEMENTS]
        lacks, victims = self._missing_blocks(sequence), list[Sequence]()
        if lacks > sum(len(one.allocation.blocks) for one in candidates if one.allocation is not None):
            return None  # a quick answer in the most frequent case
        release = self.pool.release(sequence.reusable_hashes())
        while self.num_running - len(victims) >= self.max_running or lacks > 0:
            if not candidates:
                return None
            victims.append(victim := candidates.pop())
            assert victim.allocation is not None
            lacks -= release(victim.allocation.blocks)
        return victims

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Move a waiting sequence to the running batch and return how many of its tokens this step computes; 0 while
        its KV is copied back from the host.
        """
        allocation = self.pool.open(sequence.reusable_hashes())
        sequence.allocation = allocation
        sequence.num_computed = sequence.num_launched = allocation.prefix_blocks * BLOCK_TOKENS
        count = 0 if self.swap.resume(sequence, allocation) else min(sequence.remaining, budget)
        if sequence.cached_tokens is None:
            self.admitted.append(sequence)
            if (
                sequence.leader is None and sequence.may_reuse and not sequence.is_probe
            ):  # choices of one prompt are counted as one
                self.queried_tokens += sequence.num_prompt
            sequence.cached_tokens = min(sequence.num_launched, sequence.num_prompt)
        grown = allocation.grow(sequence.num_launched + count)
        assert grown, "admission has checked the room"
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = SequenceState.RUNNING
        return count

    def _free_blocks(self, sequence: Sequence, count: int, planned: dict[int, PlanItem]) -> bool:
        assert sequence.allocation is not None
        while not sequence.allocation.grow(sequence.num_launched + count):
            victims = [s for s in self.running if s.id not in planned and s.rank > sequence.rank]
            if not victims:
                return False  # the sequence keeps its blocks and waits for a later step
            self._preempt(max(victims, key=lambda s: s.rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        self.swap.preempt(sequence)
        self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        """Move a running sequence back to waiting. Its blocks can still be found by their hash until the pool needs
        them.
        """
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_computed = sequence.num_launched = 0
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def _free(self, sequence: Sequence) -> None:
        if sequence.allocation is not None:
            sequence.allocation.close()
            sequence.allocation = None


def _planned_tokens(item: PlanItem | None) -> int:
    """Tokens of the step that a plan item has, drafts included; 0 for None."""
    return 0 if item is None else len(item.token_ids)
