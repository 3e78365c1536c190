"""Report of a plan, as a JSON object and as an SVG chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from ....replicas.simulated.simulated_device import find_table_device
from .plan_search import PlanRequest, SimulatedMix, format_mix

_WIDE, _HIGH, _LEFT, _TOP = 640, 300, 60, 50


def plan_report(
    request: PlanRequest, chosen: SimulatedMix | None, tried: Sequence[SimulatedMix], *, prices: str
) -> dict[str, Any]:
    """Return the report as a JSON object.

    prices  where the prices come from
    """
    trace = request.trace
    every, slo = trace.arrivals, request.slo
    return {
        "plan": "gpus",
        "source": "simulated",
        "trace": {
            "format": trace.format, "requests": len(every), "left_out": trace.empty, "seconds": trace.seconds,
            "rate": trace.rate, "prompt_tokens": sum(each.prompt_tokens for each in every) / len(every),
            "output_tokens": sum(each.output_tokens for each in every) / len(every),
        },
        "settings": {
            "model": request.model.name, "ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "share": request.share,
            "seed": request.seed, "prices": prices,
            "gpus": [
                {
                    "gpu": offer.gpu, "device": find_table_device(offer.gpu).name, "price_per_hour": offer.price,
                    "attained": asdict(offer.attained),
                }
                for offer in request.offers
            ],
        },
        "chosen": None if chosen is None else format_mix(request.offers, chosen.mix),
        "rows": [
            {
                "mix": format_mix(request.offers, each.mix), "cost_per_hour": each.cost, "share": each.share,
                "enough": each.share >= request.share, "chosen": each is chosen, **each.measured.to_json(),
            }
            for each in tried
        ],
    }  # fmt: skip


def rates_source(found: Mapping[str, Any]) -> str:
    """Return a note on a report's simulated GPUs: for which of them rates were measured, and for which assumed."""
    measured = [each["gpu"] for each in found["settings"]["gpus"] if each["attained"]["measured"]]
    if not measured:
        return "rates: assumed"
    others = ", others assumed" if len(measured) < len(found["settings"]["gpus"]) else ""
    return f"rates: {', '.join(measured)} as measured{others}"


def plan_svg(found: Mapping[str, Any]) -> str:
    """Return a chart of every simulated mix: its cost, and the share of requests that it served in time."""
    rows, min_share = found["rows"], found["settings"]["share"]
    dearest = max((row["cost_per_hour"] for row in rows), default=1.0) * 1.1 or 1.0

    def x(cost: float) -> float:
        return _LEFT + cost / dearest * _WIDE

    def y(share: float) -> float:
        return _TOP + (1 - share) * _HIGH

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDE + 160}" height="{_TOP + _HIGH + 60}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">Requests in time over cost per hour (simulated, virtual time; '
        f"{escape(rates_source(found))}; prices: {escape(found['settings']['prices'])})</text>",
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        )
    parts.append(
        f'<line x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{y(min_share):.1f}" y2="{y(min_share):.1f}" stroke="#c2410c" '
        f'stroke-dasharray="4"/><text x="{_LEFT + _WIDE + 4}" y="{y(min_share) + 4:.1f}">wanted: {min_share:.1%}</text>'
    )
    for tick in range(5):
        cost = dearest * tick / 4
        parts.append(f'<text x="{x(cost):.1f}" y="{_TOP + _HIGH + 16}" text-anchor="middle">{cost:.2f}</text>')
    for row in rows:
        at = f'cx="{x(row["cost_per_hour"]):.1f}" cy="{y(row["share"]):.1f}"'
        colour, radius = ("#c2410c", 6) if row["chosen"] else ("#0369a1" if row["enough"] else "#94a3b8", 4)
        parts.append(f'<circle {at} r="{radius}" fill="{colour}"><title>{escape(row["mix"])}</title></circle>')
        if row["chosen"]:
            label = f'x="{x(row["cost_per_hour"]) + 8:.1f}" y="{y(row["share"]) + 16:.1f}"'
            parts.append(f'<text {label} font-weight="bold">{escape(row["mix"])}</text>')
    return "\n".join([*parts, "</svg>", ""])
