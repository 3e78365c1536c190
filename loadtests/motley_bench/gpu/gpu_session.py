"""Benchmark `motley bench gpu`: all checks, tuning and measurements on a GPU in one command, into one folder.

It needs torch, Triton, transformers, safetensors and numpy; Motley itself need not be installed:

    python -m motley_bench.gpu --out DIR

The folder then holds:

summary.json       for each part: how long it took, whether all was right, what was left out, and its error if it failed
checks.json        result of checking every operator against its reference
engine.json        comparison of a small model's greedy texts, from all operators together, with the CPU's in fp32, and
                   of CUDA graphs with plain steps
divided.json       output of a small model in memory tiers, pipeline stages and ranks, before and after an update of its
                   weights
tuning.json        configs that were tried; the tables of chosen configs are in tuned/
kernels.json       report of `motley bench kernels` with these tables, and which targets are reached
streams.json       the part of `motley bench engine --device cuda` that the goals are about; its traces are in traces/
everything.tar.gz  archive of all of these files

Files are also written while a part runs, so that results are kept if time runs out, and a part that fails affects no
other. Kernels run in a process of their own (gpu_tasks.py, sides/gpu_side_process.py) and are compiled ahead on all
cores (gpu_compiler_process.py). Without a GPU, --rehearse takes the same steps with small shapes in Triton's
interpreter: its results are marked as a rehearsal, and measure nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.engine_gpu_rows import goal_line, judge_goals
from ..engine.stream_measurement import EngineMeasurement, StreamWorkload, WorkloadGroup
from ..processes.bench_schedule import BenchPart, BenchSchedule, BenchTurn
from ..processes.task_process import TaskProcess
from ..sides.side_handles import is_installed
from .gpu_divided_part import DividedPart
from .gpu_tasks import rehearsal_context

if TYPE_CHECKING:
    from motley.kernels.device.device_context import DeviceContext

SECONDS = 480.0
CHILD = "motley_bench.gpu.gpu_tasks"
# Stages in order. Each weight is its seconds of the default time, in which all that goals and targets are about must
# fit on an H200.
STAGES = (
    BenchTurn("checks", 38.0, first=True),
    BenchTurn("engine", 35.0),
    BenchTurn("divided", 60.0),
    BenchTurn("tuning", 55.0, first=True),
    BenchTurn("kernels", 40.0, first=True),
    BenchTurn("streams", 202.0, first=True),
    BenchTurn("checks", 20.0),
    BenchTurn("tuning", 5.0),
    BenchTurn("kernels", 5.0),
    BenchTurn("streams", 0.0),
)
PARTS = tuple(dict.fromkeys(stage.part for stage in STAGES))
_ENGINE_TOKENS, _REHEARSED_TOKENS = 32, 2
_GROUP_S = 20.0  # least seconds left with which a group is begun again

# GROUPS are what the goals are about. `until` is a share of that turn's time.
GROUPS = (
    WorkloadGroup(
        "qwen2.5-7b", "motley", (StreamWorkload(1, 128, 128), StreamWorkload(64, 128, 128)), idle=(1, 64), until=0.28
    ),
    WorkloadGroup("qwen2.5-7b", "transformers", (StreamWorkload(1, 128, 128),), until=0.58),
    WorkloadGroup("llama-3-8b", "motley", (StreamWorkload(0, 1000, 1000),)),
)
OTHER_GROUPS = (WorkloadGroup("qwen3-0.6b", "motley", (StreamWorkload(1, 128, 128), StreamWorkload(256, 128, 128))),)
REHEARSED = (
    WorkloadGroup("rehearsal", "motley", (StreamWorkload(2, 20, 6), StreamWorkload(0, 2040, 16)), idle=(2,)),
    WorkloadGroup("rehearsal", "transformers", (StreamWorkload(1, 8, 8),)),
)


def run(
    out: Path, seconds: float = SECONDS, rehearse: str = "", ops: Sequence[str] = (), parts: Sequence[str] = ()
) -> bool:
    """Run the parts and write their files to `out`; return whether all that was checked is right.

    rehearse  compute capability whose kernels are rehearsed without a GPU, such as "6.1"; empty: run on a GPU
    ops       operators to use; all if empty
    parts     parts to run, of PARTS; if empty, all, or with `ops` only those that handle kernels one by one

    Raises RuntimeError without a GPU unless it is a rehearsal, KeyError for an unknown operator.
    """
    device_context = rehearsal_context(rehearse)
    from motley.kernels.registry import OPERATIONS, find_operation

    from .gpu_kernel_parts import KernelParts

    operations = [find_operation(name) for name in ops] or list(OPERATIONS)
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.json").write_text(json.dumps(_machine(device_context), indent=1) + "\n")
    wanted = parts or (("checks", "tuning", "kernels") if ops else PARTS)
    stages = [stage for stage in STAGES if stage.part in wanted]
    plan = BenchSchedule(out, seconds, stages, {"rehearsal": not device_context.real})
    with TaskProcess(CHILD, *([rehearse] if rehearse else [])) as process, ExitStack() as compilers:
        kernels = KernelParts(device_context, operations, out, process, compilers)
        right = plan.run(
            {
                "checks": kernels.checks,
                "engine": lambda part, first: _engine(process, device_context, part),
                "divided": DividedPart(real=device_context.real).turn,
                "tuning": kernels.tuning,
                "kernels": kernels.kernels,
                "streams": _StreamsPart(device_context, out, kernels.pause).turn,
            }
        )
    print("\n".join(plan.lines()))
    return right


def _engine(process: TaskProcess, device_context: DeviceContext, part: BenchPart) -> bool:
    """Compare a small model's greedy texts, from all operators together, with those of the CPU in fp32; return whether
    they agree.
    """
    tokens = _ENGINE_TOKENS if device_context.real else _REHEARSED_TOKENS
    response = process.ask("engine", left := part.left(), left_s=left, max_tokens=tokens)
    answered = "result" in response
    part.fields.pop("error", None)  # of an earlier turn
    part.fields |= {"complete": answered, "unreached": int(not answered), **response.pop("result", {}), **response}
    return bool(part.fields.get("right"))


class _StreamsPart:
    """Part `streams`: measurements of the engine in processes that have the GPU to themselves.

    A failure of a peer does not count as a failure of the part.

    pause  ends this benchmark's other processes on the GPU
    """

    def __init__(self, device_context: DeviceContext, out: Path, pause: Callable[[], None]) -> None:
        self._device_context, self._pause = device_context, pause
        groups = (*GROUPS, *OTHER_GROUPS) if device_context.real else REHEARSED
        self._groups = [group for group in groups if group.side == "motley" or is_installed(group.side)]
        self._measuring = EngineMeasurement(
            str(device_context.device),
            out,
            lambda share: 0.0,
            lambda what: print(f"  {what}", file=sys.stderr, flush=True),
        )

    def turn(self, part: BenchPart, first: bool) -> bool:
        """Measure the groups that are left, as far as time allows; return whether none of Motley's own failed.

        Groups that were cut off are left for another turn, in which each may use all of the turn's time.
        """
        self._pause()
        measuring, later = self._measuring, list[WorkloadGroup]()
        measuring.turn(part.left)
        for group in self._groups:
            if (first and group in OTHER_GROUPS) or (
                not first and self._device_context.real and part.left() < _GROUP_S
            ):
                later.append(group)
            elif (left := measuring.group(group)) is not None:
                later.append(replace(left, until=1.0))
            rows = measuring.rows
            part.fields |= {
                "sides": measuring.sides, "rows": rows, "goals": judge_goals(rows), "found": measuring.found,
                "cut": list(map(asdict, later)), "unreached": len(later), "complete": False,
            }  # fmt: skip
            part.save()
        self._groups = later
        part.fields["complete"] = measuring.complete and not later
        if self._device_context.real:
            print("\n".join(map(goal_line, part.fields["goals"])))
        return not any(each["side"] == "motley" for each in measuring.failed)


def _machine(device_context: DeviceContext) -> dict[str, Any]:
    import torch

    from motley.replicas.host.measurement_rows import machine, versions

    found = {**machine(), "rehearsal": not device_context.real, "capability": str(device_context.policy.capability)}
    found["storage"] = device_context.policy.storage
    if device_context.real:
        properties = torch.cuda.get_device_properties(device_context.device)
        found |= {
            "gpu": properties.name, "sms": properties.multi_processor_count, "memory": properties.total_memory,
        }  # fmt: skip
    return {"machine": found, "versions": {**versions("triton", "transformers"), "torch": torch.__version__}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m motley_bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="end after so long (480)")
    parser.add_argument("--rehearse", metavar="CC", default="", help="no GPU: the steps alone, with 6.1's kernels, say")
    parser.add_argument("--op", action="append", default=[], help="operator; may be repeated; default: all")
    parser.add_argument("--part", action="append", default=[], choices=PARTS, help="may be repeated; default: all")
    given = parser.parse_args(arguments)
    right = run(given.out, given.seconds, given.rehearse, given.op, given.part)
    print(f"written to {given.out}: " + ("all was right" if right else "NOT all was right, see summary.json"))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
