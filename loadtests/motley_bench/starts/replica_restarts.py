"""Benchmark `motley bench restart`: time from the kill of a replica to the next response, by what its successor finds.

For each checkpoint one `motley serve` with one replica runs, and the replica is killed again and again. A first start
finds no repacked weights and no measured rates on its node, a second start finds both; each runs in a new process, or
in one that waited. The first start of a node is never in one that waited. The time that Serve takes to notice a dead
replica, up to a second, is included in all. "Cold" means that the files' pages were dropped from the page cache once
the replica that had mapped them was dead, as far as `posix_fadvise` does that.
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
from itertools import product
from pathlib import Path
from typing import Any

from motley.cluster.process_tree import descendants, wait_until
from motley.cluster.ray_compat.visible_names import WAITING_WORKER, replica_title
from motley.cluster.routing.ingress_broadcast import APPLICATION
from motley.replicas.checkpoint.cache.startup_prefetch import likely_packed_file
from motley.replicas.checkpoint.cache.weights_cache import MIN_CACHED_BYTES
from motley.replicas.errors import EngineFault
from motley.replicas.host.measurement_rows import machine, row, versions

from ..checkpoints.random_checkpoint import FORMATS, SHAPES, check
from ..checkpoints.served_checkpoint import write_tokenizer
from ..load.measured_service import start_service
from .start_to_token import drop

__all__ = ["FORMATS", "run"]

Progress = Callable[[str], None]

STARTS, PROCESSES, STATES = ("first", "second"), ("new", "waited"), ("cold", "warm")
_LIMIT_S = 300.0
_DEAD_S = 5.0
_QUIET_S = 1.0  # a process that has used no CPU time for so long is taken to wait
_REPLICA, _WAITS = replica_title(APPLICATION, "cpu"), WAITING_WORKER


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
    """Run `motley bench restart` and return its report.

    folder  where checkpoints of random weights are written and deleted again; None: the system's temporary folder

    Raises ValueError for an unknown shape or format, Unavailable if the service does not start, EngineFault if a
    replica does not come back.
    """
    check(shape, formats)
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
            with start_service(arguments) as endpoints:
                bench = _RestartBench(endpoints["http"], int(endpoints["pid"]), checkpoint, cache)
                for turn in range(turns):
                    for state in states:
                        for start, process in product(STARTS, PROCESSES):
                            said = f"{start} start, in a process that {'waited' if process == 'waited' else 'is new'}"
                            progress(f"{format}, turn {turn + 1} of {turns}: {said}, {state}")
                            bench.restart(start, process, state)
            rows += bench.rows({"model": shape, "format": format})
    return {
        "bench": "restart",
        "machine": before | {"load_average_1min_after": machine()["load_average_1min"]},
        "versions": versions("motley", "torch", "ray"),
        "cold": "fsync, then posix_fadvise(DONTNEED); of a virtual machine the host's own cache stays",
        "rows": rows,
    }


class _RestartBench:
    """Measurements of one service.

    service  process id of the service; its replicas, and the processes that wait, are its descendants
    """

    def __init__(self, http: str, service: int, checkpoint: Path, cache: Path) -> None:
        self._http, self._service, self._checkpoint, self._cache = http, service, checkpoint, cache
        self._samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        self._left = 0.0  # largest share of a file that stayed in the page cache when it should be cold

    def restart(self, start: str, process: str, state: str) -> None:
        """Kill the replica, wait for a response of the next one, and record the time."""
        if sum(path.stat().st_size for path in self._checkpoint.glob("*.safetensors")) >= MIN_CACHED_BYTES:
            self._expect(lambda: likely_packed_file(self._checkpoint, str(self._cache)), "the weights to be kept")
        self._expect(self._waiting, "a process to wait")
        if start == "first":
            shutil.rmtree(self._cache, ignore_errors=True)
        files = [*self._checkpoint.glob("*.safetensors"), *self._cache.rglob("*.safetensors")]
        if state == "warm":
            for path in files:
                path.read_bytes()
        old, waiting = self._titled(_REPLICA), self._titled(_WAITS)
        began = time.monotonic()
        _signal(old if process == "waited" else [*waiting, *old], signal.SIGKILL)
        if state == "cold":
            # A dead process's pages are freed a moment later; the next replica must not read the files before that.
            _signal(self._titled(_WAITS), signal.SIGSTOP)
            wait_until(lambda: max(map(drop, files)) == 0, _DEAD_S)
            self._left = max(self._left, *map(drop, files))
            _signal(self._titled(_WAITS), signal.SIGCONT)
        self._expect(self._responds, "an answer")
        self._samples[start, process, state].append(time.monotonic() - began)
        if not old or (self._titled(_REPLICA) == waiting) != (process == "waited"):
            raise EngineFault("the new replica runs in another process than the one that was to be measured")

    def rows(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of the report on restarts of a replica.

        Second starts stand beside first ones in a process of the same kind, and also beside first ones in a new
        process.
        """
        size = sum(path.stat().st_size for path in self._checkpoint.glob("*.safetensors"))
        found = []
        for state in dict.fromkeys(state for _, _, state in self._samples):
            about = {**workload, "bytes": size, "page cache": state}
            if state == "cold":
                about["left in it"] = f"{self._left:.0%}"
            for start, process, peer in (
                ("first", "new", None), ("first", "waited", None),
                ("second", "new", "new"), ("second", "waited", "waited"), ("second", "waited", "new"),
            ):  # fmt: skip
                named = {"new": "in a new process", "waited": "in a process that waited"}
                found.append(
                    row(
                        "kill of a replica to the next answer",
                        {**about, "start": f"{start}, {named[process]}"},
                        "s", self._samples[start, process, state],
                        peer=None if peer is None else f"first start, {named[peer]}",
                        peer_samples=None if peer is None else self._samples["first", peer, state],
                        higher_is_better=False,
                    )
                )  # fmt: skip
        return found

    def _responds(self) -> bool:
        """Return whether a completion is answered; while no replica runs, the service holds the request for
        some time.
        """
        body = json.dumps({"model": "bench", "prompt": "Once", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self._http}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
                return bool(json.load(response)["choices"])
        except (urllib.error.URLError, OSError):
            return False

    def _titled(self, title: str) -> list[int]:
        return processes_below(self._service, title)

    def _waiting(self) -> bool:
        """Return whether a process waits that has imported everything."""
        before = [_computed_s(pid) for pid in self._titled(_WAITS)]
        time.sleep(_QUIET_S)
        return len(before) == 1 and before == [_computed_s(pid) for pid in self._titled(_WAITS)]

    def _expect(self, condition: Callable[[], object], what: str) -> None:
        if not wait_until(lambda: bool(condition()), _LIMIT_S):
            raise EngineFault(f"waited {_LIMIT_S:g} s in vain for {what}")


def processes_below(root: int, title: str) -> list[int]:
    """Return the ids of processes below `root` whose titles begin with `title`."""
    found = []
    for pid in descendants(root):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
                found.append(pid)
    return found


def _computed_s(pid: int) -> float:
    """Return the CPU seconds of a process, rounded to a tenth; -1 if it has ended.

    It is rounded because a worker that waits uses a little now and then to report itself to its node.
    """
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return round((int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), 1)
    return -1.0


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
