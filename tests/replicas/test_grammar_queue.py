"""Many grammars of one tenant hold up no other: tenants take turns, and each has room of its own."""

from __future__ import annotations

import heapq
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.errors import InvalidRequest, Overloaded
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.process import compile_queue
from motley.replicas.grammar.process.compile_queue import (
    FIRST_CPU_S,
    LAST_CPU_S,
    MAX_OF_TENANT,
    MAX_QUEUED,
    GrammarQueue,
)
from motley.replicas.grammar.process.grammar_compiler import MAX_COMPILING, GrammarCompiler


def spec(name: object) -> GrammarSpec:
    return GrammarSpec.regex(f"x{name}", field="response_format")


def taken(queue: GrammarQueue) -> list[str]:
    return [waiting.spec.source for waiting in iter(queue.take, None)]


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
    monkeypatch.setattr(compile_queue, "MAX_OF_TENANT", MAX_QUEUED)
    queue = GrammarQueue()
    for i in range(MAX_QUEUED):
        queue.put(str(i % 7), spec(i))
    with pytest.raises(Overloaded, match=f"{MAX_QUEUED} grammars are waiting"):
        queue.put("new", spec("more"))


QUICK_S, NEVER_S = 0.1, 1e9


def compiled(hostile: list[str], comes_at: float, tenant: str) -> float:
    """How long one quick grammar takes that comes then, on a clock of its own, while each of the hostile tenants
    has another grammar without end as soon as one is refused."""
    queue = GrammarQueue()
    costs: dict[str, float] = {}
    running: list[tuple[float, int, Any, bool]] = []

    def put(tenant: str, cost: float) -> None:
        costs[f"x{len(costs)}"] = cost
        queue.put(tenant, spec(len(costs) - 1))

    def begin(now: float) -> None:
        while len(running) < MAX_COMPILING and (waiting := queue.take()) is not None:
            cost = costs[waiting.spec.source]
            ends = now + min(cost, waiting.cpu_s)
            heapq.heappush(running, (ends, len(costs) + id(waiting), waiting, cost > waiting.cpu_s))

    for name in hostile:
        put(name, NEVER_S)
    begin(0.0)
    came = None
    while True:
        now, _, waiting, vain = heapq.heappop(running)
        if came is None and now >= comes_at:
            came = now
            put(tenant, QUICK_S)
        if waiting.last:
            put(waiting.tenant, NEVER_S)
        queue.tried(waiting, retry=vain and not waiting.last)
        if not vain:
            assert came is not None
            return now - came
        begin(now)


@given(
    hostile=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4),
    comes_at=st.floats(0.0, 20.0),
    tenant=st.sampled_from("ae"),
)
@settings(max_examples=60, derandomize=True)
def test_what_is_quick_waits_for_first_tries_alone(hostile: list[str], comes_at: float, tenant: str) -> None:
    assert compiled(hostile, comes_at, tenant) <= len(hostile) * FIRST_CPU_S + QUICK_S + 1e-6


def test_one_at_a_time_of_those_that_take_long() -> None:
    queue = GrammarQueue()
    for tenant, name in ("a1", "a2", "b3"):
        queue.put(tenant, spec(name))
    for waiting in list(iter(queue.take, None)):
        assert waiting.cpu_s == FIRST_CPU_S
        queue.tried(waiting, retry=True)
    assert len(queue) == 3
    first = queue.take()
    assert first is not None
    assert (first.spec.source, first.cpu_s) == ("x1", LAST_CPU_S)
    assert queue.take() is None
    queue.put("c", spec("new"))
    assert taken(queue) == ["xnew"]
    queue.tried(first, retry=False)
    second = queue.take()
    assert second is not None
    assert second.spec.source == "x3", "tenants take turns here too"


def test_a_neighbour_is_compiled_while_hostile_grammars_take_all_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    goes, long = threading.Event(), threading.Semaphore(0)

    def compile_(self: GrammarCompiler, spec: GrammarSpec, cpu_s: float) -> Any:
        if spec.source == "xgood":
            return type("Process", (), {"alive": True})()
        if cpu_s > FIRST_CPU_S:
            long.release()
            assert goes.wait(60)
        return None

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_)
    grammars = GrammarCompiler(None, 1, ())  # type: ignore[arg-type]
    hostile = [grammars.prepare(spec(i), str(i)) for i in range(4)]
    assert long.acquire(timeout=60)
    assert grammars.prepare(spec("good"), "neighbour").result(60).alive
    assert not any(future.done() for future in hostile)
    goes.set()
    for future in hostile:
        with pytest.raises(InvalidRequest, match="more time or memory") as caught:
            future.result(60)
        assert caught.value.code == "grammar_too_complex"
    assert all(isinstance(grammars.prepare(spec(i)).exception(0), InvalidRequest) for i in range(4)), "remembered"
    grammars.close()


def test_a_neighbour_is_compiled_before_a_hostile_tenants_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    goes, began = threading.Semaphore(0), threading.Semaphore(0)

    def compile_(self: GrammarCompiler, spec: GrammarSpec, cpu_s: float) -> Any:
        began.release()
        assert goes.acquire(timeout=60)
        order.append(spec.source)
        return type("Process", (), {"alive": True})()

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_)
    grammars = GrammarCompiler(None, 1, ())  # type: ignore[arg-type]
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

    def compile_(self: GrammarCompiler, spec: GrammarSpec, cpu_s: float) -> Any:
        began.release()
        assert goes.wait(60)
        return type("Process", (), {"alive": True})()

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_)
    grammars = GrammarCompiler(None, 1, ())  # type: ignore[arg-type]
    futures = [grammars.prepare(spec(i)) for i in range(MAX_COMPILING + 3)]
    for _ in range(MAX_COMPILING):
        assert began.acquire(timeout=60)
    grammars.close()
    goes.set()
    assert [future.cancelled() for future in futures] == [False] * MAX_COMPILING + [True] * 3


def test_closing_ends_what_would_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    goes, began = threading.Event(), threading.Event()

    def compile_(self: GrammarCompiler, spec: GrammarSpec, cpu_s: float) -> Any:
        began.set()
        assert goes.wait(60)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_)
    grammars = GrammarCompiler(None, 1, ())  # type: ignore[arg-type]
    future = grammars.prepare(spec("slow"))
    assert began.wait(60)
    grammars.close()
    goes.set()
    with pytest.raises(CancelledError):
        future.result(60)
