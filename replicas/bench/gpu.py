"""`motley bench gpu`: everything there is to do on a GPU, in one command, into one folder.

It runs where torch, Triton and numpy are and nothing else of ours need be installed:

    python -m motley.replicas.bench.gpu --out DIR

checks.json    every operator against its reference
engine.json    a small model's greedy texts on all of them, beside the CPU's in fp32
tuning.json    what was searched; the tables themselves under tuned/
kernels.json   `motley bench kernels` with these tables, and which of the targets are reached

Files are written while a step goes on, so that what was done is kept if time runs out. Kernels run in a process
of their own (gpu_child.py) and are compiled ahead on all cores (gpu_ahead.py). Without a GPU, --rehearse goes
through the same steps on small shapes in Triton's interpreter: what it writes says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..cores import usable_cores
from .child import Child, ChildEnded, ChildSilent
from .gpu_child import rig_of

if TYPE_CHECKING:
    from ...kernels.operation import Operation, Shape
    from ...kernels.rig import Rig
    from ...kernels.tuning import Entry
    from ...kernels.variant import Config

__all__ = ["main", "run"]

SECONDS = 480.0
CHILD = "motley.replicas.bench.gpu_child"
CHECKED, TUNED = 0.4, 0.75  # of the time, when checks and tuning end at the latest
COMPILED = 0.2  # likewise, so long checks wait for the compiler
TASK_S = 60.0  # a kernel that takes longer hangs
START_S = 180.0  # of a process that imports torch and Triton on a busy machine
SAVE_S = 5.0
# A rehearsal checks every operator, and goes through the rest with a few.
REHEARSED = ("w4a16_gemv", "attention_decode", "rms_norm")
REHEARSED_CONFIGS, REHEARSED_JOBS = 2, 2
# What tuning spends its time on, in parts; of the others each gets one.
PARTS = {"w4a16_gemm": 4.0, "w4a16_gemv": 3.0, "attention_decode": 3.0}

T = TypeVar("T")


def run(out: Path, seconds: float = SECONDS, rehearse: str = "", ops: Sequence[str] = ()) -> bool:
    """Whether every check passed. `rehearse`: the capability whose kernels are rehearsed, "6.1". `ops`: all if empty.

    Raises RuntimeError without a GPU, unless it is a rehearsal; KeyError for an operator that is not known;
    EngineFault when the process that has the GPU does not start.
    """
    clock = _Clock(seconds)
    rig = rig_of(rehearse)
    from ...kernels.registry import OPERATIONS, operation

    operations = [operation(name) for name in ops] or list(OPERATIONS)
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.json").write_text(json.dumps(_machine(rig), indent=1) + "\n")
    with _Worker(rehearse) as worker:
        plan = _Run(rig, operations, out, clock, worker)
        with ExitStack() as compilers:
            plan.checks(compilers)
            if not ops:
                plan.engine()
            plan.tuning()
        plan.kernels()
    return plan.passed


class _Clock:
    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._seconds = seconds

    def past(self, share: float) -> bool:
        return self.left(share) <= 0

    def left(self, share: float = 1.0) -> float:
        return self._began + share * self._seconds - time.monotonic()


class _Worker:
    """The process that does tasks, and a new one when it was lost."""

    def __init__(self, capability: str) -> None:
        self._arguments = [capability] if capability else []
        self._stack = ExitStack()
        self._child: Child | None = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def ask(self, do: str, limit_s: float = TASK_S, **task: Any) -> dict[str, Any]:
        """{"result": ...} or {"error": ...}, whatever a kernel does. Raises ChildEnded when no process starts."""
        child = self._child or self._start()
        child.write({"do": do, **task})
        try:
            told = child.read(max(1.0, limit_s))
        except (ChildSilent, ChildEnded) as error:
            self.end()
            return {"error": error.message}
        if not told.pop("usable"):
            self.end()
        return told

    def end(self) -> None:
        """The next task has a new process, which reads tables anew."""
        self._stack.close()
        self._child = None

    def _start(self) -> Child:
        self._child = self._stack.enter_context(Child(CHILD, *self._arguments))
        self._child.read(START_S)
        return self._child


class _File:
    """A step's results, written now and then."""

    def __init__(self, path: Path, rig: Rig) -> None:
        self.fields: dict[str, Any] = {"rehearsal": not rig.real, "complete": False, "seconds": 0.0}
        self._path = path
        self._began = self._saved = time.monotonic()

    def save(self, *, now: bool = True) -> None:
        if now or time.monotonic() - self._saved > SAVE_S:
            self._saved = time.monotonic()
            self.fields["seconds"] = round(self._saved - self._began, 1)
            self._path.write_text(json.dumps(self.fields, indent=1) + "\n")


