"""Command `motley fit`: whether a model fits a device, before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import fit_divided, options
from .config import ConfigFile
from .fit_table import format_size, format_table, format_time

if TYPE_CHECKING:
    from ..kernels.device.interconnect import LinkKind
    from ..replicas.capacity.device_fit import FitResult, FitWorkload, TargetDevice
    from ..replicas.engine_config import EngineConfig
    from ..replicas.model.checkpoint_inspection import Checkpoint

SOURCE = "arithmetic"  # every figure: of headers, of the table of devices, and of the roofline
MEASURED = "measured in parts"  # but this
MODEL = "by a model (the roofline, and the card's PCIe)"  # of a GPU: an H200 came to a third of it
CONTEXT = 4096


def fit(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face id, or demo.")] = "demo",
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="cpu, cuda[:INDEX], a GPU's name or capability; may be repeated. Default: all here and in the table.",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help=f"Tokens of a sequence; default: {CONTEXT}, or all the model has.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens computed in a step.", min=1)] = 512,
    max_running: Annotated[int, typer.Option(help="Sequences in a step.", min=1)] = 64,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = None,
    swap_memory: options.SwapMemory = None,
    cpu_weights: options.CpuWeights = None,
    weights_memory: options.WeightsMemory = None,
    weights_host_memory: options.WeightsHostMemory = None,
    speculate_ngram: options.SpeculateNgram = 0,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    pipeline_layers: options.PipelineLayers = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="Links of the scaling model: nvlink, pcie, ethernet or all; default: all if divided."
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="A GPU for each stage, which may differ, such as P40,T4; in place of --device."
        ),
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Show where memory would go on each device, what would fit, and how fast it could be at best.

    Only headers and configs are read. Of the host's memory it counts the KV of preempted sequences, and prefixes on
    their way to and from the store where a service shares them. Times are arithmetic by the roofline, a bound that no
    engine beats: to the first token of one prompt of --context tokens, and per token of --batch sequences of that
    length.

    For a model that is divided (--tensor-parallel, --pipeline-parallel) it shows what each process would hold, and
    predicts, by a formula that no run has confirmed, the times on 1, 2, 4 and 8 ranks over links between GPUs.

    With --weights-memory it shows which layers would be read from disk in every step, or copied from a GPU's host
    (--weights-host-memory). The speed on a CPU is put together from two measurements: some layers are repacked and
    computed, and a file of the checkpoint is read. The speed on a GPU is predicted, with the disk measured.

    \b
    Examples:
      motley fit org/name
      motley fit ./my-gptq-model --context 32768 --batch 8
      motley fit ./my-model --device "Tesla T4" --device 8.9
      motley fit ./my-model --kv-dtype int8 --swap-memory 16GiB
      motley fit ./my-model --device cpu --weights-memory 1GiB
      motley fit ./my-model --device "Tesla T4" --weights-memory 10GiB --weights-host-memory 8GiB
      motley fit ./my-model --max-running 8 --speculate-ngram 8
      motley fit demo --device cpu --dtype float32 --json
      motley fit org/name --tensor-parallel 2 --pipeline-parallel 2 --pipeline-layers 6,18
      motley fit org/name --device "Tesla T4" --link pcie
      motley fit org/name --stages P40,T4 --link ethernet
      motley fit org/name --stages T4,cpu
    """
    from ..replicas.capacity.device_fit import FitWorkload
    from ..replicas.capacity.device_fit import fit_model as fit_one
    from ..replicas.engine.startup.measured_fit import add_measured_speed
    from ..replicas.model.checkpoint_inspection import inspect_checkpoint, resolve_model

    if stages is not None:
        pipeline_parallel = _count(stages, device, pipeline_parallel)
    settings = options.engine_config(
        dtype=dtype,
        kv_dtype=kv_dtype,
        swap_memory=swap_memory,
        cpu_weights=cpu_weights,
        weights_memory=weights_memory,
        weights_host_memory=weights_host_memory,
        speculate_ngram=speculate_ngram,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        pipeline_layers=pipeline_layers,
    )
    checkpoint = inspect_checkpoint(resolve_model(options.find_model(model)))
    bounds = max_batch_tokens, max_running, settings.swap_memory_bytes, settings.speculate_ngram
    workload = FitWorkload(
        _context(context, checkpoint), batch, *bounds, shares=True, weights_memory_bytes=settings.weights_memory_bytes,
        weights_host_memory_bytes=settings.weights_host_memory_bytes,
    )  # fmt: skip
    if stages is not None or link is not None or tensor_parallel * pipeline_parallel > 1:
        groups = [[place] * pipeline_parallel for place in ([] if stages else _places(device, settings, checkpoint))]
        groups += [_stages(stages, settings, checkpoint)] if stages else []
        _divided(model, checkpoint, groups, workload, settings, fit_divided.link_kinds(link), as_json)
        return
    found = [
        add_measured_speed(fit_one(checkpoint, place, workload), settings, checkpoint)
        for place in _places(device, settings, checkpoint)
    ]
    if as_json:
        print(json.dumps(_report(model, checkpoint, workload, found)))
    else:
        for line in _lines(model, checkpoint, workload, found):
            print(line.rstrip())


