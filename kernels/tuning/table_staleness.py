"""Check of static tables against the current kernels: a table's facts about a config must match what it compiles to.

These are registers and shared memory, by the Triton that the table names, and the prediction, which follows from them,
from the inner loop and from the roofline. So when a kernel changes, or the way predictions are made, its tables cannot
be forgotten.
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


def tabled_jobs(each: KernelOperation, policy: PrecisionPolicy) -> Iterator[CompileJob]:
    """Yield a job for every entry of a capability's own static table, to be compared."""
    table = _table(each.name, policy)
    for shape, entry in () if table is None else table.entries.items():
        yield CompileJob(each.name, policy.capability.version, shape, entry.config)


def describe_staleness(job: CompileJob, results: Sequence[tuple[KernelLaunch, CompiledKernel | CompileFailure]]) -> str:
    """Return how a job's entry in its capability's static table differs from the compiled kernels; empty if it does
    not.

    It is also empty if there is no entry, or if the table was made by another version of Triton, whose kernels differ.
    """
    import triton

    policy = policy_of(*job.capability)
    table = _table(job.op, policy)
    entry = None if table is None else table.entries.get(job.shape)
    if table is None or entry is None or entry.config != job.config or table.about.get("triton") != triton.__version__:
        return ""
    made = tuple((launch, result) for launch, result in results if isinstance(result, CompiledKernel))
    if len(made) < len(results):
        return ""  # a kernel that did not compile is reported as a fault already
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
