"""Exchanges between ranks through torch.distributed: NCCL between GPUs, gloo between CPU processes without shared
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from ....kernels.cpu.c_kernels.shm_collectives import RankLost

_POLL_INTERVAL = timedelta(seconds=0.5)  # gloo's waits do not end at `abort`, so that it is checked this often


class CollectiveBackend(Protocol):
    """Protocol of a torch process group, as far as ranks use it; each operation returns a work handle to wait for."""

    @property
    def allreduce(self) -> Callable[[list[torch.Tensor], Any], Any]: ...

    @property
    def allgather(self) -> Callable[[list[list[torch.Tensor]], list[torch.Tensor], Any], Any]: ...

    @property
    def broadcast(self) -> Callable[[list[torch.Tensor], Any], Any]: ...

    def abort(self) -> None:
        """Abort all exchanges, so that neither the other ranks nor this one wait any longer."""
        ...


class CollectiveExchange:
    """Exchange between ranks over a torch process group, which `join` sets. Implements `Exchange`.

    On CPUs an exchange raises RankLost at once when another rank has gone. On GPUs an exchange is work of the device:
    nothing is known of a lost rank until `abort` is called, and results after that are meaningless.
    """

    def __init__(self, group: CollectiveBackend | None = None) -> None:
        self._group = group
        self._aborted = False

    def join(self, group: CollectiveBackend) -> None:
        """Set the torch process group that exchanges go through; to be called before the first exchange."""
        self._group = group
        if self._aborted:
            group.abort()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the tensors of all ranks in the dtype of x, in an order that the backend chooses; the sum is the same
        on all.
        """
        x = x.contiguous()
        self._do(x, lambda group: group.allreduce([x], _start_on_current_stream(AllreduceOptions())))
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' [R, widths[rank]] to [R, sum(widths)].

        Parts are padded to the widest on their way, because backends need equal shapes.
        """
        widest = max(widths)
        padded = x.new_zeros(len(x), widest)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths]
        self._do(x, lambda group: group.allgather([parts], [padded], _start_on_current_stream(AllgatherOptions())))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy the first rank's x to every rank. x is overwritten; it is contiguous and has the same shape on every
        rank.
        """
        assert x.is_contiguous()
        self._do(x, lambda group: group.broadcast([x], _start_on_current_stream(BroadcastOptions())))
        return x

    def abort(self) -> None:
        """Abort all exchanges, so that no rank waits any longer. May be called from any thread."""
        if not self._aborted:
            self._aborted = True
            if self._group is not None:
                self._group.abort()

    def _do(self, x: torch.Tensor, begin: Callable[[CollectiveBackend], Any]) -> None:
        assert self._group is not None, "ranks are joined before they compute"
        self._check()
        try:
            work = begin(self._group)
            if x.device.type == "cpu":
                self._await(work)
            elif work is not None:
                work.wait()  # makes the device's stream wait, not the host
        except RuntimeError as error:
            raise RankLost(f"an exchange with other ranks failed: {error}") from error

    def _await(self, work: Any) -> None:
        while True:
            try:
                work.wait(_POLL_INTERVAL)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                self._check()

    def _check(self) -> None:
        if self._aborted:
            raise RankLost("a rank has stopped")


def _start_on_current_stream(options: Any) -> Any:
    """Set the options so that an exchange runs on the stream that computes, not beside it."""
    options.asyncOp = False
    return options
