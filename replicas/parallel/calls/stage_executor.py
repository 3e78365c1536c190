"""Calls of a pipeline stage that computes on a GPU, with its input and its output on the host.

Stages may thus be on different cards, or some of them on a CPU, on one node or on several, and need no access to each
other's memory. Each stage has its own operators, in the dtype that its device computes in.
"""

from __future__ import annotations

from typing import Any

import torch

from ...gpu.accelerator import Accelerator, copy_to_host
from ...model.decoder import Decoder, HiddenStream
from . import decoder_calls


class StageExecutor:
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
        stream: HiddenStream | None = None,
    ) -> decoder_calls.CallResult:
        """Make a call of the decoder on the GPU as `decoder_calls.execute_call` does on a CPU, and return when it is
        done.
        """
        found: list[decoder_calls.CallResult] = []
        there = self._accelerator.moved

        def work() -> None:
            moved = {name: there(values) for name, values in tensors.items()}
            flowing = None if stream is None else (there(stream[0]), there(stream[1]))
            given = decoder_calls.execute_call(decoder, kv, fields, moved, flowing)
            found.append(_on_host(given) if self._wanted else given)

        self._accelerator.submit(work)
        self._accelerator.mark().wait()
        return found[0]


def _on_host(found: decoder_calls.CallResult) -> decoder_calls.CallResult:
    return copy_to_host(found) if isinstance(found, torch.Tensor) else (copy_to_host(found[0]), copy_to_host(found[1]))
