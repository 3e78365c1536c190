"""Static tables held to the kernels as they are: what a table says of a config is compared with what it compiles to.

Registers and shared memory, by the Triton that the table names, and the prediction, which follows from these, the inner
loop and the roofline. So a change of a kernel, or of how predictions are made, is not left without tables made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .aot import Compiled
from .compiling import Failed, Job
from .operation import Launch, Operation
from .precision import PrecisionPolicy, policy_of
from .registry import operation
from .static import Candidate, device_of, facts, predict
from .tuning import Table, folder_of, read

__all__ = ["stale", "tabled"]


def tabled(each: Operation, policy: PrecisionPolicy) -> Iterator[Job]:
    """Every entry of a capability's own static table, to be compared."""
    table = _table(each.name, policy)
    for shape, entry in () if table is None else table.entries.items():
        yield Job(each.name, policy.capability.version, shape, entry.config)


def stale(job: Job, results: Sequence[tuple[Launch, Compiled | Failed]]) -> str:
    """What its capability's static table says otherwise of that job; empty where nothing, or where it says nothing.

    Nor is anything said by a Triton other than the table's, whose kernels are others.
    """
    import triton

    policy = policy_of(*job.capability)
    table = _table(job.op, policy)
    entry = None if table is None else table.entries.get(job.shape)
    if table is None or entry is None or entry.config != job.config or table.about.get("triton") != triton.__version__:
        return ""
    made = tuple((launch, result) for launch, result in results if isinstance(result, Compiled))
    if len(made) < len(results):
        return ""  # it did not compile: that is its fault
    candidate = Candidate(job.config, made)
    now = facts(candidate, predict(device_of(policy), policy, operation(job.op), job.shape, candidate))
    if now == entry.facts:
        return ""
    where = f"tuned/{folder_of(policy.capability)}/{job.op}.json"
    return f"{where} has {dict(entry.facts)} of {job.shape.key}, and it is {now}: motley kernels tune --static"


def _table(op: str, policy: PrecisionPolicy) -> Table | None:
    table = read(folder_of(policy.capability), op)
    return table if table is not None and table.source == "static" else None
