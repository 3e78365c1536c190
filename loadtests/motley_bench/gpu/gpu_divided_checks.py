"""Checks of a divided model on one GPU: KV to the host and back, other weights, and NCCL's version."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch

from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import EngineFault
from motley.replicas.execution.step_plan import PlanItem, StepPlan
from motley.replicas.kv.store.host_kv import HostKv, RecordPayloads
from motley.replicas.kv.store.sealed_record import Geometry
from motley.replicas.kv.store.store_worker import HostRecords
from motley.replicas.parallel.leader.launcher import SubprocessLauncher
from motley.replicas.parallel.transport.shared_host_kv import ParallelHostRecords
from motley.replicas.types import BLOCK_TOKENS

PROMPT = list(range(3, 80))


class FixedDeviceLauncher(SubprocessLauncher):
    """Launcher of processes on the given devices; several processes may share one device."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = list(devices)

    def device(self, number: int) -> str | None:
        return self.devices[number] if len(self.devices) > 1 else None


@torch.inference_mode()
def swap_there_and_back(engine: Engine) -> list[torch.Tensor]:
    """Return the KV of a prompt's whole blocks twice, in fp32 and in the layout of prefix records.

    The first tensor is the KV as it was computed, the second as it is after it went to the host and came back into
    other blocks.
    """
    built, found = engine._built, []
    core, swapper = built.core, built.runner.swapper
    assert swapper is not None, "it was told to keep KV"
    assert built.weights is not None, "it has weights"
    pool, loaded = core.scheduler.pool, built.weights.loaded
    with pool.open(()) as allocation:
        allocation.grow(len(PROMPT))
        item = PlanItem(sequence_id=-1, start=0, token_ids=tuple(PROMPT), blocks=tuple(allocation.blocks))
        built.runner.logits(StepPlan((item,), weights=core.scheduler.weights))
        blocks = allocation.blocks[: len(PROMPT) // BLOCK_TOKENS]
        others = [block for block in range(pool.total) if block not in allocation.blocks][: len(blocks)]
        host = range(len(blocks))
        geometry = Geometry(
            str(engine.model.dtype), loaded.config.num_layers, *loaded.config.kv_shape,
            BLOCK_TOKENS * len(blocks),
        )  # fmt: skip
        ops = loaded.decoder.ops
        records: HostRecords[RecordPayloads]
        if built.group is None:
            records = HostKv(swapper.slabs(), ops.kv_vectors, geometry)
        else:
            records = ParallelHostRecords(built.group.shares, swapper, built.group.hosts, ops, geometry)
        out, back = tuple(zip(blocks, host, strict=True)), tuple(zip(others, host, strict=True))
        for plans in ([StepPlan((), swap_out=out)], [StepPlan((), swap_in=back), StepPlan((), swap_out=back)]):
            for plan in plans:
                swapper.swap(plan)
            swapper.mark().wait()
            swapper.forget()
            payloads = records.allocate_payloads()
            if not records.pack(list(host), payloads):
                raise EngineFault("KV that came to the host is not finite")
            found.append(payloads.numbers.float())
    return found


def write_another(tensor: torch.Tensor, seed: torch.Generator) -> torch.Tensor:
    """Return a tensor of other random values of the same kind; constant and one-dimensional tensors stay as
    they are.
    """
    if tensor.dtype == torch.int32 and not tensor.eq(tensor[0, 0]).all():
        return torch.randint(-(2**31), 2**31, tensor.shape, generator=seed).to(torch.int32)
    if tensor.dtype == torch.bfloat16 and tensor.ndim > 1:
        return torch.empty_like(tensor).normal_(0, 0.02, generator=seed)
    return tensor.clone()


def nccl_version() -> tuple[int, int]:
    """Return the version of the NCCL library that this process has loaded; torch only tells the one it was
    built with.
    """
    found = ctypes.c_int()
    library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    if library.ncclGetVersion(ctypes.byref(found)):
        raise EngineFault("NCCL does not tell its version")
    return found.value // 10_000, found.value // 100 % 100


def nccl_responds() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
