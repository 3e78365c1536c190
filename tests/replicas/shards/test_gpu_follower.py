"""A rank on a GPU leaves no graph when it ends, since NCCL's end waits for those that contain its exchanges."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_device import LateDevice

from motley.kernels.cpu.c_kernels.shm_collectives import RankLost
from motley.replicas.parallel.follower import gpu_follower
from motley.replicas.parallel.transport.pipe import MessagePipe


class LoneExchange:
    """In the place of a `CollectiveExchange`: other ranks wait for nothing, and answer nothing once it is given up."""

    def __init__(self) -> None:
        self.given_up = threading.Event()

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.given_up.is_set():
            raise RankLost("a rank has stopped")
        return x

    def abort(self) -> None:
        self.given_up.set()


class Decoder:
    ops = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))

    def __init__(self, exchange: LoneExchange) -> None:
        self._exchange = exchange

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    def fails(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    def waits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Wait as an exchange does on a GPU whose other rank does not come."""
        assert self._exchange.given_up.wait(60)
        return hidden


def call(method: str, **more: Any) -> dict[str, Any]:
    return {"method": method, "weights": 0, "hidden": [2, 4], **more}


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ([{"ends": True}], EOFError),
        ([call("waits"), {"ends": True}], EOFError),
        ([call("fails"), *[call("logits")] * 4], RuntimeError),
        ([call("waits"), {"replay": 7}], KeyError),
        ([call("waits"), {"copies": 1}], OSError),
        ([call("fails", capture=1, drop=[])], RuntimeError),
    ],
    ids=["end", "end in a call", "a call fails", "no such graph", "copies fail", "a capture fails"],
)
def test_graphs_are_freed_for_whatever_reason_it_ends(
    last: list[dict[str, Any]], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though somebody keeps the error, whose frames refer to all that the rank has had."""
    monkeypatch.setattr(gpu_follower, "IDLE_S", 60.0)  # it waits for calls in flight when there are too many
    device, exchange = LateDevice(), LoneExchange()
    versions: Any = SimpleNamespace(decoder=lambda _: Decoder(exchange))
    reads, writes = os.pipe()
    lead = MessagePipe(writes=writes)

    def between(fields: dict[str, Any]) -> bool:
        if "copies" in fields:
            raise OSError("no host memory")
        if "ends" in fields:
            lead.close_writing()
        return "ends" in fields

    try:
        for fields in (call("logits", capture=0, drop=[]), {"replay": 0}, *last):
            lead.send(fields)
        with pytest.raises(error) as ended:
            gpu_follower.run_gpu_calls(MessagePipe(reads), versions, [], exchange, device, between)  # type: ignore[arg-type]
        assert device.captures
        assert not device.graphs, ended
        assert exchange.given_up.is_set()
    finally:
        lead.close_writing()
