"""Interface of a device that copies KV blocks beside its steps; and the CPU, which copies at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """Point in the order of a device's work, which can be waited for."""

    def wait(self) -> None:
        """Wait until all work submitted before is done. Raises what that work raised, if it was not raised before."""
        ...


class Copier(Protocol):
    """Protocol of a device that copies KV while other work runs. Work runs in torch's inference mode.

    apart  whether the device has memory of its own, which the host's processor does not access
    """

    device: torch.device
    apart: bool

    def staging(self, size: int) -> torch.Tensor:
        """Allocate memory of the host, uint8 [size], that the device can read and write by itself."""
        ...

    def pin(self, memory: torch.Tensor) -> None:
        """Pin memory of the host, uint8, which other processes may share, so that the device can read and write it by
        itself.

        The memory must exist as long as the process. Where it cannot be pinned, copies are slower and the log says so.
        """
        ...

    def trim(self) -> None:
        """Return memory to the system that `staging` gave and nothing refers to any more."""
        ...

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, made as part of the work that is being submitted. The host's tensor may be freed
        at once.
        """
        ...

    def mark(self) -> DeviceEvent: ...

    def copy(self, work: Callable[[], None], after: DeviceEvent | None = None) -> DeviceEvent:
        """Run work beside what is submitted: after all earlier calls of `copy`, and after the mark. Returns a mark of
        its end.
        """
        ...

    def follow(self, mark: DeviceEvent) -> None:
        """Let the work that is submitted from now on run after that mark of a copy."""
        ...


class CpuCopier:
    """CPU, on which work is done when the call returns."""

    device = torch.device("cpu")
    apart = False

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        return None

    def trim(self) -> None:
        return None

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def mark(self) -> DeviceEvent:
        return _CompletedEvent()

    @torch.inference_mode()
    def copy(self, work: Callable[[], None], after: DeviceEvent | None = None) -> DeviceEvent:
        work()
        return _CompletedEvent()

    def follow(self, mark: DeviceEvent) -> None:
        return None


class _CompletedEvent:
    def wait(self) -> None:
        return None
