"""A pipeline stage's calls where it computes on a GPU: what comes and what goes on is on the host.

So stages may be on unlike cards, or some of them on a CPU, of one node or of several, and need no way to each other's
memory; each has its own operators, in the dtype that its device computes in.
"""

from __future__ import annotations

from typing import Any

import torch

from ..decoder import Decoder, Stream
from ..gpu.accelerator import Accelerator, to_host
from . import calls

__all__ = ["OnDevice"]


class OnDevice:
    """Makes calls (calls.py), one at a time. wanted: False: what they give is nobody's, and stays there."""

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
        """As `calls.make`. Returns when it is done."""
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
