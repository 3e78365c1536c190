from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from motley.replicas.kv.blocks import Allocation, BlockPool, blocks_for, extend_hashes
from motley.replicas.kv.kv_event_log import KvEventLog
from motley.replicas.types import BLOCK_TOKENS

TOTAL = 12


def hashes_of(token_ids: list[int], salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, salt, token_ids)
    return hashes


class PoolMachine(RuleBasedStateMachine):
    """Any order of opening, growing, publishing and closing keeps every block in exactly one state."""

    open_allocations = Bundle("open_allocations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.pool.log = KvEventLog()
        self.told: dict[bytes, str] = {}  # what a listener knows: hash -> owner
        self.held: list[Allocation] = []

    @rule(target=open_allocations, family=st.integers(0, 2), length=st.integers(0, TOTAL * BLOCK_TOKENS))
    def open(self, family: int, length: int) -> tuple[Allocation, list[bytes]]:
        hashes = hashes_of([family] * length)
        headroom, held = self.pool.headroom(hashes), self.pool.cached_prefix(hashes)
        allocation = self.pool.open(hashes)
        assert allocation.prefix_blocks == held
        assert self.pool.available == headroom
        self.held.append(allocation)
        return allocation, hashes

    @rule(pair=open_allocations, tokens=st.integers(0, TOTAL * BLOCK_TOKENS))
    def grow(self, pair: tuple[Allocation, list[bytes]], tokens: int) -> None:
        allocation, _ = pair
        before, available = len(allocation.blocks), self.pool.available
        wanted = max(blocks_for(tokens) - before, 0)
        assert allocation.grow(tokens) == (wanted <= available)
        assert len(allocation.blocks) == before + (wanted if wanted <= available else 0)

    @rule(pair=open_allocations, computed=st.integers(0, TOTAL * BLOCK_TOKENS))
    def publish(self, pair: tuple[Allocation, list[bytes]], computed: int) -> None:
        allocation, hashes = pair
        computed = min(computed, len(allocation.blocks) * BLOCK_TOKENS)
        owner = hashes[0].hex() if hashes else ""
        new = allocation.publish(hashes, computed, owner)
        assert self.pool.log is not None
        self.pool.log.stored(owner, hashes, new, lambda start, stop: (1,) * (stop - start))

    @rule(pair=consumes(open_allocations))
    def close(self, pair: tuple[Allocation, list[bytes]]) -> None:
        pair[0].close()
        self.held.remove(pair[0])

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()

    @rule(family=st.integers(0, 2))
    def forget_one(self, family: int) -> None:
        hashes = hashes_of([family] * TOTAL * BLOCK_TOKENS)
        others = [hashes_of([other] * TOTAL * BLOCK_TOKENS) for other in range(3) if other != family]
        held = [self.pool.cached_prefix(other) for other in others]
        self.pool.forget_prefixes(hashes[0].hex())
        assert self.pool.cached_prefix(hashes) == 0
        assert [self.pool.cached_prefix(other) for other in others] == held

    @invariant()
    def listeners_know_the_index(self) -> None:
        assert self.pool.log is not None
        for owner, event in self.pool.log.take():
            if event.token_ids:
                assert event.hash not in self.told, "told of twice"
                self.told[event.hash] = owner
            else:
                assert self.told.pop(event.hash) == owner
        assert self.told == self.pool._owner_of
        assert self.told.keys() == self.pool._block_of.keys()

    @invariant()
    def conserved(self) -> None:
        self.pool.check(idle=not self.held)
        if not self.held:
            self.pool.check_idle()
        private = [block for allocation in self.held for block in allocation.blocks[allocation.prefix_blocks :]]
        assert len(private) == len(set(private)), "two sequences write one block"


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def fill(pool: BlockPool, token_ids: list[int], salt: bytes = b"") -> list[int]:
    """Compute and publish a sequence, and close it; returns the blocks it had."""
    hashes = hashes_of(token_ids, salt)
    with pool.open(hashes) as allocation:
        assert allocation.grow(len(token_ids))
        allocation.publish(hashes, len(token_ids))
        return list(allocation.blocks)


def test_a_prefix_is_found_again_block_by_block() -> None:
    pool = BlockPool(8)
    first = fill(pool, list(range(40)))
    with pool.open(hashes_of([*range(32), 99] + [0] * 20)) as allocation:
        assert allocation.blocks == first[:2]
    assert (pool.hit_tokens, pool.queried_tokens) == (32, 32 + 48)


def test_salts_separate_tenants() -> None:
    pool = BlockPool(8)
    fill(pool, list(range(32)), b"alice")
    assert pool.cached_prefix(hashes_of(list(range(32)), b"bob")) == 0
    assert pool.cached_prefix(hashes_of(list(range(32)), b"alice")) == 2


def test_the_end_of_the_oldest_chain_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = [1] * 32, [2] * 32
    fill(pool, old)
    fill(pool, new)
    with pool.open([]) as allocation:
        assert allocation.grow(1)
        assert pool.cached_prefix(hashes_of(old)) == 1
        assert pool.cached_prefix(hashes_of(new)) == 2


def test_growing_is_all_or_nothing() -> None:
    pool = BlockPool(2)
    with pool.open([]) as allocation:
        assert not allocation.grow(3 * BLOCK_TOKENS)
        assert allocation.blocks == []
        assert allocation.grow(2 * BLOCK_TOKENS)


def test_a_table_is_made_anew_only_where_there_are_more_blocks() -> None:
    pool = BlockPool(8)
    with pool.open([]) as allocation:
        assert allocation.grow(3 * BLOCK_TOKENS)
        first = allocation.table(BLOCK_TOKENS + 1)
        assert first == tuple(allocation.blocks[:2])
        assert allocation.table(2 * BLOCK_TOKENS) is first
        assert allocation.table(3 * BLOCK_TOKENS) == tuple(allocation.blocks)
        assert allocation.table(1) == tuple(allocation.blocks[:1]), "drafts that were wrong take blocks for a step"
        assert allocation.grow(4 * BLOCK_TOKENS)
        assert allocation.table(4 * BLOCK_TOKENS) == tuple(allocation.blocks)


def test_reuse_can_be_switched_off() -> None:
    pool = BlockPool(4, reuse_prefixes=False)
    fill(pool, [1] * 32)
    assert pool.cached == 0
    assert pool.cached_prefix(hashes_of([1] * 32)) == 0


def test_a_leak_is_noticed() -> None:
    pool = BlockPool(2)
    pool.open([]).grow(1)
    with pytest.raises(AssertionError, match="still in use"):
        pool.check(idle=True)
    with pytest.raises(AssertionError, match="1 blocks still in use"):
        pool.check_idle()


def test_a_block_is_found_only_behind_all_blocks_before_it() -> None:
    one, other = (hashes_of([1] * BLOCK_TOKENS + [middle] * BLOCK_TOKENS + [3] * BLOCK_TOKENS) for middle in (2, 4))
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_a_block_that_was_found_is_evicted_for_nobody() -> None:
    pool = BlockPool(3)
    fill(pool, [1] * 32)
    with pool.open(hashes_of([1] * 32)) as found, pool.open([]) as other:
        assert len(found.blocks) == 2
        assert pool.available == 1
        assert other.grow(BLOCK_TOKENS)
        assert not other.grow(2 * BLOCK_TOKENS)
        pool.check()
