"""Benchmark `motley bench load`: time from the start of a process to its first token, and rate at which a checkpoint is
read.

Every sample is a process of its own. "Cold" means that the files' pages were dropped from the page cache two seconds
before, as far as `posix_fadvise` does that (what a virtual machine's host has in its memory stays there). Reads are
also measured immediately after dropping, into the very memory that was freed, which the host has not yet taken back.
Python's own files are always warm and compiled, as those of an installation are: compiling Motley's own takes a fifth
of the time of torch's import.

A first start finds empty caches of repacked weights and of measured rates, as a new user's does, and is ended before it
fills them; a start on a new machine finds no compiled CPU kernels either. A process is ready when the engine has run
once and knows how fast it is, as a replica does before it takes requests. In a process that waited, everything is
imported before the start, as in the process that a service keeps waiting on each node. Motley's reader gets its memory
as in a start, while torch is imported; the plain reader has one small buffer. The contents of files that an earlier
start has read and that have not changed since are known and not hashed again: a start reads them this way if it finds
nothing repacked, for example because the model is divided differently.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from motley.kernels.cpu.memory.mapped_pages import resident_pages
from motley.replicas.checkpoint.cache.weights_cache import MIN_CACHED_BYTES
from motley.replicas.errors import EngineFault
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import machine, row, versions

from ..checkpoints.random_checkpoint import FORMATS, SHAPES, check
from ..engine.engine_gpu_streams import about_device
from ..processes.bench_child import BenchChild

__all__ = ["FORMATS", "drop", "run"]

Progress = Callable[[str], None]

CHILD = "motley_bench.starts.start_to_token_process"
_STATES = ("cold", "warm")
_DROPPED = "just dropped"  # the files are read immediately after their pages are dropped
_STARTS = ("first start", "second start")
_LIMIT_S = 600.0  # time limit of a process
# Seconds to wait after pages were dropped. Sooner the system hands out the same memory again, which a virtual machine's
# host still provides. Measured: one reader got 4.2 GB/s half a second after, and 1.6 GB/s a second after and later.
_SETTLE_S = 2.0
_READERS = {"raw": "one reader", "hashed": "ours", "read": "ours, contents known", "safetensors": "load_file"}
# Reads by each reader in a turn: a disk's rate varies more from second to second than the time of a start.
_READS = len(_READERS)
_MOMENTS = ("imported", "loaded", "first token", "ready")
_METRICS = {
    "loading": "weights loaded",
    "first token": "process start to first token",
    "ready": "process start to readiness, as of a replica",
    "MiB": "peak memory",
}
_OF_WAITED = "readiness, as of a replica, in a process that waited"
_NEW = "our start on a new machine, which compiles the CPU's kernels"
_COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}  # lets a checkout keep byte code too

Samples = dict[tuple[str, ...], list[float]]


def run(
    *,
    shape: str = "qwen2-0.5b",
    formats: Sequence[str] = tuple(FORMATS),
    turns: int = 3,
    threads: int | None = None,
    device: str = "cpu",
    folder: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Run `motley bench load` and return its report.

    device  "cpu", or a GPU, "cuda[:i]", whose libraries and context are part of every start
    folder  where checkpoints of random weights are written and deleted again; None: the system's temporary folder

    Raises ValueError for an unknown shape or format, EngineFault with the end of a process's stderr if the process
    ends.
    """
    check(shape, formats)
    before = {**machine(), **({} if device == "cpu" else about_device(device))}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="motley-load-") as name:
        for format in formats:
            progress(f"writing {shape} in {format}")
            checkpoint = Path(name) / format
            FORMATS[format](SHAPES[shape], checkpoint)
            bench = _LoadBench(checkpoint, Path(name) / f"{format}-cache", threads or usable_cores(), device, progress)
            bench.prepare()
            for turn in range(turns):
                bench.turn(f"{format}, turn {turn + 1} of {turns}", turn)
            rows += bench.rows({"model": shape, "format": format, "device": device})
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    return {
        "bench": "load",
        "machine": before | after,
        "versions": versions("motley", "torch", "safetensors", "transformers"),
        "cold": "fsync, then posix_fadvise(DONTNEED), 2 s before; of a virtual machine the host's own cache stays",
        "rows": rows,
    }


