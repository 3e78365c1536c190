"""Compiles what would be launched for shapes of no table, lines "CC OP SHAPE" on stdin; prints what is at fault.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

from __future__ import annotations

import sys

from motley.kernels.compiling import Failed, Job, compile_all
from motley.kernels.operation import Shape
from motley.kernels.precision import policy_of
from motley.kernels.registry import operation
from motley.kernels.static import fault
from motley.kernels.tuning import choose


def job_of(line: str) -> Job:
    cc, op, key = line.split(maxsplit=2)
    version: tuple[int, int] = divmod(int(cc), 10)
    shape = Shape.parse(key)
    return Job(op, version, shape, choose(operation(op), policy_of(*version), shape).config)


if __name__ == "__main__":
    for job, results in compile_all(map(job_of, sys.stdin), workers=2).items():
        for launch, found in results:
            wrong = found.error if isinstance(found, Failed) else fault(policy_of(*job.capability), launch, found)
            if wrong:
                print(job.capability, job.op, job.shape.key, job.config.to_json(), wrong)
