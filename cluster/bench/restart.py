"""`motley bench restart`: from the kill of a replica to the next answer, by what its successor finds on its node.

One `motley serve` for each checkpoint, with one replica, which is killed again and again. A first start finds no
repacked weights, no rates and no process that waits; one in a new process finds the former two, and a second start all
three. What Serve takes to see a dead replica, up to a second, is in each of them. Cold: the files' pages are dropped
from the page cache first, as far as `posix_fadvise` does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...replicas.bench.load import FORMATS, drop
from ...replicas.bench.report import machine, row, versions
from ...replicas.bench.shapes import SHAPES
from ...replicas.early import kept_file
from ...replicas.errors import EngineFault
from ...replicas.weights_cache import LEAST_BYTES
from ..processes import descendants, wait_until
from .checkpoint import write_tokenizer
from .service import started

__all__ = ["FORMATS", "run"]

Progress = Callable[[str], None]

FIRST, NEW, SECOND = "first start", "second start, in a new process", "second start"
STATES = ("cold", "warm")
_LIMIT_S = 300.0
_QUIET_S = 1.0  # a process that has computed nothing for so long waits
_REPLICA, _WAITS = "ray::ServeReplica:motley:cpu", "ray::IDLE"


def run(
    *,
    shape: str = "qwen2-0.5b",
    formats: Sequence[str] = tuple(FORMATS),
    turns: int = 3,
    states: Sequence[str] = STATES,
    threads: int | None = None,
    folder: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Checkpoints of random weights are written to `folder` (None: the system's for temporary files), and go again.

    Raises ValueError for a shape or a format that is not known, Unavailable where the service does not start,
    EngineFault where a replica does not come again.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape: {shape!r} is not known; expected one of {', '.join(SHAPES)}")
    if unknown := sorted({*formats} - {*FORMATS}):
        raise ValueError(f"format: {unknown[0]!r} is not known; expected {' or '.join(FORMATS)}")
    before = machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="motley-restart-") as name:
        for format in formats:
            progress(f"writing {shape} in {format}")
            checkpoint, cache = Path(name) / format, Path(name) / f"{format}-cache"
            FORMATS[format](SHAPES[shape], checkpoint)
            write_tokenizer(checkpoint, SHAPES[shape].vocab_size)
            arguments = [str(checkpoint), "--weights-cache", str(cache), "--served-model-name", "bench", "--no-control"]
            arguments += [] if threads is None else ["--threads", str(threads)]
            progress(f"{format}: starting a service")
            with started(arguments) as endpoints:
                bench = _Bench(endpoints["http"], checkpoint, cache)
                for turn in range(turns):
                    for state in states:
                        for kind in (FIRST, NEW, SECOND):
                            progress(f"{format}, turn {turn + 1} of {turns}: {kind}, {state}")
                            bench.restart(kind, state)
            rows += bench.rows({"model": shape, "format": format})
    return {
        "bench": "restart",
        "machine": before | {"load_average_1min_after": machine()["load_average_1min"]},
        "versions": versions("motley", "torch", "ray"),
        "cold": "fsync, then posix_fadvise(DONTNEED); of a virtual machine the host's own cache stays",
        "rows": rows,
    }


class _Bench:
    def __init__(self, http: str, checkpoint: Path, cache: Path) -> None:
        self._http, self._checkpoint, self._cache = http, checkpoint, cache
        self._samples: dict[tuple[str, str], list[float]] = defaultdict(list)

    def restart(self, kind: str, state: str) -> None:
        """Kill the replica, and wait for an answer of the next."""
        if sum(path.stat().st_size for path in self._checkpoint.glob("*.safetensors")) >= LEAST_BYTES:
            self._expect(lambda: kept_file(self._checkpoint, str(self._cache)), "the weights to be kept")
        self._expect(_waiting, "a process to wait")
        if kind == FIRST:
            shutil.rmtree(self._cache, ignore_errors=True)
        for path in [*self._checkpoint.glob("*.safetensors"), *self._cache.rglob("*.safetensors")]:
            if state == "cold":
                drop(path)
            else:
                path.read_bytes()
        [replica], waiting = _titled(_REPLICA), _titled(_WAITS)
        if kind != SECOND:
            _kill(waiting)
        began = time.monotonic()
        _kill([replica])
        self._expect(self._answers, "an answer")
        self._samples[kind, state].append(time.monotonic() - began)
        if (_titled(_REPLICA) == waiting) != (kind == SECOND):
            raise EngineFault(f"{kind}: the replica's process is not the one that was to be measured")

    def rows(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        size = sum(path.stat().st_size for path in self._checkpoint.glob("*.safetensors"))
        found = []
        for kind, state in self._samples:
            peer = None if kind == FIRST else "first start, in a new process"
            found.append(
                row(
                    "kill of a replica to the next answer",
                    {**workload, "bytes": size, "page cache": state, "start": kind},
                    "s", self._samples[kind, state], peer=peer,
                    peer_samples=None if peer is None else self._samples[FIRST, state], higher_is_better=False,
                )
            )  # fmt: skip
        return sorted(found, key=lambda each: STATES.index(each["workload"]["page cache"]))

    def _answers(self) -> bool:
        """Whether a completion is answered, which the service holds for a while where there is nobody to do it."""
        body = json.dumps({"model": "bench", "prompt": "Once", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self._http}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
                return bool(json.load(response)["choices"])
        except (urllib.error.URLError, OSError):
            return False

    def _expect(self, condition: Callable[[], object], what: str) -> None:
        if not wait_until(lambda: bool(condition()), _LIMIT_S):
            raise EngineFault(f"waited {_LIMIT_S:g} s in vain for {what}")


def _waiting() -> bool:
    """Whether one waits that has imported all."""
    before = [_computed_s(pid) for pid in _titled(_WAITS)]
    time.sleep(_QUIET_S)
    return len(before) == 1 and before == [_computed_s(pid) for pid in _titled(_WAITS)]


def _titled(title: str) -> list[int]:
    """Processes below this one whose titles begin so."""
    found = []
    for pid in descendants():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
                found.append(pid)
    return found


def _computed_s(pid: int) -> float:
    """Of CPU time, to a tenth: a worker that waits tells its node of itself now and then."""
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return round((int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), 1)
    return -1.0


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
