"""The process of `motley bench gpu` in Triton's interpreter, with the stand-in for a device: decode runs as graphs."""

from __future__ import annotations

import sys

from motley_bench.gpu import gpu_tasks
from motley_bench.processes.bench_child import respond
from motley_bench.processes.task_process import serve

if __name__ == "__main__":
    device_context = gpu_tasks.rehearsal_context(sys.argv[1])
    from late_device import LateDevice

    tasks = gpu_tasks.GpuTasks(device_context, lambda: LateDevice(recorded=False))
    respond({"ready": True})
    serve(tasks)
