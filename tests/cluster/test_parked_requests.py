"""A request that is parked, as one that waits for its grammar's word with its KV: it ends in every way.

Over the wire of a live service, and over HTTP, where Serve notices that a client has gone: tests/system/test_cancel.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_runner import FakeRunner
from in_thread import InThread, in_thread
from raw_calls import PROTOCOLS, Asked, Protocol, RawCall, deadline_told
from serve_process import wait_for

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.sequence import Sequence
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.types import ModelInfo, ReplicaProfile

BLOCKS, CONTEXT = 1024, 8192
DEADLINE_S = 1.5
# An embedding has no grammar to wait for.
PARKABLE = [protocol for protocol in PROTOCOLS if "mbed" not in protocol.name]


class Parking(Worker):
    """A real worker around a runner without a model; with `parked` none of its sequences takes part in a step."""

    parked = False

    def _build(self) -> BuiltEngine:
        tokenizer = Tokenizer.load(Path(self._model))
        runner = FakeRunner(BLOCKS, tokenizer.vocab_size)
        scheduler = Scheduler(BlockPool(BLOCKS), max_batch_tokens=64, max_running=64)
        core = EngineCore(runner, scheduler, ModelLimits(tokenizer.vocab_size, CONTEXT, ()), tokenizer)
        info = ModelInfo("tiny", "fake", tokenizer.vocab_size, CONTEXT, (), "float32", "none")
        profile = ReplicaProfile("", info, "cpu", "", None, "exact", "", 0.0, 0.0, BLOCKS, 64)
        return BuiltEngine(core, runner, None, profile, {}, {})  # type: ignore[arg-type]

    def pause(self, sequence: Sequence) -> bool:
        time.sleep(0.0005 if self.parked else 0.0)  # the engine has nothing else to wait for
        return self.parked


@dataclass
class Parked:
    service: InThread
    worker: Parking

    @property
    def http_port(self) -> int:
        return self.service.http_port

    @property
    def grpc(self) -> str:
        return self.service.grpc

    def park(self, count: int) -> None:
        """So many, each with KV."""
        wait_for(lambda: self.worker.load().running == count, f"{count} to run")
        self.worker.parked = True
        steps = -1
        while steps != (steps := self.worker.load().steps):
            time.sleep(0.05)
        assert self.worker.load().kv_blocks_free <= BLOCKS - count, "they hold their KV"

    def until(self, left: int) -> None:
        def gone() -> bool:
            load = self.worker.load()
            return load.running <= left and (left > 0 or load.kv_blocks_free == BLOCKS)

        wait_for(gone, f"{left} that are left", 10.0)


@pytest.fixture
def parked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parked]:
    worker = Parking(folder, EngineConfig())
    monkeypatch.setattr(Sequence, "paused", property(lambda sequence: worker.pause(sequence)))
    with in_thread(folder, worker) as service:
        yield Parked(service, worker)
        worker.parked = False


def asked(protocol: Protocol, timeout_s: float | None = None) -> Asked:
    return Asked(f"{protocol.name} " * 2, id=protocol.name, timeout_s=timeout_s)


def test_leaving_while_it_is_parked(parked: Parked) -> None:
    gone: list[tuple[str, str]] = []
    for way in ("cancel", "disconnect", "abort"):
        those = [protocol for protocol in PARKABLE if way in protocol.leaves and not protocol.over_http]
        calls = [RawCall(parked, protocol, asked(protocol)) for protocol in those]
        parked.park(len(calls))
        for number, (protocol, call) in enumerate(zip(those, calls, strict=True), 1):
            call.leave(way)
            parked.until(len(calls) - number)
            gone.append((protocol.name, way))
            call.close()
        parked.worker.parked = False
    assert len(gone) == sum(len(protocol.leaves) for protocol in PARKABLE if not protocol.over_http) >= 18


@pytest.mark.parametrize("way", ["deadline", "field"])
def test_a_deadline_while_it_is_parked(parked: Parked, way: str) -> None:
    those = [protocol for protocol in PARKABLE if way in protocol.deadlines]
    own, wire = (DEADLINE_S, "") if way == "field" else (None, f"{round(1e3 * DEADLINE_S)}m")
    calls = [RawCall(parked, protocol, asked(protocol, own), wire) for protocol in those]
    parked.park(len(calls))
    for protocol, call in zip(those, calls, strict=True):
        said = call.outcome()
        assert deadline_told(said), (protocol.name, said[-200:])
        call.close()
    parked.until(0)
