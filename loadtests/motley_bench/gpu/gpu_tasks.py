"""Process that `motley bench gpu` controls: it reads one task per line and writes one answer per line.

    python -m motley_bench.gpu.gpu_tasks [CC]     CC: use a stand-in of that capability, in Triton's interpreter

A kernel may hang, or leave the process's CUDA context unusable: then only this process and one task are lost.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..processes.bench_child import respond
from ..processes.task_process import serve

if TYPE_CHECKING:
    from motley.kernels.device.device_context import DeviceContext
    from motley.replicas.gpu.accelerator import Accelerator


def parse_capability(text: str) -> tuple[int, int]:
    """Return the major and minor number of a compute capability such as "6.1"."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def rehearsal_context(capability: str) -> DeviceContext:
    """Return the context of the first GPU, or of a stand-in if a compute capability is given.

    Raises RuntimeError if torch finds no GPU.
    """
    if capability:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    from motley.kernels.compiler.triton_interpreter import speed_up_interpreter
    from motley.kernels.device.device_context import gpu_context, interpreter_context

    if capability:
        speed_up_interpreter()
        return interpreter_context(parse_capability(capability))
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here; --rehearse goes through the steps without one")
    return gpu_context(torch.device("cuda:0"))


class GpuTasks:
    """Tasks of the process: each public method is one, and its arguments and result are JSON.

    accelerator  passed on to `gpu_engine_check.compare`
    """

    def __init__(
        self, device_context: DeviceContext, accelerator: Callable[[], Accelerator | None] = lambda: None
    ) -> None:
        self._device_context = device_context
        self._accelerator = accelerator

    def memory(self) -> dict[str, float]:
        """Return the measured memory bandwidths, as `MemoryBandwidth.measured` has them. A stand-in runs the same
        kernels.
        """
        from motley.kernels.tuning.memory_bandwidth import measure_memory_bandwidth

        return dict(
            measure_memory_bandwidth(
                self._device_context.device, None if self._device_context.real else 2**16, triton=True
            ).measured
        )

    def check(self, op: str, shape: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operator once and compare the result with its reference.

        Returns "error_of_allowed": the largest difference, divided by the difference that rounding explains.
        """
        from motley.kernels.launch.kernel_operation import ProblemShape
        from motley.kernels.launch.variant import Config
        from motley.kernels.registry import find_operation

        problem = find_operation(op).problem(
            self._device_context.policy, ProblemShape.parse(shape), self._device_context.device
        )
        return {"error_of_allowed": problem.error(problem.run(Config.from_json(config)))}

    def tune(self, op: str, shape: str, max_configs: int | None) -> dict[str, Any]:
        """Search the best config of an operator at a shape, among at most `most` configs (None: all).

        Returns "found", the best config and the facts known of it, or None; "tried", the time of each config; and
        "excluded", the configs that did not count and why.
        """
        from motley.kernels.launch.kernel_operation import ProblemShape
        from motley.kernels.launch.known_spills import offered_configs
        from motley.kernels.registry import find_operation
        from motley.kernels.tuning.config_search import ConfigTrial, search_configs

        tried: list[ConfigTrial] = []
        wanted, chosen = find_operation(op), ProblemShape.parse(shape)
        configs = offered_configs(wanted, self._device_context.policy, chosen)[:max_configs]
        entry = search_configs(wanted, self._device_context, chosen, configs, tried.append)
        found = None if entry is None else {"config": entry.config.to_json(), **entry.facts}
        excluded = [{"config": trial.config.to_json(), "why": trial.why} for trial in tried if trial.why]
        times = [
            {"config": trial.config.to_json(), "microseconds": round(trial.seconds * 1e6, 2)}
            for trial in tried
            if trial.seconds is not None
        ]
        return {"found": found, "tried": times, "excluded": excluded}

    def engine(self, max_tokens: int) -> dict[str, Any]:
        """Compare a small model's greedy texts on the GPU with those of the CPU in fp32."""
        from .gpu_engine_check import compare

        return compare(self._device_context, max_tokens, self._accelerator)

    def measure(self, name: str, op: str, shape: str, bandwidth: float) -> list[dict[str, Any]]:
        """Return an operator's rows of the benchmark. Raises AssertionError if its result is wrong."""
        from motley.kernels.launch.kernel_operation import ProblemShape
        from motley.kernels.registry import find_operation

        from ..kernels.kernel_rates import rows_of
        from ..kernels.operation_measurement import measure_operation

        return list(
            rows_of(
                name,
                measure_operation(find_operation(op), self._device_context, ProblemShape.parse(shape)),
                bandwidth,
                real=self._device_context.real,
            )
        )

    def reread(self) -> None:
        """Read the tables of tuned configs anew at the next launch, since they have changed."""
        from motley.kernels.launch import config_tables

        config_tables.clear_table_cache()

    def usable(self) -> bool:
        """Return whether the device still works: after some errors a process can launch nothing any more."""
        import torch

        if self._device_context.real:
            try:
                torch.cuda.synchronize(self._device_context.device)
                torch.cuda.empty_cache()
            except RuntimeError:
                return False
        return True


def main() -> None:
    capability = sys.argv[1] if len(sys.argv) > 1 else ""
    tasks = GpuTasks(rehearsal_context(capability))
    respond({"ready": True})
    serve(tasks)


if __name__ == "__main__":
    main()
