"""Parts of `motley bench gpu` that handle kernels one by one: checks, tuning and measurements."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from motley.kernels.compiler.compile_pool import CompileJob
from motley.kernels.device.device_context import DeviceContext
from motley.kernels.launch.config_tables import TUNED_VARIABLE, ConfigEntry, table_roots
from motley.kernels.launch.kernel_operation import KernelOperation, ProblemShape
from motley.kernels.launch.known_spills import offered_configs
from motley.kernels.launch.variant import Config
from motley.kernels.tuning import config_search
from motley.kernels.tuning.memory_bandwidth import MemoryBandwidth
from motley.kernels.tuning.table_writer import merge_into_table

from ..kernels.operation_measurement import measurement_memory_shortage
from ..processes.bench_child import ChildSilent
from ..processes.bench_schedule import BenchPart
from ..processes.task_process import START_S, TaskProcess
from . import gpu_kernel_targets
from .ahead_compiler import AheadCompiler
from .gpu_kernel_order import KernelOrder, in_turns

REHEARSED_CONFIGS, REHEARSED_JOBS = 2, 2
# Weight of an operator in the time for tuning; all others have 1.
WEIGHTS = {"w4a16_gemm": 4.0, "w4a16_gemv": 3.0, "attention_decode": 3.0}

AHEAD_S = 30.0  # with less time left, compiling ahead does not pay
COMPILED = 0.6  # share of the checks' time for which they wait for the compiler


class KernelParts:
    """Checks, tuning and measurements of kernels; each public method but `pause` is a part of the benchmark.

    process    process in which the kernels run
    compilers  stack that ends the processes which compile ahead when it is closed
    """

    def __init__(
        self,
        device_context: DeviceContext,
        operations: Sequence[KernelOperation],
        out: Path,
        process: TaskProcess,
        compilers: ExitStack,
    ) -> None:
        self._device_context = device_context
        self._order = KernelOrder(device_context, operations)
        self._refused = {each.name: why for each in operations if (why := each.refusal(device_context.policy))}
        self._out = out
        self._process = process
        self._compiler = AheadCompiler(device_context.policy.capability, compilers)
        self._memory: MemoryBandwidth | None = None
        self._to_check: list[tuple[KernelOperation, ProblemShape, Config]] | None = None
        self._to_measure: list[tuple[str, KernelOperation, ProblemShape]] | None = None
        self._entries: dict[KernelOperation, dict[ProblemShape, ConfigEntry]] = {}
        self._sent: set[bool] = set()

    def checks(self, part: BenchPart, first: bool = False) -> bool:
        """Check operators against their references, with the config that a launch would use and with the first config.

        first  True: check one shape of each operator only

        Returns whether all checked results are right and no check is left.
        """
        if self._to_check is None:
            self._to_check = list(in_turns(map(self._order.checks_of, self._order.operations)))
            part.fields |= {"refused": self._refused, "failed": [], "rows": []}
        left, rows, failed = self._to_check, part.fields["rows"], part.fields["failed"]
        self._process.begin()
        until = len(left) - len(self._order.operations) if first and self._device_context.real else 0
        self._compile_checked(part, left[: len(left) - until])
        if first:
            self._compile_tuned(part, first)
        while len(left) > until and not part.over:
            operation, shape, config = left.pop(0)
            row = {"op": operation.name, "shape": shape.key, "config": config.to_json()}
            response = self._process.ask(
                "check", left_s=part.left(), op=row["op"], shape=shape.key, config=row["config"]
            )  # fmt: skip
            rows.append(row | response.pop("result", {}) | response)
            if not rows[-1].get("error_of_allowed", 2) <= 1:  # a NaN fails as well
                failed.append(f"{operation.name} {shape.key}")
            part.save(now=False)
        part.fields |= {"checked": len(rows), "unreached": len(left), "complete": not left and _answered(rows)}
        return not failed and not left

    def tuning(self, part: BenchPart, first: bool = False) -> bool:
        """Tune the operators in turn, the important ones more often; tables are written as they grow.

        Shapes that the device has no memory for are skipped and listed, here and in `kernels`; that is no failure.
        Shapes that the targets are about come before all others.

        first  True: tune only the shapes that the targets are about

        Returns whether the memory bandwidth was measured and no task failed.
        """
        if first or part.left() > AHEAD_S:
            self._compile_tuned(part, first)
        if "rows" not in part.fields:
            part.fields |= {**self._measure_memory(part), "rows": [], "skipped": []}
        left, rows = self._order.left_to_tune, part.fields["rows"]
        spent = dict.fromkeys(left, 0.0)
        tuned: set[KernelOperation] = set()
        while self._memory is not None and not part.over:
            turns = {each: self._order.rank(each, shapes[0]) for each, shapes in left.items() if shapes}
            turns = {each: rank for each, rank in turns.items() if not first or rank < 2}
            if not turns:
                break
            operation = min(turns, key=lambda each: (turns[each], spent[each]))
            shape = left[operation].pop(0)
            if why := config_search.search_memory_shortage(operation, self._device_context, shape):
                part.fields["skipped"].append(f"{operation.name} {shape.key}: {why}")
                continue
            began = time.monotonic()
            response = self._process.ask(
                "tune", left_s=part.left(), op=operation.name, shape=shape.key,
                max_configs=None if self._device_context.real else REHEARSED_CONFIGS,
            )  # fmt: skip
            spent[operation] += (time.monotonic() - began) / WEIGHTS.get(operation.name, 1.0)
            rows.append({"op": operation.name, "shape": shape.key, **response})
            if found := response.get("result", {}).get("found"):
                facts = dict(found)
                config = Config.from_json(facts.pop("config"))
                entries = self._entries.setdefault(operation, {})
                entries[shape] = ConfigEntry(config, facts)
                tuned.add(operation)
                if self._device_context.real:  # times of a stand-in mean nothing
                    merge_into_table(operation, self._device_context, entries, self._memory, self._out / "tuned")
            part.save(now=False)
        unreached = sum(map(len, left.values()))
        part.fields |= {"unreached": unreached, "complete": not unreached and _answered(rows)}
        if self._device_context.real and tuned and self._memory is not None:  # later measurements use these tables
            self._keep(part, tuned, self._memory)
        self._compiler.end()
        return self._memory is not None and _answered(rows)

    def kernels(self, part: BenchPart, first: bool = False) -> bool:
        """Measure the operators with the current tables: first what the targets are about, then each operator in turn.

        first  True: measure only what the targets are about

        Returns whether nothing failed and the memory bandwidth is known.
        """
        cases = self._order.measured()
        if self._to_measure is None:
            self._to_measure = list(cases)
            part.fields |= {**self._measure_memory(part), "failed": [], "skipped": [], "rows": []}
        left, rows, failed = self._to_measure, part.fields["rows"], part.fields["failed"]
        while (
            left and self._memory is not None and not part.over and not (first and self._order.rank(*left[0][1:]) == 2)
        ):
            name, operation, shape = left.pop(0)
            if why := measurement_memory_shortage(operation, self._device_context, shape):
                part.fields["skipped"].append(f"{operation.name} {shape.key}: {why}")
                continue
            response = self._process.ask(
                "measure", left_s=part.left(), name=name, op=operation.name, shape=shape.key,
                bandwidth=self._memory.bandwidth,
            )  # fmt: skip
            rows += response.get("result", [])
            if "error" in response:
                failed.append({"case": name, "op": operation.name, "shape": shape.key, **response})
            part.save(now=False)
        measurable = [
            each[1:] for each in cases if not measurement_memory_shortage(each[1], self._device_context, each[2])
        ]
        judged = gpu_kernel_targets.judge(
            rows, [(operation.name, dict(shape.fields)) for operation, shape in measurable]
        )
        part.fields |= {"targets": judged, "unreached": len(left), "complete": not left and not failed}
        if self._device_context.real:
            shares_of = [f"shares are of {self._memory.describe()}"] if self._memory is not None else []
            print("\n".join([*shares_of, *map(gpu_kernel_targets.line, judged)]))
        return not failed and self._memory is not None

    def _keep(self, part: BenchPart, tuned: Iterable[KernelOperation], memory: MemoryBandwidth) -> None:
        """Write tables of tuned configs to the folder in which launches look for them.

        If the installation cannot be written, launches look in the results folder from here on.
        """
        try:
            for operation in tuned:
                merge_into_table(operation, self._device_context, self._entries[operation], memory, table_roots()[0])
        except OSError as error:
            tables = (self._out / "tuned").absolute()
            part.fields["tables"] = (
                f"{error}: they are in {tables} alone; launches look there with {TUNED_VARIABLE}={tables}"
            )
            print(f"  tables: {part.fields['tables']}", file=sys.stderr, flush=True)
            os.environ[TUNED_VARIABLE] = str(tables)  # for later processes, which measure with these tables
            self._process.end()
            return
        if "error" in self._process.ask("reread", left_s=part.left()):
            self._process.end()

    def pause(self) -> None:
        """End the compilers, and on a GPU the kernels' process: another part needs the GPU and the cores for itself."""
        self._compiler.end()
        if self._device_context.real:
            self._process.end()

    def _measure_memory(self, part: BenchPart) -> dict[str, Any]:
        """Measure the memory bandwidth once, which all other figures are compared with; return it, or the error, for
        the report.
        """
        if self._memory is None:
            response = self._process.ask("memory", left_s=part.left())
            if "result" not in response:
                return {"memory": response}
            self._memory = MemoryBandwidth(response["result"])
        return self._memory.to_json()

    def _compile_checked(self, part: BenchPart, checks: Sequence[tuple[KernelOperation, ProblemShape, Config]]) -> None:
        """Compile the kernels of checks and wait for them; a launch compiles those that are not ready in time."""
        capability = self._device_context.policy.capability.version
        jobs = [CompileJob(operation.name, capability, shape, config) for operation, shape, config in checks]
        if not (jobs := jobs if self._device_context.real else jobs[:REHEARSED_JOBS]):
            return
        part.fields["compiled_ahead"] = self._compiler.compile(
            jobs, part.left(COMPILED) if self._device_context.real else START_S
        )

    def _compile_tuned(self, part: BenchPart, first: bool) -> None:
        """Start compiling the kernels that tuning will try, in the background.

        If the compiler does not accept the jobs, the report says so, and launches compile instead.
        """
        if not self._device_context.real or first in self._sent:
            return
        self._sent.add(first)
        policy = self._device_context.policy
        turns = in_turns([(operation, shape) for shape in left] for operation, left in self._order.left_to_tune.items())
        jobs = [
            CompileJob(operation.name, policy.capability.version, shape, config)
            for operation, shape in sorted(turns, key=lambda each: self._order.rank(*each))
            if (self._order.rank(operation, shape) < 2) is first
            for config in offered_configs(operation, policy, shape)
        ]
        try:
            self._compiler.begin(jobs)
        except ChildSilent as error:
            part.fields["not_compiled_ahead"] = {"jobs": len(jobs), "error": error.message}


def _answered(rows: Iterable[dict[str, Any]]) -> bool:
    """Return whether every task was answered, whatever the answer: no row has an error."""
    return not any("error" in row for row in rows)
