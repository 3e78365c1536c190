"""Where records of metrics are kept: in the cluster, or in memory where there is none."""

from __future__ import annotations

from typing import Protocol

import ray

from ..ray_compat import cluster_state

__all__ = ["ClusterRecords", "MemoryRecords", "Records", "service_records"]


class Records(Protocol):
    """Records by key. Whatever the cluster does not take or tell raises RuntimeError or OSError."""

    def read(self, key: bytes) -> bytes | None: ...

    def write(self, key: bytes, value: bytes) -> None: ...

    def create(self, key: bytes, value: bytes) -> bool:
        """Write a record unless there is one with that key; return whether it was written."""
        ...

    def keys(self, prefix: bytes) -> list[bytes]: ...

    def delete(self, key: bytes) -> None: ...


class ClusterRecords:
    """Records in Ray's GCS, which every process of the cluster reads, and which outlive the process that wrote them."""

    read = staticmethod(cluster_state.read_record)
    write = staticmethod(cluster_state.write_record)
    create = staticmethod(cluster_state.create_record)
    keys = staticmethod(cluster_state.list_records)
    delete = staticmethod(cluster_state.delete_record)


class MemoryRecords(dict[bytes, bytes]):
    """Records of one process, for a service without Ray."""

    def read(self, key: bytes) -> bytes | None:
        return self.get(key)

    def write(self, key: bytes, value: bytes) -> None:
        self[key] = value

    def create(self, key: bytes, value: bytes) -> bool:
        return self.setdefault(key, value) is value

    def keys(self, prefix: bytes = b"") -> list[bytes]:  # type: ignore[override]
        return [key for key in [*super().keys()] if key.startswith(prefix)]

    def delete(self, key: bytes) -> None:
        self.pop(key, None)


def service_records() -> Records:
    return ClusterRecords() if ray.is_initialized() else MemoryRecords()
