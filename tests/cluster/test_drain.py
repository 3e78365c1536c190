"""How `motley serve` drains the ingress: until nothing is left, or it is too late, and though it is slow to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from motley.cluster.service.deployment import ray_head


class SlowIngress:
    """Does not answer the first `silent` calls; then has so many streams left, one fewer each time it is asked.

    Called as Serve's handles are.
    """

    def __init__(self, silent: int, left: int) -> None:
        self.silent, self.left = silent, left
        self.ended = False
        self.left_at_flush: int | None = None
        self._methods: dict[str, Callable[[], Awaitable[Any]]] = {
            "drain": self._drain,
            "end_streams": self._end_streams,
            "flush_traces": self._flush_traces,
        }

    def broadcast(self, method: str) -> _Asked:
        return _Asked(self._methods[method])

    async def _drain(self) -> int:
        if self.silent:
            self.silent -= 1
            await asyncio.Event().wait()
        self.left = max(0, self.left - 1)
        return self.left

    async def _end_streams(self) -> None:
        self.ended, self.left = True, 0

    async def _flush_traces(self) -> None:
        self.left_at_flush = self.left


class _Asked:
    """The answers of one ingress, as those of several."""

    def __init__(self, method: Callable[[], Awaitable[Any]]) -> None:
        self._method = method

    async def results_async(self, return_exceptions: bool) -> list[Any]:
        return list(await asyncio.gather(self._method(), return_exceptions=return_exceptions))


@pytest.mark.parametrize("silent", [0, 2])
async def test_it_waits_for_streams_and_for_an_ingress_that_is_busy(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress = SlowIngress(silent, 3)
    monkeypatch.setattr(ray_head.serve, "get_app_handle", lambda name: ingress)
    monkeypatch.setattr(ray_head, "DRAIN_CALL_S", 0.02)
    monkeypatch.setattr(ray_head, "_lives", lambda gcs: True)
    await ray_head._drain("", time.monotonic() + 60)
    assert (ingress.left, ingress.ended) == (0, False)
    assert ingress.left_at_flush == 0, "what a collector is to know of them is sent at the end"


async def test_what_is_left_at_the_deadline_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = SlowIngress(0, 10**6)
    monkeypatch.setattr(ray_head.serve, "get_app_handle", lambda name: ingress)
    monkeypatch.setattr(ray_head, "_lives", lambda gcs: True)
    await ray_head._drain("", time.monotonic() + 0.1)
    assert ingress.ended


async def test_it_asks_no_more_when_ray_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = SlowIngress(1, 10**6)
    monkeypatch.setattr(ray_head.serve, "get_app_handle", lambda name: ingress)
    monkeypatch.setattr(ray_head, "DRAIN_CALL_S", 0.02)
    monkeypatch.setattr(ray_head, "_lives", lambda gcs: False)
    await ray_head._drain("", time.monotonic() + 60)
    assert (ingress.left, ingress.ended) == (10**6, False)
