"""Report of a profile: rows of the one form in which measurements are reported, and text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ...host.measurement_rows import machine, quantile, row, versions
from ..layer_folding import fold_layers
from ..module_tree import ModuleNode
from ..profiler import Profile, ProfilePhase

LEGEND = (
    "Time and share are measured, a mean over the faster half of the steps; bytes and FLOPs are arithmetic on sizes. "
    "Of the roofline: the least time for what is needed, with weights as the checkpoint stores them, over the time. "
    "Above 100%: out of a cache, or faster than the products that were measured."
)
_PACKAGES = ("motley", "torch", "triton")


def to_json_report(profile: Profile) -> dict[str, Any]:
    """Return the profile as one JSON object, with rows as every benchmark has them."""
    ceiling = profile.ceiling
    figures = {"bandwidth": ceiling.bandwidth, **ceiling.rates}
    return {
        "bench": "profile",
        "machine": machine(),
        "versions": versions(*_PACKAGES),
        "about": dict(profile.about),
        "choices": dict(profile.choices),
        "roofline": {
            "device": ceiling.name,
            **{name: {"value": each.value, "source": each.source, "how": each.how} for name, each in figures.items()},
        },
        "rows": [each for phase in profile.phases for each in _rows(phase, profile)],
        "findings": [{"phase": phase.name, **asdict(each)} for phase in profile.phases for each in phase.findings],
    }


def _rows(phase: ProfilePhase, profile: Profile) -> Iterator[dict[str, Any]]:
    step, workload = fold_layers(phase.step), {"phase": phase.name, **phase.workload}
    yield row("step without instruments", workload, "ms", [1e3 * each for each in phase.plain_s])
    for node, depth, path in _walk(step):
        facts = node.facts
        about = {**workload, "module": path, "depth": depth, "kernel": facts.kernel if facts else ""}
        roofline_ms = [1e3 * node.roofline.seconds] if node.roofline else None
        timed = row(
            "time", about, "ms", [1e3 * each for each in node.samples],
            peer="roofline" if roofline_ms else None, peer_samples=roofline_ms, higher_is_better=False,
        )  # fmt: skip
        timed |= {"value": 1e3 * node.seconds, "ratio": node.reached}
        if node.roofline:
            timed |= {"peer_source": profile.ceiling.source, "bound_by": node.roofline.bound_by}
        if node.spread:
            spread = node.spread
            timed |= {
                "layers": len(spread.layers),
                "fastest": 1e3 * spread.fastest_s,
                "slowest": 1e3 * spread.slowest_s,
            }
        yield timed
        yield row("share", about, "of the step", [node.seconds / step.seconds])
        yield row("bytes", about, "bytes", [node.work.moved]) | {"source": "static"}
        yield row("FLOPs", about, "operations", [node.work.operations]) | {"source": "static"}


def _walk(node: ModuleNode, depth: int = 0, prefix: str = "") -> Iterator[tuple[ModuleNode, int, str]]:
    """Yield (node, depth, path) of all nodes; the path has the names of all nodes above."""
    yield node, depth, prefix + node.name
    for child in node.children:
        yield from _walk(child, depth + 1, f"{prefix}{node.name} > ")


def phase_headline(phase: ProfilePhase) -> str:
    """Return a line such as "decode of 8 at context 512: 21.3 ms (p20 20.9, p80 22.0); 375 tokens/s, 20.8 ms without
    instruments".
    """
    load = phase.workload
    what = (
        f"of {load['prompt_tokens']} tokens"
        if phase.name == "prefill"
        else (f"of {load['batch']} at context {load['context_tokens']}")
    )
    times = phase.step.samples
    spread = f"p20 {_ms(quantile(times, 0.2))}, p80 {_ms(quantile(times, 0.8))}"
    plain = statistics.median(phase.plain_s)
    rate = f"{_number(phase.tokens / plain)} tokens/s, {_ms(plain)} ms without instruments"
    return f"{phase.name} {what}: {_ms(phase.step.seconds)} ms ({spread}); {rate}"


def _ms(seconds: float) -> str:
    return _number(1e3 * seconds)


def _number(value: float) -> str:
    """Return a number as text with three digits, or with all digits of a large one."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def format_amount(value: float) -> str:
    """Return an amount as text with three digits and a prefix: "7.36 M"."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {prefix}"
    return f"{value:.3g}"


def render_text(profile: Profile) -> str:
    about = profile.about
    threads = f", {about['threads']} threads" if "threads" in about else ""
    lines = [
        f"{about['model']}: {about['family']}, {about['layers']} layers, {about['quantization']}; "
        f"{about['activations']} on {about['device']}{threads}",
        f"roofline of {profile.ceiling.name}:",
        *(f"  {each}" for each in _ceiling(profile)),
        *describe_machine_load(),
    ]
    for phase in profile.phases:
        lines += ["", phase_headline(phase), *_table(phase), *_findings(phase)]
    return "\n".join([*lines, "", LEGEND])


def describe_machine_load() -> list[str]:
    """Return a line that warns if this machine is busy with other work; else nothing."""
    now = machine()
    if now["load_average_1min"] <= now["cores"] + 0.5:
        return []
    return [
        f"this machine is busy, {now['load_average_1min']} at work on {now['cores']} cores: times are longer for it"
    ]


def _ceiling(profile: Profile) -> list[str]:
    bandwidth = profile.ceiling.bandwidth
    said = [f"{format_amount(bandwidth.value)}B/s, {bandwidth.source}: {bandwidth.how}"]
    rates = profile.ceiling.rates.items()
    return said + [f"{name} {format_amount(each.value)}FLOP/s, {each.source}: {each.how}" for name, each in rates]


def _table(phase: ProfilePhase) -> list[str]:
    step = fold_layers(phase.step)
    lines: list[tuple[str, ...]] = [
        ("module", "time ms", "share", "", "bytes", "FLOPs", "of roofline", "kernel", "each layer, ms")
    ]
    lines += [_line(node, mark, step.seconds) for node, mark in _drawn(step)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = {0, 3, 7, 8}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _line(node: ModuleNode, mark: str, step_s: float) -> tuple[str, ...]:
    share = node.seconds / step_s
    spread = node.spread
    return (
        f"{mark}{node.name}",
        f"{1e3 * node.seconds:.3f}",
        f"{share:.1%}",
        "█" * round(10 * share),
        format_amount(node.work.moved) if node.work.moved else "",
        format_amount(node.work.operations) if node.work.operations else "",
        "" if node.reached is None else f"{node.reached:.0%}",
        node.facts.kernel if node.facts else "",
        f"{1e3 * spread.fastest_s:.3f} – {1e3 * spread.slowest_s:.3f}" if spread else "",
    )


def _drawn(node: ModuleNode, mark: str = "", below: str = "") -> Iterator[tuple[ModuleNode, str]]:
    """Yield (node, lines of the tree that are drawn before its name)."""
    yield node, mark
    for child in node.children:
        last = child is node.children[-1]
        yield from _drawn(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))


def _findings(phase: ProfilePhase) -> Iterator[str]:
    if not phase.findings:
        yield "no module is far off its siblings, and none far from the roofline for a known cause"
    for found in phase.findings:
        yield f"! {found.text}"
        yield f"  likely cause: {found.cause}"
        if found.chosen:
            yield f"  chosen:       {found.chosen}"
        yield f"  remedy:       {found.remedy}"
