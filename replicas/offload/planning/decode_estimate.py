"""Calculation of what an offload plan means for a model that is not loaded: its memory and, on a GPU, its time.

Times are calculated: layers by the roofline or by the host's launches, copies by the card's own PCIe, put together by
`offloaded_step_s`. No table has the speed of a disk, so that callers which need it measure one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....kernels.device.device_spec import DeviceSpec
from ....kernels.device.interconnect import available_links
from ....kernels.layer_memory import LayerMemory
from ...kv.memory_budget import MemoryParts
from ...model.decoder import Decoder
from ...model.roofline_times import decode_layers_s, head_s, prefill_layers_s
from .device_plan import DevicePlan, offloaded_step_s, plan_device
from .disk_plan import DecodeEstimate, DiskPlan, WeightBudgets, plan_disk
from .weight_budget import weight_sizes

__all__ = ["estimate_decode", "host_copy_rate", "latency_lower_bounds", "memory_under_plan", "plan_for_budgets"]

_UNBOUND = float("inf")
# Seconds that the host takes to launch a layer without a CUDA graph: some 13 launches, which took the host of an H200
# about 60 us each when every launch went through Triton, and take half of that since (measured without a GPU).
_LAUNCHED_S = 13 * 30e-6


def plan_for_budgets(decoder: Decoder, budgets: WeightBudgets) -> DiskPlan | DevicePlan:
    """Return the offload plan for an outline of a model within these budgets. Raises InvalidRequest."""
    sizes = weight_sizes(decoder)
    return (
        plan_disk(sizes, budgets.device) if budgets.host is None else plan_device(sizes, budgets.device, budgets.host)
    )


def memory_under_plan(parts: MemoryParts, decoder: Decoder, plan: DiskPlan | DevicePlan) -> MemoryParts:
    """Return the bytes that an offloaded model takes of a device: weights that stay, with the two buffers, and no CUDA
    graphs where layers are offloaded.
    """
    gone = [sum((joined.held for joined in decoder.layers[index].linears), LayerMemory(0)) for index in plan.layers]
    embedding = decoder.embedding.nbytes if isinstance(plan, DiskPlan) and plan.embedding else 0
    weights = sum(each.weights for each in gone) + embedding - 2 * plan.buffer_bytes
    metadata = sum(each.metadata for each in gone)
    graphs = 0 if plan.layers else parts.graphs
    return replace(parts, weights=parts.weights - weights, metadata=parts.metadata - metadata, graphs=graphs)


def host_copy_rate(device: DeviceSpec) -> float:
    """Bytes per second from the host's memory to the device, as the card's own PCIe allows; not measured."""
    return available_links(device, ["pcie"])[-1].bandwidth


def estimate_decode(
    device: DeviceSpec, decoder: Decoder, plan: DevicePlan, reads_per_s: float | None = None
) -> DecodeEstimate:
    """Return the expected speed of one sequence with a short context.

    reads_per_s  bytes a second of the disk; None if nothing is read from it
    """
    rest_s = head_s(device, decoder, 1)
    layers_s = _launched(decode_layers_s(device, decoder, 1, 1))
    copies = host_copy_rate(device) if plan.layers else None
    step_s = offloaded_step_s(plan, copies or _UNBOUND, reads_per_s or _UNBOUND, layers_s, rest_s)
    return DecodeEstimate(reads_per_s, tuple(layers_s), rest_s, step_s, copies)


def latency_lower_bounds(
    device: DeviceSpec, decoder: Decoder, plan: DevicePlan, context: int, batch: int, chunk: int
) -> tuple[float, float]:
    """Return the seconds to the first token of a prompt of `context` tokens, and the seconds per token of a batch, as
    if reading from disk took no time.
    """
    rate, rest_s = host_copy_rate(device), head_s(device, decoder, batch)
    layers_s = _launched(decode_layers_s(device, decoder, context, batch))
    token_s = offloaded_step_s(plan, rate, _UNBOUND, layers_s, rest_s)
    starts = range(0, context, chunk)
    chunks = [prefill_layers_s(device, decoder, min(chunk, context - start), start) for start in starts]
    first_s = sum(offloaded_step_s(plan, rate, _UNBOUND, _launched(layers), 0.0) for layers in chunks)
    return first_s + head_s(device, decoder, 1), token_s


def _launched(layers_s: Sequence[float]) -> Sequence[float]:
    """Return the seconds of each layer: its computing or the host's launches, whichever takes longer."""
    return [max(seconds, _LAUNCHED_S) for seconds in layers_s]
