"""Targets for the kernels on a GPU, and how many of them the rows of a run reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

# Bytes of int4 weights with scales and zero points: reached by gate-and-up and by down from 7 billion parameters on.
LARGE_BYTES = 30e6


@dataclass(frozen=True, slots=True)
class KernelTarget:
    """Target for some rows of the kernel benchmark.

    what      the target in words
    of        whether the target is about a row
    value     figure of such a row; None if it has none, as a ratio without a peer
    minimum   smallest figure that each of these rows must reach
    """

    what: str
    of: Callable[[Row], bool]
    value: Callable[[Row], float | None]
    minimum: float


def _int4(row: Row, tokens: range, *, large: bool) -> bool:
    workload = row["workload"]
    if not row["metric"].startswith("w4a16") or workload["m"] not in tokens:
        return False
    weights = workload["n"] * workload["k"]
    return (weights / 2 + 3 * weights / workload["group"] >= LARGE_BYTES) is large


def _bandwidth(row: Row) -> float:
    return float(row["of_memory_bandwidth"])


def _ratio(row: Row) -> float | None:
    return None if row["ratio"] is None else float(row["ratio"])


TARGETS = (
    KernelTarget(
        "int4 linear at 1 to 16 tokens, 30 MB of weights and more: share of the memory bandwidth measured",
        lambda row: _int4(row, range(1, 17), large=True), _bandwidth, 0.65,
    ),
    KernelTarget(
        "int4 linear at 1 to 16 tokens, smaller weights: share of the memory bandwidth measured",
        lambda row: _int4(row, range(1, 17), large=False), _bandwidth, 0.35,
    ),
    KernelTarget(
        "int4 linear at 1 token, 30 MB of weights and more: times torch.matmul",
        lambda row: _int4(row, range(1, 2), large=True) and str(row["peer"]).startswith("torch.matmul"), _ratio, 3.0,
    ),
    KernelTarget(
        "decode attention, context of 2,048 and more, batch of 8 and more: share of the memory bandwidth measured",
        lambda row: row["metric"] == "attention_decode" and row["workload"]["context"] >= 2048
        and row["workload"]["batch"] >= 8, _bandwidth, 0.7,
    ),
)  # fmt: skip


def is_judged(metric: str, workload: Mapping[str, Any]) -> bool:
    """Return whether any target is about a case of the kernel benchmark, given its metric and workload."""
    row = {"metric": metric, "workload": workload, "peer": "torch.matmul"}
    return any(target.of(row) for target in TARGETS)


def rank(metric: str, workload: Mapping[str, Any], model: bool) -> int:
    """Return the priority of a case: 0 comes first.

    0  cases that a target is about, of a layer that the model has, and that are large, of one token, or attention
    1  other cases that a target is about
    2  all other cases

    model  whether the model that the goals are about has such a layer
    """
    if not is_judged(metric, workload):
        return 2
    large = metric == "attention_decode" or TARGETS[0].of({"metric": metric, "workload": workload, "peer": ""})
    return 0 if model and (large or workload.get("m") == 1) else 1


def judge(rows: Sequence[Row], planned: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each target the number of its cases, how many reach it, the lowest figure and its case.

    A target is met only if all planned cases were measured and reach it.

    planned  metric and workload of every case there is
    """
    cases = [{"metric": metric, "workload": workload, "peer": "torch.matmul"} for metric, workload in planned]
    found = []
    for target in TARGETS:
        values = {  # a case has a row for each peer
            row["workload"]["case"]: value
            for row in rows
            if target.of(row) and (value := target.value(row)) is not None
        }
        number = sum(map(target.of, cases))
        worst = min(values, key=lambda case: values[case], default=None)
        lowest = None if worst is None else values[worst]
        found.append(
            {
                "target": target.what,
                "at_least": target.minimum,
                "cases": len(values),
                "planned": number,
                "reached": sum(value >= target.minimum for value in values.values()),
                "least": lowest,
                "worst_case": worst,
                "met": lowest is not None and lowest >= target.minimum and len(values) == number,
            }
        )
    return found


def line(judged: Mapping[str, Any]) -> str:
    """Return a line of text about a judged target, for people to read."""
    if not judged["cases"]:
        return f"not measured: {judged['target']}, at least {judged['at_least']:g}"
    met = "met" if judged["met"] else "MISSED" if judged["least"] < judged["at_least"] else "met so far"
    return (
        f"{met}: {judged['target']}, at least {judged['at_least']:g}: {judged['reached']} of {judged['cases']} cases; "
        f"{judged['planned']} were planned; the least {judged['least']:.2f}, {judged['worst_case']}"
    )
