"""KV blocks of the host of a divided model: what each process has of them, and when their copies have been made."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import build_checkpoint

from motley.kernels.contract import KvDtype
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.errors import EngineLost
from motley.replicas.execution.copier import CpuCopier
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.execution.swapper import Swapper
from motley.replicas.kv.store.sealed_record import Geometry
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.sharding.split import shard_for_rank
from motley.replicas.model.sharding.stages import pipeline_stages
from motley.replicas.parallel.calls.decoder_calls import copies_message, read_copies
from motley.replicas.parallel.leader.copy_tracker import CopyTracker, TrackedCopyEvent
from motley.replicas.parallel.transport.shared_host_kv import (
    KvShare,
    ParallelHostRecords,
    SharedHostMemory,
    kv_shares,
)

BLOCKS, HOST = 3, 7
GEOMETRY = Geometry("float32", layers=3, heads=2, head_dim=32, tokens=32)
WHOLE = [KvShare((0, 3), (0, 2), keeps=True)]
SHARES = {
    "two ranks": [KvShare((0, 3), (0, 1), keeps=True), KvShare((0, 3), (1, 2), keeps=True)],
    "four ranks of two heads": [KvShare((0, 3), (head, head + 1), keep) for head in (0, 1) for keep in (True, False)],
    "two stages": [KvShare((0, 1), (0, 2), keeps=True), KvShare((1, 3), (0, 2), keeps=True)],
    "two stages of two ranks": [KvShare(of, (h, h + 1), keeps=True) for of in ((0, 2), (2, 3)) for h in (0, 1)],
}


def test_a_share_is_reckoned_without_the_operators_that_serve() -> None:
    """On a GPU they know by the heads of the KV that they have how what is int8 lies."""
    ops = GpuOps(interpreter_context((8, 0)), "int8")
    [own] = ops.allocate_kv(1, 6, 1, 64)
    before = [part.shape for part in ops.kv_parts(own)]
    block = KvShare((0, 2), (1, 3), True).block(ops, 64)
    assert [part.shape for part in block[: len(before)]] == [(1, 2, *shape[2:]) for shape in before]
    assert [part.shape for part in ops.kv_parts(own)] == before


class Processes:
    """In one: each has its KV and its part of the host's blocks, of which those after the first are files."""

    def __init__(self, shares: Sequence[KvShare], kv_dtype: KvDtype | None) -> None:
        self.ops = CpuOps(torch.float32, "exact", None, None, "tests", kv_dtype)
        dtype = kv_dtype or "float32"
        self.geometry = replace(GEOMETRY, dtype=dtype)
        self.shares, self.kv, self.swappers, hosts = shares, [], [], []
        for number, share in enumerate(shares):
            heads = share.heads[1] - share.heads[0]
            kv = self.ops.allocate_kv(share.num_layers, BLOCKS, heads, GEOMETRY.head_dim)
            parts = [part for cache in kv for part in self.ops.kv_parts(cache)]
            if number == 0:
                self.swappers.append(Swapper(parts, CpuCopier(), HOST))
            else:
                file = os.memfd_create("tests")
                os.ftruncate(file, HOST * sum(part[0].nbytes for part in parts))
                self.swappers.append(Swapper(parts, CpuCopier(), HOST, SharedHostMemory(file).staging))
                hosts.append(SharedHostMemory(file))
                os.close(file)
            self.kv.append(kv)
        self.host = ParallelHostRecords(shares, self.swappers[0], hosts, self.ops, self.geometry)

    def views(self, process: int) -> list[list[torch.Tensor]]:
        """Return the keys and values of each layer, and their scales."""
        return [list(self.ops.kv_vectors(self.ops.kv_parts(cache))) for cache in self.kv[process]]

    def fill(self, numbers: torch.Tensor) -> None:
        """Each with what is its own: numbers [layers, views, blocks, heads, ...] of the whole model."""
        for process, share in enumerate(self.shares):
            for layer, views in zip(range(*share.layers), self.views(process), strict=True):
                for view, of in zip(views, numbers[layer], strict=True):
                    own = of[:, slice(*share.heads)]
                    view.copy_(own if view.dim() == own.dim() else own[..., 0])

    def swap(self, plan: StepPlan) -> None:
        for swapper in self.swappers:
            swapper.swap(plan)


