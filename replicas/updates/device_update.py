"""New weights made on a device while it computes steps, in memory that the steps will not need."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import Unavailable
from ..gpu.accelerator import Accelerator
from ..loading.model_loader import LoadedModel, updated_model
from ..model.checkpoint_inspection import Checkpoint
from ..model.decoder import Decoder
from ..model.parts.layer_source import LayerPart
from ..model.sharding.ranks import Ranks
from ..model.tensor_layout import EMBEDDING
from ..offload.device.device_tier import DeviceTier
from ..offload.disk.disk_tier import layer_index
from ..offload.disk.layer_prefetch import NUM_BUFFERS

__all__ = ["DeviceUpdater", "update_bytes"]

# Memory needed besides a part while it is made, as a multiple of what the part keeps. For a quantized part: codes of a
# byte each, the same stacked, and int32 from which words are packed; or, where no kernel takes it, fp32 from which
# floating point is cast. For a dense part: what was stored, cast, and stacked. For a norm or the embedding: what was
# stored, in fp32 at most.
_QUANTIZED, _DENSE, _TABLE = 9, 3, 2
_GAPS_SHARE, _GAPS_BYTES = 16, 64 << 20  # allowance for gaps: torch allocates memory in pieces of 2 and of 20 MiB


@dataclass(frozen=True, slots=True)
class DeviceUpdater:
    """Maker of new weights on a device that computes steps.

    step_bytes  bytes that the largest step takes besides weights and KV, which stay free
    """

    accelerator: Accelerator
    step_bytes: int

    def updated_model(
        self, before: LoadedModel, checkpoint: Checkpoint, changed: Collection[str], ranks: Ranks | None = None
    ) -> LoadedModel:
        """Make a model with new weights as the `updated_model` of a CPU does; all of it is on the device when this
        returns.

        May be called from any thread. Raises Unavailable where there is no memory for it; the need is calculated before
        anything is read.
        """
        needed = update_bytes(before.decoder, changed)
        free = self.accelerator.free_bytes() - self.step_bytes
        if needed > free:
            raise _device_memory_error(
                f"the new weights need {_mib(needed)}, and {_mib(max(0, free))} are free beside the steps"
            )
        made, problem = None, ""
        try:
            made, mark = self.accelerator.aside(partial(updated_model, before, checkpoint, changed, ranks))
            mark.wait()
        except torch.OutOfMemoryError as error:
            problem = str(error)
        self.accelerator.free_bytes()  # releases the memory that was needed only while making them
        if made is None:  # not raised in the handler, whose traceback keeps what was made until then in memory
            raise _device_memory_error(problem)
        return made


def update_bytes(decoder: Decoder, changed: Collection[str]) -> int:
    """Bytes that a decoder with these changed tensors takes while it is made and afterwards, besides the present one,
    as calculated.

    It shares what is not changed, and makes the other parts one after the other. With offload, parts are written to a
    file as they are made, and copied to the device when all are, once it has two more buffers; offloaded layers take no
    memory of the device.
    """
    tier = decoder.tier
    far = tier.plan.layers if isinstance(tier, DeviceTier) else ()
    buffers = NUM_BUFFERS * tier.plan.buffer_bytes if isinstance(tier, DeviceTier) else 0
    anew = {layer_index(name) for name in changed}.intersection(far)  # whole, if a part of it is
    resident = largest = 0
    for names, part in decoder.made.items():
        layer = layer_index(next(iter(names)))
        if names.isdisjoint(changed) and layer not in anew:
            continue
        nbytes, beside = _part_bytes(names, part)
        resident += 0 if layer in far else nbytes
        largest = max(largest, beside + (nbytes if layer in far else 0))
    return resident + max(largest, buffers) + (resident + buffers) // _GAPS_SHARE + _GAPS_BYTES


def _part_bytes(names: Collection[str], part: LayerPart) -> tuple[int, int]:
    """Return the bytes that a part keeps, and the bytes needed besides while it is made."""
    if isinstance(part, torch.Tensor):
        return part.nbytes, part.nbytes * _TABLE
    held = part.held
    nbytes = held.nbytes - (held.given if EMBEDDING in names else 0)  # a tied head may be the embedding itself
    dense = all(name.endswith((".weight", ".bias")) for name in names)
    return nbytes, nbytes * (_DENSE if dense else _QUANTIZED)


def _device_memory_error(problem: str) -> Unavailable:
    return Unavailable(f"the device has no room: {problem}; kv_memory_bytes says how much is for KV", code="no_room")


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"
