"""The process of `motley bench gpu` with faults in operators, named by FAULTS: {"rms_norm": "hang"}, say."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from motley_bench.gpu import gpu_tasks
from motley_bench.processes.bench_child import respond
from motley_bench.processes.task_process import serve


class Faulty(gpu_tasks.GpuTasks):
    def check(self, op: str, shape: str, config: Any) -> dict[str, Any]:
        fault = json.loads(os.environ["FAULTS"]).get(op)
        if fault == "hang":
            time.sleep(600)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "lose":
            self.lost = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        found = super().check(op, shape, config)
        return {"error_of_allowed": 1.5} if fault == "wrong" else found

    def usable(self) -> bool:
        return not getattr(self, "lost", False)


if __name__ == "__main__":
    tasks = Faulty(gpu_tasks.rehearsal_context(sys.argv[1]))
    respond({"ready": True})
    serve(tasks)
