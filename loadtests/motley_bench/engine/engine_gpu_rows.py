"""Results of the engine benchmark on a GPU as rows of a report, and the goals that they are judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.replicas.host.measurement_rows import row

Found = Mapping[str, Any]
Row = Mapping[str, Any]


def rows_of(found: Sequence[Found], sides: Mapping[str, Mapping[str, Any]], *, real: bool) -> list[dict[str, Any]]:
    """Return the rows of a report for Motley's results, each beside a peer's where there is one.

    found, sides  attributes of `EngineMeasurement`
    real          False for a rehearsal: its rows are marked as such, and are no measurement
    """
    rows: list[dict[str, Any]] = []
    for each in found:
        if each["side"] != "motley" or "error" in each or "skipped" in each:
            continue
        if each["what"] == "streams":
            rows += _streams(each, found)
        else:
            rows += _idle(each) if each["what"] == "idle" else _drafted(each)
    for name, about in sides.items():
        shape, _, side = name.partition(" ")
        if side == "motley":
            workload, theirs = {"shape": shape}, sides.get(f"{shape} transformers")
            samples = [float(theirs["bytes_per_token"])] if theirs else None
            peer = "transformers bf16" if theirs else None
            rows.append(
                row("weights read per token", workload, "bytes", [float(about["bytes_per_token"])], peer=peer,
                    peer_samples=samples, higher_is_better=False)
            )  # fmt: skip
    return rows if real else [each | {"source": "rehearsal"} for each in rows]


def _streams(ours: Found, found: Sequence[Found]) -> list[dict[str, Any]]:
    batch = ours["batch"]
    workload = {name: ours[name] for name in ("shape", "batch", "prompt_tokens", "output_tokens")}
    if not ours["complete"]:
        workload["cut_off"] = True
    rows: list[dict[str, Any]] = []
    if (rate := ours["decode_tokens_per_s"]) is not None:
        for peer, samples in _peers(ours, found):
            rows.append(row("decode", workload, "tokens/s", [rate], peer=peer, peer_samples=samples))
        if (roofline_s := ours["roofline_step_s"]) is not None:
            rows.append(row("decode step, share of the roofline", workload, "", [roofline_s * rate / batch]))
    if ours["output_tokens_per_s"] is not None:
        rows.append(row("output of all streams", workload, "tokens/s", [ours["output_tokens_per_s"]]))
        seconds = _prefill(ours, found) if batch == 1 else None
        rows.append(
            row("time to first token", workload, "s", [ours["ttft_s"]], peer="transformers bf16" if seconds else None,
                peer_samples=seconds, higher_is_better=False)
        )  # fmt: skip
    return rows


def _drafted(ours: Found) -> list[dict[str, Any]]:
    """Return the rows of streams with drafts. They have no peer; the same streams without drafts have rows of their
    own.
    """
    workload = {name: ours[name] for name in ("shape", "batch", "prompt_tokens", "output_tokens", "drafts")}
    if not ours["complete"]:
        workload["cut_off"] = True
    rows = []
    if ours["decode_tokens_per_s"] is not None:
        rows.append(row("decode with drafts", workload, "tokens/s", [ours["decode_tokens_per_s"]]))
    if ours["drafted"]:
        rows.append(row("drafts accepted", workload, "of those tried", [ours["accepted"] / ours["drafted"]]))
    if ours["tokens_per_turn"] is not None:
        rows.append(row("tokens per step", workload, "of each sequence", [ours["tokens_per_turn"]]))
    return rows


def _peers(ours: Found, found: Sequence[Found]) -> list[tuple[str | None, list[float] | None]]:
    """Return each peer variant's name and decode rates (tokens/s) at the shape, batch and lengths of `ours`."""
    rates: list[tuple[str | None, list[float] | None]] = [
        (
            f"transformers bf16, static cache, torch SDPA, {each['variant']}",
            [ours["batch"] / each_s for each_s in each["step_s"]],
        )
        for each in found
        if _beside(ours, each) and each.get("step_s")
    ]
    return rates or [(None, None)]


def _prefill(ours: Found, found: Sequence[Found]) -> list[float] | None:
    return next(
        (each["seconds"] for each in found if _beside(ours, each) and each.get("variant") == "prefill"), None
    )  # fmt: skip