class _LoadBench:
    """Measurements of one checkpoint, whose cache of repacked weights is the folder `cache`."""

    def __init__(self, checkpoint: Path, cache: Path, threads: int, device: str, progress: Progress) -> None:
        self._checkpoint, self._cache, self._threads, self._progress = checkpoint, cache, threads, progress
        self._device = device
        self._samples: Samples = defaultdict(list)
        self._cached_files: set[Path] = set()
        self._left = 0.0  # largest share of a file that stayed in the page cache when it should be cold
        # Only in bf16: to read GPTQ, transformers needs another package, which is not installed.
        self._peers = ["transformers"] if checkpoint.name == "bf16" and find_spec("transformers") else []

    def prepare(self) -> None:
        """Start once without measuring, to fill the caches of byte code, repacked weights and measured rates.

        Raises EngineFault if the start has cached no weights although they are large enough to be cached.
        """
        self._run_child("second start", "ready")
        self._cached_files = self._entries()
        if not self._cached_files and self._size() >= MIN_CACHED_BYTES:  # a smaller checkpoint is not cached
            raise EngineFault(f"a start has cached no weights in {self._cache}; check that its disk has enough space")

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self._checkpoint.glob("*.safetensors"))

    def _entries(self) -> set[Path]:
        return set(self._cache.rglob("*.safetensors"))

    def turn(self, said: str, number: int) -> None:
        """Measure every side once cold and once warm.

        The reader that is first changes from turn to turn, since a disk may be faster after a pause.
        """
        for state in (_DROPPED, *_STATES):
            for read in range(_READS * number, _READS * (number + 1)):
                first = read % len(_READERS)
                for reader in (*_READERS, *_READERS)[first : first + len(_READERS)]:
                    self._progress(f"{said}: read by {_READERS[reader]}, {state}")
                    response = self._run_child("read", reader, state=state)
                    self._samples["read", reader, state].append(response["bytes"] / response["seconds"] / 1e9)
            if state == _DROPPED:
                continue
            if state == "warm" and self._device == "cpu":
                self._progress(f"{said}: a start on a new machine")
                self._make(state)
                with tempfile.TemporaryDirectory(dir=self._cache.parent) as empty:
                    response = self._run_child("first start", environment={**_COMPILED, "XDG_CACHE_HOME": empty})
                self._samples["first token", _NEW, state].append(response["first token"])
            for side in (*_STARTS, *self._peers):
                self._progress(f"{said}: {side}, {state}")
                self._make(state)
                response = self._run_child(side)
                for what in ("imported", "loaded", "first token", "MiB"):
                    self._samples[what, side, state].append(response[what])
            for side in _STARTS:
                self._progress(f"{said}: {side} of a replica, {state}")
                self._make(state)
                self._samples["ready", side, state].append(self._run_child(side, "ready")["ready"])
            for side in _STARTS:
                self._progress(f"{said}: {side} of a replica in a process that waited, {state}")
                self._samples[_OF_WAITED, side, state].append(self._run_child(side, "waited", state=state)["ready"])

    def rows(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._entries() != self._cached_files:  # otherwise a first start would be counted as a second
            raise EngineFault(f"a second start did not find the cached weights: files in {self._cache} have changed")
        size = self._size()
        cached_bytes = sum(path.stat().st_size for path in self._cached_files)
        found = []
        for state in (*_STATES, _DROPPED):
            about = {**workload, "bytes": size, "page cache": state}
            if state != "warm":
                about["left in it"] = f"{self._left:.0%}"
            get = self._samples.get
            for own, metric in (("hashed", "read and hashed"), ("read", "read, contents known")):
                for peer, said in (
                    ("raw", "one reader, 4 MiB at a time"),
                    ("safetensors", "load_file, every page touched"),
                ):
                    found.append(
                        row(
                            metric, about, "GB/s", self._samples["read", own, state], peer=said,
                            peer_samples=self._samples["read", peer, state],
                        )
                    )  # fmt: skip
            if state == _DROPPED:
                continue
            first, second = {**about, "start": "first"}, {**about, "start": "second", "kept bytes": cached_bytes}
            for what in (*_MOMENTS, "MiB"):
                metric = _METRICS.get(what, what)
                unit = "MiB" if what == "MiB" else "s"
                for start, side in zip((first, second), _STARTS, strict=True):
                    theirs = get((what, "transformers", state))
                    mine = self._samples[what, side, state]
                    peer_name = "transformers from_pretrained, bf16" if theirs else None
                    found.append(
                        row(metric, start, unit, mine, peer=peer_name, peer_samples=theirs, higher_is_better=False)
                    )
            for what in ("loading", "first token", "ready", _OF_WAITED):
                found.append(
                    row(
                        _METRICS.get(what, what), second, "s", self._spans(what, "second start", state),
                        peer="our first start",
                        peer_samples=self._spans(what, "first start", state), higher_is_better=False,
                    )
                )  # fmt: skip
            found.append(
                row(
                    _OF_WAITED, second, "s", self._samples[_OF_WAITED, "second start", state],
                    peer="our first start, in a new process",
                    peer_samples=self._samples["ready", "first start", state], higher_is_better=False,
                )
            )  # fmt: skip
            if of_new := get(("first token", _NEW, state)):
                found.append(
                    row(
                        _METRICS["first token"], second, "s", self._spans("first token", "second start", state),
                        peer=_NEW, peer_samples=of_new, higher_is_better=False,
                    )
                )  # fmt: skip
        return found

    def _spans(self, what: str, side: str, state: str) -> list[float]:
        if what != "loading":
            return self._samples[what, side, state]
        both = zip(self._samples["imported", side, state], self._samples["loaded", side, state], strict=True)
        return [loaded - imported for imported, loaded in both]

    def _make(self, state: str) -> None:
        """Bring the files into the page cache (state warm), or drop them from it."""
        for path in [*self._checkpoint.glob("*.safetensors"), *self._cache.rglob("*.safetensors")]:
            if state != "warm":
                self._left = max(self._left, drop(path))
            else:
                with path.open("rb", buffering=0) as file:
                    while file.read(4 << 20):
                        pass
        if state == "cold":
            time.sleep(_SETTLE_S)

    def _run_child(
        self, *arguments: str, state: str | None = None, environment: Mapping[str, str] = _COMPILED
    ) -> dict[str, Any]:
        """Run a process and return its answer, with times in seconds from its start, or from the request to one that
        waited.

        state  state that the page cache is brought to before a process that waits is told to go on
        """
        began = _now()
        with BenchChild(
            CHILD, str(self._checkpoint), str(self._cache), str(self._threads), self._device, *arguments,
            environment=environment,
        ) as child:  # fmt: skip
            response = child.read(_LIMIT_S)
            if "waits" in response:
                if state is not None:
                    self._make(state)
                began = _now()
                child.write("start")
                response = child.read(_LIMIT_S)
        for what in _MOMENTS:
            if what in response:
                response[what] -= began
        return response


def drop(path: Path) -> float:
    """Drop a file's pages from the page cache; return the share of them that is still there."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            pages = resident_pages(memory)
    return sum(pages) / len(pages)


def _now() -> float:
    """Return the seconds of a clock that all processes of this machine share."""
    return time.monotonic()
