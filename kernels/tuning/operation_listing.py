"""Listing of the op table for people: the operators that a capability uses, and the sources of their configs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..device.precision import PrecisionPolicy, policy_of
from ..launch.config_tables import DeviceIdentity, choose_config
from ..launch.kernel_operation import KernelOperation
from ..registry import OPERATIONS


@dataclass(frozen=True, slots=True)
class OperationListing:
    """Line of the listing: one operator on one capability.

    refused  why the capability does not use the operator, or empty
    sources  number of shapes by source of their config
    """

    capability: str
    op: str
    refused: str
    sources: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.capability:5} {self.op:20} " + (f"not used: {self.refused}" if self.refused else self.sources)


def list_operations(capabilities: Iterable[tuple[int, int]]) -> list[OperationListing]:
    return [row for each in capabilities for row in list_operations_for(policy_of(*each))]


def list_operations_for(policy: PrecisionPolicy, device: DeviceIdentity | None = None) -> list[OperationListing]:
    rows = []
    for operation in OPERATIONS:
        refused = operation.refusal(policy)
        shapes = () if refused else operation.shapes(policy)
        found = [choose_config(operation, policy, shape, device).source for shape in shapes]
        counts = {source: found.count(source) for source in dict.fromkeys(found)}
        sources = ", ".join(f"{count} shapes {source}" for source, count in counts.items())
        rows.append(OperationListing(str(policy.capability), operation.name, refused, sources))
    return rows


def operations_by_rows(
    kernel_for: Callable[[int], tuple[KernelOperation, str]], max_rows: int = 2048
) -> Iterator[tuple[int, int, str, str]]:
    """Yield (first, last, operator, reason) for each range of rows of a layer that one operator serves."""
    first, (current, why) = 1, kernel_for(1)
    for rows in range(2, max_rows + 1):
        operation, reason = kernel_for(rows)
        if operation is not current:
            yield first, rows - 1, current.name, why
            first, current, why = rows, operation, reason
    yield first, max_rows, current.name, why
