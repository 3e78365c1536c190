"""Static tables held to the kernels as they are: what a table says of a config is compared with what it compiles to.

Registers and shared memory, by the Triton that the table names, and the prediction, which follows from these, the inner
loop and the roofline. So a change of a kernel, or of how predictions are made, is not left without tables made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..compiler.aot import CompiledKernel
from ..compiler.compile_pool import CompileFailure, CompileJob
from ..device.precision import PrecisionPolicy, policy_of
from ..launch.config_tables import ConfigTable, read_table, table_folder
from ..launch.kernel_operation import KernelLaunch, KernelOperation
from ..registry import find_operation
from .static_prediction import ConfigCandidate, predict_seconds, reference_device, static_facts

__all__ = ["describe_staleness", "tabled_jobs"]


def tabled_jobs(each: KernelOperation, policy: PrecisionPolicy) -> Iterator[CompileJob]:
    """Every entry of a capability's own static table, to be compared."""
    table = _table(each.name, policy)
    for shape, entry in () if table is None else table.entries.items():
        yield CompileJob(each.name, policy.capability.version, shape, entry.config)


def describe_staleness(job: CompileJob, results: Sequence[tuple[KernelLaunch, CompiledKernel | CompileFailure]]) -> str:
    """What its capability's static table says otherwise of that job; empty where nothing, or where it says nothing.

    Nor is anything said by a Triton other than the table's, whose kernels are others.
    """
    import triton

    policy = policy_of(*job.capability)
    table = _table(job.op, policy)
    entry = None if table is None else table.entries.get(job.shape)
    if table is None or entry is None or entry.config != job.config or table.about.get("triton") != triton.__version__:
        return ""
    made = tuple((launch, result) for launch, result in results if isinstance(result, CompiledKernel))
    if len(made) < len(results):
        return ""  # it did not compile: that is its fault
    candidate = ConfigCandidate(job.config, made)
    now = static_facts(
        candidate, predict_seconds(reference_device(policy), policy, find_operation(job.op), job.shape, candidate)
    )
    if now == entry.facts:
        return ""
    where = f"tuned/{table_folder(policy.capability)}/{job.op}.json"
    return f"{where} has {dict(entry.facts)} of {job.shape.key}, and it is {now}: motley kernels tune --static"


def _table(op: str, policy: PrecisionPolicy) -> ConfigTable | None:
    table = read_table(table_folder(policy.capability), op)
    return table if table is not None and table.source == "static" else None
