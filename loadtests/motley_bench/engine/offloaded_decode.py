"""Benchmark `motley bench tiers`: a model with memory for only a part of its weights, beside the predicted speed and
the whole model.

On a GPU it is measured twice: with all other layers in the host's pinned memory, and with none of them there.

Every side is a process of its own, whose output must equal the whole model's, token for token.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from motley.replicas.errors import EngineFault
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import machine, row, versions

from ..checkpoints.random_checkpoint import FORMATS, SHAPES, check
from ..processes.bench_child import BenchChild
from .engine_gpu_streams import about_device

__all__ = ["FORMATS", "SHARE", "run"]

Progress = Callable[[str], None]

CHILD = "motley_bench.engine.offloaded_decode_side"
SHARE = 0.5
_LIMIT_S = 900.0  # time limit of a process


def run(
    *,
    shape: str = "qwen2-0.5b",
    formats: Sequence[str] = tuple(FORMATS),
    share: float = SHARE,
    tokens: int = 48,
    turns: int = 3,
    threads: int | None = None,
    device: str = "cpu",
    folder: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Run `motley bench tiers` and return its report.

    share   share of the weights' bytes that fit into memory
    device  "cpu", "cuda" or "cuda:0"
    folder  where checkpoints of random weights are written and deleted again; None: the system's temporary folder

    Raises ValueError for an unknown shape or format, EngineFault with the end of a process's stderr if it ends, or if
    tokens differ.
    """
    check(shape, formats)
    before, threads = {**machine(), **({} if device == "cpu" else about_device(device))}, threads or usable_cores()
    rows: list[dict[str, Any]] = []
    for format in formats:
        with tempfile.TemporaryDirectory(dir=folder, prefix="motley-tiers-") as name:
            progress(f"writing {shape}, {format}")
            FORMATS[format](SHAPES[shape], Path(name) / "model")
            FORMATS[format](SHAPES["tiny"], Path(name) / "small")
            for rest in ("disk",) if device == "cpu" else ("host", "disk"):
                bench = _TiersBench(Path(name), threads, tokens, device, rest, progress)
                about = {"shape": shape, "format": format, "threads": threads, "device": device, "the rest on": rest}
                rows += bench.rows(about, share, turns)
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    return {
        "bench": "tiers",
        "machine": before | after,
        "versions": versions("motley", "torch"),
        "disk": "read past the page cache (O_DIRECT); of a virtual machine the host's own cache stays",
        "rows": rows,
    }


class _TiersBench:
    """Measurements of one checkpoint, `folder`/model.

    `folder`/small is a tiny checkpoint that shows how much memory a process takes besides weights.

    rest  where layers are that do not fit: "host" or "disk"
    """

    def __init__(self, folder: Path, threads: int, tokens: int, device: str, rest: str, progress: Progress) -> None:
        self._folder = folder
        (folder / "cache").mkdir(mode=0o700, exist_ok=True)
        self._threads, self._tokens, self._progress = threads, tokens, progress
        self._device, self._rest = device, rest

    def rows(self, workload: dict[str, Any], share: float, turns: int) -> list[dict[str, Any]]:
        format = workload["format"]
        self._progress(f"{format}: all in memory")
        whole = [self._side(0)]
        budget = int(share * whole[0]["weights"])
        on_gpu = self._device != "cpu"
        self._progress(f"{format}: first start: the file is written")
        first = self._side(budget)
        parts, reckoned = [], []
        for turn in range(turns):
            self._progress(f"{format}: turn {turn + 1} of {turns}")
            reckoned.append(self._side(budget, "fit")["expected"])
            parts.append(self._side(budget))
            whole.append(self._side(0))
        for part in (first, *parts):
            if part["ids"] != whole[0]["ids"]:
                raise EngineFault(f"tokens with weights in tiers differ: {part['ids']} and {whole[0]['ids']}")
        about = {
            **workload, "budget bytes": budget, "weights bytes": whole[0]["weights"],
            "elsewhere": f"{first['gone']} of {first['layers']} layers{'' if on_gpu else ', rows of the embedding'}",
            "bytes a step": first["read"],
        }  # fmt: skip
        said = {**about, "same tokens": len(first["ids"]), "GB/s": _median(parts, "GB/s")}
        said["computing ms"] = 1e3 * _median(parts, "compute_s")
        if on_gpu:
            said["copied GB/s"] = _median(parts, "copied GB/s")
        rates = [_rate(part) for part in parts]
        decodes = []
        meanwhile = [part["meanwhile"] for part in parts if "meanwhile" in part]
        for peer, samples in (
            ("expected when it was loaded", [part["expected"] for part in parts]),
            ("expected by motley fit", reckoned),
            *([("expected at the disk's rate meanwhile", meanwhile)] if meanwhile else []),
            ("all in memory", [_rate(each) for each in whole[1:]]),
        ):
            turns_of_it = [mine / theirs for mine, theirs in zip(rates, samples, strict=True)]
            found = row("decode", said, "tokens/s", rates, peer=peer, peer_samples=samples)
            decodes.append(found | {"ratio of each turn": turns_of_it})
        memory = "peak memory of the GPU" if on_gpu else "peak memory"
        return decodes + [
            row(
                memory, {**about, "start": start}, "MiB", [each["peak"] / 2**20 for each in sides],
                peer=peer, peer_samples=samples, higher_is_better=False,
            )
            for start, sides in (("first", [first]), ("second", parts))
            for peer, samples in (
                ("the budget", [budget / 2**20]),
                ("all in memory", [each["peak"] / 2**20 for each in whole]),
            )
        ]  # fmt: skip

    def _side(self, budget: int, what: str = "serve") -> dict[str, Any]:
        given = (self._threads, budget, self._tokens)
        with BenchChild(CHILD, str(self._folder), *map(str, given), what, self._device, self._rest) as child:
            response = child.read(_LIMIT_S)
        if "refused" in response:
            raise EngineFault(response["refused"])
        return response


def _rate(side: dict[str, Any]) -> float:
    """Return the mean rate of a side's counted steps, in tokens per second."""
    return 1 / statistics.fmean(side["steps"])


def _median(sides: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(float(side[name]) for side in sides)
