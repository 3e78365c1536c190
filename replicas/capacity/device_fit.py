"""Fit of a model on a device, computed from headers and tables: the loader runs on an outline, and nothing is
loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...kernels.device.device_context import DeviceContext, gpu_context
from ...kernels.device.device_spec import DeviceSpec
from ...kernels.device.device_table import DEVICES
from ...kernels.device.dtypes import TORCH_DTYPES
from ...kernels.device.precision import policy_of
from ...kernels.ops import KvDtype, Ops
from ..checkpoint.files.safetensors_header import TensorInfo
from ..checkpoint.reading.weight_loader import MetaWeightLoader
from ..errors import CheckpointError, InvalidRequest
from ..execution.swapper import STAGING_BLOCKS, pinned_bytes
from ..gpu.graph_buckets import graph_rows
from ..host.host_memory import available_memory, free_memory
from ..kv.blocks import blocks_for
from ..kv.memory_budget import (
    CONTEXT_BYTES,
    HISTOGRAM_BYTES,
    USABLE_SHARE,
    KvBudget,
    MemoryParts,
    activation_bytes,
    copied_rows,
    cpu_kv_budget,
    graph_bytes,
    history_bytes,
    host_weights_budget,
    kv_budget,
    prefix_budget,
    swap_budget,
    table_bytes,
)
from ..kv.store.sealed_record import Geometry
from ..kv.store.store_keys import with_value_tokens
from ..model.checkpoint_inspection import Checkpoint, Tensors
from ..model.decoder import Decoder
from ..model.layers import allocate_kv
from ..model.model_config import DTYPES, ModelConfig
from ..model.roofline_times import tpot_s, ttft_s, weight_bits
from ..model.sharding.ranks import Ranks
from ..model.sharding.stages import PipelineStage
from ..model.tensor_layout import decoder_layout, whole_stage
from ..offload.planning.decode_estimate import (
    estimate_decode,
    latency_lower_bounds,
    memory_under_plan,
    plan_for_budgets,
)
from ..offload.planning.device_plan import DevicePlan, host_memory_error
from ..offload.planning.disk_plan import DecodeEstimate, DiskPlan
from ..offload.planning.weight_budget import WeightBudgets
from ..quantization.gptq import GPTQ
from ..quantization.weight_format import WeightFormat
from ..types import BLOCK_TOKENS

__all__ = [
    "FitResult",
    "FitWorkload",
    "TargetDevice",
    "build_meta_decoder",
    "empty_local_gpu",
    "find_table_devices",
    "fit_model",
    "host_kv_blocks",
    "local_cpu",
    "local_gpu",
    "memory_parts",
    "table_devices",
]

_VALUE_DEPENDENT_CHOICES = {
    "values": "a weight that an integer kernel would round too much is held dense; headers cannot show which"
}


@dataclass(frozen=True, slots=True)
class FitWorkload:
    """Workload that the fit is computed for: `batch` sequences of `context` tokens, and the engine's own bounds of a
    step.

    swap_memory_bytes  host memory for KV of preempted sequences; None: the engine's default
    max_drafts         draft tokens of a sequence in a step
    shares             whether prefixes are shared through a store, as a service does
    weights_memory_bytes       memory for weights on the device: layers beyond it stay on disk, or in host memory
    weights_host_memory_bytes  memory of a GPU's host for those layers; None: the engine's default
    """

    context: int
    batch: int
    max_batch_tokens: int = 512
    max_running: int = 64
    swap_memory_bytes: int | None = None
    max_drafts: int = 0
    shares: bool = False
    weights_memory_bytes: int | None = None
    weights_host_memory_bytes: int | None = None

    @property
    def tokens(self) -> int:
        return max(self.max_batch_tokens, self.batch)

    @property
    def rows(self) -> int:
        """Most rows of a step that runs as a CUDA graph."""
        return graph_rows(self.running, self.max_drafts)

    @property
    def running(self) -> int:
        return max(self.max_running, self.batch)

    @property
    def sampled(self) -> int:
        """Most rows that a step samples."""
        return min(self.running * (1 + self.max_drafts), self.tokens)


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """A device on which the model could run, and its memory.

    ops     makes new operators for each model; their `choices` then say what was chosen, and why
    total   bytes of memory
    free    bytes of it that are free once there is a context on the device
    device  entry of the device table; None for a CPU, whose speed no table has
    """

    name: str
    ops: Callable[[], Ops]
    total: int
    free: int
    device: DeviceSpec | None = None
    at_hand: bool = False


@dataclass(frozen=True, slots=True)
class FitResult:
    """Result of fitting a model on a device.

    parts       memory by part; None where the device cannot hold the model in any way: `refused` says why
    kv_tokens   tokens of KV that fit, in whole blocks
    context     longest context at the batch that was asked for
    batch       most sequences of the context that was asked for
    ttft_s      seconds to the first token of a prompt of the context that was asked for
    tpot_s      seconds per token of the batch at that context. Both are computed by the roofline; None where the model
                does not fit or no table has the device
    choices     what was chosen for each kind of weight -> why
    tiers       which weights would be on disk, or in host memory
    expected    expected speed of those, for one sequence with a short context: for a GPU computed by a model, unless a
                disk is read; whatever must be measured is left to the caller
    advice      what else would fit, where this does not
    """

    place: TargetDevice
    parts: MemoryParts | None
    kv_tokens: int = 0
    context: int = 0
    batch: int = 0
    fits: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    choices: Mapping[str, str] | None = None
    tiers: DiskPlan | DevicePlan | None = None
    expected: DecodeEstimate | None = None
    advice: str = ""
    refused: str = ""


def table_devices(kv_dtype: KvDtype | None = None) -> list[TargetDevice]:
    """Return the GPUs of the device table, none of which need be in this machine."""
    return [_table_device(device, kv_dtype) for device in DEVICES]


def find_table_devices(name: str, kv_dtype: KvDtype | None = None) -> list[TargetDevice]:
    """Return the GPUs of the table with this name as torch gives it ("Tesla T4"), or with this capability ("7.5").

    Raises InvalidRequest with all names.
    """
    found = [device for device in DEVICES if name in device.names or name == str(device.capability)]
    if not found:
        capabilities = ", ".join(dict.fromkeys(str(device.capability) for device in DEVICES))
        names = ", ".join(device.name for device in DEVICES)
        raise InvalidRequest(
            f"device: {name!r} is not in the table; expected cpu, cuda[:i], a capability ({capabilities}) "
            f"or one of {names}",
            param="device",
        )
    return [_table_device(device, kv_dtype) for device in found]


def local_gpu(device: torch.device, kv_dtype: KvDtype | None = None) -> TargetDevice:
    """Return the given GPU of this machine as a device to fit a model to, with the memory that is free now."""
    device_context = gpu_context(device)
    free, total = torch.cuda.mem_get_info(device)
    return TargetDevice(
        f"{device}, {device_context.about.name}",
        _gpu_ops(device_context, kv_dtype),
        total,
        free,
        device_context.about,
        at_hand=True,
    )


def empty_local_gpu(device: torch.device, kv_dtype: KvDtype | None = None) -> TargetDevice:
    """Return a GPU of this machine, as if nothing else used its memory."""
    device_context = gpu_context(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return TargetDevice(
        device_context.about.name,
        _gpu_ops(device_context, kv_dtype),
        total,
        total - CONTEXT_BYTES,
        device_context.about,
    )


def local_cpu(ops: Callable[[], Ops]) -> TargetDevice:
    """Return this machine's CPU, with the given operators."""
    free = free_memory()
    return TargetDevice("cpu", ops, free, free, at_hand=True)


