"""Report of each process of a divided model on its own device, made before layers are divided: the device's speed and
memory, and what the model costs there.

So the process that divides the layers needs neither the other devices nor their operators.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ....kernels.device.precision import policy_of
from ....kernels.ops import Ops
from ....kernels.tuning.timing import time_runs
from ...capacity.device_fit import TargetDevice, build_meta_decoder, local_cpu, local_gpu
from ...engine_config import EngineConfig
from ...host.host_memory import memory_owner
from ...kv.memory_budget import reserve_bytes
from ...model.checkpoint_inspection import Checkpoint
from ...model.layers import allocate_kv

__all__ = ["DeviceReport", "device_report", "layers_sharing_memory", "report_local_device"]

# Assumed for each thread of a CPU, since no table has it. Bandwidth is measured where layers are chosen by it.
_THREAD_BANDWIDTH, _THREAD_COMPUTE = 1e10, 1e11
_READ_BYTES = 2**27  # more than a cache has
_READ_S = 0.05

Source = Literal["table", "measured", "assumed"]


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One process's report on its device, which is sent to other processes as JSON.

    name             name of the device and of its host
    on_device        whether it has memory of its own, which no other process uses
    capability       compute capability of a GPU
    dtype            dtype of activations
    threads          threads that it computes with, on a CPU
    bandwidth        bytes a second
    source           where `bandwidth` is from
    compute          operations a second, by the table of GPUs; for a CPU assumed, by its threads
    total            bytes of memory
    free             bytes of memory that are free before anything is loaded
    owner            identity of that memory: processes with the same owner share it
    layers           bytes of each of the model's layers, in the format in which it would be held here; empty, as the
                     following are 0, where layers are not chosen by these reports
    embedding, head  bytes of these, likewise
    kv_block         bytes of a KV block in one layer, in that with the most
    """

    name: str
    on_device: bool
    capability: str | None
    dtype: str
    threads: int
    bandwidth: float
    source: Source
    compute: float
    total: int
    free: int
    owner: str
    layers: Sequence[int] = ()
    embedding: int = 0
    head: int = 0
    kv_block: int = 0

    @property
    def usable(self) -> int:
        """Bytes of the device's memory that weights and KV may take."""
        return max(0, self.free - reserve_bytes(self.total)) if self.on_device else self.free

    def __str__(self) -> str:
        kind = "" if self.capability is None else f" ({self.capability})"
        memory = f"{self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB free"
        return f"{self.name}{kind}, {self.bandwidth / 1e9:.0f} GB/s ({self.source}), {memory}, in {self.dtype}"


def report_local_device(
    checkpoint: Checkpoint,
    config: EngineConfig,
    ops: Ops,
    make_meta_ops: Callable[[], Ops],
    *,
    on_device: bool,
    chosen: bool,
) -> DeviceReport:
    """Return this process's report on its device.

    make_meta_ops  makes operators for an outline of the model, whose choices `ops` keep apart from their own
    on_device      whether it has an accelerator
    chosen         whether layers are chosen by these reports, so that the model's costs are computed and a CPU's
                   bandwidth is measured
    """
    priced = checkpoint if chosen else None
    if ops.device.type == "cuda":
        return device_report(priced, local_gpu(ops.device, config.kv_dtype), host=socket.gethostname())
    account = device_report(
        priced, local_cpu(make_meta_ops), threads=config.threads or 1, host=socket.gethostname(), on_device=on_device,
        owner="" if on_device else memory_owner(),
    )  # fmt: skip
    measured = chosen and not on_device
    return replace(account, bandwidth=_read_bandwidth(), source="measured") if measured else account


def device_report(
    checkpoint: Checkpoint | None,
    place: TargetDevice,
    *,
    threads: int = 1,
    host: str = "",
    on_device: bool | None = None,
    owner: str = "",
) -> DeviceReport:
    """Return the report of a process at a device. Raises ValueError for what the device cannot hold.

    checkpoint  the model; None if its costs are not needed
    threads     threads of a CPU
    on_device   whether the memory is a device's own; None for yes on a GPU alone
    """
    ops, device = place.ops(), place.device
    name = place.name if device else f"{place.name}, {threads} threads"
    return DeviceReport(
        name=f"{name} of {host}" if host else name,
        on_device=device is not None if on_device is None else on_device,
        capability=None if device is None else str(device.capability),
        dtype=str(ops.dtype).removeprefix("torch."),
        threads=threads,
        bandwidth=threads * _THREAD_BANDWIDTH if device is None else device.bandwidth,
        source="assumed" if device is None else "table",
        compute=threads * _THREAD_COMPUTE
        if device is None
        else device.rates[policy_of(*device.capability.version).prefill.arithmetic],
        total=place.total,
        free=place.free,
        owner=owner,
        **({} if checkpoint is None else _costs(checkpoint, ops)),
    )


def layers_sharing_memory(accounts: Sequence[DeviceReport], layers: Sequence[int], number: int) -> int:
    """Return the number of layers of all processes that use the same memory as process `number`.

    layers  number of layers of each process
    """
    own = accounts[number]
    return sum(
        count
        for each, count in zip(accounts, layers, strict=True)
        if each is own or (not (own.on_device or each.on_device) and each.owner == own.owner)
    )


def _costs(checkpoint: Checkpoint, ops: Ops) -> dict[str, Any]:
    """Return the fields of a `DeviceReport` that say what the model costs at operators `ops`."""
    config = checkpoint.config
    decoder = build_meta_decoder(config, checkpoint.format, checkpoint.tensors, ops)
    return {
        "layers": [layer.held.nbytes for layer in decoder.layers],
        "embedding": decoder.embedding.nbytes,
        "head": decoder.head.held.nbytes,
        "kv_block": max(cache.nbytes for cache in allocate_kv(ops, config.layers, 1)),
    }


def _read_bandwidth() -> float:
    """Bytes a second that torch's threads read of memory that is in no cache, as measured."""
    values = torch.ones(_READ_BYTES // 4)  # ones, since pages of zeros may all be the same one
    return _READ_BYTES / time_runs([values.sum], values.device, budget_s=_READ_S).p50
