"""The process of `motley bench gpu` in Triton's interpreter, with the stand-in for a device: decode runs as graphs."""

from __future__ import annotations

import sys

from motley.replicas.bench import gpu_child
from motley.replicas.bench.child import answer
from motley.replicas.bench.tasks import serve

if __name__ == "__main__":
    rig = gpu_child.rig_of(sys.argv[1])
    from late_device import LateDevice

    tasks = gpu_child.GpuTasks(rig, lambda: LateDevice(recorded=False))
    answer({"ready": True})
    serve(tasks)
