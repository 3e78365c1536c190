"""Which GPUs the stages of an engine will have, as far as that is known before any process has started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ...kernels.device_lookup import at_hand
from ...kernels.ops import KvDtype
from ...kernels.precision import policy_of
from ...kernels.rig import Rig
from ..engine_config import EngineConfig
from ..errors import InvalidRequest
from ..fit import Place
from ..memory import CONTEXT_BYTES
from .launch import Launcher
from .own import device_of

__all__ = ["places_of"]

_ASSUMED = "; as if all GPUs were like the first process's: which the others have is known when they have started"


def places_of(config: EngineConfig, launcher: Launcher) -> tuple[list[Place], str]:
    """Of each stage the weakest GPU of its ranks, with nothing else on it; and what of that is assumed, in words.

    config: of the first process. Raises InvalidRequest for a GPU that no model runs on.
    """
    size, stages = config.tensor_parallel, config.pipeline_parallel
    if launcher.device(1) is not None:  # each sees its own alone, by the same name
        return [_seen(config.device, config.kv_dtype)] * stages, _ASSUMED
    places = [_seen(device_of(config, launcher, number), config.kv_dtype) for number in range(size * stages)]
    return [_weakest(places[first : first + size]) for first in range(0, len(places), size)], ""


def _seen(name: str, kv_dtype: KvDtype | None) -> Place:
    """A GPU of this machine, by what it is: nothing is made on it for that."""
    from ...kernels.gpu.operators import GpuOps  # imports Triton

    properties = torch.cuda.get_device_properties(torch.device(name))
    try:
        rig = Rig(torch.device("meta"), policy_of(properties.major, properties.minor), at_hand(properties).device)
    except ValueError as error:
        raise InvalidRequest(f"device: {name}: {error}", param="device") from error
    total, ops = properties.total_memory, partial(GpuOps, rig, kv_dtype)
    return Place(f"{name}, {properties.name}", ops, total, total - CONTEXT_BYTES, rig.about, at_hand=True)


def _weakest(places: Sequence[Place]) -> Place:
    slowest = min(places, key=lambda place: place.device.bandwidth if place.device else 0.0)
    return replace(slowest, total=min(place.total for place in places), free=min(place.free for place in places))
