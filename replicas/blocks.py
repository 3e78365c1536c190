"""Paged KV blocks and the index of prefixes they hold. Pure bookkeeping: no tensors, no device.

A block is in exactly one of three states, and their sum is asserted when idle:

    free      nobody's, nothing in it that could be found
    in use    referenced by one or more sequences
    cached    referenced by nobody, found by its hash, evicted least recently used first
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from types import TracebackType

from .kv_log import KvLog
from .protocol import BLOCK_TOKENS


def root_hash(salt: bytes) -> bytes:
    """Start of the hash chain of one cache group. The salt is hashed, so its length cannot run into the tokens."""
    return hashlib.sha256(b"motley prefix chain v1" + salt).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block given the hash of the block before it: HMAC-SHA256 keyed by the parent."""
    return hmac.digest(parent, struct.pack(f"<{len(token_ids)}I", *token_ids), "sha256")


def extend_hashes(hashes: list[bytes], salt: bytes, token_ids: Sequence[int]) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it does not hold yet."""
    for block in range(len(hashes), len(token_ids) // BLOCK_TOKENS):
        parent = hashes[-1] if hashes else root_hash(salt)
        hashes.append(chain_hash(parent, token_ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]))


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """All KV blocks of one replica."""

    def __init__(self, num_blocks: int, *, reuse_prefixes: bool = True) -> None:
        assert num_blocks > 0
        self.total = num_blocks
        self.reuse_prefixes = reuse_prefixes
        self.queried_tokens = 0  # prompt tokens looked up in the prefix index, since the start
        self.hit_tokens = 0  # and those of them that were found
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._owner_of: dict[bytes, str] = {}  # hash -> the tenant whose prefix it is
        self.log: KvLog | None = None  # told of every change of the index; None: nobody listens
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that an allocation could take now."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        return len(self._evictable)

    @property
    def in_use(self) -> int:
        return self.total - self.available

    def cached_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are held, without touching them."""
        if not self.reuse_prefixes:
            return 0
        return sum(1 for _ in itertools.takewhile(self._block_of.__contains__, hashes))

    def listed(self, hashes: Sequence[bytes]) -> list[int] | None:
        """The blocks that are found by these hashes, untouched; None: not all of them are held."""
        blocks = [block for key in hashes if (block := self._block_of.get(key)) is not None]
        return blocks if len(blocks) == len(hashes) else None

    def open(self, hashes: Sequence[bytes]) -> Allocation:
        """An allocation that begins with the held blocks among the leading `hashes`."""
        blocks = [self._block_of[key] for key in hashes[: self.cached_prefix(hashes)]]
        for block in blocks:
            self._take(block)
        self.queried_tokens += len(hashes) * BLOCK_TOKENS
        self.hit_tokens += len(blocks) * BLOCK_TOKENS
        return Allocation(self, blocks)

    def headroom(self, hashes: Sequence[bytes]) -> int:
        """Blocks available to a sequence beside the held blocks it would begin with."""
        held = self.cached_prefix(hashes)
        return self.available - sum(self._block_of[key] in self._evictable for key in hashes[:held])

    def release(self, hashes: Sequence[bytes]) -> Callable[[Sequence[int]], int]:
        """A count of what becomes available as one holder after the other gives its blocks up; it changes nothing.

        Only the last holder of a block frees it; and what is held for these hashes is kept for whoever begins with it.
        """
        kept = {self._block_of[key] for key in hashes[: self.cached_prefix(hashes)]}
        given_up: Counter[int] = Counter()

        def count(blocks: Sequence[int]) -> int:
            given_up.update(blocks)
            return sum(given_up[block] == self._references[block] and block not in kept for block in blocks)

        return count

    def forget_prefixes(self, owner: str | None = None) -> None:
        """Drop every cached prefix (of that owner) that no sequence uses, and unlist those in use."""
        for key, block in list(self._block_of.items()):
            if owner is not None and self._owner_of[key] != owner:
                continue
            if block in self._evictable:
                del self._evictable[block]
                self._free.append(block)
            self._unlist(block)

    def check(self, *, idle: bool = False) -> None:
        """Assert conservation: every block in exactly one state; with `idle`, none in use."""
        assert len(set(self._free)) == len(self._free)
        assert not set(self._free) & set(self._evictable)
        referenced = sum(count > 0 for count in self._references)
        assert len(self._free) + len(self._evictable) + referenced == self.total
        assert all(self._hash_of[self._block_of[key]] == key for key in self._block_of)
        if idle:
            assert referenced == 0, f"{referenced} blocks still in use while idle"

    def check_idle(self) -> None:
        """Assert that no block is in use: what of `check` costs the same however many there are."""
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
        """Whether it was listed now."""
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
    """The blocks of one sequence, in order; they go back when it is closed.

    `prefix_blocks`: how many of them were found rather than allocated.
    """

    def __init__(self, pool: BlockPool, blocks: list[int]) -> None:
        self._pool = pool
        self._published = len(blocks)
        self.prefix_blocks = len(blocks)
        self.blocks = blocks
        self._table: tuple[int, ...] = ()  # as it was told last

    @property
    def shared(self) -> int:
        """How many leading blocks others have too."""
        return sum(1 for _ in itertools.takewhile(lambda block: self._pool._references[block] > 1, self.blocks))

    def grow(self, num_tokens: int) -> bool:
        """Hold at least `num_tokens` tokens; all or nothing. False: there is no room."""
        wanted = blocks_for(num_tokens) - len(self.blocks)
        if wanted <= 0:
            return True
        if wanted > self._pool.available:
            return False
        self.blocks.extend(self._pool._allocate() for _ in range(wanted))
        return True

    def table(self, num_tokens: int) -> tuple[int, ...]:
        """The blocks that hold the first `num_tokens` tokens: the same object until there are more."""
        wanted = blocks_for(num_tokens)
        if wanted != len(self._table):
            self._table = tuple(self.blocks[:wanted])
        return self._table

    def publishes(self, num_computed: int) -> bool:
        """Whether that many computed tokens fill blocks that were not full before."""
        return num_computed // BLOCK_TOKENS > self._published

    def publish(self, hashes: Sequence[bytes], num_computed: int, owner: str = "") -> tuple[int, ...]:
        """Let others find the full blocks whose tokens have all been computed; the positions that are new."""
        full = min(num_computed // BLOCK_TOKENS, len(hashes))
        if full <= self._published:
            return ()
        new = range(self._published, full)
        self._published = full
        return tuple(i for i in new if self._pool._publish(self.blocks[i], hashes[i], owner))

    def withdraw(self) -> None:
        """Let nobody find these blocks from now on; those who hold them keep them."""
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
