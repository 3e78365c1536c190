"""New weights made on a device while it computes steps: in memory that these will not need."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch

from ..checkpoint import Checkpoint
from ..decoder import Decoder
from ..errors import Unavailable
from ..gpu.accelerator import Accelerator
from ..layers import Part
from ..layout import EMBEDDING
from ..model import LoadedModel, updated_model
from ..shards.ranks import Ranks
from ..tiers.ahead import BUFFERS
from ..tiers.device import DeviceTier
from ..tiers.tier import layer_of

__all__ = ["Beside", "bytes_beside"]

# What is there beside a part while it is made, in times what it keeps. Of a quantized one codes of a byte each, stacked
# once more, and int32 on the way to words; or, where no kernel takes it, fp32 on the way to floating point. Of a dense
# one what was stored, cast, and stacked. Of a norm or the embedding what was stored, in fp32 at most.
_QUANTIZED, _DENSE, _TABLE = 9, 3, 2
_GAPS_SHARE, _GAPS_BYTES = 16, 64 << 20  # an allowance: torch takes memory in pieces of 2 and of 20 MiB


@dataclass(frozen=True, slots=True)
class Beside:
    """step_bytes: what the largest step takes beside weights and KV, which stays free."""

    accelerator: Accelerator
    step_bytes: int

    def updated_model(
        self, before: LoadedModel, checkpoint: Checkpoint, changed: Collection[str], ranks: Ranks | None = None
    ) -> LoadedModel:
        """As `updated_model` of a CPU; all of it is there when this returns. From any thread.

        Raises Unavailable where there is no room for it, which is reckoned before anything is read.
        """
        needed = bytes_beside(before.decoder, changed)
        free = self.accelerator.room() - self.step_bytes
        if needed > free:
            raise _no_room(f"the new weights want {_mib(needed)}, and beside steps {_mib(max(0, free))} are free")
        made, problem = None, ""
        try:
            made, mark = self.accelerator.aside(partial(updated_model, before, checkpoint, changed, ranks))
            mark.wait()
        except torch.OutOfMemoryError as error:
            problem = str(error)
        self.accelerator.room()  # what was needed on the way is given back
        if made is None:  # and not above: the error's traceback has what was made until then
            raise _no_room(problem)
        return made


def bytes_beside(decoder: Decoder, changed: Collection[str]) -> int:
    """What another decoder takes while it is made, and has, in which these tensors have changed: reckoned.

    What is not changed it shares; of the rest it makes one part after the other. In tiers they go to a file as they are
    made, and come to the device when all are, once it has two buffers more: there what comes and goes keeps nothing.
    """
    tier = decoder.tier
    far = tier.plan.layers if isinstance(tier, DeviceTier) else ()
    buffers = BUFFERS * tier.plan.buffer_bytes if isinstance(tier, DeviceTier) else 0
    anew = {layer_of(name) for name in changed}.intersection(far)  # whole, if a part of it is
    kept = largest = 0
    for names, part in decoder.made.items():
        layer = layer_of(next(iter(names)))
        if names.isdisjoint(changed) and layer not in anew:
            continue
        nbytes, beside = _made(names, part)
        kept += 0 if layer in far else nbytes
        largest = max(largest, beside + (nbytes if layer in far else 0))
    return kept + max(largest, buffers) + (kept + buffers) // _GAPS_SHARE + _GAPS_BYTES


def _made(names: Collection[str], part: Part) -> tuple[int, int]:
    """Bytes that it keeps, and that are beside it while it is made."""
    if isinstance(part, torch.Tensor):
        return part.nbytes, part.nbytes * _TABLE
    held = part.held
    nbytes = held.nbytes - (held.given if EMBEDDING in names else 0)  # a tied head may be the embedding itself
    dense = all(name.endswith((".weight", ".bias")) for name in names)
    return nbytes, nbytes * (_DENSE if dense else _QUANTIZED)


def _no_room(problem: str) -> Unavailable:
    return Unavailable(f"the device has no room: {problem}; kv_memory_bytes says how much is for KV", code="no_room")


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"
