"""Where ranks meet: whoever leaves later than the meeting ends touches no file of anybody else's."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from motley.kernels.cpu.c_kernels.shm_collectives import RankLost
from motley.replicas.parallel.transport.collective import CollectiveExchange
from motley.replicas.parallel.transport.rendezvous import NcclGroup, Rendezvous, open_rendezvous_store

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
    """As NCCL's group is, whose `abort` waits for graphs."""

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
