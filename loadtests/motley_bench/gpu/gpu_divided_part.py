"""Part `divided` of `motley bench gpu`: a model divided among tiers, stages or ranks, beside an undivided one.

Each way of dividing runs with each weight format in a process of its own (gpu_divided_tasks.py), several at a
time: the outputs are compared, not the speed. Ranks that share a GPU take turns on it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..processes.bench_schedule import BenchPart
from ..processes.task_process import TaskProcess

CHILD = "motley_bench.gpu.gpu_divided_tasks"
_REHEARSED = [("layers on disk", "bf16"), ("stages", "gptq-int4"), ("ranks", "gptq-int4")]
_TOKENS, _REHEARSED_TOKENS = 24, 4
_AT_A_TIME = 4  # concurrent processes, on 16 cores; each takes little of the GPU's memory
_LIMIT_S = 120.0
_STACK_DUMP_S = 10.0  # so long before the limit a process that hangs writes its stack to stderr


@dataclass(frozen=True, slots=True)
class ParallelCase:
    """Way to divide a model among memory tiers, pipeline stages and tensor-parallel ranks.

    devices  "gpu" or "cpu" for each process
    tiers    where layers are: "host", "disk", or "both", with one layer left on the device; None: all are on the device
    alike    the output must equal that of one process to the bit: the same kernels work on the same numbers
    """

    devices: tuple[str, ...] = ("gpu",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    tiers: str | None = None
    alike: bool = True

    @property
    def copies(self) -> bool:
        """Whether several processes keep KV on the host together."""
        return len(self.devices) > 1 and "cpu" not in self.devices

    @property
    def ranks(self) -> int:
        return int(self.settings.get("tensor_parallel", 1))


_STAGES = {"pipeline_parallel": 2, "pipeline_layers": (1, 3)}
WAYS = {
    "layers in the host's memory": ParallelCase(tiers="host"),
    "layers on disk": ParallelCase(tiers="disk"),
    "layers in all tiers": ParallelCase(tiers="both"),
    "stages": ParallelCase(("gpu",) * 2, _STAGES),
    "a stage on the CPU": ParallelCase(("gpu", "cpu"), _STAGES, alike=False),
    "ranks": ParallelCase(("gpu",) * 2, {"tensor_parallel": 2}, alike=False),
    "stages of ranks": ParallelCase(("gpu",) * 4, {"tensor_parallel": 2, **_STAGES}, alike=False),
}

_CELLS = [(way, format) for format in ("gptq-int4", "bf16") for way in WAYS]


class DividedPart:
    """Comparisons of all `_CELLS` (ways and weight formats), over as many turns as they take.

    real  True on a GPU, False in a rehearsal
    """

    def __init__(self, *, real: bool) -> None:
        self._real = real
        self._left: Sequence[tuple[str, str]] = _CELLS if real else _REHEARSED

    def turn(self, part: BenchPart, first: bool) -> bool:
        """Compare the cells that are left, as far as time allows; return whether all succeeded and none is left for
        another turn.
        """
        rows: list[dict[str, Any]] = part.fields.setdefault("rows", [])
        with tempfile.TemporaryDirectory(prefix="motley-bench-") as folder:
            with self._process(folder) as process:
                response = process.ask("write", left_s=part.left())
            if "error" in response:
                part.fields |= response
                return False

            def cell(which: tuple[str, str]) -> tuple[tuple[str, str], dict[str, Any] | None]:
                if part.over:
                    return which, None
                way, format = which
                tokens, limit_s = _TOKENS if self._real else _REHEARSED_TOKENS, min(_LIMIT_S, part.left())
                with self._process(folder) as process:
                    response = process.ask(
                        "said", _LIMIT_S, left_s=part.left(), way=way, format=format, max_tokens=tokens,
                        within_s=limit_s - _STACK_DUMP_S,
                    )  # fmt: skip
                return which, {"way": way, "format": format, **response.pop("result", {}), **response}

            left: list[tuple[str, str]] = []
            with ThreadPoolExecutor(_AT_A_TIME if self._real else 1) as pool:
                for which, row in pool.map(cell, self._left):
                    if row is None:
                        left.append(which)
                    else:
                        rows.append(row)
                        part.save(now=False)
        self._left = left
        failed = [f"{row['way']}, {row['format']}" for row in rows if not (row.get("right") or "skipped" in row)]
        part.fields |= {"failed": failed, "unreached": len(left), "complete": not left}
        return not failed and not left

    def _process(self, folder: str) -> TaskProcess:
        return TaskProcess(CHILD, folder, *(() if self._real else ("cpu",)))
