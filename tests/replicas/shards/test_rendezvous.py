"""Where ranks meet: whoever leaves later than the meeting ends touches no file of anybody else's."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from motley.kernels.cpu.c_kernels.shm_collectives import RankLost
from motley.replicas.parallel.transport.collective import CollectiveExchange
from motley.replicas.parallel.transport.rendezvous import NcclGroup, Rendezvous, join_group, open_rendezvous_store

CONTENTS = b"weights, of which nothing may change"


def test_a_store_that_goes_late_writes_to_no_file_that_was_opened_meanwhile(tmp_path: Path) -> None:
    """torch's goes when nothing refers to it, long after an engine's end, and then writes once more, by a number."""
    meeting = Rendezvous(None)
    assert meeting.descriptor is not None
    store = open_rendezvous_store(meeting.descriptor, None)
    store.set("somebody", "has come")
    files = [tmp_path / f"{number}.safetensors" for number in range(64)]
    with ExitStack() as opened:
        for file in files:
            file.write_bytes(CONTENTS)
            opened.enter_context(file.open("rb"))
        del store, meeting
        gc.collect()
    assert {file.read_bytes() for file in files} == {CONTENTS}


class Stuck:
    """A group like NCCL's, whose `abort` waits for graphs."""

    allreduce = allgather = broadcast = None

    def __init__(self) -> None:
        self.asked, self.graphs_are_gone = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.asked.set()
        assert self.graphs_are_gone.wait(60)


def test_giving_up_waits_for_no_graph() -> None:
    """Which may be let go of by the very thread that gives up."""
    stuck = Stuck()
    exchange = CollectiveExchange(NcclGroup(stuck))
    exchange.abort()
    assert stuck.asked.wait(60)
    with pytest.raises(RankLost):
        exchange.sum(torch.ones(1))
    stuck.graphs_are_gone.set()


def test_meetings_of_one_process_know_nothing_of_each_other() -> None:
    first, second = Rendezvous(None), Rendezvous(None)
    assert first.descriptor == second.descriptor, "of which none is closed, so that there is one"
    assert first.name != second.name
    assert first.descriptor is not None
    os.fstat(first.descriptor)


def test_torch_ends_no_process_because_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither because a rank is lost, nor because an abort waits long for graphs; but as somebody has set it."""
    found: list[dict[str, str]] = []

    class Group:
        Options = SimpleNamespace
        allreduce = allgather = broadcast = staticmethod(lambda _: SimpleNamespace(wait=lambda: None))

        def __init__(self, *_: Any) -> None:
            found.append({name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")})

    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"})
    join_group(torch.distributed.HashStore(), "a name", 0, 0, 2, torch.device("cuda:0"), None)
    assert found == [
        {
            "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
    ]
