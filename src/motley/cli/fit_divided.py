"""Part of `motley fit` for a model that is divided among devices: memory of each process, and predicted scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from .fit_table import format_size, format_table, format_time

if TYPE_CHECKING:
    from ..kernels.device.interconnect import DeviceLink, LinkKind
    from ..replicas.capacity.device_fit import FitWorkload, TargetDevice
    from ..replicas.model.checkpoint_inspection import Checkpoint
    from ..replicas.parallel.planning.memory_plan import ParallelLayout, ParallelMemoryPlan, PlannedProcess

SCALING = "model"  # source of all times: rooflines of the parts, and a table of links
RANKS = (1, 2, 4, 8)
NOTE = (
    "model: the roofline of each rank, and the links' latency and bandwidth; nothing was measured, and on real GPUs "
    "no divided model has been timed yet"
)
MIXED = (
    "layers go by an assumed bandwidth of the CPU, which the engine measures at its start; no table tells how fast a "
    "CPU is, so that no time is told"
)


def link_kinds(name: str | None) -> tuple[LinkKind, ...]:
    """Return the kinds of links that --link names; None names all."""
    from ..kernels.device.interconnect import LINK_KINDS

    if name in (None, "all"):
        return LINK_KINDS
    if name not in LINK_KINDS:
        raise typer.BadParameter(f"--link {name}: expected {', '.join(LINK_KINDS)} or all")
    return (name,)


def full_name(name: str) -> str:
    """Return the full name of the first card of the table that has this word in its name ("P40"); any other name
    as it is.
    """
    from ..kernels.device.device_table import DEVICES

    word = name.lower()
    return next((each.name for each in DEVICES if word in each.name.lower().replace("-", " ").split()), name)


def stages_name(places: Sequence[TargetDevice]) -> str:
    """Return the name of a group of stages, on devices of one kind or of several."""
    names = list(dict.fromkeys(place.name for place in places))
    return names[0] if len(names) == 1 else " + ".join(place.name for place in places)


def scaling_report(
    checkpoint: Checkpoint,
    groups: Sequence[Sequence[TargetDevice]],
    workload: FitWorkload,
    division: ParallelLayout,
    kinds: Sequence[LinkKind],
) -> dict[str, Any]:
    """Predict times for 1, 2, 4, 8 and the asked number of ranks of each stage on each device, over each possible
    link.
    """
    from ..kernels.device.interconnect import common_links
    from ..replicas.parallel.planning.memory_plan import plan_parallel_memory

    counts = sorted({*RANKS, division.ranks})
    rows, links = [], {}
    for places in groups:
        devices = [place.device for place in places if place.device is not None]
        if len(devices) < len(places):  # there is no table of CPUs' speeds
            continue
        every = [plan_parallel_memory(checkpoint, places, workload, replace(division, ranks=ranks)) for ranks in counts]
        for link in common_links(devices, kinds):
            links[stages_name(places), link.name] = link
            rows += [_scaled(link, each, workload) for each in every]
    link_rows = [{"device": name, **_link(link)} for (name, _), link in links.items()]
    return {"source": SCALING, "links": link_rows, "rows": rows}


def _scaled(link: DeviceLink, found: ParallelMemoryPlan, workload: FitWorkload) -> dict[str, Any]:
    from ..replicas.parallel.planning.scaling_estimate import estimate_scaling, link_joins_all

    division, refused = found.division, found.refused
    if not refused and not link_joins_all(link, division.processes):
        refused = f"{link.name} joins no more than {link.max_devices} of them"
    times = asdict(estimate_scaling(found, link, workload)) if found.fits and not refused else None
    return {
        "device": stages_name(found.places),
        "link": link.name,
        "tensor_parallel": division.ranks,
        "pipeline_parallel": division.stages,
        "pipeline_layers": list(found.layers),
        "fits": found.fits,
        "refused": refused,
        "source": SCALING,
        "predicted": times,
    }


def _link(link: DeviceLink) -> dict[str, Any]:
    low, simple = link.protocols
    return {
        "link": link.name,
        "bandwidth_bytes_per_s": link.bandwidth,
        "most_devices": link.max_devices,
        "low_latency": asdict(low),
        "simple": asdict(simple),
        "sources": dict(link.sources),
    }


def division_row(found: ParallelMemoryPlan) -> dict[str, Any]:
    """Return one result as JSON."""
    names = ("kv_tokens", "context", "batch", "fits", "missing", "refused", "why")
    return {
        "device": stages_name(found.places),
        "at_hand": found.places[0].at_hand,
        "pipeline_layers": list(found.layers),
        "processes": [_process(each) for each in found.processes],
        **{name: getattr(found, name) for name in names},
    }


def _process(process: PlannedProcess) -> dict[str, Any]:
    parts = process.parts
    device = process.place.device
    return {
        "device": process.place.name,
        "capability": None if device is None else str(device.capability),
        "memory_bytes": process.place.total,
        "stage": process.stage.index,
        "ranks": list(process.ranks),
        "layers": list(process.stage.layers),
        "parts": {**asdict(parts), "kv_per_1000_tokens": parts.kv_tokens(1000)},
    }


def division_lines(
    workload: FitWorkload, found: Sequence[ParallelMemoryPlan], scaling: dict[str, Any]
) -> Iterator[str]:
    yield from _memory(found)
    yield ""
    yield from _capacity_table(workload, found)
    yield ""
    yield from _reasons(found)
    if any(each.mixed for each in found):
        yield ""
        yield MIXED
    if scaling["rows"]:
        yield ""
        yield from scaling_lines(workload, scaling)


def _memory(found: Sequence[ParallelMemoryPlan]) -> Iterator[str]:
    """Yield the lines of the memory table. GPUs of one capability hold the same, unless their stages have other layers.

    What they take on the host depends on their memory: the most is shown.
    """
    heads = (
        "each holds", "layers", "weights", "metadata", "KV/1000 tokens", "activations", "graphs", "context",
        "on the host", "for prefixes",
    )  # fmt: skip
    rows: dict[tuple[str, ...], tuple[int, int]] = {}
    for each in found:
        for process in each.processes:
            device = process.place.device
            where = process.place.name if device is None else str(device.capability)
            parts = process.parts
            sizes = (
                parts.weights, parts.metadata, parts.kv_tokens(1000), parts.activations, parts.graphs, parts.context,
            )  # fmt: skip
            first, last = process.stage.layers
            who = _who(process, each.division)
            row = f"{where}{who}", f"{first}-{last - 1}", *map(format_size, sizes)
            host, buffers = rows.get(row, (0, 0))
            rows[row] = max(host, parts.host), max(buffers, parts.buffers)
    yield from format_table(heads, [(*row, *map(format_size, of_host)) for row, of_host in rows.items()])


def _who(process: PlannedProcess, division: ParallelLayout) -> str:
    stage = f", stage {process.stage.index}" if division.stages > 1 else ""
    first, *others = process.ranks
    ranks = f"rank {first}" if not others else f"ranks {', '.join(map(str, process.ranks))}"
    return stage + (f", {ranks}" if division.ranks > 1 else "")


def _capacity_table(workload: FitWorkload, found: Sequence[ParallelMemoryPlan]) -> Iterator[str]:
    heads = ("device", "memory", "KV tokens", f"longest at batch {workload.batch}", f"batch at {workload.context}", "")
    cells = [
        (
            _times(each), format_size(sum(place.total for place in _memories(each))), str(each.kv_tokens),
            str(each.context), str(each.batch), "fits" if each.fits else "no",
        )
        for each in found
    ]  # fmt: skip
    yield from format_table(heads, cells)


def _memories(found: ParallelMemoryPlan) -> Sequence[TargetDevice]:
    """Return the memories in use: each GPU has its own, and all processes on a CPU share one."""
    cards = [place for place in found.places if place.device is not None] * found.division.ranks
    return [*cards, *[place for place in found.places if place.device is None][:1]]


def _times(found: ParallelMemoryPlan) -> str:
    counts: dict[str, int] = {}
    for place in _memories(found):
        counts[place.name] = counts.get(place.name, 0) + 1
    return " + ".join(name if name == "cpu" else f"{count} x {name}" for name, count in counts.items())


def _reasons(found: Sequence[ParallelMemoryPlan]) -> Iterator[str]:
    names_by_reason: dict[str, list[str]] = {}
    for each in found:
        if each.refused:
            names_by_reason.setdefault(each.refused, []).append(stages_name(each.places))
        elif each.missing:
            yield f"{stages_name(each.places)}: {format_size(each.missing)} are missing of a process"
        elif not each.fits:
            yield f"{stages_name(each.places)}: there is room for {each.kv_tokens} tokens of KV"
        if each.division.stages > 1 and each.why:
            names_by_reason.setdefault(each.why, []).append(stages_name(each.places))
    for reason, names in names_by_reason.items():
        yield f"{', '.join(names)}: {reason}"


def scaling_lines(workload: FitWorkload, scaling: dict[str, Any]) -> Iterator[str]:
    yield NOTE
    stages = scaling["rows"][0]["pipeline_parallel"]
    among = f" of each of {stages} stages" if stages > 1 else ""
    batch, context = workload.batch, workload.context
    yield f"by ranks{among}: per token at batch {batch}, and to the first token after {context}; -: no room"
    yield ""
    counts = sorted({each["tensor_parallel"] for each in scaling["rows"]})
    heads = ("model", "over", *(f"{what} x{n}" for what in ("TPOT", "TTFT") for n in counts))
    by_link: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in scaling["rows"]:
        by_link.setdefault((each["device"], each["link"]), []).append(each)
    cells = []
    for (device, link), rows in by_link.items():
        times = [each["predicted"] for each in rows]
        shown = [format_time(each and each[name]) for name in ("tpot_s", "ttft_s") for each in times]
        cells.append((device, link, *shown))
    yield from format_table(heads, cells)
    yield ""
    yield from _refusals(scaling)
    yield from _sources(scaling)


def _refusals(scaling: dict[str, Any]) -> Iterator[str]:
    names_by_reason: dict[str, list[str]] = {}
    for each in scaling["rows"]:
        if each["refused"]:
            who = f"{each['device']} x{each['tensor_parallel']}"
            names = names_by_reason.setdefault(each["refused"], [])
            if who not in names:
                names.append(who)
    for reason, names in names_by_reason.items():
        yield f"{', '.join(names)}: {reason}"


def _sources(scaling: dict[str, Any]) -> Iterator[str]:
    numbers: dict[str, int] = {}
    lines: dict[str, None] = {}
    for each in scaling["links"]:
        low, simple = each["low_latency"], each["simple"]
        cited = [f"[{numbers.setdefault(source, len(numbers) + 1)}]" for source in each["sources"].values()]
        name = f"{each['device']}, nvlink" if each["link"] == "nvlink" else each["link"]
        bandwidth = each["bandwidth_bytes_per_s"] / 1e9
        lines[
            f"{name}: {bandwidth:.4g} GB/s each way; a launch and a step take {_us(low)} us at half of that, or "
            f"{_us(simple)} us {''.join(cited)}"
        ] = None
    yield from lines
    for source, number in numbers.items():
        yield f"[{number}] {source}"


def _us(protocol: dict[str, float]) -> str:
    return f"{protocol['launch_s'] * 1e6:.3g} and {protocol['step_s'] * 1e6:.3g}"
