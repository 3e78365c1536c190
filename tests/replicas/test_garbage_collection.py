"""A serving process's collector of cycles: out of its steps, and yet at work."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from engine_parts import Letters

from motley.replicas import replica
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints.null_engine import NullRunner
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.host.garbage_collection import YOUNG_THRESHOLD, freeze_gc
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import Request, SamplingParams

BATCH, STEPS = 256, 12
AS_PYTHON_SETS_IT = (700, 10, 10)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def decoding() -> EngineCore:
    """A batch, each sequence of which gets a token in every step from now on."""
    scheduler = Scheduler(BlockPool(16 * BATCH), max_batch_tokens=4 * BATCH, max_running=BATCH)
    core = EngineCore(NullRunner([1, 2, 3], 0.0), scheduler, ModelLimits(27, 256, (26,)), Letters())  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=200, seed=0, ignore_eos=True)
    for key in range(BATCH):
        core.add(key, Request("r", (1, 2, 3), params))
    for _ in range(4):
        core.step()
    return core


def passes_in_steps() -> int:
    """How often the collector walks anything while a batch decodes."""
    core, seen = decoding(), 0
    gc.collect()

    def count(phase: str, _: object) -> None:
        nonlocal seen
        seen += phase == "start"

    gc.callbacks.append(count)
    try:
        for _ in range(STEPS):
            core.step()
    finally:
        gc.callbacks.remove(count)
    return seen


def test_nothing_is_walked_while_a_batch_decodes() -> None:
    gc.unfreeze()
    gc.set_threshold(*AS_PYTHON_SETS_IT)  # whatever was tested before
    assert passes_in_steps() >= STEPS
    freeze_gc()
    assert passes_in_steps() == 0


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_freed_all_the_same() -> None:
    freeze_gc()
    assert gc.isenabled()
    old, new = weakref.ref(Knot()), []
    while len(new) < 2 * YOUNG_THRESHOLD and old() is not None:
        new.append([])
    assert old() is None, "what was made since, once there is enough of it"


def test_what_was_there_is_walked_once() -> None:
    """So that a process that waited for a replica need not walk all that it has imported when it is one."""
    kept = Knot()
    freeze_gc()
    there, new = weakref.ref(kept), weakref.ref(Knot())
    del kept
    freeze_gc()
    assert new() is None, "what has come since"
    assert there() is not None, "and nothing else"


async def test_a_replica_settles_when_its_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Worker:
        async def start(self) -> None:
            told.append("start" if not gc.isenabled() else "start, and is walked")

    monkeypatch.setattr(replica, "freeze_gc", lambda: told.append("settle"))
    made = replica.Replica.__new__(replica.Replica)
    await made.__init__(Worker)  # type: ignore[misc,arg-type]  # as Serve does
    assert told == ["start", "settle"]
    assert gc.isenabled()


async def test_where_a_model_cannot_be_loaded_the_collector_goes_on() -> None:
    class Worker:
        async def start(self) -> None:
            raise ValueError("no such model")

    made = replica.Replica.__new__(replica.Replica)
    with pytest.raises(ValueError, match="no such model"):
        await made.__init__(Worker)  # type: ignore[misc,arg-type]
    assert gc.isenabled()
