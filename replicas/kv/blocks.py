"""Pool of paged KV blocks, and the index by which their prefixes are found. Pure bookkeeping: no tensors, no device.

A block is in exactly one of three states, and their sum is asserted when idle:

    free      belongs to no sequence, and holds nothing that could be found
    in use    referenced by one or more sequences
    cached    referenced by no sequence, found by its hash, evicted least recently used first
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from types import TracebackType

from ..types import BLOCK_TOKENS
from .kv_event_log import KvEventLog


def root_hash(salt: bytes) -> bytes:
    """Return the start of the hash chain of one cache group: SHA-256 over its salt, so that the salt's length cannot
    run into the tokens.
    """
    return hashlib.sha256(b"motley prefix chain v1" + salt).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of one full block from the hash of the block before it: HMAC-SHA256 over the block's token ids as
    little-endian uint32, keyed by the parent's hash.
    """
    return hmac.digest(parent, struct.pack(f"<{len(token_ids)}I", *token_ids), "sha256")


def extend_hashes(hashes: list[bytes], salt: bytes, token_ids: Sequence[int]) -> None:
    """Append to `hashes` the hashes of those full blocks of `token_ids` that it lacks."""
    for block in range(len(hashes), len(token_ids) // BLOCK_TOKENS):
        parent = hashes[-1] if hashes else root_hash(salt)
        hashes.append(chain_hash(parent, token_ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]))


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """All KV blocks of one replica, and the index of cached prefixes."""

    def __init__(self, num_blocks: int, *, reuse_prefixes: bool = True) -> None:
        assert num_blocks > 0
        self.total = num_blocks
        self.reuse_prefixes = reuse_prefixes
        self.queried_tokens = 0  # prompt tokens that were looked up in the prefix index since the start
        self.hit_tokens = 0  # looked-up tokens that were found
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._owner_of: dict[bytes, str] = {}  # hash -> the tenant who owns the prefix
        self.log: KvEventLog | None = None  # records every change of the index; None: no client watches it
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Number of blocks that an allocation could take now, free or evicted."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        return len(self._evictable)

    @property
    def in_use(self) -> int:
        return self.total - self.available

    def cached_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of `hashes` are in the index, without marking them as used."""
        if not self.reuse_prefixes:
            return 0
        return sum(1 for _ in itertools.takewhile(self._block_of.__contains__, hashes))

    def listed(self, hashes: Sequence[bytes]) -> list[int] | None:
        """Return the blocks with these hashes, without marking them as used; None unless all of them are in the
        index.
        """
        blocks = [block for key in hashes if (block := self._block_of.get(key)) is not None]
        return blocks if len(blocks) == len(hashes) else None

    def open(self, hashes: Sequence[bytes]) -> Allocation:
        """Return an allocation that begins with the blocks found for the leading `hashes`."""
        blocks = [self._block_of[key] for key in hashes[: self.cached_prefix(hashes)]]
        for block in blocks:
            self._take(block)
        self.queried_tokens += len(hashes) * BLOCK_TOKENS
        self.hit_tokens += len(blocks) * BLOCK_TOKENS
        return Allocation(self, blocks)

    def headroom(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks are available to a sequence beside the blocks found for its leading `hashes`."""
        held = self.cached_prefix(hashes)
        return self.available - sum(self._block_of[key] in self._evictable for key in hashes[:held])

    def release(self, hashes: Sequence[bytes]) -> Callable[[Sequence[int]], int]:
        """Return a function that counts the blocks which become available as one sequence after another gives up its
        blocks.

        The function changes nothing in the pool. A block counts once its last holder has given it up. Blocks that are
        found for `hashes` do not count, since the sequence that the room is for begins with them.
        """
        reused = {self._block_of[key] for key in hashes[: self.cached_prefix(hashes)]}
        given_up: Counter[int] = Counter()

        def count(blocks: Sequence[int]) -> int:
            given_up.update(blocks)
            return sum(given_up[block] == self._references[block] and block not in reused for block in blocks)

        return count

    def forget_prefixes(self, owner: str | None = None) -> None:
        """Drop every cached prefix of one owner, or of all (None), that no sequence uses; unlist the blocks that are in
        use.
        """
        for key, block in list(self._block_of.items()):
            if owner is not None and self._owner_of[key] != owner:
                continue
            if block in self._evictable:
                del self._evictable[block]
                self._free.append(block)
            self._unlist(block)

    def check(self, *, idle: bool = False) -> None:
        """Assert conservation: every block is in exactly one state; with `idle`, no block is in use."""
        assert len(set(self._free)) == len(self._free)
        assert not set(self._free) & set(self._evictable)
        referenced = sum(count > 0 for count in self._references)
        assert len(self._free) + len(self._evictable) + referenced == self.total
        assert all(self._hash_of[self._block_of[key]] == key for key in self._block_of)
        if idle:
            assert referenced == 0, f"{referenced} blocks still in use while idle"

    def check_idle(self) -> None:
        """Assert that no block is in use. Unlike `check` it takes the same time however many blocks there are."""
        in_use = self.total - len(self._free) - len(self._evictable)
        assert in_use == 0, f"{in_use} blocks still in use while idle"

    def _take(self, block: int) -> None:
        self._references[block] += 1
        self._evictable.pop(block, None)

    def _allocate(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._unlist(block)
        assert self._references[block] == 0
        self._references[block] = 1
        return block

    def _publish(self, block: int, key: bytes, owner: str) -> bool:
        """Add a block to the index under its hash; return False if reuse is off, or if the block or the hash is listed
        already.
        """
        if not self.reuse_prefixes or block in self._hash_of or key in self._block_of:
            return False
        self._block_of[key] = block
        self._hash_of[block] = key
        self._owner_of[key] = owner
        return True

    def _unlist(self, block: int) -> None:
        key = self._hash_of.pop(block)
        del self._block_of[key]
        owner = self._owner_of.pop(key)
        if self.log is not None:
            self.log.removed(key, owner)

    def _withdraw(self, block: int) -> None:
        if block in self._hash_of:
            self._unlist(block)

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        assert self._references[block] >= 0
        if self._references[block] > 0:
            return
        if block in self._hash_of:
            self._evictable[block] = None
        else:
            self._free.append(block)


class Allocation:
    """The blocks of one sequence, in the order of its tokens; closing it gives them back to the pool.

    `prefix_blocks`: how many of the blocks were found in the prefix cache rather than allocated.
    """

    def __init__(self, pool: BlockPool, blocks: list[int]) -> None:
        self._pool = pool
        self._published = len(blocks)
        self.prefix_blocks = len(blocks)
        self.blocks = blocks
        self._table: tuple[int, ...] = ()  # what `table` returned last

    @property
    def shared(self) -> int:
        """Number of leading blocks that other sequences hold as well."""
        return sum(1 for _ in itertools.takewhile(lambda block: self._pool._references[block] > 1, self.blocks))

    def grow(self, num_tokens: int) -> bool:
        """Allocate blocks until `num_tokens` tokens fit; all or nothing. Returns False if too few blocks are
        available.
        """
        wanted = blocks_for(num_tokens) - len(self.blocks)
        if wanted <= 0:
            return True
        if wanted > self._pool.available:
            return False
        self.blocks.extend(self._pool._allocate() for _ in range(wanted))
        return True

    def table(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks that hold the first `num_tokens` tokens: the same tuple object until another block is
        needed.
        """
        wanted = blocks_for(num_tokens)
        if wanted != len(self._table):
            self._table = tuple(self.blocks[:wanted])
        return self._table

    def publishes(self, num_computed: int) -> bool:
        """Return whether `num_computed` computed tokens fill blocks that have not been published."""
        return num_computed // BLOCK_TOKENS > self._published

    def publish(self, hashes: Sequence[bytes], num_computed: int, owner: str = "") -> tuple[int, ...]:
        """Let other sequences find the full blocks whose tokens have all been computed.

        Returns the positions of the blocks that are newly in the index.
        """
        full = min(num_computed // BLOCK_TOKENS, len(hashes))
        if full <= self._published:
            return ()
        new = range(self._published, full)
        self._published = full
        return tuple(i for i in new if self._pool._publish(self.blocks[i], hashes[i], owner))

    def withdraw(self) -> None:
        """Remove these blocks from the index; the sequences that hold them keep them."""
        for block in self.blocks:
            self._pool._withdraw(block)

    def close(self) -> None:
        # Last block first: a chain is useful only from its beginning, so its end is evicted first.
        while self.blocks:
            self._pool._release(self.blocks.pop())

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
