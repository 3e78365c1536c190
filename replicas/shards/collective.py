"""Exchanges through torch.distributed: NCCL between GPUs, gloo where processes of CPUs share no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from ...kernels.cpu.c_kernels.shm_collectives import RankLost

__all__ = ["CollectiveExchange", "Collectives"]

_LOOK = timedelta(seconds=0.5)  # gloo's waits know nothing of `abort`, which is looked for so often


class Collectives(Protocol):
    """Of a process group of torch's, or of what is behind one. Each gives work to be waited for."""

    @property
    def allreduce(self) -> Callable[[list[torch.Tensor], Any], Any]: ...

    @property
    def allgather(self) -> Callable[[list[list[torch.Tensor]], list[torch.Tensor], Any], Any]: ...

    @property
    def broadcast(self) -> Callable[[list[torch.Tensor], Any], Any]: ...

    def abort(self) -> None:
        """Nobody waits any longer, and neither does this."""
        ...


class CollectiveExchange:
    """An `Exchange` among ranks that `join` has joined. Raises RankLost, on CPUs at once, for a rank that has gone.

    On GPUs it is work of the device: of a rank that has gone nothing is heard until `abort`, and what comes then is
    nonsense.
    """

    def __init__(self, group: Collectives | None = None) -> None:
        self._group = group
        self._aborted = False

    def join(self, group: Collectives) -> None:
        """Before the first exchange."""
        self._group = group
        if self._aborted:
            group.abort()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """In the dtype of x, in an order that the backend chooses: the same on every rank."""
        x = x.contiguous()
        self._do(x, lambda group: group.allreduce([x], _now(AllreduceOptions())))
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Parts are padded to the widest on their way: backends want equal ones."""
        widest = max(widths)
        padded = x.new_zeros(len(x), widest)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths]
        self._do(x, lambda group: group.allgather([parts], [padded], _now(AllgatherOptions())))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's x on every rank, in x itself, which is contiguous and of one shape."""
        assert x.is_contiguous()
        self._do(x, lambda group: group.broadcast([x], _now(BroadcastOptions())))
        return x

    def abort(self) -> None:
        """Nobody waits any longer. From any thread."""
        if not self._aborted:
            self._aborted = True
            if self._group is not None:
                self._group.abort()

    def _do(self, x: torch.Tensor, begin: Callable[[Collectives], Any]) -> None:
        assert self._group is not None, "ranks are joined before they compute"
        self._check()
        try:
            work = begin(self._group)
            if x.device.type == "cpu":
                self._await(work)
            elif work is not None:
                work.wait()  # the device's stream does, not the host
        except RuntimeError as error:
            raise RankLost(f"an exchange with other ranks failed: {error}") from error

    def _await(self, work: Any) -> None:
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                self._check()

    def _check(self) -> None:
        if self._aborted:
            raise RankLost("a rank has given up")


def _now(options: Any) -> Any:
    """On the stream that computes, not beside it."""
    options.asyncOp = False
    return options
