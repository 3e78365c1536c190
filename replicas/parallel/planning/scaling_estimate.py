"""Prediction of how fast a divided model would be over a link: a calculation that no run has confirmed.

Each rank takes the roofline's time for its part. Each layer has two sums over ranks, of the hidden states of a step;
the embedding has one more, and logits are gathered. A stage hands on hidden states and residual, and the last stage
sends logits to the first. Nothing overlaps within a stage; stages work on different steps at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ....kernels.device.device_spec import DeviceSpec
from ....kernels.device.interconnect import DeviceLink, all_gather_s, all_reduce_s, send_s
from ...capacity.device_fit import FitWorkload
from ...model.parts.layer_source import RowParallelLinear
from ...model.roofline_times import head_s, prefill_s, tpot_s
from .memory_plan import ParallelMemoryPlan, PlannedProcess

__all__ = ["ScalingEstimate", "estimate_scaling", "link_joins_all"]

_LOGIT = 4  # bytes, fp32


@dataclass(frozen=True, slots=True)
class ScalingEstimate:
    """Predicted speed of a divided model, in seconds and tokens a second.

    tpot_s        seconds per token of each of the sequences asked for, which are divided among as many steps as there
                  are stages
    alone_s       seconds per token of a single sequence: the sum of all stages
    exchange_s    part of `alone_s` that goes over the link
    tokens_per_s  tokens a second of all sequences together, which the slowest stage limits
    ttft_s        seconds until the first token of a single prompt of the context asked for
    """

    tpot_s: float
    alone_s: float
    exchange_s: float
    tokens_per_s: float
    ttft_s: float


def link_joins_all(link: DeviceLink | None, processes: int) -> bool:
    """Return whether the link can join so many devices; with None, whether no link is needed."""
    return processes == 1 or (link is not None and (link.max_devices is None or processes <= link.max_devices))


def estimate_scaling(divided: ParallelMemoryPlan, link: DeviceLink | None, workload: FitWorkload) -> ScalingEstimate:
    """Return the predicted speed of a model whose processes are all on GPUs.

    link  link between any two of them; None for one process alone
    """
    stages = [list(alike) for _, alike in groupby(divided.processes, key=lambda each: each.stage.index)]
    together = min(workload.batch, len(stages))
    rows = -(-workload.batch // together)

    def decode(rows: int) -> list[float]:
        return [
            max(tpot_s(_device(each), each.decoder, workload.context, rows) for each in stage)
            + stage_exchange_s(stage, link, rows)
            for stage in stages
        ]

    steps, alone = decode(rows), decode(1)
    tpot = max(sum(steps), together * max(steps))
    return ScalingEstimate(
        tpot_s=tpot,
        alone_s=sum(alone),
        exchange_s=sum(stage_exchange_s(stage, link, 1) for stage in stages),
        tokens_per_s=workload.batch / tpot,
        ttft_s=_ttft_s(stages, link, workload),
    )


def stage_exchange_s(
    stage: Sequence[PlannedProcess], link: DeviceLink | None, tokens: int, rows: int | None = None
) -> float:
    """Seconds that a stage spends on the link in a step of `tokens` tokens.

    rows  number of tokens with logits; None for all
    """
    if link is None:
        return 0.0
    decoder, place = stage[0].decoder, stage[0].stage
    size = 1 if decoder.ranks is None else len(decoder.ranks.parts)
    hidden = tokens * decoder.config.hidden_size * decoder.ops.dtype.itemsize
    logits = (tokens if rows is None else rows) * decoder.config.vocab_size * _LOGIT
    seconds = 0.0
    if size > 1:
        linears = [each for layer in decoder.layers for each in layer.linears if isinstance(each, RowParallelLinear)]
        seconds += (len(linears) + place.is_first) * all_reduce_s(link, size, hidden)
        widths = Counter(each.gathered for each in linears if each.gathered)
        itemsize = decoder.ops.dtype.itemsize
        seconds += sum(n * all_gather_s(link, size, tokens * width * itemsize) for width, n in widths.items())
    if place.is_last and logits and size > 1:
        seconds += all_gather_s(link, size, logits)
    if place.count > 1 and (logits or not place.is_last):
        seconds += send_s(link, logits if place.is_last else 2 * hidden)
    return seconds


def _ttft_s(stages: Sequence[Sequence[PlannedProcess]], link: DeviceLink | None, workload: FitWorkload) -> float:
    """Seconds until the first token of a prompt whose chunks follow each other through the stages."""
    ends = [0.0] * len(stages)
    for start in range(0, workload.context, workload.tokens):
        new = min(workload.tokens, workload.context - start)
        rows = int(start + new == workload.context)
        before = 0.0
        for index, stage in enumerate(stages):
            took = max(_piece_s(process, new, start, rows) for process in stage)
            before = ends[index] = max(before, ends[index]) + took + stage_exchange_s(stage, link, new, rows)
    return ends[-1]


def _piece_s(process: PlannedProcess, new: int, cached: int, rows: int) -> float:
    seconds = prefill_s(_device(process), process.decoder, new, cached)
    return seconds + head_s(_device(process), process.decoder, rows) if rows else seconds


def _device(process: PlannedProcess) -> DeviceSpec:
    assert process.place.device is not None, "no table tells how fast a CPU is"
    return process.place.device
