"""Report of a measured service: as rows, as a table and as small charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from motley.replicas.host.measurement_rows import machine, quantile, row, versions

from ..reporting.duration_histogram import DurationHistogram
from ..reporting.text_charts import draw_bars, draw_histogram
from .load_workload import Workload
from .measured_service import MeasuredService
from .request_samples import OK, UNFINISHED, BenchSlo, LoadOutcome, RequestSample, count_codes, samples_in_window
from .sender_factory import grpc_client_name

PACKAGES = ("motley", "ray", "grpcio", "protobuf", "aiohttp", "uvloop", "torch")
BUSY = 0.9  # share of a core; the figures may be limited by a client that uses more
# Seconds. Clients whose p99 of lateness in sending is above this and a tenth of the median TTFT may have limited the
# figures; if their event loops are later than this, the longest times include that.
LATE_S = 0.005
_TAIL = ("p50", "p90", "p99", "mean")

Row = dict[str, Any]


def build_report(
    workload: Workload, service: MeasuredService, outcome: LoadOutcome, slo: BenchSlo, clients: int
) -> dict[str, Any]:
    """Return the report, which is the one object that `--json` prints."""
    return {
        "bench": "serve",
        "engine": "null: computes nothing" if service.null else "real",
        "machine": machine(),
        "versions": versions(*PACKAGES),
        "settings": {
            "target": service.target,
            "model": service.model,
            "clients": clients,
            **workload.to_json(),
            "slo": {name: getattr(slo, name) for name in ("ttft_s", "tpot_s", "e2e_s")},
        },
        "client": client_report(workload, outcome),
        "errors": {code: number for code, number in count_codes(outcome.samples).items() if code != OK},
        "rows": metric_rows(workload, outcome, slo),
        "by_second": by_second(workload, outcome),
        "charts": _charts(workload, outcome),
    }


def client_report(workload: Workload, outcome: LoadOutcome) -> dict[str, Any]:
    """Return how busy the clients were, and whether that limited what they measured."""
    late_s = quantile([sample.sent_s - sample.intended_s for sample in outcome.samples] or [0.0], 0.99)
    ttfts = [sample.ttft_s for sample in outcome.samples if sample.ttft_s is not None]
    reasons = []
    if outcome.busy > BUSY:
        reasons.append(f"a client used {outcome.busy:.0%} of a core: give --clients")
    if late_s > max(LATE_S, 0.1 * quantile(ttfts or [0.0], 0.5)):
        reasons.append(f"requests were sent up to {late_s * 1e3:.1f} ms late: give --clients, or a lower --rate")
    return {
        "by": grpc_client_name() if workload.protocol == "grpc" else "aiohttp",
        "busy": round(outcome.busy, 3),
        "event_loop_late_p99_ms": round(outcome.lag_s * 1e3, 2),
        "sent_late_p99_ms": round(late_s * 1e3, 2),
        "tails_include_client": outcome.lag_s > LATE_S,
        "limited": bool(reasons),
        "why": "; ".join(reasons),
    }


def metric_rows(workload: Workload, outcome: LoadOutcome, slo: BenchSlo) -> list[Row]:
    """One row for each metric that is defined here.

    Latencies are of requests meant to be sent in the window, rates of those that ended in it.
    """
    what = describe_workload(workload)
    window = samples_in_window(outcome.samples, workload.warmup_s, workload.end_s)
    good = [sample for sample in window if sample.code == OK]
    seconds = workload.duration_s
    ended = [s for s in outcome.samples if s.code == OK and workload.warmup_s <= s.end_s < workload.end_s]
    found = [
        row("requests", what, "requests/s", [len(ended) / seconds]),
        row("goodput", what, "requests/s", [sum(map(slo.met_by, ended)) / seconds]),
        row("output", what, "tokens/s", [outcome.tokens / seconds]),
    ]
    if workload.streaming:
        found.append(_messages(what, workload, outcome))
    found += [_latency(name, what, values) for name, values in _latencies(good).items() if values]
    if outcome.gaps.count:
        found.append(_gaps(what, outcome.gaps))
    failed = [sample for sample in outcome.samples if sample.code not in (OK, UNFINISHED)]
    found.append(row("failed", what, "requests", [float(len(failed))]))
    return found


def by_second(workload: Workload, outcome: LoadOutcome) -> list[int]:
    """Return the number of messages (or of whole responses, if they are not streamed) in each second of the window."""
    return [outcome.by_second[second] for second in range(int(workload.duration_s))]


def describe_workload(workload: Workload) -> dict[str, Any]:
    loop = f"closed:{workload.concurrency}" if workload.rate is None else f"poisson:{workload.rate:g}/s"
    kind = "stream" if workload.streaming else "unary"
    lengths = {"prompt": str(workload.prompt_tokens), "output": str(workload.output_tokens)}
    return {"over": workload.protocol, "kind": kind, "loop": loop, **lengths}


def _messages(what: dict[str, Any], workload: Workload, outcome: LoadOutcome) -> Row:
    """Return the row of messages per second: the mean over the window, with p20 to p80 over its seconds."""
    seconds = [float(number) for number in by_second(workload, outcome)] or [0.0]
    mean = outcome.messages / workload.duration_s
    return row("messages", what, "messages/s", seconds) | {"value": mean}


def _latencies(good: Sequence[RequestSample]) -> dict[str, list[float]]:
    pairs: dict[str, list[float | None]] = {
        "ttft": [sample.ttft_s for sample in good],
        "tpot": [sample.tpot_s for sample in good],
        "e2e": [sample.e2e_s for sample in good],
    }
    return {name: [value for value in values if value is not None] for name, values in pairs.items()}


def _latency(name: str, what: dict[str, Any], seconds: Sequence[float]) -> Row:
    times = [each * 1e3 for each in seconds]
    tail = {"p90": quantile(times, 0.9), "p99": quantile(times, 0.99), "mean": sum(times) / len(times)}
    return row(name, what, "ms", times, higher_is_better=False) | tail | {"count": len(times)}


def _gaps(what: dict[str, Any], gaps: DurationHistogram) -> Row:
    shares = {"p20": 0.2, "p50": 0.5, "p80": 0.8, "p90": 0.9, "p99": 0.99}
    found = {name: gaps.quantile(share) * 1e3 for name, share in shares.items()}
    tail = {"value": found["p50"], "mean": gaps.mean * 1e3, "count": gaps.count}
    return row("itl", what, "ms", [found["p50"]], higher_is_better=False) | found | tail


def text(report: dict[str, Any]) -> str:
    """Return the report as text for people: rates, latencies, charts of one line, and warnings."""
    lines = [_head(report)]
    lines += [
        f"  {each['metric']:<9}{each['value']:>10,.1f} {each['unit']}" for each in report["rows"] if "p99" not in each
    ]
    lines.append(f"  {'ms':<9}" + "".join(f"{name:>10}" for name in _TAIL))
    for each in report["rows"]:
        if "p99" in each:
            lines.append(f"  {each['metric']:<9}" + "".join(f"{each[name]:>10,.2f}" for name in _TAIL))
    lines += [f"  {name:<20}{chart}" for name, chart in report["charts"].items()]
    if report["errors"]:
        lines.append("  failed: " + ", ".join(f"{number} × {code}" for code, number in report["errors"].items()))
    if report["client"]["limited"]:
        lines.append(f"  LIMITED BY THE CLIENT: {report['client']['why']}")
    if report["client"]["tails_include_client"]:
        lines.append(
            f"  the client's event loop was up to {report['client']['event_loop_late_p99_ms']:.0f} ms late "
            "(99 times of 100): the longest times include that"
        )
    return "\n".join(lines)


def _head(report: dict[str, Any]) -> str:
    settings = report["settings"]
    loop = f"{settings['concurrency']} at a time" if settings["rate"] is None else f"Poisson, {settings['rate']:g}/s"
    kind = "streams" if settings["streaming"] else "unary"
    null = "" if report["engine"] == "real" else ", null engine: nothing is computed"
    return f"{settings['model']} at {settings['target']}: {kind} over {settings['protocol']}, {loop}{null}"


def _charts(workload: Workload, outcome: LoadOutcome) -> dict[str, str]:
    good = samples_in_window(
        [sample for sample in outcome.samples if sample.code == OK], workload.warmup_s, workload.end_s
    )
    found = {f"{name}, ms": values for name, values in _latencies(good).items() if values and name != "tpot"}
    charts = {name: draw_histogram([max(each, 1e-6) * 1e3 for each in values]) for name, values in found.items()}
    return charts | {"by second": draw_bars(by_second(workload, outcome))}
