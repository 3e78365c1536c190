"""Compiler of the kernels that `motley bench gpu` will launch, in a process beside the one that uses the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from motley.kernels.compiler.compile_pool import CompileJob
from motley.kernels.device.compute_capability import Capability
from motley.replicas.host.cpu_cores import usable_cores

from ..processes.bench_child import WRITE_S, BenchChild, ChildEnded, ChildSilent
from .gpu_compiler_process import to_json

AHEAD = "motley_bench.gpu.gpu_compiler_process"


class AheadCompiler:
    """Process that compiles lists of kernels for one capability; a launch compiles those that are not ready.

    processes  stack that ends the process when it is closed
    """

    def __init__(self, capability: Capability, processes: ExitStack) -> None:
        self._capability, self._processes = capability, processes
        self._ahead: BenchChild | None = None
        self._occupied = False

    def compile(self, jobs: Sequence[CompileJob], limit_s: float) -> dict[str, Any]:
        """Compile kernels and wait for them; return what the process tells, or why it tells nothing in time."""
        try:
            self._compiler().write([to_json(job) for job in jobs], WRITE_S)
            return self._compiler().read(limit_s)
        except (ChildSilent, ChildEnded) as error:
            self._occupied = True
            return {"error": error.message}

    def begin(self, jobs: Sequence[CompileJob]) -> None:
        """Start compiling kernels in the background. Raises ChildSilent, and ends the process, if it does not read."""
        try:
            self._compiler().write([to_json(job) for job in jobs], WRITE_S)
        except ChildSilent:
            self.end()
            raise
        self._occupied = True

    def end(self) -> None:
        self._processes.close()
        self._ahead, self._occupied = None, False

    def _compiler(self) -> BenchChild:
        """Return a compiler process that reads. One that is busy with a list is ended and replaced."""
        if self._occupied:
            self.end()
        if self._ahead is None:
            self._ahead = self._processes.enter_context(
                BenchChild(
                    AHEAD, "{}.{}".format(*self._capability.version),
                    str(max(1, usable_cores() - 1)),
                    environment={"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
                )
            )  # fmt: skip
        return self._ahead