def numbers(kv_dtype: KvDtype | None) -> torch.Tensor:
    views = 4 if kv_dtype else 2
    shape = GEOMETRY.layers, views, BLOCKS, GEOMETRY.heads, 16, GEOMETRY.head_dim
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(7)).float()


@pytest.mark.parametrize(
    ("name", "ranks", "layers"),
    [
        ("two ranks", 2, [3]),
        ("four ranks of two heads", 4, [3]),
        ("two stages", 1, [1, 2]),
        ("two stages of two ranks", 2, [2, 1]),
    ],
)
def test_shares_follow_from_how_the_model_is_divided(name: str, ranks: int, layers: list[int], tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=3, num_key_value_heads=2)
    checkpoint = inspect_checkpoint(folder)
    parts = (
        [shard_for_rank(checkpoint.config, checkpoint.format, rank, ranks) for rank in range(ranks)]
        if ranks > 1
        else []
    )
    assert kv_shares(checkpoint.config, pipeline_stages(3, layers), parts) == SHARES[name]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("name", SHARES)
def test_a_record_is_the_same_however_the_model_is_divided(name: str, kv_dtype: KvDtype | None) -> None:
    out = StepPlan((), swap_out=((2, 5), (0, 1)))
    into = StepPlan((), swap_in=((1, 3), (2, 6)))
    records = []
    for shares in (WHOLE, SHARES[name]):
        made = Processes(shares, kv_dtype)
        made.fill(numbers(kv_dtype))
        made.swap(out)
        payloads = made.host.allocate_payloads()
        assert made.host.pack([5, 1], payloads)
        records.append([bytes(buffer) for buffer in payloads.buffers])
    assert records[0] == records[1]
    assert len(set(records[0])) == GEOMETRY.heads
    made.host.unpack(payloads, [3, 6])
    made.swap(into)
    for process, share in enumerate(made.shares):
        for layer, views in zip(range(*share.layers), made.views(process), strict=True):
            for view, of in zip(views, numbers(kv_dtype)[layer], strict=True):
                own = of[:, slice(*share.heads)]
                own = own if view.dim() == own.dim() else own[..., 0]
                assert torch.equal(view[1].float(), own[2])
                assert torch.equal(view[2].float(), own[0])


def test_a_process_has_no_more_of_a_block_than_its_own() -> None:
    made = Processes(SHARES["two stages of two ranks"], None)
    whole = Processes(WHOLE, None)
    assert [swapper.block_bytes * 6 for swapper in made.swappers] == [
        share.num_layers * whole.swappers[0].block_bytes for share in made.shares
    ]


def test_what_is_not_finite_anywhere_is_not_stored() -> None:
    made = Processes(SHARES["two ranks"], None)
    made.fill(numbers(None))
    made.views(1)[2][1][0, 0, 3, 4] = float("nan")
    made.swap(StepPlan((), swap_out=((0, 0), (1, 1))))
    assert not made.host.pack([0, 1], made.host.allocate_payloads())


def test_of_ranks_with_the_same_head_one_keeps_it() -> None:
    """The others' copies are not looked at."""
    made = Processes(SHARES["four ranks of two heads"], None)
    made.fill(numbers(None))
    for process in (1, 3):
        for views in made.views(process):
            for view in views:
                view.fill_(float("nan"))
    made.swap(StepPlan((), swap_out=((0, 0), (1, 1))))
    payloads = made.host.allocate_payloads()
    assert made.host.pack([0, 1], payloads)
    assert payloads.finite()


def test_copies_travel() -> None:
    plan = StepPlan((), swap_out=((1, 2), (3, 4)), swap_in=((5, 6),))
    fields, tensors = copies_message(3, plan)
    assert (read_copies(fields), tensors) == (plan, {})


def test_a_mark_is_reached_when_every_process_has_copied() -> None:
    copies = CopyTracker(2)
    TrackedCopyEvent(copies, 0).wait()
    copies.num_requested = 2
    came = threading.Event()

    def wait() -> None:
        TrackedCopyEvent(copies, 2).wait()
        came.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    copies.made(0, 2)
    copies.made(1, 1)
    assert not came.wait(0.05)
    copies.made(1, 2)
    assert came.wait(30)
    thread.join(30)


def test_nobody_waits_for_the_copies_of_one_who_has_gone() -> None:
    copies = CopyTracker(1)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            TrackedCopyEvent(copies, 1).wait()
        except EngineLost as lost:
            failed.append(lost)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    copies.lose()
    thread.join(30)
    assert len(failed) == 1
