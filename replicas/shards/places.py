"""What each process of a divided model says of its own device, before layers are divided: what that is and holds, and
what the model costs there. So whoever divides them needs neither the device nor its operators.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...kernels.ops import Ops
from ...kernels.precision import policy_of
from ..checkpoint import Checkpoint
from ..engine_config import EngineConfig
from ..fit import Place, at_hand, cpu, outlined
from ..memory import memory_owner, reserve_bytes

__all__ = ["Account", "account_here", "account_of"]

# Of a core, assumed: no table tells them, and what is measured at a start would divide layers otherwise every time.
CORE_BANDWIDTH, CORE_COMPUTE = 1e10, 1e11


@dataclass(frozen=True, slots=True)
class Account:
    """Of one process. It goes to others as JSON has it.

    name             of the device, and of its host
    on_device        it has memory of its own, and no other process has any of it
    capability       of a GPU
    dtype            of activations
    bandwidth        bytes a second; compute: operations a second. By the table of GPUs; of a CPU assumed, by its threads
    total, free      bytes of memory; free before anything is loaded
    owner            of that memory: who has the same one shares it
    layers           bytes of each of the model's, as it would be held here; embedding and head: likewise
    kv_block         bytes of a block of KV in a layer
    """

    name: str
    on_device: bool
    capability: str | None
    dtype: str
    bandwidth: float
    compute: float
    total: int
    free: int
    owner: str
    layers: Sequence[int]
    embedding: int
    head: int
    kv_block: int

    @property
    def usable(self) -> int:
        """For weights and KV."""
        return max(0, self.free - reserve_bytes(self.total)) if self.on_device else self.free

    def __str__(self) -> str:
        kind = "" if self.capability is None else f" ({self.capability})"
        assumed = " assumed" if self.capability is None else ""
        memory = f"{self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB free"
        return f"{self.name}{kind}, {self.bandwidth / 1e9:.0f} GB/s{assumed}, {memory}, in {self.dtype}"


def account_here(
    checkpoint: Checkpoint, config: EngineConfig, ops: Ops, outline: Callable[[], Ops], *, on_device: bool
) -> Account:
    """Of this process. outline: makes operators for an outline, of which `ops` keep their own choices apart.

    on_device  it has an accelerator
    """
    gpu = ops.device.type == "cuda"
    place = at_hand(ops.device, config.kv_dtype) if gpu else cpu(outline)
    return account_of(
        checkpoint, place, threads=config.threads or 1, host=socket.gethostname(), on_device=on_device,
        owner="" if on_device else memory_owner(),
    )  # fmt: skip


def account_of(
    checkpoint: Checkpoint,
    place: Place,
    *,
    threads: int = 1,
    host: str = "",
    on_device: bool | None = None,
    owner: str = "",
) -> Account:
    """Of a process that is there. Raises ValueError for what the device cannot hold.

    threads    of a CPU
    on_device  None: if it is on a GPU
    """
    ops, config = place.ops(), checkpoint.config
    decoder = outlined(config, checkpoint.format, checkpoint.tensors, ops)
    [cache] = ops.allocate_kv(1, 1, config.num_kv_heads, config.head_dim)
    device, name = place.device, place.name if place.device else f"{place.name}, {threads} threads"
    return Account(
        name=f"{name} of {host}" if host else name,
        on_device=device is not None if on_device is None else on_device,
        capability=None if device is None else str(device.capability),
        dtype=str(ops.dtype).removeprefix("torch."),
        bandwidth=threads * CORE_BANDWIDTH if device is None else device.bandwidth,
        compute=threads * CORE_COMPUTE
        if device is None
        else device.rates[policy_of(*device.capability.version).prefill.arithmetic],
        total=place.total,
        free=place.free,
        owner=owner,
        layers=[layer.held.nbytes for layer in decoder.layers],
        embedding=decoder.embedding.nbytes,
        head=decoder.head.held.nbytes,
        kv_block=cache.nbytes,
    )