def _beside(ours: Found, other: Found) -> bool:
    same = ("shape", "batch", "prompt_tokens", "output_tokens")
    return other["side"] != "motley" and all(ours[name] == other.get(name) for name in same)


def _idle(each: Found) -> list[dict[str, Any]]:
    workload = {"shape": each["shape"], "batch": each["batch"]}
    return [
        row("GPU idle between steps", workload, "of the time", [each["between_steps"]]),
        row("GPU idle within graphs", workload, "of the time", [each["within_graphs"]]),
    ]


@dataclass(frozen=True, slots=True)
class EngineGoal:
    """Goal of the engine benchmark.

    what     the goal in words
    of       returns a row's figure, or None if the goal is not about that row
    reached  whether a figure reaches the goal
    best     True: of several figures the best must reach the goal; False: all must
    instead  substitute that counts if no row has a figure: how to get its figure, and its name, which is reported
    """

    what: str
    of: Callable[[Row], float | None]
    reached: Callable[[float], bool]
    best: bool = False
    instead: tuple[Callable[[Row], float | None], str] | None = None


def _figure(metric: str, field: str = "value", peer: str = "", **workload: Any) -> Callable[[Row], float | None]:
    def of(row: Row) -> float | None:
        fits = row["metric"] == metric and workload.items() <= row["workload"].items()
        fits = fits and peer in (row["peer"] or "")
        if not fits or row["workload"].get("cut_off") or row[field] is None:
            return None
        return float(row[field])

    return of


_SEVEN: dict[str, Any] = {"shape": "qwen2.5-7b", "batch": 1}
GOALS = (
    EngineGoal("qwen2.5-7b, decode at batch 1: at least 400 tokens/s", _figure("decode", **_SEVEN),
    lambda it: it >= 400), EngineGoal(
        "the same: at least 8 times transformers bf16, compiled",
        _figure("decode", "ratio", ", compiled", **_SEVEN), lambda it: it >= 8,
        instead=(_figure("decode", "ratio", ", as it comes", **_SEVEN), "transformers as it comes, not compiled"),
    ),
    EngineGoal(
        "qwen2.5-7b, GPU idle between steps at batch 1: below 3%",
        _figure("GPU idle between steps", **_SEVEN), lambda it: it < 0.03,
    ),
    EngineGoal(
        "qwen2.5-7b, GPU idle between steps at batch 64: below 3%",
        _figure("GPU idle between steps", shape="qwen2.5-7b", batch=64), lambda it: it < 0.03,
    ),
    EngineGoal(
        "llama-3-8b, 1000/1000: at least 8,000 output tokens/s in all",
        _figure("output of all streams", shape="llama-3-8b", prompt_tokens=1000, output_tokens=1000),
        lambda it: it >= 8000, best=True,
    ),
)  # fmt: skip


def judge_goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each goal its figures and whether it is met.

    met     None if nothing was measured; results that were cut off, and those of a rehearsal, do not count
    beside  name of the substitute that the figures belong to, where the goal's own figures are missing
    """
    measured = [each for each in rows if each["source"] == "measured"]
    judged = []
    for goal in GOALS:
        values, beside = _values(goal.of, measured), {}
        if not values and goal.instead is not None and (values := _values(goal.instead[0], measured)):
            beside = {"beside": goal.instead[1]}
        reached = list(map(goal.reached, values))
        met = (any if goal.best else all)(reached) if values else None
        judged.append({"goal": goal.what, "values": values, "met": met, **beside})
    return judged


def _values(of: Callable[[Row], float | None], rows: Iterable[Row]) -> list[float]:
    return [value for each in rows if (value := of(each)) is not None]


def goal_line(judged: Mapping[str, Any]) -> str:
    """Return a line of text about a judged goal, for people to read."""
    if judged["met"] is None:
        return f"not measured: {judged['goal']}"
    values = ", ".join(f"{value:.4g}" for value in judged["values"])
    beside = f", beside {judged['beside']}" if "beside" in judged else ""
    return f"{'met' if judged['met'] else 'MISSED'}{beside}: {judged['goal']}: {values}"
