"""Check of the budgets for offload, and sizes of a model's repacked weights, from an outline before any weight
is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...kernels.contract import Linear
from ...kernels.packed_layer import PackedLayerOps
from ..decoder import Decoder
from ..gpu.accelerator import Copier
from ..host_memory import available_memory
from ..memory import host_weights_budget
from .placed import host_refused, placed
from .plan import Budgets, Sizes, mib, planned, refused
from .tier import up

__all__ = ["Budgets", "budgets", "check_budget", "sizes_of"]

log = logging.getLogger(__name__)


def budgets(device: int, host: int | None, copier: Copier | None) -> Budgets:
    """Return the configured budgets in bytes; `host` None takes most of the host's free memory. Raises
    InvalidRequest.
    """
    if copier is not None and copier.apart:
        nbytes, why = host_weights_budget(host, available_memory())
        log.info("weights: at most %s of the host's memory, pinned: %s", mib(nbytes), why)
        return Budgets(device, nbytes)
    if host is not None:
        raise host_refused(f"{host!r} is not accepted; expected null on a CPU, whose memory is the host's")
    return Budgets(device, None)


def check_budget(decoder: Decoder, budget: int, host: int | None = None) -> None:
    """Raise InvalidRequest where the model cannot be offloaded, or does not fit these budgets.

    decoder  outline of the model; weights whose values rule out an integer kernel take more than it says
    host     bytes of the host's memory, where `budget` is of a device with memory of its own
    """
    sizes = sizes_of(decoder)
    if host is None:
        planned(sizes, budget)
    else:
        placed(sizes, budget, host)


def sizes_of(decoder: Decoder) -> Sizes:
    """Return the sizes that an outline's weights will have in the file of repacked weights.

    Raises InvalidRequest for weights that such a file cannot have.
    """
    vectors = [decoder.norm]
    for layer in decoder.layers:
        attention = layer.attention
        found = (layer.input_norm, layer.post_attention_norm, attention.q_norm, attention.k_norm)
        vectors += [vector for vector in found if vector is not None]
    ops = decoder.ops
    keeps = isinstance(ops, PackedLayerOps) and ops.keeps(decoder.head)
    is_embedding = keeps and decoder.tied and decoder.head.held.given > 0
    head = _kept(decoder, "head", [] if is_embedding else [decoder.head])
    layers = [
        sum(_kept(decoder, f"layer {number}", joined.parts) for joined in layer.linears)
        for number, layer in enumerate(decoder.layers)
    ]
    return Sizes(up(decoder.embedding.nbytes), head + sum(up(vector.nbytes) for vector in vectors), tuple(layers))


def _kept(decoder: Decoder, what: str, parts: Sequence[Linear]) -> int:
    ops, nbytes = decoder.ops, 0
    for part in parts:
        packed = ops.packed(part) if isinstance(ops, PackedLayerOps) else None
        if packed is None:
            raise refused(f"{what} is computed by {part.kernel}, whose weights cannot be kept on disk")
        nbytes += sum(up(tensor.nbytes) for tensor in packed.tensors.values())
    return nbytes
