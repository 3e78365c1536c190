"""Values in a redis-server as they lie there, to be changed behind the back of those who read them."""

from __future__ import annotations

import redis as redis_py

from motley_bench.prefix.redis_process import RedisProcess


class RawValues:
    def __init__(self, redis: RedisProcess) -> None:
        self.client = redis_py.Redis(unix_socket_path=str(redis.path))

    def names(self) -> list[bytes]:
        return sorted(self.client.scan_iter("motley:*:kv:*"))

    def all(self) -> dict[bytes, bytes]:
        return {name: self.client.get(name) for name in self.names()}

    def put(self, values: dict[bytes, bytes]) -> None:
        for name, value in values.items():
            self.client.set(name, value)

    def flip(self, name: bytes, at: int) -> None:
        """A bit of that byte."""
        value = bytearray(self.client.get(name))
        value[at] ^= 4
        self.client.set(name, bytes(value))

    def cut(self, name: bytes, size: int) -> None:
        self.client.set(name, self.client.get(name)[:size])

    def close(self) -> None:
        self.client.close()
