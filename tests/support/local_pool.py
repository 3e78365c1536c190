"""A pool handle as Serve gives one, with its only replica in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any


class LocalPool:
    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self.cancelled = 0

    def options(self, *, method_name: str, stream: bool = False, _by_reference: bool = True) -> Any:
        assert not _by_reference, "messages travel by value"
        method = getattr(self.replica, method_name)
        return _Method(self, method, stream)


class _Method:
    def __init__(self, pool: LocalPool, method: Any, stream: bool) -> None:
        self._pool, self._method, self._stream = pool, method, stream

    def remote(self, *args: Any) -> Any:
        return _Stream(self._pool, self._method(*args)) if self._stream else self._method(*args)


class _Stream:
    def __init__(self, pool: LocalPool, messages: AsyncGenerator[Any, None]) -> None:
        self._pool, self._messages = pool, messages

    def __aiter__(self) -> Any:
        return self._messages

    def cancel(self) -> None:
        self._pool.cancelled += 1
