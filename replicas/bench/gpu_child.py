"""The process that `motley bench gpu` drives: one task a line, one answer a line.

    python -m motley.replicas.bench.gpu_child [CC]     with CC a stand-in of that capability, in Triton's interpreter

A kernel may hang, or leave the process's CUDA context unusable: then only this process is lost, and one task.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .child import answer
from .tasks import serve

if TYPE_CHECKING:
    from ...kernels.device.device_context import DeviceContext
    from ..gpu.accelerator import Accelerator

__all__ = ["Tasks", "parse_capability", "rig_of"]


def parse_capability(text: str) -> tuple[int, int]:
    """Of "6.1"."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def rig_of(capability: str) -> DeviceContext:
    """The first GPU, or a stand-in of that capability. Raises RuntimeError where torch finds no GPU."""
    if capability:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    from ...kernels.compiler.triton_interpreter import speed_up_interpreter
    from ...kernels.device.device_context import gpu_context, interpreter_context

    if capability:
        speed_up_interpreter()
        return interpreter_context(parse_capability(capability))
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here; --rehearse goes through the steps without one")
    return gpu_context(torch.device("cuda:0"))


class Tasks:
    """Each method is a task; what it takes and gives is JSON. accelerator: of `gpu_engine.compare`."""

    def __init__(self, rig: DeviceContext, accelerator: Callable[[], Accelerator | None] = lambda: None) -> None:
        self._rig = rig
        self._accelerator = accelerator

    def memory(self) -> dict[str, float]:
        """What a `MemorySpeed` has measured. A stand-in runs the same kernels."""
        from ...kernels.tuning.memory_bandwidth import measure_memory_bandwidth

        return dict(measure_memory_bandwidth(self._rig.device, None if self._rig.real else 2**16, triton=True).measured)

    def check(self, op: str, shape: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """error_of_allowed: the worst difference to the reference over what rounding explains."""
        from ...kernels.launch.kernel_operation import ProblemShape
        from ...kernels.launch.variant import Config
        from ...kernels.registry import find_operation

        problem = find_operation(op).problem(self._rig.policy, ProblemShape.parse(shape), self._rig.device)
        return {"error_of_allowed": problem.error(problem.run(Config.from_json(config)))}

    def tune(self, op: str, shape: str, most: int | None) -> dict[str, Any]:
        """The best config and what is known of it, or none; the time of each; and those that did not count."""
        from ...kernels.launch.kernel_operation import ProblemShape
        from ...kernels.launch.known_spills import offered_configs
        from ...kernels.registry import find_operation
        from ...kernels.tuning.config_search import ConfigTrial, search_configs

        tried: list[ConfigTrial] = []
        wanted, chosen = find_operation(op), ProblemShape.parse(shape)
        configs = offered_configs(wanted, self._rig.policy, chosen)[:most]
        entry = search_configs(wanted, self._rig, chosen, configs, tried.append)
        found = None if entry is None else {"config": entry.config.to_json(), **entry.facts}
        excluded = [{"config": trial.config.to_json(), "why": trial.why} for trial in tried if trial.why]
        times = [
            {"config": trial.config.to_json(), "microseconds": round(trial.seconds * 1e6, 2)}
            for trial in tried
            if trial.seconds is not None
        ]
        return {"found": found, "tried": times, "excluded": excluded}

    def engine(self, max_tokens: int) -> dict[str, Any]:
        """Greedy texts of a small model beside the CPU's in fp32."""
        from .gpu_engine import compare

        return compare(self._rig, max_tokens, self._accelerator)

    def measure(self, name: str, op: str, shape: str, bandwidth: float) -> list[dict[str, Any]]:
        """Rows of the benchmark. Raises AssertionError when the result is wrong."""
        from ...kernels.launch.kernel_operation import ProblemShape
        from ...kernels.registry import find_operation
        from ...kernels.tuning.operation_bench import measure_operation
        from .kernels import rows_of

        return list(
            rows_of(
                name,
                measure_operation(find_operation(op), self._rig, ProblemShape.parse(shape)),
                bandwidth,
                real=self._rig.real,
            )
        )

    def reread(self) -> None:
        """Tables have changed."""
        from ...kernels.launch import config_tables

        config_tables.clear_table_cache()

    def usable(self) -> bool:
        """Whether the device still answers: after some errors a process can launch nothing any more."""
        import torch

        if self._rig.real:
            try:
                torch.cuda.synchronize(self._rig.device)
                torch.cuda.empty_cache()
            except RuntimeError:
                return False
        return True


def main() -> None:
    capability = sys.argv[1] if len(sys.argv) > 1 else ""
    tasks = Tasks(rig_of(capability))
    answer({"ready": True})
    serve(tasks)


if __name__ == "__main__":
    main()