def _count(stages: str, device: list[str] | None, pipeline_parallel: int) -> int:
    """Return the number of pipeline stages, which is that of the devices named."""
    count = len(stages.split(","))
    if device or pipeline_parallel not in (1, count):
        other = "--device" if device else f"--pipeline-parallel {pipeline_parallel}"
        raise typer.BadParameter(f"--stages {stages}: it gives {count} stages and their devices; leave out {other}")
    return count


def _divided(
    model: str,
    checkpoint: Checkpoint,
    groups: Sequence[Sequence[TargetDevice]],
    workload: FitWorkload,
    settings: EngineConfig,
    kinds: Sequence[LinkKind],
    as_json: bool,
) -> None:
    from ..replicas.parallel.planning.memory_plan import ParallelLayout, plan_parallel_memory

    division = ParallelLayout(settings.tensor_parallel, len(groups[0]), settings.pipeline_layers)
    found = [plan_parallel_memory(checkpoint, places, workload, division) for places in groups]
    scaling = fit_divided.scaling_report(checkpoint, groups, workload, division, kinds)
    if as_json:
        rows = [fit_divided.division_row(each) for each in found]
        print(json.dumps({**_head(model, checkpoint, workload), **asdict(division), "rows": rows, "scaling": scaling}))
        return
    for line in (*_title(model, checkpoint), *fit_divided.division_lines(workload, found, scaling)):
        print(line.rstrip())


def _context(given: int | None, checkpoint: Checkpoint) -> int:
    longest = checkpoint.config.max_model_len
    if given is not None and given > longest:
        raise typer.BadParameter(f"--context {given}: the model accepts at most {longest} tokens")
    return given or min(CONTEXT, longest)


def _stages(names: str, settings: EngineConfig, checkpoint: Checkpoint) -> list[TargetDevice]:
    """Return each stage's device from names such as "P40,cpu"; a word of the name suffices. Raises InvalidRequest."""
    every = [fit_divided.full_name(name.strip()) for name in names.split(",")]
    return [_places([name], settings, checkpoint)[0] for name in every]


def _places(names: list[str] | None, settings: EngineConfig, checkpoint: Checkpoint) -> list[TargetDevice]:
    import torch

    from ..replicas.capacity import device_fit as fits
    from ..replicas.loading.operator_choice import choose_operators

    cpu = fits.local_cpu(lambda: choose_operators(settings, checkpoint.config.dtype)[0])
    kv_dtype = settings.kv_dtype
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    if not names:
        return [
            cpu,
            *(fits.local_gpu(torch.device("cuda", index), kv_dtype) for index in gpus),
            *fits.table_devices(kv_dtype),
        ]
    places: list[TargetDevice] = []
    for name in names:
        if name == "cpu":
            places.append(cpu)
        elif (index := re.fullmatch(r"cuda(?::(\d+))?", name)) is None:
            places += fits.find_table_devices(name, kv_dtype)
        elif int(index[1] or 0) in gpus:
            places.append(fits.local_gpu(torch.device("cuda", int(index[1] or 0)), kv_dtype))
        else:
            raise typer.BadParameter(
                f"--device {name}: torch finds {len(gpus) or 'no'} GPUs here; name one of the table"
            )
    return places


def _report(model: str, checkpoint: Checkpoint, workload: FitWorkload, found: Sequence[FitResult]) -> dict[str, Any]:
    return {**_head(model, checkpoint, workload), "rows": [_row(each) for each in found]}


def _head(model: str, checkpoint: Checkpoint, workload: FitWorkload) -> dict[str, Any]:
    from .. import __version__

    return {
        "fit": model,
        "versions": {"motley": __version__},
        "source": SOURCE,
        "model": {
            "family": checkpoint.config.family,
            "quantization": checkpoint.quantization,
            "stored_bytes": checkpoint.nbytes,
            "max_model_len": checkpoint.config.max_model_len,
        },
        "asked": asdict(workload),
    }


