"""Exchanges through torch.distributed: NCCL between GPUs, gloo where processes of CPUs share no memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["CollectiveExchange"]


class CollectiveExchange:
    """An `Exchange` on a process group, whose timeout is how long a rank is waited for. Raises RuntimeError then."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """In the dtype of x, in an order that the backend chooses: the same on every rank."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Parts are padded to the widest on their way: backends want equal ones."""
        widest = max(widths)
        padded = x.new_zeros(len(x), widest)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
