"""Parts that an engine's prefixes need to be shared through a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..host_blocks import LentBlockPool
from ..store.store_keys import StoreKeys
from ..store.store_ops import CopyEvent, StoreOp, StoreWorker


@dataclass(frozen=True, slots=True)
class StoreLink:
    """Connection of an engine's prefixes to a store.

    store_worker  does operations on the store
    keys          store keys of prefixes
    pool          blocks of the host for values on their way, at least one value in each direction
    mark          returns a mark of the end of all copies between device and host so far
    value_blocks  KV blocks of one value
    value_bytes   bytes of one value in the store
    after         number of requests for a chunk of a prompt from which on it is stored
    """

    store_worker: StoreWorker
    keys: StoreKeys
    pool: LentBlockPool
    mark: Callable[[], CopyEvent]
    value_blocks: int
    value_bytes: int
    after: int = 2

    def __post_init__(self) -> None:
        assert self.pool.total == 0 or self.pool.total >= 2 * self.value_blocks, "a value each way"


def no_store_link() -> StoreLink:
    """Return a link for an engine that shares no prefixes: its pool is empty, and it must not be sent anything."""
    return StoreLink(
        _NullStoreWorker(), StoreKeys(b"", b""), LentBlockPool(), _NullCopyEvent, value_blocks=1, value_bytes=1
    )


class _NullStoreWorker:
    away = True

    def send(self, store_op: StoreOp) -> None:
        raise AssertionError("an engine without a prefix store must not send to one")

    def take(self) -> list[StoreOp]:
        return []

    def wait(self, seconds: float) -> None:
        return None

    def close(self) -> None:
        return None


class _NullCopyEvent:
    def wait(self) -> None:
        return None