def _row(found: FitResult) -> dict[str, Any]:
    place, parts = found.place, found.parts
    apart = ("place", "parts", "tiers", "expected")
    row = {name: getattr(found, name) for name in found.__slots__ if name not in apart}
    tiers, expected = found.tiers, found.expected
    if tiers is not None:
        row["tiers"] = tiers.json_fields
    if expected is not None:
        row["expected"] = {**asdict(expected), "tokens_per_s": expected.tokens_per_s, "source": _how(found)}
    return {
        "device": place.name,
        "capability": None if place.device is None else str(place.device.capability),
        "at_hand": place.at_hand,
        "memory_bytes": place.total,
        "parts": None if parts is None else {**asdict(parts), "kv_per_1000_tokens": parts.kv_tokens(1000)},
        **row,
    }


def _lines(model: str, checkpoint: Checkpoint, workload: FitWorkload, found: Sequence[FitResult]) -> Iterator[str]:
    yield from _title(model, checkpoint, measured=any("measured" in _how(each) for each in found if each.expected))
    yield from _parts(found)
    yield ""
    yield from _capacity_table(workload, found)
    yield ""
    yield from _notes(found)


def _title(model: str, checkpoint: Checkpoint, *, measured: bool = False) -> Iterator[str]:
    config = checkpoint.config
    stored = f"{checkpoint.quantization}, {format_size(checkpoint.nbytes)} as stored"
    yield f"{model}: {config.family}, {stored}, {config.num_layers} layers, made for {config.max_model_len} tokens"
    but = f"; {MEASURED}: how fast layers on disk are" if measured else ""
    yield f"{SOURCE}, from headers and tables: nothing was loaded, nothing was measured{but}"
    yield ""


def _parts(found: Sequence[FitResult]) -> Iterator[str]:
    """Yield the lines of the memory table. GPUs of one capability hold the same, so there is a line for each kind."""
    heads = (
        "kept on",
        "weights",
        "metadata",
        "KV/1000 tokens",
        "activations",
        "graphs",
        "context",
        "staging",
        "on the host",
        "for prefixes",
    )
    rows: dict[str, tuple[str, ...]] = {}
    for each in found:
        if each.parts is not None:
            parts = each.parts
            sizes = (
                parts.weights,
                parts.metadata,
                parts.kv_tokens(1000),
                parts.activations,
                parts.graphs,
                parts.context,
                parts.staging,
                parts.host,
                parts.buffers,
            )
            rows.setdefault(_kind(each), tuple(map(format_size, sizes)))
    yield from format_table(heads, [(kind, *sizes) for kind, sizes in rows.items()])


def _capacity_table(workload: FitWorkload, found: Sequence[FitResult]) -> Iterator[str]:
    heads = (
        "device", "memory", "KV tokens", f"longest at batch {workload.batch}", f"batch at {workload.context}", "TTFT",
        "TPOT", "",
    )  # fmt: skip
    yield from format_table(
        heads,
        [
            (
                each.place.name, format_size(each.place.total), str(each.kv_tokens), str(each.context), str(each.batch),
                format_time(each.ttft_s), format_time(each.tpot_s), "fits" if each.fits else "no",
            )
            for each in found
        ],
    )  # fmt: skip


def _notes(found: Sequence[FitResult]) -> Iterator[str]:
    for each in found:
        if not each.fits:
            yield f"{each.place.name}: {each.refused or each.advice}"
    for each in found:
        if each.tiers is not None:
            yield f"{each.place.name}: weights: {each.tiers}"
        if each.expected is not None:
            yield f"{each.place.name}: {_how(each)}, of a short context: {each.expected}"
    kinds_by_choice: dict[str, list[str]] = {}
    for each in found:
        for what, why in (each.choices or {}).items():
            kinds = kinds_by_choice.setdefault(f"{what}: {why}", [])
            if (kind := _kind(each)) not in kinds:
                kinds.append(kind)
    for reason, kinds in kinds_by_choice.items():
        yield f"{', '.join(kinds)}: {reason}"


def _how(found: FitResult) -> str:
    """Return how the expected speed is known: measured, or predicted."""
    if found.place.device is None:
        return MEASURED
    disk = "" if found.expected is None or found.expected.bytes_per_s is None else ", the disk measured"
    return MODEL + disk


def _kind(found: FitResult) -> str:
    return found.place.name if found.place.device is None else str(found.place.device.capability)
