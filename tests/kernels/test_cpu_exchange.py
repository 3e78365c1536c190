"""Sums and gathers among real processes, and what becomes of them when one is killed, stops or never comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from exchange_ranks import CHILD, go, ranks, said

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.kernels.cpu.c_kernels.shm_collectives import CAPACITY, RankLost, ShmCollectives, open_shared_memory

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")


@pytest.mark.parametrize(("size", "capacity", "count"), [(2, CAPACITY, 60), (3, 256, 8)])
def test_every_rank_has_what_all_put_in(size: int, capacity: int, count: int) -> None:
    """To the bit, for sizes that fill no line and for those that go in several pieces."""
    with ranks(size, "check", str(count), capacity=capacity) as children:
        for child in children:
            go(child)
        assert [said(child) for child in children] == ["same"] * size


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_lost_ends_the_others_in_time(fault: signal.Signals) -> None:
    with ranks(2, "sums", timeout_s=0.5) as (first, second):
        go(first)
        go(second)
        assert [said(first), said(second)] == ["summed"] * 2
        second.send_signal(fault)
        found = re.fullmatch(r"lost after ([0-9.]+) s: a rank .*", said(first))
        assert found is not None
        assert 0.5 <= float(found[1]) < 30  # that it ends; a busy machine may be slow to let it


def test_one_that_computes_for_longer_is_waited_for() -> None:
    """A busy machine or a slow disk may keep a rank for seconds, and all requests would be lost with it."""
    with ranks(2, "busy", timeout_s=0.5) as children:
        for child in children:
            go(child)
        assert [said(child) for child in children] == ["summed"] * 2
        for child in children:
            found = re.fullmatch(r"summed after ([0-9.]+) s", said(child))
            assert found is not None
            assert float(found[1]) >= 1.9


def test_one_that_gives_up_ends_the_others_at_once() -> None:
    """They would wait for minutes."""
    descriptor = open_shared_memory(2)
    with subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, (descriptor, 1, 2, CAPACITY, 600.0)), "sums"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(descriptor,),
    ) as child:
        exchange = ShmCollectives(descriptor, 0, 2)
        assert said(child) == "ready"
        go(child)
        assert torch.equal(exchange.sum(torch.ones(8)), torch.full((8,), 2.0))
        assert said(child) == "summed"
        exchange.abort()
        assert said(child).endswith("a rank has stopped")
        with pytest.raises(RankLost, match="a rank has stopped"):
            exchange.sum(torch.ones(8))


def test_whoever_is_too_late_does_not_go_on_alone() -> None:
    """Such a rank would go on with sums that nobody else has."""
    descriptor = open_shared_memory(2)
    first, second = (ShmCollectives(descriptor, rank, 2, timeout_s=0.01) for rank in range(2))
    os.close(descriptor)
    with pytest.raises(RankLost, match="did not answer in time"):
        first.sum(torch.ones(4))
    with pytest.raises(RankLost, match="a rank has stopped"):  # though the other's share is there
        second.sum(torch.ones(4))


def test_only_what_can_be_summed() -> None:
    descriptor = open_shared_memory(1)
    alone = ShmCollectives(descriptor, 0, 1)
    os.close(descriptor)
    x = torch.randn(3, 5)
    assert torch.equal(alone.sum(x.clone()), x)
    assert torch.equal(alone.gather(x, [5]), x)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        alone.sum(torch.ones(3, dtype=torch.float64))


def test_memory_has_no_name() -> None:
    """Memory without a name cannot be left behind."""
    before = set(os.listdir("/dev/shm"))
    descriptor = open_shared_memory(2)
    exchange = ShmCollectives(descriptor, 0, 2)
    assert set(os.listdir("/dev/shm")) <= before
    exchange.abort()
    os.close(descriptor)
