"""What a GPU is asked for, as far as it can be seen without one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from motley.replicas.gpu.accelerator import Cuda


class FakeStream:
    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class FakeGraph:
    def replay(self) -> None: ...


def test_all_captures_are_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace, 32 MiB on Hopper, for each stream that it was called on, to be run or recorded."""
    used: list[Any] = []

    def graph(graph: Any, pool: Any, stream: Any = None, **_: Any) -> Any:
        used.append(stream)
        return nullcontext()

    def stream(stream: Any) -> Any:
        used.append(stream)
        return nullcontext()

    fakes = {
        "Stream": FakeStream, "stream": stream, "current_stream": FakeStream, "graph": graph, "CUDAGraph": FakeGraph,
        "device": nullcontext, "graph_pool_handle": lambda: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    accelerator = Cuda(torch.device("cuda:0"))
    ran: list[int] = []
    for number in range(3):
        accelerator.capture(lambda number=number: ran.append(number))  # type: ignore[misc]
    assert ran == [0, 0, 1, 1, 2, 2]
    assert len(used) == 6
    assert len(set(map(id, used))) == 1