def fit_model(checkpoint: Checkpoint, place: TargetDevice, workload: FitWorkload) -> FitResult:
    """Compute how a model fits a device for a workload. Nothing is loaded, and no tensor of the checkpoint is read."""
    try:
        ops = place.ops()
        decoder = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
        parts = memory_parts(decoder, workload)
        tiers = None if workload.weights_memory_bytes is None else plan_for_budgets(decoder, _budgets(place, workload))
    except (ValueError, InvalidRequest) as error:
        return FitResult(place, None, refused=str(error))
    if tiers is not None:
        parts = memory_under_plan(parts, decoder, tiers)
    budget = _budget(place, parts)
    blocks = budget.blocks(parts.kv_block)
    fits = not budget.missing and blocks >= workload.batch * blocks_for(workload.context)
    times, expected = _times(place.device, decoder, tiers, workload) if fits else (None, None)
    return FitResult(
        place,
        _add_host_memory(parts, place, ops, workload, checkpoint.config, blocks, tiers),
        kv_tokens=blocks * BLOCK_TOKENS,
        context=min(blocks // workload.batch * BLOCK_TOKENS, checkpoint.config.max_model_len),
        batch=blocks // blocks_for(workload.context),
        fits=fits,
        ttft_s=times and times[0],
        tpot_s=times and times[1],
        tiers=tiers,
        expected=expected,
        choices={**ops.choices, **({} if place.device else _VALUE_DEPENDENT_CHOICES)},
        advice="" if fits else _advice(checkpoint, decoder, place, workload, budget),
    )


def _budgets(place: TargetDevice, workload: FitWorkload) -> WeightBudgets:
    """Return the memory for weights on the device and on the host, as configured; a host that is not here counts as
    large enough. Raises InvalidRequest.
    """
    device, host = workload.weights_memory_bytes, workload.weights_host_memory_bytes
    assert device is not None
    if place.device is not None:
        return WeightBudgets(device, host_weights_budget(host, available_memory() if place.at_hand else sys.maxsize)[0])
    if host is not None:
        raise host_memory_error(
            "it is for GPUs only; on a CPU weights_memory_bytes limits the weights in the host's memory"
        )
    return WeightBudgets(device, None)


def _times(
    device: DeviceSpec | None, decoder: Decoder, tiers: DiskPlan | DevicePlan | None, workload: FitWorkload
) -> tuple[tuple[float, float] | None, DecodeEstimate | None]:
    """Return (seconds to the first token, seconds per token), and the expected speed of tiers; None for what no table
    has.
    """
    if device is None:
        return None, None
    if not isinstance(tiers, DevicePlan) or not tiers.layers:
        first_s = ttft_s(device, decoder, workload.context, workload.tokens)
        return (first_s, tpot_s(device, decoder, workload.context, workload.batch)), None
    times = latency_lower_bounds(device, decoder, tiers, workload.context, workload.batch, workload.tokens)
    return times, None if tiers.on("disk") else estimate_decode(device, decoder, tiers)


def build_meta_decoder(
    config: ModelConfig,
    format: WeightFormat,
    tensors: Tensors,
    ops: Ops,
    ranks: Ranks | None = None,
    stage: PipelineStage | None = None,
) -> Decoder:
    """Return the decoder that the loader would make of these tensors, without values: on the meta device.

    Layers whose plans and tensors are alike are one object that is listed several times. ranks, stage: as in `Decoder`.
    """
    outline, stage = MetaWeightLoader(tensors, torch.device("meta")), stage or whole_stage(config)
    kinds = [(plan, _tensor_kinds(tensors, plan.index)) for plan in stage.of_config(config).layers]
    first_of = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    decoder = Decoder(config, format, outline, ops, ranks, stage, numbers=[*first_of.values()])
    made = dict(zip(first_of, decoder.layers, strict=True))
    decoder.layers = [made[kind] for kind in kinds]
    return decoder


def _tensor_kinds(tensors: Tensors, index: int) -> frozenset[tuple[str, str]]:
    """Return the names within a layer, and their dtypes; the shapes follow from the plan."""
    prefix = f"model.layers.{index}."
    return frozenset(
        (name[len(prefix) :], info.dtype) for name, (_, info) in tensors.items() if name.startswith(prefix)
    )


def memory_parts(decoder: Decoder, workload: FitWorkload) -> MemoryParts:
    """Return the memory by part that this decoder's share of the model takes. Raises ValueError for a kind of KV that
    the operators lack.
    """
    config, ops = decoder.local, decoder.ops
    kv = allocate_kv(ops, config.layers, 1)
    itemsize = ops.dtype.itemsize
    on_gpu = ops.device.type != "cpu"
    kv_block = sum(layer.nbytes for layer in kv)
    leads = decoder.stage.is_first and (decoder.ranks is None or decoder.ranks.rank == 0)  # this process samples
    launches_graphs = decoder.tier is None and decoder.stage.is_first and decoder.stage.is_last
    if not (leads or decoder.stage.is_last):
        config = replace(config, vocab_size=0)  # this process never has logits
    return MemoryParts(
        weights=decoder.held.weights,
        metadata=decoder.held.metadata,
        kv_block=kv_block,
        # On a GPU what is planned must suffice, log-probabilities of a whole prompt included.
        activations=activation_bytes(
            config,
            itemsize,
            workload.tokens,
            max(workload.rows, on_gpu * workload.tokens),
            copied_rows(workload.sampled) if on_gpu else None,
        )
        + (on_gpu and _kernel_workspace_bytes(decoder, workload))
        + on_gpu * (table_bytes(config, workload.running) + kv_block)  # one block more, for the padding of graphs
        + on_gpu * leads * workload.sampled * HISTOGRAM_BYTES
        + on_gpu * leads * (not workload.max_drafts) * history_bytes(config, workload.running),
        graphs=on_gpu * launches_graphs * graph_bytes(config, itemsize, workload.rows),
        context=on_gpu * CONTEXT_BYTES,
        staging=on_gpu * (workload.swap_memory_bytes != 0 or workload.shares) * STAGING_BLOCKS * kv_block,
    )


def _kernel_workspace_bytes(decoder: Decoder, workload: FitWorkload) -> int:
    """Return the bytes that a GPU's kernels write beside activations."""
    from ...kernels.gpu.gpu_ops import GpuOps  # imports Triton, which an engine on a CPU does without

    if not isinstance(decoder.ops, GpuOps):
        return 0
    policy = decoder.ops.device_context.policy
    layers, itemsize = dict.fromkeys(decoder.layers), decoder.ops.dtype.itemsize
    shapes = [
        (linear.held, fused.shape)
        for each in layers
        for linear, fused in zip(each.linears, each.plan.linears, strict=True)
    ]
    widths = {weight_bits(held, shape) for held, shape in shapes}
    largest = max(outputs * inputs for _, (outputs, inputs) in shapes)
    inner = max(sum(fused.shape) for each in layers for fused in each.plan.mlp.linears)
    return (
        max(each.plan.attention.split_bytes(workload.rows) for each in layers)
        + (4 in widths)
        * largest
        * TORCH_DTYPES[policy.compute].itemsize  # for many tokens int4 is written out for cuBLAS
        + (8 in widths and len(policy.int8_units) > 1) * largest * 2  # int8 in fp16, where that beats dp4a
        + (8 in widths) * workload.tokens * inner  # activations in int8
        + (8 * itemsize < max(widths)) * workload.tokens * inner * 4  # activations in fp32, if layers compute in that
    )


def _table_device(device: DeviceSpec, kv_dtype: KvDtype | None) -> TargetDevice:
    device_context = DeviceContext(torch.device("meta"), policy_of(*device.capability.version), device)
    total = int(device.memory * USABLE_SHARE)
    return TargetDevice(device.name, _gpu_ops(device_context, kv_dtype), total, total - CONTEXT_BYTES, device)


def _gpu_ops(device_context: DeviceContext, kv_dtype: KvDtype | None) -> Callable[[], Ops]:
    from ...kernels.gpu.gpu_ops import GpuOps

    return functools.partial(GpuOps, replace(device_context, device=torch.device("meta")), kv_dtype)


def _budget(place: TargetDevice, parts: MemoryParts) -> KvBudget:
    free = place.free - parts.loaded
    return cpu_kv_budget(free) if place.device is None else kv_budget(free, place.total, parts)


def _add_host_memory(
    parts: MemoryParts,
    place: TargetDevice,
    ops: Ops,
    workload: FitWorkload,
    config: ModelConfig,
    blocks: int,
    tiers: DiskPlan | DevicePlan | None,
) -> MemoryParts:
    """Return the parts with what the engine takes of host memory; a host that is not here counts as large enough."""
    on_gpu = place.device is not None
    weights = tiers.host_bytes if isinstance(tiers, DevicePlan) else 0
    free = max(0, min(free_memory(), available_memory() - weights)) if place.at_hand else sys.maxsize
    swap_blocks, lent = host_kv_blocks(workload, config, ops, parts.kv_block, blocks, free, on_gpu=on_gpu)
    taken, host = (
        pinned_bytes(n, parts.kv_block) if on_gpu else n * parts.kv_block for n in (swap_blocks + lent, swap_blocks)
    )
    return replace(parts, host=host, buffers=taken - host)


def host_kv_blocks(
    workload: FitWorkload, config: ModelConfig, ops: Ops, block_bytes: int, blocks: int, free: int, *, on_gpu: bool
) -> tuple[int, int]:
    """Return the host's KV blocks for preempted sequences, and those for KV on its way to and from a prefix store.

    block_bytes  bytes of a block, in all processes of the model
    blocks       KV blocks of the device
    free         free bytes of the host
    """
    nbytes, _ = swap_budget(workload.swap_memory_bytes, free, on_gpu=on_gpu)
    longest = min(blocks, blocks_for(config.max_model_len))
    swap_blocks = min(nbytes // block_bytes, workload.rows * longest)
    if not workload.shares:
        return swap_blocks, 0
    min_bytes = 2 * store_value_blocks(config, ops) * block_bytes
    return swap_blocks, prefix_budget(None, free, min_bytes, on_gpu=on_gpu) // block_bytes


def store_value_blocks(config: ModelConfig, ops: Ops) -> int:
    """Return the number of KV blocks in one value of a prefix store."""
    [cache] = allocate_kv(ops, config.layers[:1], 1)
    dtype = str(ops.kv_vectors(ops.kv_parts(cache))[0].dtype).removeprefix("torch.")
    whole = Geometry(dtype, config.num_layers, *config.kv_shape, BLOCK_TOKENS)
    return with_value_tokens(whole).tokens // BLOCK_TOKENS


def _advice(
    checkpoint: Checkpoint, decoder: Decoder, place: TargetDevice, workload: FitWorkload, budget: KvBudget
) -> str:
    quantized = _quantization_advice(checkpoint, place, workload)
    parts = memory_parts(decoder, workload)
    if longest := budget.blocks(parts.kv_block) // workload.batch * BLOCK_TOKENS:
        return "; ".join([f"{workload.batch} of up to {longest} tokens fit", *quantized])
    if (
        tokens := _budget(place, memory_parts(decoder, replace(workload, batch=1))).blocks(parts.kv_block)
        * BLOCK_TOKENS
    ):
        return "; ".join([f"fewer sequences fit: one alone has room for {tokens} tokens", *quantized])
    said = f"{budget.missing / 2**30:.1f} GiB are missing" if budget.missing else "nothing is left for KV"
    return "; ".join([said, *quantized, _offload_advice(place, workload, budget)])


def _offload_advice(place: TargetDevice, workload: FitWorkload, budget: KvBudget) -> str:
    """Advise where else the weights could be: on disk for a CPU, on further devices for a GPU."""
    if place.device is None:
        size = "SIZE" if workload.weights_memory_bytes is None else "a smaller SIZE"
        return f"with --weights-memory {size} what is beyond it would be read from disk in every step"
    # The number of devices that would hold the missing bytes too, if the model could be divided evenly.
    count = -(-(place.total + budget.missing) // place.total) if budget.missing else 2
    return (
        f"divided among {count} or more such devices it could fit: --pipeline-parallel {count} (or --tensor-parallel) "
        "tells what each would hold; "
        "with --weights-memory SIZE layers beyond it would come from the host's memory, or from disk, in every step"
    )


def _quantization_advice(checkpoint: Checkpoint, place: TargetDevice, workload: FitWorkload) -> list[str]:
    """Advise what quantizing would save, for a checkpoint that is not quantized."""
    if checkpoint.format.name not in DTYPES:
        return []
    for group in (128, 64, 32):
        format = GPTQ(bits=4, group_size=group)
        try:
            tensors = _tensors_of(checkpoint, format)
        except CheckpointError:  # groups that do not fit its shapes
            continue
        parts = memory_parts(build_meta_decoder(checkpoint.config, format, tensors, place.ops()), workload)
        budget = _budget(place, parts)
        tokens = budget.blocks(parts.kv_block) * BLOCK_TOKENS
        advice = f"as GPTQ int4 in groups of {group} the model would take {parts.loaded / 2**30:.1f} GiB"
        return [f"{advice} and leave room for {tokens} tokens" if tokens else f"{advice}, too much as well"]
    return []


def _tensors_of(checkpoint: Checkpoint, format: WeightFormat) -> Tensors:
    """Return the checkpoint's tensors as the given format would store them."""
    dense = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[checkpoint.config.dtype]
    specs = decoder_layout(checkpoint.config, format)
    return {
        name: (Path(), TensorInfo("I32" if "I32" in spec.dtypes else dense, spec.shape, 0, 0))
        for name, spec in specs.items()
        if not spec.optional
    }