class _Run:
    def __init__(self, rig: Rig, operations: Sequence[Operation], out: Path, clock: _Clock, worker: _Worker) -> None:
        self.passed = False
        self._rig = rig
        self._operations = [each for each in operations if not each.refusal(rig.policy)]
        self._refused = {each.name: why for each in operations if (why := each.refusal(rig.policy))}
        self._out = out
        self._clock = clock
        self._worker = worker
        self._bandwidth = 0.0

    def checks(self, compilers: ExitStack) -> None:
        """As an operator would be launched, and as its first config has it; each operator's first shape before all."""
        file = self._begin("checks")
        self._compile_ahead(compilers, file)
        rows: list[dict[str, Any]] = []
        failed: list[str] = []
        unreached = 0
        file.fields |= {"refused": self._refused, "failed": failed, "rows": rows}
        for operation, shape, config in _turn_about(map(self._checked, self._operations)):
            if self._clock.past(CHECKED):
                unreached += 1
                continue
            row = {"op": operation.name, "shape": shape.key, "config": config.to_json()}
            told = self._worker.ask("check", op=row["op"], shape=shape.key, config=row["config"])
            rows.append(row | told.pop("result", {}) | told)
            if not rows[-1].get("error_of_allowed", 2) <= 1:  # NaN is wrong as well
                failed.append(f"{operation.name} {shape.key}")
            file.save(now=False)
        file.fields |= {"checked": len(rows), "unreached": unreached, "complete": not unreached}
        file.save()
        self.passed = not failed and not unreached

    def engine(self) -> None:
        """All of them together: a small model's greedy texts, beside those of the CPU in fp32."""
        file = self._begin("engine")
        told = self._worker.ask("engine", 2 * TASK_S, max_tokens=32 if self._rig.real else 2)
        file.fields |= {**told.pop("result", {}), **told, "complete": True}
        file.save()
        self.passed &= bool(file.fields.get("right"))

    def tuning(self) -> None:
        """Every operator in turn, those that matter most more often; tables are written as they grow."""
        from ...kernels.tune import keep
        from ...kernels.tuning import FOLDER, Entry
        from ...kernels.variant import Config

        file = self._begin("tuning")
        measured = self._worker.ask("bandwidth")
        self._bandwidth = measured.get("result", 0.0)
        rows: list[dict[str, Any]] = []
        entries: dict[str, dict[Shape, Entry]] = {}
        file.fields |= {"bandwidth": measured, "rows": rows}
        left = {operation: list(self._tuned(operation)) for operation in self._timed()}
        spent = dict.fromkeys(left, 0.0)
        while any(left.values()) and self._bandwidth and not self._clock.past(TUNED):
            operation = min((each for each in left if left[each]), key=lambda each: spent[each])
            shape = left[operation].pop(0)
            began = time.monotonic()
            told = self._worker.ask(
                "tune", op=operation.name, shape=shape.key, bandwidth=self._bandwidth,
                most=None if self._rig.real else REHEARSED_CONFIGS,
            )  # fmt: skip
            spent[operation] += (time.monotonic() - began) / PARTS.get(operation.name, 1.0)
            rows.append({"op": operation.name, "shape": shape.key, **told})
            if found := told.get("result", {}).get("found"):
                facts = dict(found)
                config = Config.from_json(facts.pop("config"))
                entries.setdefault(operation.name, {})[shape] = Entry(config, facts)
                if self._rig.real:  # a stand-in's times mean nothing
                    keep(operation, self._rig, entries[operation.name], self._bandwidth, self._out / "tuned")
            file.save(now=False)
        unreached = sum(map(len, left.values()))
        file.fields |= {"unreached": unreached, "complete": not unreached}
        file.save()
        for path in (self._out / "tuned").rglob("*.json"):  # what follows is measured with them
            target = FOLDER / path.relative_to(self._out / "tuned")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text())
        self._worker.end()

    def kernels(self) -> None:
        """As the tables have them now: first what targets are about, then of each operator in turn."""
        from . import gpu_targets

        file = self._begin("kernels")
        rows: list[dict[str, Any]] = []
        failed: list[dict[str, Any]] = []
        unreached = 0
        file.fields |= {"copy_gb_per_s": round(self._bandwidth / 1e9, 1), "failed": failed, "rows": rows}
        cases = self._measured()
        for name, operation, shape in cases:
            if self._clock.past(1.0) or not self._bandwidth:
                unreached += 1
                continue
            told = self._worker.ask(
                "measure", min(TASK_S, self._clock.left()), name=name, op=operation.name, shape=shape.key,
                bandwidth=self._bandwidth,
            )  # fmt: skip
            rows += told.get("result", [])
            if "error" in told:
                failed.append({"case": name, "op": operation.name, "shape": shape.key, **told})
            file.save(now=False)
        judged = gpu_targets.judge(rows, [(operation.name, dict(shape.fields)) for _, operation, shape in cases])
        file.fields |= {"targets": judged, "unreached": unreached, "complete": not unreached}
        file.save()
        self.passed &= not failed
        if self._rig.real:
            print("\n".join(map(gpu_targets.line, judged)))

    def _begin(self, step: str) -> _File:
        print(f"{step}, {self._clock.left():.0f} s left", file=sys.stderr, flush=True)
        file = _File(self._out / f"{step}.json", self._rig)
        file.save()
        return file

    def _compile_ahead(self, stack: ExitStack, file: _File) -> None:
        """What is checked is waited for. What is tuned is compiled meanwhile; what is late, a launch compiles.

        `stack`: the compilers end with it.
        """
        from ...kernels.compiling import Job
        from ...kernels.tune import trials
        from .gpu_ahead import to_json

        capability = self._rig.policy.capability.version
        now = [
            Job(operation.name, capability, shape, config)
            for operation, shape, config in _turn_about(map(self._checked, self._operations))
        ]
        later = [job for operation in self._operations for job in trials(operation, self._rig.policy)]
        if not self._rig.real:
            now, later = now[:REHEARSED_JOBS], []
        if not now:
            return
        child = stack.enter_context(
            Child(
                "motley.replicas.bench.gpu_ahead", "{}.{}".format(*capability), str(max(1, usable_cores() - 1)),
                environment={"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
            )
        )  # fmt: skip
        child.write([to_json(job) for job in now])
        try:
            file.fields["compiled_ahead"] = child.read(
                max(START_S if not self._rig.real else 0.0, self._clock.left(COMPILED))
            )
        except (ChildSilent, ChildEnded) as error:
            file.fields["compiled_ahead"] = {"error": error.message}
        else:
            child.write([to_json(job) for job in later])

    def _checked(self, operation: Operation) -> Iterator[tuple[Operation, Shape, Config]]:
        from ...kernels.spills import offered
        from ...kernels.tuning import choose

        policy = self._rig.policy
        more = operation.samples(policy) if self._rig.real else ()
        for shape in (*operation.small(policy), *more):
            chosen = choose(operation, policy, shape, self._rig.about.sms if self._rig.real else None).config
            configs = dict.fromkeys((chosen, offered(operation, policy, shape)[0]))
            for config in configs if self._rig.real else [chosen]:
                yield operation, shape, config

    def _tuned(self, operation: Operation) -> Sequence[Shape]:
        from ...kernels.tune import wanted

        return wanted(operation, self._rig.policy) if self._rig.real else operation.small(self._rig.policy)[:1]

    def _measured(self) -> list[tuple[str, Operation, Shape]]:
        from ...kernels.model_shapes import MODELS, REHEARSAL
        from .gpu_targets import is_judged
        from .kernels import gpu_cases

        models = (*MODELS[1:], MODELS[0]) if self._rig.real else (REHEARSAL,)
        cases = gpu_cases(self._rig, models, None if self._rig.real else (1,))
        timed = self._timed()
        judged = [case for case in cases if is_judged(case[1].name, dict(case[2].fields))]
        others = {
            operation: [case for case in cases if case[1] is operation and case not in judged] for operation in timed
        }
        return [case for case in (*judged, *_turn_about(others.values())) if case[1] in timed]

    def _timed(self) -> list[Operation]:
        return [each for each in self._operations if self._rig.real or each.name in REHEARSED]


def _turn_about(groups: Iterable[Iterable[T]]) -> Iterator[T]:
    """The first of each group, then the second of each, and so on."""
    for round_ in itertools.zip_longest(*groups):
        yield from (each for each in round_ if each is not None)


def _machine(rig: Rig) -> dict[str, Any]:
    import torch

    from .report import machine, versions

    found = {**machine(), "rehearsal": not rig.real, "capability": str(rig.policy.capability)}
    found["storage"] = rig.policy.storage
    if rig.real:
        properties = torch.cuda.get_device_properties(rig.device)
        found |= {
            "gpu": properties.name, "sms": properties.multi_processor_count, "memory": properties.total_memory,
        }  # fmt: skip
    return {"machine": found, "versions": {**versions("triton", "transformers"), "torch": torch.__version__}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m motley.replicas.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="end after so long (480)")
    parser.add_argument("--rehearse", metavar="CC", default="", help="no GPU: the steps alone, with 6.1's kernels, say")
    parser.add_argument("--op", action="append", default=[], help="operator; may be repeated; default: all")
    given = parser.parse_args(arguments)
    passed = run(given.out, given.seconds, given.rehearse, given.op)
    print(f"written to {given.out}: " + ("every check passed" if passed else "some checks FAILED, see checks.json"))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
