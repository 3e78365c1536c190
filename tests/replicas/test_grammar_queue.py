"""Many grammars of one tenant hold up no other: tenants take turns, and each has room of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from motley.replicas import grammar_queue
from motley.replicas.errors import Overloaded
from motley.replicas.grammar_queue import MAX_OF_TENANT, MAX_QUEUED, GrammarQueue
from motley.replicas.grammar_spec import GrammarSpec
from motley.replicas.grammars import MAX_COMPILING, Grammars


def spec(name: object) -> GrammarSpec:
    return GrammarSpec.regex(f"x{name}", field="response_format")


def taken(queue: GrammarQueue) -> list[str]:
    return [waiting[0].source for waiting in iter(queue.take, None)]


def test_tenants_take_turns() -> None:
    queue = GrammarQueue()
    for tenant, names in (("a", "123"), ("b", "45"), ("c", "6")):
        for name in names:
            queue.put(tenant, spec(name))
    assert len(queue) == 6
    assert taken(queue) == ["x1", "x4", "x6", "x2", "x5", "x3"]
    assert len(queue) == 0


def test_whoever_comes_later_waits_for_one_of_each_other() -> None:
    queue = GrammarQueue()
    for i in range(5):
        queue.put("a", spec(i))
    assert queue.take() is not None
    queue.put("b", spec("b"))
    assert taken(queue)[:2] == ["x1", "xb"]


def test_one_tenants_room_is_bounded_and_is_not_the_others() -> None:
    queue = GrammarQueue()
    for i in range(MAX_OF_TENANT):
        queue.put("a", spec(i))
    with pytest.raises(Overloaded, match=rf"^response_format: {MAX_OF_TENANT} grammars of yours") as caught:
        queue.put("a", spec("more"))
    assert caught.value.code == "queue_full"
    queue.put("b", spec("b"))


def test_all_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_OF_TENANT", MAX_QUEUED)
    queue = GrammarQueue()
    for i in range(MAX_QUEUED):
        queue.put(str(i % 7), spec(i))
    with pytest.raises(Overloaded, match=f"{MAX_QUEUED} grammars are waiting"):
        queue.put("new", spec("more"))


def test_a_neighbour_is_compiled_before_a_hostile_tenants_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    goes, began = threading.Semaphore(0), threading.Semaphore(0)

    def compile_(self: Grammars, spec: GrammarSpec) -> Any:
        began.release()
        assert goes.acquire(timeout=60)
        order.append(spec.source)
        return type("Process", (), {"alive": True})()

    monkeypatch.setattr(Grammars, "_compile", compile_)
    grammars = Grammars(None, 1, ())  # type: ignore[arg-type]
    hostile = [grammars.prepare(spec(i), "hostile") for i in range(MAX_COMPILING)]
    for _ in hostile:
        assert began.acquire(timeout=60)
    hostile += [grammars.prepare(spec(i), "hostile") for i in range(MAX_COMPILING, MAX_OF_TENANT)]
    neighbour = grammars.prepare(spec("good"), "neighbour")
    assert grammars.prepare(spec("good"), "hostile") is neighbour
    for _ in range(MAX_OF_TENANT + 1):
        goes.release()
    for future in [*hostile, neighbour]:
        future.result(60)
    assert order.index("xgood") <= 2 * MAX_COMPILING
    grammars.close()


def test_closing_ends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    goes, began = threading.Event(), threading.Semaphore(0)

    def compile_(self: Grammars, spec: GrammarSpec) -> Any:
        began.release()
        assert goes.wait(60)
        return type("Process", (), {"alive": True})()

    monkeypatch.setattr(Grammars, "_compile", compile_)
    grammars = Grammars(None, 1, ())  # type: ignore[arg-type]
    futures = [grammars.prepare(spec(i)) for i in range(MAX_COMPILING + 3)]
    for _ in range(MAX_COMPILING):
        assert began.acquire(timeout=60)
    grammars.close()
    goes.set()
    assert [future.cancelled() for future in futures] == [False] * MAX_COMPILING + [True] * 3
