"""Calls of a pipeline stage that computes on a GPU, with its input and its output on the host.

Stages may thus be on different cards, or some of them on a CPU, on one node or on several, and need no access to each
other's memory. Each stage has its own operators, in the dtype that its device computes in.
"""

from __future__ import annotations

from typing import Any

import torch

from ..decoder import Decoder, Stream
from ..gpu.accelerator import Accelerator, to_host
from . import calls

__all__ = ["OnDevice"]


class OnDevice:
    """Caller of a decoder on a GPU, for one call at a time.

    wanted  whether results are copied to the host; False where nobody needs them
    """

    def __init__(self, accelerator: Accelerator, *, wanted: bool = True) -> None:
        self._accelerator, self._wanted = accelerator, wanted

    def make(
        self,
        decoder: Decoder,
        kv: list[torch.Tensor],
        fields: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        stream: Stream | None = None,
    ) -> calls.Found:
        """Make a call of the decoder on the GPU as `calls.make` does on a CPU, and return when it is done."""
        found: list[calls.Found] = []
        there = self._accelerator.moved

        def work() -> None:
            moved = {name: there(values) for name, values in tensors.items()}
            flowing = None if stream is None else (there(stream[0]), there(stream[1]))
            given = calls.make(decoder, kv, fields, moved, flowing)
            found.append(_on_host(given) if self._wanted else given)

        self._accelerator.submit(work)
        self._accelerator.mark().wait()
        return found[0]


def _on_host(found: calls.Found) -> calls.Found:
    return to_host(found) if isinstance(found, torch.Tensor) else (to_host(found[0]), to_host(found[1]))
