"""What an engine's prefixes need to be shared, put together by setup.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..host_pool import LentPool
from .errands import Courier, Errand, Mark
from .keys import StoreKeys

__all__ = ["Link", "no_link"]


@dataclass(frozen=True, slots=True)
class Link:
    """
    pool          blocks of the host, for what comes and goes: a value each way at least
    mark          of the end of the copies between device and host that were asked for until now
    value_blocks  KV blocks of a value of the store; value_bytes: its size there
    after         how often a chunk must be asked for to be stored
    """

    courier: Courier
    keys: StoreKeys
    pool: LentPool
    mark: Callable[[], Mark]
    value_blocks: int
    value_bytes: int
    after: int = 2

    def __post_init__(self) -> None:
        assert self.pool.total == 0 or self.pool.total >= 2 * self.value_blocks, "a value each way"


def no_link() -> Link:
    """Where nothing is shared."""
    return Link(_Nobody(), StoreKeys(b"", b""), LentPool(), _Nowhere, value_blocks=1, value_bytes=1)


class _Nobody:
    away = True

    def send(self, errand: Errand) -> None:
        raise AssertionError("nothing is sent where nothing is shared")

    def take(self) -> list[Errand]:
        return []

    def wait(self, seconds: float) -> None:
        return None

    def close(self) -> None:
        return None


class _Nowhere:
    def wait(self) -> None:
        return None
