"""Check of the budgets for offload, and sizes of a model's repacked weights, from an outline before any weight
is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....kernels.contract import Linear
from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.packed_weights import align_up
from ...execution.copier import Copier
from ...host.host_memory import available_memory
from ...kv.memory_budget import host_weights_budget
from ...model.decoder import Decoder
from .device_plan import host_memory_error, plan_device
from .disk_plan import WeightBudgets, WeightSizes, format_mib, plan_disk, weights_memory_error

__all__ = ["WeightBudgets", "check_budget", "resolve_budgets", "weight_sizes"]

log = logging.getLogger(__name__)


def resolve_budgets(device: int, host: int | None, copier: Copier | None) -> WeightBudgets:
    """Return the configured budgets in bytes; `host` None takes most of the host's free memory. Raises
    InvalidRequest.
    """
    if copier is not None and copier.apart:
        nbytes, why = host_weights_budget(host, available_memory())
        log.info("weights: at most %s of the host's memory, pinned: %s", format_mib(nbytes), why)
        return WeightBudgets(device, nbytes)
    if host is not None:
        raise host_memory_error(
            "it is for GPUs only; on a CPU weights_memory_bytes limits the weights in the host's memory"
        )
    return WeightBudgets(device, None)


def check_budget(decoder: Decoder, budget: int, host: int | None = None) -> None:
    """Raise InvalidRequest where the model cannot be offloaded, or does not fit these budgets.

    decoder  outline of the model; weights whose values rule out an integer kernel take more than it says
    host     bytes of the host's memory, where `budget` is of a device with memory of its own
    """
    sizes = weight_sizes(decoder)
    if host is None:
        plan_disk(sizes, budget)
    else:
        plan_device(sizes, budget, host)


def weight_sizes(decoder: Decoder) -> WeightSizes:
    """Return the sizes that an outline's weights will have in the file of repacked weights.

    Raises InvalidRequest for weights that such a file cannot have.
    """
    vectors = [decoder.norm, *(vector for layer in decoder.layers for vector in layer.vectors)]
    ops = decoder.ops
    keeps = isinstance(ops, PackedLayerOps) and ops.keeps(decoder.head)
    is_embedding = keeps and decoder.tied and decoder.head.held.given > 0
    head = _repacked_bytes(decoder, "head", [] if is_embedding else [decoder.head])
    layers = [
        sum(_repacked_bytes(decoder, f"layer {number}", joined.parts) for joined in layer.linears)
        for number, layer in enumerate(decoder.layers)
    ]
    return WeightSizes(
        align_up(decoder.embedding.nbytes), head + sum(align_up(vector.nbytes) for vector in vectors), tuple(layers)
    )


def _repacked_bytes(decoder: Decoder, what: str, parts: Sequence[Linear]) -> int:
    ops, nbytes = decoder.ops, 0
    for part in parts:
        packed = ops.packed(part) if isinstance(ops, PackedLayerOps) else None
        if packed is None:
            raise weights_memory_error(f"{what} is computed by {part.kernel}, whose weights cannot be kept on disk")
        nbytes += sum(align_up(tensor.nbytes) for tensor in packed.tensors.values())
    return nbytes
