"""Idle time of a GPU between the steps of a decode, read from a profiler's trace."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_REHEARSED = ("cpu_op",)  # without a GPU the trace has nothing else
_SHOWN_STEPS = 4
_MAX_EVENTS = 5_000  # maximum number of a trace's events that are kept
_COLOURS = {"kernel": "#3b6ea5", "gpu_memcpy": "#d98e04", "gpu_memset": "#7a9e4b"}


def on_device(trace: Mapping[str, Any], *, real: bool = True) -> list[Event]:
    """Return the device's events, in order, of a trace as torch's profiler exports it.

    real  False: return the CPU's events instead, for a rehearsal
    """
    kinds = _DEVICE if real else _REHEARSED
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") in kinds]
    return sorted(events, key=lambda each: float(each["ts"]))


def idle_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the shares of the time from the start of the first event to the end of the last in which the device was
    idle.

    between_steps  idle share in gaps between different launches, while the device waited for the host. All work of a
                   CUDA graph is one launch; a copy is one, and so is each kernel of a step that runs without a graph
    within_graphs  idle share in gaps between the kernels and copies of one graph
    steps          number of graphs launched

    Raises ValueError if the trace has no event of a device.
    """
    if not events:
        raise ValueError("the trace has no kernel: the profiler sees nothing of this device")
    begin = float(events[0]["ts"])
    last, end = events[0], begin + float(events[0]["dur"])
    between = within = 0.0
    for event in events[1:]:
        at = float(event["ts"])
        if (gap := at - end) > 0:
            if _of_one_graph(last, event):
                within += gap
            else:
                between += gap
        if at + float(event["dur"]) >= end:
            last, end = event, at + float(event["dur"])
    span = end - begin
    return {
        "span_us": span,
        "between_steps": between / span,
        "within_graphs": within / span,
        "busy": 1 - (between + within) / span,
        "steps": len(_graphs(events)),
        "events": len(events),
    }


def write_trimmed(events: Sequence[Event], path: Path) -> None:
    """Write a gzipped Chrome trace of the device alone, with at most `_MAX_EVENTS` events from the middle."""
    first = max(0, (len(events) - _MAX_EVENTS) // 2)
    trimmed = events[first : first + _MAX_EVENTS]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*trimmed]}).encode(), mtime=0))


def figure(events: Sequence[Event], title: str) -> str:
    """Return an SVG image of what the device did in a few steps from the middle of the trace, along one time axis."""
    shown = _some_steps(events)
    begin = float(shown[0]["ts"])
    end = max(float(each["ts"]) + float(each["dur"]) for each in shown)
    width, scale = 1200, 1180 / max(end - begin, 1e-3)
    bars = [
        f'<rect x="{10 + scale * (float(each["ts"]) - begin):.2f}" y="34" height="40" '
        f'width="{max(0.1, scale * float(each["dur"])):.2f}" fill="{_COLOURS.get(each["cat"], "gray")}">'
        f"<title>{escape(str(each['name'])[:80])}: {float(each['dur']):.1f} us</title></rect>"
        for each in shown
    ]
    said = f"{escape(title)}; {end - begin:.0f} us; blue kernels, orange copies, white: nothing"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="84" font-family="sans-serif">'
    text = f'<text x="10" y="22" font-size="13">{said}</text>'
    return "\n".join([head, f'<rect width="{width}" height="84" fill="white"/>', text, *bars, "</svg>"]) + "\n"


def _launch(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _of_one_graph(one: Event, other: Event) -> bool:
    return _launch(one) is not None and _launch(one) == _launch(other)


def _graphs(events: Sequence[Event]) -> list[Any]:
    """Return the ids of launches that have several kernels, in order."""
    count = Counter(_launch(each) for each in events if each["cat"] == "kernel")
    return [launch for launch, kernels in count.items() if launch is not None and kernels > 1]


def _some_steps(events: Sequence[Event]) -> Sequence[Event]:
    graphs = _graphs(events)
    if len(graphs) <= _SHOWN_STEPS:
        return events[:_MAX_EVENTS]
    middle = len(graphs) // 2
    first, last = graphs[middle - _SHOWN_STEPS // 2], graphs[middle + _SHOWN_STEPS // 2]
    at = [_launch(each) for each in events]
    return events[at.index(first) : at.index(last)]
