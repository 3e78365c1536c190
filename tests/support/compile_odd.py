"""Compiles what would be launched for shapes of no table, lines "CC OP SHAPE" on stdin; prints what is at fault.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

from __future__ import annotations

import sys

from motley.kernels.compiler.compile_pool import CompileFailure, CompileJob, compile_all
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.config_tables import choose_config
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.registry import find_operation
from motley.kernels.tuning.static_prediction import find_fault


def job_of(line: str) -> CompileJob:
    cc, op, key = line.split(maxsplit=2)
    version: tuple[int, int] = divmod(int(cc), 10)
    shape = ProblemShape.parse(key)
    return CompileJob(op, version, shape, choose_config(find_operation(op), policy_of(*version), shape).config)


if __name__ == "__main__":
    for job, results in compile_all(map(job_of, sys.stdin), workers=2).items():
        for launch, found in results:
            wrong = (
                found.error
                if isinstance(found, CompileFailure)
                else find_fault(policy_of(*job.capability), launch, found)
            )
            if wrong:
                print(job.capability, job.op, job.shape.key, job.config.to_json(), wrong)
