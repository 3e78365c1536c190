"""A worker that runs already, where a replica makes and starts one."""

from __future__ import annotations

from typing import Any

from motley.replicas.engine.entrypoints.worker import Worker


class Running:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def start(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)
