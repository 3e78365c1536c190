"""`motley fit`: whether a model fits a device, told before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .config import ConfigFile

if TYPE_CHECKING:
    from ..replicas.checkpoint import Checkpoint
    from ..replicas.engine_config import EngineConfig
    from ..replicas.fit import Asked, Fit, Place

SOURCE = "arithmetic"  # every figure: of headers, of the table of devices, and of the roofline
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
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Tell where memory would go on each device, what would fit, and how fast it could be at best.

    Only headers and configs are read. Of the host's memory it counts what KV of preempted sequences takes, and prefixes
    on their way to and from where a service shares them. Times are arithmetic by the roofline, a bound that no engine
    beats: to first token of one prompt of --context tokens, and per token of --batch sequences of that length.

    \b
    Examples:
      motley fit org/name
      motley fit ./my-gptq-model --context 32768 --batch 8
      motley fit ./my-model --device "Tesla T4" --device 8.9
      motley fit ./my-model --kv-dtype int8 --swap-memory 16GiB
      motley fit demo --device cpu --dtype float32 --json
    """
    from ..replicas.checkpoint import inspect_checkpoint, resolve_model
    from ..replicas.fit import Asked
    from ..replicas.fit import fit as fit_one

    settings = options.engine_config(dtype=dtype, kv_dtype=kv_dtype, swap_memory=swap_memory, cpu_weights=cpu_weights)
    checkpoint = inspect_checkpoint(resolve_model(options.find_model(model)))
    bounds = max_batch_tokens, max_running, settings.swap_memory_bytes
    asked = Asked(_context(context, checkpoint), batch, *bounds, shares=True)
    found = [fit_one(checkpoint, place, asked) for place in _places(device, settings, checkpoint)]
    if as_json:
        print(json.dumps(_report(model, checkpoint, asked, found)))
    else:
        for line in _lines(model, checkpoint, asked, found):
            print(line.rstrip())


def _context(given: int | None, checkpoint: Checkpoint) -> int:
    longest = checkpoint.config.max_model_len
    if given is not None and given > longest:
        raise typer.BadParameter(f"--context {given}: the model was made for {longest} tokens")
    return given or min(CONTEXT, longest)


def _places(names: list[str] | None, settings: EngineConfig, checkpoint: Checkpoint) -> list[Place]:
    import torch

    from ..replicas import fit as fits
    from ..replicas.build import operators

    cpu = fits.cpu(lambda: operators(settings, checkpoint.config.dtype)[0])
    kv_dtype = settings.kv_dtype
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    if not names:
        return [cpu, *(fits.at_hand(torch.device("cuda", index), kv_dtype) for index in gpus), *fits.table(kv_dtype)]
    places: list[Place] = []
    for name in names:
        if name == "cpu":
            places.append(cpu)
        elif (index := re.fullmatch(r"cuda(?::(\d+))?", name)) is None:
            places += fits.known(name, kv_dtype)
        elif int(index[1] or 0) in gpus:
            places.append(fits.at_hand(torch.device("cuda", int(index[1] or 0)), kv_dtype))
        else:
            raise typer.BadParameter(
                f"--device {name}: torch finds {len(gpus) or 'no'} GPUs here; name one of the table"
            )
    return places


def _report(model: str, checkpoint: Checkpoint, asked: Asked, found: Sequence[Fit]) -> dict[str, Any]:
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
        "asked": asdict(asked),
        "rows": [_row(each) for each in found],
    }


def _row(found: Fit) -> dict[str, Any]:
    place, parts = found.place, found.parts
    told = {name: getattr(found, name) for name in found.__slots__ if name not in ("place", "parts")}
    return {
        "device": place.name,
        "capability": None if place.device is None else str(place.device.capability),
        "at_hand": place.at_hand,
        "memory_bytes": place.total,
        "parts": None if parts is None else {**asdict(parts), "kv_per_1000_tokens": parts.kv_tokens(1000)},
        **told,
    }


def _lines(model: str, checkpoint: Checkpoint, asked: Asked, found: Sequence[Fit]) -> Iterator[str]:
    config = checkpoint.config
    stored = f"{checkpoint.quantization}, {_size(checkpoint.nbytes)} as stored"
    yield f"{model}: {config.family}, {stored}, {config.num_layers} layers, made for {config.max_model_len} tokens"
    yield f"{SOURCE}, from headers and tables: nothing was loaded, nothing was measured"
    yield ""
    yield from _parts(found)
    yield ""
    yield from _rooms(asked, found)
    yield ""
    yield from _notes(found)


def _parts(found: Sequence[Fit]) -> Iterator[str]:
    """GPUs of one capability hold the same: a line for each kind."""
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
            rows.setdefault(_kind(each), tuple(map(_size, sizes)))
    yield from _table(heads, [(kind, *sizes) for kind, sizes in rows.items()])


def _rooms(asked: Asked, found: Sequence[Fit]) -> Iterator[str]:
    heads = (
        "device", "memory", "KV tokens", f"longest at batch {asked.batch}", f"batch at {asked.context}", "TTFT", "TPOT",
        "",
    )  # fmt: skip
    yield from _table(
        heads,
        [
            (
                each.place.name, _size(each.place.total), str(each.kv_tokens), str(each.context), str(each.batch),
                _time(each.ttft_s), _time(each.tpot_s), "fits" if each.fits else "no",
            )
            for each in found
        ],
    )  # fmt: skip


def _notes(found: Sequence[Fit]) -> Iterator[str]:
    for each in found:
        if not each.fits:
            yield f"{each.place.name}: {each.refused or each.advice}"
    told: dict[str, list[str]] = {}
    for each in found:
        for what, why in (each.choices or {}).items():
            kinds = told.setdefault(f"{what}: {why}", [])
            if (kind := _kind(each)) not in kinds:
                kinds.append(kind)
    for reason, kinds in told.items():
        yield f"{', '.join(kinds)}: {reason}"


def _kind(found: Fit) -> str:
    return found.place.name if found.place.device is None else str(found.place.device.capability)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        yield "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )


def _size(nbytes: int) -> str:
    if nbytes >= 10 * 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds >= 0.001
        else f"{seconds * 1e6:.0f} us"
    )
