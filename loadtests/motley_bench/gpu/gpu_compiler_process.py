"""Process that compiles the kernels which `motley bench gpu` will launch, on all cores, while another uses the GPU.

    python -m motley_bench.gpu.gpu_compiler_process CC WORKERS

It reads lists of compile jobs from stdin, one list per line, and answers when a list is done. A launch finds the
compiled kernels in Triton's cache, and compiles others itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from motley.kernels.compiler.compile_pool import CompileFailure, CompileJob, compile_all
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config

from ..processes.bench_child import respond
from .gpu_tasks import parse_capability


def to_json(job: CompileJob) -> dict[str, Any]:
    return {"op": job.op, "shape": job.shape.key, "config": job.config.to_json()}


def main(arguments: Sequence[str]) -> None:
    capability, workers = parse_capability(arguments[0]), int(arguments[1])
    for line in sys.stdin:
        jobs = [
            CompileJob(each["op"], capability, ProblemShape.parse(each["shape"]), Config.from_json(each["config"]))
            for each in json.loads(line)
        ]
        began = time.monotonic()
        found = compile_all(jobs, workers)
        results = [result for launches in found.values() for _, result in launches]
        failed = sum(isinstance(result, CompileFailure) for result in results)
        respond({"jobs": len(jobs), "failed": failed, "seconds": round(time.monotonic() - began, 1)})


if __name__ == "__main__":
    main(sys.argv[1:])
