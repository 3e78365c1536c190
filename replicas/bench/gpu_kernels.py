"""What `motley bench gpu` does with kernels one by one: checks, tuning, measurements."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from ...kernels.compiling import Job
from ...kernels.model_shapes import MODELS, REHEARSAL
from ...kernels.operation import Operation, Shape
from ...kernels.rig import Rig
from ...kernels.spills import offered
from ...kernels.tune import keep, trials, wanted
from ...kernels.tuning import FOLDER, Entry, choose
from ...kernels.variant import Config
from ..cores import usable_cores
from . import gpu_targets
from .child import WRITE_S, Child, ChildEnded, ChildSilent
from .gpu_ahead import to_json
from .kernels import gpu_cases
from .parts import Part
from .tasks import START_S, TASK_S, TaskProcess

__all__ = ["KernelParts"]

# A rehearsal checks every operator, and goes through the rest with a few.
REHEARSED = ("w4a16_gemv", "attention_decode", "rms_norm")
REHEARSED_CONFIGS, REHEARSED_JOBS = 2, 2
# What tuning spends its time on, in parts; of the others each gets one.
WEIGHTS = {"w4a16_gemm": 4.0, "w4a16_gemv": 3.0, "attention_decode": 3.0}

AHEAD = "motley.replicas.bench.gpu_ahead"
COMPILED = 0.6  # of the time of the checks, so long they wait for the compiler

T = TypeVar("T")


class KernelParts:
    """compilers: ends those that compile ahead, when it is closed."""

    def __init__(
        self, rig: Rig, operations: Sequence[Operation], out: Path, process: TaskProcess, compilers: ExitStack
    ) -> None:
        self._rig = rig
        self._operations = [each for each in operations if not each.refusal(rig.policy)]
        self._refused = {each.name: why for each in operations if (why := each.refusal(rig.policy))}
        self._out = out
        self._process = process
        self._compilers = compilers
        self._bandwidth = 0.0
        self._ahead: Child | None = None
        self._tuned_sent = False

    def checks(self, part: Part) -> bool:
        """As an operator would be launched, and as its first config has it; each operator's first shape before all."""
        self._compile_checked(part)
        self._compile_tuned(part)
        rows: list[dict[str, Any]] = []
        failed: list[str] = []
        unreached = 0
        part.fields |= {"refused": self._refused, "failed": failed, "rows": rows}
        for operation, shape, config in _turn_about(map(self._checked, self._operations)):
            if part.over:
                unreached += 1
                continue
            row = {"op": operation.name, "shape": shape.key, "config": config.to_json()}
            told = self._process.ask("check", op=row["op"], shape=shape.key, config=row["config"])
            rows.append(row | told.pop("result", {}) | told)
            if not rows[-1].get("error_of_allowed", 2) <= 1:  # NaN is wrong as well
                failed.append(f"{operation.name} {shape.key}")
            part.save(now=False)
        part.fields |= {"checked": len(rows), "unreached": unreached, "complete": not unreached and _answered(rows)}
        return not failed and not unreached

    def tuning(self, part: Part) -> bool:
        """Every operator in turn, those that matter most more often; tables are written as they grow."""
        if not self._tuned_sent:  # there were no checks
            self._compile_tuned(part)
        rows: list[dict[str, Any]] = []
        entries: dict[str, dict[Shape, Entry]] = {}
        part.fields |= {"bandwidth": self._measure_bandwidth(), "rows": rows}
        left = {operation: list(self._tuned(operation)) for operation in self._timed()}
        spent = dict.fromkeys(left, 0.0)
        while any(left.values()) and self._bandwidth and not part.over:
            operation = min((each for each in left if left[each]), key=lambda each: spent[each])
            shape = left[operation].pop(0)
            began = time.monotonic()
            told = self._process.ask(
                "tune", op=operation.name, shape=shape.key, bandwidth=self._bandwidth,
                most=None if self._rig.real else REHEARSED_CONFIGS,
            )  # fmt: skip
            spent[operation] += (time.monotonic() - began) / WEIGHTS.get(operation.name, 1.0)
            rows.append({"op": operation.name, "shape": shape.key, **told})
            if found := told.get("result", {}).get("found"):
                facts = dict(found)
                config = Config.from_json(facts.pop("config"))
                entries.setdefault(operation.name, {})[shape] = Entry(config, facts)
                if self._rig.real:  # a stand-in's times mean nothing
                    keep(operation, self._rig, entries[operation.name], self._bandwidth, self._out / "tuned")
            part.save(now=False)
        unreached = sum(map(len, left.values()))
        part.fields |= {"unreached": unreached, "complete": not unreached and _answered(rows)}
        if self._rig.real and entries:  # what follows is measured with them
            for operation in left:
                if found_here := entries.get(operation.name):
                    keep(operation, self._rig, found_here, self._bandwidth, FOLDER)
            self._process.end()
        self._end_compiler()
        return bool(self._bandwidth) and not any("error" in row for row in rows)

    def kernels(self, part: Part) -> bool:
        """As the tables have them now: first what targets are about, then of each operator in turn."""
        rows: list[dict[str, Any]] = []
        failed: list[dict[str, Any]] = []
        unreached = 0
        self._measure_bandwidth()
        part.fields |= {"copy_gb_per_s": round(self._bandwidth / 1e9, 1), "failed": failed, "rows": rows}
        cases = self._measured()
        for name, operation, shape in cases:
            if part.over or not self._bandwidth:
                unreached += 1
                continue
            told = self._process.ask(
                "measure", min(TASK_S, part.left()), name=name, op=operation.name, shape=shape.key,
                bandwidth=self._bandwidth,
            )  # fmt: skip
            rows += told.get("result", [])
            if "error" in told:
                failed.append({"case": name, "op": operation.name, "shape": shape.key, **told})
            part.save(now=False)
        judged = gpu_targets.judge(rows, [(operation.name, dict(shape.fields)) for _, operation, shape in cases])
        part.fields |= {"targets": judged, "unreached": unreached, "complete": not unreached and not failed}
        if self._rig.real:
            print("\n".join(map(gpu_targets.line, judged)))
        return not failed and bool(self._bandwidth)

    def _measure_bandwidth(self) -> dict[str, Any]:
        """Once; 0 where it fails, and then there is nothing to measure against."""
        told = {"result": self._bandwidth} if self._bandwidth else self._process.ask("bandwidth")
        self._bandwidth = told.get("result", 0.0)
        return told

    def _compile_checked(self, part: Part) -> None:
        """Waits for it; what is late, a launch compiles."""
        capability = self._rig.policy.capability.version
        jobs = [
            Job(operation.name, capability, shape, config)
            for operation, shape, config in _turn_about(map(self._checked, self._operations))
        ]
        if not (jobs := jobs if self._rig.real else jobs[:REHEARSED_JOBS]):
            return
        try:
            self._compiler().write([to_json(job) for job in jobs], WRITE_S)
            told = self._compiler().read(part.left(COMPILED) if self._rig.real else START_S)
        except (ChildSilent, ChildEnded) as error:
            told = {"error": error.message}
            self._end_compiler()  # it reads no more lists while it is at this one
        part.fields["compiled_ahead"] = told

    def _compile_tuned(self, part: Part) -> None:
        """While something else is done: nobody waits for it. What it does not take is told, and launches compile."""
        self._tuned_sent = True
        if not self._rig.real:
            return
        jobs = [job for operation in self._operations for job in trials(operation, self._rig.policy)]
        try:
            self._compiler().write([to_json(job) for job in jobs], WRITE_S)
        except ChildSilent as error:
            part.fields["not_compiled_ahead"] = {"jobs": len(jobs), "error": error.message}
            self._end_compiler()

    def _end_compiler(self) -> None:
        self._compilers.close()
        self._ahead = None

    def _compiler(self) -> Child:
        if self._ahead is None:
            self._ahead = self._compilers.enter_context(
                Child(
                    AHEAD, "{}.{}".format(*self._rig.policy.capability.version),
                    str(max(1, usable_cores() - 1)),
                    environment={"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
                )
            )  # fmt: skip
        return self._ahead

    def _checked(self, operation: Operation) -> Iterator[tuple[Operation, Shape, Config]]:
        policy = self._rig.policy
        more = operation.samples(policy) if self._rig.real else ()
        for shape in (*operation.small(policy), *more):
            chosen = choose(operation, policy, shape, self._rig.about.sms if self._rig.real else None).config
            configs = dict.fromkeys((chosen, offered(operation, policy, shape)[0]))
            for config in configs if self._rig.real else [chosen]:
                yield operation, shape, config

    def _tuned(self, operation: Operation) -> Sequence[Shape]:
        return wanted(operation, self._rig.policy) if self._rig.real else operation.small(self._rig.policy)[:1]

    def _measured(self) -> list[tuple[str, Operation, Shape]]:
        models = (*MODELS[1:], MODELS[0]) if self._rig.real else (REHEARSAL,)
        cases = gpu_cases(self._rig, models, None if self._rig.real else (1,))
        timed = self._timed()
        judged = [case for case in cases if gpu_targets.is_judged(case[1].name, dict(case[2].fields))]
        others = {
            operation: [case for case in cases if case[1] is operation and case not in judged] for operation in timed
        }
        return [case for case in (*judged, *_turn_about(others.values())) if case[1] in timed]

    def _timed(self) -> list[Operation]:
        return [each for each in self._operations if self._rig.real or each.name in REHEARSED]


def _answered(rows: Iterable[dict[str, Any]]) -> bool:
    """Whatever the answer."""
    return not any("error" in row for row in rows)


def _turn_about(groups: Iterable[Iterable[T]]) -> Iterator[T]:
    """The first of each group, then the second of each, and so on."""
    for round_ in itertools.zip_longest(*groups):
        yield from (each for each in round_ if each is not None)
